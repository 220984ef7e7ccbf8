// Softmax over tiles of scores in accumulator registers: thread t of a warpgroup holds two rows,
// register i in row i / 2 % 2 and column 8 (i / 4) + 2 (t % 4) + i % 2 (see common/ptx/wgmma.cuh).
// Four lanes share a row.
#pragma once
#include "common/element.cuh"
#include "common/tile/rows.cuh"

// 2^(x * factor + offset) without the special function unit, for some of the exponentials: that
// unit does 16 a clock and SM, so at HEAD_DIM 64 it takes as long as both products. Relative
// error 7.5e-5, a sixth of what rounding to fp16 costs. The exponent is clamped to LEAST .. LEAST +
// RANGE by one saturating fma, so that an overflow stays large and a masked score stays nothing.
struct Exp2Polynomial {
    static constexpr float LEAST = -126.f, RANGE = 240.f, ROUND = 12582912.f;  // 1.5 * 2^23
    float factor, offset;
    __device__ __forceinline__ Exp2Polynomial(float factor, float offset)
        : factor(factor * (1.f / RANGE)), offset((offset - LEAST) * (1.f / RANGE)) {}
    __device__ __forceinline__ float operator()(float x) const {
        float y = __saturatef(fmaf(x, factor, offset));
        float rounded =
            fmaf(y, RANGE, ROUND + LEAST);  // the exponent as an integer, in the low bits
        float f = fmaf(y, RANGE, (ROUND + LEAST) - rounded);
        float p = fmaf(fmaf(fmaf(0.05517167f, f, 0.24261113f), f, 0.69326099f), f, 0.99992807f);
        return __uint_as_float(__float_as_uint(p) + (__float_as_uint(rounded) << 23));
    }
};

// The running state of this thread's two rows. Exponents are s * factor with factor = scale *
// log2(e). Exp2Poly of 8 exponentials are a polynomial. Causal: a mask may leave a lane of a row no
// key.
template <int Maxima, int Exp2Poly, bool Causal>
struct OnlineSoftmax {
    // What this thread's exponentials of one row and tile may sum up to without another reference:
    // none is above fp16's 65504, and of a first tile the largest is a normal number of fp16, above
    // 2^-14.
    static constexpr float MOST = 16384.f, LEAST = 1.f / 16;
    float m[2], l[2];  // reference of the exponents, and this thread's part of the row sum

    // 2^(s * factor + offset) of both rows, by eights to put(i, ...), and their sums.
    template <int N, class Put>
    __device__ static __forceinline__ void exponentials(const float (&s)[N], float factor,
                                                        const float (&offset)[2], float (&sum)[2],
                                                        Put put) {
        Exp2Polynomial low(factor, offset[0]), high(factor, offset[1]);
        float part[4] = {};
#pragma unroll
        for (int i = 0; i < N; i += 8) {
            float eight[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float x = s[i + j];
                // Exp2Poly of every 8, spread out.
                if (j * Exp2Poly % 8 < Exp2Poly) x = (j & 2 ? high : low)(x);
                else x = exp2_approx(fmaf(x, factor, offset[j / 2 % 2]));
                eight[j] = x;
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) part[j % 4] += eight[j];
            put(i, eight);
        }
        sum[0] = part[0] + part[1], sum[1] = part[2] + part[3];
    }

    // Whether exponentials and their sum are within what P can hold; false of a NaN.
    __device__ static __forceinline__ bool fit(const float (&sum)[2]) {
        return sum[0] <= MOST && sum[1] <= MOST;
    }
    // The largest score of each of this thread's two rows.
    template <int N>
    __device__ static __forceinline__ void maxima(const float (&s)[N], float (&largest)[2]) {
        float x[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
        for (int i = 4; i < N; ++i) x[i % 4] = fmaxf(x[i % 4], s[i]);
        largest[0] = fmaxf(x[0], x[1]), largest[1] = fmaxf(x[2], x[3]);
    }
    // Exponents refer to the largest score so far from now on; the sums are multiplied by `by`.
    __device__ __forceinline__ void refer_to(const float (&largest)[2], float factor,
                                             float (&offset)[2], float (&by)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float from = m[r];
            m[r] = fmaxf(from, quad_max(largest[r]));
            offset[r] = m[r] == minus_infinity() ? 0.f : -m[r] * factor;  // a row without a key
            by[r] = exp2_approx(fmaf(from, factor, offset[r]));
            l[r] *= by[r];
        }
    }

