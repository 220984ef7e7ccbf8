"""What flash_fwd_wgmma works out on the host: how blocks that take turns share the work."""

from dataclasses import replace

import pytest

from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config

FAMILY = discover()["flash_fwd_wgmma"]


def split(**values: int) -> Config:
    """These values, and 64 queries a block."""
    first = {param.name: param.values[0] for param in FAMILY.params}
    return Config(first | {"WARPGROUPS": 2, "KEY_GROUPS": 2, "PDL": 2} | values)


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


def of_items(**values: int) -> Config:
    """These values, and blocks that look up the keys of their item."""
    return packed(**{"ITEM_KEYS": 1, **values})


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
