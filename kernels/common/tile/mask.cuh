// Which keys a query sees, and the mask of scores in accumulators.
#pragma once
#include "common/tile/fragments.cuh"

namespace attn {

// 1: the mask leaves some queries no key, as a launch knows. Their output is 0 and their
// log-sum-exp minus infinity. Asking costs every kernel up to 11 instructions, and the recorded
// ones have none of such queries.
#ifndef EMPTY_ROWS
#define EMPTY_ROWS 0
#endif

// Keys from `first` on, before `end`.
struct KeyRange {
    int first, end;
};
// Those that query `row` sees; the mask is aligned bottom-right.
template <bool Causal>
__device__ __forceinline__ KeyRange visible_keys(int row, int seqlen_q, int seqlen_k) {
    return {0, Causal ? min(seqlen_k, row + 1 + seqlen_k - seqlen_q) : seqlen_k};
}

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

}  // namespace attn
