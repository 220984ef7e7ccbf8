// flash_fwd_fp32_halves: fp32 attention with heads of up to 256 columns on the tensor cores of
// fp16: mma.sync and cp.async, sm_80 on. A number x is (high + low * 2^-11) / s, where high and low
// are fp16, of 11 bits each, and s is a power of two: one of each tile of K and V, one of each
// query. A product is high * high + (high * low + low * high) * 2^-11, at twice the rate of TF32.
// split: writes K and V as the images of tiles that fwd has in shared memory, so that a number is
// split once a call and not by all who read it. fwd: as in flash_fwd_mma, a block owns BLOCK_M
// queries of one head and walks over the keys, BLOCK_N at a time, through a ring of NUM_STAGES
// images of K and V; a warp owns WARP_M queries, and scores, P and the output stay in its
// registers. A tile whose numbers are too far apart for one s is multiplied in fp32 from device
// memory. q, o: (batch, heads, seqlen_q, HEAD_DIM); k, v: (batch, heads_kv, seqlen_k, HEAD_DIM),
// all fp32. halves: (batch * heads_kv, tiles, 2, IMAGE), of K and of V.
#include "common/ptx/convert.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/shared.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/scheduler.cuh"
#include "common/tile/softmax.cuh"

using namespace attn;

// Matrices of ldmatrix, 8 rows of 8 columns, are 128 contiguous bytes, so no two of their rows meet
// in a bank: those of 8 rows follow one another, then those of the next 8 rows. An image has the
// high parts, the low parts, and 1 / s, or 0 for a tile that is multiplied in fp32.
constexpr int D_STEPS = (HEAD_DIM + 15) / 16, CHUNKS = 2 * D_STEPS;  // of 8 columns
constexpr int BAND = CHUNKS * 128;                                   // bytes of 8 rows
constexpr int PLANE = BLOCK_N / 8 * BAND, IMAGE = 2 * PLANE + 16;
static_assert(BLOCK_N % 16 == 0 && HEAD_DIM % 8 == 0, "whole fragments");

constexpr float LOW_SCALE = 2048.f;  // 2^11

// The least and the largest magnitude of numbers but 0, as bits without a sign.
struct Range {
    unsigned largest = 0, least = ~0u;  // least: one less, so that 0 is above all
    __device__ __forceinline__ void add(float x) {
        const unsigned bits = __float_as_uint(x) << 1;
        largest = max(largest, bits), least = min(least, bits - 1);
    }
    __device__ __forceinline__ void add_lane(int distance) {
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
        least = min(least, __shfl_xor_sync(0xffffffffu, least, distance));
    }
    // s takes the largest to [2^14, 2^15), if that takes no more than 2^95, so that products of
    // both factors 1 / s keep clear of fp32's smallest numbers.
    __device__ __forceinline__ unsigned exponent() const {
        return min(127u + 95u, 127u + 14u + 127u - (largest >> 24));
    }
    __device__ __forceinline__ float scale() const { return __uint_as_float(exponent() << 23); }
    __device__ __forceinline__ float inverse() const {
        return __uint_as_float(254u - exponent() << 23);
    }
    // Whether all keep 22 bits, or 18 at 2^-32 of the largest: the smallest fp16 is 2^-24, that of
    // a low part counts as 2^-35. Infinities and NaN are not in range.
    __device__ __forceinline__ bool fits() const {
        const bool near = (least + 1 >> 24) + exponent() >= 127u + 127u - 18u;
        return largest == 0 || (largest >> 24 < 255 && near);
    }
};

