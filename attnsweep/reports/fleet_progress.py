"""Progress of a sweep on several cards: a bar or a line for each, or JSON events with the card.

The forms are those of progress.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TextColumn
from rich.text import Text

from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Trial
from attnsweep.reports.eta import Eta, Left
from attnsweep.reports.progress import _Best, _JsonLines, _PlainLines, drawn
from attnsweep.reports.terminal import Form, counted

# Problems a card, after its first one, that must be over before anything is said. The first
# estimates of recorded runs on two and four cards were then within a factor of two, but for one.
_SEEN = 1.5


@contextmanager
def watch(console: Console, cards: int, form: Form = Form.AUTO) -> Iterator[Observer]:
    """An observer of a sweep on `cards` cards; see progress.watch."""
    left = FleetLeft(cards)
    with drawn(
        console,
        form,
        lines=lambda: _JsonFleet(console, left),
        plain=lambda: _PlainFleet(console, left),
        last=[TextColumn("{task.fields[said]}")],
        bars=lambda progress: _BarsFleet(progress, left),
    ) as observer:
        yield observer


class FleetLeft:
    """The time that is left, from how long a problem takes a card; None before that is known.

    A card's first problem also imports, and is left out. The problems that end first are the short
    ones, so those that still run count too, as long as they have run.
    """

    def __init__(self, cards: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._cards, self._clock = cards, clock
        self._problems = 0
        self._opened: dict[int, tuple[float, bool]] = {}
        self._closed = 0
        self._begun: set[int] = set()
        """Cards that are done with their first problem."""
        self._took_s: list[float] = []

    def planned(self, problems: int) -> None:
        """The whole run has this many problems."""
        self._problems = problems

    def joined(self, card: int) -> None:
        """A card with this number is there, perhaps late."""
        self._cards = max(self._cards, card + 1)

    def opening(self, card: int, *, measures: bool) -> None:
        """A card begins a problem. measures: whether an earlier run left something to measure."""
        self._opened[card] = (self._clock(), measures)

    def closing(self, card: int, *, done: bool) -> None:
        """A card has no problem any more. done: it is over, and not lost."""
        if card not in self._opened:
            return
        began, measures = self._opened.pop(card)
        self._closed += done
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
        run_s = {card: now - began for card, (began, _) in self._opened.items()}
        so_far_s = sum(run_s[card] for card in self._begun & run_s.keys() if self._opened[card][1])
        mean_s = (sum(self._took_s) + so_far_s) / len(self._took_s)
        waiting = self._problems - self._closed - len(self._opened)
        running = [max(0.0, mean_s - seconds) for seconds in run_s.values()]
        shared = (waiting * mean_s + sum(running)) / min(self._cards, max(1, self._problems))
        return Left(max(shared, *running, 0.0))


class _FleetEta(Eta):
    """The time left of all cards, where a card's lines ask for that of a run."""

    def __init__(self, fleet: FleetLeft) -> None:
        super().__init__()
        self._fleet = fleet

    @property
    def left(self) -> Left | None:
        return self._fleet.left


class _Card:
    """Tells the time left when a card's problem begins and ends."""

    def __init__(self, left: FleetLeft, card: int) -> None:
        self._left, self._card = left, card

    def opening(self, candidates: int, kept: int) -> None:
        self._left.closing(self._card, done=True)
        self._left.opening(self._card, measures=kept < candidates)

    def resting(self, done: bool) -> None:
        self._left.closing(self._card, done=done)


# -- JSON ---------------------------------------------------------------------------------------


class _JsonCard(_JsonLines):
    """The lines of one card, each with `gpu`, its number, and `uuid`, hashed, as in its rows."""

    def __init__(self, fleet: _JsonLines, left: FleetLeft, card: int, name: str) -> None:
        super().__init__(fleet.console)
        self.eta = _FleetEta(left)
        self.begun = fleet.begun
        self._at, self._names = _Card(left, card), {"gpu": card, "uuid": name}

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        self._at.opening(candidates, kept)
        super().opening(problem, candidates, kept)

    def resting(self, *, done: bool) -> None:
        self._at.resting(done)

    def write(self, event: str, **facts: Any) -> None:
        super().write(event, **self._names, **facts)


class _JsonFleet(_JsonLines):
    def __init__(self, console: Console, left: FleetLeft) -> None:
        super().__init__(console)
        self._fleet_left = left

    def on(self, card: int, name: str) -> Observer:
        self._fleet_left.joined(card)
        return _JsonCard(self, self._fleet_left, card, name)

    def planned(self, candidates: Sequence[int], *, finals: bool = True) -> None:
        self._fleet_left.planned(len(candidates))
        super().planned(candidates, finals=finals)


# -- lines --------------------------------------------------------------------------------------


