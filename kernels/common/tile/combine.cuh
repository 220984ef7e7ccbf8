// Joins what several blocks computed of the same rows from disjoint keys.
#pragma once
#include "common/element.cuh"
#include "common/tile/rows.cuh"

// Columns 4 `chunk` .. of one row. partial: (splits, rows, HeadDim), each normalised by its own
// sum; partial_lse: (splits, rows), the base-2 logarithm of that sum with its reference, -inf of no
// key. row_of_o(): where the row begins in o. Returns the logarithm of the whole row. What is read
// is not __restrict__: see common/ptx/launch.cuh.
template <int HeadDim, class RowOfO>
__device__ __forceinline__ float combine_splits(const float* partial, const float* partial_lse,
                                                element_t* __restrict__ o, const RowOfO& row_of_o,
                                                int splits, int rows, int row, int chunk) {
    float largest = minus_infinity();
    for (int i = 0; i < splits; ++i)
        largest = fmaxf(largest, partial_lse[static_cast<long long>(i) * rows + row]);
    const bool empty = EMPTY_ROWS && largest == minus_infinity();
    const float from = empty ? 0.f : largest;
    float4 sum = {0.f, 0.f, 0.f, 0.f};
    float weights = 0.f;
#pragma unroll 4
    for (int i = 0; i < splits; ++i) {
        long long at = static_cast<long long>(i) * rows + row;
        float weight = exp2_approx(partial_lse[at] - from);
        float4 x = reinterpret_cast<const float4*>(partial + at * HeadDim)[chunk];
        sum.x = fmaf(x.x, weight, sum.x), sum.y = fmaf(x.y, weight, sum.y);
        sum.z = fmaf(x.z, weight, sum.z), sum.w = fmaf(x.w, weight, sum.w);
        weights += weight;
    }
    float by = empty ? 0.f : 1.f / weights;
    uint2 out = {pack(sum.x * by, sum.y * by), pack(sum.z * by, sum.w * by)};
    reinterpret_cast<uint2*>(o + row_of_o())[chunk] = out;
    return largest + log2f(weights);
}
