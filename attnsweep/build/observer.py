"""What a sweep tells a spectator: progress bars, a log, nothing."""

from __future__ import annotations

from attnsweep.problem import Problem
from attnsweep.trial import Trial


class Observer:
    """Every method may be overridden; none needs to be."""

    def planned(self, candidates: int) -> None:
        """How many candidates there are in all, before anything is compiled."""

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        """A problem begins; `kept` of its candidates are done already."""

    def compiled(self, done: int, total: int) -> None:
        """Candidates of the open problem whose code is ready."""

    def tried(self, trial: Trial) -> None:
        """A candidate became a row."""

    def racing(self, alive: int, entrants: int) -> None:
        """A round of the race is over."""

    def timing(self, done: int, total: int) -> None:
        """Rounds of the finalists."""

    def note(self, text: str) -> None:
        """Something worth a line."""
