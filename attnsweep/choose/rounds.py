"""Rounds: each round times every entry once, in random order, and records the card's state.

Drift (clocks, heat, a neighbour) then affects all alike, and the ratio of two entries is taken
within a round. A round in another state of the card than the usual is repeated, or marked.

Each step before the first round is reported to the observer.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from attnsweep.bench.gpu import Gpu, WorkerError
from attnsweep.core.observer import Observer
from attnsweep.core.trial import Measurement, Status, Trial

# SM clocks further apart than this are two states: an H200's steps are 15 MHz of 1980, 0.8 %.
SAME_CLOCK = 0.02
# Times of one entry closer than this, three times in a row, are steady.
_STEADY = 0.01
# A card that is not steady after this many rounds never will be; the row then says so.
_WARM_UP_ROUNDS = 20
# The largest number of times that one round is repeated; then it is kept as it is.
_REPEATS = 3
# Throttle reasons that are events of the card. A power cap is not one, because a busy card is
# always at it; the clock shows its effect.
_EVENTS = frozenset({"hardware_slowdown", "thermal_software", "thermal_hardware", "power_brake"})
# Rounds of long calls take about this in all, but are this many at least.
_LONG_US, _LEAST = 10e6, 3
# A baseline's call is taken to be this many times as long as our slowest.
_BASELINE = 1.3
_NUMBERS = ("sm_mhz", "memory_mhz", "power_w", "temperature_c", "other_processes")

Replay = Callable[[str], float]
Conditions = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Round:
    """One round: microseconds of a call of each entry, and the card's state right after."""

    times: Mapping[str, float]
    conditions: Conditions


def difference(now: Conditions, usual: Conditions) -> str | None:
    """The difference between two states of the card that makes times incomparable, or None.

    Differences are an SM clock more than 2 % apart, a slowdown for heat or power supply, or more
    processes on the GPU. A value that NVML did not report is no difference.
    """
    clock, before = now.get("sm_mhz"), usual.get("sm_mhz")
    if clock and before and abs(clock / before - 1) > SAME_CLOCK:
        return f"SM clock {clock:g} MHz, not {before:g}"
    events = _EVENTS & set(now.get("throttle") or ()) - set(usual.get("throttle") or ())
    if events:
        return ", ".join(sorted(events))
    if (now.get("other_processes") or 0) > (usual.get("other_processes") or 0):
        return f"{now['other_processes']} other processes on the GPU"
    return None


def _worth_repeating(now: Conditions, usual: Conditions) -> bool:
    """Whether to take a round again; not for the clock of a card at its power cap.

    That clock moves from round to round (an H200: 1725 to 1980 MHz). Repeating for it turned 45
    rounds into 118, whose clocks were no more alike; entries are compared within a round anyway.
    """
    if "power_cap" in (now.get("throttle") or ()):
        now = {name: value for name, value in now.items() if name != "sm_mhz"}
    return difference(now, usual) is not None


def _steady(last: Sequence[Round], name: str) -> bool:
    """Whether an entry's last three rounds agree in time and in the card's state."""
    if len(last) < 3:
        return False
    times = [each.times[name] for each in last]
    alike = all(difference(each.conditions, last[0].conditions) is None for each in last)
    return alike and max(times) <= (1 + _STEADY) * min(times)


