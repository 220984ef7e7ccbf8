"""Whether one code is slower than another: rounds of one process, then several processes.

**One process.** Each round gives one ratio, new time over old, in which common drift cancels. The
median of the ratios has a sign interval. With repeated looks, some interval would miss by chance,
so each look spends a share of the error (Lan and DeMets, Biometrika 70, 1983; here 1/(k(k+1)) of it
at look k, which adds up to 1 over any number of looks).

**Several.** The places of code and buffers make the ratio of one process differ from the next's,
and no number of rounds in one process shows by how much. So the processes are the sample: their
ratios (in logarithms) are averaged, and their limits too, widened by three standard errors of such
an average. Processes differ by PROCESS_SD at least, whatever a few of them seem to say, and by
their own standard deviation if that is larger. Looks at two to eight processes spend at most seven
times 0.135 % of error on each side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median, stdev

from attnsweep.choose.stats import skipped

# Two-sided error of all looks at one process: if rounds are independent, no interval misses the
# process's ratio with a probability of at least 99.9 %.
ERROR = 0.001
# Standard deviation of what one process adds to the ratio of two codes: the least that is assumed.
PROCESS_SD = 0.005
FEWEST, MOST = 2, 8
"""Processes in which two codes are compared."""
_STANDARD_ERRORS = 3.0
# Rounds at the first look (the shares above give no interval for fewer than 12); each next look
# comes after half as many again.
_FIRST_LOOK = 20
# A process's ratio is known well enough if its limits are this share of the threshold from their
# middle: more rounds would add less than further processes. At least 0.03 %.
_PRECISE, _LEAST_PRECISE = 1 / 16, 0.0003


class Decision(StrEnum):
    """What the interval of new over old decides: slower, the same, faster, or still open."""

    SLOWER = "slower"  # by more than half the threshold
    SAME = "same"  # slower by less than the threshold, if at all
    FASTER = "faster"  # by more than half the threshold
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """Ratio of new to old, and its limits. rounds: the number of rounds it rests on."""

    median: float
    low: float
    high: float
    rounds: int

    def shows(self, slower: float) -> Decision:
        """Decide for a threshold, the share by which new code may be slower."""
        half = 1 + slower / 2
        if self.high < 1 / half:
            return Decision.FASTER
        if self.high < 1 + slower:
            return Decision.SAME
        return Decision.SLOWER if self.low > half else Decision.OPEN


class PairedRounds:
    """The rounds of one process."""

    def __init__(self) -> None:
        self._ratios: list[float] = []
        self._looks = 0
        self._next_look = _FIRST_LOOK
        self.interval: RatioInterval | None = None
        """The interval of the last look that could give one."""

    def add(self, old_us: float, new_us: float) -> bool:
        """Take the times of one round, in microseconds; whether a look was due, and taken.

        A round with an invalid time (zero, NaN, infinite) is left out.
        """
        if not (0 < old_us < math.inf and 0 < new_us < math.inf):
            return False
        self._ratios.append(new_us / old_us)
        if len(self._ratios) < self._next_look:
            return False
        self._next_look += self._next_look // 2
        self.look()
        return True

    def look(self) -> None:
        """Take the interval of the rounds so far. Every look widens those of later ones."""
        self._looks += 1
        rounds = len(self._ratios)
        left_out = skipped(rounds, ERROR / 2 / (self._looks * (self._looks + 1)))
        if left_out >= 0:
            ratios = sorted(self._ratios)
            middle = median(ratios)
            self.interval = RatioInterval(middle, ratios[left_out], ratios[-1 - left_out], rounds)


def together(processes: Sequence[RatioInterval]) -> RatioInterval:
    """The ratio that all processes show, each with the interval of its own; at least one."""
    middles = [math.log(process.median) for process in processes]
    differ = max(PROCESS_SD, stdev(middles) if len(middles) > 1 else 0.0)
    error = _STANDARD_ERRORS * differ / math.sqrt(len(middles))
    low = fmean(math.log(process.low) for process in processes) - error
    high = fmean(math.log(process.high) for process in processes) + error
    rounds = sum(process.rounds for process in processes)
    return RatioInterval(math.exp(fmean(middles)), math.exp(low), math.exp(high), rounds)


def enough(before: Sequence[RatioInterval], this: RatioInterval, slower: float) -> bool:
    """Whether a process needs no more rounds: it decides with those before, or it is precise.

    The first decides nothing alone; it is looked at as if the second were to be like it.
    """
    known = [*before, this] if before else [this] * FEWEST
    if together(known).shows(slower) is not Decision.OPEN:
        return True
    return (this.high - this.low) / 2 <= max(_PRECISE * slower, _LEAST_PRECISE)
