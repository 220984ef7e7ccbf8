"""Windows: every key that a query sees counts, and no other, in each family that has them."""

from dataclasses import replace

import pytest

from attnsweep.core.cases import Case, small_cases
from attnsweep.core.masks import Interval
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover

from .harness import ARCH, COMPILER, config_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
# Gradients of windows are in test_backward.py.
FAMILIES = {
    name: family
    for name, family in discover().items()
    if "window" in family.masks and "forward" in family.ops and "dense" in family.layouts
}
CONFIGS = {
    "flash_fwd_mma": ("", "BLOCK_N=64 NUM_STAGES=2", "NUM_WARPS=8 KEY_GROUPS=2 NUM_STAGES=3"),
    "flash_fwd_wgmma": (
        "BLOCK_N=64 WARPGROUPS=2 MAXIMA=1 LSE=1",
        "BLOCK_N=128 WARPGROUPS=2 PINGPONG=1 Q_REGISTERS=4 MAXIMA=2 PERSISTENT=2",
        "BLOCK_N=64 WARPGROUPS=3 MAXIMA=2 PERSISTENT=1 EXP2_POLY=2",
        "BLOCK_N=64 WARPGROUPS=2 P_SHARED=1 PERSISTENT=1 O_OVER_Q=1",
        "BLOCK_N=96 WARPGROUPS=1 BLOCKS_PER_SM=3 OVERLAP=0",
    ),
    "flash_fwd_wide_wgmma": ("BLOCK_N=64 LSE=1", "LAG=0 CLUSTER=2 HEAD_MEMBERS=1 LSE=1", "CLUSTER=2 HEAD_MEMBERS=2"),
}
USUAL = {name: configs[0] for name, configs in CONFIGS.items()}
# Sides that end in a tile, at its edge, beyond the keys; with nothing before, and nothing after.
WINDOWS = ((20, 0), (31, 64), (0, 0), (500, 3), (None, 17), (40, None))


def dim(family):
    """64, or the least head_dim of a family of wide heads."""
    return max(64, min(family.head_dims))


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize(("name", "words"), [(n, w) for n in FAMILIES for w in CONFIGS[n]])
def test_right_on_windows_of_every_kind(simulator, name, words):
    family = FAMILIES[name]
    config = config_of(family, words)
    for number, sides in enumerate(WINDOWS):
        of = Problem(1, 2, 1, 150, 150 + 61 * (number % 2), dim(family), "bf16", Interval(*sides))
        assert family.refused_by(config, of, ARCH) is None
        result = simulator.check(family, config, Case(of), schedules=(number % 3,))
        assert result.ok, (config.label, of.label, str(result))


@pytest.mark.parametrize("name", FAMILIES)
def test_right_on_hard_cases_of_a_window(simulator, name):
    family = FAMILIES[name]
    of = Problem(1, 4, 4, 2048, 2048, dim(family), "fp16", Interval(256, 0))
    config = config_of(family, USUAL[name])
    for case in small_cases(of)[2::3]:
        assert case.problem.mask.left < case.problem.seqlen_k
        result = simulator.check(family, config, case, schedules=(0,))
        assert result.ok, (config.label, case.label, str(result))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_window_without_its_left_side_is_wrong(simulator, relaunched, name):
    family = FAMILIES[name]
    of = Problem(1, 1, 1, 150, 150, dim(family), "bf16", Interval(20, 0))
    by = "mask" if "mask" in family.stages else "fwd"  # which stage knows the window
    relaunched(family, by, problem=lambda asked: replace(asked, mask=Interval(149, 0)))
    config = config_of(family, USUAL[name])
    assert not simulator.check(family, config, Case(of), schedules=(0,)).ok
