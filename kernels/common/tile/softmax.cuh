// Softmax, a policy each: of scores in accumulators as they come, in 16 bits or E4M3; of units of
// keys that are joined later; of stored rows, through registers or TMA; of scores of WMMA.
#pragma once
#include "common/ptx/barrier.cuh"
#include "common/ptx/cache.cuh"
#include "common/ptx/fp8.cuh"
#include "common/ptx/shared.cuh"
#include "common/ptx/tma.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"
#include "common/tile/pipeline.cuh"
#include "common/tile/scheduler.cuh"
#include "common/tile/scores.cuh"

namespace attn {

// ---- reductions over a row ----
// The four lanes that hold a row of an accumulator join what they have.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Maximum or sum over the RowThreads threads of a row: shuffles in the warp, then one exchange if
// it has more, through one float a warp of the block. Every thread of the block must call it.
template <int RowThreads, bool Maximum>
__device__ __forceinline__ float row_reduce(float x, float* exchange) {
    constexpr int LANES = RowThreads < 32 ? RowThreads : 32, ROW_WARPS = RowThreads / LANES;
    auto join = [](float a, float b) { return Maximum ? fmaxf(a, b) : a + b; };
#pragma unroll
    for (int d = LANES / 2; d > 0; d /= 2) x = join(x, __shfl_xor_sync(0xffffffffu, x, d));
    if constexpr (ROW_WARPS > 1) {
        int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) exchange[warp] = x;
        __syncthreads();
        const float* own = exchange + warp / ROW_WARPS * ROW_WARPS;
        x = own[0];
#pragma unroll
        for (int i = 1; i < ROW_WARPS; ++i) x = join(x, own[i]);
    }
    return x;
}

// ---- OnlineSoftmax: tiles of scores in accumulators ----
// Thread t of a warpgroup holds two rows, register i in row i / 2 % 2 and column 8 (i / 4) + 2 (t %
// 4) + i % 2 (see common/ptx/wgmma.cuh). Four lanes share a row.

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
// log2(e). Exp2Poly of 8 exponentials are a polynomial.
template <int Maxima, int Exp2Poly>
struct OnlineSoftmax {
    // What this thread's exponentials of one row and tile may sum up to without another reference:
    // none is above fp16's 65504, and of a first tile the largest is a normal number of fp16, above
    // 2^-14.
    static constexpr float MOST = 16384.f, LEAST = 1.f / 16;
    float m[2], l[2];  // reference of the exponents, and this thread's part of the row sum
#if SINKS
    float share[2];  // of the weights that keys have beside a sink
#endif

    // As of rows without a key.
    __device__ __forceinline__ void clear() { m[0] = m[1] = minus_infinity(), l[0] = l[1] = 0.f; }

