"""Estimates how long a run still takes, from the time that problems took so far.

A card's first problem also imports, and calls everything for the first time, so it tells little of
the others: it is left out, and nothing is said before another one is over. On several cards the
problems that end first are the short ones, so those that still run count too, as long as they have
run. Compiling alone has nothing to decide: half of the candidates are enough, at the pace of the
last of them.
tests/recorded/test_reports_eta_recorded.py replays recorded runs, and holds this to a factor of
two.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Problems a card, after its first one, that must be over before anything is said of several cards;
# of one card one is enough. The first estimates of recorded runs on two and four cards were then
# within a factor of two, but for one.
_SEEN = 1.5
# Share of the candidates that must be compiled, where nothing else is done, and rows that say how
# fast: a machine that gets busy shows in them soon.
_SHARE, _ROWS = 0.5, 32


@dataclass(frozen=True, slots=True)
class Left:
    """An estimate of the seconds left."""

    seconds: float

    def __str__(self) -> str:
        """`about 50 s left`, `about 12 min left`."""
        return f"about {_said(self.seconds)} left"


def _said(seconds: float) -> str:
    if seconds < 10:
        return f"{max(1, math.ceil(seconds))} s"
    if seconds < 90:
        return f"{10 * math.ceil(seconds / 10)} s"
    minutes = math.ceil(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {10 * (minutes % 60 // 10)} min"


class Eta:
    """Problems that the cards of a run have done and have left. `clock` returns seconds."""

    def __init__(self, cards: int = 1, clock: Callable[[], float] | None = None) -> None:
        self._cards, self._clock = cards, clock or time.monotonic
        self._problems = self._candidates = 0
        self._finals = True
        self._running: dict[int, tuple[float, bool]] = {}
        self._over = 0
        self._begun: set[int] = set()
        """Cards that are done with their first problem."""
        self._took_s: list[float] = []
        self._done: set[object] = set()
        """Candidates that have a row."""
        self._rows: deque[float] = deque(maxlen=_ROWS)
        """When the last of them got it."""

    def planned(self, candidates: Sequence[int], *, finals: bool = True) -> None:
        """The number of candidates of each problem; whether a race and finals follow."""
        self._problems, self._candidates = len(candidates), sum(candidates)
        self._finals = finals

    def joined(self, card: int) -> None:
        """A card with this number is there, perhaps late."""
        self._cards = max(self._cards, card + 1)

    def opening(self, card: int, *, measures: bool) -> None:
        """A card begins a problem; the one before is over.

        measures: whether an earlier run left something to measure.
        """
        self.resting(card, done=True)
        self._running[card] = (self._clock(), measures)

    def resting(self, card: int, *, done: bool) -> None:
        """A card has no problem any more. done: it is over, and not lost."""
        if card not in self._running:
            return
        began, measures = self._running.pop(card)
        self._over += done
        if done and measures and card in self._begun:
            self._took_s.append(self._clock() - began)
        elif done and measures:
            self._begun.add(card)

    def tried(self, key: object, *, kept: bool) -> None:
        """A candidate has a row; a kept one tells nothing of the pace, nor does a second row."""
        if key not in self._done:
            self._done.add(key)
            if not kept:
                self._rows.append(self._clock())

    @property
    def left(self) -> Left | None:
        """The time left; None before enough of the run is seen."""
        if not self._finals and self._rows:
            return self._of_candidates()
        if len(self._took_s) < (_SEEN * self._cards if self._cards > 1 else 1):
            return None
        now = self._clock()
        run_s = {card: now - began for card, (began, _) in self._running.items()}
        run = [c for c in self._begun & run_s.keys() if self._running[c][1] and self._cards > 1]
        mean_s = (sum(self._took_s) + sum(run_s[card] for card in run)) / len(self._took_s)
        waiting = self._problems - self._over - len(self._running)
        running = [max(0.0, mean_s - seconds) for seconds in run_s.values()]
        shared = (waiting * mean_s + sum(running)) / min(self._cards, max(1, self._problems))
        return Left(max(shared, *running, 0.0))

    def _of_candidates(self) -> Left | None:
        """Seconds for the candidates that are left, at the pace of the last ones."""
        steps = len(self._rows) - 1
        if steps < 1 or len(self._done) < _SHARE * self._candidates:
            return None
        each_s = (self._clock() - self._rows[0]) / steps
        return Left(max(0.0, (self._candidates - len(self._done)) * each_s))
