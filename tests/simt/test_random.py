"""Random configs with random small problems are right on the CPU.

A config begins as one of the family's space and takes random steps that its rules allow, to values
that the space has and to others. A push draws few by its commit; `pytest tests/simt -m nightly`
runs many. A failure names what to give to `python -m tests.simt`.
"""

import random
from dataclasses import replace
from typing import get_args

import pytest

from attnsweep.core.cases import Case, Inputs, small_cases
from attnsweep.core.masks import FULL, PATTERNS, pattern
from attnsweep.core.ops import FORWARD, OPS
from attnsweep.core.problem import Padded, Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config, Family

from .harness import ARCH, COMPILER, SimtError
from .shapes import spans

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

KERNELS = discover()
# Huge scores are for callables.
KINDS = [kind for kind in get_args(Inputs) if kind != "huge_scores"]
# Values beyond those that a declaration has.
MORE = {
    "flash_fwd_fp8_wgmma": {"BLOCK_N": (192, 256), "NUM_STAGES": (1, 3, 4), "V_STAGES": (1, 3), "OVERLAP": (0,),
        "INTERVAL": (32, 192, 256), "EXP2_POLY": (3, 8), "PERSISTENT": (2, 3, 5), "PDL": (1, 2), "LSE": (1,)},
    "flash_fwd_wgmma": {"BLOCK_N": (80, 112, 176, 192), "KEY_GROUPS": (4,), "NUM_STAGES": (1, 3),
        "PRODUCER_WARPS": (1,), "Q_REGISTERS": (1, 4, 6), "EXP2_POLY": (2, 3, 8), "PERSISTENT": (2, 3, 4, 6, 8),
        "O_OVER_Q": (1,), "SWIZZLE": (64,), "SPLITS": (3, 4, 8), "CLUSTER": (2, 4), "PDL": (1, 2), "PACK_GQA": (1,),
        "LSE": (1,)},
    "three_kernel_wgmma": {"PDL": (2,), "PDL_EARLY": (1,), "QK_BLOCK_N": (64, 256), "QK_BLOCK_K": (32,),
        "QK_SPLIT_Q": (1,), "QK_STAGES": (1, 3), "QK_TILES": (1, 2), "QK_AHEAD": (1,), "QK_STORE": (1, 2),
        "QK_EVICT_LAST": (1,), "QK_CLUSTER": (2, 4), "QK_TURNS": (1,), "QK_ORDER": (1,), "QK_BLOCKS": (2, 4, 8),
        "SOFTMAX_THREADS": (64, 256), "SOFTMAX_VECTOR": (1, 2, 4), "SOFTMAX_PASSES": (3,), "SOFTMAX_ROWS": (2, 4, 16),
        "SOFTMAX_BLOCK": (128,), "SOFTMAX_DEPTH": (2, 3), "SOFTMAX_GROUP": (2, 4), "SOFTMAX_ONCE": (1,),
        "SOFTMAX_EVICT_LAST": (1,), "SOFTMAX_ORDER": (1,), "PV_BLOCK_M": (256,), "PV_BLOCK_K": (32, 128),
        "PV_WARPGROUPS": (4,), "PV_STAGES": (2, 3), "PV_CLUSTER": (2, 4), "PV_ORDER": (1, 2), "PV_BLOCKS": (2, 4, 8)},
}  # fmt: skip
# What rules are asked about: a long call, one that leaves SMs idle, and one of more tiles of
# queries than turns.
SIZES = ((1, 16, 1024), (1, 2, 512), (2, 16, 2048))
TRIES, STEPS = 100_000, 24
# Multiplications of a case, so that one does not take a minute.
MOST = 5e8


def of_one_range(problem: Problem, rng: random.Random) -> Problem:
    """The problem where all queries of an item see the same keys, by lengths or a mask of one."""
    if rng.random() < 0.5:
        layout = Padded(rng.choice(("right", "left")), rng.choice((0, 1, 30, 100)), rng.randint(0, 9))
        return replace(problem, mask=FULL, layout=layout)
    mask = pattern(rng.choice([*PATTERNS]), rng.choice((1, 3, 50, 100)), rng.randint(0, 9))
    return replace(problem, seqlen_q=1, mask=mask)


