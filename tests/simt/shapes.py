"""Small problems that reach what a config is made for: several tiles of queries and of keys.

A fixed list of small problems would be one tile of a config with large ones, and its rings, turns,
groups and clusters would never be met.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from attnsweep.core.cases import Case
from attnsweep.core.layouts import Paged
from attnsweep.core.problem import Problem
from attnsweep.family.family import Config


def spans(config: Config) -> tuple[int, int]:
    """Queries of a block or a cluster of them, and keys that it is at work on at once."""

    def product(*names: str) -> int:
        """Of the parameters that the config has, where 0 means none."""
        return math.prod(int(config.get(name) or 1) for name in names)

    queries = max(
        product("BLOCK_M"),
        product("QK_BLOCK_M", "QK_CLUSTER"),
        product("PV_BLOCK_M", "PV_CLUSTER"),
        product("THREADS"),
        product("WARPS"),
    )
    if queries == 1:  # a warpgroup has 64
        queries = 64 * product("WARPGROUPS", "CLUSTER") // product("KEY_GROUPS")
    keys = max(
        64,
        product("BLOCK_N", "KEY_GROUPS", "SPLITS"),
        product("BLOCK_N", "NUM_STAGES"),
        product("BLOCK_N", "STAGES"),
        product("QK_BLOCK_N", "QK_TILES"),
        product("PV_BLOCK_K", "PV_STAGES"),
    )
    return queries, keys


def cases(compiled: Problem, config: Config) -> list[Case]:
    """Two tiles of queries and two rounds of keys, each with a tail; grouped heads; hard inputs."""
    queries, keys = spans(config)
    if compiled.head_dim > 256:  # shared memory grows with the keys, and the problem's just fit
        return [Case(_as(compiled, 1, 1, 1, min(queries + 1, 70), compiled.seqlen_k - 3))]
    longest = 2 * keys + 17
    if config.get("STATS") == 0:  # more keys than the problem's would be other code
        longest = min(longest, compiled.seqlen_k - 7)
    shapes = {
        (1, 2, 1, queries + 33, longest): "normal",
        (1, 1, 1, queries + 1, keys + queries): "large_scores",
        (2, 4, 2, 17, 70): "negative_scores",
    }
    if config.get("STATS") == 3:
        # Lanes join 16 units of 128 keys at once: here twice.
        shapes[1, 1, 1, 17, 4000] = "large_scores"
    if config.get("PACK_GQA"):
        # A warp's rows are of several heads, a tile ends within a group, and next to it another.
        shapes[2, 16, 2, 5, longest] = "normal"
        shapes[1, 2 * queries, 2, 1, keys + 1] = "large_scores"
        shapes[1, 6, 2, queries // 2 - 1, keys + 64] = "normal"
    if config.get("PERSISTENT", 0):
        # Blocks take turns at the tiles where there are more tiles than blocks; few keys, else it
        # takes minutes.
        blocks = int(config["PERSISTENT"]) * int(config["BLOCKS_PER_SM"])
        shapes[1, blocks // 2 + 3, 1, queries + 1, queries + 1] = "normal"
    return [Case(_as(compiled, *shape), inputs) for shape, inputs in shapes.items()]


def _as(compiled: Problem, batch: int, heads: int, heads_kv: int, seqlen_q: int, seqlen_k: int) -> Problem:
    """The shape with the compile-time facts of a problem.

    Causal ones have a key for each query, and packed ones one item.
    """
    numbers: Mapping[str, int] = {
        "batch": 1 if compiled.kind == "packed" else batch,
        "heads": heads,
        "heads_kv": heads_kv,
        "seqlen_q": seqlen_q,
        "seqlen_k": max(seqlen_k, seqlen_q) if compiled.causal else seqlen_k,
    }
    layout = compiled.layout
    if isinstance(layout, Paged) and layout.lengths:  # of as many items as the problem has
        layout = replace(layout, lengths=())
    return replace(compiled, layout=layout, **numbers)
