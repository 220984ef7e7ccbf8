// flash_fwd_fp32_mma: fp32 attention with heads of up to 256 columns in one kernel
// (FlashAttention-2): TF32 mma.sync and cp.async, sm_80 on. As in flash_fwd_mma, a block owns
// BLOCK_M queries of one head and walks over the keys, BLOCK_N at a time, through a ring of
// NUM_STAGES K and V tiles; a warp owns WARP_M queries, and scores, P and the output stay in its
// registers. Each number is the sum of a high and a low part in TF32, and each product is three:
// low * high, high * high, high * low. A number is split by the warp that reads it: low parts in
// shared memory would double the bytes that every warp reads. With PV_PRODUCTS=2, P V takes its
// small products as one. q, o: (batch, heads, seqlen_q, HEAD_DIM); k, v: (batch, heads_kv,
// seqlen_k, HEAD_DIM), all fp32.
#include "common/ptx/convert.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/shared.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/scheduler.cuh"
#include "common/tile/softmax.cuh"

using namespace attn;

// Outputs of more than 192 columns do not fit a thread's registers: two warps share the queries and
// the scores, which both compute, and one has the first 128 columns of the output.
constexpr int COLUMN_WARPS = HEAD_DIM > 192 ? 2 : 1;
constexpr int THREADS = NUM_WARPS * 32, WARPS_M = NUM_WARPS / COLUMN_WARPS;
constexpr int WARP_M = BLOCK_M / WARPS_M, M_TILES = WARP_M / 16;
constexpr int D_TILES = HEAD_DIM / 8, OUT_TILES = COLUMN_WARPS > 1 ? 16 : D_TILES;
constexpr int N_TILES = BLOCK_N / 8;          // of 8 keys
constexpr int PANELS = (HEAD_DIM + 31) / 32;  // of 32 columns, 128 bytes: a row's banks
constexpr int CHUNKS = HEAD_DIM / 4;          // of 16 bytes
static_assert(M_TILES * 16 * WARPS_M == BLOCK_M && BLOCK_N % 16 == 0 && HEAD_DIM % 8 == 0,
              "whole fragments");
// Tensor cores cut sums towards zero, so a sum has few terms there, and the rest are added in fp32:
// scores of a panel, with the small products apart, and outputs of a tile of keys. GROUP tiles of 8
// keys are summed at once, so that products do not wait for one another.
constexpr int GROUP = M_TILES > 1 || N_TILES < 4 || HEAD_DIM > 128 ? 2 : 4;
// Wide heads leave few registers for numbers on their way: a loop over panels, and fewer columns of
// V at once. At 128 columns and BLOCK_N=64, the loop spares up to 316 bytes of spills.
constexpr bool UNROLLED = HEAD_DIM <= 64;
constexpr int VECTOR = OUT_TILES <= 16 ? 4 : 2;

// Shared memory: Q, then K and V of each stage. Chunks of a row are permuted by an XOR with its
// number. A lane is row or key g = lane / 4 and column c = lane % 4 of a fragment, and which
// columns an instruction multiplies is free, so Q and K come 16 bytes a lane: 8 lanes at once read
// rows 2 i and 2 i + 1, chunks 4 j + c, which bit 2 keeps apart. From V they read keys 2 c (or 2 c
// + 1, the order in which P comes), chunks g = 2 i and 2 i + 1: bits 1 and 2 of the key keep these
// apart. So each is one pass over the 32 banks, and so are the narrower reads of the last 8 to 24
// columns.
constexpr int PITCH = PANELS * 128;
constexpr int Q_BYTES = BLOCK_M * PITCH, TILE_BYTES = BLOCK_N * PITCH, STAGE_BYTES = 2 * TILE_BYTES;
__device__ __forceinline__ int swizzle(int row) { return (row & 6) ^ (row & 1) << 2; }
__device__ __forceinline__ int offset_of(int row, int chunk) {
    return row * PITCH + (chunk & ~7) * 16 + ((chunk & 7 ^ swizzle(row)) << 4);
}

