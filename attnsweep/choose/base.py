"""× base: the time of the fastest peer known over a row's own, paired by rounds, with its interval.

A peer whose rounds scatter too much is not left out, because the ratio to a slower one would
flatter us: its fastest round stands for it, so that the ratio is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from attnsweep.choose.evidence import ratio_interval
from attnsweep.spec.model import in_other_format
from attnsweep.trial import OURS, Status, Trial


def time_kind(trial: Trial) -> str:
    """The kind of its time: warm, cold or eager."""
    return trial.time_us.l2 if trial.time_us is not None else "warm"


def session(trial: Trial) -> tuple[object, ...]:
    """Rows of one problem pair their rounds only within a session and a kind of time."""
    return (trial.recorded, trial.recorded_on, time_kind(trial))


def rounds_of(trial: Trial) -> list[float]:
    """Its rounds; empty if it was not in any."""
    return trial.time_us.rounds if trial.time_us is not None else []


def last_round(trial: Trial) -> int:
    """The number of its problem's rounds when its last one was over."""
    return (trial.time_us.first_round if trial.time_us else 0) + len(rounds_of(trial))


def common_rounds(one: Trial, other: Trial) -> tuple[list[float], list[float]]:
    """The times of both in the rounds that both ran; empty if there are none."""
    if one.time_us is None or other.time_us is None or session(one) != session(other):
        return [], []
    first = max(one.time_us.first_round, other.time_us.first_round)
    last = min(last_round(one), last_round(other))
    count = max(0, last - first)
    own = one.time_us.rounds[first - one.time_us.first_round :][:count]
    return own, other.time_us.rounds[first - other.time_us.first_round :][:count]


@dataclass(frozen=True, slots=True)
class Ratio:
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
    """The fastest peer known of a problem. noisy: only its fastest round is believed."""

    trial: Trial
    noisy: bool

    @property
    def us(self) -> float:
        """Microseconds: its median, or the fastest round of a noisy one."""
        time = self.trial.time_us
        if time is None:
            return math.inf
        return min([*time.rounds, *time.discarded, time.low]) if self.noisy else time.median

    def ratio(self, trial: Trial, paced_us: float | None = None) -> Ratio:
        """The base's time over the trial's: above 1, the trial is faster.

        paced_us: the trial's time for want of common rounds (at_pace); if None, its median.
        """
        time = trial.time_us
        if time is None or not time.median > 0 or time_kind(trial) != time_kind(self.trial):
            return Ratio()
        if self.noisy:
            # The base itself would be faster than itself.
            same = trial.key == self.trial.key
            return Ratio() if same else Ratio(self.us / time.median, of="bound")
        base, own = common_rounds(self.trial, trial)
        if not base or not all(us > 0 for us in own):
            return Ratio(self.us / (paced_us or time.median), of="medians")
        ratios = [a / b for a, b in zip(base, own, strict=True)]
        return Ratio(median(ratios), *ratio_interval(base, own), of="rounds")


def at_pace(trials: Sequence[Trial]) -> dict[int, float]:
    """The time of each row of a problem, in µs, at the pace of the last rounds; by id.

    That is the median, but a row without these rounds was timed in another state of the card: on a
    hot H100 they took up to 1.3 times as long as the first times, and candidates that never raced
    seemed 20 % faster than the finalists. Its first time, taken in turn with those of the rows with
    rounds, is multiplied by their usual ratio of a round to a first time. That makes no row faster.
    """
    most: dict[tuple[object, ...], int] = {}
    for trial in trials:
        most[session(trial)] = max(last_round(trial), most.get(session(trial), 0))
    paces: dict[tuple[object, ...], list[float]] = {}
    for trial in trials:
        whole = rounds_of(trial) and last_round(trial) == most[session(trial)]
        if whole and trial.first_us and trial.time_us:
            paces.setdefault(session(trial), []).append(trial.time_us.median / trial.first_us)
    us = {}
    for trial in trials:
        us[id(trial)] = own = trial.time_us.median if trial.time_us is not None else math.inf
        if session(trial) in paces and trial.first_us and not rounds_of(trial):
            us[id(trial)] = max(own, trial.first_us * median(paces[session(trial)]))
    return us


def fastest_peer(trials: Sequence[Trial], statuses: Mapping[int, Status]) -> Base | None:
    """The base among the rows of a problem, or None. statuses: by id, as the ranking judges them.

    A peer over the error limit counts, unless it computes in another format. A noisy peer counts
    with its fastest round.
    """
    found = []
    for trial in trials:
        time, status = trial.time_us, statuses[id(trial)]
        other = trial.provider == OURS or in_other_format(trial.provider, trial.problem)
        if other or time is None:
            continue
        known = [time.median, time.low, *time.rounds]
        sound = all(math.isfinite(us) and us > 0 for us in known)
        if sound and status in (Status.OK, Status.NOISY):
            found.append(Base(trial, status is Status.NOISY))
    return min(found, key=lambda base: (base.us, base.noisy, base.trial.provider), default=None)


def over_limit(trial: Trial) -> bool:
    """Whether a peer's error exceeds the limit that candidates keep. It is timed all the same."""
    accuracy = trial.accuracy
    if trial.provider == OURS or accuracy is None or accuracy.rel_err is None:
        return False
    return accuracy.limit < accuracy.rel_err < math.inf
