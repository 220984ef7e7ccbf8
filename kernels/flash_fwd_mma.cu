// flash_fwd_mma: the whole forward in one kernel (FlashAttention-2): mma.sync and cp.async, sm_80
// on. A block owns BLOCK_M queries of one head and walks over the keys, BLOCK_N at a time, through
// a ring of NUM_STAGES K and V tiles. A warp owns WARP_M queries and the output stays in its
// registers: fp32, unscaled by the row sum until the end. Scores become P in registers, so they
// never touch shared memory. q, o: (batch, heads, seqlen_q, HEAD_DIM); k, v: (batch, heads_kv,
// seqlen_k, HEAD_DIM).
#include "common/ptx/barrier.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/shared.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"
#include "common/tile/scheduler.cuh"

using namespace attn;

// KEY_GROUPS groups of warps share the block's queries: each takes its own WARP_N keys of every
// tile, never waits for another group, and they merge outputs at the end: more warps for a small
// grid, at WARP_M = 32.
constexpr int THREADS = NUM_WARPS * 32, GROUP_THREADS = THREADS / KEY_GROUPS;
constexpr int WARPS_M = NUM_WARPS / KEY_GROUPS;
constexpr int WARP_M = BLOCK_M / WARPS_M, M_TILES = WARP_M / 16;
constexpr int WARP_N = BLOCK_N / KEY_GROUPS, N_STEPS = WARP_N / 16;
// A chunk is 16 bytes. A tile has those of a row, zeros up to 16 columns, and room up to a multiple
// of the swizzle's period.
constexpr int D_STEPS = (HEAD_DIM + 15) / 16, CHUNKS = HEAD_DIM / 8,
              PITCH_CHUNKS = (CHUNKS + 7) / 8 * 8;
// Threads that load a row: a power of two, of which those from 2 * D_STEPS on are idle.
constexpr int ROW_LANES = D_STEPS == 1   ? 2
                          : D_STEPS == 2 ? 4
                          : D_STEPS <= 4 ? 8
                          : D_STEPS <= 8 ? 16
                                         : 32;
static_assert(M_TILES * 16 * WARPS_M == BLOCK_M && N_STEPS * 16 * KEY_GROUPS == BLOCK_N,
              "whole fragments");
static_assert(HEAD_DIM % 8 == 0, "a row must be whole chunks");

// Shared memory: Q (at the end O), then K and V of each stage (at the end the outputs to merge).
// ldmatrix reads 8 rows at one column, which must lie in 8 different bank groups. SWIZZLE 1: a
// row's 16-byte chunks are permuted by its number. SWIZZLE 0: 16 bytes of padding a row; the best
// config with it takes 17.6 us against 15.8 at (1,16,1024,64) on an H200
// (results/h200/h200_parameters).
constexpr int PITCH = PITCH_CHUNKS * 16 + (SWIZZLE ? 0 : 16);
constexpr unsigned PERIOD = SWIZZLE ? 7 : 0;
constexpr int Q_BYTES = BLOCK_M * PITCH, TILE_BYTES = WARP_N * PITCH, STAGE_BYTES = 2 * TILE_BYTES;

__device__ __forceinline__ unsigned offset_of(int row, int chunk) {
    return row * PITCH + ((chunk ^ (row & PERIOD)) << 4);
}
// Offset of 16-column step `step`, given a lane's own swizzled chunk (0 or 1, xor its row).
__device__ __forceinline__ unsigned step_offset(unsigned lane_chunk, int step) {
    return ((lane_chunk ^ (2 * step & 6)) << 4) + (2 * step & ~7) * 16;
}

