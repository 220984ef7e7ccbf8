"""The time that a run still takes, once enough of it is seen.

A problem is opened (inputs, reference), searched (its candidates compile, and are checked and timed
once), then decided (race and finals). The first problem also imports, and calls everything for the
first time, so it tells little of the others: nothing is said before a second one is over, and then
the first one is left out. Compiling alone has nothing to decide: half of the candidates are enough.
tests/unit/test_reports_eta_recorded.py replays recorded runs, and holds this to a factor of two.

Compiling runs ahead of timing, so the slower of both rates decides. Both are means of the last
minute or so of a search: a machine that gets busy shows in them soon.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Seconds after which an event counts 1/e in a rate.
_MEMORY_S = 30.0
# Events before a rate is believed.
_FEW = 3
# Problems that must be over before anything is said: the first one alone was off by more than a
# factor of two in 11 of 20 recorded runs, the mean of two in 3, and the second one in none.
_PROBLEMS = 2
# Share of the candidates that must be compiled, where nothing else is done: after a half, the
# searches of 19 of 20 recorded runs kept within a factor of two, after a third 17.
_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Left:
    """Seconds left."""

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


class _Rate:
    """Events a second, with an exponential memory; kept apart from time that others spent."""

    def __init__(self) -> None:
        self._count = self._seconds = 0.0
        self._events = 0

    def passed(self, seconds: float, events: float) -> None:
        """Note that `events` happened in the last `seconds`."""
        keep = math.exp(-seconds / _MEMORY_S)
        self._count = self._count * keep + events
        # The integral of the memory over these seconds, so that a steady rate is met exactly.
        self._seconds = self._seconds * keep + _MEMORY_S * (1 - keep)
        self._events += int(events)

    def seconds_for(self, events: float, waiting_s: float = 0.0) -> float | None:
        """Seconds that `events` more will take; None before the rate is known.

        waiting_s: seconds since the last one.
        """
        if events <= 0:
            return 0.0
        if self._events < _FEW or not self._count:
            return None
        keep = math.exp(-waiting_s / _MEMORY_S)
        seconds = self._seconds * keep + _MEMORY_S * (1 - keep)
        return events * seconds / (self._count * keep)


def usual(seconds: Sequence[float]) -> float:
    """The mean of what has been seen, without the first one if there are others."""
    later = seconds[1:] or seconds
    return sum(later) / len(later) if later else 0.0


class Eta:
    """What a run has done and has to do. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._planned: list[int] = []
        self._finals = True
        self._closed = 0
        """Problems that are done."""
        self._open = False
        self._tried = _Rate()
        self._compiled = _Rate()
        self._looked = clock()
        self._compile_looked = self._looked
        self._done = self._kept = self._ready = 0
        """Candidates of the open problem: done, kept from an earlier run, and compiled."""
        self._all = 0
        """Candidates of all problems that are done."""
        self._seen: set[object] = set()
        self._shares: list[float] = []
        """Share of its planned candidates that each closed problem tried."""
        self._opened_at = self._looked
        self._opened_s: list[float] = []
        """From each problem's beginning to its first candidate."""
        self._finals_at: float | None = None
        self._finals_s: list[float] = []

    # -- what happened ----------------------------------------------------------------------

    def planned(self, candidates: Sequence[int], *, finals: bool = True) -> None:
        """The number of candidates of each problem, in order; whether finals follow."""
        self._planned, self._finals = list(candidates), finals

    def on(self, card: int) -> Eta:  # noqa: ARG002
        """What one of several cards has done and has to do."""
        return self

    def resting(self, *, done: bool) -> None:
        """One of several cards has no problem any more. done: it is over, and not lost."""

    def opening(self, *, measures: bool = True) -> None:  # noqa: ARG002
        """The next problem begins. measures: whether an earlier run left something to measure."""
        self._close()
        self._open = True
        self._opened_at = self._looked = self._compile_looked = self._clock()
        self._done = self._kept = self._ready = 0
        self._seen.clear()

    def _close(self) -> None:
        if not self._open:
            return
        if self._finals_at is not None:
            self._finals_s.append(self._clock() - self._finals_at)
        planned = self._planned[self._closed] if self._closed < len(self._planned) else 0
        if planned and self._done:
            self._shares.append(min(1.0, self._done / planned))
        self._closed += 1
        self._finals_at = None
        self._open = False

    def compiled(self, done: int) -> None:
        """So many candidates of the open problem are compiled."""
        now = self._clock()
        if self._ready:  # until the first one the problem was opened
            self._compiled.passed(now - self._compile_looked, max(0, done - self._ready))
        self._ready, self._compile_looked = max(done, self._ready), now

    def tried(self, key: object, *, kept: bool) -> None:
        """A candidate has a row; a kept one tells nothing of the rate, nor does a second row."""
        if key in self._seen:
            return
        self._seen.add(key)
        self._done += 1
        self._all += 1
        now = self._clock()
        if kept:
            self._kept += 1
        elif self._finals_at is None and self._done == self._kept + 1:
            self._opened_s.append(now - self._opened_at)
        elif self._finals_at is None:
            self._tried.passed(now - self._looked, 1)
        self._looked = now

    def finals(self) -> None:
        """The race or the rounds of the open problem go on."""
        if self._finals_at is None:
            self._finals_at = self._clock()

    # -- what is left -----------------------------------------------------------------------

    @property
    def left(self) -> Left | None:
        """The time left; None before enough of the run is seen."""
        if not (self._planned and self._seen_enough()):
            return None
        later = len(self._planned) - self._closed - self._open
        seconds = self._opening_s(later) + self._search_s()
        return Left(seconds + (self._deciding_s(later) if self._finals else 0.0))

    def _seen_enough(self) -> bool:
        if self._finals:
            return len(self._finals_s) >= _PROBLEMS
        return self._all >= max(_FEW, _SHARE * sum(self._planned))

    def _opening_s(self, later: int) -> float:
        each = usual(self._opened_s)
        waits = self._open and self._finals_at is None and self._done == self._kept
        here = max(0.0, each - (self._clock() - self._opened_at)) if waits else 0.0
        return here + later * each

    def _search_s(self) -> float:
        share = sum(self._shares) / len(self._shares) if self._shares else 1.0
        later = share * sum(self._planned[self._closed + self._open :])
        here = 0.0
        searching = self._open and self._finals_at is None
        if searching and self._closed < len(self._planned):
            here = max(0.0, share * self._planned[self._closed] - self._done)
            here = here or float(self._planned[self._closed] > self._done)
        searching = searching and self._done > self._kept
        now = self._clock()
        by_trial = self._tried.seconds_for(here + later, now - self._looked if searching else 0.0)
        compiled = max(0.0, here + later - max(0, self._ready - self._done))
        by_compiler = self._compiled.seconds_for(
            compiled, now - self._compile_looked if searching else 0.0
        )
        return max(by_trial or 0.0, by_compiler or 0.0)

    def _deciding_s(self, later: int) -> float:
        """Seconds of races and finals to come."""
        each = usual(self._finals_s)
        here = each if self._open else 0.0
        if self._finals_at is not None:
            here = max(0.0, each - (self._clock() - self._finals_at))
        return here + later * each
