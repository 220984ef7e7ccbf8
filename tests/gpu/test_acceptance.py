"""The WMMA pipeline's acceptance, and settings that no config of a default space has, on a GPU."""

import pytest

from attnsweep.compile.candidate import Build
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config

pytestmark = pytest.mark.gpu

KERNELS = discover()
SHAPES = [(1, 8, 512, 512), (2, 4, 128, 128), (1, 2, 64, 64), (1, 3, 200, 333), (1, 1, 1, 77)]
# Beside the family's first values. The first two are the settings of the system it stands for, the
# next is what won the recorded sweep.
CONFIGS = [
    ("wmma_pipeline", {"STAGES": 2, "LAYOUT": 0, "O_IN_REGISTERS": 0}),
    ("wmma_pipeline", {"STAGES": 3, "LAYOUT": 0, "O_IN_REGISTERS": 0}),
    ("wmma_pipeline", {"BLOCK_M": 32, "BLOCK_N": 128, "PRODUCER_WARPS": 2}),
    ("wmma_pipeline", {"STAGES": 4, "PRODUCER_WARPS": 4, "EARLY": 2, "LAYOUT": 2, "CTAS": 3}),
    ("wmma_pipeline", {"STAGES": 1, "PRODUCER_WARPS": 0, "LAYOUT": 1, "CTAS": 3}),
    ("wmma_pipeline", {"BLOCK_M": 16, "BLOCK_N": 128, "PRODUCER_WARPS": 2, "LAYOUT": 3}),
    ("ladder_5_swizzled", {"BLOCK_N": 128, "BRANCHES": 0}),
    ("ladder_5_swizzled", {"BLOCK_M": 16, "BLOCK_N": 128, "STAGES": 4, "BRANCHES": 0}),
    ("ladder_5_swizzled", {"BLOCK_M": 64, "KEY_WARPS": 2, "BLOCK_N": 64, "STAGES": 4}),
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accepted(shape, causal, worker, compiler):
    batch, heads, seqlen_q, seqlen_k = shape
    problem = Problem(batch, heads, heads, seqlen_q, seqlen_k, 64, causal=causal)
    worker.open(problem, replay_us=100, seed=1)
    for name, values in CONFIGS:
        kernel = KERNELS[name]
        config = Config({param.name: param.values[0] for param in kernel.params} | values)
        build = Build(kernel, config, problem, compiler)
        build.submit()
        accuracy, _ = worker.trial(build.candidate())
        assert accuracy.rel_err <= accuracy.limit, (name, config.label)
