"""What declarations of Hopper kernels share: tensor maps, register budgets, turns of blocks."""

from __future__ import annotations

import functools

from attnsweep.family.declare import TensorMap
from attnsweep.hardware import Arch
from attnsweep.problem import Problem, ceil_div

# A warp-specialised consumer may hold no more: setmaxnreg takes multiples of 8 up to 240 beside a
# producer that keeps 24.
_MOST_REGISTERS = 240


def panels(columns: int) -> int:
    """Panels of 64 16-bit columns: the 128 bytes that TMA swizzles and wgmma reads."""
    return ceil_div(columns, 64)


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
    """(heads, rows, columns) of a buffer. box: columns and rows that one copy moves.

    pitch: elements from row to row (default: the columns). swizzle_bytes: default: those of a row
    of the box.
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
    """Registers of every thread when so many blocks are launched on an SM."""
    warps = ceil_div(threads * blocks_per_sm, 128)  # of the fullest quarter of the SM
    return min(255, arch.registers_per_sm // 4 // (32 * warps) // 8 * 8)


def registers_of_roles(entry: int, warpgroups: int, producer: int | None) -> int:
    """Registers of a consumer thread once a producer warpgroup has given its own away.

    entry: what every thread had at the launch; producer: what the producer's threads keep, None if
    they are too few to give any away.
    """
    if producer is None:
        return entry
    return min(_MOST_REGISTERS, (entry + (entry - producer) // warpgroups) // 8 * 8)


def heads_sharing_l2(p: Problem, block_m: int, block_n: int, blocks: int, l2_bytes: int) -> int:
    """Heads whose longest tiles come first, then their next, so that they share K and V in L2.

    blocks: those that take turns at all tiles; 0 if each has one tile. l2_bytes: of K and V that
    blocks which run at the same time should share.
    """
    heads, group = p.batch * p.heads, p.heads // p.heads_kv
    fit = min(heads, max(1, l2_bytes * group // (4 * p.seqlen_k * p.head_dim)))
    if not blocks:
        return max(n for n in range(1, fit + 1) if heads % n == 0)
    # A tile of queries costs its tiles of keys, and as much as one and a half of them on top.
    rows = range(ceil_div(p.seqlen_q, block_m) * block_m, 0, -block_m)
    keys = [p.seqlen_k - max(0, p.seqlen_q - row) if p.causal else p.seqlen_k for row in rows]
    costs = tuple(2 * ceil_div(max(0, seen), block_n) + 3 for seen in keys)
    return even_turns(heads, fit, costs, blocks)


@functools.lru_cache(maxsize=4096)
def even_turns(heads: int, fit: int, costs: tuple[int, ...], blocks: int) -> int:
    """The count of heads together, from fit / 2 to fit, that leaves the busiest block least to do.

    Blocks take turns from the first on, and back. costs: those of the tiles of queries of one head,
    in the order in which they are dealt. Turns are even over two turns of one group of heads, but
    not over two that have the end of one group and the beginning of the next: for
    (16,16,1024,128) causal the busiest of 132 blocks has 19 % too much with 64 heads together, and
    1 % with 33.
    """

    def most(together: int) -> int:
        groups = (min(together, heads - first) for first in range(0, heads, together))
        load = [0] * blocks
        for item, cost in enumerate(cost for n in groups for cost in costs for _ in range(n)):
            turn, block = divmod(item, blocks)
            load[blocks - 1 - block if turn % 2 else block] += cost
        return max(load)

    if len(set(costs)) == 1:
        return fit
    return min(range(fit, (fit - 1) // 2, -1), key=most)
