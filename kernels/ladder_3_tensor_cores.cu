// ladder_3_tensor_cores: both products on tensor cores, in WMMA fragments of 16x16x16.
// ladder_2_tiles takes an FMA of every thread for each 32 products, and most of its instructions
// fetch operands; here one instruction of a warp does 4096. A warp owns 16 queries. Which element
// of a fragment a lane holds is not defined, so scores pass through shared memory for the softmax
// (softmax_rows). What it cannot do: load and multiply at the same time. All warps wait for
// a tile, then use it. q, o: (batch, heads, seqlen_q, HEAD_DIM); k, v: (batch, heads_kv, seqlen_k,
// HEAD_DIM).
#include "common/tile/epilogue.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"
#include "common/tile/softmax.cuh"

using namespace attn;

using Fragments = WmmaFragments;
constexpr int WARPS = BLOCK_M / 16, THREADS = WARPS * 32, BLOCK_N = 64;
constexpr int D_STEPS = HEAD_DIM / 16, N_STEPS = BLOCK_N / 16, CHUNKS = HEAD_DIM / 8;
constexpr int SCORES = 16 * SCORE_PITCH<BLOCK_N>;  // floats a warp, then 16 factors

// ROWS contiguous rows to shared memory; rows from rows_left on become zeros.
template <int ROWS>
__device__ __forceinline__ void load_rows(element_t* target, const element_t* source,
                                          int rows_left) {
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS / THREADS; ++i) {
        const int at = i * THREADS + threadIdx.x;
        uint4 x = {0, 0, 0, 0};
        if (at / CHUNKS < rows_left) x = reinterpret_cast<const uint4*>(source)[at];
        reinterpret_cast<uint4*>(target)[at] = x;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    ladder_3_tensor_cores(const element_t* __restrict__ q, const element_t* __restrict__ k,
                          const element_t* __restrict__ v, element_t* __restrict__ o, int heads,
                          int heads_kv, int seqlen_q, int seqlen_k, float scale) {
    extern __shared__ __align__(128) unsigned char smem[];
    element_t* const q_tile = reinterpret_cast<element_t*>(smem);
    element_t *const k_tile = q_tile + BLOCK_M * HEAD_DIM, *const v_tile =
                                                               k_tile + BLOCK_N * HEAD_DIM;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* const scores =
        reinterpret_cast<float*>(v_tile + BLOCK_N * HEAD_DIM) + warp * (SCORES + 16);
    float* const factors = scores + SCORES;
    const int head = blockIdx.y,
              head_kv = head / (heads / heads_kv);  // both counted over the batch
    const int first_row = blockIdx.x * BLOCK_M, row = first_row + warp * 16;
    const int block_keys =
        visible_keys(min(first_row + BLOCK_M, seqlen_q) - 1, seqlen_q, seqlen_k).end;
    const int keys = visible_keys(row + lane % 16, seqlen_q, seqlen_k).end;  // of this lane's row
    q += (static_cast<long long>(head) * seqlen_q + first_row) * HEAD_DIM;
    k += static_cast<long long>(head_kv) * seqlen_k * HEAD_DIM;
    v += static_cast<long long>(head_kv) * seqlen_k * HEAD_DIM;
    load_rows<BLOCK_M>(q_tile, q, seqlen_q - first_row);

    RowState state;
    Fragments::Accumulator out[D_STEPS] = {};
    for (int first = 0; first < block_keys; first += BLOCK_N) {
        const long long tile = static_cast<long long>(first) * HEAD_DIM;
        __syncthreads();  // the tile before is used
        load_rows<BLOCK_N>(k_tile, k + tile, seqlen_k - first);
        load_rows<BLOCK_N>(v_tile, v + tile, seqlen_k - first);
        __syncthreads();

#pragma unroll
        for (int n = 0; n < N_STEPS; ++n) {
            Fragments::Accumulator s = {};
#pragma unroll
            for (int d = 0; d < D_STEPS; ++d) {
                Fragments::A a;
                Fragments::B<true> b;
                wmma_load(a, q_tile + warp * 16 * HEAD_DIM + d * 16, HEAD_DIM);
                wmma_load(b, k_tile + n * 16 * HEAD_DIM + d * 16, HEAD_DIM);
                wmma_multiply(s, a, b);
            }
            wmma_store(scores + n * 16, s, SCORE_PITCH<BLOCK_N>);
        }
        __syncwarp();
        softmax_rows<BLOCK_N, false>(scores, factors, keys - first, scale * LOG2E, state);

        Fragments::Accumulator shrink;
        wmma_load_rows(shrink, factors);
#pragma unroll
        for (int d = 0; d < D_STEPS; ++d) {
            scale_rows(out[d], shrink);
#pragma unroll
            for (int n = 0; n < N_STEPS; ++n) {
                Fragments::A p;
                Fragments::B<false> b;
                wmma_load(p, reinterpret_cast<element_t*>(scores) + n * 16,
                          2 * SCORE_PITCH<BLOCK_N>);
                wmma_load(b, v_tile + n * 16 * HEAD_DIM + d * 16, HEAD_DIM);
                wmma_multiply(out[d], p, b);
            }
        }
        __syncwarp();  // before the next scores
    }
    store_rows(o + (static_cast<long long>(head) * seqlen_q + row) * HEAD_DIM, out, scores,
               seqlen_q - row, inverse_of(state));
}
