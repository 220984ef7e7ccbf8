"""The WMMA pipeline's acceptance: five shapes, causal and not, before anything is timed.

In the settings of the system it stands for: 64x64 tiles, four warps and one that copies, two
stages, scores and output in shared memory. tests/gpu/test_acceptance.py asks the same of a GPU.
"""

from __future__ import annotations

import pytest

from attnsweep.kernel import discover
from attnsweep.numerics import Case
from attnsweep.problem import Problem

from .harness import COMPILER, config_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

OWN = "STAGES=2 PRODUCER_WARPS=1 LAYOUT=0 O_IN_REGISTERS=0"
SHAPES = [(1, 8, 512, 512), (2, 4, 128, 128), (1, 2, 64, 64), (1, 3, 200, 333), (1, 1, 1, 77)]


@pytest.fixture(scope="module")
def accepted(simulator):
    kernel = discover()["wmma_pipeline"]

    def one(named):
        (batch, heads, seqlen_q, seqlen_k), causal = named
        problem = Problem(batch, heads, heads, seqlen_q, seqlen_k, 64, causal=causal)
        return simulator.check(kernel, config_of(kernel, OWN), Case(problem))

    names = [(shape, causal) for causal in (False, True) for shape in SHAPES]
    return dict(zip(names, simulator.map(one, names), strict=True))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accepted(accepted, shape, causal):
    result = accepted[shape, causal].result()
    assert result.error <= result.limit
