"""A query whose mask leaves it no key: its output is 0, its log-sum-exp minus infinity.

A causal mask leaves the first queries none where there are more of them than keys. In the first
test their tiles have keys, which other queries see; in the second some tiles have none.
"""

from dataclasses import replace

import numpy as np
import pytest

from attnsweep.core.cases import Case
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.verify.encoding import from_bits
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.limits import limits
from attnsweep.verify.measures import row_error
from attnsweep.verify.rounded import log_sum_exp, reference

from .harness import ARCH, COMPILER, LSE_LIMIT, config_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

FAMILIES = discover()
KEYS = 40
# Family, config, queries, dtype: each way to write a row, and each way to take its exponentials.
CASES = {
    "tile": ("flash_fwd_wgmma", "MAXIMA=1", 64, "fp16"),
    "tile of later queries": ("flash_fwd_wgmma", "WARPGROUPS=2 MAXIMA=2", 128, "fp16"),
    "polynomial": ("flash_fwd_wgmma", "MAXIMA=2 EXP2_POLY=8", 64, "bf16"),
    "turns": ("flash_fwd_wgmma", "PERSISTENT=2 O_OVER_Q=1 MAXIMA=2", 64, "bf16"),
    "key groups": ("flash_fwd_wgmma", "WARPGROUPS=2 KEY_GROUPS=2 EXP2_POLY=4", 64, "bf16"),
    "joined": ("flash_fwd_wgmma", "SPLITS=2 SPLIT_CLUSTER=1 MAXIMA=2", 64, "fp16"),
    "combined": ("flash_fwd_wgmma", "SPLITS=2 MAXIMA=1 EXP2_POLY=8", 64, "bf16"),
    "packed heads": ("flash_fwd_wgmma", "PACK_GQA=1 MAXIMA=1", 48, "fp16"),
    "FP8": ("flash_fwd_fp8_wgmma", "MAXIMA=2 HEADROOM=2", 64, "e4m3"),
    "FP8, the other maxima": ("flash_fwd_fp8_wgmma", "MAXIMA=1 OVERLAP=2", 64, "e4m3_tensor"),
}


def run(simulator, case, config, schedule):
    """What the stages of a case write: output, and log-sum-exp."""
    kernel, values = config
    problem, inputs = case.problem, make_inputs(case, 1)
    stages, out = simulator.build(kernel, values, case), {"o": problem.bytes_of("o")}
    left = simulator.run(stages, inputs, out, kernel.workspaces(values, problem), schedule=schedule)
    bits = left["o"].view(np.uint16).reshape(problem.shape_of("o"))
    lse = left["lse"].view(np.float32).reshape(bits.shape[:3])
    return from_bits(bits, problem.out_dtype).astype(np.float64), lse


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("which", CASES)
def test_a_row_without_a_key_is_zero_and_the_others_are_right(simulator, which):
    family, words, queries, dtype = CASES[which]
    kernel = FAMILIES[family]
    config = kernel, config_of(kernel, f"{words} LSE=1 BLOCK_N=64")
    case = Case(Problem(1, 2, 1, queries, KEYS, 64, dtype, causal=True))
    empty = queries - KEYS
    rows = np.arange(empty, queries)
    inputs = make_inputs(case, 1)
    expected, of_rows = (maths(inputs, case.problem, rows) for maths in (reference, log_sum_exp))
    alike = Case(replace(case.problem, seqlen_q=KEYS))  # as many rows, all of which see keys
    limit = limits(alike, kernel.rounds_scores).row
    for schedule in (0, 1):
        out, lse = run(simulator, case, config, schedule)
        assert (out[:, :, :empty] == 0).all()
        assert (lse[:, :, :empty] == -np.inf).all()
        assert row_error(out[:, :, empty:], expected) <= limit
        error = np.abs(lse[:, :, empty:] - of_rows) / np.maximum(1, np.abs(of_rows))
        assert error.max() <= LSE_LIMIT


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("which", CASES)
def test_a_tile_of_queries_without_a_key(simulator, which):
    family, words, _, dtype = CASES[which]
    config = config_of(FAMILIES[family], f"{words} LSE=1 BLOCK_N=64")
    case = Case(Problem(1, 4, 2, 300, 100, 64, dtype, causal=True))
    result = simulator.check(FAMILIES[family], config, case, schedules=(0, 1))
    assert result.ok, str(result)


@pytest.mark.parametrize("family", ["flash_fwd_wgmma", "flash_fwd_fp8_wgmma"])
def test_only_a_launch_with_such_rows_asks_for_them(family):
    """All other code is what was recorded."""
    kernel = FAMILIES[family]
    config = config_of(kernel, "")
    some = Problem(1, 2, 1, 64, KEYS, 64, kernel.dtypes[0], causal=True)
    none = replace(some, seqlen_k=64)
    for problem, asked in ((some, True), (none, False), (replace(some, causal=False), False)):
        for name, launch in kernel.launches(config, problem, ARCH).items():
            defines = kernel.stages[name].defines(config, problem, launch)
            assert (defines.get("EMPTY_ROWS") == "1") == asked
