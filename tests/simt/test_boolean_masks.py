"""Masks that a call gives as a boolean tensor: any, also with holes and with queries without keys.

What a problem's own mask is plays no part: the kernel reads bits, which a scan makes of the tensor.
"""

from dataclasses import replace

import numpy as np
import pytest

from attnsweep.core.cases import Case
from attnsweep.core.masks import FULL
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.verify.encoding import from_bits
from attnsweep.verify.inputs import make_inputs

from .harness import ARCH, COMPILER, config_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
FAMILY = discover()["flash_fwd_wgmma"]
CONFIGS = {
    "BLOCK_N=64 WARPGROUPS=2 MAXIMA=1 LSE=1": 64,
    "BLOCK_N=128 WARPGROUPS=2 PINGPONG=1 Q_REGISTERS=8 PERSISTENT=1 MAXIMA=2": 128,
    "BLOCK_N=96 WARPGROUPS=3 MAXIMA=1 EXP2_POLY=2": 64,
    "BLOCK_N=64 WARPGROUPS=2 P_SHARED=1 BLOCKS_PER_SM=2 MAXIMA=2": 64,
}
# Sizes, and whose own the masks are. 304 keys are read by 16 bytes, 421 are not.
SIZES = (
    ((2, 2, 1, 300, 304), ("item",)),
    ((1, 2, 2, 97, 421), ()),
    ((2, 2, 1, 130, 130), ("item", "head")),
    ((2, 2, 2, 100, 160), ("head",)),
)
KINDS = (
    *("all", "none", "causal", "padded right", "causal, padded left", "window", "later queries"),
    *("documents", "a corner", "a hole", "half", "few", "blocks"),
)
LIMIT = 6e-3  # of a row, in bf16: P is rounded, and V's rows differ in sign


