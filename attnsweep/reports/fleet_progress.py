"""Progress of a sweep on several cards: a bar or a line for each, or JSON events with the card.

The forms are those of progress.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TaskID

from attnsweep.core.observer import Observer
from attnsweep.reports import progress
from attnsweep.reports.eta import Eta
from attnsweep.reports.progress import _Watched
from attnsweep.reports.terminal import Form, counted


@contextmanager
def watch(console: Console, cards: int, form: Form = Form.AUTO) -> Iterator[Observer]:
    """An observer of a sweep on `cards` cards; see progress.watch."""
    with progress.watch(console, form, Eta(cards), _FleetBars) as observer:
        yield observer


class _FleetBars(_Watched):
    """A bar for the whole sweep, and below it one for each card."""

    def __init__(self, drawn: Progress, eta: Eta) -> None:
        super().__init__(drawn.console, eta)
        self.progress = drawn
        self._whole = drawn.add_task("sweep", total=None, said="", whole=True)

    def planned(self, candidates: Sequence[int], *, finals: bool = True) -> None:
        super().planned(candidates, finals=finals)
        said = f"sweep of {counted(len(candidates), 'problem')}"
        self.progress.update(self._whole, total=sum(candidates), description=said)

    def on(self, card: int, name: str) -> Observer:  # noqa: ARG002
        return _CardBar(self.progress, self._whole, self.eta, card)


class _CardBar(_Watched):
    """The bar of one card: its problem, and how far the phase is."""

    def __init__(self, drawn: Progress, whole: TaskID, eta: Eta, card: int) -> None:
        super().__init__(drawn.console, eta, card)
        self._progress, self._whole, self._name = drawn, whole, f"card {card}"
        self._bar = drawn.add_task(self._name, total=None, said="starting")

    def begin(self, candidates: int) -> None:
        self.show("search", 0, candidates)

    def checked(self, *, first: bool) -> None:
        self._progress.update(self._bar, completed=len(self.done), said=self.summary)
        if first:
            self._progress.advance(self._whole)

    def show(self, phase: str, done: int, total: int, baseline: str = "") -> None:
        texts = {"search": "check", "baselines": f"prepare {baseline}", "finals": "time"}
        label = self.shorter or (self.problem.label if self.problem else "")
        text = f"{self._name} [bold]{label}[/] {texts.get(phase, phase)}"
        self._progress.update(
            self._bar, description=text, completed=done, total=total, said=self.summary
        )

    def resting(self, *, done: bool) -> None:
        super().resting(done=done)
        self._progress.update(self._bar, description=self._name, completed=0, total=1, said="waits")
