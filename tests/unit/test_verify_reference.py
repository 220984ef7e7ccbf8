"""The references are plain attention, whatever a problem hides or does with its scores."""

import numpy as np
import pytest
from plain import attention

from attnsweep.core.cases import Case
from attnsweep.core.layouts import Padded
from attnsweep.core.masks import CAUSAL, FULL, PATTERNS, Interval, pattern
from attnsweep.core.problem import Problem, Scores
from attnsweep.verify import rounded
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.reference import exact_rows

SIZES = (2, 4, 2, 70, 90, 32)
EMPTY = (
    Problem(2, 4, 2, 200, 70, 64, "bf16", CAUSAL),
    Problem(2, 4, 2, 90, 30, 64, "bf16", Interval(8, 0)),
    Problem(2, 4, 2, 70, 30, 64, "bf16", Interval(8, 3, top_left=True)),
)
"""With queries that see no key."""
PADDED = (
    Problem(3, 2, 1, 70, 90, 64, "bf16", CAUSAL, Padded("left", 0)),
    Problem(3, 2, 1, 70, 90, 64, "fp32", FULL, Padded("right", 30)),
    Problem(3, 2, 1, 70, 90, 64, "fp16", Interval(9, 2), Padded("right", 0)),
)
PROBLEMS = (
    *(Problem(1, 1, 1, 1, 1, 8), Problem(2, 4, 2, 5, 9, 8), Problem(2, 4, 2, 5, 9, 8, "bf16", CAUSAL)),
    *(Problem(1, 3, 1, 7, 7, 16, "bf16", CAUSAL), Problem(1, 2, 2, 3, 11, 8, "fp16", CAUSAL)),
    *EMPTY,
    *PADDED,
    *(Problem(2, 2, 1, 70, 90, 64, "fp16", pattern(name, 30)) for name in PATTERNS),
    *(
        Problem.parse(f"(2,4/2,40x70,{dims}) fp16 {mask}")
        for dims in ("192/128", "96/64", "64/128", "8/256", "24/8")
        for mask in ("full", "causal")
    ),
    Problem(*SIZES, "bf16", CAUSAL, scores=Scores(3)),
    Problem(*SIZES, "bf16", Interval(20, 0), scores=Scores(0, True)),
    Problem(2, 4, 2, 70, 91, 32, "fp16", scores=Scores(0, False, ("item", "head"))),
    Problem(2, 2, 2, 70, 91, 32, "bf16", scores=Scores(5, True, ("head",))),
    Problem(1, 2, 2, 90, 30, 32, "bf16", CAUSAL, scores=Scores(0, True)),  # rows without a key
)
CASES = [Case(problem) for problem in PROBLEMS]
CASES += [
    Case(Problem.parse(f"(3,2/1,70x91,32) {how}"), "finite_mask")
    for how in ("bf16 full bias(item)", "fp16 full bias()")
]
CASES += [Case(problem, kind) for problem in PADDED for kind in ("huge_padding", "far_below")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_the_references_are_plain_attention(case):
    problem = case.problem
    inputs, rows = make_inputs(case, 1), np.arange(problem.seqlen_q)
    expected, log_sums = attention(inputs, problem)
    assert expected.shape == problem.shape_of("o")
    if problem.layout.kind == "padded":
        assert inputs["key_range"].tolist() == [list(keys) for keys in problem.key_ranges]
    (out, lse), (turned, _) = exact_rows(inputs, problem, rows, (1, -1))
    empty = np.isneginf(log_sums)
    if not problem.scores.sinks:
        assert problem.has_empty_rows == empty.any()
        assert empty.sum() == problem.heads * (problem.batch * problem.seqlen_q - problem.rows_with_keys)
        assert (turned[empty] == 0).all()
    for found in (out, rounded.reference(inputs, problem, rows)):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)
    for found in (lse, rounded.log_sum_exp(inputs, problem, rows)):
        np.testing.assert_allclose(found, log_sums, rtol=1e-12, atol=1e-13)
    some = rounded.log_sum_exp(inputs, problem, rows[::3])
    np.testing.assert_allclose(some, log_sums[..., ::3], rtol=1e-12, atol=1e-13)
