// Softmax over tiles of scores whose exponentials are rounded to E4M3: as common/tile/softmax.cuh
// does it, in the range of that format.
#pragma once
#include "common/ptx/fp8.cuh"
#include "common/tile/softmax.cuh"

// The running state of this thread's two rows. Scores are s * factor in base 2, where a tile may
// have a factor of its own, so that references are multiplied already. The largest exponential of a
// row is 2^SHIFT when its reference is its maximum, and may grow by 2^Headroom before the reference
// follows: E4M3 holds 2^8, and nothing below 2^-10. More room spares rescaling and costs the
// smallest weights. Maxima 1: the reference follows the maxima of each tile. 2: later tiles are
// taken against the reference so far, and done again from their maxima only if this thread's
// weights of a row sum up to MOST, as they do if one of them is beyond it. Tiles of many alike
// weights would do so each time. So a reference that is set is raised above the maximum until a
// thread's weights of the row sum up to ENOUGH at most. One large weight alone raises nothing, and
// a raised row sums up to about as much, so that it loses no more. OfRounded: sums are of the
// weights as they are rounded, so that rounding scales no row.
template <int Headroom, int Exp2Poly, int Maxima, bool OfRounded>
struct ScaledSoftmax {
    static_assert(Headroom >= 0 && Headroom <= 8, "E4M3 ends at 448");
    static constexpr float SHIFT = 8 - Headroom, MOST = 448.f,
                           ENOUGH = MOST / (Headroom < 2 ? 1 << Headroom : 4);
    static_assert(ENOUGH >= 1 << (8 - Headroom), "the largest weight alone is not too much");
    using Plain = OnlineSoftmax<1, Exp2Poly, false>;
    float m[2], l[2];  // reference of the exponents, and this thread's part of the row sum

    // Eight exponentials are this thread's part of 16 keys: of its row keys 2 q, 2 q + 1, 8 + 2 q
    // and 9 + 2 q, and as many of the row 8 further. put(i, low, high) gets the words of both rows
    // of the i-th 16 keys.
    template <int N, class Put>
    __device__ __forceinline__ void weigh(const float (&s)[N], float factor, float (&sum)[2],
                                          Put put) const {
        float offset[2];
        unsigned rounded[2][2] = {};  // of each row, sums of two halves each
#pragma unroll
        for (int r = 0; r < 2; ++r)  // a row without a key has none
            offset[r] = SHIFT - (m[r] == minus_infinity() ? 0.f : m[r]);
        Plain::exponentials(s, factor, offset, sum, [&](int i, const float (&e)[8]) {
            unsigned low = pack_e4m3(e[0], e[1], e[4], e[5]),
                     high = pack_e4m3(e[2], e[3], e[6], e[7]);
            if (OfRounded) add_e4m3(rounded[0], low), add_e4m3(rounded[1], high);
            put(i / 8, low, high);
        });
        if (OfRounded) {
#pragma unroll
            for (int r = 0; r < 2; ++r) sum[r] = sum_of_halves(rounded[r]);
        }
    }
    // Makes the reference follow a tile's maxima. Returns whether what was summed before must be
    // multiplied by `by`. `first`: nothing was. sum: with Maxima 2, of a later tile's weights.
    template <int N>
    __device__ __forceinline__ bool refer(const float (&s)[N], float factor, bool first,
                                          float (&by)[2], const float (&sum)[2] = {}) {
        float largest[2], mean[2];
        if (first) m[0] = m[1] = minus_infinity(), l[0] = l[1] = 0.f;
        Plain::maxima(s, largest);
        largest[0] *= factor, largest[1] *= factor;
        // False where neither has a key: minus infinity less itself is no number.
        bool keep = largest[0] - m[0] <= Headroom && largest[1] - m[1] <= Headroom;
        if (Maxima == 1 && __all_sync(0xffffffffu, keep)) return false;
        if (Maxima == 2 && first) means(s, mean);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float from = m[r];
            m[r] = fmaxf(from, quad_max(largest[r]));
            if (Maxima == 2) {
                // What the weights sum up to with this reference; of a first tile, which was not
                // tried, twice what they do at least: weights of the mean score.
                float part = first ? N * exp2_approx(fmaf(mean[r], factor, SHIFT - m[r]))
                                   : sum[r] * exp2_approx(from - m[r]);
                m[r] += raise<N>(quad_max(part));
            }
            float reference = m[r] == minus_infinity() ? 0.f : m[r];  // a row without a key
            by[r] = exp2_approx(from - reference);
            l[r] *= by[r];
        }
        return !first;
    }
    // Adds a tile's weights, which `put` gets.
    template <int N, class Put>
    __device__ __forceinline__ void add(const float (&s)[N], float factor, Put put) {
        float sum[2];
        weigh(s, factor, sum, put);
        l[0] += sum[0], l[1] += sum[1];
    }
    // Tries a later tile against the reference so far. False: it does not fit, and is not added.
    template <int N, class Put>
    __device__ __forceinline__ bool fits(const float (&s)[N], float factor, float (&sum)[2],
                                         Put put) {
        weigh(s, factor, sum, put);
        bool fit = sum[0] < MOST && sum[1] < MOST && fminf(m[0], m[1]) > minus_infinity();
        if (__builtin_expect(!__all_sync(0xffffffffu, fit), 0)) return false;
        l[0] += sum[0], l[1] += sum[1];
        return true;
    }
    // refer() and add(), but a later tile with Maxima 2 is tried first: `put` may get weights
    // twice.
    template <int N, class Put>
    __device__ __forceinline__ bool tile(const float (&s)[N], float factor, bool first,
                                         float (&by)[2], Put put) {
        float sum[2];
        if (Maxima == 2 && !first && fits(s, factor, sum, put)) return false;
        bool grew = refer(s, factor, first, by, sum);
        add(s, factor, put);
        return grew;
    }
    // What row r's output is multiplied by, times `units`; l must be of the whole row.
    __device__ __forceinline__ float inverse(int r, float units) const {
        return EMPTY_ROWS && m[r] == minus_infinity() ? 0.f : units / l[r];
    }
    // The natural logarithm of the sum of a row's exponentials; l must be of the whole row.
    __device__ __forceinline__ float log_sum_exp(int r) const {
        return (m[r] - SHIFT + log2f(l[r])) * 0.6931471805599453f;
    }

private:
    // By how much to raise a reference against which a thread's N / 2 weights of a row sum up to
    // `part`: whole powers of two, so that weights differ in their exponents alone. Not at all if
    // `part` is no number, or more than there can be: a sum of the trial that overflowed.
    template <int N>
    __device__ __forceinline__ static float raise(float part) {
        constexpr float ALL = N * (1 << (8 - Headroom));  // twice, for what exponentials err by
        return part <= ALL ? fmaxf(ceilf(__log2f(part * (1.f / ENOUGH))), 0.f) : 0.f;
    }
    // The mean score of each of this thread's two rows, over the four threads that share it.
    template <int N>
    __device__ __forceinline__ static void means(const float (&s)[N], float (&mean)[2]) {
        float x[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
        for (int i = 4; i < N; ++i) x[i % 4] += s[i];
        mean[0] = quad_sum(x[0] + x[1]) * (1.f / (2 * N));
        mean[1] = quad_sum(x[2] + x[3]) * (1.f / (2 * N));
    }
    __device__ __forceinline__ static float sum_of_halves(const unsigned (&x)[2]) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            sum += from_half(static_cast<unsigned short>(x[i] & 0xffffu)) +
                   from_half(static_cast<unsigned short>(x[i] >> 16));
        return sum;
    }
};
