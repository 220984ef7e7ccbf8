"""Time against error: which candidates a bound leaves, and which none surpasses in both."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import baseline, candidate

from attnsweep.choose.columns import frontier, held_to, too_inaccurate
from attnsweep.choose.ranking import rank, winners
from attnsweep.core.trial import Accuracy, Status, Trial


def row(us: float, error: float | None, number: int = 0, **changes: object) -> Trial:
    accuracy = Accuracy(rel_err=0.02, limit=0.1, timed_err=error)
    return candidate("flash", us, ID=number).with_(accuracy=accuracy, **changes)


def test_without_a_bound_a_row_is_left_as_it_is():
    before = row(10.0, 0.05)
    assert held_to(before, None) is before


@pytest.mark.parametrize("error", [0.0501, 1.0, math.nan])
def test_a_row_over_the_bound_says_so_and_keeps_its_time(error):
    held = held_to(row(10.0, error), 0.05)
    assert held.status is Status.INACCURATE
    assert held.detail == f"error {error:.2e} exceeds measure: max_error 5.00e-02"
    assert held.time_us.median == 10.0
    assert held_to(row(10.0, 0.05), 0.05).status is Status.OK


def test_the_error_is_that_of_the_timed_problem_and_of_older_rows_the_worst_case():
    assert held_to(row(10.0, 0.01), 0.015).status is Status.OK
    assert held_to(row(10.0, None), 0.015).status is Status.INACCURATE


def test_another_bound_takes_back_the_verdict():
    held = held_to(row(10.0, 0.05), 0.01)
    assert held_to(held, 0.05).status is Status.OK
    again = held_to(held, None)
    assert (again.status, again.detail, too_inaccurate(again)) == (Status.OK, None, None)


def test_baselines_and_failed_rows_are_not_held_to_it():
    for other in (baseline("torch_flash", 9.0), row(9.0, 0.5, status=Status.WRONG)):
        assert held_to(other, 1e-6) is other


def test_only_what_is_accurate_enough_is_ranked_and_wins():
    rows = [held_to(row(us, error, n), 0.03) for n, (us, error) in enumerate(
        [(10.0, 0.06), (11.0, 0.031), (12.0, 0.03), (13.0, 0.01)]
    )]  # fmt: skip
    found = rank([*rows, baseline("torch_flash", 9.0)], None)
    assert [won.config["ID"] for won in winners(found)] == [2]
    ours = found[~found["baseline"]]
    assert list(ours.loc[ours["rank"].notna(), "time_us"]) == [12.0, 13.0]
    assert list(ours.loc[ours["rank"].isna(), "status"]) == ["inaccurate"] * 2
    assert found.loc[found["baseline"], "rank"].notna().all()  # a baseline is ranked all the same


def test_a_row_that_says_ok_over_its_bound_is_not_believed():
    held = held_to(row(10.0, 0.06), 0.03).with_(status=Status.OK, detail=None)
    (judged,) = rank([held], None).to_dict("records")
    assert judged["status"] == "inaccurate"
    assert not judged["winner"]


points = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=15)


@given(points)
def test_no_candidate_surpasses_one_of_the_frontier(pairs):
    rows = [row(float(us), float(error), n) for n, (us, error) in enumerate(pairs)]
    best = frontier(rows)
    errors = [trial.accuracy.error for trial in best]
    times = [trial.time_us.median for trial in best]
    assert times == sorted(times)
    assert errors == sorted(errors, reverse=True)
    for trial in rows:
        # Every candidate is there, or one at most as slow errs by no more than 2 % above it.
        assert trial in best or any(
            other.time_us.median <= trial.time_us.median
            and 0.98 * other.accuracy.error <= trial.accuracy.error
            for other in best
        )


def test_the_frontier_is_of_right_candidates_ranked_or_not():
    rows = [
        held_to(row(10.0, 0.06, 0), 0.03),
        row(9.0, 0.001, 1, status=Status.WRONG),
        row(11.0, 0.02, 2),
        row(12.0, 0.0199, 3),  # as good
        candidate("flash", None, ID=4),
        baseline("torch_flash", 1.0),
    ]
    assert [trial.config["ID"] for trial in frontier(rows)] == [0, 2]
