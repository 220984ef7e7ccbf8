"""The cache of compiled stages as a directory: its size, whether it can be written, and pruning.

An entry is `<arch>/<two digits>/<sha256>/` with stage.cubin and meta.json, as `nvrtc` writes it, or
such a directory below `traced` with trace.json and Triton's files, as `trace` does; nothing else in
the directory is ever removed but what a killed process left of an entry.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from attnsweep.core.errors import reason
from attnsweep.core.hardware import ARCHS

_LEFT_S = 3600.0
"""A half-written entry that is older than this has no process any more."""


@dataclass(frozen=True, slots=True)
class CachedStage:
    """One compiled stage. used_s: seconds since the epoch when it was last written or read.

    A file system that keeps no time of reading tells only when it was written.
    """

    path: Path
    size_bytes: int
    used_s: float

    @property
    def arch(self) -> str:
        """The architecture that it was compiled for."""
        return self.path.parents[1].name


def entries(directory: Path) -> list[CachedStage]:
    """Every whole entry of a cache, sorted by path; empty if there is no such directory."""
    found = []
    for path in sorted([*directory.glob("*/??/*"), *directory.glob("traced/*/??/*")]):
        arch, digits, key = path.parts[-3:]
        whole = re.fullmatch("[0-9a-f]{64}", key) and key[:2] == digits and arch in ARCHS
        if not whole or path.is_symlink():
            continue
        with contextlib.suppress(OSError):
            traced = path.parents[2] == directory / "traced"
            names = ("trace.json",) if traced else ("stage.cubin", "meta.json")
            facts = [(path / name).stat() for name in names]
            used = max(max(fact.st_mtime, fact.st_atime) for fact in facts)
            facts = [f.stat() for f in path.rglob("*") if f.is_file()] if traced else facts
            found.append(CachedStage(path, sum(fact.st_size for fact in facts), used))
    return found


def prune(directory: Path, older_than_s: float) -> list[CachedStage]:
    """Remove entries that were not used for so long, and what killed processes left.

    Returns the entries that are gone. A process that compiles meanwhile makes its entries again.
    """
    now = time.time()
    gone = []
    for entry in entries(directory):
        if now - entry.used_s >= older_than_s:
            shutil.rmtree(entry.path, ignore_errors=True)
            if not entry.path.exists():
                gone.append(entry)
    for left in [*directory.glob("*/??/.new-*"), *directory.glob("traced/*/??/.new-*")]:
        with contextlib.suppress(OSError):
            if left.is_dir() and now - left.stat().st_mtime >= _LEFT_S:
                shutil.rmtree(left, ignore_errors=True)
    return gone


def fault(directory: Path) -> str | None:
    """Why nothing can be written to a cache, or None if something can. Makes the directory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return reason(error)
