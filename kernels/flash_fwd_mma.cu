// flash_fwd_mma: the whole forward in one kernel (FlashAttention-2), mma.sync and cp.async, sm_80 and later.
// A block owns BLOCK_M queries of one head and walks over the keys, BLOCK_N at a time, through a ring of
// NUM_STAGES K and V tiles. A warp owns WARP_M queries and the output stays in its registers: fp32, unscaled
// by the row sum until the end. Scores become P in registers, so they never touch shared memory.
// q, o: (batch, heads, seqlen_q, HEAD_DIM); k, v: (batch, heads_kv, seqlen_k, HEAD_DIM).
#include "common/element.cuh"
#include "common/mma.cuh"

// KEY_GROUPS warps share the same queries, each taking its own BLOCK_N / KEY_GROUPS keys of every tile, and
// merge their outputs at the end: more warps for a grid too small for the GPU, at WARP_M = 32 still.
constexpr int THREADS = NUM_WARPS * 32;
constexpr int WARPS_M = NUM_WARPS / KEY_GROUPS;
constexpr int WARP_M = BLOCK_M / WARPS_M, M_TILES = WARP_M / 16;
constexpr int WARP_N = BLOCK_N / KEY_GROUPS, N_STEPS = WARP_N / 16;
constexpr int D_STEPS = HEAD_DIM / 16, CHUNKS = HEAD_DIM / 8;  // a chunk is 16 bytes
static_assert(M_TILES * 16 * WARPS_M == BLOCK_M && N_STEPS * 16 * KEY_GROUPS == BLOCK_N && HEAD_DIM % 64 == 0, "");

// Shared memory: Q (at the end O), then K and V of each stage (at the end the outputs to merge). ldmatrix
// reads 8 rows at one column: a swizzle or 16 bytes of padding put them in 8 different bank groups.
constexpr int PITCH = HEAD_DIM * 2 + (SWIZZLE ? 0 : 16);
constexpr int Q_BYTES = BLOCK_M * PITCH, TILE_BYTES = BLOCK_N * PITCH;

__device__ __forceinline__ unsigned offset_of(int row, int chunk) {
    return row * PITCH + ((SWIZZLE ? chunk ^ (row & 7) : chunk) << 4);
}
// Offset of 16-column step `step`, given a lane's own swizzled chunk (0 or 1, xor its row).
__device__ __forceinline__ unsigned step_offset(unsigned lane_chunk, int step) {
    return SWIZZLE ? ((lane_chunk ^ (2 * step & 6)) << 4) + (2 * step & ~7) * 16 : (lane_chunk + 2 * step) << 4;
}

// ROWS contiguous rows to shared memory; rows from rows_left on become zeros, so that 0 * V is never NaN.
template <int ROWS>
__device__ __forceinline__ void load_rows(unsigned target, const element_t* source, int rows_left) {
    static_assert(ROWS * CHUNKS % THREADS == 0, "a tile must be whole chunks for every thread");
    const bool whole = rows_left >= ROWS;
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS / THREADS; ++i) {
        const int index = i * THREADS + threadIdx.x;
        const unsigned to = target + offset_of(index / CHUNKS, index % CHUNKS);
        if (whole) cp_async_16(to, source + index * 8, true);
        else {
            const bool valid = index / CHUNKS < rows_left;
            cp_async_16(to, source + (valid ? index * 8 : 0), valid);
        }
    }
}

