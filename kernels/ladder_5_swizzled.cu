// ladder_5_swizzled: nothing waits for a bank, and nothing takes a detour. In ladder_4_pipelined
// the 8 rows of a matrix lie in one bank and are read one after the other, and scores and P go to
// shared memory and back. Here the 16-byte chunks of a row are permuted by its number, so that 8
// rows lie in 8 bank groups; mma.sync has fragments of known layout, so scores, P, Q and the output
// stay in registers; 2^x is one instruction. KEY_WARPS warps share the same 16 queries, each with
// its own keys of every tile, and merge at the end: more warps to hide latency with, where a grid
// is small. BRANCHES 0: no branch at all. TILES tiles are unrolled and masked, whatever is in them,
// so that the instructions executed are the same for all inputs of a shape. BRANCHES 1 branches too
// only on sizes and places, never on a score: it leaves out tiles that the mask hides, and
// masks only at edges. q, o: (batch, heads, seqlen_q, HEAD_DIM); k, v: (batch, heads_kv, seqlen_k,
// HEAD_DIM).
#include "common/ptx/mma.cuh"
#include "common/ptx/shared.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"
#include "common/tile/pipeline.cuh"
#include "common/tile/scheduler.cuh"

using namespace attn;

constexpr int WARPS_M = BLOCK_M / 16, THREADS = WARPS_M * KEY_WARPS * 32,
              WARP_N = BLOCK_N / KEY_WARPS;
constexpr int D_STEPS = HEAD_DIM / 16, N_STEPS = WARP_N / 16;
constexpr int PITCH = HEAD_DIM * 2, TILE = BLOCK_N * PITCH, STAGE = 2 * TILE;  // bytes
// Q in registers for all tiles; a wide head without branches reads it again, or it spills.
constexpr bool Q_KEPT = BRANCHES || HEAD_DIM <= 64;
static_assert(N_STEPS * 16 * KEY_WARPS == BLOCK_N && STAGES > 1,
              "whole fragments; one stage is never refilled");
// Outputs on their way out, over the ring: rows of floats, 8 more than HEAD_DIM, so that the 4 rows
// that half a warp stores lie in different banks; then reference and sum of each row.
constexpr int OUT_PITCH = HEAD_DIM + 8, OUT = BLOCK_M * OUT_PITCH, STATISTICS = KEY_WARPS * OUT;
constexpr float NOTHING_YET =
    -1e30f;  // finite: a row without keys so far gives exp2(-inf), never NaN

// Sums of P are one more column of the output, as of a V of ones: whole rows, without a shuffle,
// and without the additions that ptxas puts off, and keeps P in fp32 for, when tiles are unrolled.
constexpr unsigned ONES = IS_BF16 ? 0x3f803f80u : 0x3c003c00u;

__device__ __forceinline__ unsigned offset_of(unsigned row, unsigned chunk) {
    return row * PITCH + (chunk ^ row % 8) * 16;
}

// Each warp's output with its reference and sum to shared memory, at `merged`; then all threads add
// them up.
__device__ __forceinline__ void store_merged(const float (&out)[2 * D_STEPS][4],
                                             const float (&sum)[4], const float (&reference)[2],
                                             unsigned char* merged, element_t* o, int rows) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key_warp = warp / WARPS_M,
              warp_row = warp % WARPS_M * 16;
    float* const merge = reinterpret_cast<float*>(merged);
    float2* const statistics = reinterpret_cast<float2*>(merge + STATISTICS);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int at = warp_row + h * 8 + lane / 4;
        if (lane % 4 == 0)
            statistics[key_warp * BLOCK_M + at] = make_float2(reference[h], sum[2 * h]);
        float* to = merge + key_warp * OUT + at * OUT_PITCH + lane % 4 * 2;
#pragma unroll
        for (int d = 0; d < 2 * D_STEPS; ++d)
            *reinterpret_cast<float2*>(to + d * 8) = make_float2(out[d][2 * h], out[d][2 * h + 1]);
    }
    __syncthreads();
    constexpr int FOURS = HEAD_DIM / 4;  // a thread takes four columns of a row
