"""Predicts a kernel's time on a shape from the shapes where it was timed.

A kernel's blocks each visit some tiles of keys. The busiest SM decides how long they compute, and
the bytes that do not stay in the L2 how long memory takes. Each hides a part of the other:

    time = launches + sqrt(computing^2 + memory^2),
    computing = (work of the busiest SM) x (time of a unit of work),

and the last factor is what the kernel took where it was timed, the near shapes counting most, and
those least where memory took most of the time. The constants are those that predict the recorded
runs best, each shape from the others (benchmarks/dispatch.py); which kernel is fast, and how fast,
comes from the runs alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from attnsweep.core.layouts import DENSE
from attnsweep.core.masks import FULL
from attnsweep.core.ops import BACKWARD, FORWARD, Op
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.family.family import Config
from attnsweep.family.hopper import busiest_turns, heads_that_fit

from .families import WGMMA, WGMMA_BACKWARD, WIDE
from .table import CardCapacity, CompiledKernel

FEW_QUERIES = 64
"""Fewer queries than this fill no tile. Their times say nothing of more, nor the reverse."""
ALONE, TWO_OF_THREE = 0.75, 0.85
"""Speed of an SM that holds fewer blocks than it has room for: one of two, two of three."""
# The share of the L2 that keeps inputs and outputs from one call to the next.
_L2_SHARE = 0.2
# The rate of the L2, where splits of the keys leave parts of the output for the second launch.
_L2_BYTES_PER_US = 5e6
# The least share of the memory's peak rate that calls of few queries reach.
_OF_MEMORY_FEW = 0.92
# The least share of a time, after the launches, that is taken for computing.
_LEAST_COMPUTING = 0.3
# A unit of work that is off the median of all shapes by more than e to the power of this counts as
# off by so much: a time that is wrong, such as one of cuDNN's that a busy host made too long, then
# spoils no prediction of a shape beside it.
_MOST_OFF = 0.2
# The share of the blocks that fit an H100 which fit it as clusters of 4 or 8: with 73 % of them a
# call takes as long as without clusters, with 97 % 1.1 to 1.7 times as long.
_FOR_CLUSTERS = 7 / 8
# A shape that is one octave off counts e to the power of this less.
_FADES = 2.0
_MANY_TILES = 16
# Tiles of queries that are looked at one by one; of more, every second, third and so on.
_MOST_TILES = 4096
# PyTorch's flash backend divides the keys of few blocks among all SMs. In units of `work`: what
# that costs besides, and each tile of 64 queries and 128 keys, which its kernel takes longer for.
_DIVIDED, _DIVIDED_TILE = 6.0, 2.0
# Without a causal mask, PyTorch's own attention takes longer for every tile of keys if the last one
# is not whole: as long as if each head had this many more columns. With this, the expected gain of
# shapes drawn at random is off by 2.8 % at the median, and without by 4.6 % (benchmarks/dispatch.py
# on runs of an H100).
_MASKED_COLUMNS = 8.0


@dataclass(frozen=True, slots=True)
class Tiling:
    """A kernel's tiles, and all else that its time depends on.

    shares: blocks and warpgroups that share a row's keys. turns: blocks that take turns at all
    tiles; 0 if each has one. ordered: whether the longest blocks of all heads start first.
    block_keys: work of a block besides its tiles, in keys. tail: share of the longest block by
    which SMs end apart, if blocks differ. start_us: of the launches, and of all else that does
    not grow. of_memory: the share of the memory's peak rate
    that it reaches. parts: of the output, in float32, that a second launch joins.
    divides: whether few blocks may be divided as PyTorch does it. packs: the most queries with
    which a tile has those of all heads of a group. masks: whether a last tile of keys that is not
    whole makes all of them take longer. clustered: whether the splits of a tile are a cluster.
    """

    block_m: int
    block_n: int
    shares: int
    splits: int
    blocks_per_sm: int
    turns: int
    ordered: bool
    block_keys: float
    tail: float
    start_us: float
    of_memory: float
    parts: int = 0
    divides: bool = False
    packs: int = 0
    masks: bool = False
    clustered: bool = False


SDPA_BACKWARD = Tiling(128, 128, 1, 1, 1, 0, True, 100.0, 0.2, 8.0, 0.95)
"""PyTorch's own backward. Blocks are of keys, and visit tiles of queries.

