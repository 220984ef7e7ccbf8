"""Which kernel of flash_fwd_fp8_wgmma serves an FP8 shape, and how it is launched.

The declaration of the family says the same for a sweep; a test holds that both agree.
"""

from __future__ import annotations

from typing import NamedTuple

from .cost_model import octaves
from .driver import Tensor
from .launch import (
    L2_BYTES,
    LOG2E,
    Call,
    Map,
    Pointer,
    beyond_limits,
    ceil_div,
    heads_together,
    pairs,
)
from .table import Fp8Gpu, Fp8Kernel, Shape

SCALE_BLOCK = 128
"""Keys that share a scale of k and of v in e4m3_block; the last block may have fewer."""
BLOCK, HEADS, TENSOR = "e4m3_block", "e4m3", "e4m3_tensor"
"""Dtypes of a Shape: a scale of each SCALE_BLOCK keys, of each key head, of each tensor."""


class Choice(NamedTuple):
    """The kernel that serves a shape. code: a short name of the reason, of few."""

    kernel: Fp8Kernel
    code: str
    reason: str


def choose(gpu: Fp8Gpu, shape: Shape) -> Choice | str:
    """The kernel for a shape, or why there is none.

    A tuned shape gets its winner. Any other gets the winner of the nearest shape of its head_dim,
    mask and kind of scales that the family's rules allow to run there, and if there is none, a
    spare kernel. Scales of heads and of tensors are of one kind: their machine code is the same.
    """
    kind = (shape.head_dim, shape.causal, shape.dtype == BLOCK)
    known = [winner for winner in gpu.winners if _kind(winner.kernel) == kind]
    if not known:
        tuned = sorted({_named(*_kind(winner.kernel)) for winner in gpu.winners})
        return f"no FP8 shape with {_named(*kind)} was tuned; the package has {'; '.join(tuned)}"
    near = sorted(
        (octaves(shape, winner.shape, gpu.key.sm_count), winner.shape.dtype != shape.dtype, number)
        for number, winner in enumerate(known)
    )
    for _, _, number in near:
        winner = known[number]
        if winner.shape._replace(dtype=shape.dtype) == shape:
            return Choice(winner.kernel, "tuned", f"this shape was tuned, {winner.time_us:.4g} µs")
    for far, _, number in near:
        winner = known[number]
        if refused_by(winner.kernel, shape) is None:
            why = f"won {winner.shape.label}, the nearest whose kernel may run ({far:.1f} octaves)"
            return Choice(winner.kernel, "near", why)
    for kernel in gpu.spare:
        if _kind(kernel) == kind and refused_by(kernel, shape) is None:
            return Choice(kernel, "spare", "no winner may run here; this kernel was not timed")
    return f"no FP8 kernel of the package may run {shape.label}"


def _kind(kernel: Fp8Kernel) -> tuple[int, bool, bool]:
    return (kernel.head_dim, kernel.causal, kernel.scale_block > 0)


def _named(head_dim: int, causal: bool, blocks: bool) -> str:
    by = f"each {SCALE_BLOCK} keys" if blocks else "tensors or heads"
    return f"head_dim {head_dim}, {'causal' if causal else 'full'}, scales of {by}"


def scale_shapes(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Shapes of q_scale, k_scale and v_scale as a kernel reads them, float32 and contiguous."""
    of_heads = (shape.batch, shape.heads_kv)
    blocks = (ceil_div(shape.seqlen_k, SCALE_BLOCK),) if shape.dtype == BLOCK else ()
    return (of_heads, (*of_heads, *blocks), (*of_heads, *blocks))


def tensors(shape: Shape) -> dict[str, Tensor]:
    """q, k, v and o, contiguous, as tensor maps see them: bytes in pairs, batches of heads as one.

    q, k and v are (batch · heads, seqlen, head_dim / 2), o (batch · heads, seqlen_q, head_dim).
    """

    def of(heads: int, rows: int, columns: int) -> Tensor:
        return Tensor((shape.batch * heads, rows, columns), (rows * columns, columns, 1))

    keys = of(shape.heads_kv, shape.seqlen_k, shape.head_dim // 2)
    return {
        "q": of(shape.heads, shape.seqlen_q, shape.head_dim // 2),
        "k": keys,
        "v": keys,
        "o": of(shape.heads, shape.seqlen_q, shape.head_dim),
    }


def call(kernel: Fp8Kernel, shape: Shape, scale: float) -> Call:
    """The launch of an attention call, on tensors as `tensors` has them. scale: of the scores."""
    heads = shape.batch * shape.heads
    tiles_m = ceil_div(shape.seqlen_q, kernel.block_m)
    turns = kernel.persistent * kernel.blocks_per_sm
    # Numbers have one byte, so that twice as many fit.
    together = heads_together(shape, kernel.block_m, kernel.block_n, turns, 2 * L2_BYTES)
    grid = (tiles_m, heads, 1)
    if kernel.persistent:
        grid = (min(turns, tiles_m * heads), 1, 1)
    elif kernel.order:
        grid = (together, tiles_m, heads // together)
    pairs_of_row = (128 if kernel.head_dim % 128 == 0 else 64) // 2
    keys = (pairs_of_row, kernel.block_n)
    maps = (Map("q", (pairs_of_row, 64)), Map("k", keys), Map("v", keys), Map("o", (64, 16)))
    scales = (Pointer("q_scale"), Pointer("k_scale"), Pointer("v_scale"))
    sizes = (heads, shape.heads // shape.heads_kv, together, shape.seqlen_q, shape.seqlen_k)
    args = (*maps, *scales, Pointer(""), *sizes, scale * LOG2E)  # no log-sum-exp
    return Call("fwd", grid, kernel.threads, kernel.smem_bytes, args)


def refused_by(kernel: Fp8Kernel, shape: Shape) -> str | None:
    """Name of the family's rule that a shape breaks for a kernel, or None.

    Only rules that depend on more of the shape than head_dim, scales and mask.
    """
    tiles = shape.batch * shape.heads * ceil_div(shape.seqlen_q, kernel.block_m)
    long_q, long_k = max(64, shape.seqlen_q), max(64, shape.seqlen_k)
    most_stages = max(2, ceil_div(shape.seqlen_k, kernel.block_n))
    lengths_differ = shape.causal and shape.seqlen_q > kernel.block_m
    flops = 4 * shape.head_dim * shape.batch * shape.heads * pairs(shape)
    rules = {
        "no_idle_tile": kernel.block_m < 2 * long_q
        and kernel.block_n < 2 * long_k
        and kernel.v_stages <= kernel.num_stages <= most_stages,
        "block_order": lengths_differ
        if kernel.order
        else not (lengths_differ and kernel.persistent),
        "turns_of_blocks": tiles >= 2 * kernel.persistent * kernel.blocks_per_sm,
        "short_calls": kernel.pdl == 0 or flops < 2e11,
    }
    broken = next((name for name, holds in rules.items() if not holds), None)
    return broken or beyond_limits([call(kernel, shape, 1.0).grid])