    // A bias may be the least finite number, for whole rows too. -m * factor then overflows, or is
    // rounded by more than scores differ by. Where a reference is so far from 0, or is of no key,
    // it is subtracted from the scores instead. Up to FAR, rounding costs a weight 6e-5.
    static constexpr float FAR = 1024.f;
    __device__ __forceinline__ float from(int r) const {
        return m[r] == minus_infinity() ? 0.f : m[r];
    }
    // Whether no reference of the warp's rows is so; without a bias it is not asked.
    __device__ __forceinline__ bool near() const {
        return !BIAS || __all_sync(0xffffffffu, fmaxf(fabsf(m[0]), fabsf(m[1])) <= FAR);
    }
    template <int N>
    __device__ __forceinline__ void come_near(float (&s)[N], float (&offset)[2]) const {
        if (near()) return;
        float by[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            by[r] = fabsf(m[r]) > FAR ? from(r) : 0.f;
            if (by[r] != 0.f) offset[r] = 0.f;
        }
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] -= by[i / 2 % 2];
    }

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
            by[r] =
                exp2_approx(BIAS ? (from - this->from(r)) * factor : fmaf(from, factor, offset[r]));
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
    __device__ __forceinline__ bool tile(float (&s)[N], float factor, bool first, float (&by)[2],
                                         Put put) {
        float offset[2], sum[2];
        if (first) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                m[r] = Maxima == 2 ? __shfl_sync(0xffffffffu, s[2 * r], threadIdx.x & 28)
                                   : minus_infinity();
                l[r] = 0.f;
            }
        }
        if (Maxima == 2 && near()) {
            offset[0] = -m[0] * factor, offset[1] = -m[1] * factor;
            exponentials(s, factor, offset, sum, put);
            bool fits = fit(sum);
            if (first) {
                // By row if a mask may leave a lane nothing.
                float low = HIDES_LATER ? quad_sum(sum[0]) : sum[0],
                      high = HIDES_LATER ? quad_sum(sum[1]) : sum[1];
                fits = fits && low >= LEAST && high >= LEAST;
            }
            if (__builtin_expect(__all_sync(0xffffffffu, fits), 1)) {
                l[0] += sum[0], l[1] += sum[1];
                return false;
            }
        }
        if (Maxima == 2 && first) m[0] = m[1] = minus_infinity();
        float largest[2];
        maxima(s, largest);
        bool keep = (largest[0] - m[0]) * factor <= 8.f && (largest[1] - m[1]) * factor <= 8.f;
        bool grew = Maxima == 2 || !__all_sync(0xffffffffu, keep);
        if (grew) {
            refer_to(largest, factor, offset, by);
        } else {
            offset[0] = -m[0] * factor, offset[1] = -m[1] * factor;
        }
        if constexpr (BIAS) come_near(s, offset);
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
        const bool tried = near();
        if (tried) exponentials(s, factor, offset, sum, over);
        bool all = tried && __all_sync(0xffffffffu, fit(sum));
        if (__builtin_expect(!all, 0)) {
            if (tried) again(s);
            float largest[2];
            maxima(s, largest);
            refer_to(largest, factor, offset, by);
            if constexpr (BIAS) come_near(s, offset);
            exponentials(s, factor, offset, sum, over);
        }
        l[0] += sum[0], l[1] += sum[1];
        return !all;
    }

    // What row r's output is multiplied by, once its sum is whole. Without a key the sum may be
    // above 0: a polynomial makes 2^-126 of no weight, which is a number of bf16.
    __device__ __forceinline__ float inverse(int r) const {
#if SINKS
        return share[r] / l[r];
#else
        return EMPTY_ROWS && m[r] == minus_infinity() ? 0.f : 1.f / l[r];
#endif
    }
#if SINKS
    // Takes in one more score, which no value goes with, once the sums are whole.
    __device__ __forceinline__ void add_sink(float sink, float factor) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float of_sink;
            join(r, sink * LOG2E / factor, 1.f, factor, share[r], of_sink);
        }
    }
#endif

    // Takes in another's state of row r, from other keys. What was summed must be multiplied by
    // `mine`, the other's by `theirs`.
    __device__ __forceinline__ void join(int r, float other_m, float other_l, float factor,
                                         float& mine, float& theirs) {
        float largest = fmaxf(m[r], other_m);
#if BIAS
        const float own_m = m[r];
        m[r] = largest;
        mine = exp2_approx((own_m - from(r)) * factor);
        theirs = exp2_approx((other_m - from(r)) * factor);
#else
        float offset = largest == minus_infinity() ? 0.f : -largest * factor;
        mine = exp2_approx(fmaf(m[r], factor, offset));
        theirs = exp2_approx(fmaf(other_m, factor, offset));
#endif
        l[r] = l[r] * mine + other_l * theirs;
        m[r] = largest;
    }
    // The natural logarithm of the sum of row r's exponentials. A bias is in base e: in base 2 the
    // least finite one would be minus infinity.
    __device__ __forceinline__ float log_sum_exp(int r, float factor) const {
        return BIAS ? fmaf(log2f(l[r]), LN2, m[r]) : fmaf(m[r], factor, log2f(l[r])) * LN2;
    }
};

// ---- ScaledSoftmax: the same, with exponentials that are rounded to E4M3 ----

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
    using Plain = OnlineSoftmax<1, Exp2Poly>;
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

// ---- units: every UNIT keys of a row have a maximum of their own, and are joined later ----
// Scores are in base 2. maxima and sums: (head, unit, query).
constexpr int UNIT = 128;

__device__ __forceinline__ int units_of(int keys) { return ceil_div<UNIT>(keys); }
// Columns of a row that a tile of UNIT queries and UNIT keys reads, beyond seqlen_k aside.
__device__ __forceinline__ int extent_of(int row, int seqlen_q, int seqlen_k) {
    return round_up(visible_keys(min(row | (UNIT - 1), seqlen_q - 1), seqlen_q, seqlen_k).end,
                    UNIT);
}