#pragma unroll
    for (int i = 0; i < BLOCK_M * FOURS / THREADS; ++i) {
        // Past the last row, that row again: the same values go to the same place, and no branch is
        // needed.
        const int at = min(i * (THREADS / FOURS) + static_cast<int>(threadIdx.x / FOURS), rows - 1);
        float most = NOTHING_YET, total = 0.f, x[4] = {};
#pragma unroll
        for (int w = 0; w < KEY_WARPS; ++w) most = fmaxf(most, statistics[w * BLOCK_M + at].x);
#pragma unroll
        for (int w = 0; w < KEY_WARPS; ++w) {
            const float2 its = statistics[w * BLOCK_M + at];
            const float4 four = *reinterpret_cast<const float4*>(merge + w * OUT + at * OUT_PITCH +
                                                                 threadIdx.x % FOURS * 4);
            const float weight = exp2_approx(its.x - most);
            total += its.y * weight;
            x[0] += four.x * weight, x[1] += four.y * weight, x[2] += four.z * weight,
                x[3] += four.w * weight;
        }
        const float inverse = __fdividef(1.f, total);
        reinterpret_cast<uint2*>(o)[at * FOURS + threadIdx.x % FOURS] =
            make_uint2(pack(x[0] * inverse, x[1] * inverse), pack(x[2] * inverse, x[3] * inverse));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    ladder_5_swizzled(const element_t* __restrict__ q, const element_t* __restrict__ k,
                      const element_t* __restrict__ v, element_t* __restrict__ o, int heads,
                      int heads_kv, int seqlen_q, int seqlen_k, float scale) {
    extern __shared__ __align__(128) unsigned char smem[];
    const unsigned smem_q = smem_address(smem), ring = smem_q + BLOCK_M * PITCH;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key_warp = warp / WARPS_M;
    const int head = blockIdx.y,
              head_kv = head / (heads / heads_kv);  // both counted over the batch
    const int block =
        LATER_SEE_MORE ? gridDim.x - 1 - blockIdx.x : blockIdx.x;  // the longest first
    const int first_row = block * BLOCK_M, warp_row = warp % WARPS_M * 16,
              row = first_row + warp_row;
    const int block_keys =
        visible_keys(min(first_row + BLOCK_M, seqlen_q) - 1, seqlen_q, seqlen_k).end;
    const int tiles = BRANCHES ? ceil_div<BLOCK_N>(block_keys) : TILES;
    const int some_keys = visible_keys(row + 15, seqlen_q, seqlen_k).end,
              all_keys = visible_keys(row, seqlen_q, seqlen_k).end;
    const float to_log2 = scale * LOG2E;
    q += (static_cast<long long>(head) * seqlen_q + first_row) * HEAD_DIM;
    o += (static_cast<long long>(head) * seqlen_q + first_row) * HEAD_DIM;
    k += static_cast<long long>(head_kv) * seqlen_k * HEAD_DIM;
    v += static_cast<long long>(head_kv) * seqlen_k * HEAD_DIM;
    auto load_tile = [&](int tile) {
        const int left = tile < tiles ? seqlen_k - tile * BLOCK_N : 0;
        const long long from = static_cast<long long>(tile) * (BLOCK_N * HEAD_DIM);
        const unsigned to = ring + tile % STAGES * STAGE;
        if (!BRANCHES || tile < tiles) {
            copy_rows<HEAD_DIM, BLOCK_N, THREADS>(to, k + from, left, threadIdx.x, offset_of);
            copy_rows<HEAD_DIM, BLOCK_N, THREADS>(to + TILE, v + from, left, threadIdx.x,
                                                  offset_of);
        }
        cp_async_commit();
    };
    copy_rows<HEAD_DIM, BLOCK_M, THREADS>(smem_q, q, seqlen_q - first_row, threadIdx.x, offset_of);
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; ++tile) load_tile(tile);

    // Rows of a fragment that a lane reads: those of Q and V, and those of K, by halves
    // (common/ptx/mma.cuh).
    const unsigned row_a = lane % 16, row_k = lane % 8 + lane / 16 * 8, chunk_a = lane / 16,
                   chunk_k = lane / 8 % 2;
    unsigned q_kept[Q_KEPT ? D_STEPS : 1][4];
    auto load_q = [&](unsigned (&a)[4], int d) {
        ldmatrix_x4(a, smem_q + offset_of(warp_row + row_a, 2 * d + chunk_a));
    };
    float out[2 * D_STEPS][4] = {}, sum[4] = {}, reference[2] = {NOTHING_YET, NOTHING_YET};

#pragma unroll(BRANCHES ? 1 : TILES)
    for (int tile = 0; tile < tiles; ++tile) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // this tile is there for all, and the one before is used by all
        load_tile(tile + STAGES - 1);
        if (Q_KEPT && tile == 0) {
#pragma unroll
            for (int d = 0; d < D_STEPS; ++d) load_q(q_kept[Q_KEPT ? d : 0], d);
        }
        const int first_key = tile * BLOCK_N + key_warp * WARP_N;
        if (BRANCHES && first_key >= some_keys) continue;
        const unsigned k_rows = ring + tile % STAGES * STAGE + key_warp * WARP_N * PITCH,
                       v_rows = k_rows + TILE;

        float s[2 * N_STEPS][4] = {};
#pragma unroll
        for (int d = 0; d < D_STEPS; ++d) {
            unsigned q_now[4], b[4];
            unsigned (&a)[4] = Q_KEPT ? q_kept[Q_KEPT ? d : 0] : q_now;
            if (!Q_KEPT) load_q(q_now, d);
#pragma unroll
            for (int n = 0; n < N_STEPS; ++n) {
                ldmatrix_x4(b, k_rows + n * 16 * PITCH + offset_of(row_k, 2 * d + chunk_k));
                mma_16816<IS_BF16>(s[2 * n], a, b[0], b[1]);
                mma_16816<IS_BF16>(s[2 * n + 1], a, b[2], b[3]);
            }
        }
        // A lane has rows lane / 4 and lane / 4 + 8: h. Of each, columns 8 * n + lane % 4 * 2 and
        // the next.
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (!BRANCHES || first_key + WARP_N > all_keys) {
                const int keys = visible_keys(row + h * 8 + lane / 4, seqlen_q, seqlen_k).end -
                                 first_key - lane % 4 * 2;
#pragma unroll
                for (int i = 0; i < 4 * N_STEPS; ++i) {
                    float& x = s[i / 2][2 * h + i % 2];
                    x = i / 2 * 8 + i % 2 < keys ? x : minus_infinity();
                }
            }
            float largest = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
            for (int n = 1; n < 2 * N_STEPS; ++n)
                largest = fmaxf(largest, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            const float grown = fmaxf(reference[h], largest * to_log2);
            const float shrink = exp2_approx(reference[h] - grown);
            reference[h] = grown, sum[2 * h] *= shrink, sum[2 * h + 1] *= shrink;
#pragma unroll
            for (int d = 0; d < 2 * D_STEPS; ++d)
                out[d][2 * h] *= shrink, out[d][2 * h + 1] *= shrink;
        }
#pragma unroll
        for (int n = 0; n < N_STEPS; ++n) {
            unsigned p[4], b[4];  // two score tiles side by side are one A fragment
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* two = &s[2 * n + i / 2][i % 2 * 2];
                p[i] = pack(exp2_approx(two[0] * to_log2 - reference[i % 2]),
                            exp2_approx(two[1] * to_log2 - reference[i % 2]));
            }
            mma_16816<IS_BF16>(sum, p, ONES, ONES);
#pragma unroll
            for (int d = 0; d < D_STEPS; ++d) {
                ldmatrix_x4_trans(b, v_rows + n * 16 * PITCH + offset_of(row_a, 2 * d + chunk_a));
                mma_16816<IS_BF16>(out[2 * d], p, b[0], b[1]);
                mma_16816<IS_BF16>(out[2 * d + 1], p, b[2], b[3]);
            }
        }
    }

    cp_async_wait<0>();
    __syncthreads();
    store_merged(out, sum, reference, smem + BLOCK_M * PITCH, o, seqlen_q - first_row);
}
