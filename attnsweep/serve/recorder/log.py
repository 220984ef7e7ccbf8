"""The kinds of calls of one process and their counts, in files that outlive it."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

SLOTS = 1 << 16
"""Most kinds of calls of one process; later kinds are counted together, in the last slot."""
KINDS, COUNTS, ERRORS = ".jsonl", ".counts", ".error"
"""Endings of a process's files."""
TORCH, EVERY_CALL, COMPILED = "torch", "every-call", "compiled"
"""Files that say that a process imported PyTorch, counted every call, compiled attention."""


class Log:
    """The files to which one process of a program writes its calls.

    A forked child begins files of its own.
    A kind is a line of JSON, written when it is first seen. The counts are in a shared mapping, so
    that they outlive the process however it ends.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._stem = self._folder / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._lock = threading.Lock()
        self._slots: dict[str, int] = {}
        self.known: dict[Any, int] = {}  # the slot of each call as it was made
        self.failed = False

    def slot(self, kind: dict[str, Any]) -> int:
        """The place of a kind's count; a new kind is written down."""
        line = json.dumps(kind, sort_keys=True)
        with self._lock:
            if not self._slots:
                self._open()
            if line not in self._slots:
                if len(self._slots) == SLOTS - 1:
                    return SLOTS - 1
                self._lines.write(line + "\n")
                self._lines.flush()
                self._slots[line] = len(self._slots)
            return self._slots[line]

    def add(self, slot: int, calls: int = 1) -> None:
        """Count calls of the kind in this slot."""
        with self._lock:
            self._counts[slot] += calls

    def note(self, name: str, text: str = "") -> None:
        """Leave a file of this name in the folder."""
        with suppress(OSError):  # the program goes on, whatever becomes of this
            (self._folder / name).write_text(text, encoding="utf-8")

    def leave(self, ending: str, text: str) -> None:
        """Leave a file of this process with such an ending."""
        self.note(f"{self._stem.name}{ending}", text)

    def fail(self) -> None:
        """Write down the error that is being handled, and record no more."""
        self.failed = True
        self.leave(ERRORS, traceback.format_exc(limit=-3))

    def _open(self) -> None:
        with open(f"{self._stem}{COUNTS}", "w+b") as file:
            file.truncate(8 * SLOTS)
            self._counts = memoryview(mmap.mmap(file.fileno(), 8 * SLOTS)).cast("Q")
        self._lines = open(f"{self._stem}{KINDS}", "w", encoding="utf-8")  # noqa: SIM115