// ROWS contiguous rows to shared memory by COUNT threads. Rows from rows_left on become zeros, so
// that 0 * V is never NaN. Whole tiles take a path without conditions: about 2 instructions a chunk
// instead of 12.
template <int ROWS, int COUNT>
__device__ __forceinline__ void load_rows(unsigned target, const element_t* source, int rows_left,
                                          unsigned thread) {
    static_assert(ROWS * ROW_LANES % COUNT == 0, "a tile must be whole chunks for every thread");
    constexpr int STEP = COUNT / ROW_LANES;  // rows from one chunk of a thread to its next
    const unsigned row = thread / ROW_LANES, chunk = thread % ROW_LANES,
                   first = target + offset_of(row, chunk);
    if (ROW_LANES > 2 * D_STEPS && chunk >= 2 * D_STEPS) return;
    const bool inside = CHUNKS % 2 == 0 || chunk < CHUNKS;
    auto target_of = [&](int i) {
        return STEP % 8 == 0 ? first + i * STEP * PITCH : target + offset_of(row + i * STEP, chunk);
    };
    auto element_of = [&](int i) {
        return ROW_LANES == CHUNKS ? (thread + i * COUNT) * 8
                                   : (row + i * STEP) * HEAD_DIM + chunk * 8;
    };
    if (rows_left >= ROWS) {
        source += element_of(0);
#pragma unroll
        for (int i = 0; i < ROWS * ROW_LANES / COUNT; ++i)
            if (CHUNKS % 2 == 0) cp_async_16(target_of(i), source + i * (STEP * HEAD_DIM));
            else cp_async_16(target_of(i), source + (inside ? i * (STEP * HEAD_DIM) : 0), inside);
    } else {
#pragma unroll 1
        for (int i = 0; i < ROWS * ROW_LANES / COUNT; ++i) {
            const bool valid = inside && static_cast<int>(row) + i * STEP < rows_left;
            cp_async_16(target_of(i), source + (valid ? element_of(i) : 0), valid);
        }
    }
}

// Threads that share K and V tiles: the whole block, or one group of warps on a barrier of its own.
__device__ __forceinline__ void group_sync(int group) {
    if (KEY_GROUPS == 1) __syncthreads();
    else named_barrier_sync(group + 1, GROUP_THREADS);
}

