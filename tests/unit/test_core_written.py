"""How each kind of problem is written: as a label, as facts in JSON, as words of a command line."""

import json
import pickle
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from attnsweep.core.errors import AttnsweepError, ProblemError
from attnsweep.core.layouts import DENSE, Padded, Paged
from attnsweep.core.masks import CAUSAL, FULL, PATTERNS, Interval, pattern
from attnsweep.core.problem import BACKWARD, Dtype, Packed, Problem, Scores
from attnsweep.specs.shapes import read_shapes

SIDES = st.none() | st.integers(0, 12)
ALIGNED = st.sampled_from([FULL, CAUSAL]) | st.builds(Interval, SIDES, SIDES)
MASKS = ALIGNED | st.builds(Interval, SIDES, SIDES, top_left=st.just(True))
BOOLEANS = st.builds(
    pattern, st.sampled_from([p for p in PATTERNS if p != "documents"]), st.integers(0, 100)
) | st.builds(pattern, st.just("documents"), st.integers(1, 9), st.integers(0, 3))
PERCENT, SEED = st.integers(0, 100), st.integers(0, 5)
PADDED = st.builds(Padded, st.sampled_from(["right", "left"]), PERCENT, SEED)
PACKED = st.builds(Packed, st.integers(1, 6), PERCENT, SEED)
OWN = st.none() | st.sampled_from([(), ("item",), ("head",), ("item", "head")])
SCALES = st.sampled_from([None, 1, 0.125, 0.07216878364870322, 1e-7])
SCORES = st.builds(Scores, st.sampled_from([0, 30, 50, 2.5, 12.345678901]), st.booleans(), OWN, SCALES)
PAGED = st.builds(
    Paged,
    st.integers(1, 64),
    st.sampled_from(["nhd", "hnd"]),
    st.just(()) | st.tuples(st.integers(0, 30), st.just(30)),
    st.sampled_from([None, "e4m3"]),
    st.integers(0, 3),
    SEED,
)
DIMS = st.none() | st.integers(1, 32).map(lambda eighths: 8 * eighths)
HALF, NONE = st.sampled_from(["fp16", "bf16"]), st.just(FULL)


def problems(mask=NONE, dtype=HALF, *, batch=2, **more):
    """Of these sizes; more: strategies of other fields."""
    sizes = [st.just(size) for size in (batch, 4, 2, 9, 30, 64)]
    return st.builds(Problem, *sizes, dtype, mask, **more)


PROBLEMS = st.one_of(
    problems(MASKS, st.sampled_from(get_args(Dtype))),
    problems(MASKS, layout=PADDED),
    problems(ALIGNED, batch=1, layout=PACKED),
    problems(ALIGNED, layout=PAGED, scores=st.builds(Scores, scale=SCALES)),
    problems(layout=st.just(Paged(16)), head_dim_v=st.just(32), value_in_key=st.just(True)),
    problems(BOOLEANS),
    problems(scores=SCORES),
    problems(MASKS, st.sampled_from(["fp16", "bf16", "fp32"]), head_dim_v=DIMS),
    problems(ALIGNED, op=st.just(BACKWARD), layout=st.just(DENSE) | PADDED),
    problems(MASKS, st.sampled_from(get_args(Dtype)), scores=st.builds(Scores, scale=SCALES)),
    problems(ALIGNED, op=st.just(BACKWARD), scores=st.builds(Scores, scale=SCALES)),
)


@given(PROBLEMS)
@example(Problem(2, 4, 2, 9, 30, 64, "bf16", scores=Scores(12.345678901)))
def test_a_problem_is_read_back_from_its_label_its_facts_and_a_command_line(problem):
    assert Problem.parse(problem.label) == problem
    assert Problem.of(json.loads(json.dumps(problem.facts))) == problem
    assert read_shapes([problem.label]) == read_shapes(problem.label.split()) == [problem]
    assert pickle.loads(pickle.dumps(problem)) == problem
    adapter = TypeAdapter(Problem)
    assert adapter.validate_json(adapter.dump_json(problem)) == problem
    if problem.layout != DENSE:
        other = replace(problem, layout=replace(problem.layout, seed=problem.layout.seed + 1))
        assert (other != problem, other.label != problem.label) == (True, True)


