"""ITEM_KEYS=1: few queries that see the same keys of their item, which blocks look up themselves.

Each item of the batch has lengths, or a mask, of a kind of its own.
"""

import numpy as np
import pytest

from attnsweep.core.cases import Case
from attnsweep.core.masks import FULL
from attnsweep.core.problem import Padded, Problem
from attnsweep.family.discover import discover
from attnsweep.verify.encoding import from_bits
from attnsweep.verify.inputs import make_inputs

from .harness import ARCH, COMPILER, LSE_LIMIT, config_of
from .test_boolean_masks import LIMIT, expected, launched

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
FAMILY = discover()["flash_fwd_wgmma"]
BUSY = "BLOCK_N=64 WARPGROUPS=2 KEY_GROUPS=2 NUM_STAGES=2 MAXIMA=2 SPLITS=2 PDL=2 PACK_GQA=1 LSE=1"
CLUSTER = "BLOCK_N=96 WARPGROUPS=1 BLOCKS_PER_SM=2 MAXIMA=1 SPLITS=2 SPLIT_CLUSTER=1 PACK_GQA=1 LSE=1"
ALONE = "BLOCK_N=128 WARPGROUPS=2 KEY_GROUPS=2 NUM_STAGES=2 P_SHARED=1 MAXIMA=2 EXP2_POLY=2 PDL=1"
CONFIGS = (
    BUSY,
    CLUSTER,
    ALONE,
    "BLOCK_N=96 WARPGROUPS=1 BLOCKS_PER_SM=2 MAXIMA=2 SPLITS=4 PDL=2",
    "BLOCK_N=64 WARPGROUPS=1 BLOCKS_PER_SM=2 MAXIMA=1 P_SHARED=1 PACK_GQA=1 LSE=1",
    "BLOCK_N=128 WARPGROUPS=2 KEY_GROUPS=2 MAXIMA=1 SPLITS=2 SPLIT_CLUSTER=1 PACK_GQA=1",
)
KEYS = (421, 304)  # the bytes of 304 are read by 16, if they begin at such, and of 421 one by one
NAN = 0x7FC0


def ranges(keys):
    """The range of each item: lengths from no key to all, ranges that begin later, reversed ones."""
    ends = (0, 1, 63, 64, 65, 128, 192, keys - 1, keys)
    lefts = ((1, 2), (5, 5), (keys - 1, keys), (70, 200), (96, 192), (129, keys), (9, 8), (keys, 0))
    return np.array([*((0, end) for end in ends), *lefts], np.int32)


def rows(keys):
    """(items, keys): True where the query of the item sees a key."""
    j, rng = np.arange(keys), np.random.default_rng(3)
    made = [j >= 0, j < 0, j == 0, j == keys - 1, (j == 0) | (j == keys - 1), j == 127, j == 128]
    made += [j < 65, j >= 131, (j >= 200) & (j < 260), (j < 64) | (j >= 192), j != 130, j < keys - 1]
    made += [~np.isin(j, border) for border in ((31, 32), (95, 96), (63, 64, 127, 128), (0, 255, 256))]
    made += [j % 2 == 0, rng.random(keys) < 0.5, rng.random(keys) < 0.02, (j > 140) & (rng.random(keys) < 0.9)]
    return np.stack(made)


def check(simulator, words, problem, seen, *, strides=(), built=None, **given):
    """The output, and the log-sum-exp if it is written, of items that see `seen`: (items, keys).

    Keys that are not seen are NaN. given: the input that says which are, and its strides. built:
    how the simulator builds the stages.
    """
    config, case = config_of(FAMILY, f"{words} ITEM_KEYS=1"), Case(problem)
    # The rules of these are about how long a call is.
    assert FAMILY.refused_by(config, problem, ARCH) in (None, "no_idle_tile", "split_grid", "split_keys"), words
    drawn = {name: make_inputs(case, 1)[name] for name in "qkv"}
    q, k, v = (from_bits(bits, "bf16").astype(np.float64) for bits in drawn.values())
    hidden = np.broadcast_to(~seen[:, None, :, None], k.shape)
    inputs = drawn | {"k": np.where(hidden, np.uint16(NAN), drawn["k"])} | given
    k = np.where(hidden, 0, k)
    want = expected(q, k, v, seen[:, None, None], problem.scale)
    group = problem.heads // problem.heads_kv
    scores = np.where(seen[:, None, None], q @ np.repeat(k, group, 1).swapaxes(2, 3) * problem.scale, -np.inf)
    with np.errstate(divide="ignore"):
        sums = np.log(np.exp(scores).sum(-1))
    for schedule in (0, 1):
        left = launched(simulator, config, case, inputs, schedule, strides=strides, **(built or {}))
        out = from_bits(left["o"].view(np.uint16).reshape(problem.shape_of("o")), "bf16").astype(np.float64)
        norm, error = (np.linalg.norm(x, axis=-1) for x in (want, out - want))
        wrong = ~(error <= LIMIT * norm)
        assert not wrong.any(), f"items {np.flatnonzero(wrong.any((1, 2)))} of {words}, {schedule}"
        if config.LSE:
            lse = left["lse"].view(np.float32).reshape(sums.shape)
            finite = np.isfinite(sums)
            assert (lse[~finite] == -np.inf).all(), words
            apart = np.abs(lse[finite] - sums[finite])
            assert (apart <= LSE_LIMIT * np.maximum(1, np.abs(sums[finite]))).all(), words


