"""head_dims that fill no panel of 64 columns, nor 16 columns: in each way to load, join and store.

A row's columns have the next row behind them, so that code which reads or writes too many meets it.
"""

from dataclasses import replace
from functools import cache

import pytest

from attnsweep.core.cases import Case
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.launch import TensorMap

from .harness import ARCH, COMPILER, config_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
FAMILIES = discover()
FAMILY = FAMILIES["flash_fwd_wgmma"]
DIMS = (8, 16, 24, 40, 72, 80, 88, 104, 112, 136, 160, 200, 248)
# Head_dims of q and k, and of v. test_value_dims.py has more.
VALUE_DIMS = ("192/128", "96/64", "64/128", "128/256", "8/256", "72/40", "40/72", "256/8", "64/192")
CONFIGS = (
    "BLOCK_N=64 WARPGROUPS=2 LSE=1",
    "BLOCK_N=128 WARPGROUPS=2 PINGPONG=1 MAXIMA=2 LSE=1",
    "BLOCK_N=64 WARPGROUPS=2 KEY_GROUPS=2 MAXIMA=2 LSE=1",
    "BLOCK_N=80 WARPGROUPS=2 KEY_GROUPS=2 PERSISTENT=1 LSE=1",
    "BLOCK_N=64 WARPGROUPS=2 SPLITS=2 LSE=1",
    "BLOCK_N=64 WARPGROUPS=2 SPLITS=2 SPLIT_CLUSTER=1 LSE=1",
    "BLOCK_N=64 WARPGROUPS=1 SPLITS=2 SPLIT_CLUSTER=1 P_SHARED=0 LSE=1",
    "BLOCK_N=64 WARPGROUPS=1 BLOCKS_PER_SM=2 SPLITS=4 SPLIT_CLUSTER=1 MAXIMA=2 PACK_GQA=1 LSE=1",
    "BLOCK_N=64 WARPGROUPS=2 PERSISTENT=1 MAXIMA=2 EXP2_POLY=2",
    "BLOCK_N=64 WARPGROUPS=2 PERSISTENT=1 O_OVER_Q=1 MAXIMA=2 LSE=1",
    "BLOCK_N=64 WARPGROUPS=2 P_SHARED=1 MAXIMA=1 LSE=1",
    "BLOCK_N=96 WARPGROUPS=3 P_SHARED=1 MAXIMA=2 PERSISTENT=1",
    "BLOCK_N=64 WARPGROUPS=2 Q_REGISTERS=1 PERSISTENT=1 MAXIMA=2",
    "BLOCK_N=64 WARPGROUPS=2 CLUSTER=2 LSE=1",
    "BLOCK_N=64 WARPGROUPS=4 OVERLAP=0 EXP2_POLY=4 MAXIMA=1",
    "BLOCK_N=64 WARPGROUPS=1 BLOCKS_PER_SM=2 SPLITS=2 PACK_GQA=1 LSE=1",
    "BLOCK_N=64 WARPGROUPS=2 SWIZZLE=64 NUM_STAGES=3 LSE=1",
    "BLOCK_N=112 WARPGROUPS=2 SWIZZLE=64 MAXIMA=2 PINGPONG=1 Q_REGISTERS=1 PERSISTENT=1",
    "BLOCK_N=64 WARPGROUPS=2 SWIZZLE=64 CLUSTER=2 KEY_GROUPS=2 MAXIMA=2 LSE=1",
    "BLOCK_N=64 WARPGROUPS=2 SWIZZLE=64 SPLITS=2 SPLIT_CLUSTER=1 MAXIMA=2",
)
PROBLEMS = (
    "(2,4/2,133x161,{}) bf16 full",
    "(1,2,150x200,{}) fp16 causal",
    "(1,3,150x211,{}) bf16 window(20,3)",
    "(1,4/2,150x170,{}) fp16 boolean(holes,50)",
    "(2,2,70x150,{}) bf16 full padded(left,0)",
    "(1,4/2,300,{}) bf16 causal packed(4,0)",
    "(2,2,130x200,{}) bf16 causal softcap(5) sinks",
    "(2,4/2,97x400,{}) fp16 full bias(item,head)",
    "(2,12/2,5x331,{}) bf16 causal",
)
# Of flash_fwd_mma, with rows of 16 and of 32 queries for a warp, in each layout of shared memory.
MMA_CONFIGS = (
    "BLOCK_M=64 BLOCK_N=64 NUM_STAGES=2",
    "BLOCK_M=64 BLOCK_N=64 NUM_WARPS=4 KEY_GROUPS=2 SWIZZLE=0 Q_IN_REGISTERS=1",
    "BLOCK_M=128 BLOCK_N=64 NUM_WARPS=4 NUM_STAGES=1 SWIZZLE=0",
)
FP32_PROBLEMS = ("(2,4/2,133x161,{}) fp32 full", "(1,2,150x200,{}) fp32 causal")
# Configs of flash_fwd_fp32_mma. Above 192 columns two warps share rows, and NUM_WARPS is 8.
FP32_CONFIGS = (
    "BLOCK_M=64 BLOCK_N=32 NUM_STAGES=2",
    "BLOCK_M=128 BLOCK_N=16 NUM_WARPS=4 NUM_STAGES=1 PV_PRODUCTS=2",
    "BLOCK_M=64 BLOCK_N=16 NUM_STAGES=1",
    "BLOCK_M=64 BLOCK_N=64 NUM_WARPS=8 NUM_STAGES=2",
    "BLOCK_M=64 BLOCK_N=32 NUM_WARPS=8 NUM_STAGES=1 PV_PRODUCTS=2",
)
HALVES_CONFIGS = (
    "BLOCK_M=64 BLOCK_N=32 NUM_STAGES=2",
    "BLOCK_M=128 BLOCK_N=64 NUM_WARPS=4 NUM_STAGES=1",
    "BLOCK_M=64 BLOCK_N=16 NUM_STAGES=3",
    "BLOCK_M=128 BLOCK_N=16 NUM_WARPS=8 NUM_STAGES=1",
)
# What rules say of sizes so small, and of speed.
MAY_REFUSE = (
    *("turns_of_blocks", "block_order", "no_idle_tile", "split_grid", "split_keys"),
    *("warpgroups_of_sm", "some_overlap"),
)
HARD = [name for name in FAMILY.rules if name not in MAY_REFUSE]


