// What holds a warp-specialised pipeline together: one warp copies tiles by TMA into a ring that
// whole warpgroups multiply from.
#pragma once
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/tma.cuh"

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