// The largest of Columns columns, of this thread's two rows.
template <int Columns>
__device__ __forceinline__ void row_maxima(const float* d, float& low, float& high) {
    low = minus_infinity(), high = minus_infinity();
#pragma unroll
    for (int i = 0; i < Columns / 2; i += 4) {
        low = fmaxf(low, fmaxf(d[i], d[i + 1]));
        high = fmaxf(high, fmaxf(d[i + 2], d[i + 3]));
    }
    low = quad_max(low), high = quad_max(high);
}
// d becomes 2^(d * factor - low), or high for the second row, and is added to sum and sum_8.
template <int Columns>
__device__ __forceinline__ void exponentiate(float* d, float factor, float low, float high,
                                             float& sum, float& sum_8) {
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) {
        d[i] = exp2_approx(fmaf(d[i], factor, i & 2 ? -high : -low));
        (i & 2 ? sum_8 : sum) += d[i];
    }
}

// One thread, one row of `own` units, `pitch` apart. factors_of_row: each unit's maximum becomes
// the factor 2^(maximum - the row's) / the row's sum, and 0 up to `all` units.
__device__ __forceinline__ void factors_of_row(float* maxima, const float* sums, int own, int all,
                                               int pitch) {
    float largest = minus_infinity(), sum = 0.f;
#pragma unroll 8
    for (int i = 0; i < own; ++i) {  // in one pass, for its loads to be in flight together
        float m = maxima[static_cast<long long>(i) * pitch],
              part = sums[static_cast<long long>(i) * pitch];
        float grown = fmaxf(largest, m);
        sum = sum * exp2_approx(largest - grown) + part * exp2_approx(m - grown);
        largest = grown;
    }
    float inverse = 1.f / sum;
#pragma unroll 8
    for (int i = 0; i < all; ++i) {
        float& at = maxima[static_cast<long long>(i) * pitch];
        at = i < own ? exp2_approx(at - largest) * inverse : 0.f;
    }
}
__device__ __forceinline__ float maximum_of_row(const float* maxima, int own, int pitch) {
    float largest = minus_infinity();
#pragma unroll 8
    for (int i = 0; i < own; ++i)
        largest = fmaxf(largest, maxima[static_cast<long long>(i) * pitch]);
    return largest;
}

// For a quad that shares Rows rows: each row's maximum, and the inverse of its sum, from its `own`
// units. maxima and sums point at unit 0 of the first row; row i is `offset(i)` further, a unit
// `pitch`. A row that is not there has no units, and comes to 0 and infinity. AHEAD units of a lane
// are loaded together.
template <int Rows, typename Offset>
__device__ __forceinline__ void join_units(float (&largest)[Rows], float (&inverse)[Rows],
                                           const float* maxima, const float* sums,
                                           const int (&own)[Rows], Offset offset, int pitch) {
    constexpr int AHEAD = 4;
    float sum[Rows];
    int most = 0;
#pragma unroll
    for (int r = 0; r < Rows; ++r)
        largest[r] = minus_infinity(), sum[r] = 0.f, most = max(most, own[r]);
#pragma unroll 1
    for (int unit = threadIdx.x % 4; unit < most; unit += 4 * AHEAD) {
        float m[AHEAD][Rows], part[AHEAD][Rows];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
#pragma unroll
            for (int r = 0; r < Rows; ++r) {
                bool has = unit + 4 * i < own[r];
                int at = (unit + 4 * i) * pitch + offset(r);
                m[i][r] = has ? maxima[at] : minus_infinity();
                part[i][r] = has ? sums[at] : 0.f;
            }
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
            float grown = largest[r];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) grown = fmaxf(grown, m[i][r]);
            float from = grown == minus_infinity() ? 0.f : grown;
            sum[r] *= exp2_approx(largest[r] - from);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) sum[r] += part[i][r] * exp2_approx(m[i][r] - from);
            largest[r] = grown;
        }
    }
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
        float all = quad_max(largest[r]);
        all = all == minus_infinity() ? 0.f : all;
        inverse[r] = 1.f / quad_sum(sum[r] * exp2_approx(largest[r] - all));
        largest[r] = all;
    }
}

// ---- row_softmax: whole rows in place, a set of Threads threads each, Vector elements a load ----
// In base 2.

