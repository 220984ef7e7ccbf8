"""`scale`: what Q Kᵀ is multiplied by, as a fact of a problem."""

import math
from dataclasses import replace

import numpy as np
import pytest
from spaces import candidates

from attnsweep.core.cases import small_cases
from attnsweep.core.errors import ProblemError
from attnsweep.core.hardware import arch_named
from attnsweep.core.problem import LOG2E, Problem, Scores
from attnsweep.family.discover import discover
from attnsweep.verify.encoding import from_bits
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.measures import row_error
from attnsweep.verify.oracle import oracle_of

USUAL = Problem(2, 4, 2, 70, 90, 64, "bf16", causal=True)
ONE = replace(USUAL, scores=Scores(scale=1.0))


def test_without_one_a_problem_is_what_it_was():
    assert (USUAL.scale, ONE.scale) == (0.125, 1.0)
    assert "scale" not in USUAL.facts
    assert (replace(USUAL, scores=Scores(scale=0.125)), ONE.at_any_scale) == (USUAL, USUAL)
    assert hash(replace(USUAL, scores=Scores(scale=0.125))) == hash(USUAL) != hash(ONE)
    assert (ONE.variant, ONE.scores.kinds) == ("causal", ())
    assert (ONE.flops, ONE.min_bytes) == (USUAL.flops, USUAL.min_bytes)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1"])
def test_a_scale_is_a_number_above_0(value):
    with pytest.raises(ProblemError, match="scale is a number above 0, not"):
        Scores(scale=value)


PROBLEMS = {
    "flash_fwd_wide_wgmma": "(2,8/4,4096,512) bf16 causal",
    "flash_fwd_fp32_wide": "(1,4,1024,1024) fp32 full",
    "flash_fwd_fp32_wgmma": "(1,4,128,512) fp32 full",
    "flash_fwd_fp32_mma": "(2,8,1024,64) fp32 full",
    "flash_fwd_fp32_halves": "(2,8,1024,64) fp32 full",
    "flash_fwd_fp8_wgmma": "(2,8,4096,128) e4m3 full",
    "flash_bwd_wgmma": "(2,8,4096,128) bf16 causal backward",
    "decode_paged_mma": "(8,8/2,1x4096,128) bf16 full paged(64)",
    "append_paged_wgmma": "(2,8/2,512x4096,128) bf16 causal paged(64)",
    "flash_mla_wgmma": "(2,16/1,1x2048,576/512) bf16 full paged(64) value_in_key",
}


@pytest.mark.parametrize("name", sorted(discover()))
def test_the_launches_of_a_family_differ_in_it_alone(name):
    """Every family takes it as a number, and the code stays what it is."""
    family = discover()[name]
    arch = arch_named(family.min_arch)
    problem = Problem.parse(PROBLEMS.get(name, "(2,8,4096,128) fp16 full"))
    config = next(candidates(family, problem, arch))
    own = replace(problem, scores=Scores(scale=0.75))
    factors = {problem.scale * times: 0.75 * times for times in (1, LOG2E)}
    factors |= {1 / problem.scale: 1 / 0.75}
    changed, other = 0, family.launches(config, own, arch)
    for stage, launch in family.launches(config, problem, arch).items():
        assert replace(other[stage], args=launch.args) == launch
        pairs = [*zip(launch.args, other[stage].args, strict=True)]
        assert all(after == (factors.get(one, one) if type(one) is float else one) for one, after in pairs)
        changed += sum(one != after for one, after in pairs)
    assert changed


@pytest.mark.parametrize("scale", [1.0, 0.01, 1e-7, 40.0])
def test_scores_are_as_large_as_with_the_usual_one(scale):
    """Within a factor of two, which rounds nothing, and as far as fp16 holds it."""
    for case in small_cases(USUAL):
        own = replace(case, problem=replace(case.problem, scores=Scores(scale=scale)))
        before, after = make_inputs(case, 3), make_inputs(own, 3)
        q, other = (from_bits(each["q"], "bf16").astype(float) for each in (before, after))
        octaves = min(7, max(-7, round(math.log2(0.125 / scale))))
        assert (other == q * 2.0**octaves).all()
        assert all((before[name] == after[name]).all() for name in before if name != "q")


def test_references_and_limits_have_it():
    """Against float64 by NumPy; what the usual scale gives is beyond the limits."""
    case = next(case for case in small_cases(ONE) if case.inputs == "normal" and case.problem.seqlen_k > 9)
    p, given = case.problem, make_inputs(case, 3)
    q, k, v = (from_bits(given[name], "bf16").astype(float) for name in "qkv")
    k, v = (x.repeat(p.heads // p.heads_kv, 1) for x in (k, v))
    hidden = np.triu(np.ones((p.seqlen_q, p.seqlen_k), bool), 1 + p.seqlen_k - p.seqlen_q)

    def by_hand(scale):
        scores = np.where(hidden, -np.inf, q @ k.swapaxes(2, 3) * scale)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ v

    oracle = oracle_of(p)
    (exact,), (least,) = (each.values() for each in oracle.exact(given, p))
    most = oracle.limits(case, 0, None)["o"].row
    assert np.allclose(exact, by_hand(1.0), atol=1e-9)
    assert row_error(by_hand(1.0), exact, least) < 1e-6 < most < row_error(by_hand(0.125), exact, least)