// A row's reference moves only when a score exceeds it by 2^RESCALE_ABOVE: P up to 256 is as exact
// in fp16 as P up to 1, and the output is rescaled, and maxima exchanged, in few tiles instead of
// in all.
constexpr float RESCALE_ABOVE = 8.f;
constexpr float NOTHING_YET =
    -1e30f;  // finite: a row without keys so far gives exp2(-inf), never NaN

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    flash_fwd_mma(const element_t* __restrict__ q, const element_t* __restrict__ k,
                  const element_t* __restrict__ v, element_t* __restrict__ o, int heads,
                  int heads_kv, int seqlen_q, int seqlen_k, float scale
#if WINDOW
                  ,
                  int low, int high  // query i sees keys i + low to i + high
#endif
    ) {
    extern __shared__ __align__(128) unsigned char smem[];
    const unsigned smem_q = smem_address(smem);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / WARPS_M;
    // Order 0: the blocks of a head follow one another and share its K and V in L2. Where later
    // rows see more, blocks differ in length: order 1 begins with the longest of all heads; 2 does
    // so with half of them and then goes from short to long, so that two blocks of one SM add up to
    // the same work if all run at once. On an H200, orders 0, 1, 2 took 16.1, 14.2, 13.4 us at
    // (1,16,1024,64) and 6.4, 6.8, 6.8 us at (1,8,512,64).
    constexpr bool BY_HEAD = BLOCK_ORDER == 0;
    const int rows = BY_HEAD ? gridDim.x : gridDim.y, index = BY_HEAD ? blockIdx.x : blockIdx.y;
    const int head = BY_HEAD ? blockIdx.y : blockIdx.x;
    const bool upwards = !LATER_SEE_MORE || (BLOCK_ORDER == 2 && index >= (rows + 1) / 2);
    const int first_row = (!upwards         ? rows - 1 - index
                           : LATER_SEE_MORE ? index - (rows + 1) / 2
                                            : index) *
                          BLOCK_M;
    const int warp_row = first_row + warp % WARPS_M * WARP_M;
    const int head_kv = head / (heads / heads_kv);  // both counted over the batch
    const long long kv = (static_cast<long long>(head_kv) * seqlen_k + group * WARP_N) * HEAD_DIM;
    q += (static_cast<long long>(head) * seqlen_q + first_row) * HEAD_DIM;
#if !WINDOW
    const int high = seqlen_k - seqlen_q;  // row i sees keys up to i + high
#endif
    const int block_keys = HIDES_LATER ? min(seqlen_k, first_row + BLOCK_M + high) : seqlen_k;
    // Keys that some row of this warp sees, and keys that all its rows see.
    const int some_keys = HIDES_LATER ? min(seqlen_k, warp_row + WARP_M + high) : seqlen_k;
    const int all_keys = HIDES_LATER ? min(seqlen_k, warp_row + 1 + high) : seqlen_k;
    // A window hides keys before it as well: tiles that hold no others are not loaded.
#if WINDOW
    const int skipped = max(0, first_row + low) / BLOCK_N;
    const int hidden_keys = warp_row + WARP_M - 1 + low;  // that some row of this warp does not see
#else
    constexpr int skipped = 0, hidden_keys = 0;
#endif
    const int tiles = ceil_div<BLOCK_N>(block_keys) - skipped;
    const float to_log2 = scale * LOG2E;

    const unsigned group_ring = smem_q + Q_BYTES + group * (NUM_STAGES * STAGE_BYTES);
    const unsigned group_thread = threadIdx.x % GROUP_THREADS;
    auto load_tile = [&](unsigned target, const element_t* source, int tile) {
        const int keys_left = seqlen_k - (tile + skipped) * BLOCK_N - group * WARP_N;
        source += kv + static_cast<long long>(tile + skipped) * (BLOCK_N * HEAD_DIM);
        if (tile < tiles && keys_left > 0)
            load_rows<WARP_N, GROUP_THREADS>(target, source, keys_left, group_thread);
    };
    auto load_k = [&](unsigned stage, int tile) { load_tile(stage, k, tile); };
    auto load_v = [&](unsigned stage, int tile) { load_tile(stage + TILE_BYTES, v, tile); };

    // Where this lane points ldmatrix: A fragments (Q) and transposed V take 16 rows by two column
    // halves, K takes 2 x 8 rows by two halves.
    const int row_a = lane % 16, row_k = lane % 8 + lane / 16 * 8;
    const unsigned chunk_a = lane / 16 ^ (row_a & PERIOD);
    const unsigned chunk_k = lane / 8 % 2 ^ (row_k & PERIOD);
    const unsigned lane_q = smem_q + (warp % WARPS_M * WARP_M + row_a) * PITCH;
    const unsigned lane_v = row_a * PITCH + TILE_BYTES, lane_k = row_k * PITCH;

    using Scores = float[M_TILES][2 * N_STEPS][4];
    float out[M_TILES][2 * D_STEPS][4] = {};
    float reference[M_TILES][2],
        sum[M_TILES][2] = {};  // rows lane / 4 and + 8; sums of this lane's columns
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) reference[m][0] = reference[m][1] = NOTHING_YET;
    unsigned q_kept[Q_IN_REGISTERS ? D_STEPS : 1][M_TILES][4];

    auto load_q = [&](unsigned (&a)[M_TILES][4], int d) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
            ldmatrix_x4(a[m], lane_q + m * 16 * PITCH + step_offset(chunk_a, d));
    };
    auto keep_q = [&] {
#pragma unroll
        for (int d = 0; d < (Q_IN_REGISTERS ? D_STEPS : 0); ++d) load_q(q_kept[d], d);
    };
    // S += QK over 16 columns of the head.
    auto qk_step = [&](Scores& s, unsigned stage, int d) {
        unsigned q_now[M_TILES][4];
        if (!Q_IN_REGISTERS) load_q(q_now, d);
        unsigned (&a)[M_TILES][4] = Q_IN_REGISTERS ? q_kept[Q_IN_REGISTERS ? d : 0] : q_now;
#pragma unroll
        for (int n = 0; n < N_STEPS; ++n) {
            unsigned b[4];
            ldmatrix_x4(b, stage + lane_k + n * 16 * PITCH + step_offset(chunk_k, d));
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                mma_16816<IS_BF16>(s[m][2 * n], a[m], b[0], b[1]);
                mma_16816<IS_BF16>(s[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    };
    // Masks what lies beyond the diagonal or the last key; moves references where scores outgrew
    // them.
    auto settle = [&](Scores& s, int first_key) {
        if (first_key + WARP_N > all_keys || (HIDES_EARLIER && first_key < hidden_keys)) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int row = warp_row + m * 16 + h * 8 + lane / 4;
                    const int seen = HIDES_LATER ? min(seqlen_k, row + 1 + high) : seqlen_k;
                    const int keys = seen - first_key - lane % 4 * 2;
#if WINDOW
                    const int before = row + low - first_key - lane % 4 * 2;
#else
                    constexpr int before = 0;
#endif
#pragma unroll
                    for (int n = 0; n < 4 * N_STEPS; ++n)
                        if (n / 2 * 8 + n % 2 >= keys ||
                            (HIDES_EARLIER && n / 2 * 8 + n % 2 < before))
                            s[m][n / 2][2 * h + n % 2] = minus_infinity();
                }
        }
        float largest[M_TILES][2];
        bool grown = false;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float x = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
#pragma unroll
                for (int n = 1; n < 2 * N_STEPS; ++n)
                    x = fmaxf(x, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
                largest[m][h] = x * to_log2;
                grown |= largest[m][h] > reference[m][h] + RESCALE_ABOVE;
            }
        if (!__any_sync(0xffffffffu, grown)) return;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float x = fmaxf(largest[m][h], __shfl_xor_sync(0xffffffffu, largest[m][h], 1));
                x = fmaxf(reference[m][h], fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2)));
                float shrink = exp2_approx(reference[m][h] - x);
                reference[m][h] = x, sum[m][h] *= shrink;
