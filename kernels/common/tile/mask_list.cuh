// Masks in memory: what each query sees, and from it the list of tiles of queries that a flash
// kernel works through. Made once for a mask, and read in each call with it.
#pragma once
#include "common/ptx/shared.cuh"
#include "common/tile/scheduler.cuh"

namespace attn {

// A record of 64 queries: the first key that any of them sees and the end of those; and the keys
// that all of them see. No key: {INT_MAX, 0, ..}. An entry of the list is {first row, mask, first
// key, end} of a tile of queries, then the record of each 64 of its queries; entries with most keys
// come first. Query i of mask m has bounds[m * seqlen_q + i], an interval of keys; or, with MASK 2,
// bits[(m * seqlen_q + i) * words], a bit a key. `heads` heads, one behind the other, have a mask
// in common. turns: how many entries have been taken beyond each block's first, and how many blocks
// have ended; 0 before a call and after it.
struct MaskList {
    const int4* work;
    const int2* bounds;
    const unsigned* bits;
    int* turns;
    int tiles, heads, words;  // tiles: of queries of all masks
};

// What all lanes have, so that the compiler knows it. After a branch that may part the lanes, ptxas
// reads every descriptor through WARPSYNC and R2UR, which took 20 % with 64 keys a tile.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }
__device__ __forceinline__ bool uniform(bool x) { return __any_sync(0xffffffffu, x); }
__device__ __forceinline__ int4 uniform(const int4& x) {
    return {uniform(x.x), uniform(x.y), uniform(x.z), uniform(x.w)};
}
__device__ __forceinline__ int4 load_told(unsigned address) {
    uint4 x = load_shared_16(address);
    return {static_cast<int>(x.x), static_cast<int>(x.y), static_cast<int>(x.z),
            static_cast<int>(x.w)};
}

struct MaskedTile : WorkTile {
    int mask;
};
// Schedule's twin for a mask in memory. The grid is (heads_per_l2_section, tiles, rest), or that of
// blocks that take the next entry when they are ready for it. heads_per_l2_section divides the
// heads of a mask; those run together, so that they share K and V in L2.
template <int BlockN, int RowGroups>
struct MaskedSchedule {
    static constexpr bool LAST_IS_LONGEST = true;  // 64 rows of a tile differ
    static constexpr int ENTRY = 1 + RowGroups;
    MaskList list;
    int heads_per_l2_section;
    __device__ __forceinline__ int items() const { return list.tiles * list.heads; }
    // An entry's first 16 bytes with the head in the place of the mask.
    __device__ __forceinline__ int4 with_head(int4 entry, int head) const {
        entry.y = entry.y * list.heads + head;
        return entry;
    }
    __device__ __forceinline__ MaskedTile tile(const int4& entry) const {
        int end = ceil_div<BlockN>(entry.w), first = entry.z / BlockN;
        return {{entry.x, entry.y, first, end, max(0, end - first)}, entry.y / list.heads};
    }
    __device__ __forceinline__ const int4* entry_of_block() const {
        return list.work + blockIdx.y * ENTRY;
    }
    __device__ __forceinline__ int4 of_block() const {
        return with_head(*entry_of_block(), blockIdx.z * gridDim.x + blockIdx.x);
    }
    __device__ __forceinline__ MaskedTile of(int) const { return tile(of_block()); }
    // The entry of an item, and its head of the mask.
    __device__ __forceinline__ const int4* entry_of(int item, int& head) const {
        int row = item / heads_per_l2_section, section = row / list.tiles;
        head = item - (row - section) * heads_per_l2_section;
        return list.work + (row - section * list.tiles) * ENTRY;
    }
    __device__ __forceinline__ int key(int j, int, int end) const { return (end - 1 - j) * BlockN; }
};

// ---- records and the list ----
// What a row sees of a mask whose rows are no intervals, as far as a lane has read it.
struct SeenKeys {
    int first, last, count;
    __device__ __forceinline__ void see(unsigned bits, int key) {  // of 32 keys from this one on
        count += __popc(bits);
        if (bits)
            first = min(first, key + __ffs(bits) - 1), last = max(last, key + 31 - __clz(bits));
    }
};
__device__ __forceinline__ int warp_min(int x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x = min(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}
__device__ __forceinline__ int warp_max(int x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}
__device__ __forceinline__ int warp_sum(int x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
constexpr int NO_KEY = 0x7fffffff;

// The record of 64 rows by one warp. of_row: {first, end} of each; a row whose keys are no interval
// has its own count of them in `holes`, so that no key is seen by all.
__device__ __forceinline__ int4 record_of(const int4* of_row, int rows, int lane) {
    int4 record{NO_KEY, 0, 0, NO_KEY};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int row = lane + 32 * i;
        int4 seen = of_row[row < rows ? row : 0];  // rows past the last are as the first
        bool whole = seen.z == 0;
        record.x = min(record.x, seen.x), record.y = max(record.y, seen.y);
        record.z = max(record.z, whole && seen.y > 0 ? seen.x : 0);
        record.w = min(record.w, whole ? seen.y : 0);
    }
    return {warp_min(record.x), warp_max(record.y), warp_max(record.z), warp_min(record.w)};
}

// Where sequences begin that lie one behind the other, and where the last one ends.
struct Sequences {
    const int *of_q, *of_k;
    int count;
    // The one of a query: the last that begins at it or before. Those after it may be empty.
    __device__ __forceinline__ int of(int row) const {
        int part = 0, after = count;
        while (after - part > 1) {
            int middle = (part + after) / 2;
            if (of_q[middle] <= row) part = middle;
            else after = middle;
        }
        return part;
    }
};

// Rows whose keys follow from their position: query i sees keys i + low to i + high of those in
// `range`; or, of packed sequences, of those of its own, where i counts from the key beside its
// last query. A block has 64 threads, one a row.
template <bool Packed>
__device__ __forceinline__ void
see_diagonals(int low, int high, int2 range, const Sequences& sequences, int2* bounds, int4* record,
              int4* of_row, int seqlen_q, int seqlen_k) {
    const int begin = blockIdx.x * 64, row = begin + threadIdx.x;
    int diagonal = row;
    if (Packed) {
        int part = sequences.of(min(row, seqlen_q - 1)), end = sequences.of_k[part + 1];
        int after = sequences.of_q[part + 1];
        // A query may be of no sequence: a call's tensors can be longer than all of them.
        bool own = sequences.of_q[part] <= row && row < after;
        range = {sequences.of_k[part], own ? end : 0};
        diagonal += end - after;
    }
    int4 seen{max(max(range.x, 0), diagonal + low),
              min(min(range.y, seqlen_k), diagonal + high + 1), 0, 0};
    if (seen.x >= seen.y) seen = {NO_KEY, 0, 0, 0};
    of_row[threadIdx.x] = seen;
    if (row < seqlen_q) bounds[row] = {seen.y > 0 ? seen.x : 0, seen.y};
    __syncthreads();
    if (threadIdx.x >= 32) return;
    int4 of_all = record_of(of_row, min(64, seqlen_q - begin), threadIdx.x);
    if (threadIdx.x == 0) *record = of_all;
}

// Bytes that are 0 or not, of 16 keys, as 16 bits.
__device__ __forceinline__ unsigned bits_of_bytes(const uint4& bytes) {
    auto four = [](unsigned word) {
        // A byte of bool is 0 or 1; of other bytes, any bit counts.
        word |= word >> 4, word |= word >> 2, word |= word >> 1;
        return (word & 0x01010101u) * 0x01020408u >> 24 & 0xfu;
    };
    return four(bytes.x) | four(bytes.y) << 4 | four(bytes.z) << 8 | four(bytes.w) << 12;
}

// Rows of a mask that has a byte for each query and key: their bits. A block has Warps warps, which
// take a row each in turns, by 16 bytes where all rows begin and end at such. A word of bits is of
// 32 keys.
template <int Warps>
__device__ __forceinline__ void see_bytes(const unsigned char* mask, int row_stride, int key_stride,
                                          unsigned* bits, int4* record, int4* of_row, int seqlen_q,
                                          int seqlen_k, int words) {
    const int begin = blockIdx.x * 64, rows = min(64, seqlen_q - begin);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool wide = key_stride == 1 && (row_stride | seqlen_k) % 16 == 0 &&
                      reinterpret_cast<unsigned long long>(mask) % 16 == 0;
    for (int r = warp; r < rows; r += Warps) {
        const unsigned char* of_q = mask + static_cast<long long>(begin + r) * row_stride;
        unsigned* to = bits + static_cast<long long>(begin + r) * words;
        SeenKeys seen{NO_KEY, -1, 0};
        if (wide) {
            constexpr int LOADS = 4;
            for (int first = 0; first < words * 32; first += 512 * LOADS) {
                uint4 bytes[LOADS];
#pragma unroll
                for (int i = 0; i < LOADS; ++i) {
                    int key = first + i * 512 + lane * 16;
                    bytes[i] = key < seqlen_k ? *reinterpret_cast<const uint4*>(of_q + key)
                                              : uint4{0, 0, 0, 0};
                }
#pragma unroll
                for (int i = 0; i < LOADS; ++i) {
                    int key = first + i * 512 + lane * 16;
                    unsigned half = bits_of_bytes(bytes[i]);
                    unsigned other = __shfl_xor_sync(0xffffffffu, half, 1);
                    seen.see(half, key);
                    if (lane % 2 == 0 && key < words * 32) to[key / 32] = half | other << 16;
                }
            }
        } else {
            for (int first = 0; first < words * 32; first += 32) {
                int key = first + lane;
                bool one = key < seqlen_k && of_q[static_cast<long long>(key) * key_stride] != 0;
                unsigned word = __ballot_sync(0xffffffffu, one);
                if (lane == 0) seen.see(word, first), to[first / 32] = word;
            }
        }
        int first = warp_min(seen.first), end = warp_max(seen.last) + 1;
        int holes = end - first - warp_sum(seen.count);
        if (lane == 0) of_row[r] = end > 0 ? int4{first, end, holes, 0} : int4{NO_KEY, 0, 0, 0};
    }
    __syncthreads();
    if (warp > 0) return;
    int4 of_all = record_of(of_row, rows, lane);
    if (lane == 0) *record = of_all;
}

// The list from records of 64 rows, by one block. Entries are dealt by their number of keys:
// `place` is a count of each number of 64 keys, then where its entries go.
template <int Groups, int Threads, int Places>
__device__ __forceinline__ void order_tiles(const int4* records, int4* work, int masks,
                                            int records_of_mask, int seqlen_k, int* place) {
    const int tiles_m = ceil_div<Groups>(records_of_mask), tiles = masks * tiles_m;
    const int unit = ceil_div<64 * (Places - 1)>(seqlen_k) * 64;  // keys of a step
    auto entry_of = [&](int tile) {
        int mask = tile / tiles_m, first = tile % tiles_m * Groups;
        int4 entry{first * 64, mask, NO_KEY, 0};
        for (int i = first; i < min(first + Groups, records_of_mask); ++i) {
            int4 record = records[mask * records_of_mask + i];
            entry.z = min(entry.z, record.x), entry.w = max(entry.w, record.y);
        }
        if (entry.w == 0) entry.z = 0;
        return entry;
    };
    // Place 0 is of the longest.
    auto step_of = [&](const int4& entry) {
        int steps = entry.w > entry.z ? (entry.w + unit - 1) / unit - entry.z / unit : 0;
        return max(0, Places - 1 - steps);
    };
    for (int i = threadIdx.x; i < Places; i += Threads) place[i] = 0;
    __syncthreads();
    for (int tile = threadIdx.x; tile < tiles; tile += Threads)
        atomicAdd(place + step_of(entry_of(tile)), 1);
    __syncthreads();
    if (threadIdx.x < 32) {  // sums of the counts before each
        int before = 0;
        for (int i = threadIdx.x; i < Places; i += 32) {
            int own = place[i], sum = own;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                int other = __shfl_up_sync(0xffffffffu, sum, d);
                if (static_cast<int>(threadIdx.x) >= d) sum += other;
            }
            place[i] = before + sum - own;
            before += __shfl_sync(0xffffffffu, sum, 31);
        }
    }
    __syncthreads();
    for (int tile = threadIdx.x; tile < tiles; tile += Threads) {
        int4 entry = entry_of(tile);
        int4* to = work + atomicAdd(place + step_of(entry), 1) * (1 + Groups);
        *to = entry;
        int first = tile % tiles_m * Groups;
#pragma unroll
        for (int i = 0; i < Groups; ++i)
            to[1 + i] = first + i < records_of_mask ? records[entry.y * records_of_mask + first + i]
                                                    : int4{NO_KEY, 0, 0, 0};  // past the last query
    }
}

}  // namespace attn