    // One tile: `put` gets its exponentials, and may get them twice. Returns whether what was
    // summed before must be multiplied by `by`. `first`: nothing was. Maxima 1: the reference is
    // the largest score of the first tile, until one has outgrown it by 2^8. 2: the exponentials
    // are taken at once, against the reference so far, at first the score of a key; only if their
    // sums are too large or small is the tile done again from its maxima. That takes the maxima,
    // their exchange between lanes and the rescaling off the path of most tiles. (At first not 0:
    // of equal scores every p would be rounded alike, by up to 5e-4, where now all are 1.)
    template <int N, class Put>
    __device__ __forceinline__ bool tile(const float (&s)[N], float factor, bool first,
                                         float (&by)[2], Put put) {
        float offset[2], sum[2];
        if (first) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                m[r] = Maxima == 2 ? __shfl_sync(0xffffffffu, s[2 * r], threadIdx.x & 28)
                                   : minus_infinity();
                l[r] = 0.f;
            }
        }
        if (Maxima == 2) {
            offset[0] = -m[0] * factor, offset[1] = -m[1] * factor;
            exponentials(s, factor, offset, sum, put);
            bool fits = fit(sum);
            if (first) {
                // By row if a mask may leave a lane nothing.
                float low = Causal ? quad_sum(sum[0]) : sum[0],
                      high = Causal ? quad_sum(sum[1]) : sum[1];
                fits = fits && low >= LEAST && high >= LEAST;
            }
            if (__builtin_expect(__all_sync(0xffffffffu, fits), 1)) {
                l[0] += sum[0], l[1] += sum[1];
                return false;
            }
            if (first) m[0] = m[1] = minus_infinity();
        }
        float largest[2];
        maxima(s, largest);
        bool keep = (largest[0] - m[0]) * factor <= 8.f && (largest[1] - m[1]) * factor <= 8.f;
        bool grew = Maxima == 2 || !__all_sync(0xffffffffu, keep);
        if (grew) {
            refer_to(largest, factor, offset, by);
        } else {
            offset[0] = -m[0] * factor, offset[1] = -m[1] * factor;
        }
        exponentials(s, factor, offset, sum, put);
        l[0] += sum[0], l[1] += sum[1];
        return grew && !first;
    }

    // A later tile with Maxima 2 whose exponentials go over its scores, so that P needs no room of
    // its own next to them. If their sums are too large, again(s) computes the scores anew, and the
    // tile is done from its maxima as in tile().
    template <int N, class Again>
    __device__ __forceinline__ bool tile_over(float (&s)[N], float factor, float (&by)[2],
                                              Again again) {
        float offset[2] = {-m[0] * factor, -m[1] * factor}, sum[2];
        auto over = [&s](int i, const float (&e)[8]) {
#pragma unroll
            for (int j = 0; j < 8; ++j) s[i + j] = e[j];
        };
        exponentials(s, factor, offset, sum, over);
        bool all = __all_sync(0xffffffffu, fit(sum));
        if (__builtin_expect(!all, 0)) {
            again(s);
            float largest[2];
            maxima(s, largest);
            refer_to(largest, factor, offset, by);
            exponentials(s, factor, offset, sum, over);
        }
        l[0] += sum[0], l[1] += sum[1];
        return !all;
    }

    // What row r's output is multiplied by, once its sum is whole. Without a key the sum may be
    // above 0: a polynomial makes 2^-126 of no weight, which is a number of bf16.
    __device__ __forceinline__ float inverse(int r) const {
        return EMPTY_ROWS && m[r] == minus_infinity() ? 0.f : 1.f / l[r];
    }

    // Takes in another's state of row r, from other keys. What was summed must be multiplied by
    // `mine`, the other's by `theirs`.
    __device__ __forceinline__ void join(int r, float other_m, float other_l, float factor,
                                         float& mine, float& theirs) {
        float largest = fmaxf(m[r], other_m);
        float offset = largest == minus_infinity() ? 0.f : -largest * factor;
        mine = exp2_approx(fmaf(m[r], factor, offset));
        theirs = exp2_approx(fmaf(other_m, factor, offset));
        l[r] = l[r] * mine + other_l * theirs;
        m[r] = largest;
    }
};