#pragma unroll
                for (int d = 0; d < 2 * D_STEPS; ++d)
                    out[m][d][2 * h] *= shrink, out[m][d][2 * h + 1] *= shrink;
            }
    };
    // P of 16 keys, then out += PV. exp2 of the next 16 overlaps with these mma: one loop, not two.
    auto pv_step = [&](Scores& s, unsigned stage, int n) {
        unsigned p[M_TILES][4];  // two score tiles side by side are one A fragment
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* two = &s[m][2 * n + i / 2][i % 2 * 2];
                float p0 = exp2_approx(two[0] * to_log2 - reference[m][i % 2]);
                float p1 = exp2_approx(two[1] * to_log2 - reference[m][i % 2]);
                sum[m][i % 2] += p0 + p1;
                p[m][i] = pack(p0, p1);
            }
#pragma unroll
        for (int d = 0; d < D_STEPS; ++d) {
            unsigned b[4];
            ldmatrix_x4_trans(b, stage + lane_v + n * 16 * PITCH + step_offset(chunk_a, d));
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                mma_16816<IS_BF16>(out[m][2 * d], p[m], b[0], b[1]);
                mma_16816<IS_BF16>(out[m][2 * d + 1], p[m], b[2], b[3]);
            }
        }
    };

    load_rows<BLOCK_M, THREADS>(smem_q, q, seqlen_q - first_row, threadIdx.x);
    load_k(group_ring, 0);
    cp_async_commit();
    const unsigned last_stage = group_ring + (NUM_STAGES - 1) * STAGE_BYTES;
    auto after = [&](unsigned stage) {
        return stage == last_stage ? group_ring : stage + STAGE_BYTES;
    };
    unsigned stage = group_ring;

    // One stage: V(tile) loads under QK, K(tile + 1) under PV. More: whole tiles load ahead and one
    // barrier a tile is enough, but for V(0), which QK(0) does not wait for.
    if (NUM_STAGES > 1) {
        load_v(group_ring, 0);
        cp_async_commit();
#pragma unroll
        for (int tile = 1; tile < NUM_STAGES - 1; ++tile) {
            load_k(group_ring + tile * STAGE_BYTES, tile),
                load_v(group_ring + tile * STAGE_BYTES, tile);
            cp_async_commit();
        }
    }
    unsigned free_stage = last_stage;  // where the tile before this one was
    for (int tile = 0; tile < tiles; ++tile, free_stage = stage, stage = after(stage)) {
        if (NUM_STAGES > 1 && tile > 0) cp_async_wait<(NUM_STAGES > 1 ? NUM_STAGES - 2 : 0)>();
        else cp_async_wait<NUM_STAGES - 1>();
        if (tile > 0) group_sync(group);
        else __syncthreads();  // Q comes from all threads
        if (NUM_STAGES > 1) load_k(free_stage, tile + NUM_STAGES - 1);
        load_v(free_stage, tile + NUM_STAGES - 1);
        cp_async_commit();
        if (tile == 0) keep_q();

        const int first_key = (tile + skipped) * BLOCK_N + group * WARP_N;
        const bool active = first_key < some_keys;
        Scores s = {};
        if (active) {
#pragma unroll
            for (int d = 0; d < D_STEPS; ++d) qk_step(s, stage, d);
        }
        if (NUM_STAGES == 1 || tile == 0) {
            cp_async_wait<NUM_STAGES - 1>();
            group_sync(group);
        }
        if (NUM_STAGES == 1) {
            load_k(stage, tile + 1);
            cp_async_commit();
        }
        if (!active) continue;
        settle(s, first_key);
#pragma unroll
        for (int n = 0; n < N_STEPS; ++n) pv_step(s, stage, n);
    }
    cp_async_wait<0>();

    if (KEY_GROUPS > 1) {
        // Groups hold the same rows in the same lanes: thread hands over to thread, word by word.
        constexpr int WORDS = M_TILES * (8 * D_STEPS + 4), STRIDE = WARPS_M * WORDS * 32;
        float* mailbox =
            reinterpret_cast<float*>(smem + Q_BYTES) + warp % WARPS_M * (WORDS * 32) + lane;
        __syncthreads();
        if (group > 0) {
            float* to = mailbox + (group - 1) * STRIDE;
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
                for (int i = 0; i < 8 * D_STEPS; ++i, to += 32) *to = out[m][i / 4][i % 4];
                to[0] = reference[m][0], to[32] = reference[m][1], to[64] = sum[m][0],
                to[96] = sum[m][1];
                to += 128;
            }
        }
        __syncthreads();
        if (group > 0) return;