def problems_of(words: str, head_dim: int | str) -> list[Problem]:
    """Those that this config can do, whatever rules say of their size."""
    config = config_of(FAMILY, words)
    return [p for p in every_problem(head_dim) if all(FAMILY.passes(name, config, p, ARCH) for name in HARD)]


@cache
def every_problem(head_dim: int | str) -> list[Problem]:
    return [Problem.parse(label.format(head_dim)) for label in PROBLEMS]


PAIRS = [(words, dim) for words in CONFIGS for dim in DIMS if problems_of(words, dim)]
VALUE_PAIRS = [(words, dims) for words in CONFIGS for dims in VALUE_DIMS if problems_of(words, dims)]


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize(("words", "dim"), PAIRS + VALUE_PAIRS)
def test_right_in_every_way_to_load_and_to_store(simulator, words, dim):
    number = CONFIGS.index(words) + (DIMS + VALUE_DIMS).index(dim)
    able = problems_of(words, dim)
    for turn in range(min(2, len(able))):  # each config meets all of them at some head_dim
        case = Case(able[(number + turn * len(able) // 2) % len(able)])
        result = simulator.check(FAMILY, config_of(FAMILY, words), case, schedules=(turn,))
        assert result.ok, (words, case.label, str(result))


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    ("name", "configs", "labels"),
    [
        ("flash_fwd_mma", MMA_CONFIGS, PROBLEMS[:3]),
        ("flash_fwd_fp32_mma", FP32_CONFIGS, FP32_PROBLEMS),
        ("flash_fwd_fp32_halves", HALVES_CONFIGS, FP32_PROBLEMS),
    ],
)
def test_right_with_mma(simulator, name, configs, labels, dim):
    family, tried = FAMILIES[name], 0
    for words in configs:
        config = config_of(family, words)
        for number, label in enumerate(labels):
            case = Case(Problem.parse(label.format(dim)))
            if family.refused_by(config, case.problem, ARCH) not in (None, "block_order"):
                continue
            result = simulator.check(family, config, case, schedules=(number % 3,))
            assert result.ok, (words, case.label, str(result))
            tried += 1
    assert tried >= len(labels)


@pytest.mark.parametrize("tensors", ["qk", "v", "o"])
def test_maps_of_the_columns_of_a_tile_are_wrong(simulator, relaunched, tensors):
    """They would have the next row's first columns, which loads must leave out, and stores keep."""
    case = Case(Problem(1, 2, 1, 97, 161, 72, "bf16"))

    def wide(arg):
        if not isinstance(arg, TensorMap) or arg.buffer not in tensors:
            return arg
        return replace(arg, dims=(80, arg.dims[1] - 1, *arg.dims[2:]))  # and end with the tensor

    config = config_of(FAMILY, "BLOCK_N=64 WARPGROUPS=2")
    assert simulator.check(FAMILY, config, case, schedules=(0,)).ok
    relaunched(FAMILY, "fwd", lambda made: replace(made, args=tuple(map(wide, made.args))))
    assert not simulator.check(FAMILY, config, case, schedules=(0,)).ok