// ROWS contiguous rows to shared memory by all threads. Rows from rows_left on become zeros, so
// that 0 * V is never NaN.
template <int ROWS>
__device__ __forceinline__ void load_rows(unsigned target, const float* source, int rows_left) {
    constexpr int COUNT = ROWS * CHUNKS, STEP = THREADS / CHUNKS;  // rows from pass to pass
    const int thread = threadIdx.x;
    // Whole tiles of 2^n columns take a path without conditions: a thread's addresses differ by
    // constants, and in the bits of the row that swizzle it.
    if (THREADS % CHUNKS == 0 && COUNT % THREADS == 0 && rows_left >= ROWS) {
        const int first = offset_of(thread / CHUNKS, thread % CHUNKS);
#pragma unroll
        for (int i = 0; i < COUNT / THREADS; ++i)
            cp_async_16(target + (first ^ swizzle(i * STEP) << 4) + i * STEP * PITCH,
                        source + thread * 4 + i * THREADS * 4);
    } else {
#pragma unroll 1
        for (int i = thread; i < COUNT; i += THREADS) {
            const int row = i / CHUNKS;
            const bool valid = row < rows_left;
            cp_async_16(target + offset_of(row, i % CHUNKS), source + (valid ? i * 4 : 0), valid);
        }
    }
}

// ---- split products ----
// Numbers are rounded to the 11 bits that a tensor core reads, so that low * low, which is left
// out, has no sign of its own. To cut those of K instead spares 7 % of the instructions, but took
// 83 % of the limit of a row, of large scores.
template <int COUNT>
struct Operand {
    unsigned high[COUNT], low[COUNT];
    __device__ __forceinline__ void round(int i, float x) { tf32_split(x, high[i], low[i]); }
    // In place of low both parts in bf16, of the other operand the other way round: one product of
    // 16 columns is then both small products of 8. It errs by some 2^-21 of x, which P V may and
    // scores may not.
    template <bool HIGH_FIRST>
    __device__ __forceinline__ void round_pair(int i, float x) {
        tf32_split(x, high[i], low[i]);
        const float h = __uint_as_float(high[i]), l = __uint_as_float(low[i]);
        low[i] = HIGH_FIRST ? pack_bf16(h, l) : pack_bf16(l, h);
    }
};
// big and small += a b of `count` neighbours, which may be the same; the small products begin.
template <bool PAIRS, int COUNT>
__device__ __forceinline__ void
multiply(float (&big)[M_TILES][COUNT][4], float (&small)[M_TILES][COUNT][4],
         const Operand<4> (&a)[M_TILES], const Operand<2> (&b)[COUNT], int count = COUNT) {
    auto all = [&](auto product) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < count; ++i) product(big[m][i], small[m][i], a[m], b[i]);
    };
    all([](auto&, auto& to, auto& a, auto& b) {
        if (PAIRS) mma_16816<true>(to, a.low, b.low[0], b.low[1]);
        else mma_1688(to, a.low, b.high[0], b.high[1]);
    });
    all([](auto& to, auto&, auto& a, auto& b) { mma_1688(to, a.high, b.high[0], b.high[1]); });
    if (PAIRS) return;
    all([](auto&, auto& to, auto& a, auto& b) { mma_1688(to, a.high, b.low[0], b.low[1]); });
}

__device__ __forceinline__ void copy4(float* x, const unsigned char* from) {
    const float4 y = *reinterpret_cast<const float4*>(from);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}
__device__ __forceinline__ void copy2(float* x, const unsigned char* from) {
    const float2 y = *reinterpret_cast<const float2*>(from);
    x[0] = y.x, x[1] = y.y;
}

