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
//
// With MASK 2 keys may be hidden between those that are seen, and a block takes only the tiles of
// keys that some of its queries see, as if they lay side by side: an entry is {first row, mask, 0,
// number of tiles}, its records count keys in these tiles, and behind them lies the first key of
// each, right to left. What all 64 queries see is the longest run of tiles of which they see all.
struct MaskList {
    const int4* work;
    const int2* bounds;
    const unsigned* bits;
    int* turns;
    int tiles, heads, words;  // tiles: of queries of all masks
};
// int4s of an entry: a row has words for more keys than it has, so for each tile of 64 two.
template <int RowGroups>
__device__ __forceinline__ int entry_pitch(int words) {
    return 1 + RowGroups + (MASK == 2 ? (words / 4 + 1) / 2 : 0);
}

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
    int mask, key_tiles;  // key_tiles: where they are told, in ints of the list
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
    __device__ __forceinline__ int pitch() const { return entry_pitch<RowGroups>(list.words); }
    // An entry's first 16 bytes with the head in the place of the mask; with MASK 2 also where its
    // tiles of keys are told, so that they are read without a wait for it.
    __device__ __forceinline__ int4 with_head(const int4* at, int head) const {
        int4 entry = *at;
        entry.y = entry.y * list.heads + head;
        if (MASK == 2) entry.z = static_cast<int>(at - list.work + ENTRY) * 4;
        return entry;
    }
    __device__ __forceinline__ MaskedTile tile(const int4& entry) const {
        if (MASK == 2)
            return {{entry.x, entry.y, 0, entry.w, entry.w}, entry.y / list.heads, entry.z};
        int end = ceil_div<BlockN>(entry.w), first = entry.z / BlockN;
        return {{entry.x, entry.y, first, end, max(0, end - first)}, entry.y / list.heads, 0};
    }
    __device__ __forceinline__ const int4* entry_of_block() const {
        return list.work + blockIdx.y * pitch();
    }
    __device__ __forceinline__ int4 of_block() const {
        return with_head(entry_of_block(), blockIdx.z * gridDim.x + blockIdx.x);
    }
    __device__ __forceinline__ MaskedTile of(int) const { return tile(of_block()); }
    // The entry of an item, and its head of the mask.
    __device__ __forceinline__ const int4* entry_of(int item, int& head) const {
        int row = item / heads_per_l2_section, section = row / list.tiles;
        head = item - (row - section) * heads_per_l2_section;
        return list.work + (row - section * list.tiles) * pitch();
    }
    __device__ __forceinline__ int key(int j, int, int end) const { return (end - 1 - j) * BlockN; }
    // The first key of a tile's j-th tile of keys, from the right. By an index, since the producer
    // has no two registers for a pointer.
    __device__ __forceinline__ int key_tile(int j, int key_tiles) const {
        return reinterpret_cast<const int*>(list.work)[key_tiles + j];
    }
    __device__ __forceinline__ int key_of(int j, const MaskedTile& work) const {
        return MASK == 2 ? key_tile(j, work.key_tiles) : key(j, work.first, work.end);
    }
};

// ---- records and the list ----
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
constexpr int NO_KEY = 0x7fffffff;

