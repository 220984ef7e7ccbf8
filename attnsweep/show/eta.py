"""The time that a run still takes, from the rates at which it has worked so far.

A problem is first searched (its candidates compile, and are checked and timed once), then decided
(race and finals). Compiling runs ahead of timing, so the slower of both rates decides. Every rate
is the mean of the last minute or so: a machine that gets busy shows in it soon.
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


@dataclass(frozen=True, slots=True)
class Left:
    """Seconds left. at_least: something that takes time has not been seen yet, so it is missing."""

    seconds: float
    at_least: bool

    def __str__(self) -> str:
        """`about 50 s left`, `at least 12 min left`."""
        return f"{'at least' if self.at_least else 'about'} {_said(self.seconds)} left"


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
        self._seen: set[object] = set()
        self._shares: list[float] = []
        """Share of its planned candidates that each closed problem tried."""
        self._finals_s: list[float] = []
        self._finals_at: float | None = None
        self._rounds = (0, 0)
        self._rounds_at: float | None = None

    # -- what happened ----------------------------------------------------------------------

    def planned(self, candidates: Sequence[int], *, finals: bool = True) -> None:
        """The number of candidates of each problem, in order; whether finals follow."""
        self._planned, self._finals = list(candidates), finals

    def opening(self) -> None:
        """The next problem begins."""
        self._close()
        self._open = True
        self._looked = self._compile_looked = self._clock()
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
        self._finals_at = self._rounds_at = None
        self._rounds = (0, 0)
        self._open = False

    def compiled(self, done: int) -> None:
        """So many candidates of the open problem are compiled."""
        now = self._clock()
        self._compiled.passed(now - self._compile_looked, max(0, done - self._ready))
        self._ready, self._compile_looked = max(done, self._ready), now

    def tried(self, key: object, *, kept: bool) -> None:
        """A candidate has a row; a kept one tells nothing of the rate, nor does a second row."""
        if key in self._seen:
            return
        self._seen.add(key)
        self._done += 1
        if kept:
            self._kept += 1
            self._looked = self._clock()
        elif self._finals_at is None:
            now = self._clock()
            self._tried.passed(now - self._looked, 1)
            self._looked = now

    def finals(self, done: int = 0, total: int = 0) -> None:
        """The race or the rounds of the open problem go on. done, total: its rounds."""
        now = self._clock()
        if self._finals_at is None:
            self._finals_at = now
        if total and self._rounds_at is None:
            self._rounds_at = now
            self._rounds = (done, total)
        elif total:
            self._rounds = (done, total)

    # -- what is left -----------------------------------------------------------------------

    @property
    def left(self) -> Left | None:
        """The time left; None while nothing that takes time has been measured."""
        if not self._planned:
            return None
        share = sum(self._shares) / len(self._shares) if self._shares else 1.0
        later = share * sum(self._planned[self._closed + self._open :])
        here = 0.0
        if self._open and self._finals_at is None and self._closed < len(self._planned):
            here = max(0.0, share * self._planned[self._closed] - self._done)
            here = here or float(self._planned[self._closed] > self._done)
        now = self._clock()
        searching = self._open and self._finals_at is None
        by_trial = self._tried.seconds_for(here + later, now - self._looked if searching else 0.0)
        compiled = max(0.0, here + later - max(0, self._ready - self._done))
        by_compiler = self._compiled.seconds_for(
            compiled, now - self._compile_looked if searching else 0.0
        )
        known = [each for each in (by_trial, by_compiler) if each is not None]
        if here + later and not known:
            return None
        search_s = max(known, default=0.0)
        decided_s, missing = self._deciding(now)
        if not search_s and not decided_s and missing and not self._finals_at:
            return None
        return Left(search_s + decided_s, missing)

    def _deciding(self, now: float) -> tuple[float, bool]:
        """Seconds of races and finals to come, and whether some of them are unknown."""
        if not self._finals:
            return 0.0, False
        mean = sum(self._finals_s) / len(self._finals_s) if self._finals_s else None
        later = len(self._planned) - self._closed - 1
        here: float | None = mean
        if not self._open:
            here, later = 0.0, later + 1
        elif self._finals_at is not None:
            done, total = self._rounds
            if self._rounds_at is not None and done > 1:
                here = (now - self._rounds_at) / (done - 1) * max(0, total - done)
            elif mean is not None:
                here = max(0.0, mean - (now - self._finals_at))
        if mean is None and later > 0 and here is not None and self._finals_at is not None:
            mean = now - self._finals_at + here
        unknown = here is None or (mean is None and later > 0)
        return (here or 0.0) + max(0, later) * (mean or 0.0), unknown
