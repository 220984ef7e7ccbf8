"""The machine code of a run's winners, kept next to the rows so that it can be timed again.

`<problem>.<kernel>.json` lies next to the cubins of a problem's winner and holds its config, its
launches, and the SHA-256 of its cubins. Old code thus runs as it did, even after kernels and
declarations have changed.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from attnsweep.compile.candidate import Build
from attnsweep.compile.launches import CallPlan, LaunchPlan, Plan
from attnsweep.core import files
from attnsweep.core.errors import StoreError
from attnsweep.core.problem import Problem, Value
from attnsweep.core.trial import Trial
from attnsweep.store.rows import first_fault
from attnsweep.store.run import CUBINS, _store_error
from attnsweep.store.store import Writer

_AGAIN = "record again: attnsweep run SPEC --fresh, then attnsweep accept"


_LONGEST = 150  # characters of a problem in a file's name


class _Code(BaseModel):
    """The JSON next to the cubins. Paths in the launches are names in the same directory."""

    model_config = ConfigDict(frozen=True)

    config: dict[str, Value]
    digests: dict[str, str]
    plan: Plan


_LAUNCHES: TypeAdapter[Plan] = TypeAdapter(Plan)


def _name(problem: Problem, kernel: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", problem.label.lower()).strip("-")
    if len(slug) > _LONGEST:  # a file's name has up to 255 bytes, and a cache may have many lengths
        slug = f"{slug[:_LONGEST]}-{hashlib.sha256(slug.encode()).hexdigest()[:16]}"
    return f"{slug}.{kernel}"


def keep_code(store: Writer, build: Build) -> None:
    """Copy a winner's cubins into its run, and write its launches."""
    name = _name(build.problem, build.kernel.name)
    digests = {}
    for stage, cubin in build.cubins().items():
        digests[f"{name}.{stage}.cubin.xz"] = cubin.digest
        try:
            code = cubin.path.read_bytes()
        except OSError as error:
            raise _store_error(error, cubin.path, "cannot read the cubin to keep") from error
        # A fifth of the bytes. A higher preset saves none, and clears 700 MB for its dictionary.
        store.keep(f"{name}.{stage}.cubin.xz", lzma.compress(code))
    plan = build.launches_for(build.problem)
    if build.files:
        texts = {file: text.decode(errors="replace") for file, text in build.files.items()}
        store.keep(f"{name}.files.json.xz", lzma.compress(json.dumps(texts).encode()))
    if isinstance(plan, CallPlan):
        plan = replace(plan, cache="")  # of this machine
    stages = tuple(replace(s, cubin=f"{name}.{s.name}.cubin.xz") for s in plan.stages)
    facts = _Code(config=dict(build.config), digests=digests, plan=replace(plan, stages=stages))
    store.keep(f"{name}.json", facts.model_dump_json().encode() + b"\n")


def read_code(of_run: Path, winner: Trial) -> Plan:
    """The launches of a winner, ready to load. Raises StoreError if its code is incomplete.

    of_run: the run's directory.
    """
    name = _name(winner.problem, winner.kernel)
    directory = of_run / CUBINS
    path = directory / f"{name}.json"
    try:
        code = _Code.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        kept = any(directory.glob(f"{name}.*.cubin*")) or (directory / files.ARCHIVE).is_file()
        what = "winner's launches" if kept else "winner's machine code"
        raise StoreError(f"the run lacks the {what}", where=str(path), hint=_AGAIN) from error
    except OSError as error:
        raise StoreError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except ValidationError as error:
        what = f"not the launches of a winner: {first_fault(error)}"
        raise StoreError(what, where=str(path), hint=_AGAIN) from error
    if code.config != dict(winner.config) or code.plan.problem != winner.problem:
        what = "the stored code is not the winner's"
        raise StoreError(what, where=str(path), hint=_AGAIN)
    for stage in code.plan.stages:
        _verify(directory, stage.cubin, code.digests)
    stages = tuple(replace(s, cubin=str(directory / s.cubin)) for s in code.plan.stages)
    plan = replace(code.plan, stages=stages)
    return _unchained(plan) if isinstance(plan, LaunchPlan) else plan


def read_files(of_run: Path, winner: Trial) -> dict[str, str]:
    """The user's files of a winner that is a call, as they were. Raises StoreError."""
    path = of_run / CUBINS / f"{_name(winner.problem, winner.kernel)}.files.json.xz"
    try:
        texts: dict[str, str] = json.loads(lzma.decompress(path.read_bytes()))
    except (OSError, ValueError, lzma.LZMAError) as error:
        what = "the run lacks the winner's files, or they are damaged"
        raise StoreError(what, where=str(path), hint=_AGAIN) from error
    if any(Path(file).is_absolute() or ".." in Path(file).parts for file in texts):
        raise StoreError("a file outside of the others", where=str(path), hint=_AGAIN)
    return texts


def _unchained(launches: LaunchPlan) -> LaunchPlan:
    """The call with ordinary dependencies on the call before it.

    Before protocol 4 the first launch of a call could be programmatic, and overlap that call.
    """
    first, *others = launches.stages
    if not first.launch.programmatic:
        return launches
    alone = replace(first, launch=replace(first.launch, programmatic=False))
    chains = launches.streams == 1 and not launches.eager
    return replace(launches, stages=(alone, *others), chains=chains)


def _verify(directory: Path, name: str, digests: Mapping[str, str]) -> None:
    path = directory / name
    if Path(name).name != name or name not in digests:
        raise StoreError(f"invalid cubin name {name!r}", where=str(directory), hint=_AGAIN)
    try:
        digest = _digest(path)
    except OSError as error:
        what = f"the cubin cannot be read: {error.strerror}"
        raise StoreError(what, where=str(path), hint=_AGAIN) from error
    if digest != digests[name]:
        raise StoreError("the cubin is damaged: wrong SHA-256", where=str(path), hint=_AGAIN)


def _digest(path: str | Path) -> str:
    return hashlib.sha256(files.read_code(path)).hexdigest()


def same_code(one: Plan, other: Plan) -> bool:
    """Whether both launch the same machine code in the same way. Raises OSError."""

    def known_by_content(launches: Plan) -> bytes:
        digests = {stage.cubin: _digest(stage.cubin) for stage in launches.stages}
        stages = tuple(replace(stage, cubin=digests[stage.cubin]) for stage in launches.stages)
        return _LAUNCHES.dump_json(replace(launches, stages=stages))

    return known_by_content(one) == known_by_content(other)
