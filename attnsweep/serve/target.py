"""The directory that `attnsweep export` writes, or replaces if it is an earlier export."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from attnsweep.core.errors import StoreError

MARK = "# Written by attnsweep export."
"""The first line of a project that an export may replace."""
_PROJECT = "pyproject.toml"
_HINT = "choose an empty or a new directory with --out"


def check(out: Path) -> None:
    """Raise StoreError unless `out` can be written: absent, empty, or an earlier export.

    An export takes minutes, so the system is asked to make a directory there, which is removed.
    """
    whole = out.resolve()
    try:
        if whole == Path.cwd() or whole in Path.cwd().parents:
            raise StoreError("the working directory is in it", where=str(out), hint=_HINT)
        if whole.exists():
            _check_replaceable(whole, out)
        missing = [path for path in (whole, *whole.parents) if not path.exists()]
        probe = missing[-1] if missing[1:] else _aside(whole, "tmp")
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        hint = "choose another --out, in a directory that can be written"
        what = f"cannot be written: {error.strerror}"
        raise StoreError(what, where=str(out), hint=hint) from error


def _check_replaceable(whole: Path, out: Path) -> None:
    if not whole.is_dir():
        raise StoreError("is not a directory", where=str(out), hint="choose another --out")
    names = {path.name for path in whole.iterdir()}
    earlier = _PROJECT in names and (whole / _PROJECT).read_bytes().startswith(MARK.encode())
    if names and not earlier:
        what = "there are files, and they are no earlier export"
        raise StoreError(what, where=str(out), hint=_HINT)


def write(out: Path, contents: Mapping[str, bytes]) -> None:
    """Write all files next to `out`, then put them in its place. Raises StoreError."""
    whole = out.resolve()
    aside, old = _aside(whole, "tmp"), _aside(whole, "old")
    try:
        for path, data in contents.items():
            (aside / path).parent.mkdir(parents=True, exist_ok=True)
            (aside / path).write_bytes(data)
        if whole.exists():
            whole.rename(old)
        aside.rename(whole)
    except OSError as error:
        with contextlib.suppress(OSError):
            if old.exists() and not whole.exists():
                old.rename(whole)
        raise StoreError(f"cannot be written: {error.strerror}", where=str(out)) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _aside(whole: Path, end: str) -> Path:
    return whole.with_name(f".{whole.name}.{secrets.token_hex(4)}.{end}")
