"""Softcap, bias and sinks: how they are written, and the references against plain attention."""

import re

import numpy as np
import pytest

from attnsweep.core.cases import Case
from attnsweep.core.files import shipped
from attnsweep.core.masks import CAUSAL, FULL, Interval
from attnsweep.core.problem import Problem, Scores
from attnsweep.family.discover import discover
from attnsweep.verify import rounded
from attnsweep.verify.encoding import from_bits
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.reference import exact_rows


def test_problems_without_them_are_written_as_ever():
    how = Scores(50, True, ("head",))
    problem = Problem(2, 4, 2, 9, 30, 64, "bf16", FULL, scores=how)
    assert problem.variant.split() == ["full", *how.kinds]
    problem = Problem(1, 2, 1, 3, 4, 64, "bf16")
    assert problem.facts.keys() & {"softcap", "sinks", "bias"} == set()
    assert hash(problem) == hash(Problem(1, 2, 1, 3, 4, 64, "bf16", scores=Scores()))
    assert hash(problem) != hash(Problem(1, 2, 1, 3, 4, 64, "bf16", scores=Scores(sinks=True)))


def test_a_family_says_what_it_cannot_do():
    family = discover()["flash_fwd_mma"]
    problem = Problem(1, 2, 2, 64, 64, 64, "bf16", scores=Scores(50))
    from attnsweep.core.hardware import ARCHS

    assert family.refusal(problem, ARCHS["sm_90a"]) == "cannot do softcap"


PROBLEMS = (
    Problem(2, 4, 2, 70, 90, 32, "bf16", CAUSAL, scores=Scores(3)),
    Problem(2, 4, 2, 70, 90, 32, "bf16", Interval(20, 0), scores=Scores(0, True)),
    Problem(2, 4, 2, 70, 91, 32, "fp16", scores=Scores(0, False, ("item", "head"))),
    Problem(2, 2, 2, 70, 91, 32, "bf16", scores=Scores(5, True, ("head",))),
    Problem(1, 2, 2, 90, 30, 32, "bf16", CAUSAL, scores=Scores(0, True)),  # rows without a key
)


def attention(inputs, p):
    """Plain attention by its definition, and its log-sum-exp."""
    q, k, v = (from_bits(inputs[name], p.dtype).astype(np.float64) for name in "qkv")
    group, how = p.heads // p.heads_kv, p.scores
    s = q @ np.repeat(k, group, 1).swapaxes(2, 3) * p.scale
    if how.softcap:
        s = how.softcap * np.tanh(s / how.softcap)
    if how.bias is not None:
        bias = from_bits(inputs["bias"], p.dtype)[..., : p.seqlen_k]
        assert np.isneginf(bias).any()
        s = s + bias
    low, high = p.diagonals
    after = np.arange(p.seqlen_k) - np.arange(p.seqlen_q)[:, None]
    e = np.where((after >= low) & (after <= high), np.exp(s), 0)
    total = e.sum(-1) + (np.exp(inputs["sinks"].astype(float))[:, None] if how.sinks else 0)
    out = e @ np.repeat(v, group, 1) / np.where(total, total, 1)[..., None]
    with np.errstate(divide="ignore"):
        return out, np.log(total)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_the_references_are_plain_attention(problem):
    inputs, rows = make_inputs(Case(problem), 1), np.arange(problem.seqlen_q)
    expected, log_sums = attention(inputs, problem)
    for made in (exact_rows(inputs, problem, rows)[0][0], rounded.reference(inputs, problem, rows)):
        np.testing.assert_allclose(made, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(rounded.log_sum_exp(inputs, problem, rows), log_sums, atol=1e-12)


def test_a_bias_ends_in_what_nobody_may_read():
    problem = Problem(1, 1, 1, 5, 13, 32, "bf16", scores=Scores(bias=()))
    bias = from_bits(make_inputs(Case(problem), 1)["bias"], "bf16")
    assert bias.shape == (1, 1, 5, 16)
    assert (np.isnan(bias) == (np.arange(16) >= 13)).all()


def test_the_polynomial_of_a_softcap_is_off_by_no_more_than_its_template_says():
    """Coefficients as common/tile/scores.cuh has them, in float32 as it adds them."""
    text = (shipped("kernels") / "common/tile/scores.cuh").read_text()
    said = float(re.search(r"off by ([\d.e-]+)", text)[1].rstrip("."))
    numbers = re.findall(r"-?0\.\d+(?=f)", text[text.index("float y = s[i]") :])
    highest_first = [np.float32(number) for number in numbers[:6]]
    assert len(highest_first) == 6
    x = np.linspace(0, 1, 10**5, dtype=np.float32)
    p = np.float32(0)
    for coefficient in highest_first:
        p = p * (x * x) + coefficient
    off = np.abs(x.astype(float) * p - np.tanh(x.astype(float))).max()
    assert said / 2 < off <= said
