"""The course of a search."""

from __future__ import annotations

from samples import baseline, candidate

from attnsweep.core.trial import Status
from attnsweep.reports.html_data import best_so_far


def rows_of(*times):
    rows = [candidate("a", us or 1.0, N=i).with_(first_us=us) for i, us in enumerate(times)]
    return [row if row.first_us else row.with_(status=Status.WRONG, time_us=None) for row in rows]


def test_the_best_so_far_only_falls_and_counts_what_failed():
    other = candidate("b", 3.0, N=1).with_(first_us=3.0)
    points = best_so_far([*rows_of(9.0, None, 12.0, 7.0, 8.0), baseline("cudnn", 1.0), other])
    assert points == [
        {"kernel": "a", "trial": 1, "us": 9.0},
        {"kernel": "a", "trial": 4, "us": 7.0},
        {"kernel": "b", "trial": 1, "us": 3.0},
        {"kernel": "a", "trial": 5, "us": 7.0},
    ]


def test_seconds_are_there_if_the_rows_have_them():
    rows = [row.with_(tried_s=2.5 * i) for i, row in enumerate(rows_of(9.0, 7.0, 8.0))]
    assert best_so_far(rows) == [
        {"kernel": "a", "trial": 1, "us": 9.0, "s": 0.0},
        {"kernel": "a", "trial": 2, "us": 7.0, "s": 2.5},
        {"kernel": "a", "trial": 3, "us": 7.0, "s": 5.0},
    ]
