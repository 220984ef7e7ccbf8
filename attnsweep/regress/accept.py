"""Move a baseline forward: put a copy of a run in its place."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from attnsweep.core.errors import SpecError, StoreError, reason
from attnsweep.regress.verdicts import other_machine
from attnsweep.reports.sections import sections_of
from attnsweep.specs.load import load_spec
from attnsweep.store.code import read_code
from attnsweep.store.outputs import others_in
from attnsweep.store.run import LOCK, SPEC, Run, damage, open_run, pack, trials_of


def accept(run: Run, baseline: Path, *, force: bool = False) -> list[str]:
    """Copy a run, packed, over `baseline` or to a new place. Returns the objections overridden.

    The copy is made next to the target and replaces it by renaming: a reader sees the whole old
    one, the whole new one, or, for the moment between two renames, none. Raises StoreError, without
    any change, if there are objections and force is not set; if `baseline` is not a run, or holds
    more; if the run is still being written; or if it cannot be copied.
    """
    source, target = run.directory.resolve(), baseline.resolve()
    where = str(baseline)
    if source == target or source in target.parents or target in source.parents:
        raise StoreError("the run and the baseline overlap", where=where)
    if target.exists() and not trials_of(target).is_file():
        empty = target.is_dir() and not any(target.iterdir())
        if not empty:
            hint = "give the directory of a baseline, or a new one"
            raise StoreError("exists, and is not a run", where=where, hint=hint)
    elif target.exists() and (others := others_in(target)):
        hint = "move it away, or give another directory"
        raise StoreError(f"it holds more than a run: {', '.join(others)}", where=where, hint=hint)
    if _being_written(source):
        hint = "wait until it ends"
        raise StoreError("the run is still being written", where=str(run.directory), hint=hint)
    against = [*_unfinished(run), *(_unlike(run, baseline) if trials_of(target).is_file() else ())]
    if against and not force:
        hint = (
            "finish it first: attnsweep run SPEC, or with --fresh if its machine code is lost; or "
        )
        hint += "add --force to accept it as it is"
        raise StoreError(f"not accepted: {'; '.join(against)}", where=where, hint=hint)
    try:
        _replace_directory(source, target)
    except OSError as error:
        why = reason(error)
        hint = f"{target.parent} must be a writable directory with room for a copy"
        raise StoreError(f"cannot be replaced: {why}", where=where, hint=hint) from error
    return against


def _unfinished(run: Run) -> list[str]:
    """Objections to a run as a baseline because it is incomplete."""
    try:
        problems = [entry.problem for entry in load_spec(run.directory / SPEC).problems]
    except SpecError as error:
        return [f"its spec cannot be read ({error.what})"]
    sections = sections_of(run)
    won = {each.problem: each.winner["trial"] for each in sections if each.winner is not None}
    against = []
    if run.environment is None:
        none = "its environment.json is damaged" if damage(run) else "it has no environment.json"
        against.append(none)
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
    return against + [f"{each.problem.label}: {each.lost}" for each in sections if each.lost]


def _unlike(run: Run, baseline: Path) -> list[str]:
    """Objections to a run because it differs in kind from the baseline that it replaces."""
    try:
        old = open_run(baseline)
        names = [load_spec(one.directory / SPEC).name for one in (old, run)]
    except (StoreError, SpecError) as error:
        return [f"the baseline, or its spec, cannot be read ({error.what})"]
    against = []
    if names[0] != names[1]:
        against.append(f"its spec is {names[1]!r}, the baseline's is {names[0]!r}")
    if old.environment is not None and run.environment is not None:
        cards = old.environment.gpu, run.environment.gpu
        facts = old.environment.machine, run.environment.machine
        if cards[0] != cards[1]:
            against.append(f"it was measured on {cards[1]}, the baseline on {cards[0]}")
        elif (other := other_machine(*facts, other_driver=True)) is not None:
            against.append(f"it and the baseline were {other}")
    lost = {t.problem: None for t in old.trials if t.problem not in {t.problem for t in run.trials}}
    return [*against, *(f"it lacks {problem.label}" for problem in lost)]


def _replace_directory(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    old = fresh / "old"
    try:
        new = fresh / "new"
        # Leave out rows that were set aside, and files that a killed run left half written.
        ignore = shutil.ignore_patterns(LOCK, "trials.*.jsonl", ".*.tmp")
        shutil.copytree(source, new, ignore=ignore)
        pack(new)
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


def _being_written(directory: Path) -> bool:
    """Whether a process holds the lock of this run."""
    if not (directory / LOCK).exists():
        return False
    try:
        with FileLock(directory / LOCK).acquire(blocking=False):
            return False
    except Timeout:
        return True
    except OSError:  # if we cannot lock it, we cannot know
        return False