// A row's reference moves only when a score exceeds it by 2^RESCALE_ABOVE: P up to 256 is as exact in fp16
// as P up to 1, and the output is rescaled, and maxima exchanged, in few tiles instead of in all.
constexpr float RESCALE_ABOVE = 8.f;
constexpr float NOTHING_YET = -1e30f;  // finite, so that a row without keys so far gives exp2(-inf), never NaN

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
flash_fwd_mma(const element_t* __restrict__ q, const element_t* __restrict__ k, const element_t* __restrict__ v,
              element_t* __restrict__ o, int heads, int heads_kv, int seqlen_q, int seqlen_k, float scale) {
    extern __shared__ __align__(128) unsigned char smem[];
    const unsigned smem_q = smem_address(smem), ring = smem_q + Q_BYTES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / WARPS_M;
    // Causal blocks differ in length: begin with the longest.
    const int first_row = (CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * BLOCK_M;
    const int warp_row = first_row + warp % WARPS_M * WARP_M;
    const int batch = blockIdx.y / heads, head_kv = blockIdx.y % heads / (heads / heads_kv);
    const long long kv = static_cast<long long>(batch * heads_kv + head_kv) * seqlen_k * HEAD_DIM;
    k += kv, v += kv;
    q += (static_cast<long long>(blockIdx.y) * seqlen_q + first_row) * HEAD_DIM;
    o += (static_cast<long long>(blockIdx.y) * seqlen_q + warp_row) * HEAD_DIM;
    const int diagonal = seqlen_k - seqlen_q;  // row i sees keys up to i + diagonal
    const int block_keys = CAUSAL ? min(seqlen_k, first_row + BLOCK_M + diagonal) : seqlen_k;
    const int some_keys = CAUSAL ? min(seqlen_k, warp_row + WARP_M + diagonal) : seqlen_k;  // seen by a row of the warp
    const int all_keys = CAUSAL ? min(seqlen_k, warp_row + 1 + diagonal) : seqlen_k;        // by all its rows
    const int tiles = (block_keys + BLOCK_N - 1) / BLOCK_N;
    const float to_log2 = scale * LOG2E;

    auto smem_k = [&](int tile) { return ring + tile % NUM_STAGES * (2 * TILE_BYTES); };
    auto smem_v = [&](int tile) { return smem_k(tile) + TILE_BYTES; };
    auto load_k = [&](int tile) {
        if (tile < tiles) load_rows<BLOCK_N>(smem_k(tile), k + static_cast<long long>(tile) * (BLOCK_N * HEAD_DIM), seqlen_k - tile * BLOCK_N);
    };
    auto load_v = [&](int tile) {
        if (tile < tiles) load_rows<BLOCK_N>(smem_v(tile), v + static_cast<long long>(tile) * (BLOCK_N * HEAD_DIM), seqlen_k - tile * BLOCK_N);
    };

    // Where this lane points ldmatrix: A fragments (Q) and transposed V take 16 rows by two column halves,
    // K takes 2 x 8 rows by two halves.
    const int row_a = lane % 16, row_k = lane % 8 + lane / 16 * 8;
    const unsigned chunk_a = SWIZZLE ? lane / 16 ^ row_a % 8 : lane / 16;
    const unsigned chunk_k = SWIZZLE ? lane / 8 % 2 ^ row_k % 8 : lane / 8 % 2;
    const unsigned lane_q = smem_q + (warp % WARPS_M * WARP_M + row_a) * PITCH;
    const unsigned lane_v = (group * WARP_N + row_a) * PITCH, lane_k = (group * WARP_N + row_k) * PITCH;
    auto load_q = [&](unsigned (&a)[M_TILES][4], int d) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) ldmatrix_x4(a[m], lane_q + m * 16 * PITCH + step_offset(chunk_a, d));
    };

    float out[M_TILES][2 * D_STEPS][4] = {};
    float reference[M_TILES][2], sum[M_TILES][2] = {};  // this lane's rows l/4 and l/4 + 8; sums of its own columns
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) reference[m][0] = reference[m][1] = NOTHING_YET;
    unsigned q_kept[Q_IN_REGISTERS ? D_STEPS : 1][M_TILES][4];

    load_rows<BLOCK_M>(smem_q, q, seqlen_q - first_row);
    load_k(0);
    cp_async_commit();
    if (NUM_STAGES > 1) {
        load_v(0);
        cp_async_commit();
#pragma unroll
        for (int tile = 1; tile < NUM_STAGES - 1; ++tile) load_k(tile), load_v(tile), cp_async_commit();
    }

    for (int tile = 0; tile < tiles; ++tile) {
        // One stage: V(tile) loads under QK, K(tile + 1) under PV. More: whole tiles load ahead and one
        // barrier a tile is enough, but for V(0), which QK(0) does not wait for.
        if (NUM_STAGES == 1) cp_async_wait<0>();
        else if (tile == 0) cp_async_wait<NUM_STAGES - 1>();
        else cp_async_wait<(NUM_STAGES > 1 ? NUM_STAGES - 2 : 0)>();
        __syncthreads();
        if (NUM_STAGES == 1) load_v(tile);
        else load_k(tile + NUM_STAGES - 1), load_v(tile + NUM_STAGES - 1);
        cp_async_commit();
        if (Q_IN_REGISTERS && tile == 0) {
#pragma unroll
            for (int d = 0; d < (Q_IN_REGISTERS ? D_STEPS : 0); ++d) load_q(q_kept[d], d);
        }

        const int first_key = tile * BLOCK_N + group * WARP_N;
        const bool active = first_key < some_keys;
        float s[M_TILES][2 * N_STEPS][4] = {};
        if (active) {
#pragma unroll
            for (int d = 0; d < D_STEPS; ++d) {
                unsigned q_now[M_TILES][4];
                if (!Q_IN_REGISTERS) load_q(q_now, d);
                unsigned(&a)[M_TILES][4] = Q_IN_REGISTERS ? q_kept[Q_IN_REGISTERS ? d : 0] : q_now;
#pragma unroll
                for (int n = 0; n < N_STEPS; ++n) {
                    unsigned b[4];
                    ldmatrix_x4(b, smem_k(tile) + lane_k + n * 16 * PITCH + step_offset(chunk_k, d));
#pragma unroll
                    for (int m = 0; m < M_TILES; ++m) {
                        mma_16816(s[m][2 * n], a[m], b[0], b[1]);
                        mma_16816(s[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
            }
        }
        if (NUM_STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();
            load_k(tile + 1);
            cp_async_commit();
        } else if (tile == 0) {
            cp_async_wait<NUM_STAGES - 1>();
            __syncthreads();
        }
        if (!active) continue;

        if (first_key + WARP_N > all_keys) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int n = 0; n < 2 * N_STEPS; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        int key = first_key + n * 8 + lane % 4 * 2 + e % 2, row = warp_row + m * 16 + lane / 4 + e / 2 * 8;
                        if (key >= (CAUSAL ? min(seqlen_k, row + 1 + diagonal) : seqlen_k)) s[m][n][e] = minus_infinity();
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
                for (int n = 1; n < 2 * N_STEPS; ++n) x = fmaxf(x, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
                largest[m][h] = x * to_log2;
                grown |= largest[m][h] > reference[m][h] + RESCALE_ABOVE;
            }
        if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float x = fmaxf(largest[m][h], __shfl_xor_sync(0xffffffffu, largest[m][h], 1));
                    x = fmaxf(reference[m][h], fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2)));
                    float shrink = exp2_approx(reference[m][h] - x);
                    reference[m][h] = x, sum[m][h] *= shrink;
#pragma unroll
                    for (int d = 0; d < 2 * D_STEPS; ++d) out[m][d][2 * h] *= shrink, out[m][d][2 * h + 1] *= shrink;
                }
        }

        // exp2 and PV in one loop, so that the special function unit and the tensor cores overlap.
#pragma unroll
        for (int n = 0; n < N_STEPS; ++n) {
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
                ldmatrix_x4_trans(b, smem_v(tile) + lane_v + n * 16 * PITCH + step_offset(chunk_a, d));
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    mma_16816(out[m][2 * d], p[m], b[0], b[1]);
                    mma_16816(out[m][2 * d + 1], p[m], b[2], b[3]);
                }
            }
        }
    }
    cp_async_wait<0>();

    if (KEY_GROUPS > 1) {
        // Groups hold the same rows in the same lanes: thread hands over to thread, word by word.
        constexpr int WORDS = M_TILES * (8 * D_STEPS + 4), STRIDE = WARPS_M * WORDS * 32;
        float* mailbox = reinterpret_cast<float*>(smem + Q_BYTES) + warp % WARPS_M * (WORDS * 32) + lane;
        __syncthreads();
        if (group > 0) {
            float* to = mailbox + (group - 1) * STRIDE;
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
                for (int i = 0; i < 8 * D_STEPS; ++i, to += 32) *to = out[m][i / 4][i % 4];
                to[0] = reference[m][0], to[32] = reference[m][1], to[64] = sum[m][0], to[96] = sum[m][1];
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
                for (int i = 0; i < 8 * D_STEPS; ++i)
                    out[m][i / 4][i % 4] = out[m][i / 4][i % 4] * keep[i / 2 % 2] + theirs[i * 32] * take[i / 2 % 2];
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
            float inverse = 1.f / (total + __shfl_xor_sync(0xffffffffu, total, 2));
#pragma unroll
            for (int d = 0; d < 2 * D_STEPS; ++d) {
                unsigned char* at = smem + offset_of(staging + m * 16 + h * 8 + lane / 4, d) + lane % 4 * 4;
                *reinterpret_cast<unsigned*>(at) = pack(out[m][d][2 * h] * inverse, out[m][d][2 * h + 1] * inverse);
            }
        }
    __syncwarp();
    const int rows_left = seqlen_q - warp_row;
#pragma unroll
    for (int i = 0; i < WARP_M * CHUNKS / 32; ++i) {
        const int index = i * 32 + lane;
        if (index / CHUNKS < rows_left)
            reinterpret_cast<uint4*>(o)[index] = *reinterpret_cast<const uint4*>(smem + offset_of(staging + index / CHUNKS, index % CHUNKS));
    }
}
