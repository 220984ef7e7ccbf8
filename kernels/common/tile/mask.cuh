// Masks of scores in accumulators.
#pragma once
#include "common/element.cuh"

// Columns from `limit` on get no weight; limit_8 is that of a thread's other row, 8 further. Thread
// t holds of register i the row i / 2 % 2 and the column 8 (i / 4) + 2 (t % 4) + i % 2: see
// common/ptx/wgmma.cuh.
template <int N>
__device__ __forceinline__ void mask_columns(float (&s)[N], int limit, int limit_8) {
    int first = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (i / 4 * 8 + i % 2 + first >= (i & 2 ? limit_8 : limit)) s[i] = minus_infinity();
}
