// What flash_fwd_fp32_wgmma computes with: split products, and the softmax of a block's rows. Needs
// BLOCK_M, KEYS and MAX_TILES; LONG_SUMS of Q K^T; ROWS that the block does, SHARES warps that do
// the same, and so ROWS_AT_ONCE, in TURNS.
#pragma once
#include "common/ptx/convert.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"

using namespace attn;

// x = high + low, and a product is high * high in TF32 and the cross products high * low and low *
// high. Of Q, high is what a tensor core reads of it: not rounded, so that Q need not be written
// again. Those of Q K^T are two more instructions. Those of P V may miss some 2^-21 of the product,
// since no exponential follows, and are one: of both parts in bf16, those of V the other way round
// than those of P. So what goes with a float, `cross`, takes as much room as it, and lies alike.
__device__ __forceinline__ float4 high4(float4 x) {
    return make_float4(tf32_high(x.x), tf32_high(x.y), tf32_high(x.z), tf32_high(x.w));
}
__device__ __forceinline__ float4 sub4(float4 a, float4 b) {
    return make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w);
}
__device__ __forceinline__ float4 unread4(float4 x) {
    return make_float4(tf32_unread(x.x), tf32_unread(x.y), tf32_unread(x.z), tf32_unread(x.w));
}
__device__ __forceinline__ float4 pair4(float4 a, float4 b) {
    return make_float4(__uint_as_float(pack_bf16(a.x, b.x)), __uint_as_float(pack_bf16(a.y, b.y)),
                       __uint_as_float(pack_bf16(a.z, b.z)), __uint_as_float(pack_bf16(a.w, b.w)));
}
// The operand in registers of two instructions: 16 columns of K, or 16 keys of V.
struct Fragments {
    unsigned high[8], cross[8];
    template <bool PAIRS>
    __device__ __forceinline__ void set(int i, float x) {
        const float part = tf32_high(x), low = x - part;
        high[i] = __float_as_uint(part),
        cross[i] = PAIRS ? pack_bf16(low, part) : __float_as_uint(low);
    }
    __device__ __forceinline__ void pinned() {
        warpgroup_fence_operand(high), warpgroup_fence_operand(cross);
    }
};
// Tensor cores round sums towards zero, so the large ones are of few terms: the cross products,
// which are small, have sums of their own, and long sums of the others are added up outside.
struct Sums {
    float big[BLOCK_M / 2], small[BLOCK_M / 2], outside[LONG_SUMS ? BLOCK_M / 2 : 1];
    // Where the operand in shared memory begins: descriptors.
    template <bool PAIRS>
    __device__ __forceinline__ void add(const Fragments& a, unsigned long long b_high,
                                        unsigned long long b_cross, bool accumulate) {
        using Product = Wgmma<BLOCK_M>;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // 8 columns are 32 bytes
            if (PAIRS)
                Product::rs<true, 0>(small, a.cross + 4 * i, b_cross + 2 * i, accumulate || i);
            else Product::rs_tf32(small, a.cross + 4 * i, b_high + 2 * i, accumulate || i);
            Product::rs_tf32(big, a.high + 4 * i, b_high + 2 * i, accumulate || i);
            if (!PAIRS) Product::rs_tf32(small, a.high + 4 * i, b_cross + 2 * i, 1);
        }
        wgmma_commit();
    }
    // All products have been waited for. `first`: there was nothing outside.
    __device__ __forceinline__ void put_outside(bool first) {
        warpgroup_fence_operand(big);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; ++i)
            outside[i] = first ? big[i] : outside[i] + big[i], big[i] = 0.f;
    }
    __device__ __forceinline__ void finish(bool with_outside) {
        wgmma_wait<0>();
        warpgroup_fence_operand(big), warpgroup_fence_operand(small);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; ++i)
            big[i] = with_outside ? outside[i] + (big[i] + small[i]) : big[i] + small[i];
    }
};

// ---- softmax ----
// The 8 keys of one wgmma are stored as 0 2 4 6 1 3 5 7, in scores and P: so no two lanes that read
// V meet in a bank. A lane has 4 neighbours of every tile: `key` and the next three that are as
// even.
__device__ __forceinline__ int key_of_lane(int tile) {
    return tile * KEYS + threadIdx.x % 16 / 2 * 8 + threadIdx.x % 2;
}
__device__ __forceinline__ int row_of_lane(int turn) {
    return threadIdx.x / 32 / SHARES * 2 + threadIdx.x % 32 / 16 + turn * ROWS_AT_ONCE;
}
__device__ __forceinline__ float4 load4(const float* p) {
    return *reinterpret_cast<const float4*>(p);
}
__device__ __forceinline__ float4 sum4(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
// The rows of this warp, all at once: load(row, tile) gives a lane's scores, put(row, tile, p)
// takes P.
template <class Load, class Put>
__device__ __forceinline__ void softmax_rows(int tiles, int first_row, int seqlen_q, int seqlen_k,
                                             float to_log2, Load load, Put put) {
    float s[TURNS][MAX_TILES * 4], largest[TURNS], sum[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; ++i)
#pragma unroll
        for (int tile = 0; tile < MAX_TILES; ++tile) {
            if (tile >= tiles) continue;
            const float4 x = load(min(row_of_lane(i), ROWS - 1), tile);
            s[i][tile * 4] = x.x, s[i][tile * 4 + 1] = x.y;
            s[i][tile * 4 + 2] = x.z, s[i][tile * 4 + 3] = x.w;
        }
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        const int keys =
            visible_keys(min(first_row + row_of_lane(i), seqlen_q - 1), seqlen_q, seqlen_k).end;
        largest[i] = minus_infinity();
#pragma unroll
        for (int j = 0; j < MAX_TILES * 4; ++j) {
            if (j / 4 >= tiles || key_of_lane(j / 4) + j % 4 * 2 >= keys)
                s[i][j] = minus_infinity();
            largest[i] = fmaxf(largest[i], s[i][j]);
        }
    }
#pragma unroll
    for (int d = 8; d > 0; d /= 2)
#pragma unroll
        for (int i = 0; i < TURNS; ++i)
            largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], d));
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        sum[i] = 0.f;
        const float by =
            largest[i] == minus_infinity() ? 0.f : largest[i];  // a row that sees no key
        // The difference is exact where p is near 1: it is scaled after, not before.
#pragma unroll
        for (int j = 0; j < MAX_TILES * 4; ++j)
            s[i][j] = exp2_approx((s[i][j] - by) * to_log2), sum[i] += s[i][j];
    }
#pragma unroll
    for (int d = 8; d > 0; d /= 2)
#pragma unroll
        for (int i = 0; i < TURNS; ++i) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], d);
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        const float by = sum[i] > 0.f ? __frcp_rn(sum[i]) : 0.f;
#pragma unroll
        for (int tile = 0; tile < MAX_TILES; ++tile) {
            const float* p = s[i] + tile * 4;
            if (tile < tiles && row_of_lane(i) < ROWS)
                put(row_of_lane(i), tile, make_float4(p[0] * by, p[1] * by, p[2] * by, p[3] * by));
        }
    }
}
