"""The figure of a search: the best time so far against trials, for each family of a problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnsweep.trial import OURS, Trial


def best_so_far(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """One point for each trial that had a first time: family, number, and the least of them so far.

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
        if us is None:
            continue
        best[trial.kernel] = min(best.get(trial.kernel, us), us)
        points.append(
            {"kernel": trial.kernel, "trial": number[trial.kernel], "us": best[trial.kernel]}
        )
    return points


def figure(trials: Sequence[Trial]) -> dict[str, Any] | None:
    """A Vega-Lite figure of `best_so_far`; None for fewer than two points."""
    points = best_so_far(trials)
    if len(points) < 2:
        return None
    return {
        "data": {"values": points},
        "width": "container",
        "height": 200,
        "mark": {"type": "line", "interpolate": "step-after", "tooltip": True},
        "encoding": {
            "x": {"field": "trial", "type": "quantitative", "title": "trials"},
            "y": {
                "field": "us",
                "type": "quantitative",
                "title": "best first time so far, µs",
                "scale": {"zero": False},
            },
            "color": {"field": "kernel", "type": "nominal", "title": None},
        },
    }
