"""Limits of a probability, from a count of trials: for benchmarks and for the pages' counts."""

from __future__ import annotations

import math
from collections.abc import Callable


def proportion_interval(count: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Limits of the probability of what happened `count` times in `trials`, two-sided.

    Clopper and Pearson, Biometrika 26, 1934: at the lower limit, a count this high has a
    probability of (1 - confidence) / 2; at the upper limit, a count this low. Without trials they
    are 0 and 1. Raises ValueError for a count that is not in 0 .. trials.
    """
    if not 0 <= count <= trials:
        raise ValueError(f"{count} of {trials}")
    tail = (1 - confidence) / 2
    low = 0.0 if count == 0 else _solve(lambda p: 1 - _at_most(count - 1, trials, p) > tail)
    high = 1.0 if count == trials else _solve(lambda p: _at_most(count, trials, p) <= tail)
    return low, high


def _at_most(count: int, trials: int, p: float) -> float:
    """P(Binomial(trials, p) <= count), for p in (0, 1)."""
    term = trials * math.log1p(-p)
    total = 0.0
    for k in range(count + 1):
        total += math.exp(term)
        term += math.log((trials - k) / (k + 1)) + math.log(p / (1 - p)) if k < trials else 0.0
    return min(1.0, total)


def _solve(beyond: Callable[[float], bool]) -> float:
    """The least p in (0, 1) for which `beyond(p)`, which is false below it and true above."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if beyond(middle):
            high = middle
        else:
            low = middle
    return (low + high) / 2