#pragma unroll 1
        for (int from = 1; from < KEY_GROUPS; ++from, mailbox += STRIDE) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                const float* theirs = mailbox + m * (8 * D_STEPS + 4) * 32;
                float keep[2], take[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float other = theirs[(8 * D_STEPS + h) * 32], x = fmaxf(reference[m][h], other);
                    keep[h] = exp2_approx(reference[m][h] - x), take[h] = exp2_approx(other - x);
                    reference[m][h] = x;
                    sum[m][h] = sum[m][h] * keep[h] + theirs[(8 * D_STEPS + 2 + h) * 32] * take[h];
                }
#pragma unroll
                for (int i = 0; i < 8 * D_STEPS; ++i) {
                    float& x = out[m][i / 4][i % 4];
                    x = x * keep[i / 2 % 2] + theirs[i * 32] * take[i / 2 % 2];
                }
            }
        }
    }

    // Through this warp's own rows of Q's memory, so that every store is 16 bytes and coalesced.
    const int staging = warp % WARPS_M * WARP_M;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float total = sum[m][h] + __shfl_xor_sync(0xffffffffu, sum[m][h], 1);
            float inverse = __fdividef(1.f, total + __shfl_xor_sync(0xffffffffu, total, 2));
#pragma unroll
            for (int d = 0; d < 2 * D_STEPS; ++d) {
                unsigned char* at =
                    smem + offset_of(staging + m * 16 + h * 8 + lane / 4, d) + lane % 4 * 4;
                *reinterpret_cast<unsigned*>(at) =
                    pack(out[m][d][2 * h] * inverse, out[m][d][2 * h + 1] * inverse);
            }
        }
    __syncwarp();
    o += (static_cast<long long>(head) * seqlen_q + warp_row) * HEAD_DIM;
    const int rows_left = seqlen_q - warp_row;
#pragma unroll
    for (int i = 0; i < (WARP_M * CHUNKS + 31) / 32; ++i) {
        const int at = i * 32 + lane;
        const unsigned char* from = smem + offset_of(staging + at / CHUNKS, at % CHUNKS);
        if (at / CHUNKS < rows_left && (WARP_M * CHUNKS % 32 == 0 || at < WARP_M * CHUNKS))
            reinterpret_cast<uint4*>(o)[at] = *reinterpret_cast<const uint4*>(from);
    }
}
