"""How long a kernel takes on a shape where it was not timed, from the shapes where it was.

A kernel's blocks each visit some tiles of keys. The busiest SM decides the time, so a time is

    start + traffic + (work of the busiest SM) x (time of a unit of work),

and the last factor is what the kernel took where it was timed, the near shapes counting most. The
constants are those that predict the recorded runs best, each shape from the others
(benchmarks/dispatch.py); which kernel is fast, and how fast, comes from the runs alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from .launch import busiest_turns, ceil_div, heads_together
from .table import GpuKey, Kernel, Shape

ALONE, TWO_OF_THREE = 0.75, 0.85
"""Speed of an SM that holds fewer blocks than it has room for: one of two, two of three."""
# The share of the L2 that keeps inputs and outputs from one call to the next, and the rate at which
# bytes beyond it add to the time. Both are fitted: other blocks hide a part of that time.
_L2_SHARE, _BYTES_PER_US = 0.35, 11e6
# A shape that is one octave off counts e to the power of this less.
_FADES = 1.3
# Tiles of queries that are looked at one by one; of more, every second, third and so on.
_MOST_TILES = 4096


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a kernel cuts a call, and what else its time depends on.

    shares: blocks and warpgroups that share a row's keys. turns: blocks that take turns at all
    tiles; 0 if each has one. block_keys: work of a block besides its tiles, in keys. tail: share
    of the longest block by which SMs end apart, if blocks differ. start_us: of a launch, and of
    all else that does not grow. waits: whether bytes beyond the L2 cost time.
    """

    block_m: int
    block_n: int
    shares: int
    splits: int
    blocks_per_sm: int
    turns: int
    block_keys: float
    tail: float
    start_us: float
    waits: bool


SDPA = Tiling(128, 128, 1, 1, 1, 0, 70.0, 0.8, 3.75, False)
"""PyTorch's own attention: the faster of cuDNN's and flash, both with tiles of about this size."""


def tiling(kernel: Kernel) -> Tiling:
    """What the time depends on, of all that is known of a kernel."""
    alone = kernel.blocks_per_sm == 1 and not kernel.persistent  # nothing hides its first loads
    return Tiling(
        kernel.block_m,
        kernel.block_n,
        kernel.key_groups * kernel.splits,
        kernel.splits,
        kernel.blocks_per_sm,
        kernel.persistent * kernel.blocks_per_sm,
        block_keys=150.0 if alone else 90.0,
        tail=0.1 if kernel.order else 0.6,
        start_us=1.6,
        waits=True,
    )


@functools.lru_cache(maxsize=16384)
def work(tiling: Tiling, shape: Shape, sm_count: int) -> float:
    """Work of the busiest SM, in tiles of keys at the speed of an SM that is full of blocks."""
    heads = shape.batch * shape.heads
    tiles_m = ceil_div(shape.seqlen_q, tiling.block_m)
    visits = _visits(tiling, shape, tiles_m)
    extra = tiling.block_keys / tiling.block_n
    longest, mean = max(visits) + extra, math.fsum(visits) / len(visits) + extra
    blocks, room = heads * tiles_m * tiling.splits, sm_count * tiling.blocks_per_sm
    share = blocks * mean / sm_count
    if longest == mean:
        waves, rest = divmod(blocks, room)
        if tiling.turns:
            return ceil_div(blocks, tiling.turns) * tiling.blocks_per_sm * longest
        last = ceil_div(rest, sm_count)
        whole = waves * tiling.blocks_per_sm * longest
        return whole + (last * longest / _speed(last, tiling.blocks_per_sm) if rest else 0.0)
    if blocks <= room:
        full = _speed(ceil_div(blocks, sm_count), tiling.blocks_per_sm)
        return max(longest / _speed(1, tiling.blocks_per_sm), share / full)
    if tiling.turns and heads * tiles_m <= _MOST_TILES * 16:
        together = heads_together(shape, tiling.block_m, tiling.block_n, tiling.turns)
        costs = tuple(round(8 * (n + extra)) for n in reversed(visits))
        return busiest_turns(heads, together, costs, tiling.turns) * tiling.blocks_per_sm / 8
    tail = 0.0 if tiling.turns else tiling.tail
    return max(share + tail * longest, longest / _speed(1, tiling.blocks_per_sm))


