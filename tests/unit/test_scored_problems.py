"""Softcap, bias and sinks: how they are written, and the references against plain attention."""

import re

import numpy as np

from attnsweep.core.cases import Case
from attnsweep.core.files import shipped
from attnsweep.core.masks import FULL
from attnsweep.core.problem import Problem, Scores
from attnsweep.family.discover import discover
from attnsweep.verify.encoding import from_bits
from attnsweep.verify.inputs import make_inputs


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
