"""Helpers for Hopper declarations: tensor maps, register budgets, turns of blocks."""

from __future__ import annotations

import functools
import itertools

from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.family.family import TensorMap

# Most registers of a thread of a warp-specialised consumer: setmaxnreg takes multiples of 8, at
# most 240 next to a producer that keeps 24.
_MOST_REGISTERS = 240
# Runs of equally long tiles for which groups of heads are weighed: above, in 50 ms of host time.
_MOST_RUNS = 1 << 16


def panels(columns: int) -> int:
    """Number of panels of 64 16-bit columns: 128 bytes, which TMA swizzles and wgmma reads."""
    return ceil_div(columns, 64)


def empty_rows(problem: Problem) -> dict[str, int]:
    """The define of a launch that has queries without a key; all other code stays what it was."""
    return {"EMPTY_ROWS": 1} if problem.has_empty_rows else {}


def value_columns(problem: Problem) -> dict[str, int]:
    """The define of a launch whose v and o have rows of another length than q and k."""
    return {"HEAD_DIM_V": problem.value_dim} if problem.head_dim_v else {}


def mask_define(problem: Problem) -> int:
    """What memory says of a mask: 0 nothing, 1 an interval of each query, 2 a bit of each key."""
    return 0 if problem.kind in ("full", "causal") else 2 if problem.kind == "boolean" else 1


def tensor_map(
    buffer: str,
    heads: int,
    rows: int,
    columns: int,
    *,
    box: tuple[int, int],
    pitch: int | None = None,
    item_bytes: int = 2,
    swizzle_bytes: int | None = None,
) -> TensorMap:
    """Tensor map of a buffer with shape (heads, rows, columns).

    box: columns and rows that one copy moves. pitch: elements from row to row (default: the
    columns). swizzle_bytes: default: the bytes of a row of the box.
    """
    row_bytes = (pitch or columns) * item_bytes
    return TensorMap(
        buffer,
        dims=(columns, rows, heads),
        strides=(row_bytes, rows * row_bytes),
        box=(*box, 1),
        swizzle_bytes=box[0] * item_bytes if swizzle_bytes is None else swizzle_bytes,
    )


def registers_at_entry(arch: Arch, threads: int, blocks_per_sm: int = 1) -> int:
    """Registers of each thread when `blocks_per_sm` blocks are launched on an SM."""
    warps = ceil_div(threads * blocks_per_sm, 128)  # in the fullest quarter of the SM
    return min(255, arch.registers_per_sm // 4 // (32 * warps) // 8 * 8)


def registers_of_roles(entry: int, warpgroups: int, producer: int | None) -> int:
    """Registers of a consumer thread after a producer warpgroup has given some of its own away.

    entry: registers of every thread at the launch. producer: registers that the producer's threads
    keep; None if they are too few to give any away.
    """
    if producer is None:
        return entry
    return min(_MOST_REGISTERS, (entry + (entry - producer) // warpgroups) // 8 * 8)


def heads_sharing_l2(p: Problem, block_m: int, block_n: int, blocks: int, l2_bytes: int) -> int:
    """Number of heads to process as a group, so that they share K and V in L2.

    A group deals its heads' longest tiles first, then the next longest. blocks: number of blocks
    that take turns at all tiles; 0 if each block has one tile. l2_bytes: bytes of K and V that
    blocks which run at the same time should share.
    """
    heads, fit = p.batch * p.heads, heads_that_fit(p, l2_bytes)
    if not blocks:
        return next(n for n in range(fit, 0, -1) if heads % n == 0)
    if p.kind != "causal":
        return fit
    # A tile of queries costs one per tile of keys, plus one and a half; here all of it doubled.
    rows = range(ceil_div(p.seqlen_q, block_m) * block_m, 0, -block_m)
    keys = (p.seqlen_k - max(0, p.seqlen_q - row) for row in rows)
    costs = tuple(2 * ceil_div(max(0, seen), block_n) + 3 for seen in keys)
    return fit if heads * len(costs) > _MOST_RUNS else even_turns(heads, fit, costs, blocks)


def heads_that_fit(p: Problem, l2_bytes: int) -> int:
    """Number of heads whose K and V fit in the L2 together; see heads_sharing_l2."""
    fit = l2_bytes * (p.heads // p.heads_kv) // (2 * p.seqlen_k * sum(p.head_dims))
    return min(p.batch * p.heads, max(1, fit))


def heads_of_section(p: Problem, heads: int, masks: int, l2_bytes: int) -> int:
    """Heads of each of `masks` masks whose K and V share L2: a divisor of the heads of a mask."""
    fit = max(1, heads_that_fit(p, l2_bytes) // masks)
    return next(n for n in range(min(fit, heads), 0, -1) if heads % n == 0)


@functools.lru_cache(maxsize=4096)
def even_turns(heads: int, fit: int, costs: tuple[int, ...], blocks: int) -> int:
    """The size of a group of heads, from fit / 2 to fit, that gives the busiest block least work.

    costs: cost of each tile of queries of one head, in the order in which tiles are dealt. Two
    turns within one group of heads balance each other, but not two turns at the end of one group
    and the beginning of the next: for (16,16,1024,128) causal the busiest of 132 blocks has 19 %
    too much work with groups of 64 heads, and 1 % with groups of 33.
    """
    if len(set(costs)) == 1:
        return fit
    return min(range(fit, (fit - 1) // 2, -1), key=lambda n: busiest_turns(heads, n, costs, blocks))


def busiest_turns(heads: int, together: int, costs: tuple[int, ...], blocks: int) -> int:
    """Work of the busiest block, which take turns in order, then in reverse order.

    Tiles of one cost are a run of items in a row, and whole turns of a run count for all blocks.
    """
    steps = [0] * (blocks + 1)  # by how much a block's work differs from the block's before
    steps[0] = costs[-1]  # as if the last run of a group came before the first one
    runs = [(cost, cost - before) for cost, before in zip(costs, (costs[-1], *costs), strict=False)]
    everyone = at = 0
    reverse = False
    for first in range(0, heads, together):
        count = min(together, heads - first)
        for cost, more in runs:
            if reverse:
                steps[blocks - at] -= more
            else:
                steps[at] += more
            at += count
            if at >= blocks:  # the run fills its turn, and maybe whole turns after it
                if reverse:
                    steps[0] += cost
                whole, at = divmod(at - blocks, blocks)
                everyone += whole * cost
                reverse = reverse == bool(whole % 2)
                if not reverse:
                    steps[0] += cost
    if reverse:
        steps[blocks - at] += costs[-1]
    else:
        steps[at] -= costs[-1]
    return everyone + max(itertools.accumulate(steps[:-1]))