// Two numbers, already times s, in two parts.
__device__ __forceinline__ void split2(float x, float y, unsigned& high, unsigned& low) {
    high = pack_half(x, y);
    low = pack_half((x - low_of(high)) * LOW_SCALE, (y - high_of(high)) * LOW_SCALE);
}
// Eight neighbours of a row: 16 bytes of each plane.
struct Eight {
    float x[8];
    __device__ __forceinline__ void load(const float* from, bool valid) {
        float4 a = make_float4(0.f, 0.f, 0.f, 0.f), b = a;
        if (valid) {
            a = reinterpret_cast<const float4*>(from)[0];
            b = reinterpret_cast<const float4*>(from)[1];
        }
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    }
    __device__ __forceinline__ void add_to(Range& range) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) range.add(x[i]);
    }
    __device__ __forceinline__ void store(unsigned char* to, int plane, float s) const {
        uint4 high, low;
        split2(x[0] * s, x[1] * s, high.x, low.x);
        split2(x[2] * s, x[3] * s, high.y, low.y);
        split2(x[4] * s, x[5] * s, high.z, low.z);
        split2(x[6] * s, x[7] * s, high.w, low.w);
        *reinterpret_cast<uint4*>(to) = high;
        *reinterpret_cast<uint4*>(to + plane) = low;
    }
};

#if STAGE_SPLIT
// A block writes one image of K (blockIdx.z 0) or V: of each 16 bytes a thread's turn is one.
constexpr int THREADS = 256, COUNT = BLOCK_N * CHUNKS, TURNS = ceil_div<THREADS>(COUNT);

extern "C" __global__ void __launch_bounds__(THREADS)
    flash_fwd_fp32_halves_split(const float* __restrict__ k, const float* __restrict__ v,
                                unsigned char* __restrict__ halves, int seqlen_k) {
    extern __shared__ uint2 ranges[];  // of each warp
    const int tile = blockIdx.x, thread = threadIdx.x;
    const long long first = static_cast<long long>(blockIdx.y) * seqlen_k + tile * BLOCK_N;
    const float* from = (blockIdx.z ? v : k) + first * HEAD_DIM;
    halves += ((static_cast<long long>(blockIdx.y) * gridDim.x + tile) * 2 + blockIdx.z) * IMAGE;
    const int rows = seqlen_k - tile * BLOCK_N;
    Eight part[TURNS];
    Range range;
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        const int at = thread + i * THREADS;
        const int row = at / (8 * CHUNKS) * 8 + at % 8, column = at / 8 % CHUNKS * 8;
        part[i].load(from + row * HEAD_DIM + column, at < COUNT && row < rows && column < HEAD_DIM);
        part[i].add_to(range);
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) range.add_lane(distance);
    if (thread % 32 == 0) ranges[thread / 32] = make_uint2(range.largest, range.least);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i)
        range.largest = max(range.largest, ranges[i].x),
        range.least = min(range.least, ranges[i].y);
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        const int at = thread + i * THREADS;
        if (at < COUNT) part[i].store(halves + at * 16, PLANE, range.scale());
    }
    if (thread == 0)
        *reinterpret_cast<float4*>(halves + 2 * PLANE) =
            make_float4(range.fits() ? range.inverse() : 0.f, 0.f, 0.f, 0.f);
}
#else
constexpr int THREADS = NUM_WARPS * 32, WARP_M = BLOCK_M / NUM_WARPS, M_TILES = WARP_M / 16;
constexpr int N_TILES = BLOCK_N / 8, N_STEPS = BLOCK_N / 16, OUT_TILES = HEAD_DIM / 8;
static_assert(M_TILES * 16 * NUM_WARPS == BLOCK_M, "whole fragments");
// Tensor cores cut sums towards zero, so a sum has few terms there, and the rest are added in fp32:
// scores of PANEL steps of 16 columns, with the small products apart, and outputs of a tile of
// keys. GROUP tiles of 8 keys are summed at once, so that products do not wait for one another.
constexpr int PANEL = 2, PANELS_AT_ONCE = LOAD_AHEAD ? 16 : 1;
constexpr int GROUP = M_TILES > 1 || HEAD_DIM > 128 ? 2 : N_TILES < 4 ? N_TILES : 4;
// Shared memory: Q in two planes, 1 / s of each query, then images of K and V of each stage.
constexpr int Q_PLANE = BLOCK_M / 8 * BAND, Q_BYTES = 2 * Q_PLANE + BLOCK_M * 4;
constexpr int STAGE_BYTES = 2 * IMAGE;

