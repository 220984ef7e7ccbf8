"""× base: the fastest baseline's time over a row's own, paired by rounds, with its interval.

A baseline whose rounds scatter too much is not left out, because the ratio to a slower one would
flatter us: its fastest round stands for it, so that the ratio is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from attnsweep.choose.pace import (
    last_round,
    pace_of_rounds,
    rounds_at_pace,
    rounds_of,
    session,
    time_kind,
)
from attnsweep.choose.stats import ratio_interval
from attnsweep.core.trial import OURS, Status, Trial
from attnsweep.specs.model import PLAIN_READ, in_other_format


def common_rounds(one: Trial, other: Trial) -> tuple[list[float], list[float]]:
    """The times of both in the rounds that both ran; empty if there are none."""
    if not (rounds_of(one) and rounds_of(other)) or session(one) != session(other):
        return [], []
    assert one.time_us is not None
    assert other.time_us is not None
    first = max(one.time_us.first_round, other.time_us.first_round)
    last = min(last_round(one), last_round(other))
    count = max(0, last - first)
    own = one.time_us.rounds[first - one.time_us.first_round :][:count]
    return own, other.time_us.rounds[first - other.time_us.first_round :][:count]


class Ratio(NamedTuple):
    """The base's time over a row's. low, high: its 95 % interval, NaN where none can be given.

    of: `rounds` (median and sign interval of the paired ratios), `medians` (no round in common),
    `bound` (the base is noisy: its fastest round over this row's median), or None without a ratio.
    """

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    of: str | None = None


@dataclass(frozen=True, slots=True)
class Base:
    """The fastest baseline of a problem, in µs at the usual pace of the rounds (pace.at_pace).

    noisy: only its fastest round is believed, as it was and at that pace, whichever is less.
    """

    trial: Trial
    noisy: bool
    us: float

    def ratio(self, trial: Trial, paced_us: float | None = None) -> Ratio:
        """The base's time over the trial's: above 1, the trial is faster.

        paced_us: the trial's time at the pace of the rounds; if None, its median.
        """
        time = trial.time_us
        if time is None or not time.median > 0 or time_kind(trial) != time_kind(self.trial):
            return Ratio()
        base, own = common_rounds(self.trial, trial)
        apart = self.us / (paced_us or time.median)
        if not (own or self.noisy):
            return Ratio(apart, of="medians")
        paired = zip(base, own, strict=True) if all(us > 0 for us in own) else ()
        ratios = [a / b for a, b in paired]
        if self.noisy:
            # The base itself would be faster than itself.
            same = trial.key == self.trial.key
            return Ratio() if same else Ratio(min([apart, *ratios]), of="bound")
        if not ratios:
            return Ratio(apart, of="medians")
        return Ratio(median(ratios), *ratio_interval(base, own), of="rounds")


def fastest_round(trial: Trial) -> float:
    """The time in µs of the fastest round of a baseline, also of those that were discarded."""
    time = trial.time_us
    return min([*time.rounds, *time.discarded, time.low]) if time is not None else math.inf


def fastest_baseline(
    trials: Sequence[Trial], statuses: Mapping[int, Status], paced: Mapping[int, float]
) -> Base | None:
    """The base among the rows of a problem, or None. statuses: by id, as the ranking judges them.

    paced: the times of those that are ok at one pace, by id: see pace.at_pace.

    A baseline over the error limit counts, one that is listed below the ranking never does. A noisy
    baseline counts with its fastest round.
    """
    good = [trial for trial in trials if statuses[id(trial)] is Status.OK]
    found = []
    for trial in trials:
        time, status = trial.time_us, statuses[id(trial)]
        if not may_be_base(trial) or time is None:
            continue
        known = [time.median, time.low, *time.rounds]
        sound = all(math.isfinite(us) and us > 0 for us in known)
        if sound and status is Status.OK:
            found.append(Base(trial, noisy=False, us=paced[id(trial)]))
        elif sound and status is Status.NOISY:
            pace = pace_of_rounds([t for t in good if session(t) == session(trial)])
            us = min([fastest_round(trial), *rounds_at_pace(trial, pace)])
            found.append(Base(trial, noisy=True, us=us))
    return min(found, key=lambda base: (base.us, base.noisy, base.trial.provider), default=None)


def may_be_base(trial: Trial) -> bool:
    """Whether others are compared with it, if it is right: a baseline that competes."""
    return trial.provider != OURS and not trial.candidate and below_ranking(trial) is None


def below_ranking(trial: Trial) -> str | None:
    """Why a baseline is listed below the ranking and never the base; None if it competes.

    Four kinds are listed there: a plain read is no attention, but a bound; another format is
    another problem; calls that no CUDA graph holds have the host's time in them; strictly judged
    calls are timed in chains. A baseline over the error limit competes: the limit is our own rule,
    and the ratio to a slower one would flatter us.
    """
    if trial.provider == PLAIN_READ:
        return "it computes no attention, and reads K and V once: a bound"
    if trial.provider != OURS and in_other_format(trial.provider, trial.problem):
        return f"it does not compute in {trial.problem.dtype}"
    if (facts := trial.strict) and trial.issued is None:
        said = [f"{facts['ratio']:.2f}× {facts['base']}"] if "base" in facts else []
        if (us := facts.get("trusted_us")) is not None:
            said.append(f"{us:.4g} µs by the judge's clock")
        return ": ".join(["judged strictly", ", ".join(said)])
    return trial.issued
