// Which tile of queries a block of a flash kernel takes, and which tiles of keys. Include after
// common/rows.cuh; needs BLOCK_M, BLOCK_N, KEY_GROUPS, SPLITS, SPLIT_CLUSTER, ORDER, PERSISTENT and CAUSAL.
#pragma once

// A tile of queries of one head, how many tiles of keys it sees, and how many of them the block takes: one
// for each key group at least, though it be past the end.
struct Work {
    int row, head, all, tiles;
};
struct Schedule {
    int tiles_m, heads, seqlen_q, seqlen_k, heads_together;
    __device__ __forceinline__ static int split() { return SPLIT_CLUSTER ? blockIdx.x % SPLITS : blockIdx.z; }
    __device__ __forceinline__ Work at(int tile_m, int head) const {
        int last = min((tile_m + 1) * BLOCK_M, seqlen_q) - 1;
        int all = (keys_of(last, seqlen_q, seqlen_k) + BLOCK_N - 1) / BLOCK_N;
        int tiles = SPLITS == 1 ? all : (all - split() + SPLITS - 1) / SPLITS;
        return {tile_m * BLOCK_M, head, all, max(tiles, KEY_GROUPS)};
    }
    // Of one tile a block: the grid is (queries, heads, SPLITS), or (queries and SPLITS, heads), or, longest
    // first, (heads_together, queries, rest).
    __device__ __forceinline__ Work of_block() const {
        if (ORDER) return at(gridDim.y - 1 - blockIdx.y, blockIdx.z * gridDim.x + blockIdx.x);
        int block = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
        return at(SPLIT_CLUSTER ? block / SPLITS : block, blockIdx.y);
    }
    // Of blocks that take turns: causal, every second round runs backwards, so that long meets short.
    __device__ __forceinline__ Work of_turn(int turn) const {
        int block = CAUSAL && turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
        int item = turn * gridDim.x + block, tile_m, head;
        if (item >= tiles_m * heads) return {-1, 0, 0, 0};
        if (ORDER) {
            int section = item / (heads_together * tiles_m), within = item % (heads_together * tiles_m);
            int first = section * heads_together, count = min(heads_together, heads - first);
            tile_m = tiles_m - 1 - within / count;
            head = first + within % count;
        } else {
            tile_m = CAUSAL ? tiles_m - 1 - item % tiles_m : item % tiles_m;
            head = item / tiles_m;
        }
        return at(tile_m, head);
    }
    __device__ __forceinline__ Work of(int turn) const { return PERSISTENT ? of_turn(turn) : of_block(); }
    // First key of the block's j-th tile, from the right.
    __device__ __forceinline__ int key(int j, int all) const {
        if (SPLITS > 1) j = j * SPLITS + split();
        return (KEY_GROUPS == 1 && SPLITS == 1) || j < all ? (all - 1 - j) * BLOCK_N : seqlen_k;
    }
};
