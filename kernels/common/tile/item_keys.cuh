// The keys of an item of the batch that its queries see, where these all see the same: few queries
// beside a cache that is filled in part, or padded.
#pragma once
#include "common/tile/mask_list.cuh"

namespace attn {

// `count` keys from `first` on, of which the `begin`-th is the first that is seen. Some before the
// `holes`-th are not seen: their bits say which.
struct __align__(16) ItemKeys {
    int first, count, holes, begin;
};

// What a call has of the items, and of the one that was looked up.
struct ItemOfCall {
    const ItemKeys* items;
    const unsigned* bits;  // of each item
    int heads, words;      // heads, and words of bits, of an item
    ItemKeys keys = {};

    __device__ __forceinline__ void look_up(int head) {
        const int item = head / heads;
        keys = items[item];
        bits += static_cast<long long>(item) * words + keys.first / 32;
    }
    // A key that there is not is no row of the tensor either, and its load takes no time.
    __device__ __forceinline__ int in_memory(int key) const {
        return key < keys.count ? keys.first + key : 1 << 30;
    }
};

// Reads the mask of an item, `key_stride` bytes from key to key: writes the bits of all its keys,
// and where those that are seen begin and end. By a block; of_warps: two numbers of each.
// The first key is one of a multiple of 128, so that a tile's bits are whole words.
template <int Threads>
__device__ __forceinline__ void see_item(const unsigned char* mask, int key_stride, unsigned* bits,
                                         int words, int seqlen_k, int2* of_warps, ItemKeys* item) {
    constexpr unsigned ALL = 0xffffffffu;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The least and the largest of a number of each thread.
    auto of_block = [&](int least, int most) -> int2 {
        least = __reduce_min_sync(ALL, least), most = __reduce_max_sync(ALL, most);
        __syncthreads();
        if (lane == 0) of_warps[warp] = {least, most};
        __syncthreads();
        const int2 of_warp = of_warps[lane % (Threads / 32)];
        return {__reduce_min_sync(ALL, of_warp.x), __reduce_max_sync(ALL, of_warp.y)};
    };
    int first = 1 << 30, end = 0;
    const bool by_16 = key_stride == 1 && seqlen_k % 16 == 0 &&
                       reinterpret_cast<unsigned long long>(mask) % 16 == 0;
    // A word is of two neighbouring lanes.
#pragma unroll 4
    for (int at = threadIdx.x; at < 2 * words; at += Threads) {
        unsigned half = 0;
        const int key = at * 16;
        if (by_16 && key < seqlen_k) {
            const uint4 bytes = *reinterpret_cast<const uint4*>(mask + key);
            half = bits_of_bytes({zero_or_one(bytes.x), zero_or_one(bytes.y), zero_or_one(bytes.z),
                                  zero_or_one(bytes.w)});
        } else if (!by_16) {
            for (int i = 0; i < min(16, seqlen_k - key); ++i)
                half |= (mask[static_cast<long long>(key + i) * key_stride] != 0) << i;
        }
        reinterpret_cast<unsigned short*>(bits)[at] = static_cast<unsigned short>(half);
        if (half) first = min(first, key + __ffs(half) - 1), end = key + 32 - __clz(half);
    }
    const int2 ends = of_block(first, end);  // behind it all threads see the bits
    const int begin = min(ends.x, ends.y);
    first = begin / 128 * 128, end = ends.y;
    int hole = 0;
    for (int at = first / 32 + threadIdx.x; at * 32 < end; at += Threads) {
        const unsigned own = end - at * 32 < 32 ? (1u << (end - at * 32)) - 1 : ALL;
        const unsigned hidden = own & ~bits[at];
        if (hidden) hole = at * 32 + 32 - __clz(hidden) - first;
    }
    hole = of_block(0, hole).y;
    if (threadIdx.x == 0) *item = {first, end - first, hole, begin - first};
}

}  // namespace attn