class Rounds:
    """Takes rounds of the named entries on the GPU."""

    def __init__(self, gpu: Gpu, *, seed: int, fail: Callable[[str, WorkerError], None]) -> None:
        """fail: called with an entry that failed, which is then missing from the round's times."""
        self._gpu, self._fail = gpu, fail
        self._random = random.Random(seed)
        self._usual: Conditions = {}
        self.warm_up_rounds = 0
        self.steady = True
        self.repeated = 0

    def warm_up(self, names: Sequence[str], replay: Replay) -> None:
        """Run all entries once, uncounted, then the first until clock and times are steady."""
        times = self._times(names, replay)
        alive = [name for name in names if name in times]
        self.warm_up_rounds, self.steady = 1, False
        seen: list[Round] = []
        while alive and not self.steady and len(seen) < _WARM_UP_ROUNDS:
            this = Round(self._times(alive[:1], replay), self._conditions())
            self.warm_up_rounds += 1
            if this.times:
                seen.append(this)
                self.steady = _steady(seen[-3:], alive[0])
            else:
                alive, seen = alive[1:], []
        self._usual = self._conditions()

    def begin(self) -> None:
        """Take the card's state as the usual one without a warm-up, as long calls have none."""
        self._usual = self._conditions()

    def round(self, names: Sequence[str], replay: Replay, *, repeats: int = _REPEATS) -> Round:
        """Take one round; repeat it, at most `repeats` times, while the card's state differs.

        After repeats in vain, the last state becomes the usual one. The decision looks only at the
        conditions, never at times, so that it favours no entry.
        """
        left = min(repeats, _REPEATS)
        while True:
            this = Round(self._times(names, replay), self._conditions())
            names = [name for name in names if name in this.times]
            if not _worth_repeating(this.conditions, self._usual):
                return this
            if left <= 0:
                self._usual = this.conditions
                return this
            left -= 1
            self.repeated += 1

    def _times(self, names: Iterable[str], replay: Replay) -> dict[str, float]:
        times = {}
        ordered = sorted(names)
        for name in self._random.sample(ordered, len(ordered)):
            try:
                times[name] = replay(name)
            except WorkerError as error:
                if (again := self._again(name, replay, error)) is not None:
                    times[name] = again
        return times

    def _again(self, name: str, replay: Replay, error: WorkerError) -> float | None:
        """The time of an entry that failed, or None if it failed again.

        A process that is lost while an entry is timed may be the fault of the one before, whose
        launches end later: PyTorch's memory-efficient backward with a mask does that.
        """
        if error.status is Status.LAUNCH_ERROR:
            try:
                return replay(name)
            except WorkerError as second:
                error = second
        self._fail(name, error)
        return None

    def _conditions(self) -> Conditions:
        with contextlib.suppress(WorkerError):
            return self._gpu.conditions()
        return {}

    def summary(self, rounds: Sequence[Round]) -> dict[str, Any]:
        """What NVML reported of the card in a row's rounds.

        sm_mhz, memory_mhz, power_w: medians; temperature_c, other_processes: the largest; throttle:
        every reason seen. rounds: the same values of each round. strays: rounds (counted from 0)
        whose state differs from the median state, and how. steady: whether warm-up became steady;
        repeated: how many rounds were taken again.
        """
        return summary([each.conditions for each in rounds]) | {
            "warm_up_rounds": self.warm_up_rounds,
            "steady": self.steady,
            "repeated": self.repeated,
        }


def summary(conditions: Sequence[Conditions]) -> dict[str, Any]:
    """The part of Rounds.summary that follows from the conditions alone."""
    found: dict[str, Any] = {}
    each: dict[str, list[Any]] = {}
    for name in _NUMBERS:
        values = [c.get(name) for c in conditions]
        known = [value for value in values if value is not None]
        if known:
            largest = name in ("temperature_c", "other_processes")
            found[name] = max(known) if largest else statistics.median(known)
            each[name] = values
    if any("throttle" in c for c in conditions):
        each["throttle"] = [list(c.get("throttle") or ()) for c in conditions]
        found["throttle"] = sorted({reason for reasons in each["throttle"] for reason in reasons})
    if not found:
        return {}
    # Compared with the median state, no round is a stray for what most rounds share.
    common = {
        "sm_mhz": found.get("sm_mhz"),
        "throttle": [
            reason
            for reason in found.get("throttle", ())
            if 2 * sum(reason in reasons for reasons in each["throttle"]) > len(conditions)
        ],
        "other_processes": statistics.median_low(
            [value for value in each.get("other_processes", []) if value is not None] or [0]
        ),
    }
    strays = {
        str(number): differs
        for number, now in enumerate(conditions)
        if (differs := difference(now, common)) is not None
    }
    return found | {"rounds": each, "strays": strays}


def affordable(first_us: Sequence[float], others: int, most: int) -> int:
    """How many rounds long calls get. first_us: of our entries. others: how many baselines."""
    round_us = sum(first_us) + others * _BASELINE * max(first_us, default=0.0)
    fit = int(_LONG_US / round_us) if 0 < round_us < math.inf else 0
    return max(_LEAST, min(most, fit))


def measured(times: Sequence[float]) -> Measurement:
    """The median and the quartiles of one entry's rounds."""
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else [*times] * 3
    return Measurement(median=statistics.median(times), low=low, high=high, samples=len(times))


def together(rows: Sequence[Trial]) -> list[Trial]:
    """Mark rows that share rounds with the group's name and size.

    They are stored one by one. If that is interrupted, a resumed run sees that some are missing.
    """
    rounds = [trial.time_us.rounds for trial in rows if trial.time_us]
    facts = {"name": hashlib.sha256(repr(rounds).encode()).hexdigest()[:12], "rows": len(rows)}
    return [trial.with_(conditions={**trial.conditions, "together": facts}) for trial in rows]


@contextmanager
def prepared(what: str, gpu: Gpu, observer: Observer) -> Iterator[None]:
    """Report what is prepared inside: its seconds, and those of the GPU process's steps."""
    began = time.monotonic()
    try:
        yield
    finally:
        steps_s = dict(gpu.steps_s)
        gpu.steps_s.clear()
        observer.prepared(what, time.monotonic() - began, steps_s)
