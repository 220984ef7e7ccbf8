// Rings of buffers in shared memory: one side fills them by TMA or cp.async, the other reads them.
#pragma once
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/shared.cuh"
#include "common/ptx/tma.cuh"
#include "common/tile/fragments.cuh"

namespace attn {

// ---- positions ----
// A position in a ring of Stages buffers: consumers wait for `phase`, the producer for `phase ^ 1`.
template <int Stages>
struct Ring {
    unsigned stage = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == Stages) stage = 0, phase ^= 1;
    }
    // Count positions on, at most Stages; and to the position of the index-th use.
    template <int Count>
    __device__ __forceinline__ void skip() {
        static_assert(Count <= Stages, "a ring is passed at most once");
        stage += Count;
        if (stage >= Stages) stage -= Stages, phase ^= 1;
    }
    __device__ __forceinline__ void to(unsigned index) {
        stage = index % Stages, phase = index / Stages & 1;
    }
};

// ---- barriers: one warp copies tiles by TMA into a ring that whole warpgroups multiply from ----
// Barriers: full and empty of each of Stages ring stages, then of each of Parts of an operand that
// stays, with an equal share of the warps. Warps multiply, one more copies: it makes the barriers
// and goes on to its first loads, the others wait here. In a cluster, the ring is filled for all
// blocks at once, so a stage is empty when the warps of all have said so, and no block goes on
// before all have barriers. Takes named barrier 1.
template <int Stages, int Parts, int Warps, int Blocks>
__device__ __forceinline__ void init_barriers(unsigned barriers) {
    constexpr int THREADS = Warps * 32 + 32;
    if (threadIdx.x < Warps * 32) {
        named_barrier_sync(1, THREADS);
    } else {
        if (threadIdx.x == Warps * 32) {
#pragma unroll
            for (int i = 0; i < Stages + Parts; ++i) {
                mbarrier_init(barriers + 16 * i, 1);
                mbarrier_init(barriers + 16 * i + 8,
                              i < Stages ? Warps * Blocks : Warps / max(1, Parts));
            }
            mbarrier_init_fence();
        }
        __syncwarp();
        named_barrier_arrive(1, THREADS);
    }
    if (Blocks > 1) cluster_arrive_relaxed(), cluster_wait();
}
// A warp's word that it no longer reads a ring stage, to every block that fills it: a lane tells
// one block.
template <int Blocks>
struct Release {
    unsigned barriers;  // of the block that this lane tells
    __device__ __forceinline__ explicit Release(unsigned own)
        : barriers(Blocks > 1 ? cluster_address(own, threadIdx.x % Blocks) : own) {}
    __device__ __forceinline__ void operator()(unsigned stage, bool really = true) const {
        unsigned lane = threadIdx.x % 32;
        if (Blocks > 1)
            mbarrier_arrive_remote(barriers + 16 * stage + 8, lane, really ? Blocks : 0);
        else if (lane == 0 && really) mbarrier_arrive(barriers + 16 * stage + 8);
    }
};
// A box of `rows` rows of a panel whose rows have RowBytes. In a cluster, a box is the share of one
// block, `rows` / Blocks, and each block gives all of them its share.
template <int Blocks, int RowBytes>
__device__ __forceinline__ void load_shared_panel(unsigned panel, const TensorMap& map,
                                                  unsigned full, int column, int row, int head,
                                                  int rows, unsigned rank) {
    if (Blocks == 1) tma_load(panel, map, full, column, row, head);
    else
        tma_load_multicast(panel + rank * (rows / Blocks) * RowBytes, map, full, column,
                           row + rank * (rows / Blocks), head, (1 << Blocks) - 1);
}

// ---- rows by cp.async ----
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

}  // namespace attn
