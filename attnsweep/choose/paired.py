"""Two codes timed in turns: is the new one slower? Looked at as often as rounds come in.

Each round gives one ratio, new time over old, in which drift common to both cancels. The median of
the ratios has a sign interval (order statistics; Conover, Practical Nonparametric Statistics, 3rd
ed. 1999, section 3.2), which needs no distribution and holds for few rounds. Looking again and
again would make some interval miss by chance, so each look spends a share of the error (Lan and
DeMets, Biometrika 70, 1983; here 1/(k(k+1)) of it at look k, which adds up to 1 over any number of
looks).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

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