// A row's reference moves only when a score exceeds it by 2^RESCALE_ABOVE, so that the output is
// rescaled, and maxima exchanged, in few tiles instead of in all.
constexpr float RESCALE_ABOVE = 8.f;
constexpr float NOTHING_YET = -1e30f;  // finite: exp2(-inf) of a row without keys, never NaN

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    flash_fwd_fp32_mma(const float* __restrict__ q, const float* __restrict__ k,
                       const float* __restrict__ v, float* __restrict__ o, int heads, int heads_kv,
                       int seqlen_q, int seqlen_k, float scale) {
    extern __shared__ __align__(128) unsigned char smem[];
    const unsigned smem_q = smem_address(smem);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    // Order 0: the blocks of a head follow one another and share its K and V in L2. 1: the longest
    // blocks of all heads begin.
    const int rows = BLOCK_ORDER ? gridDim.y : gridDim.x;
    const int index = BLOCK_ORDER ? blockIdx.y : blockIdx.x;
    const int head = BLOCK_ORDER ? blockIdx.x : blockIdx.y;
    const int first_row = (LATER_SEE_MORE ? rows - 1 - index : index) * BLOCK_M;
    const int warp_row = first_row + warp % WARPS_M * WARP_M;
    const int head_kv = head / (heads / heads_kv);  // both counted over the batch
    const long long kv = static_cast<long long>(head_kv) * seqlen_k * HEAD_DIM;
    q += (static_cast<long long>(head) * seqlen_q + first_row) * HEAD_DIM;
    k += kv, v += kv;
    auto keys_of = [&](int row) { return visible_keys(row, seqlen_q, seqlen_k).end; };
    const int tiles = ceil_div<BLOCK_N>(keys_of(first_row + BLOCK_M - 1));
    // Keys that some row of this warp sees, and keys that all its rows see.
    const int some_keys = keys_of(warp_row + WARP_M - 1), all_keys = keys_of(warp_row);
    const float to_log2 = scale * LOG2E;

    auto load_tile = [&](int at, const float* source, int tile) {
        if (tile < tiles)
            load_rows<BLOCK_N>(smem_q + at,
                               source + static_cast<long long>(tile) * (BLOCK_N * HEAD_DIM),
                               seqlen_k - tile * BLOCK_N);
    };
    auto load_k = [&](int stage, int tile) { load_tile(stage, k, tile); };
    auto load_v = [&](int stage, int tile) { load_tile(stage + TILE_BYTES, v, tile); };

    // This lane's part of row g of Q or K: four neighbours among 16 columns of a panel, or two
    // among the last 8.
    const int lane_row = g * PITCH, lane_chunk = c ^ swizzle(g);
    auto load_columns = [&](float (&x)[4], int from, int column, bool four) {
        const unsigned char* row = smem + from + lane_row;
        if (four) copy4(x, row + ((lane_chunk ^ column / 4) << 4));
        else copy2(x, row + ((c / 2 ^ swizzle(g) ^ column / 4) << 4) + c % 2 * 8);
    };
    const int warp_q = warp % WARPS_M * WARP_M * PITCH;

    using Scores = float[M_TILES][N_TILES][4];
    float out[M_TILES][OUT_TILES][4] = {};
    float reference[M_TILES][2], sum[M_TILES][2] = {};  // rows g and g + 8; sums of this lane
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) reference[m][0] = reference[m][1] = NOTHING_YET;

    // Scores of GROUP * 8 keys.
    auto qk_step = [&](Scores& s, int stage, int first) {
        float small[M_TILES][GROUP][4] = {};
        auto add_panel = [&](int panel, int columns) {
            float big[M_TILES][GROUP][4] = {};
#pragma unroll
            for (int column = 0; column < columns; column += 16) {
                const bool two = columns - column > 8;  // instructions
                float a[2 * M_TILES][4], b[GROUP][4];
#pragma unroll
                for (int i = 0; i < 2 * M_TILES; ++i)
                    load_columns(a[i], warp_q + i * 8 * PITCH + panel * 128, column, two);
#pragma unroll
                for (int i = 0; i < GROUP; ++i)
                    load_columns(b[i], stage + (first + i) * 8 * PITCH + panel * 128, column, two);
#pragma unroll
                for (int half = 0; half < 1 + two; ++half) {
                    Operand<4> queries[M_TILES];
                    Operand<2> keys[GROUP];
#pragma unroll
                    for (int i = 0; i < 4 * M_TILES; ++i)
                        queries[i / 4].round(i % 4, a[i / 4 * 2 + i % 2][half * 2 + i / 2 % 2]);
#pragma unroll
                    for (int i = 0; i < 2 * GROUP; ++i)
                        keys[i / 2].round(i % 2, b[i / 2][half * 2 + i % 2]);
                    multiply<false>(big, small, queries, keys);
                }
            }
#pragma unroll
            for (int i = 0; i < M_TILES * GROUP * 4; ++i) {
                float& to = s[i / (GROUP * 4)][first + i / 4 % GROUP][i % 4];
                const float x = big[i / (GROUP * 4)][i / 4 % GROUP][i % 4];
                to = UNROLLED && panel == 0 ? x : to + x;
            }
        };
        constexpr int UNROLL = UNROLLED ? 8 : 1;
#pragma unroll UNROLL
        for (int panel = 0; panel < HEAD_DIM / 32; ++panel) add_panel(panel, 32);
        if (HEAD_DIM % 32) add_panel(HEAD_DIM / 32, HEAD_DIM % 32);
#pragma unroll
        for (int i = 0; i < M_TILES * GROUP * 4; ++i)
            s[i / (GROUP * 4)][first + i / 4 % GROUP][i % 4] +=
                small[i / (GROUP * 4)][i / 4 % GROUP][i % 4];
    };
    // Masks what lies beyond the diagonal or the last key, moves references where scores outgrew
    // them, and makes P of the scores.
    auto softmax = [&](Scores& s, int first_key) {
        if (first_key + BLOCK_N > all_keys) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int keys = keys_of(warp_row + m * 16 + h * 8 + g) - first_key - c * 2;
#pragma unroll
                    for (int n = 0; n < 2 * N_TILES; ++n)
                        if (n / 2 * 8 + n % 2 >= keys)
                            s[m][n / 2][2 * h + n % 2] = minus_infinity();
                }
        }
        float largest[M_TILES][2];
        bool grown = false;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float x = minus_infinity();