// A row's reference moves only when a score exceeds it by 2^RESCALE_ABOVE, so that the output is
// rescaled in few tiles instead of in all.
constexpr float RESCALE_ABOVE = 8.f;
constexpr float LOWEST = -3.4e38f;  // finite: exp2(-inf) of a row without keys, never NaN
// P of a tile is referred to the row's largest score in that tile, and that one becomes 2^15: what
// fp16 loses of the smaller ones is then as little as of K and V.
constexpr float P_LOG2 = 15.f, P_INVERSE = 1.f / 32768.f;

// Loads of shared memory are not moved ahead over this. Where outputs fill half of the registers,
// that spares 200 bytes of spills.
__device__ __forceinline__ void keep_order() {
    if (!LOAD_AHEAD) __syncwarp();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    flash_fwd_fp32_halves(const float* __restrict__ q, const float* __restrict__ k,
                          const float* __restrict__ v, const unsigned char* __restrict__ halves,
                          float* __restrict__ o, int heads, int heads_kv, int seqlen_q,
                          int seqlen_k, float scale) {
    extern __shared__ __align__(128) unsigned char smem[];
    const unsigned smem_q = smem_address(smem);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    // Order 0: the blocks of a head follow one another and share its K and V in L2. 1: the longest
    // blocks of all heads begin.
    const int rows = BLOCK_ORDER ? gridDim.y : gridDim.x;
    const int index = BLOCK_ORDER ? blockIdx.y : blockIdx.x;
    const int head = BLOCK_ORDER ? blockIdx.x : blockIdx.y;
    const int first_row = (LATER_SEE_MORE ? rows - 1 - index : index) * BLOCK_M;
    const int warp_row = first_row + warp * WARP_M;
    const int head_kv = head / (heads / heads_kv);  // both counted over the batch
    // Rows of a tensor, of at least 32 bytes each, are fewer than 2^32.
    auto elements = [](unsigned row) { return row * static_cast<long long>(HEAD_DIM); };
    const long long first_query = static_cast<long long>(head) * seqlen_q + warp_row;
    const long long first_of_head = static_cast<long long>(head_kv) * seqlen_k;
    const int first_tile = head_kv * ceil_div<BLOCK_N>(seqlen_k);
    auto keys_of = [&](int row) { return visible_keys(row, seqlen_q, seqlen_k).end; };
    const int tiles = ceil_div<BLOCK_N>(keys_of(first_row + BLOCK_M - 1));
    // Keys that some row of this warp sees, and keys that all its rows see.
    const int some_keys = keys_of(warp_row + WARP_M - 1), all_keys = keys_of(warp_row);
    const float to_log2 = scale * LOG2E;

    auto load_image = [&](int at, int tile, int which) {
        if (tile >= tiles) return;
        const unsigned char* from = halves +
                                    static_cast<long long>(first_tile + tile) * STAGE_BYTES +
                                    which * IMAGE + threadIdx.x * 16;
        const unsigned to = smem_q + at + which * IMAGE + threadIdx.x * 16;
        constexpr int WHOLE = IMAGE / 16 / THREADS;
#pragma unroll
        for (int i = 0; i < WHOLE; ++i) cp_async_16(to + i * THREADS * 16, from + i * THREADS * 16);
        if (WHOLE * THREADS + threadIdx.x < IMAGE / 16)
            cp_async_16(to + WHOLE * THREADS * 16, from + WHOLE * THREADS * 16);
    };
    auto load_k = [&](int stage, int tile) { load_image(stage, tile, 0); };
    auto load_v = [&](int stage, int tile) { load_image(stage, tile, 1); };
    auto factor_of = [&](int image) {
        return *reinterpret_cast<const float*>(smem + image + 2 * PLANE);
    };

    // Where this lane points ldmatrix. A fragments (Q) and transposed V: 16 rows by two columns of
    // matrices; K: 2 x 8 rows by two.
    const unsigned lane_a = lane / 8 % 2 * BAND + lane / 16 * 128 + lane % 8 * 16;
    const unsigned lane_k = lane / 16 * BAND + lane / 8 % 2 * 128 + lane % 8 * 16;
    const unsigned lane_q = smem_q + warp * (WARP_M / 8 * BAND) + lane_a;

    using Scores = float[M_TILES][N_TILES][4];
    float out[M_TILES][OUT_TILES][4] = {};
    float reference[M_TILES][2], sum[M_TILES][2] = {};  // rows g and g + 8; sums of this lane
    float* q_factor = reinterpret_cast<float*>(smem + 2 * Q_PLANE) + warp * WARP_M;
    bool q_fits = true;

    // Q of this warp, 8 rows at once, a row in four lanes.
    auto split_q = [&] {
        const float* queries = q + first_query * HEAD_DIM;
        constexpr int TURNS = ceil_div<4>(CHUNKS);
#pragma unroll 1
        for (int band = 0; band < WARP_M / 8; ++band) {
            Eight part[TURNS];
            Range range;
#pragma unroll
            for (int i = 0; i < TURNS; ++i) {
                const int row = band * 8 + lane % 8, chunk = lane / 8 + i * 4;
                part[i].load(queries + row * HEAD_DIM + chunk * 8,
                             warp_row + row < seqlen_q && chunk * 8 < HEAD_DIM);
                part[i].add_to(range);
            }
            range.add_lane(8), range.add_lane(16);
            unsigned char* to = smem + (warp * (WARP_M / 8) + band) * BAND + lane * 16;
#pragma unroll
            for (int i = 0; i < TURNS; ++i)
                if (CHUNKS % 4 == 0 || lane / 8 + i * 4 < CHUNKS)
                    part[i].store(to + i * 512, Q_PLANE, range.scale());
            if (lane < 8) q_factor[band * 8 + lane] = range.inverse();
            q_fits = q_fits && range.fits();
        }
        q_fits = __all_sync(0xffffffffu, q_fits);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) reference[m][0] = reference[m][1] = LOWEST;
    };

    // Scores of GROUP * 8 keys, times both s.
    auto qk_step = [&](Scores& s, int stage, int first) {
        float small[M_TILES][GROUP][4] = {};
        const unsigned keys = smem_q + stage + first * BAND + lane_k;
#pragma unroll PANELS_AT_ONCE
        for (int panel = 0; panel < D_STEPS; panel += PANEL) {
            float big[M_TILES][GROUP][4] = {};
#pragma unroll
            for (int d = panel; d < D_STEPS && d < panel + PANEL; ++d) {
                unsigned a[M_TILES][4], b_high[GROUP / 2][4], b_low[4];
                auto load_q = [&](int plane) {
#pragma unroll
                    for (int m = 0; m < M_TILES; ++m)
                        ldmatrix_x4(a[m], lane_q + m * 2 * BAND + d * 256 + plane);
                };
                auto add = [&](auto& to, int n, const unsigned (&b)[4]) {
#pragma unroll
                    for (int i = 0; i < 2 * M_TILES; ++i)
                        mma_16816<false>(to[i / 2][n + i % 2], a[i / 2], b[i % 2 * 2],
                                         b[i % 2 * 2 + 1]);
                };
                load_q(0);
#pragma unroll
                for (int n = 0; n < GROUP; n += 2) {
                    ldmatrix_x4(b_low, keys + n * BAND + d * 256 + PLANE);
                    ldmatrix_x4(b_high[n / 2], keys + n * BAND + d * 256);
                    add(small, n, b_low);
                    add(big, n, b_high[n / 2]);
                }
                load_q(Q_PLANE);
#pragma unroll
                for (int n = 0; n < GROUP; n += 2) add(small, n, b_high[n / 2]);
            }
#pragma unroll
            for (int i = 0; i < M_TILES * GROUP * 4; ++i) {
                float& to = s[i / (GROUP * 4)][first + i / 4 % GROUP][i % 4];
                const float x = big[i / (GROUP * 4)][i / 4 % GROUP][i % 4];
                to = LOAD_AHEAD && panel == 0 ? x : to + x;
            }
        }
#pragma unroll
        for (int i = 0; i < M_TILES * GROUP * 4; ++i) {
            float& to = s[i / (GROUP * 4)][first + i / 4 % GROUP][i % 4];
            to = fmaf(small[i / (GROUP * 4)][i / 4 % GROUP][i % 4], 1.f / LOW_SCALE, to);
        }
    };
    // The same in fp32, of numbers for which there is no s.
    auto qk_fp32 = [&](Scores& s, int first_key) {
        const float* queries = q + elements(head * seqlen_q + warp_row);
        const float* keys = k + elements(head_kv * seqlen_k + first_key);
#pragma unroll 1
        for (int d = 0; d < HEAD_DIM; ++d) {
            float x[M_TILES][2];
#pragma unroll
            for (int i = 0; i < 2 * M_TILES; ++i)
                x[i / 2][i % 2] = queries[min(i * 8 + g, seqlen_q - 1 - warp_row) * HEAD_DIM + d];
#pragma unroll
            for (int n = 0; n < 2 * N_TILES; ++n) {
                const int key = min(n / 2 * 8 + c * 2 + n % 2, seqlen_k - 1 - first_key);
                const float y = keys[key * HEAD_DIM + d];
#pragma unroll
                for (int i = 0; i < 2 * M_TILES; ++i) {
                    float& to = s[i / 2][n / 2][i % 2 * 2 + n % 2];
                    to = fmaf(x[i / 2][i % 2], y, to);
                }
            }
        }
    };

    // P of a tile in two parts, as A fragments, and what a row's products are multiplied by.
    unsigned p_high[M_TILES][N_STEPS][4], p_low[M_TILES][N_STEPS][4];
    float weight[M_TILES][2];
    // Masks what lies beyond the diagonal or the last key, moves references where scores outgrew
    // them, and makes P of the scores. k_factor: 0 of scores in fp32.
    auto softmax = [&](Scores& s, int first_key, float k_factor) {
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
        float largest[M_TILES][2], factor[M_TILES][2];
        bool grown = false;
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float x = minus_infinity();
#pragma unroll
                for (int n = 0; n < 2 * N_TILES; ++n) x = fmaxf(x, s[m][n / 2][2 * h + n % 2]);
                largest[m][h] = x = quad_max(x);
                const float both =
                    fminf(fmaxf(q_factor[m * 16 + h * 8 + g] * k_factor, 0x1p-126f), 0x1p126f);
                factor[m][h] = k_factor == 0.f ? 1.f : both;
                weight[m][h] = x * factor[m][h];
                grown |= (weight[m][h] - reference[m][h]) * to_log2 > RESCALE_ABOVE;
            }
        if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float x = fmaxf(reference[m][h], weight[m][h]);
                    const float shrink = exp2_approx((reference[m][h] - x) * to_log2);
                    reference[m][h] = x, sum[m][h] *= shrink;
#pragma unroll
                    for (int d = 0; d < OUT_TILES; ++d)
                        out[m][d][2 * h] *= shrink, out[m][d][2 * h + 1] *= shrink;
                }
        }
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                weight[m][h] = exp2_approx((weight[m][h] - reference[m][h]) * to_log2) * P_INVERSE;
                const float most = fmaxf(largest[m][h], LOWEST), by = factor[m][h] * to_log2;
                float of_tile = 0.f;
