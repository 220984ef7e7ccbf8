"""How long a kernel takes on a shape where it was not timed, from the shapes where it was.

A kernel's blocks each visit some tiles of keys. The busiest SM decides the time, so a time is

    START_US + (work of the busiest SM) x (time of a unit of work),

and the last factor is what the kernel took where it was timed, the near shapes counting most. The
constants are those that predict the recorded runs of an H100 and an H200 best, each shape from the
others (benchmarks/dispatch.py); which kernel is fast, and how fast, comes from the runs alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from .launch import busiest_turns, ceil_div, heads_together
from .table import Kernel, Shape

START_US, SDPA_START_US = 1.0, 4.0
"""Time of a launch and of all else that does not grow with the work."""
BLOCK_TILES, BLOCK_KEYS = 1.0, 150.0
"""Work of a block besides its tiles: so many tiles, and as many more as hold so many keys."""
ALONE, TWO_OF_THREE = 0.7, 0.7
"""Speed of an SM that holds fewer blocks than it has room for: one of two, two of three."""
TAIL_ORDERED, TAIL = 0.2, 0.6
"""Share of the longest block by which SMs end apart: longest first, and in the order of heads."""
# A shape this much further off, in octaves, counts 1/e as much.
_FADES = 1.0
# Tiles of queries that are looked at one by one; of more, the mean is taken from the ends.
_MOST_TILES = 4096


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a kernel cuts a call. shares: blocks and warpgroups that share a row's keys.

    turns: blocks that take turns at all tiles; 0 if each has one.
    """

    block_m: int
    block_n: int
    shares: int
    splits: int
    blocks_per_sm: int
    ordered: bool
    turns: int
    two_launches: bool


SDPA = Tiling(128, 128, 1, 1, 1, True, 0, False)
"""PyTorch's own attention: the faster of cuDNN's and flash, both with tiles of about this size."""


def tiling(kernel: Kernel) -> Tiling:
    """What the time depends on, of all that is known of a kernel."""
    return Tiling(
        kernel.block_m,
        kernel.block_n,
        kernel.key_groups * kernel.splits,
        kernel.splits,
        kernel.blocks_per_sm,
        bool(kernel.order),
        kernel.persistent * kernel.blocks_per_sm,
        kernel.combines,
    )


@functools.lru_cache(maxsize=16384)
def work(tiling: Tiling, shape: Shape, sm_count: int) -> float:
    """Work of the busiest SM, in tiles of keys at the speed of an SM that is full of blocks."""
    heads = shape.batch * shape.heads
    tiles_m = ceil_div(shape.seqlen_q, tiling.block_m)
    visits = _visits(tiling, shape, tiles_m)
    extra = BLOCK_TILES + BLOCK_KEYS / tiling.block_n
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
    tail = 0.0 if tiling.turns else TAIL_ORDERED if tiling.ordered else TAIL
    return max(share + tail * longest, longest / _speed(1, tiling.blocks_per_sm))


def _visits(tiling: Tiling, shape: Shape, tiles_m: int) -> list[int]:
    """Tiles of keys that a block visits, for each tile of queries, the first ones first."""

    def visits(keys: int) -> int:
        return ceil_div(ceil_div(max(1, keys), tiling.block_n), tiling.shares)

    if not shape.causal or tiles_m == 1:
        return [visits(shape.seqlen_k)]
    before = shape.seqlen_k - shape.seqlen_q
    step = ceil_div(tiles_m, _MOST_TILES)
    ends = range(tiles_m, 0, -step)
    return [visits(min(shape.seqlen_k, before + n * tiling.block_m)) for n in ends][::-1]


def _speed(blocks: int, room: int) -> float:
    """Speed of an SM with so many blocks, of that of one that is full."""
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
    tiling: Tiling,
    timed: Iterable[tuple[Shape, float]],
    shape: Shape,
    sm_count: int,
    start_us: float = START_US,
) -> Prediction | None:
    """The time on a shape, from times in microseconds on others; None if there are none.

    All must be of one head_dim and mask.
    """
    weights = logs = 0.0
    found: list[tuple[float, Shape]] = []
    for other, time_us in timed:
        of_a_unit = max(time_us - start_us, 0.1 * time_us) / work(tiling, other, sm_count)
        weight = math.exp(-_FADES * _apart(shape, other))
        weights, logs = weights + weight, logs + weight * math.log(of_a_unit)
        found.append((octaves(shape, other, sm_count), other))
    if not found:
        return None
    far, nearest = min(found)
    time_us = start_us + work(tiling, shape, sm_count) * math.exp(logs / weights)
    return Prediction(time_us, nearest, far, len(found))


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