// The record of 64 rows by one warp. of_row: {first, end} of each.
__device__ __forceinline__ int4 record_of(const int2* of_row, int rows, int lane) {
    int4 record{NO_KEY, 0, 0, NO_KEY};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int row = lane + 32 * i;
        int2 seen = of_row[row < rows ? row : 0];  // rows past the last are as the first
        record.x = min(record.x, seen.x), record.y = max(record.y, seen.y);
        record.z = max(record.z, seen.y > 0 ? seen.x : 0), record.w = min(record.w, seen.y);
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
              int2* of_row, int seqlen_q, int seqlen_k) {
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
    int2 seen{max(max(range.x, 0), diagonal + low),
              min(min(range.y, seqlen_k), diagonal + high + 1)};
    if (seen.x >= seen.y) seen = {NO_KEY, 0};
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

// What 64 queries see together: of each 16 keys a bit of any that one of them sees, and one of any
// that one does not see. A word is of 512 keys; those of `any` come first.
struct Together {
    unsigned *any, *part;
    __device__ __forceinline__ void add(int key, unsigned of_any, unsigned of_part) const {
        if (of_any) atomicOr(any + key / 512, of_any << key / 16 % 32);
        if (of_part) atomicOr(part + key / 512, of_part << key / 16 % 32);
    }
};
// `count` of such bits, from a key's on, which is bit 0.
__device__ __forceinline__ unsigned sixteens(const unsigned* bits, int words, int key, int count) {
    int word = key / 512;
    unsigned next = word + 1 < words ? bits[word + 1] : 0;
    return __funnelshift_r(bits[word], next, key / 16 % 32) & ((1u << count) - 1);
}

constexpr int SCANNED_KEYS = 1024;  // by a block, of 64 queries

// Rows of a mask that has a byte for each query and key: their bits, and of each 64 queries what
// they see together. Block z has SCANNED_KEYS keys, and the last one those beyond, up to 32
// `words`. Its Warps warps take two rows each, by 16 bytes where all rows begin and end at such.
template <int Warps>
__device__ __forceinline__ void see_bytes(const unsigned char* mask, int row_stride, int key_stride,
                                          unsigned* bits, unsigned* together, unsigned* shared,
                                          int seqlen_q, int seqlen_k, int words) {
    constexpr int OWN = SCANNED_KEYS / 512, ROWS = 64 / Warps;
    const int begin = blockIdx.x * 64, rows = min(64, seqlen_q - begin), of_z = blockIdx.z * OWN;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, key_0 = blockIdx.z * SCANNED_KEYS;
    const bool wide = key_stride == 1 && (row_stride | seqlen_k) % 16 == 0 &&
                      reinterpret_cast<unsigned long long>(mask) % 16 == 0;
    const Together own{shared - of_z, shared + OWN - of_z};
    if (threadIdx.x < 2 * OWN) shared[threadIdx.x] = 0;
    __syncthreads();
    mask += static_cast<long long>(begin) * row_stride;
    bits += static_cast<long long>(begin) * words;
    if (wide) {
        unsigned of_any[OWN] = {}, of_part[OWN] = {};
        uint4 bytes[ROWS][OWN];
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                int row = warp + r * Warps, key = key_0 + i * 512 + lane * 16;
                const unsigned char* at = mask + static_cast<long long>(row) * row_stride + key;
                bytes[r][i] = row < rows && key < seqlen_k ? *reinterpret_cast<const uint4*>(at)
                                                           : uint4{0, 0, 0, 0};
            }
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                int row = warp + r * Warps, key = key_0 + i * 512 + lane * 16;
                if (row >= rows) continue;
                unsigned half = bits_of_bytes(bytes[r][i]);
                unsigned word = half | __shfl_xor_sync(0xffffffffu, half, 1) << 16;
                if (lane % 2 == 0 && key < words * 32) bits[row * words + key / 32] = word;
                of_any[i] |= __ballot_sync(0xffffffffu, half != 0);
                of_part[i] |= __ballot_sync(0xffffffffu, half != 0xffffu);
            }
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (lane == i) own.add(key_0 + i * 512, of_any[i], of_part[i]);
    } else {
        for (int row = warp; row < rows; row += Warps)
            for (int first = key_0; first < min(key_0 + SCANNED_KEYS, words * 32); first += 32) {
                int key = first + lane;
                const unsigned char* at = mask + static_cast<long long>(row) * row_stride +
                                          static_cast<long long>(key) * key_stride;
                unsigned word = __ballot_sync(0xffffffffu, key < seqlen_k && *at != 0);
                if (lane > 0) continue;
                bits[row * words + first / 32] = word;
                unsigned low = word & 0xffffu, high = word >> 16;
                own.add(first, (low != 0) | (high != 0) << 1,
                        (low != 0xffffu) | (high != 0xffffu) << 1);
            }
    }
    __syncthreads();
    const int all = ceil_div<512>(seqlen_k), i = threadIdx.x;
    if (i < OWN && of_z + i < all)
        together[of_z + i] = shared[i], together[all + of_z + i] = shared[OWN + i];
    // No tile is loaded of the keys beyond, but some are looked at.
    if (blockIdx.z + 1 == gridDim.z)
        for (int row = warp; row < rows; row += Warps)
            for (int word = (key_0 + SCANNED_KEYS) / 32 + lane; word < words; word += 32)
                bits[row * words + word] = 0;
}

