"""What a sweep asks of whoever keeps its rows: a run directory, or a pipe to the process of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from attnsweep.problem import Problem
from attnsweep.trial import Trial


class Writer(Protocol):
    """The rows and the winners' code of a run; `Store` is the one that writes a directory."""

    @property
    def directory(self) -> Path:
        """The run directory."""

    @property
    def trials(self) -> list[Trial]:
        """The rows so far, in order of first appearance."""

    def append(self, trial: Trial) -> None:
        """Add one row."""

    def set_aside(self, problem: Problem) -> None:
        """Take a problem's rows out of the run, into a file next to it."""

    def end_searches(self, problem: str, endings: Mapping[str, str]) -> None:
        """Note why the searches of a problem ended, by family."""

    def keep_cubin(self, path: Path, name: str) -> object:
        """Copy a winner's cubin into the run as `name`."""

    def keep(self, name: str, data: bytes) -> object:
        """Keep part of a winner's code as `name`."""
