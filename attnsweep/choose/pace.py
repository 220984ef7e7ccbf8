"""Times of a problem's rows at one pace of the card, so that rows without common rounds compare.

A hot or capped card is slower than a cool one: finals recorded on an H200 ran at 1395 to 1980 MHz.
A candidate that was timed while the card was fast, in a first time, a race, or the first of many
rounds, would seem the best by its median alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean, median
from typing import Any

from attnsweep.core.trial import Trial, race_ratio

# Rounds whose paces are closer, but for an eighth at either end, are those of one steady card.
_STEADY = 1.05


def time_kind(trial: Trial) -> str:
    """The kind of its time: warm, cold or eager."""
    return trial.time_us.l2 if trial.time_us is not None else "warm"


def session(trial: Trial) -> tuple[object, ...]:
    """The session and kind of time of a row: only rows that share both have common rounds."""
    return (trial.recorded, trial.recorded_on, time_kind(trial))


def time_of(trial: Trial) -> float:
    """The trial's median in microseconds; infinite without a time."""
    return trial.time_us.median if trial.time_us is not None else math.inf


def rounds_of(trial: Trial) -> list[float]:
    """A trial's times, one for each round; empty if it was in none."""
    return trial.time_us.rounds if trial.time_us is not None else []


def first_round(trial: Trial) -> int:
    """The number of its problem's rounds when its first one began."""
    return trial.time_us.first_round if trial.time_us else 0


def last_round(trial: Trial) -> int:
    """The number of its problem's rounds when its last one was over."""
    return first_round(trial) + len(rounds_of(trial))


def label_of_row(trial: Trial) -> str:
    """A row's name in messages: `flash BLOCK_M=64 SWIZZLE=1`."""
    return f"{trial.kernel} {settings(tuple(trial.config.items()))}".rstrip()


@lru_cache(maxsize=2**14)
def settings(config: tuple[tuple[str, object], ...]) -> str:
    """`BLOCK_M=64 SWIZZLE=1`: each parameter with its value as -D writes it."""
    return " ".join(f"{n}={int(v) if isinstance(v, bool) else v}" for n, v in config)


def at_pace(trials: Sequence[Trial]) -> dict[int, float]:
    """The time of each row of a problem, in µs, at the usual pace of its session's rounds; by id.

    That is the median of a row that was in all rounds. That of one that left, or came, is divided
    by what those in all rounds took in the same ones, relative to their own medians.

    A row without rounds was timed in another state: on a hot H100 rounds took up to 1.3 times as
    long as first times, and candidates that never raced seemed 20 % faster than the finalists. Its
    first time is multiplied by what rounds usually take of a first time, in µs and in clock cycles.
    If it lost a race, the row that beat it is multiplied by the ratio of the two there. The largest
    counts, so that all must say that it is fast.
    """
    by_session: dict[tuple[object, ...], list[Trial]] = {}
    for trial in trials:
        by_session.setdefault(session(trial), []).append(trial)
    us: dict[int, float] = {}
    for rows in by_session.values():
        us |= _of_session(rows)
    return us


def pace_of_rounds(trials: Sequence[Trial]) -> list[float]:
    """The pace of each round of a session, 1 the usual one; empty if no row was in all rounds."""
    count = max(map(last_round, trials), default=0)
    return pace_of([rounds_of(t) for t in trials if len(rounds_of(t)) == count])


def pace_of(whole: Sequence[Sequence[float]]) -> list[float]:
    """The pace of each round: the median of the entries' times over their own medians.

    whole: the times of the entries that were in all rounds; without any there is no pace.
    """
    middles = [median(times) for times in whole if times]
    return [
        median(us / middle for us, middle in zip(this, middles, strict=True))
        for this in zip(*whole, strict=True)
    ]


def rounds_at_pace(trial: Trial, pace: Sequence[float]) -> list[float]:
    """The rounds of a row without the pace of pace_of_rounds, in µs; as they are without one."""
    own, first = rounds_of(trial), first_round(trial)
    if len(pace) < first + len(own):
        return own
    return [us / slow for us, slow in zip(own, pace[first:], strict=False)]


def _of_session(rows: Sequence[Trial]) -> dict[int, float]:
    us = {id(t): time_of(t) for t in rows}
    timed = [t for t in rows if rounds_of(t)]
    count = max(map(last_round, timed), default=0)
    whole = [rounds_of(t) for t in timed if len(rounds_of(t)) == count]
    pace = _steps(whole)
    for trial in timed:
        begin, end = first_round(trial), last_round(trial)
        if pace and end <= count:
            us[id(trial)] = median(
                us / slow for us, slow in zip(rounds_of(trial), pace[begin:end], strict=True)
            )
        elif whole and end - begin < count:
            # One factor for all that ran the same rounds, whose medians compare as they are.
            us[id(trial)] /= median(median(each[begin:end]) / median(each) for each in whole)
    of_first, of_cycles = (
        median([us[id(t)] / value for t in timed if (value := first(t))] or [0.0])
        for first in (_first_us, _first_cycles)
    )
    if not timed:
        return us
    raced = [trial for trial in rows if trial.race or rounds_of(trial)]
    names = {label_of_row(trial): trial for trial in raced}
    for trial in rows:
        if not rounds_of(trial):  # its first time, by the usual ratio of the two
            first = _first_us(trial) * of_first, _first_cycles(trial) * of_cycles
            us[id(trial)] = max(us[id(trial)], *first)
    raced_us = {id(t): _raced_us(t, names, us, frozenset()) for t in rows if t.race}
    return us | raced_us


def _raced_us(
    trial: Trial, names: Mapping[str, Trial], alone: Mapping[int, float], seen: frozenset[int]
) -> float:
    """The time of a row by itself and, without rounds, by those that beat it in a race.

    alone: the times of rows by themselves.
    """
    # Not in the function above: a closure that calls itself keeps the rows of a problem forever
    # where collection pauses.
    least = alone[id(trial)]
    if rounds_of(trial):
        return least
    other = names.get(str(trial.race.get("against")))
    if other is None or other is trial or id(other) in seen:
        return least
    behind = _raced_us(other, names, alone, seen | {id(trial)}) * _behind(trial.race)
    return max(least, behind)


def _steps(whole: Sequence[Sequence[float]]) -> list[float]:
    """The pace of each round, 1 in the middle, on a card with several; empty for a steady card.

    Where half of the rounds were slow, the medians of two rows may be of either half. Geometric
    means are of both.
    """
    means = [math.exp(fmean(map(math.log, times))) for times in whole]
    pace = [
        median(us / mean for us, mean in zip(this, means, strict=True))
        for this in zip(*whole, strict=True)
    ]
    ordered = sorted(pace)
    if len(pace) < 4 or ordered[-1 - len(pace) // 8] < _STEADY * ordered[len(pace) // 8]:
        return []
    usual = median(median(times) / mean for times, mean in zip(whole, means, strict=True))
    return [each / usual for each in pace]


def _first_us(trial: Trial) -> float:
    return trial.first_us or 0.0


def _first_cycles(trial: Trial) -> float:
    return (trial.first_us or 0.0) * (trial.first_mhz or 0.0)


def _behind(race: Mapping[str, Any]) -> float:
    """The middle of the interval of its ratio to the other in the race; 0 if that has no limit."""
    low, high = race_ratio(race)
    return math.sqrt(low * high) if low and high else 0.0
