// What a row of scores needs whichever kernel works on it.
#pragma once

// 1: the mask leaves some queries no key, as a launch knows. Their output is 0 and their
// log-sum-exp minus infinity. Asking costs every kernel up to 11 instructions, and the recorded
// ones have none of such queries.
#ifndef EMPTY_ROWS
#define EMPTY_ROWS 0
#endif

// Keys that query `row` sees; the mask is aligned bottom-right.
template <bool Causal>
__device__ __forceinline__ int keys_of(int row, int seqlen_q, int seqlen_k) {
    return Causal ? min(seqlen_k, row + 1 + seqlen_k - seqlen_q) : seqlen_k;
}

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
