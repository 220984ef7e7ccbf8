"""Masks: what an interval says of its pairs, against brute force, and how it is written."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.core.errors import ProblemError
from attnsweep.core.masks import CAUSAL, FULL, Interval, mask_of_label
from attnsweep.core.problem import Packed, Problem
from attnsweep.verify.reference import hidden_keys, rows_with_keys

sides = st.none() | st.integers(0, 12)
aligned = st.builds(Interval, sides, sides)
masks = st.builds(Interval, sides, sides, top_left=st.booleans())
lengths = st.integers(1, 10)


def seen(mask, seqlen_q, seqlen_k):
    """(seqlen_q, seqlen_k): the pairs in words, the last query's diagonal being the last key.

    Aligned top-left, the first query's is the first key.
    """
    diagonal = np.arange(seqlen_q)[:, None] + (0 if mask.top_left else seqlen_k - seqlen_q)
    keys = np.arange(seqlen_k)
    before = mask.left is None or keys >= diagonal - (mask.left or 0)
    after = mask.right is None or keys <= diagonal + (mask.right or 0)
    return np.broadcast_to(before & after, (seqlen_q, seqlen_k))


@given(masks, lengths, lengths)
def test_counts_are_those_of_the_pairs(mask, seqlen_q, seqlen_k):
    pairs = seen(mask, seqlen_q, seqlen_k)
    assert mask.pairs(seqlen_q, seqlen_k) == pairs.sum()
    assert mask.empty_rows(seqlen_q, seqlen_k) == (pairs.sum(axis=1) == 0).sum()


@given(masks, lengths, lengths)
def test_a_query_sees_the_keys_between_two_diagonals(mask, seqlen_q, seqlen_k):
    low, high = mask.diagonals(seqlen_q, seqlen_k)
    after = np.arange(seqlen_k) - np.arange(seqlen_q)[:, None]
    assert ((low <= after) & (after <= high) == seen(mask, seqlen_q, seqlen_k)).all()


def test_full_and_causal_problems_are_written_as_ever():
    """Rows and fingerprints of recorded runs hold these forms."""
    problem = Problem(1, 2, 1, 3, 4, 64, "bf16", causal=True)
    sizes = "batch=1, heads=2, heads_kv=1, seqlen_q=3, seqlen_k=4, head_dim=64, dtype='bf16'"
    assert repr(problem) == f"Problem({sizes}, causal=True)"
    assert repr(replace(problem, mask=FULL)) == f"Problem({sizes}, causal=False)"
    assert [*problem.facts][-1] == "causal"
    assert problem.label == "(1,2/1,3x4,64) bf16 causal"


def test_an_open_side_and_a_side_of_one_key_have_other_names_of_files():
    """A winner's code is kept by the label's letters and digits: -1 and 1 shared a file."""
    labels = [Interval(None, 5).label, Interval(1, 5).label, Interval(5).label, Interval(5, 1).label]
    assert len({re.sub(r"[^a-z0-9]+", "-", label) for label in labels}) == 4
    assert mask_of_label("window(-1,5)") == mask_of_label("window(all,5)") == Interval(None, 5)


def test_causal_is_another_way_to_write_a_mask():
    assert Problem(1, 1, 1, 2, 2, 64, causal=True).mask == CAUSAL
    window = Problem(1, 1, 1, 2, 2, 64, mask=Interval(1, 0))
    assert not window.causal
    assert replace(window, causal=True).mask == CAUSAL


@pytest.mark.parametrize(
    "text", ["window(3)", "window(-2,0)", "diagonal", "window_top_left(3)", "full_top_left", "causal_bottom"]
)
def test_what_is_no_mask(text):
    with pytest.raises(ProblemError, match="is not a mask"):
        mask_of_label(text)


def test_a_window_has_no_negative_side():
    with pytest.raises(ProblemError, match="at least 0"):
        Interval(-1, 0)


@given(aligned, st.integers(1, 6), st.integers(0, 100), st.integers(0, 3), lengths, lengths)
def test_packed_sequences_see_their_own_keys(mask, parts, least, seed, seqlen_q, seqlen_k):
    sizes = 1, 2, 1, 5 * seqlen_q, 7 * seqlen_k, 64, "bf16"
    problem = Problem(*sizes, mask, Packed(parts, least, seed))
    shown = np.zeros((problem.seqlen_q, problem.seqlen_k), bool)
    for (first, end), (first_k, end_k) in problem.sequence_ranges:
        if first < end and first_k < end_k:
            shown[first:end, first_k:end_k] = seen(mask, end - first, end_k - first_k)
    assert (shown == ~hidden_keys(problem, np.arange(problem.seqlen_q), 0)).all()
    assert problem.pairs == 2 * shown.sum()
    assert problem.rows_with_keys == shown.any(axis=1).sum()
    assert (rows_with_keys(problem) == shown.any(axis=1)).all()