// Makes of the counts of each place where the first of it goes. By a block, a thread a place.
__device__ __forceinline__ void begin_places(int* place) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    int* of_warps = place + blockDim.x;
    auto sum_to_here = [lane](int sum) {
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_up_sync(0xffffffffu, sum, d);
            if (lane >= d) sum += other;
        }
        return sum;
    };
    int own = place[threadIdx.x], sum = sum_to_here(own);
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        int of_warp = lane < warps ? of_warps[lane] : 0, before = sum_to_here(of_warp) - of_warp;
        if (lane < warps) of_warps[lane] = before;
    }
    __syncthreads();
    place[threadIdx.x] = of_warps[warp] + sum - own;
    __syncthreads();
}
// The list from records of 64 rows, by one block. Entries are dealt by their number of keys:
// `place` is a count of each number of 64 keys, then where its entries go. A thread has a place.
template <int Groups, int Threads>
__device__ __forceinline__ void order_tiles(const int4* records, int4* work, int masks,
                                            int records_of_mask, int seqlen_k, int* place) {
    constexpr int Places = Threads;
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
    place[threadIdx.x] = 0;
    __syncthreads();
    for (int tile = threadIdx.x; tile < tiles; tile += Threads)
        atomicAdd(place + step_of(entry_of(tile)), 1);
    __syncthreads();
    begin_places(place);
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

// The longest run of places without a break among them, which are met in their order.
struct LongestRun {
    int begin = 0, end = 0, own = 0;  // own: the place behind the last break
    __device__ __forceinline__ void stop(int place) {
        if (place - own > end - begin) begin = own, end = place;
        own = place + 1;
    }
};

// The same of MASK 2, by how many sixteens of keys its queries see, and its tiles of keys.
// together: what a scan has written of each 64 queries.
template <int Groups, int Threads>
__device__ __forceinline__ void list_tiles(const unsigned* together, int4* work, int masks,
                                           int records_of_mask, int seqlen_k, int words,
                                           int block_n, int* place) {
    constexpr int Places = Threads;
    const int tiles_m = ceil_div<Groups>(records_of_mask), tiles = masks * tiles_m;
    const int tiles_n = (seqlen_k + block_n - 1) / block_n, of_64 = ceil_div<512>(seqlen_k);
    const int unit = ceil_div<16 * (Places - 1)>(seqlen_k), lane = threadIdx.x % 32;
    const int pitch = entry_pitch<Groups>(words);
    auto of_group = [&](int mask, int first_64) {
        return together + static_cast<long long>(mask * records_of_mask + first_64) * 2 * of_64;
    };
    // The place of a tile of queries; 0 is of the longest.
    auto step_of = [&](int mask, int first_64) {
        int count = 0;
        for (int i = 0; i < of_64; ++i) {
            unsigned any = 0;
#pragma unroll
            for (int g = 0; g < Groups; ++g)
                if (first_64 + g < records_of_mask) any |= of_group(mask, first_64 + g)[i];
            count += __popc(any);
        }
        return Places - 1 - (count + unit - 1) / unit;
    };
    place[threadIdx.x] = 0;
    __syncthreads();
    for (int tile = threadIdx.x; tile < tiles; tile += Threads)
        atomicAdd(place + step_of(tile / tiles_m, tile % tiles_m * Groups), 1);
    __syncthreads();
    begin_places(place);
    for (int tile = threadIdx.x; tile < tiles; tile += Threads) {
        int mask = tile / tiles_m, first_64 = tile % tiles_m * Groups;
        work[atomicAdd(place + step_of(mask, first_64), 1) * pitch] = {first_64 * 64, mask, 0, 0};
    }
    __syncthreads();
    for (int at = threadIdx.x / 32; at < tiles; at += Threads / 32) {  // a warp an entry
        int4* entry = work + at * pitch;
        const int first_64 = entry->x / 64, mask = entry->y;
        int* key_tiles = reinterpret_cast<int*>(entry + 1 + Groups);
        int count = 0, first[Groups], last[Groups], keys[Groups];
        LongestRun seen_whole[Groups];
#pragma unroll
        for (int g = 0; g < Groups; ++g) first[g] = last[g] = -1, keys[g] = 0;
        for (int from = 0; from < tiles_n; from += 32) {  // from the right
            const int key = (tiles_n - 1 - from - lane) * block_n;
            unsigned any[Groups], of_all = 0;
            bool part[Groups];
#pragma unroll
            for (int g = 0; g < Groups; ++g) {
                const unsigned* own = of_group(mask, first_64 + g);
                bool there = first_64 + g < records_of_mask && key >= 0;
                any[g] = there ? sixteens(own, of_64, key, block_n / 16) : 0;
                of_all |= any[g];
                part[g] = !any[g] || key + block_n > seqlen_k ||
                          sixteens(own + of_64, of_64, key, block_n / 16);
            }
            const unsigned lanes = __ballot_sync(0xffffffffu, of_all != 0);
            auto place_of = [&](int lane) { return count + __popc(lanes & ((1u << lane) - 1)); };
            if (lanes >> lane & 1) key_tiles[place_of(lane)] = key;
#pragma unroll
            for (int g = 0; g < Groups; ++g) {
                const unsigned seen = __ballot_sync(0xffffffffu, any[g] != 0);
                unsigned breaks = __ballot_sync(0xffffffffu, part[g]) & lanes;
                for (; breaks; breaks &= breaks - 1)
                    seen_whole[g].stop(place_of(__ffs(breaks) - 1));
                if (seen == 0) continue;
                const int right = __ffs(seen) - 1;
                const unsigned bits = __shfl_sync(0xffffffffu, any[g], right);
                if (last[g] < 0) last[g] = place_of(right), keys[g] = 16 * (32 - __clz(bits));
                first[g] = place_of(31 - __clz(seen));
            }
            count += __popc(lanes);
        }
        if (lane > 0) continue;
        entry->w = count;
#pragma unroll
        for (int g = 0; g < Groups; ++g) {
            LongestRun& run = seen_whole[g];
            run.stop(count);
            entry[1 + g] = {(count - 1 - first[g]) * block_n,
                            last[g] < 0 ? 0 : (count - 1 - last[g]) * block_n + keys[g],
                            (count - run.end) * block_n, (count - run.begin) * block_n};
        }
    }
}

}  // namespace attn
