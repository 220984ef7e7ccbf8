// Softmax over tiles of scores in accumulator registers: thread t of a warpgroup holds two rows, register i
// in row i / 2 % 2 and column 8 (i / 4) + 2 (t % 4) + i % 2 (see hopper.cuh). Four lanes share a row.
// Needs MAXIMA and EXP2_POLY; include after common/element.cuh.
#pragma once

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// 2^(x * factor + offset) without the special function unit, for some of the exponentials: that unit does
// 16 a clock and SM, so at HEAD_DIM 64 it takes as long as both products. Relative error 7.5e-5, a sixth of
// what rounding to fp16 costs. The exponent is clamped to LEAST .. LEAST + RANGE by one saturating fma, so
// that an overflow stays large and a masked score stays nothing.
struct Exp2Polynomial {
    static constexpr float LEAST = -126.f, RANGE = 240.f, ROUND = 12582912.f;  // 1.5 * 2^23
    float factor, offset;
    __device__ __forceinline__ Exp2Polynomial(float factor, float offset)
        : factor(factor * (1.f / RANGE)), offset((offset - LEAST) * (1.f / RANGE)) {}
    __device__ __forceinline__ float operator()(float x) const {
        float y = __saturatef(fmaf(x, factor, offset));
        float rounded = fmaf(y, RANGE, ROUND + LEAST);  // the exponent as an integer, in the low bits
        float f = fmaf(y, RANGE, (ROUND + LEAST) - rounded);
        float p = fmaf(fmaf(fmaf(0.05517167f, f, 0.24261113f), f, 0.69326099f), f, 0.99992807f);
        return __uint_as_float(__float_as_uint(p) + (__float_as_uint(rounded) << 23));
    }
};

// The running state of this thread's two rows. Exponents are s * factor with factor = scale * log2(e).
struct OnlineSoftmax {
    // Largest sum of this thread's exponentials of one tile that is kept: they stay below fp16's 65504.
    static constexpr float MOST = 16384.f;
    float m[2], l[2];  // reference of the exponents, and this thread's part of the row sum

    __device__ __forceinline__ void reset() {
        m[0] = m[1] = minus_infinity();
        l[0] = l[1] = 0.f;
    }

    // p = 2^(s * factor + offset) of both rows, in pairs; their sums.
    template <int N>
    __device__ static __forceinline__ void exponentials(const float (&s)[N], unsigned (&p)[N / 2], float factor,
                                                        const float (&offset)[2], float (&sum)[2]) {
        Exp2Polynomial low(factor, offset[0]), high(factor, offset[1]);
        float part[4] = {};
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float e[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                // EXP2_POLY of every 8, spread out.
                if ((i + j) * EXP2_POLY % 8 < EXP2_POLY) e[j] = (j < 2 ? low : high)(s[i + j]);
                else e[j] = exp2_approx(fmaf(s[i + j], factor, offset[j / 2]));
                part[j] += e[j];
            }
            p[i / 2] = pack(e[0], e[1]);
            p[i / 2 + 1] = pack(e[2], e[3]);
        }
        sum[0] = part[0] + part[1], sum[1] = part[2] + part[3];
    }

    // One tile: its scores become p. Returns whether what was summed before must be multiplied by `by`.
    // MAXIMA 0: the reference is the largest score so far. 1: it stays until a row of the warp has outgrown
    // it by 2^8. 2: the exponentials are taken at once, against the reference so far; only if their sum is
    // too large, or the row had no key yet (the reference -inf makes it infinite), is the tile done again
    // from its maxima. That takes the maxima, their exchange between lanes and the rescaling off the path
    // of most tiles. `first`: nothing was summed before.
    template <int N>
    __device__ __forceinline__ bool
    tile(const float (&s)[N], unsigned (&p)[N / 2], float factor, bool first, float (&by)[2]) {
        float offset[2], sum[2];
        if (MAXIMA == 2 && !first) {
            offset[0] = -m[0] * factor, offset[1] = -m[1] * factor;
            exponentials(s, p, factor, offset, sum);
            if (__all_sync(0xffffffffu, sum[0] <= MOST && sum[1] <= MOST)) {  // false of a NaN
                l[0] += sum[0], l[1] += sum[1];
                return false;
            }
        }
        float x[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
        for (int i = 4; i < N; ++i) x[i % 4] = fmaxf(x[i % 4], s[i]);
        float largest[2] = {quad_max(fmaxf(fmaxf(x[0], x[1]), m[0])), quad_max(fmaxf(fmaxf(x[2], x[3]), m[1]))};
        bool grew = true;
        if (MAXIMA == 1 && !first) {
            bool keep = (largest[0] - m[0]) * factor <= 8.f && (largest[1] - m[1]) * factor <= 8.f;
            grew = !__all_sync(0xffffffffu, keep);
            if (!grew) largest[0] = m[0], largest[1] = m[1];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            offset[r] = largest[r] == minus_infinity() ? 0.f : -largest[r] * factor;  // a row without a key
            by[r] = first ? 0.f : exp2_approx(fmaf(m[r], factor, offset[r]));
            m[r] = largest[r];
        }
        exponentials(s, p, factor, offset, sum);
#pragma unroll
        for (int r = 0; r < 2; ++r) l[r] = first ? sum[r] : fmaf(l[r], by[r], sum[r]);
        return grew && !first;
    }
};
