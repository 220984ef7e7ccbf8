"""A run as a baseline: the winners' code kept in it, read back to be timed again; moved forward.

Beside the cubins of a problem's winner lies `<problem>.<kernel>.json`: its config, how the cubins
are launched, and their SHA-256. So old code can be run as it was when kernels and declarations have
changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from attnsweep.build.candidate import Build
from attnsweep.choose.ranking import rank, winners
from attnsweep.errors import SpecError, StoreError
from attnsweep.family.declare import Value
from attnsweep.problem import Problem
from attnsweep.spec.load import load_spec
from attnsweep.store.run import CUBINS, LOCK, SPEC, TRIALS, Run, Store, being_written, open_run
from attnsweep.trial import Plan, Trial

_AGAIN = "record it anew: attnsweep run SPEC --fresh, then attnsweep accept"


class _Code(BaseModel):
    """What lies beside the cubins. Paths in the plan are names in the same directory."""

    model_config = ConfigDict(frozen=True)

    config: dict[str, Value]
    digests: dict[str, str]
    plan: Plan


_PLAN: TypeAdapter[Plan] = TypeAdapter(Plan)


def _name(problem: Problem, kernel: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", problem.label.lower()).strip("-")
    return f"{slug}.{kernel}"


def keep_code(store: Store, build: Build) -> None:
    """Copy a winner's cubins into its run, and write how they are launched."""
    name = _name(build.problem, build.kernel.name)
    digests = {}
    for stage, cubin in build.cubins().items():
        digests[f"{name}.{stage}.cubin"] = cubin.digest
        store.keep_cubin(cubin.path, f"{name}.{stage}.cubin")
    plan = build.plan(build.problem)
    stages = tuple(replace(s, cubin=f"{name}.{s.name}.cubin") for s in plan.stages)
    code = _Code(config=dict(build.config), digests=digests, plan=replace(plan, stages=stages))
    store.keep(f"{name}.json", code.model_dump_json(indent=1).encode() + b"\n")


def read_code(of_run: Path, winner: Trial) -> Plan:
    """How a winner was launched, ready to load. Raises StoreError if its code is not all there.

    of_run: the run's directory.
    """
    name = _name(winner.problem, winner.kernel)
    directory = of_run / CUBINS
    path = directory / f"{name}.json"
    try:
        code = _Code.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        kept = any(directory.glob(f"{name}.*.cubin"))
        what = "its launches are not" if kept else "the winner's machine code is not"
        raise StoreError(f"{what} in the run", where=str(path), hint=_AGAIN) from error
    except OSError as error:
        raise StoreError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        what = f"not the launches of a winner: {place}: {first['msg']}"
        raise StoreError(what, where=str(path), hint=_AGAIN) from error
    if code.config != dict(winner.config) or code.plan.problem != winner.problem:
        what = "the code kept is not that of the run's winner"
        raise StoreError(what, where=str(path), hint=_AGAIN)
    for stage in code.plan.stages:
        _verify(directory, stage.cubin, code.digests)
    stages = tuple(replace(s, cubin=str(directory / s.cubin)) for s in code.plan.stages)
    return replace(code.plan, stages=stages)


def _verify(directory: Path, name: str, digests: Mapping[str, str]) -> None:
    path = directory / name
    if Path(name).name != name or name not in digests:
        raise StoreError(f"names an odd cubin, {name!r}", where=str(directory), hint=_AGAIN)
    try:
        digest = _digest(path)
    except OSError as error:
        what = f"the cubin cannot be read: {error.strerror}"
        raise StoreError(what, where=str(path), hint=_AGAIN) from error
    if digest != digests[name]:
        raise StoreError("the cubin is damaged: another SHA-256", where=str(path), hint=_AGAIN)


