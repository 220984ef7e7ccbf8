"""Softcap, bias and sinks: in each way that flash_fwd_wgmma takes its softmax, and stores a row."""

from dataclasses import replace

import numpy as np
import pytest

from attnsweep.core.cases import Case
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.launch import TensorMap
from attnsweep.verify import inputs as verify_inputs
from attnsweep.verify import measures
from attnsweep.verify.encoding import from_bits, to_bits
from attnsweep.verify.reference import exact_rows

from .harness import ARCH, COMPILER, config_of
from .test_masked_reference import of_device

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
FAMILY = discover()["flash_fwd_wgmma"]
CONFIGS = (
    "BLOCK_N=64 WARPGROUPS=2 MAXIMA=1 LSE=1",
    "BLOCK_N=128 WARPGROUPS=2 PINGPONG=1 MAXIMA=2 PERSISTENT=1 LSE=1",
    "BLOCK_N=64 WARPGROUPS=2 KEY_GROUPS=2 MAXIMA=2 LSE=1",
    "BLOCK_N=64 WARPGROUPS=3 OVERLAP=0 MAXIMA=1 EXP2_POLY=2",
    "BLOCK_N=64 WARPGROUPS=2 P_SHARED=1 MAXIMA=1 LSE=1",
    "BLOCK_N=64 WARPGROUPS=2 SPLITS=2 MAXIMA=2 LSE=1",
)
PROBLEMS = tuple(
    map(
        Problem.parse,
        (
            "(2,4/2,97x161,64) bf16 full softcap(20)",
            "(2,4/2,97x161,64) bf16 causal scale(1)",
            "(2,2,130,64) bf16 causal softcap(2)",  # scores beyond the polynomial
            "(1,2,200,64) bf16 window(30,0) softcap(5) sinks",
            "(1,2,150x70,64) fp16 causal sinks",  # queries without a key
            "(2,4/2,97x161,64) fp16 full bias(item,head)",
            "(2,2,130x321,64) bf16 full bias(head)",
            "(2,2,130x200,64) bf16 full softcap(5) sinks bias(item)",
            "(1,2,150,64) bf16 boolean(holes,50) softcap(10) sinks",
        ),
    )
)
# What the rules say of sizes so small, and of what a problem's mask excludes.
MAY_REFUSE = ("turns_of_blocks", "block_order", "masks_in_memory", "scores", "blocks_fit")


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label)
def test_right_in_every_way_to_take_the_softmax(simulator, problem):
    tried = 0
    for words in CONFIGS:
        config = config_of(FAMILY, words)
        refused = FAMILY.refused_by(config, problem, ARCH)
        assert refused is None or refused in MAY_REFUSE
        if refused in (None, "turns_of_blocks"):
            result = simulator.check(FAMILY, config, Case(problem), schedules=(tried % 2,))
            assert result.ok, (words, problem.label, str(result))
            tried += 1
    assert tried >= 3


def test_a_bias_of_one_row_is_of_all_queries(simulator, relaunched):
    """As a mask of padding is, (batch, 1, 1, seqlen_k), which nobody writes out for each query."""
    problem = Problem.parse("(2,2,130x200,64) bf16 full bias(item)")
    case = Case(problem)
    given = verify_inputs.make_inputs(case, 1)
    given["bias"] = np.broadcast_to(given["bias"][:, :, :1], given["bias"].shape)

    def of_one_row(made):
        args = [*made.args]
        at = next(i for i, a in enumerate(args) if isinstance(a, TensorMap) and a.buffer == "bias")
        keys, _, heads, items = args[at].dims
        args[at] = replace(args[at], dims=(keys, 1, heads, items), box=(64, 1, 1, 1))
        return replace(made, args=(*args[:-1], 0))

    relaunched(FAMILY, "fwd", of_one_row)
    for words in CONFIGS[:2]:
        config = config_of(FAMILY, words)
        result = simulator.check(FAMILY, config, case, schedules=(0,), inputs=given)
        assert result.ok, str(result)


def test_a_bias_that_leaves_queries_no_key(simulator):
    case = Case(Problem.parse("(2,2,130x200,64) bf16 full bias(item)"))
    given = verify_inputs.make_inputs(case, 1)
    given["bias"][:, :, 50:90] = 0xFF80  # minus infinity
    for words in CONFIGS:
        config = config_of(FAMILY, words)
        result = simulator.check(FAMILY, config, case, schedules=(0,), inputs=given)
        assert result.ok, (words, str(result))


# A cluster of splits; scores computed again, with a polynomial; P in shared memory; no overlap.
OF_FINITE_MASKS = (
    *CONFIGS,
    "BLOCK_N=64 WARPGROUPS=2 SPLITS=2 SPLIT_CLUSTER=1 MAXIMA=1 LSE=1",
    "BLOCK_N=128 WARPGROUPS=2 MAXIMA=2 EXP2_POLY=2 LSE=1",
    "BLOCK_N=64 WARPGROUPS=2 P_SHARED=1 MAXIMA=2 LSE=1",
    "BLOCK_N=64 WARPGROUPS=1 BLOCKS_PER_SM=3 OVERLAP=0 MAXIMA=2 LSE=1",
)
FINITE_MASKS = ("(3,2/1,130x321,64) bf16 full bias(item)", "(2,2/1,97x200,64) fp16 full bias(head)")


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("words", OF_FINITE_MASKS)
def test_finite_masks_in_every_way_to_take_the_softmax(simulator, words):
    for label in FINITE_MASKS:
        case = Case(Problem.parse(label), "finite_mask")
        result = simulator.check(FAMILY, config_of(FAMILY, words), case, schedules=(0,))
        assert result.ok, (label, str(result))


@pytest.mark.parametrize("fill", [-3.3895313892515355e38, -1e30, -1e9])
def test_a_row_whose_sums_are_all_equal_is_the_mean_of_v(simulator, fill):
    """Rows that a mask hides whole by the least number of bf16, or where scores vanish beside it."""
    problem = Problem.parse("(1,1,64x200,64) bf16 full bias(item)")
    given = verify_inputs.make_inputs(Case(problem), 1)
    given["bias"][:] = to_bits(np.full(given["bias"].shape, fill, np.float32), "bf16")
    config = config_of(FAMILY, "BLOCK_N=64 WARPGROUPS=2 KEY_GROUPS=2 MAXIMA=2 LSE=1")
    stages, sizes = simulator.build(FAMILY, config, Case(problem)), FAMILY.workspaces(config, problem)
    left = simulator.run(stages, given, {"o": problem.bytes_of("o")}, sizes)
    out = from_bits(left["o"].view(np.uint16).reshape(64, 64), "bf16")
    mean = from_bits(given["v"], "bf16").astype(np.float64).mean(axis=2)[0]
    assert np.abs(out - mean).max() < 2e-3
    assert (left["lse"].view(np.float32) == from_bits(given["bias"][0, 0, 0, 0], "bf16")).all()


JUDGED = (*(Case(problem) for problem in PROBLEMS), *(Case(Problem.parse(p), "finite_mask") for p in FINITE_MASKS))


@pytest.mark.nightly(push=4)
@pytest.mark.parametrize("case", JUDGED, ids=lambda case: case.label)
def test_the_device_reference_is_that_of_numpy(case, device):
    problem, inputs = case.problem, verify_inputs.make_inputs(case, 1)
    out, lse = of_device(device, problem, inputs)
    ((expected, log_sums),) = exact_rows(inputs, problem, np.arange(problem.seqlen_q))
    assert measures.row_error(out, expected) <= 1e-12
    assert measures.apart(lse, log_sums).max() <= 1e-12
