"""What the system refuses, as errors: a file or directory, or the one that a process is in."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from attnsweep.core.errors import FileError
from attnsweep.core.files import shipped

_OURS = (Path(__file__).resolve().parent.parent, shipped("kernels"), shipped("configs"))
_LOOP = "Symlink loop from "
_NEXT = {
    errno.EACCES: "check its permissions, and those of the directories above it",
    errno.EPERM: "check its permissions, and those of the directories above it",
    errno.EROFS: "choose a place that can be written",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there",
}


def refused(error: Exception) -> FileError | None:
    """What an error of the system says of the file that it names; None if it names none."""
    if isinstance(error, RuntimeError) and str(error).startswith(_LOOP):  # pathlib before 3.13
        where = str(error).removeprefix(_LOOP).strip("'")
        return FileError(f"cannot be used: {os.strerror(errno.ELOOP)}", where=where)
    if not isinstance(error, OSError):
        return None
    why = error.strerror or str(error)
    if isinstance(error.filename, str | bytes):
        path = os.fsdecode(error.filename)
        hint = _NEXT.get(error.errno or 0)
        if any(map(Path(path).is_relative_to, _OURS)):
            hint = "it comes with attnsweep: install that again"
        return FileError(f"cannot be used: {why}", where=path, hint=hint)
    if error.errno == errno.ENOENT and not _has_directory():
        hint = "change to a directory that exists"
        return FileError(f"cannot be used: {why}", where="the working directory", hint=hint)
    return None


def _has_directory() -> bool:
    """Whether the directory that this process is in still exists."""
    try:
        os.getcwd()
    except OSError:
        return False
    return True