// Vector neighbours, two a register, as they lie in memory. Once: L1 does not keep what is loaded.
// Keep: L2 is told to hold on to what is stored.
template <int Vector, bool Once, bool Keep>
struct RawVector {
    static constexpr int WORDS = (Vector + 1) / 2;
    unsigned word[WORDS];

    __device__ __forceinline__ void load(const element_t* from) {
        if constexpr (Once) load_once<Vector * 2>(word, from);
        else if constexpr (Vector == 8)
            *reinterpret_cast<uint4*>(word) = *reinterpret_cast<const uint4*>(from);
        else if constexpr (Vector == 4)
            *reinterpret_cast<uint2*>(word) = *reinterpret_cast<const uint2*>(from);
        else if constexpr (Vector == 2) word[0] = *reinterpret_cast<const unsigned*>(from);
        else word[0] = *from;
    }
    __device__ __forceinline__ void store(element_t* to) const {
        if constexpr (Keep) store_kept<Vector * 2>(to, word);
        else if constexpr (Vector == 8)
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(word);
        else if constexpr (Vector == 4)
            *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(word);
        else if constexpr (Vector == 2) *reinterpret_cast<unsigned*>(to) = word[0];
        else *to = static_cast<element_t>(word[0]);
    }
    // Elements `keys` and beyond count as masked; this vector begins at element `at`.
    __device__ __forceinline__ void unpack(float (&out)[Vector], int at, int keys) const {
#pragma unroll
        for (int i = 0; i < Vector; ++i)
            out[i] = at + i < keys ? (i % 2 ? high_of(word[i / 2]) : low_of(word[i / 2]))
                                   : minus_infinity();
    }
    __device__ __forceinline__ void pack_scaled(const float (&in)[Vector], float factor) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i)
            word[i] =
                pack(in[2 * i] * factor, Vector > 1 ? in[(2 * i + 1) % Vector] * factor : 0.f);
    }
};

// Rows rows for each set of threads, Groups apart; the first is `row`, whose element `first` is
// this thread's first. Passes 1: a row of at most Kept stays in registers, and the next is loaded
// while it is worked on; 3: it is read for the maximum, for the sum and to normalise. keys_in(row)
// says how many keys a row has, written_in(row) how many elements to write, with zeros behind the
// keys; a row that is not there has no keys. exchange: two floats a warp of the block if Threads
// > 32. Every thread of the block must call it.
template <int Threads, int Vector, int Passes, int Rows, int Groups, int Kept, bool Once, bool Keep,
          typename Keys, typename Written>
__device__ __forceinline__ void row_softmax(element_t* scores, int stride, int row, int first,
                                            float* for_maximum, float* for_sum, Keys keys_in,
                                            Written written_in) {
    constexpr int STEP = Threads * Vector;  // keys loaded at once for a row
    constexpr int LOADS = Passes == 1 ? Kept / STEP : 1;
    using Raw = RawVector<Vector, Once, Keep>;
    scores += first;
    Raw raw[LOADS];
    auto load_row = [&](int r) {
        int keys = keys_in(r);
        const element_t* from = scores + static_cast<long long>(r) * stride;
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (first + i * STEP < keys) raw[i].load(from + i * STEP);
    };
    if constexpr (Passes == 1) load_row(row);
#pragma unroll 1
    for (int n = 0; n < Rows; ++n, row += Groups) {
        int keys = keys_in(row), written = keys > 0 ? written_in(row) : 0;
        element_t* at = scores + static_cast<long long>(row) * stride;
        float largest = minus_infinity(), sum = 0.f;
        if constexpr (Passes == 1) {
            float p[LOADS][Vector];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) raw[i].unpack(p[i], first + i * STEP, keys);
            if (n + 1 < Rows) load_row(row + Groups);
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
#pragma unroll
                for (int e = 0; e < Vector; ++e) largest = fmaxf(largest, p[i][e]);
            largest = row_reduce<Threads, true>(largest, for_maximum);
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
#pragma unroll
                for (int e = 0; e < Vector; ++e) sum += p[i][e] = exp2_approx(p[i][e] - largest);
            float inverse = 1.f / row_reduce<Threads, false>(sum, for_sum);
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
                if (first + i * STEP < written) {
                    Raw out;
                    out.pack_scaled(p[i], inverse);
                    out.store(at + i * STEP);
                }
        } else {
            float p[Vector];
            auto get = [&](int i) {
                Raw in;
                if (first + i < keys) in.load(at + i);
                in.unpack(p, first + i, keys);
            };
#pragma unroll 4
            for (int i = 0; first + i < keys; i += STEP) {
                get(i);
#pragma unroll
                for (int e = 0; e < Vector; ++e) largest = fmaxf(largest, p[e]);
            }
            largest = row_reduce<Threads, true>(largest, for_maximum);
#pragma unroll 4
            for (int i = 0; first + i < keys; i += STEP) {
                get(i);
#pragma unroll
                for (int e = 0; e < Vector; ++e) sum += exp2_approx(p[e] - largest);
            }
            float inverse = 1.f / row_reduce<Threads, false>(sum, for_sum);
#pragma unroll 4
            for (int i = 0; first + i < written; i += STEP) {
                get(i);
#pragma unroll
                for (int e = 0; e < Vector; ++e) p[e] = exp2_approx(p[e] - largest);
                Raw out;
                out.pack_scaled(p, inverse);
                out.store(at + i);
            }
        }
    }
}

