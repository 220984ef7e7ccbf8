"""Problems whose masks hide more than causal ones: what they count, how they are written."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.baselines.registry import backend_of
from attnsweep.core.errors import ProblemError
from attnsweep.core.masks import CAUSAL, FULL, Interval
from attnsweep.core.problem import Problem
from attnsweep.specs.model import ProblemSpec
from attnsweep.specs.shapes import read_shapes

SIDES = st.none() | st.integers(0, 12)
LENGTHS = st.integers(1, 10)
TOP_LEFT = Interval(None, 0, top_left=True)


def problem(seqlen_q, seqlen_k, mask, **more):
    return Problem(2, 4, 2, seqlen_q, seqlen_k, 64, "bf16", mask, **more)


# -- aligned top-left -----------------------------------------------------------------------------


@given(SIDES, SIDES, LENGTHS, LENGTHS)
def test_top_left_counts_from_the_first_key(left, right, seqlen_q, seqlen_k):
    mask = Interval(left, right, top_left=True)
    pairs = np.zeros((seqlen_q, seqlen_k), bool)
    for query, key in itertools.product(range(seqlen_q), range(seqlen_k)):
        pairs[query, key] = (left is None or key >= query - left) and (
            right is None or key <= query + right
        )
    assert mask.pairs(seqlen_q, seqlen_k) == pairs.sum()
    assert mask.empty_rows(seqlen_q, seqlen_k) == (~pairs.any(axis=1)).sum()


@given(SIDES, SIDES)
def test_equal_lengths_have_one_name_for_one_mask(left, right):
    same = problem(9, 9, Interval(left, right, top_left=True))
    assert same == problem(9, 9, Interval(left, right))
    assert "top_left" not in same.label
    assert problem(9, 30, Interval(top_left=True)) == problem(9, 30, FULL)


@given(SIDES, SIDES)
def test_top_left_problems_are_read_back(left, right):
    made = problem(9, 30, Interval(left, right, top_left=True))
    assert Problem.parse(made.label) == made
    assert Problem.of(json.loads(json.dumps(made.facts))) == made
    assert read_shapes([made.label]) == read_shapes(made.label.split()) == [made]
    assert made.mask.kind in ("full", "window")


def test_top_left_in_words():
    assert problem(9, 30, TOP_LEFT).label == "(2,4/2,9x30,64) bf16 causal_top_left"
    window = problem(9, 30, Interval(512, 0, top_left=True))
    assert window.label.endswith(" window_top_left(512,0)")
    assert problem(9, 30, TOP_LEFT) != problem(9, 30, CAUSAL)
    facts = problem(9, 30, TOP_LEFT).facts
    assert (facts["causal"], facts["top_left"]) == (True, True)
    assert "top_left" not in problem(9, 30, CAUSAL).facts


ENTRY = {"batch": 2, "heads": 4, "heads_kv": 2, "seqlen_q": 9, "seqlen_k": 30, "head_dim": 64}
ENTRY |= {"dtype": "bf16"}


def of_entry(**more):
    (made,) = ProblemSpec.model_validate(ENTRY | more).expand()
    return made


def test_top_left_in_a_spec():
    assert of_entry(causal=True, top_left=True) == problem(9, 30, TOP_LEFT)
    window = problem(9, 30, Interval(5, 0, top_left=True))
    assert of_entry(window=[5, 0], top_left=True) == window
    with pytest.raises(Exception, match="top_left without a mask"):
        of_entry(top_left=True)


def test_baselines_that_align_bottom_right_alone_refuse_top_left():
    asked = problem(9, 30, TOP_LEFT)
    assert "aligned top-left" in backend_of("flash_attn_3").supports(asked)
    assert backend_of("torch_cudnn").supports(asked) is None
    assert backend_of("flash_attn_3").supports(problem(9, 30, CAUSAL)) is None


@pytest.mark.parametrize("text", ["window_top_left(3)", "full_top_left", "causal_bottom"])
def test_what_is_no_mask_either(text):
    with pytest.raises(ProblemError, match="not a mask"):
        Interval.parse(text)