def random_config(kernel: Family, rng: random.Random, few: str = "") -> tuple[Problem, Config]:
    """What is compiled in, as a problem, and a config that the rules allow for it.

    few: the problem has few queries. `packed`: of grouped heads, which the config packs; `items`:
    that see what their item does, which the config looks up.
    """
    wide = min(kernel.head_dims) > 256
    batch, heads, seqlen = rng.choice(SIZES) if not wide else (1, 4, 128)
    head_dim = rng.choice([d for d in (320, 512, 516, 772) if d in kernel.head_dims] if wide else kernel.head_dims)
    problem = Problem(batch, heads, heads, seqlen, seqlen, head_dim, rng.choice(kernel.dtypes))
    problem = replace(problem, causal=rng.random() < 0.5, op=OPS[kernel.ops[0]])
    if kernel.head_dims_v and rng.random() < 0.3:
        problem = replace(problem, head_dim_v=rng.choice(kernel.head_dims_v))
    own = {param.name: param.on(ARCH) for param in kernel.params}
    kept = {"packed": {"PACK_GQA": 1}, "items": {"ITEM_KEYS": 1}}.get(few, {})
    if few:
        problem = replace(problem, heads_kv=1, seqlen_q=rng.choice((1, 5, 40, 63)))
    if few == "items":
        problem = of_one_range(replace(problem, causal=False), rng)
        kept["PACK_GQA"] = rng.choice((0, 1))
    own |= {name: (value,) for name, value in kept.items()}
    for _ in range(TRIES):  # quicker than the whole space
        config = Config({name: rng.choice(values) for name, values in own.items()})
        if kernel.refused_by(config, problem, ARCH) is None:
            break
    else:
        raise AssertionError(f"{kernel.name} has hardly a config for {problem.label}")
    values = {p.name: (*p.on(ARCH), *MORE.get(kernel.name, {}).get(p.name, ())) for p in kernel.params}
    for _ in range(STEPS):
        step = dict(config)
        for name in rng.sample(sorted(values), min(len(values), rng.choice((1, 1, 2, 3)))):
            step[name] = rng.choice(values[name])
        step |= kept
        if kernel.refused_by(Config(step), problem, ARCH) is None:
            config = Config(step)
    return problem, config


def random_case(problem: Problem, config: Config, rng: random.Random) -> Case:
    """About as long as a few of the config's tiles, and no longer than `problem`."""
    queries, keys = spans(config)
    heads_kv = rng.choice((1, 1, 2))
    # A backward has no limits for others: their gradients cancel to nothing.
    kinds = {each.inputs for each in small_cases(problem)}
    kinds = {*KINDS} - {"exact"} if problem.op == FORWARD else kinds
    inputs = [each for each in KINDS if each in kinds]
    while True:
        seqlen_q = rng.choice((1, queries - 1, queries + 1, *(rng.randint(1, 3 * queries),) * 3))
        seqlen_k = rng.choice((1, keys - 1, keys, keys + 1, rng.randint(1, 3 * keys)))
        seqlen_q, seqlen_k = (max(1, min(length, problem.seqlen_k)) for length in (seqlen_q, seqlen_k))
        shape = replace(
            problem,
            batch=rng.choice((1, 1, 2)),
            heads=heads_kv * rng.choice((1, 2, 3)),
            heads_kv=heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=max(seqlen_q, seqlen_k) if problem.causal else seqlen_k,
        )
        if shape.flops < MOST:
            return Case(shape, rng.choice(inputs))


def drawn(kernel: Family, seed: str, few: str = "") -> tuple[Config, Case]:
    """The same for the same seed."""
    rng = random.Random(seed)
    problem, config = random_config(kernel, rng, few)
    if not few:
        return config, random_case(problem, config, rng)
    # Heads of few queries that end anywhere in a tile, and of more than a tile, which rules refuse.
    seqlen_k, seqlen_q = rng.randint(1, 700), rng.choice((1, 2, 7, 16, rng.randint(1, 150)))
    seqlen_k = max(seqlen_k, seqlen_q) if problem.causal else seqlen_k
    group, heads_kv = rng.choice((2, 3, 8, 17)), rng.choice((1, 2))
    if problem.kind == "boolean":  # which a row of keys is for one query alone
        seqlen_q = 1
    shape = replace(
        problem,
        batch=rng.choice((1, 2, 5) if few == "items" else (1, 2)),
        heads=heads_kv * group,
        heads_kv=heads_kv,
        seqlen_q=max(1, min(seqlen_q, 300 // group)),
        seqlen_k=seqlen_k,
    )
    return config, Case(shape, rng.choice(KINDS))


def run(simulator, name, number, seed, few=""):
    kernel = KERNELS[name]
    config, case = drawn(kernel, f"{seed} {name} {number}", few)
    p = case.problem
    shape = p.label if few == "items" else p.label.split(" ")[0]
    again = f"{name} '{config.label}' --problem '{shape}' --dtype {p.dtype} --inputs {case.inputs}"
    again += " --causal" if p.causal else ""
    try:
        result = simulator.check(kernel, config, case, schedules=(0, 1, number + 2))
    except SimtError as error:
        pytest.fail(f"{again}\n{error}")
    assert result.ok, f"{again}: {result}"


HOPPER = ("flash_fwd_fp8_wgmma", "flash_fwd_wgmma", "three_kernel_wgmma")
OTHERS = sorted(name for name in KERNELS if name not in MORE and "dense" in KERNELS[name].layouts)


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize("number", range(120))
@pytest.mark.parametrize("name", HOPPER)
def test_random_config_is_right(simulator, drawn_by, name, number):
    run(simulator, name, number, drawn_by)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("number", range(60))
def test_random_config_of_packed_heads_is_right(simulator, drawn_by, number):
    run(simulator, "flash_fwd_wgmma", number, drawn_by, "packed")


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("number", range(60))
def test_random_config_of_keys_of_an_item_is_right(simulator, drawn_by, number):
    run(simulator, "flash_fwd_wgmma", number, drawn_by, "items")


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("name", OTHERS)
def test_random_config_of_another_family_is_right(simulator, drawn_by, name, number):
    run(simulator, name, number, drawn_by)
