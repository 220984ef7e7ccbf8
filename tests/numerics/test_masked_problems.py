"""Problems whose masks hide more than causal ones: what they count, how they are written."""

from dataclasses import asdict, replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import dense

from attnsweep.core import boolean_masks
from attnsweep.core.cases import Case, Inputs, short_turns, small_cases
from attnsweep.core.errors import KernelError, ProblemError
from attnsweep.core.hardware import arch_named
from attnsweep.core.layouts import DENSE, Padded
from attnsweep.core.masks import CAUSAL, FULL, PATTERNS, Interval, pattern
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Family
from attnsweep.specs.model import ProblemSpec
from attnsweep.verify import rounded
from attnsweep.verify.encoding import from_bits, mask_of
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.limits import limits
from attnsweep.verify.measures import measures
from attnsweep.verify.reference import hidden_keys, rows_with_keys, some_rows

SIDES = st.none() | st.integers(0, 12)
LENGTHS = st.integers(1, 10)
TOP_LEFT = Interval(None, 0, top_left=True)


def problem(seqlen_q, seqlen_k, mask, **more):
    return Problem(2, 4, 2, seqlen_q, seqlen_k, 64, "bf16", mask, **more)


# -- aligned top-left -----------------------------------------------------------------------------


@given(SIDES, SIDES)
def test_equal_lengths_have_one_name_for_one_mask(left, right):
    same = problem(9, 9, Interval(left, right, top_left=True))
    assert same == problem(9, 9, Interval(left, right))
    assert "top_left" not in same.label
    assert problem(9, 30, Interval(top_left=True)) == problem(9, 30, FULL)


ENTRY = {"batch": 2, "heads": 4, "heads_kv": 2, "seqlen_q": 9, "seqlen_k": 30, "head_dim": 64}
ENTRY |= {"dtype": "bf16"}


def of_entry(**more):
    (made,) = ProblemSpec.model_validate(ENTRY | more).expand()
    return made


# -- queries that see no key ----------------------------------------------------------------------

EMPTY = (problem(200, 70, CAUSAL), problem(90, 30, Interval(8, 0)), problem(70, 30, Interval(8, 3, top_left=True)))


@pytest.mark.nightly(push=1)
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


# -- padding --------------------------------------------------------------------------------------

LAYOUTS = st.builds(Padded, st.sampled_from(["right", "left"]), st.integers(0, 100), st.integers(0, 5))
MASKS = st.sampled_from([FULL, CAUSAL, TOP_LEFT]) | st.builds(Interval, SIDES, SIDES)


@given(LAYOUTS, MASKS, st.integers(1, 5), LENGTHS, st.integers(1, 14))
def test_padded_problems_count_the_pairs_of_each_item(layout, mask, batch, seqlen_q, seqlen_k):
    made = Problem(batch, 2, 1, seqlen_q, seqlen_k, 64, "bf16", mask, layout)
    pairs = np.stack([dense(made, item) for item in range(batch)])
    assert made.pairs == 2 * pairs.sum()
    assert made.flops == 4 * 64 * made.pairs
    assert made.rows_with_keys == pairs.any(axis=2).sum()
    assert made.has_empty_rows == (not pairs.any(axis=2).all())
    assert (rows_with_keys(made) == pairs.any(axis=2)).all()
    hidden = [hidden_keys(made, np.arange(seqlen_q), item) for item in range(batch)]
    assert (~np.stack(hidden) == pairs).all()
    unread = seqlen_k * batch - sum(end - first for first, end in made.key_ranges)
    if seqlen_q == 1:  # what it does not see, nobody reads
        unread = seqlen_k * batch - pairs.sum()
    assert made.tensor_bytes - made.min_bytes == 2 * unread * 64 * 2


