// Softmax over tiles of scores whose exponentials are rounded to E4M3: as common/tile/softmax.cuh
// does it, in the range of that format.
#pragma once
#include "common/tile/softmax.cuh"

// The running state of this thread's two rows. Scores are s * factor in base 2, where a tile may
// have a factor of its own, so that references are multiplied already. The largest exponential of a
// row is 2^SHIFT when its reference is its maximum, and may grow by 2^Headroom before the reference
// follows: E4M3 holds 2^8, and nothing below 2^-10. More room spares rescaling and costs the
// smallest weights.
template <int Headroom, int Exp2Poly>
struct ScaledSoftmax {
    static_assert(Headroom >= 0 && Headroom <= 8, "E4M3 ends at 448");
    static constexpr float SHIFT = 8 - Headroom;
    using Plain = OnlineSoftmax<1, Exp2Poly, false>;
    float m[2], l[2];  // reference of the exponents, and this thread's part of the row sum

    // One tile: `put` gets its exponentials by eights. Returns whether what was summed before must
    // be multiplied by `by`. `first`: nothing was.
    template <int N, class Put>
    __device__ __forceinline__ bool tile(const float (&s)[N], float factor, bool first,
                                         float (&by)[2], Put put) {
        float largest[2], offset[2], sum[2];
        Plain::maxima(s, largest);
        largest[0] *= factor, largest[1] *= factor;
        if (first) m[0] = m[1] = minus_infinity(), l[0] = l[1] = 0.f;
        // False where neither has a key: minus infinity less itself is no number.
        bool keep = largest[0] - m[0] <= Headroom && largest[1] - m[1] <= Headroom;
        bool grew = !__all_sync(0xffffffffu, keep);
        if (grew) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float from = m[r];
                m[r] = fmaxf(from, quad_max(largest[r]));
                float reference = m[r] == minus_infinity() ? 0.f : m[r];  // a row without a key
                by[r] = exp2_approx(from - reference);
                l[r] *= by[r];
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) offset[r] = SHIFT - (m[r] == minus_infinity() ? 0.f : m[r]);
        Plain::exponentials(s, factor, offset, sum, put);
        l[0] += sum[0], l[1] += sum[1];
        return grew && !first;
    }
    // The natural logarithm of the sum of a row's exponentials; l must be of the whole row.
    __device__ __forceinline__ float log_sum_exp(int r) const {
        return (m[r] - SHIFT + log2f(l[r])) * 0.6931471805599453f;
    }
};