@given(PROBLEMS, PROBLEMS)
def test_labels_tell_problems_apart(one, other):
    assert (one.label == other.label) == (one == other) == (one.facts == other.facts)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("2,2,64,64 bf16 full packed(2)", "packed sequences are a batch of 1"),
        ("1,2,64,64 e4m3 full packed(2)", "packed sequences have no FP8"),
        ("1,2,64x80,64 bf16 causal_top_left packed(2)", "packed sequences have no top_left"),
        ("1,2,64,64 bf16 full packed(0)", "packed sequences are counted from 1"),
        ("1,2,64,64 bf16 full packed(2,101)", "the shortest sequence has 0 to 100 percent"),
        ("1,2,64,64 bf16 causal bias(head)", "a bias has no mask beside it"),
        ("1,2,64,64 e4m3 full sinks", "FP8 has no sinks"),
        ("1,2,64,64 bf16 full scale(0)", "scale is a number above 0, not 0"),
        ("1,2,64,64 bf16 full scale(-0.1)", "scale is a number above 0, not -0.1"),
        ("1,2,64,64 bf16 full scale(nan)", "scale is a number above 0, not nan"),
        ("1,2,64,64 bf16 full scale(inf)", "scale is a number above 0, not inf"),
        ("1,2,64,64 bf16 full scale(x)", "scale is a number above 0"),
        ("1,2,64,64 bf16 full scale(1e300)", "float32 cannot hold this scale"),
        ("1,2,64,64 bf16 full softcap(1e-40)", "float32 cannot hold this softcap"),
        ("1,2,64,64 bf16 full softcap(-3)", "softcap is a number above 0, not -3"),
        ("1,2,64,64 bf16 full softcap(x)", "softcap is a number above 0"),
        ("1,2,64,64 bf16 full softcap(inf)", "softcap is a number above 0, not inf"),
        ("1,2,64,64 bf16 full bias(row)", "a bias is of item, head, not of row"),
        ("1,2,64,64 e4m3 full backward", "a backward has no e4m3"),
        ("1,2,64,64 fp32 full backward", "a backward has no fp32"),
        ("1,2,64,64 bf16 full softcap(30) backward", "a backward has no softcap"),
        ("1,2,64,64 bf16 full packed(2) backward", "a backward has no packed"),
        ("1,2,64,64 bf16 boolean(causal) backward", "a backward has no boolean"),
        ("1,1,1048576,8 bf16 full packed(1048576)", "at most 262144 items have keys of their own, not 1048576"),
        ("1048576,1,1,8 bf16 full padded(right,40)", "at most 262144 items have keys of their own"),
        ("1048576,1,1x16,8 bf16 full paged(16)", "at most 262144 items have keys of their own"),
        ("1048576,1,1,8 bf16 boolean(padding,40)", "at most 262144 items have keys of their own"),
        ("1,1,65537,8 bf16 boolean(holes,50)", "at most 4294967296 pairs of a pattern are drawn"),
        ("1,1,2147483648,8", "seqlen_q must be at most 2147483647"),
        (f"1,1,64,{'9' * 5000}", "is not a problem"),
        (f"1,1,64,8 fp16 window({'9' * 5000},0)", "is not a mask"),
        (f"1,1,64,8 fp16 full padded(right,{'9' * 5000})", "not a padding"),
        (f"1,1,64,8 fp16 full packed({'9' * 5000})", "no packing"),
        (f"1,1,64,8 fp16 full paged({'9' * 5000})", "a page size is a whole number"),
        (f"1,1,64,8 fp16 full paged(16,{'9' * 5000}x1)", "is no part of a paged cache"),
        ("1,16,2048,192/0", "head_dim_v must be at least 1, not 0"),
        ("1,16,2048,192/128 e4m3", "FP8 has no head_dim_v"),
        ("1,16,2048,192/128 bf16 full backward", "a backward has no head_dim_v"),
        ("1,16,2048,192/", "is not a problem"),
        ("1,16,2048/128,192", "is not a problem"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text, what):
    with pytest.raises(ProblemError, match=what):
        Problem.parse(text)


PARTS = ["9" * 5000, "1e400", "nan", "-1", "\t", "é", "", " ", "/", ",", "x", "(", ")", "99999999999x1", "scale(1e400)"]


@given(PROBLEMS, st.lists(st.tuples(st.integers(0, 80), st.integers(0, 3), st.sampled_from(PARTS)), min_size=1))
def test_a_changed_label_is_refused_or_is_that_of_its_problem(problem, edits):
    text = problem.label
    for at, cut, part in edits:
        text = text[:at] + part + text[at + cut :]
    for read in (Problem.parse, lambda text: read_shapes([f" {text}"])[0]):
        try:
            found = read(text)
        except AttnsweepError:
            continue
        assert Problem.parse(found.label) == found


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"op": "sideways"}, "an op is one of forward, backward"),
        ({"padding": ["right", 40, 2**70]}, "a seed is less than 2"),
        ({"head_dim_v": "128"}, "head_dim_v is a whole number, not '128'"),
    ],
)
def test_facts_of_another_kind_are_refused(facts, what):
    with pytest.raises(ProblemError, match=what):
        Problem.of(Problem(1, 2, 2, 64, 64, 192, "bf16").facts | facts)
