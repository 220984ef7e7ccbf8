"""The WMMA pipeline's acceptance: five shapes, causal and not, before anything is timed.

In the settings of the system it stands for: 64x64 tiles, four warps and one that copies, two or
three stages, scores and output in shared memory; and in the settings that won the recorded sweep.
tests/gpu/test_acceptance.py asks the same of a GPU.
"""

import pytest

from attnsweep.core.cases import Case
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover

from .harness import COMPILER, config_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

OWN = "PRODUCER_WARPS=1 LAYOUT=0 O_IN_REGISTERS=0"
SETTINGS = {
    "two stages": f"STAGES=2 {OWN}",
    "three stages": f"STAGES=3 {OWN}",
    "winner": "BLOCK_M=32 BLOCK_N=128 STAGES=2 PRODUCER_WARPS=2 LAYOUT=3 O_IN_REGISTERS=1",
}
# The longest takes a second a head.
SHAPES = {(1, 8, 512, 512): 0, (2, 4, 128, 128): 1}
SHAPES |= dict.fromkeys([(1, 2, 64, 64), (1, 3, 200, 333), (1, 1, 1, 77)], 6)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "shape", [pytest.param(of, marks=pytest.mark.nightly(push=push)) for of, push in SHAPES.items()], ids=str
)
def test_accepted(simulator, shape, causal, settings):
    kernel = discover()["wmma_pipeline"]
    batch, heads, seqlen_q, seqlen_k = shape
    problem = Problem(batch, heads, heads, seqlen_q, seqlen_k, 64, causal=causal)
    result = simulator.check(kernel, config_of(kernel, SETTINGS[settings]), Case(problem))
    assert result.ok, str(result)
