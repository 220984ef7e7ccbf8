"""Problems whose masks hide more than causal ones: what they count, how they are written."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.baselines.registry import backend_of
from attnsweep.core.cases import Case, short_turns, small_cases
from attnsweep.core.errors import ProblemError
from attnsweep.core.hardware import arch_named
from attnsweep.core.masks import CAUSAL, FULL, Interval
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.specs.model import ProblemSpec
from attnsweep.specs.shapes import read_shapes
from attnsweep.verify import rounded
from attnsweep.verify.encoding import from_bits
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.limits import limits
from attnsweep.verify.measures import measures
from attnsweep.verify.reference import exact_rows

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


# -- queries that see no key ----------------------------------------------------------------------

EMPTY = (
    problem(200, 70, CAUSAL),
    problem(90, 30, Interval(8, 0)),
    problem(70, 30, Interval(8, 3, top_left=True)),
)


def dense(problem, item=0):
    """(seqlen_q, seqlen_k): the pairs of an item of the batch, counted one by one."""
    low, high = problem.diagonals
    pairs = np.zeros((problem.seqlen_q, problem.seqlen_k), bool)
    for query, key in itertools.product(range(problem.seqlen_q), range(problem.seqlen_k)):
        pairs[query, key] = low <= key - query <= high
    return pairs


def attention(inputs, problem):
    """Plain attention with a dense mask, and its log-sum-exp, of inputs without scales."""
    q, k, v = (from_bits(inputs[name], problem.dtype).astype(np.float64) for name in "qkv")
    group = problem.heads // problem.heads_kv
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for item, head in itertools.product(range(problem.batch), range(problem.heads)):
        for row, keys in enumerate(dense(problem, item)):
            if keys.any():
                scores = k[item, head // group, keys] @ q[item, head, row] * problem.scale
                lse[item, head, row] = np.log(np.sum(np.exp(scores)))
                p = np.exp(scores - lse[item, head, row])
                out[item, head, row] = p @ v[item, head // group, keys]
    return out, lse


def same(a, b):
    return np.allclose(np.where(a == b, 0, a), np.where(a == b, 0, b), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("problem", EMPTY, ids=lambda p: p.label)
def test_the_references_give_zero_to_a_query_that_sees_no_key(problem):
    inputs = make_inputs(Case(problem), 1)
    rows = np.arange(problem.seqlen_q)
    expected, log_sums = attention(inputs, problem)
    assert problem.has_empty_rows
    assert np.isneginf(log_sums).sum() == problem.heads * (
        problem.batch * problem.seqlen_q - problem.rows_with_keys
    )
    for sign, (out, lse) in zip((1, -1), exact_rows(inputs, problem, rows, (1, -1)), strict=True):
        if sign == 1:
            assert same(out, expected)
            assert same(lse, log_sums)
        assert (out[np.isneginf(log_sums)] == 0).all()
    assert same(rounded.reference(inputs, problem, rows), expected)
    assert same(rounded.log_sum_exp(inputs, problem, rows), log_sums)


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "e4m3"])
@pytest.mark.parametrize("kind", ["normal", "one_hot", "far_below", "sink"])
def test_limits_of_problems_with_empty_rows_are_those_of_the_others(dtype, kind):
    """Rows without keys have no error, and would make every mean smaller."""
    some = Problem(1, 4, 2, 700, 130, 64, dtype, CAUSAL)
    every = replace(some, seqlen_q=130)
    for rounds_scores in (0, 1):
        one, other = (limits(Case(p, kind), rounds_scores) for p in (some, every))
        assert 0.5 < one.row / other.row < 2
        if kind == "normal":
            assert one.rms == pytest.approx(other.rms, rel=0.15)


def test_measures_take_no_mean_over_empty_rows():
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((1, 1, 128, 8))
    out = expected * (1 + 1e-3 * rng.standard_normal(expected.shape))
    padded = [np.concatenate([np.zeros((1, 1, 640, 8)), x], axis=2) for x in (out, expected)]
    one, other = measures(out, expected, "fp32"), measures(*padded, "fp32")
    assert asdict(other) == pytest.approx(asdict(one))
    padded[0][0, 0, 5, 5] = 0.5
    assert measures(*padded, "fp32").row > 100


@pytest.mark.parametrize("problem", EMPTY, ids=lambda p: p.label)
def test_cases_have_empty_rows_if_the_problem_has_some(problem):
    cases = (*small_cases(problem), short_turns(problem, 132))
    assert all(case.problem.has_empty_rows for case in cases)
    assert not any(case.problem.has_empty_rows for case in small_cases(replace(problem, mask=FULL)))
    empty_tiles = [case for case in cases if not dense(case.problem)[:64].any()]
    assert problem.mask.top_left or empty_tiles


def test_a_family_says_that_it_cannot_do_empty_rows():
    families = discover()
    asked = Problem(1, 1, 1, 200, 70, 64, "bf16", CAUSAL)
    assert families["flash_fwd_wgmma"].refusal(asked, arch_named("sm_90a")) is None
    refused = families["flash_fwd_mma"].refusal(asked, arch_named("sm_90a"))
    assert "queries that see no key" in refused
