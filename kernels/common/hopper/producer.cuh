// What a producer loads by TMA.
#pragma once
#include "common/ptx/barrier.cuh"
#include "common/tile/shared_tile.cuh"

namespace attn {

// A SharedTile from row `row` of a head on, which `barrier` counts whole, even where it is clipped.
// The map's elements have 16 bits, which may be a pair of bytes. With Blocks > 1, block `rank` of a
// cluster loads its share of the rows for all.
template <class Tile, int Blocks = 1, class Head>
__device__ __forceinline__ void load_tile(unsigned target, const TensorMap& map, unsigned barrier,
                                          int row, const Head& head, int rank = 0) {
    mbarrier_expect(barrier, Tile::BYTES);
    constexpr int SHARE = Tile::PANEL_BYTES / Tile::ROW_BYTES / Blocks;  // rows
#pragma unroll
    for (int i = 0; i < Tile::PANELS; ++i) {
        const unsigned panel = target + i * Tile::PANEL_BYTES;
        const int column = i * Tile::ROW_BYTES / 2;
        if constexpr (Blocks > 1)
            load_box_multicast(panel + rank * SHARE * Tile::ROW_BYTES, map, barrier, column,
                               row + rank * SHARE, head, (1 << Blocks) - 1);
        else load_box(panel, map, barrier, column, row, head);
    }
}

}  // namespace attn
