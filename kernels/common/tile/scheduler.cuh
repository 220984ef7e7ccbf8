// Which tile of queries a block of a flash kernel takes, and which tiles of keys.
#pragma once
#include "common/tile/mask.cuh"

namespace attn {

// Units that x needs. Unit is a template parameter: NVRTC makes other code of it as an argument.
template <int Unit>
__device__ __forceinline__ constexpr int ceil_div(int x) {
    return (x + Unit - 1) / Unit;
}
__device__ __forceinline__ int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }

// A tile of queries of one head; the tiles of keys that some of its queries see, from `first` on,
// before `end`; and how many of them the block takes: one for each key group at least, though it be
// past the end.
struct WorkTile {
    int row, head, first, end, tiles;
};
// Which tiles of queries a block takes, and which tiles of keys: producer and consumers ask here.
// Order: the longest first. Persistent: blocks take turns at tiles. Splits blocks share the keys of
// a tile, as a cluster if SplitCluster; KeyGroups warpgroups of a block do. Whole: each tile of
// queries has one that sees all keys.
template <int BlockM, int BlockN, int KeyGroups, int Splits, bool SplitCluster, bool Order,
          bool Persistent, bool Whole>
struct Schedule {
    static constexpr bool LAST_IS_LONGEST = LATER_SEE_MORE && !Whole;
    int tiles_m, heads, seqlen_q, seqlen_k, heads_per_l2_section;
    __device__ __forceinline__ static int split() {
        return SplitCluster ? blockIdx.x % Splits : blockIdx.z;
    }
    __device__ __forceinline__ WorkTile at(int tile_m, int head) const {
        int last = min((tile_m + 1) * BlockM, seqlen_q) - 1;
        int first = Whole ? 0 : visible_keys(tile_m * BlockM, seqlen_q, seqlen_k).first / BlockN;
        int end = ceil_div<BlockN>(Whole ? seqlen_k : visible_keys(last, seqlen_q, seqlen_k).end);
        if (EMPTY_ROWS) end = max(end, 1);  // a tile without keys takes those that it hides
        int all = end - first;
        int tiles = Splits == 1 ? all : ceil_div<Splits>(all - split());
        return {tile_m * BlockM, head, first, end, max(tiles, KeyGroups)};
    }
    // Of one tile a block: the grid is (queries, heads, Splits), or (queries and Splits, heads),
    // or, longest first, (heads_per_l2_section, queries, rest).
    __device__ __forceinline__ WorkTile of_block() const {
        if (Order) return at(gridDim.y - 1 - blockIdx.y, blockIdx.z * gridDim.x + blockIdx.x);
        int block = LAST_IS_LONGEST ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
        return at(SplitCluster ? block / Splits : block, blockIdx.y);
    }
    // The tile of a turn. If tiles differ in length, every second round of turns runs backwards, so
    // that a block gets long and short ones.
    __device__ __forceinline__ WorkTile of_turn(int turn) const {
        int block = LAST_IS_LONGEST && turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
        int item = turn * gridDim.x + block, tile_m, head;
        if (item >= tiles_m * heads) return {-1, 0, 0, 0, 0};
        if (Order) {
            int section = item / (heads_per_l2_section * tiles_m),
                within = item % (heads_per_l2_section * tiles_m);
            int first = section * heads_per_l2_section,
                count = min(heads_per_l2_section, heads - first);
            tile_m = tiles_m - 1 - within / count;
            head = first + within % count;
        } else {
            tile_m = LAST_IS_LONGEST ? tiles_m - 1 - item % tiles_m : item % tiles_m;
            head = item / tiles_m;
        }
        return at(tile_m, head);
    }
    __device__ __forceinline__ WorkTile of(int turn) const {
        return Persistent ? of_turn(turn) : of_block();
    }
    // First key of the block's j-th tile, from the right.
    __device__ __forceinline__ int key(int j, int first, int end) const {
        if (Splits > 1) j = j * Splits + split();
        return (KeyGroups == 1 && Splits == 1) || first + j < end ? (end - 1 - j) * BlockN
                                                                  : seqlen_k;
    }
    __device__ __forceinline__ int key_of(int j, const WorkTile& work) const {
        return key(j, work.first, work.end);
    }
};

}  // namespace attn
