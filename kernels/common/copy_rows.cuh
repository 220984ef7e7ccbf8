// Rows of HEAD_DIM elements from global to shared memory by cp.async. Include after common/mma.cuh.
#pragma once

// A number of threads as an argument: count() is constant.
template <int N>
struct Count {
    __device__ constexpr int operator()() const { return N; }
};

// ROWS contiguous rows by COUNT threads, of which this is `thread`. offset(row, chunk): where 16 bytes
// go. Rows from rows_left on become zeros, so that 0 * V is never NaN. A copy of no bytes reads nothing, wherever
// its source lies, so all sources are one address and a constant: a choice would take registers for each.
template <int ROWS, int COUNT, class Offset>
__device__ __forceinline__ void copy_rows(unsigned target, const element_t* source, int rows_left,
                                          unsigned thread, Offset offset) {
    constexpr int CHUNKS = HEAD_DIM / 8, STEP = COUNT / CHUNKS;  // rows from one chunk of a thread to its next
    static_assert(COUNT % CHUNKS == 0 && ROWS % STEP == 0, "rows must be whole chunks for every thread");
    const unsigned first = thread / CHUNKS, chunk = thread % CHUNKS;
    source += thread * 8;
#pragma unroll
    for (int i = 0; i < ROWS / STEP; ++i) {
        const unsigned row = first + i * STEP;
        const bool valid = static_cast<int>(row) < rows_left;
        cp_async_16(target + offset(row, chunk), source + i * (COUNT * 8), valid);
    }
}
