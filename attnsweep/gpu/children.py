"""Processes that own a GPU end with the process that started them, whatever happens to it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Linux ends a child of `die_with` with the thread that started it, so one thread that lasts as long
# as this process starts them all: whoever calls first may be a thread that soon ends.
_starter = ThreadPoolExecutor(1, "start-gpu-process")


def start(process: Any) -> None:
    """Start a process of `multiprocessing`, which may outlive the calling thread."""
    _starter.submit(process.start).result()


def die_with(parent: int) -> None:
    """Have Linux kill this process when its parent's thread ends, even amid a hung kernel."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