@given(
    st.builds(pattern, st.sampled_from([*PATTERNS]), st.integers(1, 100), st.integers(0, 5)) | MASKS,
    st.integers(1, 4),
    st.integers(1, 300),
)
def test_bytes_that_one_query_needs_are_those_of_the_keys_that_it_sees(mask, batch, seqlen_k):
    made = Problem(batch, 6, 2, 1, seqlen_k, 64, "bf16", mask, head_dim_v=32)
    seen = sum((~hidden_keys(made, np.arange(1), item)).sum() for item in range(batch))
    assert made.tensor_bytes - made.min_bytes == 2 * (batch * seqlen_k - seen) * (64 + 32) * 2
    if mask.pattern is None or mask.pattern.name != "padding":  # of two it is not worked out
        assert replace(made, seqlen_q=2).min_bytes == replace(made, seqlen_q=2).tensor_bytes


def test_bytes_of_several_queries_leave_out_the_padding_of_a_boolean_mask():
    made = problem(3, 1000, pattern("padding", 10))
    hidden = sum(hidden_keys(made, np.arange(1), item).sum() for item in range(2))
    assert hidden > 0
    assert made.tensor_bytes - made.min_bytes == 2 * hidden * 2 * 64 * 2


@given(LAYOUTS, st.integers(2, 40), st.integers(1, 3000))
def test_lengths_are_spread_from_the_least_to_all_keys(layout, batch, seqlen_k):
    ranges = layout.ranges(batch, seqlen_k)
    lengths = sorted(end - first for first, end in ranges)
    assert lengths[-1] == seqlen_k
    assert lengths[0] == max(layout.least > 0, seqlen_k * layout.least // 100)
    steps = np.diff(lengths)
    assert steps.max() - steps.min() <= 2
    assert all(first == 0 if layout.side == "right" else end == seqlen_k for first, end in ranges)
    ((first, end),) = layout.ranges(1, seqlen_k)
    assert end - first == lengths[0]


@pytest.mark.parametrize(
    ("padding", "says"), [(["up", 40], "right or left"), (["right", 101], "0 to 100"), (["right", 40, -1], "seed")]
)
def test_what_is_no_padding(padding, says):
    with pytest.raises(Exception, match=says):
        of_entry(padding=padding)
    with pytest.raises(ProblemError):
        Padded.parse("(right,40")


@pytest.mark.nightly(push=4)
@pytest.mark.parametrize("kind", ["normal", "huge_padding", "far_below"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3", "e4m3_block"])
def test_a_kernel_that_reads_padding_is_wrong(kind, dtype):
    """Its answer is that without padding, which differs by far more than any limit."""
    padded = Problem(3, 4, 2, 70, 90, 64, dtype, CAUSAL, Padded("right", 30))
    inputs, rows = make_inputs(Case(padded, kind), 1), np.arange(70)
    right = rounded.reference(inputs, padded, rows)
    wrong = rounded.reference(inputs, replace(padded, layout=DENSE), rows)
    limit = limits(Case(padded, kind), 0)
    assert measures(wrong, right, padded.out_dtype).row > 3 * limit.row


def test_the_far_end_of_padding_is_finite_and_huge():
    padded = Problem(2, 1, 1, 70, 90, 64, "bf16", FULL, Padded("right", 30))
    inputs = make_inputs(Case(padded, "huge_padding"), 1)
    for name in "kv":
        values = from_bits(inputs[name], "bf16")
        assert np.isfinite(values).all()
        for item, (_, end) in enumerate(padded.key_ranges):
            assert (np.abs(values[item, :, end:]) == 2.0**40).all()
            assert np.abs(values[item, :, :end]).max() < 10


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Interval(300, 0)], ids=lambda mask: mask.label)
def test_cases_of_padded_problems(mask):
    asked = Problem(8, 8, 2, 2048, 2048, 64, "bf16", mask, Padded("right", 40))
    cases = small_cases(asked)
    assert len({case.label for case in cases}) == len(cases)
    lengths = [(end - first, case.problem.seqlen_k) for case in cases for first, end in case.problem.key_ranges]
    assert {0, 1} < {length for length, _ in lengths}
    assert any(length == seqlen_k > 300 for length, seqlen_k in lengths)
    assert {case.problem.layout.side for case in cases} == {"right", "left"}
    assert {case.inputs for case in cases} == {*get_args(Inputs)} - {"exact", "huge_scores", "finite_mask"}
    first_tiles = [case.problem for case in cases if case.problem.key_ranges[0][0] > 128]
    last_tiles = [c.problem for c in cases if c.problem.key_ranges[0][1] < c.problem.seqlen_k - 128]
    assert first_tiles
    assert last_tiles
    if mask == CAUSAL:
        seen = [(p, rows_with_keys(p)) for p in (case.problem for case in cases)]
        assert any(p.seqlen_q > 64 and not rows[:, :64].any(axis=1).all() for p, rows in seen)
    turns = short_turns(asked, 132).problem
    assert (turns.layout.side, turns.layout.least) == ("right", 0)


def test_families_declare_padding_with_empty_rows():
    asked = Problem(2, 1, 1, 200, 200, 64, "bf16", CAUSAL, Padded("right", 40))
    refused = discover()["flash_fwd_mma"].refusal(asked, arch_named("sm_90a"))
    assert refused == "layout padded is not one of dense"
    with pytest.raises(KernelError, match="no empty_rows"):
        Family("some", "", (), layouts=("dense", "padded"))
    with pytest.raises(KernelError, match="layouts are a tuple"):
        Family("some", "", (), layouts=("sparse",))


# -- boolean masks --------------------------------------------------------------------------------

BOOLEANS = st.builds(
    pattern, st.sampled_from([p for p in PATTERNS if p != "documents"]), st.integers(0, 100)
) | st.builds(pattern, st.just("documents"), st.integers(1, 9), st.integers(0, 3))


@given(BOOLEANS, st.integers(1, 3), st.integers(1, 300), st.integers(1, 300))
@settings(max_examples=40)
def test_boolean_masks_are_their_tensor(mask, batch, seqlen_q, seqlen_k):
    made = Problem(batch, 2, 1, seqlen_q, seqlen_k, 64, "bf16", mask)
    tensor = boolean_masks.tensor(made)
    assert made.shape_of("mask") == tensor.shape
    assert made.bytes_of("mask") == tensor.nbytes
    pairs = np.broadcast_to(tensor[:, 0], (batch, seqlen_q, seqlen_k))
    assert made.pairs == 2 * pairs.sum()
    assert made.rows_with_keys == pairs.any(axis=2).sum()
    rows = np.arange(0, seqlen_q, 7)
    for item in range(batch):
        assert (hidden_keys(made, rows, item) == ~pairs[item, rows]).all()
    assert (mask_of(made)["mask"] == tensor).all()


def test_patterns_of_boolean_masks():
    def of(name, density, seed=0, sizes=(700, 900)):
        return boolean_masks.tensor(Problem(2, 1, 1, *sizes, 64, mask=pattern(name, density, seed)))

    blocks = of("blocks", 30, sizes=(1280, 1280))[0, 0]
    assert (blocks.reshape(10, 128, 10, 128) == blocks[::128, ::128][:, None, :, None]).all()
    assert blocks.any(axis=1).all()
    assert 0.2 < blocks.mean() < 0.5
    assert (of("blocks", 0, sizes=(1280, 1280)).sum(axis=-1) == 128).all()
    documents = of("documents", 4)[0, 0]
    assert len({tuple(row) for row in documents.tolist()}) == 4
    assert (documents.sum(axis=0) > 0).all()
    assert (np.abs(np.diff(documents.astype(int), axis=1)).sum(axis=1) <= 2).all()
    causal = np.tri(700, 900, 200, bool)
    as_boolean = boolean_masks.tensor(Problem(3, 2, 1, 700, 900, 64, mask=CAUSAL.as_boolean(["head"])))
    assert as_boolean.shape == (1, 2, 700, 900)
    assert (as_boolean == causal).all()
    holes = of("holes", 60)[0, 0]
    assert (holes <= causal).all()
    assert 0.58 < holes.sum() / causal.sum() < 0.62
    assert holes[np.arange(700), np.arange(700) + 200].all()
    padding = of("padding", 40)
    assert padding.shape == (2, 1, 700, 900)
    lengths = [end for _, end in Padded("right", 40).ranges(2, 900)]
    assert padding.sum(axis=-1)[:, 0, 0].tolist() == lengths
    assert (of("holes", 60, 1) != of("holes", 60)).any()


def test_cases_of_boolean_masks():
    asked = Problem(4, 8, 2, 2048, 2048, 64, "bf16", pattern("blocks", 30))
    cases = small_cases(asked)
    drawn_masks = [case.problem.mask for case in cases if case.problem.mask.pattern is not None]
    assert {mask.pattern.name for mask in drawn_masks} == {*PATTERNS}
    assert len({case.label for case in cases}) == len(cases)
    assert any(case.problem.has_empty_rows for case in cases)
    assert all(np.isfinite(limits(case, 0).row) for case in cases)
    assert short_turns(asked, 132).problem.mask == asked.mask
    with pytest.raises(ProblemError, match="no padding beside it"):
        replace(asked, layout=Padded("right", 40))
    refused = discover()["flash_fwd_mma"].refusal(asked, arch_named("sm_90a"))
    assert refused == "mask boolean(blocks,30) is not one of full, causal, window"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["bands", 3], "no pattern"),
        (["bands"], "of item, head"),
        (["blocks", 101], "0 to 100"),
        (["documents", 0], "1 to"),
    ],
)
def test_what_is_no_boolean_mask(values, says):
    with pytest.raises(Exception, match=says):
        of_entry(boolean=values)
    with pytest.raises(Exception, match="beside another mask"):
        of_entry(boolean=["blocks", 30], causal=True)