def _digest(path: str | Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def same_code(one: Plan, other: Plan) -> bool:
    """Whether two plans launch the same machine code in the same way. Raises OSError."""

    def known_by_content(plan: Plan) -> bytes:
        digests = {stage.cubin: _digest(stage.cubin) for stage in plan.stages}
        stages = tuple(replace(stage, cubin=digests[stage.cubin]) for stage in plan.stages)
        return _PLAN.dump_json(replace(plan, stages=stages))

    return known_by_content(one) == known_by_content(other)


def accept(run: Run, baseline: Path, *, force: bool = False) -> list[str]:
    """Copy a run over `baseline`, or there if there is none yet. Returns what force overrode.

    The copy is made beside it and takes its place by renaming: a reader sees the old one or the
    new one, whole, or for the moment between two renames none. Raises StoreError, and nothing has
    changed, if something speaks against it and force is not set; if `baseline` is no run; if the
    run is still being written; or if it cannot be copied.
    """
    source, target = run.directory.resolve(), baseline.resolve()
    where = str(baseline)
    if source == target or source in target.parents or target in source.parents:
        raise StoreError("the run and the baseline are in the same place", where=where)
    if target.exists() and not (target / TRIALS).is_file():
        empty = target.is_dir() and not any(target.iterdir())
        if not empty:
            hint = "give the directory of a baseline, or one that is not there yet"
            raise StoreError("is there, and is no run", where=where, hint=hint)
    if being_written(source):
        hint = "wait until it ends"
        raise StoreError("the run is still being written", where=str(run.directory), hint=hint)
    against = [*_unfinished(run), *(_unlike(run, baseline) if (target / TRIALS).is_file() else ())]
    if against and not force:
        hint = "accept it all the same with --force, or finish it first: attnsweep run SPEC"
        raise StoreError(f"not accepted: {'; '.join(against)}", where=where, hint=hint)
    try:
        _replace_directory(source, target)
    except (OSError, shutil.Error) as error:
        raise StoreError(f"cannot be replaced: {error}", where=where) from error
    return against


def _unfinished(run: Run) -> list[str]:
    """What a run lacks to be compared with."""
    try:
        problems = [entry.problem for entry in load_spec(run.directory / SPEC).problems]
    except SpecError as error:
        return [f"its spec cannot be read ({error.what})"]
    won = {trial.problem: trial for trial in winners(rank(run.trials, run.environment))}
    against = [] if run.environment is not None else ["it has no environment.json"]
    for problem in problems:
        if problem not in won:
            against.append(f"{problem.label} has no winner")
        elif won[problem].recorded:
            against.append(f"{problem.label} was replayed, not measured")
        else:
            try:
                read_code(run.directory, won[problem])
            except StoreError as error:
                against.append(f"{problem.label}: {error.what}")
    return against


def _unlike(run: Run, baseline: Path) -> list[str]:
    """In what a run differs from the baseline so that it is not the next of its kind."""
    try:
        old = open_run(baseline)
        names = [load_spec(one.directory / SPEC).name for one in (old, run)]
    except (StoreError, SpecError) as error:
        return [f"the baseline, or its spec, cannot be read ({error.what})"]
    against = []
    if names[0] != names[1]:
        against.append(f"it is of the spec {names[1]!r}, the baseline of {names[0]!r}")
    if old.environment is not None and run.environment is not None:
        cards = old.environment.gpu, run.environment.gpu
        if cards[0] != cards[1]:
            against.append(f"it was measured on {cards[1]}, the baseline on {cards[0]}")
    lost = {t.problem: None for t in old.trials if t.problem not in {t.problem for t in run.trials}}
    return [*against, *(f"it lacks {problem.label}" for problem in lost)]


def _replace_directory(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    old = fresh / "old"
    try:
        new = fresh / "new"
        # Earlier rows that were set aside, and what a killed run left half written, stay behind.
        ignore = shutil.ignore_patterns(LOCK, "trials.*.jsonl", ".*.tmp")
        shutil.copytree(source, new, ignore=ignore)
        if target.exists():
            os.replace(target, old)
        try:
            os.replace(new, target)
        except OSError:
            with contextlib.suppress(OSError):
                os.replace(old, target)
            raise
    finally:
        if target.exists() or not old.exists():
            shutil.rmtree(fresh, ignore_errors=True)