#pragma unroll
                for (int n = 0; n < 2 * N_TILES; ++n) x = fmaxf(x, s[m][n / 2][2 * h + n % 2]);
                largest[m][h] = x * to_log2;
                grown |= largest[m][h] > reference[m][h] + RESCALE_ABOVE;
            }
        if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float x = fmaxf(reference[m][h], quad_max(largest[m][h]));
                    const float shrink = exp2_approx(reference[m][h] - x);
                    reference[m][h] = x, sum[m][h] *= shrink;
#pragma unroll
                    for (int d = 0; d < OUT_TILES; ++d)
                        out[m][d][2 * h] *= shrink, out[m][d][2 * h + 1] *= shrink;
                }
        }
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4 * N_TILES; ++i) {
                float& x = s[m][i / 4][i % 4];
                x = exp2_approx(x * to_log2 - reference[m][i / 2 % 2]);
                sum[m][i / 2 % 2] += x;
            }
    };
    // out += P V of VECTOR * 8 columns, neighbours of each lane; of what is left behind them, one
    // of each 8. Sums begin anew in each tile.
    auto pv_step = [&](const Scores& p, int stage, int first) {
        constexpr bool PAIRS = PV_PRODUCTS == 2;
        const int count = min(VECTOR, D_TILES - first);
        float sums[M_TILES][VECTOR][4] = {};
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            Operand<4> weights[M_TILES];
            Operand<2> values[VECTOR];
#pragma unroll
            for (int i = 0; i < 4 * M_TILES; ++i) {
                const float x = p[i / 4][n][i % 2 * 2 + i / 2 % 2];
                if (PAIRS) weights[i / 4].template round_pair<false>(i % 4, x);
                else weights[i / 4].round(i % 4, x);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                auto value = [&](int column) {
                    return smem + stage + TILE_BYTES + n * 8 * PITCH + column % 4 * 4 +
                           offset_of(c * 2 + i, first * 2 + column / 4);
                };
                float x[4];
                if (count == 4) copy4(x, value(g * 4));
                else if (count == VECTOR) copy2(x, value(g * VECTOR));
                else
#pragma unroll
                    for (int e = 0; e < count; ++e)
                        x[e] = *reinterpret_cast<const float*>(value(e * 8 + g));
#pragma unroll
                for (int e = 0; e < count; ++e)
                    if (PAIRS) values[e].template round_pair<true>(i, x[e]);
                    else values[e].round(i, x[e]);
            }
            multiply<PAIRS>(sums, sums, weights, values, count);
        }
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4 * count; ++i)
                out[m][first % OUT_TILES + i / 4][i % 4] += sums[m][i / 4][i % 4];
    };

    // f(begin, end) of this warp's tiles of 8 columns.
    auto of_columns = [&](auto f) {
        if (COLUMN_WARPS == 1 || warp < WARPS_M) f(0, OUT_TILES);
        else f(OUT_TILES, D_TILES);
    };

    load_rows<BLOCK_M>(smem_q, q, seqlen_q - first_row);
    load_k(Q_BYTES, 0);
    cp_async_commit();
    // One stage: V(tile) loads under Q K, K(tile + 1) under P V. More: whole tiles load ahead and
    // one barrier a tile is enough, but for V(0), which the first Q K does not wait for.
    constexpr int LAST_STAGE = Q_BYTES + (NUM_STAGES - 1) * STAGE_BYTES;
    if (NUM_STAGES > 1) {
        load_v(Q_BYTES, 0);
        cp_async_commit();
#pragma unroll
        for (int tile = 1; tile < NUM_STAGES - 1; ++tile) {
            load_k(Q_BYTES + tile * STAGE_BYTES, tile), load_v(Q_BYTES + tile * STAGE_BYTES, tile);
            cp_async_commit();
        }
    }
    int stage = Q_BYTES;
    for (int tile = 0; tile < tiles;
         ++tile, stage = stage == LAST_STAGE ? Q_BYTES : stage + STAGE_BYTES) {
        // Where the tile before this one was.
        const int free_stage = stage == Q_BYTES ? LAST_STAGE : stage - STAGE_BYTES;
        if (NUM_STAGES > 1 && tile > 0) cp_async_wait<(NUM_STAGES > 1 ? NUM_STAGES - 2 : 0)>();
        else cp_async_wait<NUM_STAGES - 1>();
        __syncthreads();
        if (NUM_STAGES > 1) load_k(free_stage, tile + NUM_STAGES - 1);
        load_v(free_stage, tile + NUM_STAGES - 1);
        cp_async_commit();
        const int first_key = tile * BLOCK_N;
        const bool active = first_key < some_keys;
        Scores s = {};
        if (active) {
#pragma unroll
            for (int n = 0; n < N_TILES; n += GROUP) qk_step(s, stage, n);
        }
        if (NUM_STAGES == 1 || tile == 0) {
            cp_async_wait<NUM_STAGES - 1>();
            __syncthreads();
        }
        if (NUM_STAGES == 1) {
            load_k(stage, tile + 1);
            cp_async_commit();
        }
        if (!active) continue;
        softmax(s, first_key);
        of_columns([&](int begin, int end) {
#pragma unroll
            for (int first = begin; first < end; first += VECTOR) pv_step(s, stage, first);
        });
    }
    cp_async_wait<0>();

    o += (static_cast<long long>(head) * seqlen_q + warp_row) * HEAD_DIM;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float inverse = __fdividef(1.f, quad_sum(sum[m][h]));
            const int row = m * 16 + h * 8 + g;
            if (warp_row + row >= seqlen_q) continue;
            float* to = o + row * HEAD_DIM;
            // A lane has columns 2 c and 2 c + 1 of each tile: 2 * VECTOR neighbours.
            of_columns([&](int begin, int end) {
                const int vectors = end / VECTOR * VECTOR;
#pragma unroll
                for (int i = begin * 2; i < vectors * 2; i += 4) {
                    auto at = [&](int j) {
                        const int tile = i / (2 * VECTOR) * VECTOR + j % VECTOR;
                        return out[m][tile % OUT_TILES][2 * h + j / VECTOR % 2] * inverse;
                    };
                    const int j = i % (2 * VECTOR);
                    *reinterpret_cast<float4*>(to + (i - j) * 4 + c * (2 * VECTOR) + j) =
                        make_float4(at(j), at(j + 1), at(j + 2), at(j + 3));
                }
#pragma unroll
                for (int tile = vectors; tile < end; ++tile) {
                    const float* two = out[m][tile % OUT_TILES] + 2 * h;
                    *reinterpret_cast<float2*>(to + tile * 8 + c * 2) =
                        make_float2(two[0] * inverse, two[1] * inverse);
                }
            });
        }
}
