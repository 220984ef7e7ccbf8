"""The course of a search: the best time so far against candidates tried, by family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnsweep.trial import OURS, Trial


def best_so_far(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The points where the least first time of a family falls, and one at its last candidate.

    trials: rows of one problem, in the order of the file, which is the order of first appearance.
    Times are first times in microseconds: those of rounds come after the search.
    """
    best: dict[str, float] = {}
    number: dict[str, int] = {}
    points = []
    for trial in trials:
        if trial.provider != OURS:
            continue
        number[trial.kernel] = number.get(trial.kernel, 0) + 1
        us = trial.screened_us
        if us is not None and us < best.get(trial.kernel, float("inf")):
            best[trial.kernel] = us
            points.append({"kernel": trial.kernel, "trial": number[trial.kernel], "us": us})
    ends = [
        {"kernel": kernel, "trial": number[kernel], "us": us}
        for kernel, us in best.items()
        if {"kernel": kernel, "trial": number[kernel], "us": us} not in points
    ]
    return points + ends
