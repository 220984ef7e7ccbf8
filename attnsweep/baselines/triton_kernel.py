"""The baseline `triton_flash`: a plain fused forward in Triton, in each of `CONFIGS`.

A user without CUDA C++ would write it in an afternoon, and it is a strong baseline on small
problems. `baselines` times all configs on the very problem and takes the fastest. Only `baselines`
imports this, and only where Triton is installed.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton
import triton.language as tl

from attnsweep.core.problem import LOG2E

# Compiling one takes about 0.7 s of a core, side by side in threads. The code does not depend on
# batch, heads or sequence length, and Triton keeps it on disk, where a later problem finds it.
CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
    for m, n, warps in (
        *((32, 64, 4), (64, 32, 4), (64, 64, 4), (64, 128, 4), (64, 128, 8)),
        *((128, 32, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8)),
    )
    for stages in (2, 3, 4)
]
_MOST_THREADS = 16


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
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        if MASKED:
            seen = keys[None, :] < seqlen_k
            if CAUSAL:
                seen = seen & (keys[None, :] <= rows[:, None] + seqlen_k - seqlen_q)
            scores = tl.where(seen, scores, float("-inf"))
        grown = tl.maximum(largest, tl.max(scores, 1))
        p = tl.exp2(scores - grown[:, None])
        shrink = tl.exp2(largest - grown)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc)
        largest = grown
    return acc, total, largest


@triton.jit
def _forward(
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
    """One tile of queries of one head."""
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
        whole = tl.minimum(whole, (first + 1) // BLOCK_N * BLOCK_N)
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
    tl.store(o_ptr + at, (acc / total[:, None]).to(o_ptr.dtype.element_ty), mask=own)


def forward(
    q: Any, k: Any, v: Any, out: Any, scale: float, *, causal: bool, config: triton.Config
) -> Any:
    """Write attention of contiguous torch tensors (batch, heads, seqlen, head_dim) to `out`.

    config: one of CONFIGS. Raises what Triton raises if it does not fit the card.
    """
    batch, heads, seqlen_q, _ = q.shape
    grid = (triton.cdiv(seqlen_q, config.kwargs["BLOCK_M"]), batch * heads)
    _forward[grid](
        *(q, k, v, out, scale * LOG2E, heads // k.shape[1], seqlen_q, k.shape[2]),
        **_constants(q.shape[3], causal, config),
    )
    return out


def compile_all(dtype: Any, q: Sequence[int], k: Sequence[int], *, causal: bool) -> None:
    """Compile every config for q and k of these shapes in threads, as far as Triton can.

    Older Triton cannot; then each config is compiled when it is first called, which takes longer.
    A config that does not compile says so when it is called. Their common launcher, for which some
    versions of Triton run a C compiler, is made too.
    """
    try:
        from triton import AsyncCompileMode
    except ImportError:
        return
    heads, seqlen_q, head_dim = q[1:]
    arguments = (*[dtype] * 4, 1 / math.sqrt(2), heads // k[1], seqlen_q, k[2])
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    made: list[Any] = []
    with (
        contextlib.suppress(Exception),
        ThreadPoolExecutor(threads) as pool,
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        for config in CONFIGS:
            constants = _constants(head_dim, causal, config)
            made.append(_forward.warmup(*arguments, grid=(1,), **constants))
    for kernel in made:
        with contextlib.suppress(Exception):  # also where a config did not compile
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
            break


def _constants(head_dim: int, causal: bool, config: triton.Config) -> dict[str, Any]:
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),  # tl.dot takes no fewer
        "CAUSAL": causal,
        **config.kwargs,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
