"""Backward families on the CPU: every case, tails, grouped heads, seqlen_q != seqlen_k."""

from __future__ import annotations

import pytest

from attnsweep.core.cases import Case, small_cases
from attnsweep.core.masks import CAUSAL, FULL
from attnsweep.core.problem import BACKWARD, Problem
from attnsweep.family.discover import discover

from .harness import ARCH, COMPILER, SimtError, config_of, sources

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
FAMILY = discover()["flash_bwd_wgmma"]
# Config, head_dim, and what else a problem of it has.
CONFIGS = (
    ("RECOMPUTE=0", 128, "bf16", FULL),
    ("RECOMPUTE=0", 128, "fp16", CAUSAL),
    ("RECOMPUTE=0 BLOCK_M=128", 64, "bf16", CAUSAL),
    ("RECOMPUTE=0 AHEAD=1", 64, "fp16", FULL),
    ("RECOMPUTE=0 AHEAD=2", 64, "bf16", CAUSAL),
    ("RECOMPUTE=0 KV_WARPGROUPS=1 BLOCKS_PER_SM=2", 64, "bf16", CAUSAL),
    ("RECOMPUTE=1 KV_WARPGROUPS=1 BLOCKS_PER_SM=2 AHEAD=2", 128, "bf16", CAUSAL),
    ("RECOMPUTE=1 AHEAD=0 Q_BLOCK_N=96", 128, "fp16", FULL),
    ("RECOMPUTE=1 BLOCK_M=128 AHEAD=1 Q_BLOCK_N=64", 64, "bf16", CAUSAL),
)
# Tiles and half tiles that a block passes by, tails on both sides, queries that see no key, three
# heads to one of keys.
SHAPES = (
    (2, 6, 2, 200, 330),
    (1, 2, 2, 300, 130),
    (1, 3, 1, 129, 65),
    (1, 1, 1, 64, 192),
    (1, 2, 1, 1, 127),
    (1, 1, 1, 63, 1),
)


def config_for(words, problem):
    config = config_of(FAMILY, words)
    assert FAMILY.refused_by(config, problem, ARCH) is None
    return config


@pytest.mark.parametrize(("words", "head_dim", "dtype", "mask"), CONFIGS)
def test_right_on_every_case(simulator, words, head_dim, dtype, mask):
    problem = Problem(1, 4, 2, 2048, 2048, head_dim, dtype, mask, op=BACKWARD)
    config = config_for(words, problem)
    shapes = [Case(Problem(*sizes, head_dim, dtype, mask, op=BACKWARD)) for sizes in SHAPES]
    for number, case in enumerate((*small_cases(problem), *shapes)):
        both = (0, 1) if number % 3 == 2 else (number % 2,)
        result = simulator.check(FAMILY, config, case, schedules=both)
        assert result.ok, (config.label, case.label, str(result))


def test_each_query_head_counts_in_the_gradients_of_its_key_head(simulator):
    """Where blocks take heads in groups, of which the last is smaller."""
    problem = Problem(3, 2, 1, 100, 4000, 64, "bf16", op=BACKWARD)
    config = config_for("RECOMPUTE=1", problem)
    few = FAMILY.launches(config, problem, ARCH)["keys"].args
    assert few[-3] == 3  # all heads together: none is left for another group
    grouped = Problem(5, 2, 1, 100, 130, 64, "bf16", CAUSAL, op=BACKWARD)
    stage = FAMILY.stages["keys"]
    given = stage.launch.__globals__["together"]
    stage.launch.__globals__["together"] = lambda *_: 2
    try:
        assert FAMILY.launches(config, grouped, ARCH)["keys"].args[-3] == 2
        result = simulator.check(FAMILY, config, Case(grouped))
    finally:
        stage.launch.__globals__["together"] = given
    assert result.ok, str(result)


SUMS = "begin_sum(dv, rounded, o, j), begin_sum(dk, difference, q, j);"
# The stage, what stands there, how often, and what stands there instead.
WRONG = {
    "sums that are not cleared": ("delta", "sums[(at * LANES + lane) * 2] =", 1, "//"),
    "keys past the last have weight": ("keys", "NEVER = 1 << 30", 1, "NEVER = 0"),
    "no scale of dK": ("keys", "(dk, scale,", 1, "(dk, 1.f,"),
    "dQ of half of the keys": ("keys", "i < BLOCK_N / 16", 1, "i < BLOCK_N / 32"),
    "queries released before dK has read them": ("keys", SUMS, 2, f"release(j); {SUMS}"),
    "dS overwritten before dQ has read it": (
        "keys",
        "ds_empty(at.stage), at.phase ^ 1",
        1,
        "ds_empty(0), 1",
    ),
    "dQ's staging overwritten before it is added": (
        "keys",
        "added(part), (j & 1) ^ 1",
        1,
        "added(part), 1",
    ),
    "dK written over K before dQ has read it": (
        "keys",
        "if (DQ) named_barrier_sync(K_READ_BARRIER",
        1,
        "if (false) named_barrier_sync(9",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_found(simulator, name):
    stage, before, times, after = WRONG[name]
    texts = dict(sources(FAMILY))
    text = texts[FAMILY.source.name]
    assert text.count(before) == times
    texts[FAMILY.source.name] = text.replace(before, after)
    # The log-sum-exps are far below 0, so that what is not hidden becomes infinite.
    case = Case(Problem(1, 2, 1, 350, 200, 64, "bf16", FULL, op=BACKWARD), "far_below")
    config = config_for("RECOMPUTE=0", case.problem)
    assert simulator.check(FAMILY, config, case).ok
    try:
        result = simulator.check(FAMILY, config, case, changed={stage: texts})
    except SimtError:
        return
    assert not result.ok, name
