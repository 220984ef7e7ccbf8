"""Sums of FP8 products keep what an H100's keep: each expected value was seen on one."""

from __future__ import annotations

import numpy as np
import pytest

from attnsweep.verify import rounded


def added(terms, *, by_term=True):
    """The sum of (factor, factor) in whole chunks of 32, less 2^16."""
    a, b = np.zeros((1, 64), np.float32), np.zeros((64, 1), np.float32)
    for i, (left, right) in terms.items():
        a[0, i], b[i, 0] = left, right
    return float(rounded.matmul(a, b, by_term=by_term)[0, 0]) - 2.0**16


LARGE = (2.0**8, 2.0**8)
# A term 13 binary places below the largest is kept, the next one is not.
KEPT, LOST = (2.0**3, 1.0), (2.0**2, 1.0)


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ({0: LARGE, 1: KEPT}, 8.0),
        ({0: LARGE, 1: (-KEPT[0], KEPT[1])}, -8.0),
        ({0: LARGE, 1: LOST}, 0.0),
        ({0: LARGE, 32: LOST}, 0.0),
        ({0: LARGE} | dict.fromkeys(range(1, 32), KEPT), 248.0),
        ({0: LARGE} | dict.fromkeys(range(1, 32), LOST), 0.0),
        ({0: LARGE} | dict.fromkeys(range(32, 64), LOST), 0.0),
        (dict.fromkeys(range(32), LOST) | {32: LARGE}, 128.0),
    ],
    ids=["kept", "negative", "lost", "lost later", "31 kept", "31 lost", "32 lost", "32 before"],
)
def test_terms_below_the_largest_are_cut_one_by_one(terms, expected):
    assert added(terms) == expected


def test_a_sum_that_is_cut_as_a_whole_keeps_what_its_terms_lose():
    terms = {0: LARGE} | dict.fromkeys(range(1, 32), LOST)
    assert added(terms, by_term=False) == 31 * 4 - 4


def test_nothing_but_zeros_is_zero():
    zeros = np.zeros((2, 40), np.float32)
    assert (rounded.matmul(zeros, zeros.T, by_term=True) == 0).all()


def test_cut_terms_err_by_several_times_what_cut_sums_do():
    rng = np.random.default_rng(0)
    a, b = (abs(rng.integers(1, 16, shape)).astype(np.float32) for shape in ((64, 128), (128, 64)))
    exact = a.astype(np.float64) @ b
    by_term, by_sum = (rounded.matmul(a, b, by_term=x) for x in (True, False))
    assert (by_term <= by_sum).all()
    assert (by_sum <= exact).all()
    a /= 2.0 ** rng.integers(0, 10, a.shape).astype(np.float32)
    exact = a.astype(np.float64) @ b
    errors = [abs(rounded.matmul(a, b, by_term=x) - exact).mean() for x in (True, False)]
    assert errors[0] > 3 * errors[1]
