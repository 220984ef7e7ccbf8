"""Attention in CuTe DSL: a kernel for each problem and config.

A thread computes a row of the output, and a block's threads share tiles of keys and values. It
uses no tensor cores: it shows how a kernel is swept.
"""

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream
from cutlass.utils import SmemAllocator

DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16}
LOG2_E = 1.4426950408889634


def supports(problem):
    plain = problem.kind in ("full", "causal") and problem.op.name == "forward"
    own = problem.scores.kinds or problem.head_dim_v or problem.dtype not in DTYPES
    return (plain and not own) or "it serves full and causal forward calls in fp16 and bf16"


def build(*, problem, ROWS=128, KEYS=32):
    dtype, rows_first = DTYPES[problem.dtype], (3, 2, 1, 0)
    shapes = [problem.shape_of(name) for name in ("q", "k", "v", "o")]
    tensors = [make_fake_compact_tensor(dtype, each, stride_order=rows_first) for each in shapes]
    facts = problem.scale * LOG2_E, problem.causal, ROWS, KEYS
    compiled = cute.compile(launch, *tensors, *facts, make_fake_stream())

    def attention(q, k, v, *, out):
        stream = CUstream(torch.cuda.current_stream().cuda_stream)
        compiled(*map(from_dlpack, (q, k, v, out)), stream)

    return attention


@cute.jit
def launch(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    o: cute.Tensor,
    scale: cutlass.Constexpr,
    causal: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    keys: cutlass.Constexpr,
    stream: CUstream,
):
    batch, heads, seqlen_q, _ = q.shape
    grid, block = [cute.ceil_div(seqlen_q, rows), heads, batch], [rows, 1, 1]
    attend(q, k, v, o, scale, causal, rows, keys).launch(grid=grid, block=block, stream=stream)


@cute.kernel
def attend(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    o: cute.Tensor,
    scale: cutlass.Constexpr,
    causal: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    keys: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    block, head, item = cute.arch.block_idx()
    _, heads, seqlen_q, head_dim = q.shape
    _, heads_kv, seqlen_k, _ = k.shape
    shared = head // (heads // heads_kv)

    smem, tile_of = SmemAllocator(), cute.make_layout((keys, head_dim), stride=(head_dim, 1))
    k_tile = smem.allocate_tensor(q.element_type, tile_of, 16)
    v_tile = smem.allocate_tensor(q.element_type, tile_of, 16)
    x = cute.make_rmem_tensor(head_dim, cutlass.Float32)
    y = cute.make_rmem_tensor(head_dim, cutlass.Float32)

    row = block * rows + thread
    own = cutlass.min(row, seqlen_q - 1)  # what lies behind the end is computed, and not stored
    for d in cutlass.range_constexpr(head_dim):
        x[d] = q[item, head, own, d].to(cutlass.Float32) * scale
        y[d] = cutlass.Float32(0.0)
    top = cutlass.Float32(-cutlass.Float32.inf)
    total = cutlass.Float32(0.0)

    end = cutlass.Int32(seqlen_k)  # of the keys that a row of this block sees
    first_hidden = cutlass.Int32(seqlen_k)
    if cutlass.const_expr(causal):
        end = cutlass.min(end, (block + 1) * rows + seqlen_k - seqlen_q)
        first_hidden = cutlass.min(first_hidden, row + 1 + seqlen_k - seqlen_q)
    for tile in cutlass.range(cute.ceil_div(cutlass.max(end, 0), keys), unroll=1):
        for step in cutlass.range_constexpr(cute.ceil_div(keys * head_dim, rows)):
            at = step * rows + thread
            key = tile * keys + at // head_dim
            if at < keys * head_dim and key < seqlen_k:
                k_tile[at // head_dim, at % head_dim] = k[item, shared, key, at % head_dim]
                v_tile[at // head_dim, at % head_dim] = v[item, shared, key, at % head_dim]
        cute.arch.sync_threads()
        seen = cutlass.min(cutlass.max(first_hidden - tile * keys, 0), keys)
        for j in cutlass.range(seen, unroll=1):
            score = cutlass.Float32(0.0)
            for d in cutlass.range_constexpr(head_dim):
                score += x[d] * k_tile[j, d].to(cutlass.Float32)
            new = cutlass.max(top, score)
            fade = cute.math.exp2(top - new, fastmath=True)
            weight = cute.math.exp2(score - new, fastmath=True)
            total = total * fade + weight
            top = new
            for d in cutlass.range_constexpr(head_dim):
                y[d] = y[d] * fade + weight * v_tile[j, d].to(cutlass.Float32)
        cute.arch.sync_threads()

    if row < seqlen_q:
        factor = 1.0 / total if total > 0.0 else cutlass.Float32(0.0)
        for d in cutlass.range_constexpr(head_dim):
            o[item, head, row, d] = (y[d] * factor).to(q.element_type)
