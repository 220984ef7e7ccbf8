// Rows of HEAD_DIM elements from global to shared memory by cp.async. Include after common/mma.cuh.
#pragma once

// A number of threads as an argument: count() is constant.
template <int N>
struct Count {
    __device__ constexpr int operator()() const { return N; }
};

// ROWS contiguous rows by COUNT threads, of which this is `thread`. offset(row, chunk): where 16 bytes
// go. Rows from rows_left on become zeros, so that 0 * V is never NaN; `source` must be readable.
template <int ROWS, int COUNT, class Offset>
__device__ __forceinline__ void copy_rows(unsigned target, const element_t* source, int rows_left, int thread,
                                          Offset offset) {
    constexpr int CHUNKS = HEAD_DIM / 8;
    static_assert(ROWS * CHUNKS % COUNT == 0, "rows must be whole chunks for every thread");
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS / COUNT; ++i) {
        const int at = i * COUNT + thread, row = at / CHUNKS;
        const bool valid = row < rows_left;
        cp_async_16(target + offset(row, at % CHUNKS), source + (valid ? at * 8 : 0), valid);
    }
}
