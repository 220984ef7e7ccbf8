// ladder_4_pipelined: tiles arrive while others are used. ladder_3_tensor_cores stops all its warps
// for every tile, and tensor cores idle for as long as L2 takes to answer. Here two tiles of K and
// V lie in shared memory, cp.async fills one without passing through registers, and warps of their
// own do nothing else: full[stage] and empty[stage] are barriers between those that fill and those
// that use. What it cannot do: read a fragment in one go. Rows of HEAD_DIM elements all begin in
// the same bank, so the 8 rows of a matrix come one after the other; and scores still pass through
// shared memory. q, o: (batch, heads, seqlen_q, HEAD_DIM); k, v: (batch, heads_kv, seqlen_k,
// HEAD_DIM).
#include "common/ptx/barrier.cuh"
#include "common/ptx/shared.cuh"
#include "common/tile/epilogue.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"
#include "common/tile/pipeline.cuh"
#include "common/tile/scheduler.cuh"
#include "common/tile/softmax.cuh"

using namespace attn;

using Fragments = WmmaFragments;
constexpr int WARPS = BLOCK_M / 16, THREADS = (WARPS + PRODUCER_WARPS) * 32, BLOCK_N = 64;
constexpr int D_STEPS = HEAD_DIM / 16, N_STEPS = BLOCK_N / 16, TILE = BLOCK_N * HEAD_DIM;
constexpr int SCORES = 16 * SCORE_PITCH<BLOCK_N>;  // floats a warp, then 16 factors
constexpr int FULL = 1, EMPTY = 3;                 // barriers, plus the stage: 0 or 1

__device__ __forceinline__ unsigned offset_of(unsigned row, unsigned chunk) {
    return row * (HEAD_DIM * 2) + chunk * 16;
}

// Warps that only load: tiles of K and V, each when its stage is empty.
__device__ __forceinline__ void produce(element_t* ring, const element_t* k, const element_t* v,
                                        int tiles, int seqlen_k) {
    for (int tile = 0; tile < tiles; ++tile) {
        const unsigned stage = tile % 2, to = smem_address(ring + stage * 2 * TILE);
        const int left = seqlen_k - tile * BLOCK_N, thread = threadIdx.x - WARPS * 32;
        const long long from = static_cast<long long>(tile) * TILE;
        if (tile > 1) named_barrier_sync(EMPTY + stage, THREADS);
        copy_rows<HEAD_DIM, BLOCK_N, PRODUCER_WARPS * 32>(to, k + from, left, thread, offset_of);
        copy_rows<HEAD_DIM, BLOCK_N, PRODUCER_WARPS * 32>(to + TILE * 2, v + from, left, thread,
                                                          offset_of);
        cp_async_commit();
        // The tile before has arrived; this one may be under way while the next stage empties.
        cp_async_wait<1>();
        if (tile > 0) named_barrier_arrive(FULL + (stage ^ 1), THREADS);
    }
    cp_async_wait<0>();
    named_barrier_arrive(FULL + (tiles - 1) % 2, THREADS);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    ladder_4_pipelined(const element_t* __restrict__ q, const element_t* __restrict__ k,
                       const element_t* __restrict__ v, element_t* __restrict__ o, int heads,
                       int heads_kv, int seqlen_q, int seqlen_k, float scale) {
    extern __shared__ __align__(128) unsigned char smem[];
    element_t *const q_tile = reinterpret_cast<element_t*>(smem), *const ring =
                                                                      q_tile + BLOCK_M * HEAD_DIM;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head = blockIdx.y,
              head_kv = head / (heads / heads_kv);  // both counted over the batch
    const int first_row = blockIdx.x * BLOCK_M, row = first_row + warp * 16;
    const int block_keys =
        visible_keys(min(first_row + BLOCK_M, seqlen_q) - 1, seqlen_q, seqlen_k).end;
    const int tiles = ceil_div<BLOCK_N>(block_keys);

    if (warp >= WARPS) {
        const long long first_key = static_cast<long long>(head_kv) * seqlen_k * HEAD_DIM;
        produce(ring, k + first_key, v + first_key, tiles, seqlen_k);
        return;
    }

    float* const scores = reinterpret_cast<float*>(ring + 4 * TILE) + warp * (SCORES + 16);
    float* const factors = scores + SCORES;
    const int keys = visible_keys(row + lane % 16, seqlen_q, seqlen_k).end;  // of this lane's row
    const long long query = (static_cast<long long>(head) * seqlen_q + row) * HEAD_DIM;
    const element_t* const q_rows = q_tile + warp * 16 * HEAD_DIM;
    copy_rows<HEAD_DIM, 16, 32>(smem_address(q_rows), q + query, seqlen_q - row, lane, offset_of);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();

    RowState state;
    Fragments::Accumulator out[D_STEPS] = {};
    for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % 2;
        const element_t *k_tile = ring + stage * 2 * TILE, *v_tile = k_tile + TILE;
        named_barrier_sync(FULL + stage, THREADS);
#pragma unroll
        for (int n = 0; n < N_STEPS; ++n) {
            Fragments::Accumulator s = {};
#pragma unroll
            for (int d = 0; d < D_STEPS; ++d) {
                Fragments::A a;
                Fragments::B<true> b;
                wmma_load(a, q_rows + d * 16, HEAD_DIM);
                wmma_load(b, k_tile + n * 16 * HEAD_DIM + d * 16, HEAD_DIM);
                wmma_multiply(s, a, b);
            }
            wmma_store(scores + n * 16, s, SCORE_PITCH<BLOCK_N>);
        }
        __syncwarp();
        softmax_rows<BLOCK_N, false>(scores, factors, keys - tile * BLOCK_N, scale * LOG2E, state);

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
        if (tile + 2 < tiles) named_barrier_arrive(EMPTY + stage, THREADS);
    }
    store_rows(o + query, out, scores, seqlen_q - row, inverse_of(state));
}
