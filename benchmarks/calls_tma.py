"""Attention in Triton whose loads and stores are of TMA descriptors, made on the host.

One of the kernels of calls_reach.py: full or causal, grouped heads, any lengths, head_dim a power of two.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

SHARED_BYTES = 227 * 1024  # of a block, on Hopper


def set_boxes(given: dict[str, Any]) -> None:
    """Give the descriptors the config's tiles."""
    for name, rows in (("q", "BLOCK_M"), ("k", "BLOCK_N"), ("v", "BLOCK_N"), ("o", "BLOCK_M")):
        given[name].block_shape = [1, given[rows], given["HEAD_DIM"]]


def fits(configs: Any, given: Any, HEAD_DIM: int, **_: Any) -> Any:
    """The configs whose tiles are no longer than the queries and fit in shared memory."""
    longest = max(64, triton.next_power_of_2(given["seqlen_q"]))

    def runs(config: Any) -> bool:
        m, n = config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"]
        return bool(m <= longest and 2 * HEAD_DIM * (m + 2 * n * config.num_stages) <= SHARED_BYTES)

    return [config for config in configs if runs(config)] or configs[:1]


CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages, pre_hook=set_boxes)
    for m, n, warps in ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8))
    for stages in (2, 3)
]


@triton.jit
def over_keys(
    acc,
    total,
    largest,
    x,
    k,
    v,
    head_kv,
    rows,
    begin,
    end,
    seqlen_q,
    seqlen_k,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Online softmax over keys begin .. end. MASKED: some rows do not see some of these keys."""
    for start in range(begin, end, BLOCK_N):
        y = k.load([head_kv, start, 0]).reshape(BLOCK_N, HEAD_DIM)
        scores = tl.dot(x, tl.trans(y)) * scale_log2
        if MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            seen = keys[None, :] < seqlen_k
            if CAUSAL:
                seen = seen & (keys[None, :] <= rows[:, None] + seqlen_k - seqlen_q)
            scores = tl.where(seen, scores, float("-inf"))
        grown = tl.maximum(largest, tl.max(scores, 1))
        off = grown
        if MASKED:  # a row that sees no key yet
            off = tl.where(grown == float("-inf"), 0.0, grown)
        p, shrink = tl.exp2(scores - off[:, None]), tl.exp2(largest - off)
        total = total * shrink + tl.sum(p, 1)
        z = v.load([head_kv, start, 0]).reshape(BLOCK_N, HEAD_DIM)
        acc = tl.dot(p.to(z.dtype), z, acc * shrink[:, None])
        largest = grown
    return acc, total, largest


@triton.autotune(
    CONFIGS, key=["group", "seqlen_q", "seqlen_k", "HEAD_DIM", "CAUSAL"], prune_configs_by={"early_config_prune": fits}
)
@triton.jit
def attend(
    q,
    k,
    v,
    o,
    scale_log2,
    group,
    seqlen_q,
    seqlen_k,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of queries of one head."""
    tile, head = tl.program_id(0), tl.program_id(1)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile  # the longest tiles first
    first = tile * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    x = q.load([head, first, 0]).reshape(BLOCK_M, HEAD_DIM)
    end = seqlen_k
    whole = seqlen_k // BLOCK_N * BLOCK_N  # keys that every row sees, in whole tiles
    if CAUSAL:
        end = tl.minimum(seqlen_k, first + BLOCK_M + seqlen_k - seqlen_q)
        whole = tl.minimum(whole, tl.maximum(first + 1 + seqlen_k - seqlen_q, 0) // BLOCK_N * BLOCK_N)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    total, largest = tl.zeros([BLOCK_M], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32)
    # fmt: off
    acc, total, largest = over_keys(
        acc, total, largest, x, k, v, head // group, rows, 0, whole, seqlen_q, seqlen_k, scale_log2,
        HEAD_DIM, CAUSAL, False, BLOCK_N,
    )
    acc, total, largest = over_keys(
        acc, total, largest, x, k, v, head // group, rows, whole, end, seqlen_q, seqlen_k, scale_log2,
        HEAD_DIM, CAUSAL, True, BLOCK_N,
    )
    # fmt: on
    made = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a row without a key is 0
    o.store([head, first, 0], made.to(o.dtype).reshape(1, BLOCK_M, HEAD_DIM))


def supports(problem: Any) -> bool | str:
    """Descriptors have boxes of powers of two."""
    able = problem.kind in ("full", "causal") and not problem.head_dim_v and not problem.scores.kinds
    if not able or problem.dtype not in ("fp16", "bf16") or problem.op.name != "forward":
        return "full and causal forwards in 16 bits only"
    fits_boxes = 16 <= problem.head_dim <= 256 and problem.head_dim & (problem.head_dim - 1) == 0
    return fits_boxes or "head_dim 16, 32, 64, 128 or 256 only"


def attention(q: Any, k: Any, v: Any, causal: bool = False, sm_scale: float | None = None) -> Any:
    """Attention of contiguous tensors (batch, heads, seqlen, head_dim); k and v may have fewer heads."""
    o, (batch, heads, seqlen_q, head_dim) = q.new_empty(q.shape), q.shape
    scale = head_dim**-0.5 if sm_scale is None else sm_scale

    def described(tensor: Any) -> Any:  # its box is the config's, see set_boxes
        return TensorDescriptor.from_tensor(tensor.view(-1, *tensor.shape[2:]), [1, 16, head_dim])

    attend[lambda c: (triton.cdiv(seqlen_q, c["BLOCK_M"]), batch * heads)](
        *map(described, (q, k, v, o)),
        scale * 1.4426950408889634,
        heads // k.shape[1],
        seqlen_q,
        k.shape[2],
        HEAD_DIM=head_dim,
        CAUSAL=causal,
    )
    return o