def _visits(tiling: Tiling, shape: Shape, tiles_m: int) -> list[int]:
    """Tiles of keys that a block visits, for each tile of queries, the first ones first."""
    together = tiling.block_n * tiling.shares
    if not shape.causal or tiles_m == 1:
        return [ceil_div(max(1, shape.seqlen_k), together)]
    before = shape.seqlen_k - shape.seqlen_q
    ends = range(tiles_m, 0, -ceil_div(tiles_m, _MOST_TILES))
    seen = (min(shape.seqlen_k, before + n * tiling.block_m) for n in ends)
    return [ceil_div(max(1, keys), together) for keys in seen][::-1]


def _speed(blocks: int, room: int) -> float:
    """Speed of an SM that holds `blocks` blocks, relative to a full one, which holds `room`."""
    if blocks >= room:
        return 1.0
    return {(1, 2): ALONE, (2, 3): TWO_OF_THREE}.get((blocks, room), 0.6 * ALONE)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A time in microseconds. nearest: of the shapes that it comes from. octaves: to that one."""

    time_us: float
    nearest: Shape
    octaves: float
    shapes: int


def predict(
    tiling: Tiling, timed: Iterable[tuple[Shape, float]], shape: Shape, gpu: GpuKey
) -> Prediction | None:
    """The time on a shape, from times in microseconds on others; None if there are none.

    All must be of one head_dim and mask.
    """
    weights = logs = 0.0
    found: list[tuple[float, Shape]] = []
    for other, time_us in timed:
        left = max(time_us - _fixed_us(tiling, other, gpu), 0.2 * time_us)
        weight = math.exp(-_FADES * _apart(shape, other))
        weights += weight
        logs += weight * math.log(left / work(tiling, other, gpu.sm_count))
        found.append((octaves(shape, other, gpu.sm_count), other))
    if not found:
        return None
    far, nearest = min(found)
    growing = work(tiling, shape, gpu.sm_count) * math.exp(logs / weights)
    return Prediction(_fixed_us(tiling, shape, gpu) + growing, nearest, far, len(found))


def _fixed_us(tiling: Tiling, shape: Shape, gpu: GpuKey) -> float:
    """Time of a launch, and of the bytes beyond the L2: q, k, v and o, of two bytes an element."""
    rows = 2 * shape.heads * shape.seqlen_q + 2 * shape.heads_kv * shape.seqlen_k
    beyond = max(0.0, 2.0 * shape.batch * rows * shape.head_dim - _L2_SHARE * gpu.l2_bytes)
    return tiling.start_us + (beyond / _BYTES_PER_US if tiling.waits else 0.0)


def _apart(shape: Shape, other: Shape) -> float:
    """Octaves between two shapes in all their queries, and in keys."""
    rows = shape.batch * shape.heads * shape.seqlen_q
    other_rows = other.batch * other.heads * other.seqlen_q
    return abs(math.log2(rows / other_rows)) + abs(math.log2(shape.seqlen_k / other.seqlen_k))


def octaves(shape: Shape, other: Shape, sm_count: int) -> float:
    """How far a shape is from another: factors of two in tiles of queries, in queries, in keys.

    Tiles that leave SMs idle count as one for each SM, since the idle ones change nothing.
    """
    tiles, other_tiles = (
        max(sm_count, each.batch * each.heads * ceil_div(each.seqlen_q, 64))
        for each in (shape, other)
    )
    return (
        abs(math.log2(tiles / other_tiles))
        + abs(math.log2(shape.seqlen_q / other.seqlen_q))
        + abs(math.log2(shape.seqlen_k / other.seqlen_k))
    )