class _PlainCard(_PlainLines):
    """The lines of one card."""

    def __init__(self, console: Console, left: FleetLeft, card: int) -> None:
        super().__init__(console)
        self.eta = _FleetEta(left)
        self._at, self.before = _Card(left, card), f"card {card}: "

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        self._at.opening(candidates, kept)
        super().opening(problem, candidates, kept)

    def resting(self, *, done: bool) -> None:
        self._at.resting(done)


class _PlainFleet(_PlainLines):
    def __init__(self, console: Console, left: FleetLeft) -> None:
        super().__init__(console)
        self._fleet_left = left

    def on(self, card: int, name: str) -> Observer:  # noqa: ARG002
        self._fleet_left.joined(card)
        return _PlainCard(self.console, self._fleet_left, card)

    def planned(self, candidates: Sequence[int], *, finals: bool = True) -> None:
        self._fleet_left.planned(len(candidates))
        super().planned(candidates, finals=finals)


# -- bars ---------------------------------------------------------------------------------------


class _BarCard(_Best):
    """The bar of one card: its problem, and how far the phase is."""

    def __init__(self, fleet: _BarsFleet, left: FleetLeft, card: int) -> None:
        super().__init__(_FleetEta(left))
        self._fleet, self._at, self._name = fleet, _Card(left, card), f"card {card}"
        self._bar = fleet.progress.add_task(self._name, total=None, said="starting")
        self._tried: set[object] = set()
        self._counted: set[object] = set()
        """Candidates of the open problem: those tried on a shorter one are tried again."""

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        self._at.opening(candidates, kept)
        super().opening(problem, candidates, kept)
        self._tried.clear()
        self._counted.clear()
        self._show("check", 0, candidates)

    def trying_on(self, label: str, candidates: int) -> None:
        super().trying_on(label, candidates)
        self._tried.clear()
        self._show("check", 0, candidates)

    def resting(self, *, done: bool) -> None:
        self._at.resting(done)
        self._fleet.tell()
        self._fleet.progress.update(
            self._bar, description=self._name, completed=0, total=1, said="waits"
        )

    def compiled(self, done: int, total: int) -> None:
        super().compiled(done, total)
        self._show("check", len(self._tried), max(total, len(self._tried)))

    def tried(self, trial: Trial, *, kept: bool = False) -> None:
        super().tried(trial, kept=kept)
        if trial.provider == OURS and trial.key not in self._tried:
            self._tried.add(trial.key)
            if trial.key not in self._counted:
                self._counted.add(trial.key)
                self._fleet.tried()
            self._fleet.progress.update(
                self._bar, completed=len(self._tried), said=escape(self.summary)
            )

    def racing(self, alive: int, entrants: int) -> None:
        self._show("race", entrants - alive, entrants)

    def preparing(self, baseline: str, done: int, total: int) -> None:
        self._show(f"prepare {baseline}", done, total)

    def timing(self, done: int, total: int) -> None:
        self._show("time", done, total)

    def note(self, text: str) -> None:
        self._fleet.note(text)

    def _show(self, phase: str, done: int, total: int) -> None:
        label = self.shorter or (self.problem.label if self.problem else "")
        self._fleet.progress.update(
            self._bar,
            description=f"{self._name} [bold]{label}[/] {phase}",
            completed=done,
            total=total,
            said=escape(self.summary),
        )


class _BarsFleet(Observer):
    """A bar for the whole sweep, and below it one for each card."""

    def __init__(self, progress: Progress, left: FleetLeft) -> None:
        self.progress = progress
        self._fleet_left = left
        self._whole = progress.add_task("sweep", total=None, said="")

    def on(self, card: int, name: str) -> Observer:  # noqa: ARG002
        self._fleet_left.joined(card)
        return _BarCard(self, self._fleet_left, card)

    def planned(self, candidates: Sequence[int], *, finals: bool = True) -> None:  # noqa: ARG002
        self._fleet_left.planned(len(candidates))
        said = counted(len(candidates), "problem")
        self.progress.update(self._whole, total=sum(candidates), description=f"sweep of {said}")

    def ranked(self, trials: Any, environment: Any) -> None:
        from attnsweep.reports import tables

        for line, style in tables.first_rows(trials, environment, self.progress.console.width - 2):
            self.progress.console.print(
                Text(f"  {line}" if line else "", style=style),
                no_wrap=True,
                overflow="ellipsis",
                crop=True,
            )

    def note(self, text: str) -> None:
        self.progress.console.print(escape(text))

    def tried(self, trial: Trial | None = None, *, kept: bool = False) -> None:  # noqa: ARG002
        """One candidate more, on whichever card."""
        self.progress.advance(self._whole)
        self.tell()

    def tell(self) -> None:
        """Show the time left."""
        left = self._fleet_left.left
        self.progress.update(self._whole, said="" if left is None else str(left))
