"""Parameters that the default space leaves out still compile: published tiles, stores, clusters.

A push compiles a sample that its commit draws, `pytest tests/compile -m nightly` all.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from attnsweep.compile.candidate import Build, compiled_row
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Status
from attnsweep.family.discover import discover
from attnsweep.family.family import Config
from attnsweep.specs.load import load_spec

KERNEL = discover()["three_kernel_wgmma"]
FULL = Problem(1, 16, 16, 1024, 1024, 64)
CAUSAL_BF16 = replace(FULL, dtype="bf16", causal=True)
FIRST = {param.name: param.values[0] for param in KERNEL.params} | {"SOFTMAX_THREADS": 32}

# Tiles (M x N x K of both products) that a published pipeline of this kind was swept over.
TILES = [
    *[(64, 128, 64), (64, 64, 32), (64, 128, 32), (128, 256, 64), (64, 256, 32), (128, 64, 32)],
    *[(64, 64, 64), (128, 128, 64), (128, 128, 32), (128, 64, 64), (256, 128, 64), (256, 64, 64)],
    *[(64, 256, 64), (128, 256, 32), (256, 128, 32)],
]
OTHERS = [
    "STATS=3 QK_AHEAD=1 QK_BLOCK_M=128 QK_WARPGROUPS=2 QK_STAGES=4",
    "STATS=0 QK_AHEAD=1 QK_STORE=2 QK_EVICT_LAST=1",
    "STATS=3 QK_STORE=1 QK_BUFFERS=2 QK_EVICT_LAST=1 PDL=2 PDL_EARLY=1",
    "STATS=3 QK_CLUSTER=2 PV_CLUSTER=2 PDL=2 CARVEOUT=1",
    "STATS=0 QK_CLUSTER=4 PV_CLUSTER=4 QK_BLOCKS=132 PV_BLOCKS=132",
    "STATS=2 QK_CLUSTER=2 PV_CLUSTER=2 QK_ORDER=1 PV_ORDER=2",
    "STATS=3 QK_SPLIT_Q=1 QK_TURNS=1 QK_BLOCK_M=256 QK_WARPGROUPS=4 QK_STAGES=3 QK_BUFFERS=2",
    "STATS=0 SOFTMAX_DEPTH=3 SOFTMAX_GROUP=2 SOFTMAX_ROWS=16 PDL=1",
    "STATS=0 SOFTMAX_DEPTH=3 SOFTMAX_GROUP=2 SOFTMAX_ROWS=8 SOFTMAX_BLOCK=512 SOFTMAX_EVICT_LAST=1",
    "STATS=0 SOFTMAX_ONCE=1 SOFTMAX_EVICT_LAST=1 SOFTMAX_ORDER=1 SOFTMAX_ROWS=2 PDL=2 PDL_EARLY=1",
]


def check(compiler, values, problem):
    config = Config(FIRST | values)
    assert KERNEL.refused_by(config, problem, compiler.arch) is None, config.label
    build = Build(KERNEL, config, problem, compiler)
    build.submit()
    row = compiled_row(build, load_spec(Path(__file__).parent / "any.yaml"))
    assert row.status is Status.OK, f"{config.label}: {row.detail}"
    assert row.resources.spill_bytes == 0, config.label


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("stats", [0, 3])
@pytest.mark.parametrize(("m", "n", "k"), TILES)
def test_published_tiles(compiler, m, n, k, stats):
    if stats and n < 128:
        pytest.skip("statistics are of 128 keys in a tile")
    qk = {
        "QK_BLOCK_M": m,
        "QK_BLOCK_N": n,
        "QK_BLOCK_K": k,
        "QK_TILES": 4 if n < 256 else 2,
        "QK_WARPGROUPS": min(2, m // 64),
    }
    pv = {"PV_BLOCK_M": m, "PV_BLOCK_N": 64, "PV_BLOCK_K": k, "PV_WARPGROUPS": m // 64}
    check(compiler, qk | pv | {"STATS": stats, "PV_STAGES": 4}, FULL)


@pytest.mark.nightly(push=3)
@pytest.mark.parametrize("threads", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("vector", [1, 2, 4, 8])
@pytest.mark.parametrize("passes", [1, 3])
def test_published_softmax(compiler, threads, vector, passes):
    row = {"SOFTMAX_THREADS": threads, "SOFTMAX_VECTOR": vector, "SOFTMAX_PASSES": passes}
    if threads * vector >= 2 * FULL.seqlen_k:
        pytest.skip("threads without a key")
    check(compiler, row | {"STATS": 0}, FULL)


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("problem", [FULL, CAUSAL_BF16], ids=lambda p: p.label)
@pytest.mark.parametrize("text", OTHERS)
def test_what_the_default_space_leaves_out(compiler, text, problem):
    values = dict(item.split("=") for item in text.split())
    check(compiler, {name: int(value) for name, value in values.items()}, problem)


def test_a_smaller_problem_gets_the_shared_memory_that_the_code_lays_out(compiler):
    values = {"SOFTMAX_DEPTH": 3, "SOFTMAX_GROUP": 2, "SOFTMAX_ROWS": 16, "STATS": 0}
    build = Build(KERNEL, Config(FIRST | values), FULL, compiler)
    build.submit()
    short = replace(FULL, heads=2, heads_kv=1, seqlen_q=65, seqlen_k=200)
    planned = KERNEL.launches(build.config, short, compiler.arch)["softmax"].smem_bytes
    own = {stage.name: stage.launch.smem_bytes for stage in build.launches_for(short).stages}
    assert own["softmax"] == build.launches["softmax"].smem_bytes > planned
