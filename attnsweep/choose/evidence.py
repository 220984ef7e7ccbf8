"""What rounds prove: who is out of a race, and whether one code is slower than another.

**The race.** In a round every entrant still in the race is timed once, in random order, so that
drift meets all alike. Entrants are compared with common references among them, by the sign of the
paired log-ratio: only which of the two was faster in each round counts. If an entrant is no slower,
it was slower in k of n rounds by chance alone with an e-value above x no more often than 1 in x, at
any n at which one cares to look (Ville's inequality; the e-value is the likelihood ratio of k
slower rounds of n under a uniform mixture of p in [1/2, 1] against p = 1/2: Howard and Ramdas,
Sequential estimation of quantiles, Bernoulli 28(3), 2022, and Grünwald, de Heide and Koolen, Safe
testing, JRSS-B 2024). No assumption is made of how times are distributed.

**Two codes in turns.** Each round gives one ratio, new time over old, in which drift common to both
cancels. The median of the ratios has a sign interval (order statistics; Conover, Practical
Nonparametric Statistics, 3rd ed. 1999, section 3.2), which needs no distribution and holds for few
rounds. Repeated looks would make some interval miss by chance, so each look spends a share of the
error (Lan and DeMets, Biometrika 70, 1983; here 1/(k(k+1)) of it at look k, which adds up to 1 over
any number of looks).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median, median_high


@functools.cache
def log2_evidence(slower: int, rounds: int) -> float:
    """log2 of the e-value against `not slower`, for `slower` of `rounds` rounds."""
    # 2^(n+1) * integral of p^k (1-p)^(n-k) over [1/2, 1], the incomplete beta as a binomial tail.
    tail = sum(math.comb(rounds + 1, i) for i in range(slower + 1))
    # Exact integers: the numbers are long, but rounds are at most hundreds.
    return math.log2(tail) - math.log2(rounds + 1) - math.log2(math.comb(rounds, slower))


@functools.cache
def rounds_beyond(rounds: int, threshold: float) -> int | None:
    """The least number of slower rounds whose evidence reaches the threshold (log2), if any."""
    for slower in range(rounds // 2, rounds + 1):
        if log2_evidence(slower, rounds) >= threshold:
            return slower
    return None


@functools.cache
def rounds_to_eliminate(threshold: float) -> int:
    """The rounds in which one that is slower in every one of them is out."""
    return next(n for n in itertools.count(1) if log2_evidence(n, n) >= threshold)


def interval(times: list[float], other: list[float], threshold: float) -> tuple[float, float]:
    """Anytime-valid interval of the median ratio of paired rounds; infinite with too few."""
    ratios = sorted(a / b for a, b in zip(times, other, strict=True))
    needed = rounds_beyond(len(ratios), threshold)
    if needed is None:
        return 0.0, math.inf
    return ratios[len(ratios) - needed], ratios[needed - 1]


@dataclass
class Race:
    """Entrants, their rounds, and who is out.

    alpha: with what probability the entrant that is truly not slower than any other is ever
    eliminated, at most. Counted for all opponents together (a union bound).
    references: who may eliminate, all entrants unless given. They must be chosen before the first
    round and not by its times; fewer of them need fewer rounds. A poor choice costs power alone.
    """

    entrants: tuple[str, ...]
    alpha: float = 0.05
    references: tuple[str, ...] = ()
    rounds: dict[str, list[float]] = field(init=False)
    out: dict[str, str] = field(init=False, default_factory=dict)
    """Who is out, and who showed it."""

    def __post_init__(self) -> None:
        self.rounds = {name: [] for name in self.entrants}
        self.references = self.references or self.entrants
        strangers = set(self.references) - set(self.entrants)
        if strangers:
            raise ValueError(f"references that are no entrants: {sorted(strangers)}")

    @property
    def threshold(self) -> float:
        """log2 of the e-value that eliminates."""
        whole = len(self.references) == len(self.entrants)
        opponents = len(self.references) - whole
        return math.log2(max(1, opponents) / self.alpha)

    @property
    def alive(self) -> list[str]:
        """Who is still in the race, in the order of entry."""
        return [name for name in self.entrants if name not in self.out]

    def add_round(self, times: Mapping[str, float]) -> dict[str, str]:
        """One time of everyone alive. Returns who is out now, and who showed it.

        Raises KeyError if the time of one of them is missing: drop an entrant that failed first.
        """
        for name in self.alive:
            self.rounds[name].append(times[name])
        gone: dict[str, str] = {}
        leaders = self._leaders()
        for name in self.alive:
            for leader in leaders:
                if leader != name and self._slower(name, leader):
                    gone[name] = leader
                    break
        self.out |= gone
        return gone

    def drop(self, name: str, why: str) -> None:
        """Take an entrant out for another reason than its times."""
        self.out[name] = why

    def tied(self) -> list[str]:
        """Those alive whose ratio to the leader may be 1, the leader first."""
        if not self.alive:
            return []
        leader = self.leader
        rest = [
            name for name in self.alive if name != leader and self.ratio(name, leader)[0] <= 1.0
        ]
        return [leader, *rest]

    def ratio(self, name: str, leader: str) -> tuple[float, float]:
        """Interval of name's time over leader's, from the rounds both ran."""
        both = min(len(self.rounds[name]), len(self.rounds[leader]))
        return interval(self.rounds[name][:both], self.rounds[leader][:both], self.threshold)

    def decided(self, within: float) -> bool:
        """Whether everyone alive is known to be within `within` (0.005 is half a percent)."""
        if len(self.alive) < 2:
            return True
        leader = self.leader
        return all(
            self.ratio(name, leader)[1] <= 1 + within for name in self.alive if name != leader
        )

    @property
    def leader(self) -> str:
        """Who alive has the least median. Raises ValueError if nobody is alive."""
        return min(self.alive, key=lambda name: _middle(self.rounds[name]))

    def _leaders(self, count: int = 3) -> list[str]:
        """The references alive with the least medians: comparing with a few is enough."""
        alive = [name for name in self.references if name not in self.out]
        return sorted(alive, key=lambda name: _middle(self.rounds[name]))[:count]

    def _slower(self, name: str, leader: str) -> bool:
        pairs = list(zip(self.rounds[name], self.rounds[leader], strict=True))
        # Equal times say nothing for `slower`; counting them as faster errs towards keeping.
        slower = sum(a > b for a, b in pairs)
        return log2_evidence(slower, len(pairs)) >= self.threshold


def _middle(times: Sequence[float]) -> float:
    """The upper median, infinite of nothing."""
    return median_high(times) if times else math.inf


# -- two codes in turns -----------------------------------------------------------------------

# Two-sided, over all looks at one comparison: no interval misses with a probability of at least
# 99.9 % if rounds are independent.
ERROR = 0.001
# The first look is at this many rounds (the shares above leave no interval for fewer than 12),
# every next one at half as many again.
_FIRST_LOOK = 20


class Decision(StrEnum):
    """What the rounds say so far."""

    SLOWER = "slower"  # by more than half the threshold, surely
    SAME = "same"  # slower by less than the threshold, if at all, surely
    FASTER = "faster"  # by more than half the threshold, surely
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Interval:
    """Median ratio of new to old, and between which it is; rounds: on how many this rests."""

    median: float
    low: float
    high: float
    rounds: int


@functools.cache
def skipped(rounds: int, tail: float) -> int:
    """Order statistics that a sign interval of the median leaves out at each end.

    The largest s with P(Binomial(rounds, 1/2) <= s) <= tail; -1 if there is none, when even the
    range of the rounds is missed by the median too often.
    """
    term, total, number = 1, 1, -1
    limit = tail * 2**rounds if rounds < 1000 else int(tail * 2**60) << (rounds - 60)
    while total <= limit:
        number += 1
        term = term * (rounds - number) // (number + 1)
        total += term
    return number


class PairedTest:
    """The comparison of two codes, round by round.

    threshold: share by which the new one may be slower. A new code that is slower by at least the
    threshold is called the same with a probability of at most ERROR / 2, one that is slower by at
    most half of it is called slower with at most ERROR / 2; between the two, either is true.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._ratios: list[float] = []
        self._looks = 0
        self._next_look = _FIRST_LOOK
        self.interval: Interval | None = None
        """Of the last look that could give one."""

    def add(self, old_us: float, new_us: float) -> Decision:
        """Take the times of one round, in microseconds; looks when its turn has come, else OPEN.

        A time that is none (zero, NaN, infinite) is left out, and its round with it.
        """
        if not (0 < old_us < math.inf and 0 < new_us < math.inf):
            return Decision.OPEN
        self._ratios.append(new_us / old_us)
        if len(self._ratios) < self._next_look:
            return Decision.OPEN
        self._next_look += self._next_look // 2
        return self.look()

    def look(self) -> Decision:
        """What the rounds so far say. Every look widens the next ones."""
        self._looks += 1
        rounds = len(self._ratios)
        left_out = skipped(rounds, ERROR / 2 / (self._looks * (self._looks + 1)))
        if left_out < 0:
            return Decision.OPEN
        ratios = sorted(self._ratios)
        low, high = ratios[left_out], ratios[-1 - left_out]
        self.interval = Interval(median(ratios), low, high, rounds)
        half = 1 + self._threshold / 2
        if high < 1 / half:
            return Decision.FASTER
        if high < 1 + self._threshold:
            return Decision.SAME
        return Decision.SLOWER if low > half else Decision.OPEN


# -- many in the same rounds ------------------------------------------------------------------

# Two-sided confidence of the intervals that decide a tie.
CONFIDENCE = 0.95


def ratio_interval(rounds: Sequence[float], best: Sequence[float]) -> tuple[float, float]:
    """Sign interval (95 %) of the median ratio of rounds to the best's, paired by position.

    Needs no distribution: between the order statistics of the ratios that the median lies outside
    of less than 5 % of the time. Fewer than six rounds cannot say so much; then it is their range.
    """
    ratios = sorted(a / b for a, b in zip(rounds, best, strict=True))
    left_out = max(0, skipped(len(ratios), (1 - CONFIDENCE) / 2))
    return ratios[left_out], ratios[-1 - left_out]
