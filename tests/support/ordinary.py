"""What the system refuses to an ordinary user, refused to root too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_VERSION = 0x20080522
_READ_ANYTHING = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable"))


@contextlib.contextmanager
def ordinary() -> Iterator[None]:
    """Permissions of files hold for this thread, also if root runs it."""
    if os.geteuid() != 0 or sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = _Header(_VERSION, 0), (_Data * 2)()

    def call(function: str) -> None:
        if getattr(libc, function)(ctypes.byref(header), data):
            raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")

    call("capget")
    before = data[0].effective
    data[0].effective &= ~_READ_ANYTHING
    call("capset")
    try:
        yield
    finally:
        data[0].effective = before
        call("capset")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """A directory that may not be read or searched meanwhile."""
    folder.chmod(0)
    try:
        with ordinary():
            yield folder
    finally:
        folder.chmod(0o755)
