"""Attention in TileLang: a kernel for each problem and config."""

import tilelang
import tilelang.language as T

DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
LOG2_E = 1.4426950408889634


def supports(problem):
    plain = problem.kind in ("full", "causal") and problem.op.name == "forward"
    own = problem.scores.kinds or problem.head_dim_v or problem.dtype not in DTYPES
    return (plain and not own) or "it serves full and causal forward calls in fp16 and bf16"


def build(*, problem, TILE_M=64, TILE_N=64, STAGES=2, THREADS=128):
    p = problem
    lengths = p.batch, p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.head_dim
    facts = p.causal, DTYPES[p.dtype], p.scale
    kernel = attention(*lengths, *facts, TILE_M, TILE_N, STAGES, THREADS)
    return lambda q, k, v, *, out: kernel(q, k, v, out)


@tilelang.jit
def attention(
    batch,
    heads,
    heads_kv,
    rows,
    keys,
    dim,
    causal,
    dtype,
    scale,
    tile_m,
    tile_n,
    stages,
    threads,
):
    nothing = -T.infinity("float")

    @T.prim_func
    def main(
        queries: T.Tensor((batch, heads, rows, dim), dtype),
        every_key: T.Tensor((batch, heads_kv, keys, dim), dtype),
        values: T.Tensor((batch, heads_kv, keys, dim), dtype),
        out: T.Tensor((batch, heads, rows, dim), dtype),
    ):
        with T.Kernel(T.ceildiv(rows, tile_m), heads, batch, threads=threads) as (bm, h, b):
            q = T.alloc_shared((tile_m, dim), dtype)
            k = T.alloc_shared((tile_n, dim), dtype)
            v = T.alloc_shared((tile_n, dim), dtype)
            s = T.alloc_fragment((tile_m, tile_n), "float")
            p = T.alloc_fragment((tile_m, tile_n), dtype)
            acc = T.alloc_fragment((tile_m, dim), "float")
            top = T.alloc_fragment((tile_m,), "float")
            before = T.alloc_fragment((tile_m,), "float")
            fade = T.alloc_fragment((tile_m,), "float")
            part = T.alloc_fragment((tile_m,), "float")
            total = T.alloc_fragment((tile_m,), "float")
            hk = h // (heads // heads_kv)
            T.copy(queries[b, h, bm * tile_m : (bm + 1) * tile_m, :], q)
            T.fill(acc, 0)
            T.fill(total, 0)
            T.fill(top, nothing)
            last = T.min(keys, (bm + 1) * tile_m + keys - rows) if causal else keys
            for n in T.Pipelined(T.ceildiv(T.max(last, 1), tile_n), num_stages=stages):
                T.copy(every_key[b, hk, n * tile_n : (n + 1) * tile_n, :], k)
                T.copy(values[b, hk, n * tile_n : (n + 1) * tile_n, :], v)
                T.clear(s)
                T.gemm(q, k, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                for i, j in T.Parallel(tile_m, tile_n):
                    key = n * tile_n + j
                    sees = key < keys
                    if causal:
                        sees = T.And(sees, key <= bm * tile_m + i + keys - rows)
                    s[i, j] = T.if_then_else(sees, s[i, j] * scale * LOG2_E, nothing)
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for i in T.Parallel(tile_m):
                    # A row that has seen no key yet has no maximum.
                    faded = T.exp2(before[i] - top[i])
                    fade[i] = T.if_then_else(before[i] == nothing, 0.0, faded)
                for i, j in T.Parallel(tile_m, tile_n):
                    weight = T.exp2(s[i, j] - top[i])
                    s[i, j] = T.if_then_else(s[i, j] == nothing, 0.0, weight)
                T.reduce_sum(s, part, dim=1)
                for i in T.Parallel(tile_m):
                    total[i] = total[i] * fade[i] + part[i]
                for i, j in T.Parallel(tile_m, dim):
                    acc[i, j] *= fade[i]
                T.copy(s, p)
                T.gemm(p, v, acc, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(tile_m, dim):
                acc[i, j] = T.if_then_else(total[i] > 0, acc[i, j] / total[i], 0.0)
            T.copy(acc, out[b, h, bm * tile_m : (bm + 1) * tile_m, :])

    return main
