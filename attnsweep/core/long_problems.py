"""Problems whose calls take long, and shorter ones of their kind, on which much can be learned."""

from __future__ import annotations

import re
from dataclasses import replace

from attnsweep.core.problem import Problem

# Such a call takes an H100 at least 25 ms: a candidate of 30 calls then takes a second, and
# of (1,32,131072,128), 180 ms each, 36 candidates took three minutes.
_LONG_FLOPS = 2e13
# FLOPs of the shorter problem at most: 4 ms.
_SHORTER_FLOPS = 3e12
# Queries that the shorter problem has at least, if the other one has.
_LEAST_QUERIES = 4096


def is_long(problem: Problem) -> bool:
    """Whether one call takes so long that few can be made."""
    return problem.flops >= _LONG_FLOPS


def has_shorter(problem: Problem) -> bool:
    """Whether a problem is long, and most of its sweep can be done on a shorter one."""
    return is_long(problem) and shorter(problem) != problem


def shorter(problem: Problem) -> Problem:
    """A problem of the same kind with fewer sequences, then shorter ones, all of half the size.

    Heads, head_dim, dtype and mask stay, and the ratio of queries and keys. A problem of few
    queries stays as it is.
    """
    while problem.flops > _SHORTER_FLOPS and problem.batch > 1:
        problem = replace(problem, batch=problem.batch // 2)
    while problem.flops > _SHORTER_FLOPS and problem.seqlen_q >= 2 * _LEAST_QUERIES:
        problem = replace(
            problem, seqlen_q=problem.seqlen_q // 2, seqlen_k=max(1, problem.seqlen_k // 2)
        )
    return problem


_SLOWER_ON = re.compile(r"slower on (\(.+?\) \w+ .+?): ")


def slower_on(label: str, time_us: float, best_us: float) -> str:
    """The detail of a row that says why a candidate of a long problem is not tried on it."""
    return f"slower on {label}: {time_us:.0f} µs, where the best takes {best_us:.0f}"


def shorter_of(detail: str | None) -> str | None:
    """The label of the shorter problem in such a detail; None for another one."""
    found = _SLOWER_ON.match(detail or "")
    return found[1] if found else None
