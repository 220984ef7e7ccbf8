// wmma_pipeline: both products on WMMA fragments (16x16x16), fed by cp.async through a ring of
// STAGES K and V tiles, which PRODUCER_WARPS warps of their own fill. Fragments are opaque, so
// scores go through shared memory: a warp stores the scores of its 16 queries there, makes them
// probabilities in place and loads these as fragments again. What limits it is to be found by its
// parameters, each of which removes one suspect. q, o: (batch, heads, seqlen_q, HEAD_DIM); k, v:
// (batch, heads_kv, seqlen_k, HEAD_DIM).
#include "common/ptx/barrier.cuh"
#include "common/ptx/shared.cuh"
#include "common/tile/epilogue.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"
#include "common/tile/pipeline.cuh"
#include "common/tile/scheduler.cuh"
#include "common/tile/softmax.cuh"

using namespace attn;

#define PLAIN 0
#define PADDED 1
#define SUBTILES 2
#define XOR 3
#if LAYOUT == XOR
using Fragments = MmaFragments;
#else
using Fragments = WmmaFragments;
#endif

constexpr int WARPS = BLOCK_M / 16, COMPUTE = WARPS * 32, THREADS = COMPUTE + PRODUCER_WARPS * 32;
constexpr int D_STEPS = HEAD_DIM / 16, N_STEPS = BLOCK_N / 16;
constexpr int PENDING = STAGES - 1 - EARLY;  // copies that may be under way when a tile is used
static_assert(BLOCK_M % 16 == 0 && BLOCK_N % 16 == 0 && PENDING >= 0,
              "whole fragments; stages to wait for");

// Rows of Q, K and V in shared memory. A fragment's 8 rows of 16 bytes should lie in different
// banks: PLAIN rows all begin in the same one; PADDED rows are 16 bytes longer; SUBTILES of 16x16
// lie one after the other, a row in 32 bytes, so that only two rows of eight meet; XOR permutes a
// row's chunks, at no bytes, but then 16 rows have no common stride and need fragments that take an
// address a lane.
constexpr int PITCH = HEAD_DIM + (LAYOUT == PADDED ? 8 : 0);  // elements
__device__ __forceinline__ unsigned offset_of(unsigned row, unsigned chunk) {
    if (LAYOUT == SUBTILES)
        return (row / 16 * D_STEPS + chunk / 2) * 512 + row % 16 * 32 + chunk % 2 * 16;
    return row * (PITCH * 2) + (LAYOUT == XOR ? chunk ^ row % 8 : chunk) * 16;
}
// 16 rows from `row` on, columns 16 * step and on.
template <class Fragment>
__device__ __forceinline__ void load_fragment(Fragment& to, const element_t* tile, int row,
                                              int step) {
#if LAYOUT == XOR
    const unsigned base = smem_address(tile);
    wmma_load(to, [&](unsigned r, unsigned chunk) {
        return base + offset_of(row + r, 2 * step + chunk);
    });
#else
    wmma_load(to, tile + offset_of(row, 2 * step) / 2, LAYOUT == SUBTILES ? 16 : PITCH);
#endif
}
// 16 rows of probabilities, keys 16 * step and on.
__device__ __forceinline__ void load_probabilities(Fragments::A& to, const float* scores,
                                                   int step) {
    const element_t* p = reinterpret_cast<const element_t*>(scores) + step * 16;
#if LAYOUT == XOR
    const unsigned base = smem_address(p);
    wmma_load(to, [&](unsigned r, unsigned chunk) {
        return base + r * (4 * SCORE_PITCH<BLOCK_N>)+chunk * 16;
    });
#else
    wmma_load(to, p, 2 * SCORE_PITCH<BLOCK_N>);
#endif
}