These numbers, and those of our backward in `tiling`, are assumed. Gains of 21 recorded problems,
each predicted from the others, are off by 2.5 % at the median, 10 % at most (benchmarks/dispatch.py
on an H100's runs).
"""
SDPA = Tiling(
    *(128, 128, 1, 1, 1, 0, False, 100.0, 0.5, 3.75, 0.95), divides=True, packs=1, masks=True
)
"""PyTorch's own attention: the faster of cuDNN's and flash, both with tiles of about this size.

Both pack the heads of a group if there is one query: with 4, cuDNN's takes 4 times as long.
"""


def tiling(kernel: CompiledKernel) -> Tiling:
    """The tiling of a kernel."""
    return tiling_of(kernel.declaration, kernel.values)


@functools.cache
def tiling_of(declaration: Any, c: Config) -> Tiling:
    """`tiling`, of a config of a family's declaration."""
    if declaration is WGMMA_BACKWARD:
        keys, alone = 64 * c.KV_WARPGROUPS, c.BLOCKS_PER_SM == 1
        extra = 150.0 if alone else 90.0
        sizes = (keys, c.BLOCK_M, 1, 1, c.BLOCKS_PER_SM, 0, True, extra)
        return Tiling(*sizes, tail=0.2, start_us=5.0, of_memory=0.78)
    if declaration is WIDE:
        shares = (c.SPLITS, c.SPLITS)
        return Tiling(
            *(64, c.BLOCK_N, *shares, 1, 0, c.ORDER > 0, 150.0),
            tail=0.2 if c.ORDER else 0.8,
            start_us=1.6 * (2 if c.SPLITS > 1 else 1),
            of_memory=0.78,
            parts=c.SPLITS if c.SPLITS > 1 else 0,
            packs=(FEW_QUERIES - 1) * c.PACK_GQA,
        )
    combines = WGMMA.combines(c)
    alone = c.BLOCKS_PER_SM == 1 and not c.PERSISTENT  # nothing hides its first loads
    return Tiling(
        WGMMA.block_m(c),
        c.BLOCK_N,
        c.KEY_GROUPS * c.SPLITS,
        c.SPLITS,
        c.BLOCKS_PER_SM,
        c.PERSISTENT * c.BLOCKS_PER_SM,
        c.ORDER > 0,
        block_keys=150.0 if alone else 90.0,
        tail=0.2 if c.ORDER else 0.8,
        start_us=1.6 * (2 if combines else 1),
        of_memory=0.78,
        parts=c.SPLITS if combines else 0,
        packs=(FEW_QUERIES - 1) * c.PACK_GQA,
        clustered=c.SPLIT_CLUSTER > 0,
    )


@functools.lru_cache(maxsize=4096)
def work(tiling: Tiling, problem: Problem, sm_count: int) -> float:
    """Work of the busiest SM, in tiles of keys at the speed of an SM that is full of blocks.

    Of a backward, whose blocks are of keys, in tiles of queries of all heads of a group.
    """
    return costs_of(problem).work(tiling, problem, sm_count)


def _work_of_backward(tiling: Tiling, problem: Problem, sm_count: int) -> float:
    of_keys = replace(
        problem,
        op=FORWARD,
        heads=problem.heads_kv,
        seqlen_q=problem.seqlen_k,
        seqlen_k=problem.seqlen_q,
    )
    return problem.heads // problem.heads_kv * work(tiling, of_keys, sm_count)


def _work_of_forward(tiling: Tiling, problem: Problem, sm_count: int) -> float:
    problem = as_cut(tiling, problem)
    if tiling.divides and problem.kind not in ("full", "causal", "packed"):  # no tile passed by
        problem = replace(problem, mask=FULL, layout=DENSE)
    visits = _visits(tiling, problem, ceil_div(problem.seqlen_q, tiling.block_m))
    least = _undivided(tiling, problem, visits, sm_count)
    if problem.layout != DENSE:  # as many fewer as pairs
        least *= max(1, problem.pairs) / replace(problem, layout=DENSE).pairs
    if tiling.divides:
        tiles = problem.batch * problem.heads * ceil_div(problem.seqlen_q, 64)
        share = tiles * math.fsum(visits) / len(visits) / sm_count
        least = min(least, _DIVIDED + _DIVIDED_TILE * share)
    if tiling.masks and problem.mask == FULL and problem.seqlen_k % tiling.block_n:
        least *= 1 + 2 * _MASKED_COLUMNS / sum(problem.head_dims)
    return least


class OpCosts(NamedTuple):
    """The costs of an op that predictions use. sdpa: how PyTorch's own cuts its calls.

    work: see `work`. passes: over the inputs and outputs of a forward, in memory. is_guessed:
    whether so much of it is assumed that a predicted gain must be larger.
    """

    sdpa: Tiling
    work: Callable[[Tiling, Problem, int], float]
    passes: int = 1
    is_guessed: bool = False


_COSTS: Mapping[Op, OpCosts] = {
    FORWARD: OpCosts(SDPA, _work_of_forward),
    BACKWARD: OpCosts(SDPA_BACKWARD, _work_of_backward, passes=2, is_guessed=True),
}


def costs_of(problem: Problem) -> OpCosts:
    """The costs of a problem's op."""
    return _COSTS[problem.op]


def as_cut(tiling: Tiling, problem: Problem) -> Problem:
    """The call as tiles are cut of it: queries that are packed are those of one head."""
    if problem.seqlen_q > tiling.packs or problem.heads == problem.heads_kv:
        return problem
    rows = problem.heads // problem.heads_kv * problem.seqlen_q
    return replace(problem, heads=problem.heads_kv, seqlen_q=rows, mask=FULL)


def _undivided(tiling: Tiling, problem: Problem, visits: list[int], sm_count: int) -> float:
    heads = problem.batch * problem.heads
    tiles_m = ceil_div(problem.seqlen_q, tiling.block_m)
    extra = tiling.block_keys / tiling.block_n
    longest, mean = max(visits) + extra, math.fsum(visits) / len(visits) + extra
    blocks, room = heads * tiles_m * tiling.splits, sm_count * tiling.blocks_per_sm
    if tiling.clustered:
        room = int(_FOR_CLUSTERS * room)
    share = blocks * mean / sm_count
    if longest == mean:
        waves, rest = divmod(blocks, room)
        if tiling.turns:
            return ceil_div(blocks, tiling.turns) * tiling.blocks_per_sm * longest
        last = ceil_div(rest, sm_count)
        whole = waves * tiling.blocks_per_sm * longest
        return whole + (last * longest / _speed(last, tiling.blocks_per_sm) if rest else 0.0)
    if sm_count < blocks <= room and not tiling.turns:
        return _side_by_side(tiling, [n + extra for n in reversed(visits)], heads, sm_count)
    if blocks <= room:
        full = _speed(ceil_div(blocks, sm_count), tiling.blocks_per_sm)
        return max(longest / _speed(1, tiling.blocks_per_sm), share / full)
    if tiling.turns and heads * tiles_m <= _MOST_TILES * 16:
        costs = tuple(round(8 * (n + extra)) for n in reversed(visits))
        # The launch takes the most even of all groups in this range.
        fit = heads_that_fit(problem, WGMMA.L2_BYTES)
        groups = range(fit, (fit - 1) // 2, -ceil_div(fit, 16))
        busiest = min(busiest_turns(heads, n, costs, tiling.turns) for n in groups)
        return busiest * tiling.blocks_per_sm / 8
    tail = 0.0 if tiling.turns else tiling.tail
    return max(share + tail * longest, longest / _speed(1, tiling.blocks_per_sm))


def _side_by_side(tiling: Tiling, costs: list[float], heads: int, sm_count: int) -> float:
    """Work of the busiest SM if all blocks start at once. costs: of a head's, the longest first.

    Blocks go to one SM after another. Those of one SM share it, and the longest ends alone there.
    """
    if tiling.ordered:
        blocks = [cost for cost in costs for _ in range(heads * tiling.splits)]
        return _shared(blocks[::sm_count], tiling.blocks_per_sm)  # no other SM has longer ones
    blocks = [cost for cost in costs for _ in range(tiling.splits)] * heads
    held = {tuple(sorted(blocks[sm::sm_count], reverse=True)) for sm in range(sm_count)}
    return max(_shared(costs, tiling.blocks_per_sm) for costs in held)


def _shared(costs: Sequence[float], room: int) -> float:
    """When an SM with room for some blocks ends those that it holds, the longest first."""
    shorter = (*costs[1:], 0.0)
    return math.fsum(
        (cost - less) * blocks / _speed(blocks, room)
        for blocks, (cost, less) in enumerate(zip(costs, shorter, strict=True), 1)
    )


def _visits(tiling: Tiling, problem: Problem, tiles_m: int) -> list[int]:
    """Tiles of keys that a block visits, for each tile of queries, the first ones first."""
    together = tiling.block_n * tiling.shares
    if problem.mask == FULL or tiles_m == 1:
        return [ceil_div(max(1, problem.seqlen_k), together)]
    low, high = problem.diagonals
    rows = range(tiles_m * tiling.block_m, 0, -ceil_div(tiles_m, _MOST_TILES) * tiling.block_m)
    seen = ((max(0, n - tiling.block_m + low), min(problem.seqlen_k, n + high)) for n in rows)
    return [ceil_div(max(1, end), together) - begin // together for begin, end in seen][::-1]


def _speed(blocks: int, room: int) -> float:
    """Speed of an SM that holds `blocks` blocks, relative to a full one, which holds `room`."""
    if blocks >= room:
        return 1.0
    return {(1, 2): ALONE, (2, 3): TWO_OF_THREE}.get((blocks, room), 0.6 * ALONE)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A time in microseconds. nearest: of the shapes that it comes from. octaves: to that one."""

    time_us: float
    nearest: Problem
    octaves: float
    shapes: int


class Near(NamedTuple):
    """How near a timed problem is: octaves, and how much its times count."""

    problem: Problem
    octaves: float
    weight: float


@dataclass(frozen=True, slots=True)
class Learned:
    """A kernel's fitted times on all its shapes.

    units: the number of a timed problem, the logarithm of a unit of work there in microseconds, at
    most _MOST_OFF off their median, and how far it can be trusted: computing's share of the time's
    square.
    """

    tiling: Tiling
    units: tuple[tuple[int, float, float], ...]

    def predict(
        self, problem: Problem, near: Sequence[Near], card: CardCapacity
    ) -> Prediction | None:
        """The time; None if none is known. near: of each timed problem, by its number."""
        if not self.units:
            return None
        weights = logs = 0.0
        for number, unit, trust in self.units:
            weight = trust * near[number].weight
            weights += weight
            logs += weight * unit
        far = min(near[number].octaves for number, _, _ in self.units)
        alike = [near[n].problem for n, _, _ in self.units if near[n].octaves == far]
        nearest = min(alike, key=lambda other: other.label)
        computing = work(self.tiling, problem, card.sm_count) * math.exp(logs / weights)
        time_us = _launches_us(self.tiling, problem) + math.hypot(
            computing, memory_us(self.tiling, problem, card)
        )
        return Prediction(time_us, nearest, far, len(self.units))


def learn(
    tiling: Tiling, timed: Iterable[tuple[int, Problem, float]], card: CardCapacity
) -> Learned:
    """Fit the cost model to timed problems of one head_dim and mask.

    timed: each one's number, the problem, and microseconds.
    """
    units = []
    for number, problem, time_us in timed:
        left = max(time_us - _launches_us(tiling, problem), 0.2 * time_us)
        memory = memory_us(tiling, problem, card)
        square = max(left**2 - memory**2, (_LEAST_COMPUTING * left) ** 2)
        unit = 0.5 * math.log(square) - math.log(work(tiling, problem, card.sm_count))
        units.append((number, unit, square / left**2))
    if len(units) > 2:  # of two, nobody knows which is wrong
        middle = sorted(unit for _, unit, _ in units)[len(units) // 2]
        low, high = middle - _MOST_OFF, middle + _MOST_OFF
        units = [(number, min(max(unit, low), high), trust) for number, unit, trust in units]
    return Learned(tiling, tuple(units))


def nearness(problem: Problem, others: Iterable[Problem], card: CardCapacity) -> tuple[Near, ...]:
    """How near each of other problems is, in their order."""
    return tuple(
        Near(
            other,
            octaves(problem, other, card.sm_count),
            math.exp(-_FADES * _apart(problem, other)),
        )
        for other in others
    )


def _launches_us(tiling: Tiling, problem: Problem) -> float:
    """Time that no computing hides: launches, and writing and reading the parts of an output."""
    elements = problem.batch * problem.heads * problem.seqlen_q * problem.value_dim
    return tiling.start_us + 8.0 * tiling.parts * elements / _L2_BYTES_PER_US


def memory_us(tiling: Tiling, problem: Problem, card: CardCapacity) -> float:
    """Time that the bytes beyond the L2 take: q, k, v and o, of two bytes an element.

    Of a backward also those of their gradients.
    """
    rows = problem.heads * problem.seqlen_q + problem.heads_kv * problem.seqlen_k
    rows *= costs_of(problem).passes
    beyond = 2.0 * problem.batch * rows * sum(problem.head_dims) - _L2_SHARE * card.l2_bytes
    reached = max(tiling.of_memory, _OF_MEMORY_FEW * (problem.seqlen_q < FEW_QUERIES))
    return max(0.0, beyond) / (reached * card.memory_bytes_per_us)


def _apart(problem: Problem, other: Problem) -> float:
    """Octaves between two shapes in all their queries, and in keys."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    other_rows = other.batch * other.heads * other.seqlen_q
    return abs(math.log2(rows / other_rows)) + abs(math.log2(problem.seqlen_k / other.seqlen_k))


def octaves(problem: Problem, other: Problem, sm_count: int) -> float:
    """How far a shape is from another: factors of two in tiles of queries, in queries, in keys.

    Tiles that leave SMs idle count as one for each SM, since the idle ones change nothing; beyond
    _MANY_TILES for each SM more of them only take as much longer.
    """
    tiles, other_tiles = (
        min(max(sm_count, tiles), _MANY_TILES * sm_count)
        for tiles in (
            each.batch * each.heads * ceil_div(each.seqlen_q, 64) for each in (problem, other)
        )
    )
    return (
        abs(math.log2(tiles / other_tiles))
        + abs(math.log2(problem.seqlen_q / other.seqlen_q))
        + abs(math.log2(problem.seqlen_k / other.seqlen_k))
    )
