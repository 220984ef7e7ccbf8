// What becomes of a warp's accumulators: through shared memory to global memory.
#pragma once
#include "common/element.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/cache.cuh"
#include "common/ptx/shared.cuh"
#include "common/ptx/tma.cuh"

// Where a warp puts its 16 rows of an accumulator on their way to memory, 64 columns at a time.
// Store 0: a box of 16 rows by TMA, so that no warp waits for another. 1: a box of the warpgroup's
// 64 rows by TMA, its four warps' panels being one; takes named barriers 4 .. 7. 2: by the warp's
// own stores of 16 bytes a lane, in which `to` is where the first of its rows and columns goes,
// `stride` elements a row. Keep: L2 is told to hold on to what is stored.
template <int Store, bool Keep>
struct PanelStore {
    static constexpr int BOX_ROWS = Store == 1 ? 64 : 16;  // of a box
    static constexpr unsigned BYTES = BOX_ROWS * 128;      // of a panel

    __device__ static __forceinline__ void sync() {
        if (Store == 1) named_barrier_sync(4 + threadIdx.x / 128, 128);
        else __syncwarp();
    }
    __device__ static __forceinline__ bool issues() {
        return threadIdx.x % (Store == 1 ? 128 : 32) == 0;
    }

    // Until at most Pending groups of panels stored before are still read.
    template <int Pending>
    __device__ static __forceinline__ void wait() {
        if (Store < 2 && issues()) tma_store_wait_read<Pending>();
        sync();
    }
    __device__ static __forceinline__ void commit() {
        if (Store < 2 && issues()) tma_store_commit();
    }
    __device__ static __forceinline__ void put(element_t* to, uint4 x) {
        if (Keep) store_kept<16>(to, &x.x);
        else *reinterpret_cast<uint4*>(to) = x;
    }
    // d times `low` and `high` to columns `column` .. and rows `row` .. of the warp; `panel`: of
    // the box. rows: how many are inside, columns: how many of the 64.
    __device__ static __forceinline__ void store(const TensorMap& map, unsigned panel,
                                                 const float* d, float low, float high, int column,
                                                 int row, int head, int rows, int columns,
                                                 element_t* to, int stride) {
        int lane = threadIdx.x % 32, in = lane % 16, chunk = lane / 16,
            slice = threadIdx.x / 32 % 4;
        unsigned own = panel + (Store == 1 ? slice * 2048 : 0);
#pragma unroll
        for (int i = 0; i < 4; ++i, d += 8)
            stmatrix_x4(own + in * 128 + ((i * 2 + chunk ^ in % 8) << 4),
                        pack(d[0] * low, d[1] * low), pack(d[2] * high, d[3] * high),
                        pack(d[4] * low, d[5] * low), pack(d[6] * high, d[7] * high));
        if constexpr (Store < 2) {
            fence_async_proxy();
            sync();
            if (issues() && rows > 0 && columns > 0) {  // of the first warp, if the box is of four
                if (Keep) tma_store(map, panel, column, row, head, EVICT_LAST);
                else tma_store(map, panel, column, row, head);
            }
        } else {
            sync();
            if (lane % 8 * 8 >= columns) rows = 0;
            to += lane / 8 * stride + lane % 8 * 8;
#pragma unroll
            for (int r = lane / 8; r < 16; r += 4, to += 4 * stride) {
                uint4 x = load_shared_16(own + r * 128 + ((lane % 8 ^ r % 8) << 4));
                if (r < rows) put(to, x);
            }
            sync();
        }
    }
};
