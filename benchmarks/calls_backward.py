"""Gradients of attention in Triton, of one autotuned launch: some blocks make dK and dV, the others dQ.

One of the kernels of calls_reach.py: full or causal, grouped heads, any lengths, head_dim a power of two.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
CONFIGS = [
    triton.Config({"BLOCK": block, "STEP": step}, num_warps=warps, num_stages=stages)
    for block, step, warps in ((64, 32, 4), (64, 64, 4), (128, 32, 4), (128, 32, 8), (128, 64, 8))
    for stages in (1, 2)
]


@triton.jit
def loaded(of, head, at, seqlen, D: tl.constexpr):
    """Rows of a head of a tensor, and zeros beyond the last."""
    each = at[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(of + head * seqlen * D + each, mask=at[:, None] < seqlen, other=0.0)


@triton.jit
def stored(to, head, at, seqlen, made, D: tl.constexpr):
    """Write rows of a head of a tensor."""
    each = at[:, None] * D + tl.arange(0, D)[None, :]
    place = to + head * seqlen * D + each
    tl.store(place, made.to(to.dtype.element_ty), mask=at[:, None] < seqlen)


@triton.jit
def seen_by(row, key, seqlen_q, seqlen_k, CAUSAL: tl.constexpr):
    """Pairs of a query and a key that are there, and that the mask leaves."""
    seen = (key[None, :] < seqlen_k) & (row[:, None] < seqlen_q)
    if CAUSAL:
        seen = seen & (key[None, :] <= row[:, None] + seqlen_k - seqlen_q)
    return seen


@triton.jit
def step(x, y, z, of_do, lse, delta, seen, scale):
    """Probabilities of a tile, and gradients of its scores."""
    p = tl.where(seen, tl.exp2((tl.dot(x, tl.trans(y)) * scale - lse[:, None]) * LOG2E), 0.0)
    return p, p * (tl.dot(of_do, tl.trans(z)) - delta[:, None]) * scale


@triton.jit
def sums(o, do, delta, seqlen_q, D: tl.constexpr, ROWS: tl.constexpr):
    """The sum of o times dO of each row."""
    head, at = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = loaded(o, head, at, seqlen_q, D).to(tl.float32) * loaded(do, head, at, seqlen_q, D).to(tl.float32)
    tl.store(delta + head * seqlen_q + at, tl.sum(own, 1), mask=at < seqlen_q)


@triton.autotune(CONFIGS, key=["group", "seqlen_q", "seqlen_k", "D", "CAUSAL"])
@triton.jit
def attend_backward(
    q,
    k,
    v,
    do,
    lse,
    delta,
    dq,
    dk,
    dv,
    scale,
    group,
    seqlen_q,
    seqlen_k,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """A tile of keys, or, of the blocks behind them, of queries, of one head of k and v."""
    tile, head_kv, off = tl.program_id(0), tl.program_id(1), seqlen_k - seqlen_q
    of_keys = tl.cdiv(seqlen_k, BLOCK)
    if tile < of_keys:
        first = tile * BLOCK
        key = first + tl.arange(0, BLOCK)
        y, z = loaded(k, head_kv, key, seqlen_k, D), loaded(v, head_kv, key, seqlen_k, D)
        of_k, of_v = tl.zeros([BLOCK, D], tl.float32), tl.zeros([BLOCK, D], tl.float32)
        begin = 0
        if CAUSAL:
            begin = tl.maximum(first - off, 0) // STEP * STEP
        for head in range(head_kv * group, (head_kv + 1) * group):
            for start in range(begin, seqlen_q, STEP):
                row = start + tl.arange(0, STEP)
                x, of_do = loaded(q, head, row, seqlen_q, D), loaded(do, head, row, seqlen_q, D)
                of_lse = tl.load(lse + head * seqlen_q + row, mask=row < seqlen_q, other=0.0)
                own = tl.load(delta + head * seqlen_q + row, mask=row < seqlen_q, other=0.0)
                seen = seen_by(row, key, seqlen_q, seqlen_k, CAUSAL)
                p, ds = step(x, y, z, of_do, of_lse, own, seen, scale)
                of_v = tl.dot(tl.trans(p.to(x.dtype)), of_do, of_v)
                of_k = tl.dot(tl.trans(ds.to(x.dtype)), x, of_k)
        stored(dk, head_kv, key, seqlen_k, of_k, D)
        stored(dv, head_kv, key, seqlen_k, of_v, D)
    else:
        of_head = tl.cdiv(seqlen_q, BLOCK)
        head, first = head_kv * group + (tile - of_keys) // of_head, (tile - of_keys) % of_head * BLOCK
        row = first + tl.arange(0, BLOCK)
        x, of_do = loaded(q, head, row, seqlen_q, D), loaded(do, head, row, seqlen_q, D)
        of_lse = tl.load(lse + head * seqlen_q + row, mask=row < seqlen_q, other=0.0)
        own = tl.load(delta + head * seqlen_q + row, mask=row < seqlen_q, other=0.0)
        of_q = tl.zeros([BLOCK, D], tl.float32)
        end = seqlen_k
        if CAUSAL:
            end = tl.minimum(seqlen_k, first + BLOCK + off)
        for start in range(0, end, STEP):
            key = start + tl.arange(0, STEP)
            y, z = loaded(k, head_kv, key, seqlen_k, D), loaded(v, head_kv, key, seqlen_k, D)
            seen = seen_by(row, key, seqlen_q, seqlen_k, CAUSAL)
            _, ds = step(x, y, z, of_do, of_lse, own, seen, scale)
            of_q = tl.dot(ds.to(y.dtype), y, of_q)
        stored(dq, head, row, seqlen_q, of_q, D)


def supports(problem: Any) -> bool | str:
    """Tiles have powers of two."""
    able = problem.kind in ("full", "causal") and not problem.head_dim_v and not problem.scores.kinds
    if not able or problem.dtype not in ("fp16", "bf16") or problem.op.name != "backward":
        return "full and causal backwards in 16 bits only"
    return problem.head_dim in (16, 32, 64, 128) or "head_dim 16, 32, 64 or 128 only"


def gradients(
    q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any, causal: bool = False, sm_scale: float | None = None
) -> Any:
    """The gradients of contiguous q, k and v, (batch, heads, seqlen, head_dim); k and v may have fewer heads."""
    (batch, heads, seqlen_q, head_dim), (heads_kv, seqlen_k) = q.shape, k.shape[1:3]
    made, delta = tuple(x.new_empty(x.shape) for x in (q, k, v)), lse.new_empty(lse.shape)
    sums[(triton.cdiv(seqlen_q, 64), batch * heads)](o, do, delta, seqlen_q, D=head_dim, ROWS=64)
    scale, group = head_dim**-0.5 if sm_scale is None else sm_scale, heads // heads_kv

    def grid(c: Any) -> tuple[int, int]:
        tiles = triton.cdiv(seqlen_k, c["BLOCK"]) + group * triton.cdiv(seqlen_q, c["BLOCK"])
        return tiles, batch * heads_kv

    attend_backward[grid](
        *(q, k, v, do, lse, delta, *made, scale, group, seqlen_q, seqlen_k), D=head_dim, CAUSAL=causal
    )
    return made
