"""The kinds of calls of one process and their counts, in files that outlive it."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import threading
import traceback
from pathlib import Path
from typing import Any

SLOTS = 1 << 16
"""Most kinds of calls of one process; later kinds are counted together, in the last slot."""
KINDS, COUNTS, ERRORS, TORCH = ".jsonl", ".counts", ".error", "torch"
"""Endings of a process's files, and the file that says that some process imported PyTorch."""


class Log:
    """The kinds of calls of one process and their counts, in files of a folder.

    A kind is a line of JSON, written when it is first seen. The counts are in a shared mapping, so
    that they outlive the process however it ends. A forked child begins files of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self.lock = threading.Lock()
        self._stem: Path | None = None
        self._slots: dict[str, int] = {}
        self.known: dict[Any, int] = {}
        """The slot of each call as it was made: a cache of `slot`."""
        self.failed = False

    def slot(self, kind: dict[str, Any]) -> int:
        """The place of a kind's count; a new kind is written down."""
        line = json.dumps(kind, sort_keys=True)
        with self.lock:
            if line not in self._slots:
                if self._stem is None:
                    self._open()
                if len(self._slots) == SLOTS - 1:
                    return SLOTS - 1
                self._lines.write(line + "\n")
                self._lines.flush()
                self._slots[line] = len(self._slots)
            return self._slots[line]

    def add(self, slot: int, calls: int = 1) -> None:
        """Count calls of the kind in this slot."""
        with self.lock:
            self.counts[slot] += calls

    def fail(self) -> None:
        """Write down the error that is being handled, and record no more."""
        self.failed = True
        name = f"{os.getpid()}-{secrets.token_hex(4)}{ERRORS}"
        with contextlib.suppress(OSError):  # the program goes on, whatever becomes of this
            (self._folder / name).write_text(traceback.format_exc(limit=-3), encoding="utf-8")

    def _open(self) -> None:
        self._stem = self._folder / f"{os.getpid()}-{secrets.token_hex(4)}"
        with open(f"{self._stem}{COUNTS}", "w+b") as file:
            file.truncate(8 * SLOTS)
            self.counts = memoryview(mmap.mmap(file.fileno(), 8 * SLOTS)).cast("Q")
        self._lines = open(f"{self._stem}{KINDS}", "w", encoding="utf-8")  # noqa: SIM115
