// Rows of 16-bit elements from global to shared memory by cp.async.
#pragma once
#include "common/element.cuh"
#include "common/ptx/shared.cuh"

// A number of threads as an argument: count() is constant.
template <int N>
struct Count {
    __device__ constexpr int operator()() const { return N; }
};

// Rows contiguous rows of HeadDim elements by Count threads, of which this is `thread`. offset(row,
// chunk): where 16 bytes go. Rows from rows_left on become zeros, so that 0 * V is never NaN. A
// copy of no bytes reads nothing, wherever its source lies, so all sources are one address and a
// constant: a choice would take registers for each.
template <int HeadDim, int Rows, int Count, class Offset>
__device__ __forceinline__ void copy_rows(unsigned target, const element_t* source, int rows_left,
                                          unsigned thread, Offset offset) {
    constexpr int CHUNKS = HeadDim / 8,
                  STEP = Count / CHUNKS;  // rows from one chunk of a thread to its next
    static_assert(Count % CHUNKS == 0 && Rows % STEP == 0,
                  "rows must be whole chunks for every thread");
    const unsigned first = thread / CHUNKS, chunk = thread % CHUNKS;
    source += thread * 8;
#pragma unroll
    for (int i = 0; i < Rows / STEP; ++i) {
        const unsigned row = first + i * STEP;
        const bool valid = static_cast<int>(row) < rows_left;
        cp_async_16(target + offset(row, chunk), source + i * (Count * 8), valid);
    }
}