def test_limits_know_the_rows_of_a_drawn_mask_that_see_the_fewest_keys():
    problem = Problem.parse("(1,1,1024,64) bf16 boolean(blocks,25)")
    seen_keys = boolean_masks.tensor(problem)[0, 0].sum(axis=1)
    rows = some_rows(Case(problem), 0, 64)
    assert seen_keys[rows].min() == seen_keys.min() < np.median(seen_keys)


ONE_QUERY = (pattern("padding", 7), pattern("holes", 50), FULL.as_boolean(("item",)))


@pytest.mark.parametrize("mask", ONE_QUERY, ids=lambda mask: mask.label)
def test_cases_of_a_boolean_mask_of_one_query_have_one_and_as_many_rows(mask):
    """A kernel that takes the mask for a row of keys is proved on nothing else."""
    asked = Problem(4, 32, 8, 1, 2048, 64, "bf16", mask)
    cases, of_several = small_cases(asked), small_cases(replace(asked, seqlen_q=100))
    assert {case.problem.seqlen_q for case in cases} == {1}
    assert {case.problem.seqlen_q for case in of_several} > {1}
    assert len({case.label for case in cases}) == len(cases)
    assert all(case.problem.kind == "boolean" for case in cases)
    rows = [[p.batch * p.heads * p.seqlen_q for p in (c.problem for c in each)] for each in (cases, of_several)]
    assert rows[0] == rows[1]
    assert {case.inputs for case in cases} >= {"normal", "large_scores", "far_below", "sink", "wide"}
    keys = {case.problem.seqlen_k for case in cases}
    assert {1, 17} <= keys
    assert max(keys) > 512, "more than the threads that read a mask take at once"
    assert any(case.problem.has_empty_rows for case in cases)
    of_items = [c.problem for c in cases if c.problem.mask.of_item]
    assert {p.batch for p in of_items} == {2}
    assert short_turns(asked, 132).problem.seqlen_q == 1


def test_small_cases_of_a_boolean_mask_that_hides_padding_too():
    of = Problem.parse("(4,32/8,2048,128) bf16 boolean(causal,item) padded(right,40)")
    cases = small_cases(of)
    assert {case.problem.kind for case in cases} == {"boolean"}
    assert {case.problem.layout.kind for case in cases} == {"dense", "padded"}
    assert of.mask in {case.problem.mask for case in cases}
