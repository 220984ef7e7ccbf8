// Softmax in units: every UNIT keys of a row have a maximum of their own, and a row's units are
// joined later. Scores are in base 2. maxima and sums: (head, unit, query).
#pragma once
#include "common/element.cuh"
#include "common/tile/arithmetic.cuh"
#include "common/tile/rows.cuh"

constexpr int UNIT = 128;

__device__ __forceinline__ int units_of(int keys) { return ceil_div<UNIT>(keys); }
// Columns of a row that a tile of UNIT queries and UNIT keys reads, beyond seqlen_k aside.
template <bool Causal>
__device__ __forceinline__ int extent_of(int row, int seqlen_q, int seqlen_k) {
    return round_up(keys_of<Causal>(min(row | (UNIT - 1), seqlen_q - 1), seqlen_q, seqlen_k), UNIT);
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
