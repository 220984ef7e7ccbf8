"""Writing a file where a user asked for it, but never over a part of a recorded run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from attnsweep.core.errors import SpecError, StoreError, reason
from attnsweep.core.files import utf8, write_file
from attnsweep.store.run import CUBINS, DERIVED, ENVIRONMENT, LOCK, ROWS, SPACES, SPEC

FILE = "counters.json"
_WRITABLE = "give a file in a writable directory"
_PARTS = {*ROWS, SPEC, ENVIRONMENT, SPACES, FILE}


def refuse_recorded(path: Path) -> None:
    """Raise StoreError if a file at `path` would replace, or become, a part of a recorded run.

    The tables `ranking.csv` and `ranking.md` are derived from the rows, so they may be written.
    """
    folder = path.parent
    run = folder.parent if folder.name == CUBINS else folder
    within = folder.name == CUBINS or path.name in _PARTS or path.suffix == ".ncu-rep"
    if within and any((run / name).is_file() for name in ROWS):
        raise StoreError("is part of a run", where=str(path), hint="choose another name")


def others_in(run: Path) -> list[str]:
    """Names in a run's directory that are no part of the run and would be lost with it."""
    own = {*_PARTS, *DERIVED, CUBINS, LOCK}
    ours = ("trials.*.jsonl", "*.ncu-rep", ".*.tmp")
    here = [path for path in run.iterdir() if path.name not in own]
    return sorted(path.name for path in here if not any(map(path.match, ours)))


def check_output(path: Path, *, force: bool = True) -> None:
    """Raise what `write_output` would raise, before the work whose result it writes.

    force: whether it may replace a file; otherwise SpecError.
    """
    refuse_recorded(path)
    if path.is_dir():
        raise StoreError("is a directory", where=str(path), hint="name a file in it")
    if path.exists() and not force:
        hint = "choose another name; --force replaces it (in Python force=True)"
        raise SpecError("is there already", where=str(path), hint=hint)
    why, hint = f"{path.parent} is no writable directory", _WRITABLE
    if path.parent.is_dir() and os.access(path.parent, os.W_OK):
        return
    if not path.parent.is_dir():
        try:
            os.listdir(path.parent)  # which fails, and says why
        except OSError as error:
            why = f"{path.parent}: {error.strerror}"
            hint = "make that folder first, or name a file in another"
    raise StoreError(f"cannot be written: {why}", where=str(path), hint=hint)


def write_output(path: Path, text: str) -> None:
    """Write a file in one step. Raises StoreError if it cannot be, or is part of a recorded run."""
    refuse_recorded(path)
    try:
        write_file(path, utf8(text))
    except OSError as error:
        why = reason(error)
        raise StoreError(f"cannot be written: {why}", where=str(path), hint=_WRITABLE) from error


def read(directory: Path) -> list[dict[str, Any]]:
    """The counters that `write` stored in a run's directory; empty if none. Raises StoreError."""
    path = directory / FILE
    if not path.is_file():
        return []
    try:
        kept: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise StoreError(
            f"cannot be read: {error}",
            where=str(path),
            hint="restore the file, or remove it and run attnsweep profile again",
        ) from error
    return kept