def masks(kind, rng, count, rows, keys):
    """(count, rows, keys): True where a query sees a key."""
    i, j = np.arange(rows)[:, None], np.arange(keys)
    causal, length = i + keys - rows >= j, np.linspace(0.4 * keys, keys, count).astype(int)
    blocks = rng.random((count, -(-rows // 64), -(-keys // 64))) < 0.3
    made = {
        "all": causal | True,
        "none": causal & False,
        "causal": causal,
        "padded right": (j < length[:, None, None]) & (i >= 0),
        "causal, padded left": causal & (j >= keys - length[:, None, None]),
        "window": causal & (i + keys - rows - j < 40),
        "later queries": (i >= 64) & causal,
        "documents": i * 5 // rows == j * 5 // keys,
        "a corner": (i % 64 == 63) & (j == keys - 1) | (i == 70) & (j == 0),
        "a hole": causal & (j != 77),
        "half": rng.random((count, rows, keys)) < 0.5,
        "few": rng.random((count, rows, keys)) < 0.01,
        "blocks": np.kron(blocks, np.ones((64, 64), bool))[:, :rows, :keys],
    }
    return np.broadcast_to(made[kind], (count, rows, keys))


def expected(q, k, v, seen, scale):
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, 1) for x in (k, v))
    p = np.where(seen, np.exp(q @ k.swapaxes(2, 3) * scale), 0)  # of normal values: no overflow
    return p @ v / np.maximum(p.sum(-1, keepdims=True), 1e-300)


def launched(simulator, config, case, inputs, schedule, *, whole=True, strides=(), **built):
    """What the launches leave, by name: 32-bit words. whole: not only those that scan the mask.

    strides: of the mask in bytes, from item to item, head to head, row to row and key to key.
    built: how stages are.
    """
    stages = {}
    for name, (launch, made) in simulator.build(FAMILY, config, case, **built).items():
        if strides and name == "mask":
            launch = replace(launch, args=(*launch.args[: -len(strides)], *strides))
        if whole or launch.once:
            stages[name] = launch, made
    out, sizes = {"o": case.problem.bytes_of("o")}, FAMILY.workspaces(config, case.problem)
    left = simulator.run(stages, inputs, out, sizes, schedule=schedule, asan=built.get("asan", False))
    return {name: made.view(np.uint32) for name, made in left.items()}


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(("batch_to_keys", "own"), SIZES)
@pytest.mark.parametrize("words", CONFIGS)
def test_each_query_sees_what_the_mask_says(simulator, words, batch_to_keys, own):
    config = config_of(FAMILY, words)
    case = Case(Problem(*batch_to_keys, CONFIGS[words], "bf16", FULL.as_boolean(own)))
    problem, rng = case.problem, np.random.default_rng(3)
    assert FAMILY.refused_by(config, problem, ARCH) in (None, "turns_of_blocks")
    drawn = {name: make_inputs(case, 1)[name] for name in "qkv"}
    q, k, v = (from_bits(bits, "bf16").astype(np.float64) for bits in drawn.values())
    items, heads, rows, keys = problem.shape_of("mask")
    for number, kind in enumerate(KINDS):
        seen = masks(kind, rng, items * heads, rows, keys).reshape(items, heads, rows, keys)
        # A tensor of bool may hold other bytes than 0 and 1, as a view of one of uint8.
        inputs = drawn | {"mask": seen * rng.integers(1, 256, seen.shape, np.uint8)}
        bits = launched(simulator, config, case, inputs, number % 3)["o"].view(np.uint16)
        out = from_bits(bits.reshape(problem.shape_of("o")), "bf16").astype(np.float64)
        want = expected(q, k, v, seen, problem.scale)
        norm, error = (np.linalg.norm(x, axis=-1) for x in (want, out - want))
        empty = ~np.broadcast_to(seen.any(-1), norm.shape)
        assert (error[empty] == 0).all(), kind
        assert (error[~empty] <= LIMIT * norm[~empty]).all(), kind


# Items, queries, keys, keys of a tile: several blocks list; each of their warps lists several tiles,
# and each lane counts so many that it does so in turns, some of which have keys of two words. Last,
# tiles of keys that begin in one word and end in another one, or where there is none.
LISTED = ((2, 1100, 1000, 64), (1100, 1, 40, 64), (1100, 1, 600, 64), (2, 300, 17000, 64), (2, 300, 1024, 96))


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("sizes", LISTED)
@pytest.mark.parametrize("kind", ["blocks", "few", "causal", "none"])
def test_the_list_has_each_tile_of_queries_once_the_longest_first(simulator, kind, sizes):
    items, rows, keys, block_n = sizes
    config = config_of(FAMILY, f"BLOCK_N={block_n} WARPGROUPS=2 MAXIMA=1")
    problem = Problem(items, 1, 1, rows, keys, 64, "bf16", FULL.as_boolean(("item",)))
    tiles, steps, rng = -(-rows // 128), -(-keys // block_n), np.random.default_rng(5)
    seen = masks(kind, rng, items, rows, keys)
    inputs = {"mask": np.ascontiguousarray(seen, np.uint8)}
    inputs |= dict.fromkeys("qkv", np.zeros(1, np.uint8))
    left = launched(simulator, config, Case(problem), inputs, 2, whole=False)
    (entries,) = (words for name, words in left.items() if name.startswith("work"))
    entries = entries.reshape(items * tiles, -1)
    first_rows, masked, _, key_tiles = entries[:, :4].T
    found = set(zip(masked.tolist(), first_rows.tolist(), strict=True))
    assert found == {(item, tile * 128) for item in range(items) for tile in range(tiles)}
    padded = np.pad(seen, ((0, 0), (0, tiles * 128 - rows), (0, steps * block_n - keys)))
    of_16 = padded.reshape(items, tiles, 128, -1, 16).any((2, 4))[masked, first_rows // 128]
    lengths = -(-of_16.sum(1) // -(-keys // 4080))  # as far as the list tells them apart
    assert (np.diff(lengths) <= 0).all()
    of_tiles = of_16.reshape(len(entries), steps, -1).any(2)
    for sees, told, count in zip(of_tiles, entries[:, 12:], key_tiles, strict=True):
        assert told[:count].tolist() == (np.flatnonzero(sees)[::-1] * block_n).tolist()
    assert (left["turns"] == 0).all()


LAID = {
    "transposed": lambda seen: seen.swapaxes(2, 3).copy().swapaxes(2, 3),
    "every second key": lambda seen: np.repeat(seen, 2, 3)[..., ::2],
    "rows apart": lambda seen: np.pad(seen, ((0, 0), (0, 0), (0, 0), (0, 13)))[..., :-13],
    "one row of all": lambda seen: np.broadcast_to(seen[:, :, 70:71].copy(), seen.shape),
    "one key of all": lambda seen: np.broadcast_to(seen[..., 70:71].copy(), seen.shape),
}


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("keys", [130, 500, 544, 601])
@pytest.mark.parametrize("how", LAID)
def test_a_mask_that_lies_in_memory_in_any_way_has_the_same_bits(simulator, how, keys):
    """Its base, too, is at any address: items and heads are as long as they are."""
    config = config_of(FAMILY, next(iter(CONFIGS)))
    problem = Problem(2, 2, 1, 99, keys, 64, "bf16", FULL.as_boolean(("item", "head")))
    drawn = np.random.default_rng(7).random(problem.shape_of("mask")) < 0.5
    drawn[..., 64:130] = True
    drawn[..., 70, 70] = False
    seen = LAID[how](drawn.astype(np.uint8))
    memory = seen if seen.base is None else seen.base
    inputs = {"mask": memory} | dict.fromkeys("qkv", np.zeros(1, np.uint8))
    left = launched(simulator, config, Case(problem), inputs, 0, whole=False, strides=seen.strides)
    bits, of_64 = (
        np.unpackbits(left[name].view(np.uint8).reshape(rows, -1), axis=1, bitorder="little")
        for name, rows in (("bits", 4 * 99), ("together", 4 * 2 * 2))
    )
    assert (bits[:, :keys] == seen.reshape(4 * 99, keys)).all()
    assert not bits[:, keys:].any()
    of_keys = np.pad(seen.reshape(4, 99, keys), ((0, 0), (0, 29), (0, -keys % 512))).astype(bool)
    real = np.arange(128)[:, None] < 99
    sixteens = (each.reshape(4, 2, 64, -1, 16).any((2, 4)) for each in (of_keys, ~of_keys & real))
    assert (of_64.reshape(4, 2, 2, -1) == np.stack([*sixteens], 2)).all()