def by_lengths(keys, queries=1, heads=6):
    """A problem, and what its items see, by ranges that the device alone knows."""
    told = ranges(keys)
    problem = Problem(len(told), heads, 2, queries, keys, 64, "bf16", layout=Padded("right", 50))
    j = np.arange(keys)
    return problem, told, (told[:, :1] <= j) & (j < told[:, 1:])


def by_mask(keys, heads=6):
    """The same by the mask of the one query, whose bytes are 0 or anything else.

    So they are of a view of uint8, too.
    """
    seen = rows(keys)
    problem = Problem(len(seen), heads, 2, 1, keys, 64, "bf16", FULL.as_boolean(("item",)))
    bytes_ = np.random.default_rng(4).choice(np.array([1, 2, 128, 255], np.uint8), seen.shape)
    return problem, seen * bytes_, seen


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("words", CONFIGS)
def test_queries_see_the_range_of_their_item(simulator, words, keys):
    problem, told, seen = by_lengths(keys)
    check(simulator, words, problem, seen, key_range=told)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("queries", [5, 64])
@pytest.mark.parametrize("words", [CLUSTER, ALONE, CONFIGS[4]])
def test_several_queries_see_the_range_of_their_item(simulator, words, queries):
    """More than a tile of packed heads, or most of one head's."""
    problem, told, seen = by_lengths(200, queries, heads=6 if queries == 64 else 28)
    packs = "PACK_GQA=1" in words and queries < 64
    words = words if packs else words.replace("PACK_GQA=1", "")
    check(simulator, words, problem, seen, key_range=told)


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("words", CONFIGS)
def test_a_query_sees_what_the_mask_says(simulator, words, keys):
    problem, mask, seen = by_mask(keys)
    check(simulator, words, problem, seen, mask=mask)


LAID = {
    "every second key": lambda seen: np.repeat(seen, 2, 1)[:, ::2],
    "items apart": lambda seen: np.pad(seen, ((0, 0), (0, 13)))[:, :-13],
    "items apart by 16": lambda seen: np.pad(seen, ((0, 0), (0, -seen.shape[1] % 16 + 16)))[:, : seen.shape[1]],
    "transposed": lambda seen: np.ascontiguousarray(seen.T).T,
    "one of all items": lambda seen: np.broadcast_to(seen[18:19].copy(), seen.shape),
    "one key of all": lambda seen: np.broadcast_to(seen[:, 65:66].copy(), seen.shape),
}


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("how", LAID)
def test_a_mask_that_lies_in_memory_in_any_way(simulator, how, keys):
    seen = LAID[how](rows(keys).astype(np.uint8))
    problem = Problem(len(seen), 4, 2, 1, keys, 64, "bf16", FULL.as_boolean(("item",)))
    of_item, of_key = seen.strides
    memory = seen if seen.base is None else seen.base
    strides = (of_item, 0, 0, of_key)
    check(simulator, CONFIGS[4], problem, seen.astype(bool), mask=memory, strides=strides)


def test_one_mask_of_all_items(simulator):
    """As the launches declare it, with a batch of several words of warps."""
    seen = np.broadcast_to(rows(150)[18], (33, 150))
    problem = Problem(33, 2, 1, 1, 150, 64, "bf16", FULL.as_boolean())
    check(simulator, CONFIGS[4], problem, seen, mask=seen[0].astype(np.uint8))


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize("keys", [1, 2, 31, 128, 9000, 16400])
@pytest.mark.parametrize("kind", ["all", "last", "first", "few", "late"])
def test_masks_of_one_key_and_of_more_than_a_blocks_threads_read_at_once(simulator, keys, kind):
    """Nothing of them but that the kernel reads what they say, by few heads."""
    j, rng = np.arange(keys), np.random.default_rng(keys)
    made = {"all": j >= 0, "last": j == keys - 1, "first": j == 0, "few": rng.random(keys) < 0.01}
    seen = np.stack([made[kind] if kind != "late" else j >= keys * 0.9, j < 0, j % 3 == 0])
    problem = Problem(3, 2, 1, 1, keys, 64, "bf16", FULL.as_boolean(("item",)))
    check(simulator, CONFIGS[4], problem, seen, mask=seen.astype(np.uint8))