// ---- WarpRows: whole rows in place, by warps that work alone ----
// Rows come and go by TMA, Group at a time, while Depth groups of a warp are in shared memory.

// Rows of at most Kept columns, a multiple of 256, in boxes of 256 columns. Each warp has Depth
// barriers, and rows and barriers of its own, so no thread waits for another warp. Keep: L2 is told
// to hold on to the rows.
template <int Group, int Depth, int Kept, bool Keep>
struct WarpRows {
    static constexpr int BOX = 256, BOXES = Kept / BOX, BOX_BYTES = Group * BOX * 2;
    static constexpr int SLOT_BYTES = BOXES * BOX_BYTES;

    const TensorMap& map;
    unsigned char* rows;  // of this warp: Depth slots
    unsigned barriers;
    int seqlen_q, seqlen_k;

    __device__ __forceinline__ int boxes(int columns) const { return ceil_div<BOX>(columns); }
    // The group's boxes up to the last key of its last row.
    __device__ __forceinline__ void load(int slot, int row, int head) const {
        int n = boxes(visible_keys(min(row + Group, seqlen_q) - 1, seqlen_q, seqlen_k).end);
        mbarrier_expect(barriers + 8 * slot, n * BOX_BYTES);
        for (int i = 0; i < n; ++i)
            tma_load(smem_address(rows) + slot * SLOT_BYTES + i * BOX_BYTES, map,
                     barriers + 8 * slot, i * BOX, row, head);
    }
    __device__ __forceinline__ void store(int slot, int row, int head, int columns) const {
        for (int i = 0; i < boxes(columns); ++i) {
            unsigned from = smem_address(rows) + slot * SLOT_BYTES + i * BOX_BYTES;
            if (Keep) tma_store(map, from, i * BOX, row, head, EVICT_LAST);
            else tma_store(map, from, i * BOX, row, head);
        }
    }
    // One row: 8 columns of each box a lane. Beyond its keys it becomes zeros.
    __device__ __forceinline__ void normalise(int slot, int r, int keys) const {
        int lane = threadIdx.x % 32;
        uint4* at = reinterpret_cast<uint4*>(rows + slot * SLOT_BYTES + r * BOX * 2) + lane;
        float p[BOXES][8], largest = minus_infinity(), sum = 0.f;
#pragma unroll
        for (int i = 0; i < BOXES; ++i) {
            uint4 in = at[i * (BOX_BYTES / 16)];
            unsigned word[4] = {in.x, in.y, in.z, in.w};
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                p[i][e] = i * BOX + lane * 8 + e < keys
                              ? (e % 2 ? high_of(word[e / 2]) : low_of(word[e / 2]))
                              : minus_infinity();
                largest = fmaxf(largest, p[i][e]);
            }
        }
        largest = row_reduce<32, true>(largest, nullptr);
#pragma unroll
        for (int i = 0; i < BOXES; ++i)
#pragma unroll
            for (int e = 0; e < 8; ++e) sum += p[i][e] = exp2_approx(p[i][e] - largest);
        float inverse = 1.f / row_reduce<32, false>(sum, nullptr);
#pragma unroll
        for (int i = 0; i < BOXES; ++i)
            at[i * (BOX_BYTES / 16)] = {pack(p[i][0] * inverse, p[i][1] * inverse),
                                        pack(p[i][2] * inverse, p[i][3] * inverse),
                                        pack(p[i][4] * inverse, p[i][5] * inverse),
                                        pack(p[i][6] * inverse, p[i][7] * inverse)};
    }

    // Groups `group`, `group` + `step` .. of `heads`; written_in(row) says how many columns a row
    // needs.
    template <typename Written>
    __device__ __forceinline__ void run(int group, int step, int heads, Written written_in) const {
        int lane = threadIdx.x % 32, a_head = ceil_div<Group>(seqlen_q), groups = a_head * heads;
        int ahead = group;  // the next group to be loaded
        if (lane == 0)
            for (int slot = 0; slot < Depth && ahead < groups; ++slot, ahead += step)
                load(slot, ahead % a_head * Group, ahead / a_head);
        __syncwarp();
        Ring<Depth> at;
        int free = -1;  // the slot whose rows were stored last
#pragma unroll 1
        for (; group < groups; group += step, at.next()) {
            int row = group % a_head * Group, head = group / a_head;
            mbarrier_wait(barriers + 8 * at.stage, at.phase);
#pragma unroll(Group < 2 ? 1 : 2)
            for (int r = 0; r < Group; ++r)
                if (row + r < seqlen_q)
                    normalise(at.stage, r, visible_keys(row + r, seqlen_q, seqlen_k).end);
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) {
                store(at.stage, row, head, written_in(min(row + Group, seqlen_q) - 1));
                tma_store_commit();
                tma_store_wait_read<1>();
                if (free >= 0 && ahead < groups) {
                    load(free, ahead % a_head * Group, ahead / a_head);
                    ahead += step;
                }
            }
            free = at.stage;
        }
        if (lane == 0) tma_store_wait_read<0>();
    }
};

