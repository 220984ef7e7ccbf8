"""Progress of a sweep on several cards: a bar or a line for each, or JSON events with the card.

The forms are those of progress.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TaskID

from attnsweep.core.observer import Observer
from attnsweep.reports import progress
from attnsweep.reports.eta import Eta, Left
from attnsweep.reports.progress import _Watched
from attnsweep.reports.terminal import Form, counted

# Problems a card, after its first one, that must be over before anything is said. The first
# estimates of recorded runs on two and four cards were then within a factor of two, but for one.
_SEEN = 1.5


@contextmanager
def watch(console: Console, cards: int, form: Form = Form.AUTO) -> Iterator[Observer]:
    """An observer of a sweep on `cards` cards; see progress.watch."""
    with progress.watch(console, form, FleetEta(cards), _FleetBars) as observer:
        yield observer


class FleetEta(Eta):
    """The time that is left, from how long a problem takes a card; None before that is known.

    A card's first problem also imports, and is left out. The problems that end first are the short
    ones, so those that still run count too, as long as they have run.
    """

    def __init__(self, cards: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._cards = cards
        self._problems = 0
        self._running: dict[int, tuple[float, bool]] = {}
        self._over = 0
        self._begun: set[int] = set()
        """Cards that are done with their first problem."""
        self._took_s: list[float] = []

    def planned(self, candidates: Sequence[int], *, finals: bool = True) -> None:  # noqa: ARG002
        """See Eta."""
        self._problems = len(candidates)

    def on(self, card: int) -> Eta:
        """A card with this number is there, perhaps late."""
        self._cards = max(self._cards, card + 1)
        return _CardEta(self, card)

    def begins(self, card: int, *, measures: bool) -> None:
        """A card begins a problem. measures: whether an earlier run left something to measure."""
        self._running[card] = (self._clock(), measures)

    def ends(self, card: int, *, done: bool) -> None:
        """A card has no problem any more. done: it is over, and not lost."""
        if card not in self._running:
            return
        began, measures = self._running.pop(card)
        self._over += done
        if done and measures and card in self._begun:
            self._took_s.append(self._clock() - began)
        elif done and measures:
            self._begun.add(card)

    @property
    def left(self) -> Left | None:
        """Seconds for the problems that are left, shared by the cards."""
        if len(self._took_s) < max(2.0, _SEEN * self._cards):
            return None
        now = self._clock()
        run_s = {card: now - began for card, (began, _) in self._running.items()}
        so_far_s = sum(run_s[card] for card in self._begun & run_s.keys() if self._running[card][1])
        mean_s = (sum(self._took_s) + so_far_s) / len(self._took_s)
        waiting = self._problems - self._over - len(self._running)
        running = [max(0.0, mean_s - seconds) for seconds in run_s.values()]
        shared = (waiting * mean_s + sum(running)) / min(self._cards, max(1, self._problems))
        return Left(max(shared, *running, 0.0))


class _CardEta(Eta):
    """Tells the fleet when a problem of this card begins and ends."""

    def __init__(self, fleet: FleetEta, card: int) -> None:
        super().__init__()
        self._fleet, self._card = fleet, card

    def opening(self, *, measures: bool = True) -> None:
        self._fleet.ends(self._card, done=True)
        self._fleet.begins(self._card, measures=measures)

    def resting(self, *, done: bool) -> None:
        self._fleet.ends(self._card, done=done)

    @property
    def left(self) -> Left | None:
        return self._fleet.left


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
        return _CardBar(self.progress, self._whole, self.eta.on(card), f"card {card}")


class _CardBar(_Watched):
    """The bar of one card: its problem, and how far the phase is."""

    def __init__(self, drawn: Progress, whole: TaskID, eta: Eta, name: str) -> None:
        super().__init__(drawn.console, eta)
        self._progress, self._whole, self._name = drawn, whole, name
        self._bar = drawn.add_task(name, total=None, said="starting")

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
