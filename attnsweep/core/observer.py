"""The events of a sweep; an observer shows them as progress bars, a log or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment, Trial


class Observer:
    """Base of all observers. Every method may be overridden; none needs to be."""

    def on(self, card: int, name: str) -> Observer:  # noqa: ARG002
        """The observer of what happens on one of several cards. name: its UUID, hashed, in rows."""
        return self

    def planned(self, candidates: Sequence[int], *, finals: bool = True) -> None:
        """The number of candidates of each problem, in order, before anything is compiled.

        finals: whether each problem ends in a race and final rounds.
        """

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        """A problem begins; an earlier run has done `kept` of its first `candidates`."""

    def trying_on(self, label: str, candidates: int) -> None:
        """Candidates of the open problem are tried on another from now on, or on itself again.

        label: the problem that they are tried on. candidates: the first of them. A long problem has
        all tried on a shorter one, and then the best on itself.
        """

    def compiled(self, done: int, total: int) -> None:
        """`done` of the open problem's `total` candidates have compiled.

        total: all that were asked for so far; a search that learns asks for more as it goes on.
        """

    def tried(self, trial: Trial, *, kept: bool = False) -> None:
        """A candidate became a row. kept: an earlier run measured it."""

    def racing(self, alive: int, entrants: int) -> None:
        """A round of the race is over; `alive` of the entrants are left."""

    def preparing(self, baseline: str, done: int, total: int) -> None:
        """A baseline is being prepared for the rounds, after `done` of `total` others."""

    def prepared(self, what: str, took_s: float, steps_s: Mapping[str, float]) -> None:
        """The problem is open, or all finalists or a baseline are prepared or failed.

        steps_s: seconds of what the GPU process did since the last time, by step; some of it in a
        thread beside.
        """

    def timing(self, done: int, total: int) -> None:
        """`done` of at most `total` rounds of the finalists are over."""

    def ranked(self, trials: Sequence[Trial], environment: Environment) -> None:
        """A problem is over, and others follow; these are all its rows."""

    def resting(self, *, done: bool) -> None:
        """One of several cards has no problem left. done: it is over, and not lost."""

    def exporting(self, done: int, total: int) -> None:
        """`done` of the `total` kernels of a package are compiled."""

    def note(self, text: str) -> None:
        """A text that is worth a line."""