#pragma unroll
                for (int n = 0; n < N_TILES; ++n) {
                    float* two = s[m][n] + 2 * h;
                    two[0] = exp2_approx(fmaf(two[0] - most, by, P_LOG2));
                    two[1] = exp2_approx(fmaf(two[1] - most, by, P_LOG2));
                    of_tile += two[0] + two[1];
                    split2(two[0], two[1], p_high[m][n / 2][n % 2 * 2 + h],
                           p_low[m][n / 2][n % 2 * 2 + h]);
                }
                sum[m][h] = fmaf(of_tile, weight[m][h], sum[m][h]);
            }
    };
    // out += P V of 16 columns, of which the last may have 8. Sums begin anew in each tile, with
    // the small products.
    auto pv_step = [&](int stage, int d) {
        float sums[M_TILES][2][4] = {};
        unsigned b_high[N_STEPS][4], b_low[N_STEPS][4];
        const int count = min(2, OUT_TILES - 2 * d);
        auto add = [&](const auto& a, const auto& b) {
#pragma unroll
            for (int n = 0; n < N_STEPS; ++n)
#pragma unroll
                for (int i = 0; i < count * M_TILES; ++i)
                    mma_16816<false>(sums[i / count][i % count], a[i / count][n],
                                     b[n][i % count * 2], b[n][i % count * 2 + 1]);
        };
#pragma unroll
        for (int n = 0; n < N_STEPS; ++n) {
            const unsigned values = smem_q + stage + IMAGE + lane_a + n * 2 * BAND + d * 256;
            ldmatrix_x4_trans(b_high[n], values);
            ldmatrix_x4_trans(b_low[n], values + PLANE);
        }
        add(p_high, b_low);
        add(p_low, b_high);
#pragma unroll
        for (int i = 0; i < M_TILES * 8; ++i) sums[i / 8][i / 4 % 2][i % 4] *= 1.f / LOW_SCALE;
        add(p_high, b_high);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4 * count; ++i) {
                float& to = out[m][2 * d + i / 4][i % 4];
                to = fmaf(sums[m][i / 4][i % 4], weight[m][i / 2 % 2], to);
            }
    };
    auto pv_fp32 = [&](int first_key) {
        const float* row = v + elements(head_kv * seqlen_k + first_key) + c * 2;
        const int keys = seqlen_k - first_key;
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll 1
            for (int j = n * 8; j < min(n * 8 + 8, keys); ++j, row += HEAD_DIM) {
                auto half = [&](unsigned two) {
                    two = __shfl_sync(0xffffffffu, two, g * 4 + j / 2 % 4);
                    return low_of(two >> j % 2 * 16);
                };
                float p[M_TILES][2];
#pragma unroll
                for (int i = 0; i < 2 * M_TILES; ++i) {
                    const int at = n % 2 * 2 + i % 2;
                    p[i / 2][i % 2] = fmaf(half(p_low[i / 2][n / 2][at]), 1.f / LOW_SCALE,
                                           half(p_high[i / 2][n / 2][at])) *
                                      weight[i / 2][i % 2];
                }
#pragma unroll
                for (int d = 0; d < OUT_TILES; ++d) {
                    const float2 y = *reinterpret_cast<const float2*>(row + d * 8);
#pragma unroll
                    for (int i = 0; i < 2 * M_TILES; ++i) {
                        float* to = out[i / 2][d] + i % 2 * 2;
                        to[0] = fmaf(p[i / 2][i % 2], y.x, to[0]);
                        to[1] = fmaf(p[i / 2][i % 2], y.y, to[1]);
                    }
                }
            }
    };

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
    split_q();
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
        const float k_factor = q_fits ? factor_of(stage) : 0.f;
        if (active) {
            if (k_factor != 0.f) {
#pragma unroll
                for (int n = 0; n < N_TILES; n += GROUP) qk_step(s, stage, n);
            } else qk_fp32(s, first_key);
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
        softmax(s, first_key, k_factor);
        keep_order();
        const float v_factor = factor_of(stage + IMAGE);
        if (v_factor != 0.f) {
#pragma unroll
            for (int i = 0; i < 2 * M_TILES; ++i) weight[i / 2][i % 2] *= v_factor;
#pragma unroll
            for (int d = 0; d < D_STEPS; ++d) {
                keep_order();
                pv_step(stage, d);
            }
        } else pv_fp32(first_key);
    }
    cp_async_wait<0>();

    o += elements(head * seqlen_q + warp_row) + c * 2;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float inverse = __fdividef(1.f, quad_sum(sum[m][h]));
            const int row = m * 16 + h * 8 + g;
            if (warp_row + row >= seqlen_q) continue;
#pragma unroll
            for (int d = 0; d < OUT_TILES; ++d)
                *reinterpret_cast<float2*>(o + row * HEAD_DIM + d * 8) =
                    make_float2(out[m][d][2 * h] * inverse, out[m][d][2 * h + 1] * inverse);
        }
}
#endif
