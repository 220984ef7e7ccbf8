"""How a kernel of flash_fwd_wgmma is launched on a shape: grid, arguments, workspaces, rules.

fp8.py says it of flash_fwd_fp8_wgmma.
The declaration of the family says the same for a sweep; a test holds that both agree.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .table import Kernel, Shape

LOG2E = math.log2(math.e)
L2_BYTES = 32 * 2**20
"""Bytes of K and V that blocks which run at the same time should share."""
# Runs of equally long tiles for which groups of heads are weighed: above, in 50 ms of host time.
_MOST_RUNS = 1 << 16


@dataclass(frozen=True, slots=True)
class Map:
    """A tensor map of a buffer. box: columns and rows, the last two of the buffer's dimensions."""

    buffer: str
    box: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pointer:
    """The address of a buffer; `` for a null pointer."""

    buffer: str


Arg = Map | Pointer | int | float


@dataclass(frozen=True, slots=True)
class Call:
    """One launch. An int passes as int32, a float as float32."""

    stage: str
    grid: tuple[int, int, int]
    threads: int
    smem_bytes: int
    args: tuple[Arg, ...]
    programmatic: bool = False


def ceil_div(a: int, b: int) -> int:
    """The smallest whole number that is at least a / b."""
    return -(-a // b)


def workspaces(kernel: Kernel, shape: Shape) -> dict[str, int]:
    """Floats of each workspace by name."""
    if not kernel.combines:
        return {}
    rows = shape.batch * shape.heads * shape.seqlen_q
    return {"partial": kernel.splits * rows * shape.head_dim, "partial_lse": kernel.splits * rows}


def calls(
    kernel: Kernel, shape: Shape, scale: float, lse: bool, o_strides: tuple[int, ...]
) -> tuple[Call, ...]:
    """The launches of one attention call, in order.

    scale: of the scores. lse: whether the kernel writes the log-sum-exp, float32 (batch, heads,
    seqlen_q), contiguous. o_strides: elements from batch to batch, head to head and row to row of
    the output. Buffers are q, k, v, o, lse and the workspaces.
    """
    heads = shape.batch * shape.heads
    turns = kernel.persistent * kernel.blocks_per_sm
    together = heads_together(shape, kernel.block_m, kernel.block_n, turns)
    whole = Pointer("lse" if lse else "")
    outputs: tuple[Arg, ...] = (whole, Pointer("o" if kernel.split_cluster else ""))
    if kernel.combines:
        outputs = (Pointer("partial_lse"), Pointer("partial"))
    keys = (64, kernel.block_n // kernel.cluster)
    layout = (shape.heads, *o_strides[:3])
    maps = (Map("q", (64, 64)), Map("k", keys), Map("v", keys), Map("o", (64, 16)))
    sizes = (heads, shape.heads // shape.heads_kv, together, shape.seqlen_q, shape.seqlen_k)
    args: tuple[Arg, ...] = (*maps, *outputs, *sizes, scale * LOG2E, *layout)
    first = Call("fwd", _grid(kernel, shape), kernel.threads, kernel.smem_bytes, args)
    if not kernel.combines:
        return (first,)
    rows = heads * shape.seqlen_q
    joined = (Pointer("partial"), Pointer("partial_lse"), Pointer("o"), whole)
    join_args: tuple[Arg, ...] = (*joined, rows, shape.seqlen_q, *layout)
    join = Call(
        "combine", _join_grid(kernel, shape), kernel.combine_threads, 0, join_args, kernel.pdl > 0
    )
    return (first, join)


def _grid(kernel: Kernel, shape: Shape) -> tuple[int, int, int]:
    heads = shape.batch * shape.heads
    tiles_m = ceil_div(shape.seqlen_q, kernel.cluster * kernel.block_m) * kernel.cluster
    if kernel.persistent:
        return (min(kernel.persistent * kernel.blocks_per_sm, tiles_m * heads), 1, 1)
    if kernel.order:
        together = heads_together(shape, kernel.block_m, kernel.block_n, 0)
        return (together, tiles_m, heads // together)
    if kernel.split_cluster:
        return (tiles_m * kernel.splits, heads, 1)
    return (tiles_m, heads, kernel.splits)


def _join_grid(kernel: Kernel, shape: Shape) -> tuple[int, int, int]:
    elements = shape.batch * shape.heads * shape.seqlen_q * shape.head_dim
    return (ceil_div(elements, 4 * kernel.combine_threads), 1, 1)


def refused_by(kernel: Kernel, shape: Shape, sm_count: int) -> str | None:
    """Name of the family's rule that a shape breaks for a kernel on a card, or None.

    Only rules that depend on more of the shape than head_dim, dtype and mask: the others hold for
    the shape that the kernel won.
    """
    tiles = shape.batch * shape.heads * ceil_div(shape.seqlen_q, kernel.block_m)
    long_q, long_k = max(64, shape.seqlen_q), max(64, shape.seqlen_k)
    most_stages = min(ceil_div(shape.seqlen_k, kernel.block_n), 384 // kernel.block_n)
    waves = sm_count * kernel.blocks_per_sm // kernel.splits + 1
    flops = 4 * shape.head_dim * shape.batch * shape.heads * pairs(shape)
    lengths_differ = shape.causal and shape.seqlen_q > kernel.block_m
    rules = {
        "no_idle_tile": kernel.block_m < 2 * long_q
        and kernel.block_n < 2 * long_k
        and kernel.num_stages <= max(2, most_stages),
        "block_order": lengths_differ
        if kernel.order
        else not (lengths_differ and kernel.persistent),
        "turns_of_blocks": tiles >= 2 * kernel.persistent * kernel.blocks_per_sm,
        "split_keys": kernel.key_groups == 1 or tiles <= 640,
        "short_calls": kernel.pdl == 0 or flops < 2e11,
        "split_grid": kernel.splits == 1
        or (
            tiles < min(sm_count, waves)
            and kernel.splits * kernel.key_groups * kernel.block_n <= long_k
        ),
        "clusters": kernel.cluster == 1 or shape.seqlen_q > (kernel.cluster - 1) * kernel.block_m,
    }
    broken = next((name for name, holds in rules.items() if not holds), None)
    if broken is not None:
        return broken
    grids = [_grid(kernel, shape)]
    if kernel.combines:
        grids.append(_join_grid(kernel, shape))
    return beyond_limits(grids)


def beyond_limits(grids: Sequence[tuple[int, int, int]]) -> str | None:
    """`block_limits` if a grid is larger than CUDA's largest, or None."""
    fits = all(x < 2**31 and max(y, z) <= 65535 for x, y, z in grids)
    return None if fits else "block_limits"


def pairs(shape: Shape) -> int:
    """Pairs of a query and a key that it sees, of one head."""
    all_pairs = shape.seqlen_q * shape.seqlen_k
    return all_pairs - (shape.seqlen_q * (shape.seqlen_q - 1) // 2 if shape.causal else 0)


@functools.lru_cache(maxsize=1024)
def heads_together(
    shape: Shape, block_m: int, block_n: int, blocks: int, l2_bytes: int = L2_BYTES
) -> int:
    """Number of heads to process as a group, so that they share K and V in L2.

    blocks: those that take turns at all tiles; 0 if each block has one tile. l2_bytes: to share,
    if a number has two bytes.
    """
    heads, fit = shape.batch * shape.heads, heads_that_fit(shape, l2_bytes)
    if not blocks:
        return next(n for n in range(fit, 0, -1) if heads % n == 0)
    if not shape.causal:
        return fit
    rows = range(ceil_div(shape.seqlen_q, block_m) * block_m, 0, -block_m)
    seen = (shape.seqlen_k - max(0, shape.seqlen_q - row) for row in rows)
    costs = tuple(2 * ceil_div(max(0, keys), block_n) + 3 for keys in seen)
    if len(set(costs)) == 1 or heads * len(costs) > _MOST_RUNS:
        return fit
    return _even_turns(heads, fit, costs, blocks)


def heads_that_fit(shape: Shape, l2_bytes: int = L2_BYTES) -> int:
    """Number of heads whose K and V fit in the L2 together; see heads_together."""
    group = shape.heads // shape.heads_kv
    fit = l2_bytes * group // (4 * shape.seqlen_k * shape.head_dim)
    return min(shape.batch * shape.heads, max(1, fit))


def _even_turns(heads: int, fit: int, costs: tuple[int, ...], blocks: int) -> int:
    """The size of a group, from fit / 2 to fit heads, that gives the busiest block least work."""
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
