// flash_fwd_fp32_wide: fp32 attention with heads of 512 to 8192 columns and few queries and keys,
// sm_80 on. A head has too few rows to fill a GPU and too many columns for one block. So SLICES
// blocks share BLOCK_M queries of a head, and each owns a slice of the columns: it multiplies its
// slice of Q and K, the blocks add their partial scores in the order of the slices, and each
// multiplies P by its own slice of V. Every byte of K and V is read once for BLOCK_M queries, and
// no sum depends on which block is faster. SCORES cluster: one launch; the blocks are a cluster and
// exchange scores in distributed shared memory. SCORES workspace: two; the first writes partial
// scores, which every block of the second adds. q, o: (batch, heads, seqlen_q, HEAD_DIM); k, v:
// (batch, heads_kv, seqlen_k, HEAD_DIM), all fp32.
#include "common/ptx/cache.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/launch.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/softmax.cuh"
#include "flash_fwd_fp32_wide.cuh"

using namespace attn;

// ---- softmax ----
// One row by one warp: score(key) is the sum over all slices for a key and the next, put(key, p)
// takes the row's probabilities, zeros behind the last key it sees. `row_of_p` is room for the row,
// keys P_PITCH apart.
template <class Score, class Put>
__device__ __forceinline__ void softmax_row(float* row_of_p, int keys, int keys_used, float to_log2,
                                            Score score, Put put) {
    const int lane = threadIdx.x % 32;
    float largest = minus_infinity(), sum = 0.f;
#pragma unroll 1
    for (int key = lane * 2; key < keys; key += 64) {
        const float2 s = score(key);
        row_of_p[key * P_PITCH] = s.x, largest = fmaxf(largest, s.x);
        if (key + 1 < keys) row_of_p[(key + 1) * P_PITCH] = s.y, largest = fmaxf(largest, s.y);
    }
    __syncwarp();
    largest = row_reduce<32, true>(largest, nullptr);
#pragma unroll 1
    for (int key = lane; key < keys; key += 32) {
        // The difference is exact where p is near 1: it is scaled after, not before.
        const float p = exp2_approx((row_of_p[key * P_PITCH] - largest) * to_log2);
        row_of_p[key * P_PITCH] = p, sum += p;
    }
    const float inverse = __frcp_rn(row_reduce<32, false>(sum, nullptr));
#pragma unroll 1
    for (int key = lane; key < keys_used; key += 32)
        put(key, key < keys ? row_of_p[key * P_PITCH] * inverse : 0.f);
    __syncwarp();
}

// Shared memory: P by key; the scores of this slice; then the ring, later the scratch of both
// merges.
extern "C" __global__ void
#if STAGE_FWD && SLICES > 1
__cluster_dims__(SLICES, 1, 1)
#endif
    __launch_bounds__(THREADS, 1)
