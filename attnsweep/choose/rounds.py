"""Rounds: everyone is timed once a round, in random order, next to what the card did meanwhile.

What drifts (clocks, heat, a neighbour) then meets all alike, and the ratio of two entries is taken
within a round. A round is of one state of the card, or it is repeated, or it is marked.
"""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnsweep.gpu.worker import Gpu, WorkerError
from attnsweep.trial import Measurement

# SM clocks further apart than this are two states: an H200's steps are 15 MHz of 1980, 0.8 %.
SAME_CLOCK = 0.02
# Times of one entry closer than this, three times in a row, are steady.
_STEADY = 0.01
# A card that is not steady after so many does not become so; the row then says it was not.
_WARM_UP_ROUNDS = 20
# How often one round is repeated, at most, before it is kept as it is.
_REPEATS = 3
# Reasons that are an event of the card. A power cap is where a busy card lives: its clock tells.
_EVENTS = frozenset({"hardware_slowdown", "thermal_software", "thermal_hardware", "power_brake"})
_NUMBERS = ("sm_mhz", "memory_mhz", "power_w", "temperature_c", "other_processes")

Replay = Callable[[str], float]
Conditions = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Round:
    """One round: microseconds of a call of each entry, and the card's state right after."""

    times: Mapping[str, float]
    conditions: Conditions


def difference(now: Conditions, usual: Conditions) -> str | None:
    """In what two states of the card differ so that times are not comparable; None if in nothing.

    The SM clock by more than 2 %, a slowdown for heat or power supply, or other processes on it.
    What NVML did not tell differs in nothing.
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
    """Whether a round is better taken again: not for the clock of a card at its power cap.

    That clock moves from round to round (an H200: 1725 to 1980 MHz), so that 45 rounds became 118
    and their clocks no more alike; entries are compared within a round.
    """
    if "power_cap" in (now.get("throttle") or ()):
        now = {name: value for name, value in now.items() if name != "sm_mhz"}
    return difference(now, usual) is not None


def _steady(last: Sequence[Round], name: str) -> bool:
    """Whether three rounds of one entry are alike in time, and their conditions in state."""
    if len(last) < 3:
        return False
    times = [each.times[name] for each in last]
    alike = all(difference(each.conditions, last[0].conditions) is None for each in last)
    return alike and max(times) <= (1 + _STEADY) * min(times)


class Rounds:
    """Takes rounds of the entries that are named, on the GPU."""

    def __init__(self, gpu: Gpu, *, seed: int, fail: Callable[[str, WorkerError], None]) -> None:
        """fail: told of an entry that failed; it is then missing from the round's times."""
        self._gpu, self._fail = gpu, fail
        self._random = random.Random(seed)
        self._usual: Conditions = {}
        self.warm_up_rounds = 0
        self.steady = True
        self.repeated = 0

    def warm_up(self, names: Sequence[str], replay: Replay) -> None:
        """Everyone once, uncounted, then the first of them until clock and times are steady."""
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

    def round(self, names: Sequence[str], replay: Replay, *, repeats: int = _REPEATS) -> Round:
        """One round; repeated, at most `repeats` times, while the card's state is another.

        The state that a repeated round ends in is then the usual one. The choice looks at the
        conditions alone, never at times, so that it favours nobody.
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
                self._fail(name, error)
        return times

    def _conditions(self) -> Conditions:
        with contextlib.suppress(WorkerError):
            return self._gpu.conditions()
        return {}

    def summary(self, rounds: Sequence[Round]) -> dict[str, Any]:
        """What a row says of the conditions of its rounds, as far as NVML told them.

        sm_mhz, memory_mhz, power_w: medians; temperature_c, other_processes: the largest;
        throttle: every reason seen. rounds: the same of each round. strays: of the rounds (counted
        from 0) in another state than the median, in what. steady: whether warm-up became so;
        repeated: how many rounds were taken again.
        """
        return summary([each.conditions for each in rounds]) | {
            "warm_up_rounds": self.warm_up_rounds,
            "steady": self.steady,
            "repeated": self.repeated,
        }


def summary(conditions: Sequence[Conditions]) -> dict[str, Any]:
    """The part of Rounds.summary that the rounds' conditions alone decide."""
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
    # Against the median state, no round is at fault for what most of them share.
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


def measured(times: Sequence[float]) -> Measurement:
    """The median and the quartiles of one entry's rounds."""
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else [*times] * 3
    return Measurement(median=statistics.median(times), low=low, high=high, samples=len(times))