// ---- softmax_rows: 16 rows of a warp whose fragments are opaque ----
// Scores go through shared memory, where lane l works on row l % 16, every other four of its
// columns beginning with l / 16.

// Floats from one row of N scores to the next: 16 bytes more, so that 8 rows lie in different
// banks. Probabilities replace the scores of their row, at the same address, so their pitch is
// twice that.
template <int N>
constexpr int SCORE_PITCH = N + 4;

struct RowState {
    float largest = __int_as_float(0xff800000), sum = 0.f;  // of the row; of this lane's columns
};

// Scores of a tile to probabilities in place. A row sees the first `keys` of its N. Returns what
// the row's output must be multiplied by; it is in factors[row] too. Approximate: 2^x in one
// instruction.
template <int N, bool Approximate>
__device__ __forceinline__ float softmax_rows(float* scores, float* factors, int keys,
                                              float to_log2, RowState& state) {
    const int row = threadIdx.x % 16, half = threadIdx.x / 16 % 2;
    auto power = [](float x) { return Approximate ? exp2_approx(x) : exp2f(x); };
    float* own = scores + row * SCORE_PITCH<N> + half * 4;
    float s[N / 8][4], largest = minus_infinity();
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
        const float4 four = *reinterpret_cast<const float4*>(own + 8 * i);
        s[i][0] = four.x, s[i][1] = four.y, s[i][2] = four.z, s[i][3] = four.w;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            s[i][e] = half * 4 + 8 * i + e < keys ? s[i][e] * to_log2 : minus_infinity();
            largest = fmaxf(largest, s[i][e]);
        }
    }
    // A row's first tile has a key for it, so this is finite.
    largest = fmaxf(state.largest, fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 16)));
    const float shrink = power(state.largest - largest);
    state.largest = largest, state.sum *= shrink;
    __syncwarp();  // both lanes of a row have read it
    element_t* p = reinterpret_cast<element_t*>(scores + row * SCORE_PITCH<N>) + half * 4;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.sum += s[i][e] = power(s[i][e] - largest);
        *reinterpret_cast<uint2*>(p + 8 * i) =
            make_uint2(pack(s[i][0], s[i][1]), pack(s[i][2], s[i][3]));
    }
    if (half == 0) factors[row] = shrink;
    __syncwarp();
    return shrink;
}

__device__ __forceinline__ float inverse_of(const RowState& state) {
    return 1.f / (state.sum + __shfl_xor_sync(0xffffffffu, state.sum, 16));
}

}  // namespace attn