#if STAGE_FWD
        flash_fwd_fp32_wide(const float* __restrict__ q, const float* __restrict__ k,
                            const float* __restrict__ v, float* __restrict__ o, int heads,
                            int heads_kv, int seqlen_q, int seqlen_k, float scale) {
    extern __shared__ __align__(128) float smem[];
    const Work work(q, k, v, o, heads, heads_kv, seqlen_q, seqlen_k);
    float *p = smem, *scores = p + work.keys_padded * P_PITCH,
          *ring = scores + BLOCK_M * work.keys_padded;
    Values ahead;
    auto load_first = [&] {
        ahead = load_values(work, seqlen_k, min(first_block(), BLOCKS - 1),
                            threadIdx.x / 32 / COLUMN_WARPS);
    };
    auto early = [&] {
        if (!V_EARLY) return;
        load_first();
        constexpr int LINES = (SLICE + 31) / 32;  // 128 bytes each, of one key
        const float* v = work.v + work.first_column;
        for (int i = threadIdx.x; V_EARLY == 2 && i < work.keys * LINES; i += THREADS) {
            const int column = i % LINES * 32;
            if (column < work.width)
                prefetch_l2(v + static_cast<long long>(i / LINES) * HEAD_DIM + column);
        }
    };
    for (int tile = 0; tile * BLOCK_N < work.keys; ++tile) {
        float s[SCORES_OF_LANE];
        multiply_qk(s, work, ring, seqlen_k, tile, [&] {
            if (tile == 0) early();
        });
        if (!V_EARLY && (tile + 1) * BLOCK_N >= work.keys)
            load_first();  // while scores are exchanged
        merge_scores(s, ring, tile, [&](int row, int key, float4 sum) {
            store4(scores + row * work.keys_padded + key, sum);
        });
    }
    if constexpr (SLICES > 1) {
        cluster_arrive();
        cluster_wait();
    }
    const int keys_used = ceil_div<KEYS>(work.keys) * KEYS;
    // SHARE_ROWS: each block of the cluster does some rows and gives them to all; else each does
    // all rows.
    constexpr int SHARES = SHARE_ROWS && SLICES > 1 ? SLICES : 1, ROWS_AT_ONCE = NUM_WARPS * SHARES;
    for (int row = work.slice % SHARES + threadIdx.x / 32 * SHARES; row < BLOCK_M;
         row += ROWS_AT_ONCE) {
        float* row_of_p = p + row;
        auto score = [&](int key) {
            const float* own = scores + row * work.keys_padded + key;
            if constexpr (SLICES == 1) {
                return *reinterpret_cast<const float2*>(own);
            } else {
                float2 parts[SLICES], sum = make_float2(0.f, 0.f);
#pragma unroll
                for (int slice = 0; slice < SLICES; ++slice)
                    parts[slice] = cluster_load2(cluster_address(smem_address(own), slice));
#pragma unroll
                for (int slice = 0; slice < SLICES; ++slice)
                    sum.x += parts[slice].x, sum.y += parts[slice].y;
                return sum;
            }
        };
        auto put = [&](int key, float x) {
            if constexpr (SHARES == 1) {
                row_of_p[key * P_PITCH] = x;
            } else {
#pragma unroll
                for (int slice = 0; slice < SLICES; ++slice)
                    cluster_store(cluster_address(smem_address(row_of_p + key * P_PITCH), slice),
                                  x);
            }
        };
        const int keys =
            visible_keys(min(work.first_row + row, seqlen_q - 1), seqlen_q, seqlen_k).end;
        softmax_row(row_of_p, keys, keys_used, scale * LOG2E, score, put);
    }
    // The last word between the blocks. Where rows are shared all wait for it; else a block only
    // may not end while others still read its scores.
    if constexpr (SLICES > 1) cluster_arrive();
    if constexpr (SHARES > 1) cluster_wait();
    else __syncthreads();
    multiply_all_pv(work, seqlen_k, p, ring, ahead);
    if constexpr (SLICES > 1 && SHARES == 1) {
        __syncwarp();  // the barrier is for whole warps
        cluster_wait();
    }
}
#elif STAGE_SCORES
    flash_fwd_fp32_wide_scores(const float* __restrict__ q, const float* __restrict__ k,
                               float* __restrict__ partial, int heads, int heads_kv, int seqlen_q,
                               int seqlen_k) {
    extern __shared__ __align__(128) float smem[];
    const Work work(q, k, nullptr, nullptr, heads, heads_kv, seqlen_q, seqlen_k);
#if PDL
    grid_launch_dependents();
#endif
    const long long rows_ahead =
        static_cast<long long>(work.head * SLICES + work.slice) * (gridDim.x / SLICES * BLOCK_M) +
        work.first_row;
    partial += rows_ahead * work.keys_padded;
    for (int tile = 0; tile * BLOCK_N < work.keys; ++tile) {
        float s[SCORES_OF_LANE];
        multiply_qk(s, work, smem, seqlen_k, tile, [] {});
        merge_scores(s, smem, tile, [&](int row, int key, float4 sum) {
            store4(partial + row * work.keys_padded + key, sum);
        });
    }
}
#else
    flash_fwd_fp32_wide_output(const float* partial, const float* __restrict__ v,
                               float* __restrict__ o, int heads, int heads_kv, int seqlen_q,
                               int seqlen_k, float scale) {
    extern __shared__ __align__(128) float smem[];
    const Work work(nullptr, nullptr, v, o, heads, heads_kv, seqlen_q, seqlen_k);
    float *p = smem, *scratch = p + work.keys_padded * P_PITCH;
    const Values ahead = load_values(work, seqlen_k, min(first_block(), BLOCKS - 1),
                                     threadIdx.x / 32 / COLUMN_WARPS);
#if PDL
    grid_wait();
#endif
    const long long slice_step =
        static_cast<long long>(gridDim.x / SLICES * BLOCK_M) * work.keys_padded;
    partial +=
        work.head * SLICES * slice_step + static_cast<long long>(work.first_row) * work.keys_padded;
    const int keys_used = ceil_div<KEYS>(work.keys) * KEYS;
    for (int row = threadIdx.x / 32; row < BLOCK_M; row += NUM_WARPS) {
        float* row_of_p = p + row;
        const int keys =
            visible_keys(min(work.first_row + row, seqlen_q - 1), seqlen_q, seqlen_k).end;
        softmax_row(
            row_of_p, keys, keys_used, scale * LOG2E,
            [&](int key) {
                const float* own = partial + row * work.keys_padded + key;
                float2 sum = make_float2(0.f, 0.f);
#pragma unroll 8
                for (int slice = 0; slice < SLICES; ++slice) {
                    const float2 x = *reinterpret_cast<const float2*>(own + slice * slice_step);
                    sum.x += x.x, sum.y += x.y;
                }
                return sum;
            },
            [&](int key, float x) { row_of_p[key * P_PITCH] = x; });
    }
    __syncthreads();
    multiply_all_pv(work, seqlen_k, p, scratch, ahead);
}
#endif
