"""Evidence from rounds: which entrants lose a race, and intervals of the ratio of two entries.

**The race.** Each round times every entrant still in the race once, in random order, so that drift
affects all alike. Entrants are compared with common references among them, by the sign of the
paired log-ratio: only which of the two was faster in each round counts. If an entrant is no slower,
then chance makes it slower in k of n rounds with an e-value above x at most once in x, at any n at
which one looks (Ville's inequality; the e-value is the likelihood ratio of k slower rounds of n
under a uniform mixture of p in [1/2, 1] against p = 1/2: Howard and Ramdas, Sequential estimation
of quantiles, Bernoulli 28(3), 2022, and Grünwald, de Heide and Koolen, Safe testing, JRSS-B 2024).
The test assumes nothing about the distribution of times.

**Ratios.** Each round gives one ratio of two entries, in which common drift cancels. The median of
the ratios has a sign interval (order statistics; Conover, Practical Nonparametric Statistics, 3rd
ed. 1999, section 3.2), which needs no distribution and holds for few rounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high


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


def interval(times: list[float], other: list[float], threshold: float) -> tuple[float, float]:
    """Anytime-valid interval of the median ratio of paired rounds; infinite if they are too few."""
    ratios = sorted(a / b for a, b in zip(times, other, strict=True))
    needed = rounds_beyond(len(ratios), threshold)
    if needed is None:
        return 0.0, math.inf
    return ratios[len(ratios) - needed], ratios[needed - 1]


@dataclass
class Race:
    """A race: the entrants, their rounds, and who has dropped out.

    alpha: the largest probability that an entrant that is truly not slower than any other is ever
    eliminated, over all opponents together (a union bound). references: entrants that may eliminate
    others (default: all). Choose them before the first round and not by its times; fewer references
    need fewer rounds. A poor choice only costs power.
    """

    entrants: tuple[str, ...]
    alpha: float = 0.05
    references: tuple[str, ...] = ()
    rounds: dict[str, list[float]] = field(init=False)
    out: dict[str, str] = field(init=False, default_factory=dict)
    """Each entrant that is out, and the one that showed it or another reason."""

    def __post_init__(self) -> None:
        self.rounds = {name: [] for name in self.entrants}
        self.references = self.references or self.entrants
        strangers = set(self.references) - set(self.entrants)
        if strangers:
            raise ValueError(f"references that are not entrants: {sorted(strangers)}")

    @property
    def threshold(self) -> float:
        """log2 of the e-value that eliminates."""
        whole = len(self.references) == len(self.entrants)
        opponents = len(self.references) - whole
        return math.log2(max(1, opponents) / self.alpha)

    @property
    def alive(self) -> list[str]:
        """The entrants still in the race, in the order of entry."""
        return [name for name in self.entrants if name not in self.out]

    def add_round(self, times: Mapping[str, float]) -> dict[str, str]:
        """Add one time of each entrant alive. Returns each that is now out, and which showed it.

        Raises KeyError if one of the times is missing: drop an entrant that failed first.
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
        """Take an entrant out for a reason other than its times."""
        self.out[name] = why

    def ratio(self, name: str, leader: str) -> tuple[float, float]:
        """Interval of name's time over leader's, from the rounds in which both ran."""
        both = min(len(self.rounds[name]), len(self.rounds[leader]))
        return interval(self.rounds[name][:both], self.rounds[leader][:both], self.threshold)

    def decided(self, within: float) -> bool:
        """Whether every entrant alive is known to be within `within` (0.005 is half a percent)."""
        if len(self.alive) < 2:
            return True
        leader = self.leader
        return all(
            self.ratio(name, leader)[1] <= 1 + within for name in self.alive if name != leader
        )

    @property
    def leader(self) -> str:
        """The entrant alive with the least median. Raises ValueError if none is alive."""
        return min(self.alive, key=lambda name: _middle(self.rounds[name]))

    def _leaders(self) -> list[str]:
        """The three living references with the least medians: a comparison with a few is enough."""
        alive = [name for name in self.references if name not in self.out]
        return sorted(alive, key=lambda name: _middle(self.rounds[name]))[:3]

    def _slower(self, name: str, leader: str) -> bool:
        pairs = list(zip(self.rounds[name], self.rounds[leader], strict=True))
        # Equal times do not count as slower; counting them as faster errs towards keeping.
        slower = sum(a > b for a, b in pairs)
        return log2_evidence(slower, len(pairs)) >= self.threshold


def _middle(times: Sequence[float]) -> float:
    """The upper median; infinite if there are no times."""
    return median_high(times) if times else math.inf


# -- many in the same rounds ------------------------------------------------------------------

# Two-sided confidence of the intervals that decide a tie.
CONFIDENCE = 0.95


@functools.cache
def skipped(rounds: int, tail: float) -> int:
    """Number of order statistics that a sign interval of the median leaves out at each end.

    It is the largest s with P(Binomial(rounds, 1/2) <= s) <= tail, and -1 if there is none: then
    the median lies too often outside even the whole range of the rounds.
    """
    term, total, number = 1, 1, -1
    limit = tail * 2**rounds if rounds < 1000 else int(tail * 2**60) << (rounds - 60)
    while total <= limit:
        number += 1
        term = term * (rounds - number) // (number + 1)
        total += term
    return number


def ratio_interval(rounds: Sequence[float], best: Sequence[float]) -> tuple[float, float]:
    """Sign interval (95 %) of the median ratio of rounds to the best's, paired by position.

    It needs no distribution: the median lies outside these order statistics of the ratios less than
    5 % of the time. Fewer than six rounds cannot show that much; then it is their range.
    """
    ratios = sorted(a / b for a, b in zip(rounds, best, strict=True))
    left_out = max(0, skipped(len(ratios), (1 - CONFIDENCE) / 2))
    return ratios[left_out], ratios[-1 - left_out]
