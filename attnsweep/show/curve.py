"""The course of a search: the best time so far against candidates and seconds, by family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnsweep.trial import OURS, Trial


def best_so_far(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The points where the least first time of a family falls, and one at its last candidate.

    trials: rows of one problem, in the order of the file, which is the order of first appearance.
    Times are first times in microseconds: those of rounds come after the search. `s`: the seconds
    of the search, unless the row is of before they were kept.
    """
    best: dict[str, float] = {}
    number: dict[str, int] = {}
    points, ends = [], {}
    for trial in trials:
        if trial.provider != OURS:
            continue
        number[trial.kernel] = number.get(trial.kernel, 0) + 1
        us = trial.screened_us
        if us is not None and us < best.get(trial.kernel, float("inf")):
            best[trial.kernel] = us
            points.append(_point(trial, number[trial.kernel], us))
        if trial.kernel in best:
            ends[trial.kernel] = _point(trial, number[trial.kernel], best[trial.kernel])
    return points + [end for end in ends.values() if end not in points]


def _point(trial: Trial, number: int, us: float) -> dict[str, Any]:
    seconds = {} if trial.tried_s is None else {"s": trial.tried_s}
    return {"kernel": trial.kernel, "trial": number, "us": us, **seconds}
