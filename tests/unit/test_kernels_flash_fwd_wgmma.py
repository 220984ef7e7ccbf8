"""What flash_fwd_wgmma works out on the host: how blocks that take turns share the work."""

from dataclasses import replace

import pytest

from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config, TensorMap

FAMILY = discover()["flash_fwd_wgmma"]


def heads_together(problem: Problem, config: Config) -> int:
    """The argument of the launch."""
    launch = FAMILY.launches(config, problem, ARCHS["sm_90a"])["fwd"]
    return [value for value in launch.args if isinstance(value, int)][2]


def busiest(problem: Problem, config: Config, together: int) -> float:
    """Tiles of keys of the block that has most of them over the average, as Schedule deals them."""
    heads, block_m = problem.batch * problem.heads, 64 * int(config["WARPGROUPS"])
    tiles = -(-problem.seqlen_q // block_m)
    blocks = int(config["PERSISTENT"]) * int(config["BLOCKS_PER_SM"])
    load, seen = [0] * blocks, set()
    for item in range(tiles * heads):
        turn, block = divmod(item, blocks)
        section, within = divmod(item, together * tiles)
        count = min(together, heads - section * together)
        tile, head = tiles - 1 - within // count, section * together + within % count
        seen.add((tile, head))
        keys = min((tile + 1) * block_m, problem.seqlen_k)
        load[blocks - 1 - block if turn % 2 else block] += -(-keys // int(config["BLOCK_N"]))
    assert len(seen) == tiles * heads, "a tile is left out or done twice"
    return max(load) * blocks / sum(load)


@pytest.mark.parametrize(
    ("shape", "warpgroups", "blocks_per_sm"),
    [
        ((16, 16, 1024, 128), 2, 1),
        ((4, 16, 4096, 128), 2, 1),
        ((16, 32, 1024, 64), 2, 2),
        ((4, 32, 4096, 64), 2, 2),
        ((4, 16, 2048, 192), 2, 1),
    ],
)
def test_causal_turns_are_even(shape, warpgroups, blocks_per_sm):
    batch, heads, seqlen, head_dim = shape
    problem = Problem(batch, heads, heads, seqlen, seqlen, head_dim, causal=True)
    values = {param.name: param.values[0] for param in FAMILY.params} | {
        "WARPGROUPS": warpgroups,
        "BLOCKS_PER_SM": blocks_per_sm,
        "BLOCK_N": 64,
        "ORDER": 1,
        "PERSISTENT": 132,
    }
    config = Config(values)
    assert busiest(problem, config, heads_together(problem, config)) < 1.06


def split(**values: int) -> Config:
    """These values, and 64 queries a block."""
    first = {param.name: param.values[0] for param in FAMILY.params}
    return Config(first | {"WARPGROUPS": 2, "KEY_GROUPS": 2, "PDL": 2} | values)


def test_splits_of_a_cluster_need_no_workspace_and_no_second_launch():
    problem = Problem(1, 8, 8, 512, 512, 64)
    arch = ARCHS["sm_90a"]
    joined = split(SPLITS=2, SPLIT_CLUSTER=1)
    assert FAMILY.refused_by(joined, problem, arch) is None
    launches = FAMILY.launches(joined, problem, arch)
    assert list(launches) == ["fwd"]
    assert launches["fwd"].grid == (2 * 8, 8, 1)
    assert launches["fwd"].defines["CLUSTER"] == 2
    assert list(FAMILY.workspaces(joined, problem)) == ["lse"]
    combined = split(SPLITS=2)
    assert list(FAMILY.launches(combined, problem, arch)) == ["fwd", "combine"]


@pytest.mark.parametrize(
    ("values", "rule"),
    [({"SPLITS": 1}, "split_clusters"), ({"SPLITS": 16}, "split_clusters"), ({"SPLITS": 2, "CLUSTER": 2}, "clusters")],
)
def test_a_cluster_of_splits_is_refused_where_it_cannot_be(values, rule):
    problem = Problem(1, 2, 2, 64, 4096, 64)
    config = split(SPLIT_CLUSTER=1, **values)
    assert FAMILY.refused_by(config, problem, ARCHS["sm_90a"]) == rule


def test_splits_of_a_cluster_share_columns_by_eights():
    """96 columns are twelve eights: for two blocks or four, not for eight."""
    problem = Problem(1, 2, 2, 64, 4096, 96)
    refused = {
        splits: FAMILY.refused_by(split(SPLITS=splits, SPLIT_CLUSTER=1), problem, ARCHS["sm_90a"])
        for splits in (2, 4, 8)
    }
    assert refused == {2: None, 4: None, 8: "split_clusters"}


# ---- query heads of a key head in one tile ----
DECODE = Problem(1, 32, 4, 1, 32768, 128, "bf16")


def packed(**values: int) -> Config:
    """These values, and 64 rows of all query heads of a key head."""
    first = {param.name: param.values[0] for param in FAMILY.params}
    return Config(first | {"BLOCKS_PER_SM": 2, "PACK_GQA": 1} | values)


def test_packed_heads_are_one_head_of_more_rows():
    launches = FAMILY.launches(packed(SPLITS=32), DECODE, ARCHS["sm_90a"])
    fwd = launches["fwd"]
    assert fwd.grid == (1, 4, 32)  # not (1, 32, 32)
    assert FAMILY.stages["fwd"].defines(packed(SPLITS=32), DECODE, fwd)["PACK_GQA"] == "1"
    maps = {arg.buffer: arg for arg in fwd.args if isinstance(arg, TensorMap)}
    assert maps["q"].dims == maps["o"].dims == (128, 8, 4)
    assert maps["q"].strides == (256, 8 * 256)
    assert maps["k"].dims == (128, 32768, 4)
    # Heads, query heads of a key head, heads whose K and V fit L2, and queries of a query head.
    assert [arg for arg in fwd.args if isinstance(arg, int)] == [4, 8, 2, 1, 32768]
    assert launches["combine"].args[-1] == 32
    assert FAMILY.workspaces(packed(SPLITS=32), DECODE)["partial_lse"] == 4 * 32 * 32


@pytest.mark.parametrize(("splits", "alone"), [(8, None), (16, "split_grid"), (64, "split_grid")])
def test_packed_heads_leave_room_for_more_splits(splits, alone):
    """Four tiles instead of 32: of each, 64 splits can be at work at once, not 8."""
    arch = ARCHS["sm_90a"]
    assert FAMILY.refused_by(packed(SPLITS=splits, PACK_GQA=0), DECODE, arch) == alone
    assert FAMILY.refused_by(packed(SPLITS=splits), DECODE, arch) is None


@pytest.mark.parametrize(
    ("problem", "values", "rule"),
    [
        (replace(DECODE, heads_kv=32), {}, "packed_heads"),  # nothing is grouped
        (replace(DECODE, seqlen_q=64), {}, "packed_heads"),  # a head fills its blocks alone
        (replace(DECODE, seqlen_q=63), {}, None),
        (replace(DECODE, seqlen_q=64), {"WARPGROUPS": 2, "BLOCKS_PER_SM": 1}, None),
        (DECODE, {"PACK_GQA": 2}, "known_values"),
        # All tiles take all keys, so that none is longer.
        (replace(DECODE, seqlen_q=63, causal=True), {"ORDER": 1}, "block_order"),
    ],
)
def test_where_packed_heads_are_refused(problem, values, rule):
    assert FAMILY.refused_by(packed(**values), problem, ARCHS["sm_90a"]) == rule


# ---- keys of an item that all of its queries see ----
CACHES = Problem.parse("(8,32/8,1x4096,128) bf16 full padded(right,30)")
ROWS_OF_KEYS = Problem.parse("(8,32/8,1x4096,128) bf16 boolean(full,item)")


def of_items(**values: int) -> Config:
    """These values, and blocks that look up the keys of their item."""
    return packed(**{"ITEM_KEYS": 1, **values})


@pytest.mark.parametrize("problem", [CACHES, ROWS_OF_KEYS], ids=lambda p: p.kind)
def test_blocks_look_up_the_keys_of_their_item(problem):
    arch, config = ARCHS["sm_90a"], of_items(SPLITS=2, PDL=2)
    assert FAMILY.refused_by(config, problem, arch) is None
    launches = FAMILY.launches(config, problem, arch)
    assert list(launches) == ["mask", "fwd", "combine"]
    scan, fwd, _ = launches.values()
    assert scan.once
    assert (scan.grid, fwd.grid) == ((8, 1, 1), (1, 8 * 8, 2))
    words = 4 * (4096 // 128 + 1)
    boolean = problem.kind == "boolean"
    read, bits = ("mask", "bits") if boolean else ("key_range", "item_keys")
    assert scan.args == (read, bits, "item_keys", 4096, words, 4096 * boolean, 0, 4096, 1)
    assert fwd.args[-4:] == ("item_keys", bits, 8, words), "8 key heads of an item"
    defined = {name: FAMILY.stages[name].defines(config, problem, each) for name, each in launches.items()}
    assert all(defined[name]["ITEM_KEYS"] == "1" for name in ("mask", "fwd"))
    assert all(defined[name]["BITS"] == str(int(boolean)) for name in ("mask", "fwd"))
    # That no item is empty, the device alone knows, whatever those of the problem are.
    assert all(defined[name]["EMPTY_ROWS"] == "1" for name in ("fwd", "combine"))
    assert not {"MASK", "CAUSAL"} & {name for name, value in defined["fwd"].items() if value != "0"}
    sizes = FAMILY.workspaces(config, problem)
    assert sizes.pop("item_keys") == 16 * 8
    assert sizes.pop("bits", None) == (4 * 8 * words if boolean else None)
    assert {*sizes} == {"lse", "partial", "partial_lse"}
    alone = FAMILY.launches(of_items(PACK_GQA=0), problem, arch)["fwd"]
    assert (alone.grid, alone.args[-2]) == ((1, 8 * 32, 1), 32), "32 query heads of an item"


@pytest.mark.parametrize(
    ("label", "values", "rule"),
    [
        ("(8,32/8,1x4096,128) bf16 full padded(left,0)", {}, None),
        ("(8,32/8,1x4096,128) bf16 full padded(right,30)", {"SPLITS": 2, "SPLIT_CLUSTER": 1}, None),
        ("(8,32/8,1x4096,128) bf16 full padded(right,30)", {"BLOCK_N": 80}, None),
        ("(8,32/8,1x4096,128) bf16 boolean(full,item)", {"BLOCK_N": 96}, None),
        ("(8,32/8,1x4096,128) bf16 boolean(padding,7)", {"WARPGROUPS": 2, "KEY_GROUPS": 2, "BLOCKS_PER_SM": 1}, None),
        ("(8,8,64x4096,128) bf16 full padded(right,30)", {"PACK_GQA": 0}, None),
        # Queries that see other keys than the others of their item, or no item's range.
        ("(8,8,65x4096,128) bf16 full padded(right,30)", {"PACK_GQA": 0}, "item_keys"),
        ("(8,32/8,1x4096,128) bf16 full", {}, "item_keys"),
        ("(8,32/8,4x4096,128) bf16 causal padded(right,30)", {}, "item_keys"),
        ("(8,32/8,1x4096,128) bf16 window(9,0)", {}, "item_keys"),
        ("(8,32/8,2x4096,128) bf16 boolean(full,item)", {}, "item_keys"),
        ("(8,32/8,1x4096,128) bf16 boolean(full,head)", {}, "item_keys"),
        ("(8,32/8,1x4096,128) bf16 boolean(full,item,head)", {}, "item_keys"),
        # What a tile cannot be.
        ("(8,32/8,1x4096,128) bf16 boolean(full,item)", {"BLOCK_N": 80}, "item_keys"),
        ("(8,32/8,1x4096,128) bf16 full padded(right,30) softcap(20)", {}, "item_keys"),
        ("(8,32/8,1x4096,128) bf16 full padded(right,30) sinks", {}, "item_keys"),
        ("(8,32/8,1x4096,128) bf16 full padded(right,30)", {"ORDER": 1}, "item_keys"),
        ("(8,32/8,1x4096,128) bf16 full padded(right,30)", {"PERSISTENT": 132}, "item_keys"),
        ("(8,32/8,1x4096,128) bf16 full padded(right,30)", {"CLUSTER": 2}, "item_keys"),
        ("(8,32/8,1x4096,128) bf16 full padded(right,30)", {"ITEM_KEYS": 2}, "item_keys"),
        # Without it, memory says more of a mask than few queries need, and one block takes a row.
        ("(8,32/8,1x4096,128) bf16 full padded(right,30)", {"ITEM_KEYS": 0}, "masks_in_memory"),
        ("(8,32/8,1x4096,128) bf16 full padded(right,30)", {"ITEM_KEYS": 0, "PACK_GQA": 0}, None),
        (
            "(8,32/8,1x4096,128) bf16 boolean(full,item)",
            {"ITEM_KEYS": 0, "SPLITS": 2, "PACK_GQA": 0},
            "masks_in_memory",
        ),
    ],
)
def test_whose_keys_blocks_may_look_up(label, values, rule):
    assert FAMILY.refused_by(of_items(**values), Problem.parse(label), ARCHS["sm_90a"]) == rule