// Shared memory: Q, the ring, then of each warp its scores, factors of its rows and its output.
constexpr int TILE = BLOCK_N * PITCH, STAGE = 2 * TILE;                    // elements
constexpr int SCORES = 16 * SCORE_PITCH<BLOCK_N>, O_PITCH = HEAD_DIM + 4;  // floats
constexpr int WARP_FLOATS = SCORES + 16 + (O_IN_REGISTERS ? 0 : 16 * O_PITCH);
static_assert(SCORES >= 16 * OUTPUT_PITCH, "the output leaves through the scores");
// Barriers 1 + stage: it is full; 1 + STAGES + stage: it is empty.
constexpr int FULL = 1, EMPTY = 1 + STAGES;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    wmma_pipeline(const element_t* __restrict__ q, const element_t* __restrict__ k,
                  const element_t* __restrict__ v, element_t* __restrict__ o, int items, int heads,
                  int heads_kv, int seqlen_q, int seqlen_k, float scale) {
    extern __shared__ __align__(128) unsigned char smem[];
    element_t* const q_tile = reinterpret_cast<element_t*>(smem);
    element_t* const ring = q_tile + BLOCK_M * PITCH;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int blocks_m = ceil_div<BLOCK_M>(seqlen_q);
    auto first_row_of = [&](int item) { return item % blocks_m * BLOCK_M; };
    auto tiles_of = [&](int item) {
        const int last = min(first_row_of(item) + BLOCK_M, seqlen_q) - 1;
        return ceil_div<BLOCK_N>(visible_keys(last, seqlen_q, seqlen_k).end);
    };
    auto load_tile = [&](int item, int tile, int stage, int thread, auto count) {
        const int head_kv = item / blocks_m / (heads / heads_kv), left = seqlen_k - tile * BLOCK_N;
        const long long from =
            (static_cast<long long>(head_kv) * seqlen_k + tile * BLOCK_N) * HEAD_DIM;
        const unsigned to = smem_address(ring + stage * STAGE);
        copy_rows<HEAD_DIM, BLOCK_N, count()>(to, k + from, left, thread, offset_of);
        copy_rows<HEAD_DIM, BLOCK_N, count()>(to + TILE * 2, v + from, left, thread, offset_of);
    };

#if PRODUCER_WARPS > 0
    if (warp >= WARPS) {
        int step = 0;  // tiles so far, over all items
        for (int item = blockIdx.x; item < items; item += gridDim.x)
            for (int tile = 0; tile < tiles_of(item); ++tile, ++step) {
                if (step >= STAGES) named_barrier_sync(EMPTY + step % STAGES, THREADS);
                load_tile(item, tile, step % STAGES, threadIdx.x - COMPUTE,
                          Count<PRODUCER_WARPS * 32>());
                cp_async_commit();
                cp_async_wait<PENDING>();
                if (step >= PENDING)
                    named_barrier_arrive(FULL + (step - PENDING) % STAGES, THREADS);
            }
        cp_async_wait<0>();
        for (int i = max(0, step - PENDING); i < step; ++i)
            named_barrier_arrive(FULL + i % STAGES, THREADS);
        for (int i = max(0, step - STAGES); i < step; ++i)  // so that no barrier is left half full
            named_barrier_sync(EMPTY + i % STAGES, THREADS);
        return;
    }
#endif
    float* const scores = reinterpret_cast<float*>(ring + STAGES * STAGE) + warp * WARP_FLOATS;
    float *const factors = scores + SCORES, *const shared_out = factors + 16;
    float* const own_out =
        shared_out + lane % 16 * O_PITCH + lane / 16 * 4;  // every other four columns
    const element_t* const q_rows = q_tile + warp * 16 * PITCH;
    int step = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int row = first_row_of(item) + warp * 16, rows = seqlen_q - row,
                  tiles = tiles_of(item);
        const long long query =
            (static_cast<long long>(item / blocks_m) * seqlen_q + row) * HEAD_DIM;
        copy_rows<HEAD_DIM, 16, 32>(smem_address(q_rows), q + query, rows, lane, offset_of);
        cp_async_commit();
#if PRODUCER_WARPS > 0
        cp_async_wait<0>();
        __syncwarp();
#else
#pragma unroll 1
        for (int tile = 0; tile < STAGES; ++tile) {
            if (tile < tiles) load_tile(item, tile, tile, threadIdx.x, Count<THREADS>());
            cp_async_commit();
        }
#endif
        // Keys that the lane's row sees, and some row of its warp.
        const int keys = visible_keys(row + lane % 16, seqlen_q, seqlen_k).end;
        const int some_keys = visible_keys(row + 15, seqlen_q, seqlen_k).end;
        RowState state;
        Fragments::Accumulator out[O_IN_REGISTERS ? D_STEPS : 1] = {};
        if (!O_IN_REGISTERS) {
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; ++i)
                *reinterpret_cast<float4*>(own_out + 8 * i) = make_float4(0.f, 0.f, 0.f, 0.f);
        }

        for (int tile = 0; tile < tiles; ++tile, ++step) {
            const int stage = (PRODUCER_WARPS > 0 ? step : tile) % STAGES;
            const element_t *k_tile = ring + stage * STAGE, *v_tile = k_tile + TILE;
#if PRODUCER_WARPS > 0
            named_barrier_sync(FULL + stage, THREADS);
#else
            cp_async_wait<PENDING>();
            __syncthreads();
#endif
            if (tile * BLOCK_N < some_keys) {
                Fragments::A a[D_STEPS];
#pragma unroll
                for (int d = 0; d < D_STEPS; ++d) load_fragment(a[d], q_rows, 0, d);
#pragma unroll
                for (int n = 0; n < N_STEPS; ++n) {
                    Fragments::Accumulator s = {};
#pragma unroll
                    for (int d = 0; d < D_STEPS; ++d) {
                        Fragments::B<true> b;
                        load_fragment(b, k_tile, n * 16, d);
                        wmma_multiply(s, a[d], b);
                    }
                    wmma_store(scores + n * 16, s, SCORE_PITCH<BLOCK_N>);
                }
                __syncwarp();
                const float shrink = softmax_rows<BLOCK_N, true>(
                    scores, factors, keys - tile * BLOCK_N, scale * LOG2E, state);
                Fragments::Accumulator by_row;
                if (O_IN_REGISTERS) {
                    wmma_load_rows(by_row, factors);
                } else {
#pragma unroll
                    for (int i = 0; i < HEAD_DIM / 8; ++i) {
                        float4& x = *reinterpret_cast<float4*>(own_out + 8 * i);
                        x = make_float4(x.x * shrink, x.y * shrink, x.z * shrink, x.w * shrink);
                    }
                    __syncwarp();
                }
                Fragments::A p[N_STEPS];
#pragma unroll
                for (int n = 0; n < N_STEPS; ++n) load_probabilities(p[n], scores, n);
#pragma unroll
                for (int d = 0; d < D_STEPS; ++d) {
                    Fragments::Accumulator& x = out[O_IN_REGISTERS ? d : 0];
                    if (O_IN_REGISTERS) scale_rows(x, by_row);
                    else wmma_load(x, shared_out + d * 16, O_PITCH);
#pragma unroll
                    for (int n = 0; n < N_STEPS; ++n) {
                        Fragments::B<false> b;
                        load_fragment(b, v_tile, n * 16, d);
                        wmma_multiply(x, p[n], b);
                    }
                    if (!O_IN_REGISTERS) wmma_store(shared_out + d * 16, x, O_PITCH);
                }
                __syncwarp();  // probabilities and factors are read, the output is stored
            }
#if PRODUCER_WARPS > 0
            named_barrier_arrive(EMPTY + stage, THREADS);
#else
            __syncthreads();
            if (tile + STAGES < tiles)
                load_tile(item, tile + STAGES, stage, threadIdx.x, Count<THREADS>());
            cp_async_commit();
#endif
        }

        const float inverse = inverse_of(state);
        if (O_IN_REGISTERS) {
            store_rows(o + query, out, scores, rows, inverse);
        } else if (lane % 16 < rows) {
            const int half = lane / 16 * (HEAD_DIM / 2);
#pragma unroll
            for (int d = half; d < half + HEAD_DIM / 2; d += 8)
                store_eight(o + query + lane % 16 * HEAD_DIM + d,
                            shared_out + lane % 16 * O_PITCH + d, inverse);
        }
        __syncwarp();  // before the next item's rows
        if (CTAS == 0) break;
    }
}
