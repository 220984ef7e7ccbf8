"""Attention in Triton: full or causal, grouped heads, any lengths, fp16 or bf16.

`attention` is a launcher as PyTorch programs have them, and all that attnsweep calls: it sweeps the
configs of the autotuner, those that `fits` leaves on a problem. Its baseline `triton_flash` is this
kernel too, the fastest of all configs. The file needs nothing of attnsweep's.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
    for m, n, warps in (
        *((32, 64, 4), (64, 32, 4), (64, 64, 4), (64, 128, 4), (64, 128, 8)),
        *((128, 32, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8)),
    )
    for stages in (2, 3, 4)
]
_SHARED_BYTES = 227 * 1024
"""What a block has at most on Hopper."""


def fits(configs: Any, given: Any, BLOCK_D: int, **_: Any) -> Any:
    """The configs whose tiles are no longer than the queries and fit in registers and memory."""
    longest = max(32, triton.next_power_of_2(given["seqlen_q"]))

    def runs(config: Any) -> bool:
        m, n = config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]
        registers = m * (BLOCK_D + n) // (32 * config.num_warps)  # of o and the scores, a thread
        shared = 2 * BLOCK_D * (m + 2 * n * config.num_stages)  # of q, k and v in 16 bits
        return bool(m <= longest and registers <= 160 and shared <= _SHARED_BYTES)

    return [config for config in configs if runs(config)] or configs[:1]


@triton.jit
def _keys(
    acc,
    total,
    largest,
    q,
    k_base,
    v_base,
    rows,
    begin,
    end,
    seqlen_q,
    seqlen_k,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over keys begin .. end. MASKED: some rows do not see some of these keys."""
    dims = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = (keys[:, None] < seqlen_k) & (dims[None, :] < HEAD_DIM)
        at = keys[:, None] * HEAD_DIM + dims[None, :]
        if MASKED or BLOCK_D > HEAD_DIM:
            k = tl.load(k_base + at, mask=inside, other=0.0)
            v = tl.load(v_base + at, mask=inside, other=0.0)
        else:
            k = tl.load(k_base + at)
            v = tl.load(v_base + at)
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            seen = keys[None, :] < seqlen_k
            if CAUSAL:
                seen = seen & (keys[None, :] <= rows[:, None] + seqlen_k - seqlen_q)
            scores = tl.where(seen, scores, float("-inf"))
        grown = tl.maximum(largest, tl.max(scores, 1) * scale_log2)
        off = grown
        if MASKED:  # a row that sees no key yet
            off = tl.where(grown == float("-inf"), 0.0, grown)
        p = tl.exp2(scores * scale_log2 - off[:, None])  # the scale costs nothing: one FMA
        shrink = tl.exp2(largest - off)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        largest = grown
    return acc, total, largest


@triton.autotune(
    CONFIGS,
    key=["group", "seqlen_q", "seqlen_k", "HEAD_DIM", "CAUSAL"],
    prune_configs_by={"early_config_prune": fits},
)
@triton.jit
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    scale_log2,
    group,
    seqlen_q,
    seqlen_k,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of queries of one head. scale_log2 is above 0."""
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile  # the longest tiles first
    head = tl.program_id(1).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    own = (rows[:, None] < seqlen_q) & (dims[None, :] < HEAD_DIM)
    at = head * seqlen_q * HEAD_DIM + rows[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + at, mask=own, other=0.0)
    k_base = k_ptr + head // group * seqlen_k * HEAD_DIM
    v_base = v_ptr + head // group * seqlen_k * HEAD_DIM
    end = seqlen_k
    whole = seqlen_k // BLOCK_N * BLOCK_N  # keys that every row sees, in whole tiles
    if CAUSAL:
        first = tile * BLOCK_M + seqlen_k - seqlen_q
        end = tl.minimum(seqlen_k, first + BLOCK_M)
        whole = tl.minimum(whole, tl.maximum(first + 1, 0) // BLOCK_N * BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # fmt: off
    acc, total, largest = _keys(
        acc, total, largest, q, k_base, v_base, rows, 0, whole, seqlen_q, seqlen_k, scale_log2,
        HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, False,
    )
    acc, total, largest = _keys(
        acc, total, largest, q, k_base, v_base, rows, whole, end, seqlen_q, seqlen_k, scale_log2,
        HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, True,
    )
    # fmt: on
    o = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a row without a key is 0
    tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=own)


def attention(q: Any, k: Any, v: Any, causal: bool = False, sm_scale: float | None = None) -> Any:
    """Attention of contiguous tensors (batch, heads, seqlen, head_dim).

    k and v may have fewer heads; a causal mask is aligned bottom-right.
    """
    o = q.new_empty(q.shape)
    grid, arguments, constants = call(q, k, v, o, causal, sm_scale)
    attend[grid](*arguments, **constants)
    return o


def call(q: Any, k: Any, v: Any, o: Any, causal: bool, sm_scale: float | None = None) -> Any:
    """The grid, by a config, the arguments and the constants of a launch that writes to `o`."""
    batch, heads, seqlen_q, head_dim = q.shape
    scale_log2 = (head_dim**-0.5 if sm_scale is None else sm_scale) * 1.4426950408889634
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),  # tl.dot takes no fewer
        "CAUSAL": causal,
    }
    arguments = (q, k, v, o, scale_log2, heads // k.shape[1], seqlen_q, k.shape[2])
    return lambda c: (triton.cdiv(seqlen_q, c["BLOCK_M"]), batch * heads), arguments, constants
