// Masks in memory: what each query sees, and from it the list of tiles of queries that a flash
// kernel works through. Made once for a mask, and read in each call with it.
#pragma once
#include "common/ptx/launch.cuh"
#include "common/ptx/shared.cuh"
#include "common/tile/scheduler.cuh"

namespace attn {

// A record of 64 queries: the first key that any of them sees and the end of those; and the keys
// that all of them see. No key: {INT_MAX, 0, ..}. An entry of the list is {first row, mask, first
// key, end} of a tile of queries, then the record of each 64 of its queries; entries with most keys
// come first. PACKED: tiles begin where sequences do, and an entry has the number of its queries in
// the place of the mask, which is one. Query i of mask m has bounds[m * seqlen_q + i], an interval
// of keys; or, with MASK 2, bits[(m * seqlen_q + i) * words], a bit a key. `heads` heads, one
// behind the other, have a mask in common. turns: how many entries have been taken beyond each
// block's first, and how many blocks have ended; 0 before a call and after it.
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

// first, end: with a mask in memory, keys and not tiles. key_tiles: where they are told, in ints of
// the list. rows: PACKED, queries of the tile.
struct MaskedTile : WorkTile {
    int mask, key_tiles, rows;
};
constexpr int HEAD_BITS = 22;  // PACKED: of an entry, below the number of its queries
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
        entry.y = PACKED ? entry.y << HEAD_BITS | head : entry.y * list.heads + head;
        if (MASK == 2) entry.z = static_cast<int>(at - list.work + ENTRY) * 4;
        return entry;
    }
    __device__ __forceinline__ MaskedTile tile(const int4& entry) const {
        if (MASK == 2)
            return {
                {entry.x, entry.y, 0, entry.w * BlockN, entry.w}, entry.y / list.heads, entry.z, 0};
        int first = PACKED ? entry.z : entry.z / BlockN * BlockN;
        int tiles = max(0, ceil_div<BlockN>(entry.w - first)), end = first + tiles * BlockN;
        if (PACKED) {
            int head = entry.y & (1 << HEAD_BITS) - 1;
            return {{entry.x, head, first, end, tiles}, 0, 0, entry.y >> HEAD_BITS};
        }
        return {{entry.x, entry.y, first, end, tiles}, entry.y / list.heads, 0, 0};
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
    __device__ __forceinline__ int key(int j, int, int end) const { return end - (1 + j) * BlockN; }
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
    constexpr unsigned ALL = 0xffffffffu;
    return {__reduce_min_sync(ALL, record.x), __reduce_max_sync(ALL, record.y),
            __reduce_max_sync(ALL, record.z), __reduce_min_sync(ALL, record.w)};
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

// Where tiles of queries begin: after a fixed number of rows, and wherever a packed sequence does,
// so that no tile visits the keys of two sequences. A part between cuts has its own slots of a
// list, more than it needs: cuts before it, and tiles that would end before it.
struct Cuts {
    const int* of_q;
    int count, seqlen_q;  // count: of numbers in of_q
    __device__ __forceinline__ int at(int i) const {
        return i == 0 ? 0 : i > count ? seqlen_q : of_q[i - 1];
    }
    // By each warp: there are no cuts if they do not ascend, since every row is of one tile.
    __device__ __forceinline__ void check() {
        bool wrong = false;
        for (int i = threadIdx.x % 32; i <= count; i += 32) wrong |= at(i) > at(i + 1);
        if (__any_sync(0xffffffffu, wrong)) count = 0;
    }
    struct Rows {
        int part, first, count;  // count: 0 if the slot has none
    };
    template <int Unit>
    __device__ __forceinline__ int slot(int part) const {
        return at(part) / Unit + part;
    }
    template <int Unit>
    __device__ __forceinline__ Rows rows(int slot) const {
        int part = 0, after = count + 1;
        while (after - part > 1) {
            int middle = (part + after) / 2;
            if (this->slot<Unit>(middle) <= slot) part = middle;
            else after = middle;
        }
        int first = at(part) + (slot - this->slot<Unit>(part)) * Unit;
        return {part, first, max(0, min(Unit, at(part + 1) - first))};
    }
};

// Rows whose keys follow from their position: query i sees keys i + low to i + high of those in
// `range`; or, of packed sequences, of those of its own, where i counts from the key beside its
// last query. A block has 64 threads, one a row.
template <bool Packed>
__device__ __forceinline__ void see_diagonals(int low, int high, int2 range,
                                              const Sequences& sequences, Cuts cuts, int2* bounds,
                                              int4* record, int2* of_row, int seqlen_k) {
    if (PACKED) cuts.check();
    const Cuts::Rows rows = cuts.rows<64>(blockIdx.x);
    if (rows.count == 0) return;
    const int row = rows.first + threadIdx.x;
    int diagonal = row;
    if (Packed) {
        int part = sequences.of(min(row, cuts.seqlen_q - 1)), end = sequences.of_k[part + 1];
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
    if (threadIdx.x < rows.count) bounds[row] = {seen.y > 0 ? seen.x : 0, seen.y};
    __syncthreads();
    if (threadIdx.x >= 32) return;
    int4 of_all = record_of(of_row, rows.count, threadIdx.x);
    // Tiles of keys begin 64 apart, counted from a sequence's first key as those of queries are: a
    // row then sees a key of the first tile that it meets.
    if (PACKED && of_all.y > 0) of_all.x -= max(0, of_all.x - max(range.x, 0)) % 64;
    if (threadIdx.x == 0) *record = of_all;
}

// Bytes of 16 keys that are 0 or 1, as 16 bits: an instruction a word.
__device__ __forceinline__ unsigned bits_of_bytes(const uint4& bytes) {
    unsigned low = __dp4a(bytes.y, 0x80402010u, __dp4a(bytes.x, 0x08040201u, 0u));
    unsigned high = __dp4a(bytes.w, 0x80402010u, __dp4a(bytes.z, 0x08040201u, 0u));
    return high << 8 | low;
}
// Bytes that are 0 or not, of which any bit counts, as 0 or 1.
__device__ __forceinline__ unsigned zero_or_one(unsigned bytes) {
    return ((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu | bytes) >> 7 & 0x01010101u;
}

// What 64 queries see together: of each 16 keys a bit of any that one of them sees, and one of any
// that one does not see. A word is of 512 keys; those of `any` come first. Here, of a key's word
// and the next one, `count` bits from the key's on, which is bit 0.
__device__ __forceinline__ unsigned sixteens(const uint2& words, int key, int count) {
    return __funnelshift_r(words.x, words.y, key / 16 % 32) & ((1u << count) - 1);
}

constexpr int SCANNED_KEYS = 512;  // by a block, of 64 queries

// Rows of a mask of bytes, of up to 64 queries, and of their bits those of a lane's 16 keys. Bytes
// are named by their offset from the first one, in 32 bits; begin and end of the whole mask too, as
// far as one row's blocks of 16 bytes reach.
struct MaskRows {
    const unsigned char* first;
    int row_stride, rows, seqlen_k, begin, end;
    unsigned char* bits;
    int row_bytes, stored;  // stored: rows, or 0 of keys beyond those that a row has bits of
    // A key's byte, or that of one beyond the last.
    __device__ __forceinline__ int at(int row, int key) const {
        return min(row, rows - 1) * row_stride + key;
    }
    // How far a byte is behind the start of its 16 bytes.
    __device__ __forceinline__ int in_block(int at) const {
        return static_cast<unsigned>(reinterpret_cast<unsigned long long>(first) + at) % 16;
    }
    // 16 bytes as bits, those outside the memory as 0.
    __device__ __forceinline__ unsigned bits_one_by_one(int block) const {
        unsigned bits = 0;
#pragma unroll 1
        for (int i = 0; i < 16; ++i)
            if (block + i >= begin && block + i < end && first[block + i]) bits |= 1u << i;
        return bits;
    }
    __device__ __forceinline__ void store(int row, unsigned half) const {
        auto* to = bits + static_cast<unsigned>(row * row_bytes);
        if (row < stored)
            *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(half);
    }
};

// The bits of SCANNED_KEYS keys of these rows, whose keys lie side by side. Returns what a warp's
// rows see together: a bit of each 16 keys, any of which is seen, or is not. Each of Warps warps
// takes every Warps-th row, and a lane 16 keys of it. They are read by aligned blocks of 16 bytes:
// Aligned: where rows begin and end at such.
template <int Warps, bool Aligned>
__device__ __forceinline__ uint2 see_sixteens(const MaskRows& mask, int key_0) {
    constexpr int ROWS = 64 / Warps, AT_ONCE = 4;  // AT_ONCE: rows that one vote is about
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, key = key_0 + lane * 16;
    const int most = Aligned ? mask.seqlen_k - 16 : round_up(mask.seqlen_k, 16);
    auto before = [&](int row) {  // bytes of a block that lie before a key
        return Aligned ? 0 : mask.in_block(mask.at(row, 0));
    };
    auto block_of = [&](int row, int key) { return mask.at(row, min(key, most)) - before(row); };
    // The first block that is whole in memory, and the last one: they are read in place of others.
    const int lowest = mask.begin + 15 - mask.in_block(mask.begin + 15);
    const int highest = mask.end - 16 - mask.in_block(mask.end - 16);
    auto whole = [&](int block) { return Aligned ? block : max(lowest, min(block, highest)); };
    const unsigned there = (1u << max(0, min(16, mask.seqlen_k - key))) - 1;
    uint4 loaded[ROWS];
    unsigned char loaded_behind[ROWS / 2];  // of blocks behind the last lane's: two rows
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {  // all are on their way before the first is used
        const int row = warp + r * Warps, block = whole(block_of(row, key));
        // Without a sign, two instructions less.
        auto* at = mask.first + (Aligned ? static_cast<unsigned>(block) : 0);
        if (!Aligned) at += block;
        // Streamed: 67 MB took 26.0 us in place of 26.9, 134 MB 50.2 in place of 51.3 (H100, cold
        // L2, 2026-11-26), and fewer than 20 MB as long as before.
        loaded[r] = __ldcs(reinterpret_cast<const uint4*>(at));
        if (Aligned || r % 2 > 0) continue;
        int byte = block_of(row + lane / 16 * Warps, key_0 + SCANNED_KEYS) + lane % 16;
        loaded_behind[r / 2] = byte < mask.end ? mask.first[byte] : 0;
    }
    unsigned any = 0, all = 0xffffu, behind = 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (r % AT_ONCE == 0) {
            unsigned set = 0;
#pragma unroll
            for (int i = r; i < r + AT_ONCE; ++i)
                set |= loaded[i].x | loaded[i].y | loaded[i].z | loaded[i].w;
            if (__any_sync(0xffffffffu, (set & 0xfefefefeu) != 0))  // else bool, of 0 and 1 alone
#pragma unroll
                for (int i = r; i < r + AT_ONCE; ++i)
                    loaded[i] = {zero_or_one(loaded[i].x), zero_or_one(loaded[i].y),
                                 zero_or_one(loaded[i].z), zero_or_one(loaded[i].w)};
        }
        const int row = warp + r * Warps;
        unsigned half = bits_of_bytes(loaded[r]);
        if constexpr (!Aligned) {
            const int block = block_of(row, key);
            if (block != whole(block)) half = mask.bits_one_by_one(block);
            if (r % 2 == 0) behind = __ballot_sync(0xffffffffu, loaded_behind[r / 2] != 0);
            const unsigned next = __shfl_down_sync(0xffffffffu, half, 1);
            half |= (lane < 31 ? next : behind >> r % 2 * 16) << 16;
            half >>= before(row);
        }
        half &= there;
        mask.store(row, half);
        any |= half, all &= half;
    }
    return {__ballot_sync(0xffffffffu, any != 0), __ballot_sync(0xffffffffu, all != 0xffffu)};
}
// The same of keys that do not lie side by side.
template <int Warps>
__device__ __forceinline__ uint2 see_one_by_one(const MaskRows& mask, int key_stride, int key_0) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint2 seen{0, 0};
#pragma unroll 1
    for (int row = warp; row < mask.rows; row += Warps) {
        const unsigned char* of_row = mask.first + static_cast<long long>(row) * mask.row_stride;
        unsigned own = 0;
#pragma unroll
        for (int i = 0; i < SCANNED_KEYS / 32; ++i) {
            int key = key_0 + i * 32 + lane;
            const unsigned char* at = of_row + static_cast<long long>(key) * key_stride;
            unsigned word = __ballot_sync(0xffffffffu, key < mask.seqlen_k && *at != 0);
            unsigned low = word & 0xffffu, high = word >> 16;
            seen.x |= ((low != 0) + 2u * (high != 0)) << 2 * i;
            seen.y |= ((low != 0xffffu) + 2u * (high != 0xffffu)) << 2 * i;
            if (lane / 2 == i) own = lane % 2 ? high : low;
        }
        mask.store(row, own);
    }
    return seen;
}

// 64 rows of a mask that has a byte for each query and key: their bits, and what these queries see
// together. A block has a part of SCANNED_KEYS keys, and the last one those beyond, up to 32
// `words`: none or 128. of_warps: in shared memory.
template <int Warps>
__device__ __forceinline__ void see_bytes(const unsigned char* mask, int row_stride, int key_stride,
                                          unsigned* bits, unsigned* together, uint2* of_warps,
                                          int begin, int part, int seqlen_q, int seqlen_k,
                                          int words) {
    const int rows = min(64, seqlen_q - begin), row_bytes = words * 4, key_0 = part * SCANNED_KEYS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, byte = key_0 / 8 + lane * 2;
    const int parts = ceil_div<SCANNED_KEYS>(seqlen_k), beyond = (key_0 + SCANNED_KEYS) / 32;
    const long long stride = row_stride, last = (seqlen_q - 1) * stride + seqlen_k;
    const long long before = max(-begin * stride, -32ll), after = last - begin * stride;
    bits += static_cast<long long>(begin) * words;
    const MaskRows of_block{mask + begin * stride,
                            row_stride,
                            rows,
                            seqlen_k,
                            static_cast<int>(before),
                            static_cast<int>(min(after, 0x7fffffffll)),
                            reinterpret_cast<unsigned char*>(bits) + byte,
                            row_bytes,
                            byte < row_bytes ? rows : 0};
    uint2 seen;
    if (key_stride != 1 || row_stride >= 1 << 24 || last < 32)
        seen = see_one_by_one<Warps>(of_block, key_stride, key_0);
    else if ((reinterpret_cast<unsigned long long>(mask) | row_stride | seqlen_k) % 16 == 0)
        seen = see_sixteens<Warps, true>(of_block, key_0);
    else seen = see_sixteens<Warps, false>(of_block, key_0);
    if (lane == 0) of_warps[warp] = seen;
    // No tile is loaded of the keys beyond, but some are looked at.
    if (part + 1 == parts && beyond < words && threadIdx.x < rows)
        *reinterpret_cast<uint4*>(bits + threadIdx.x * words + beyond) = {0, 0, 0, 0};
    __syncthreads();
    if (warp > 0) return;
    seen = lane < Warps ? of_warps[lane] : uint2{0, 0};
    seen = {__reduce_or_sync(0xffffffffu, seen.x), __reduce_or_sync(0xffffffffu, seen.y)};
    if (lane == 0) together[part] = seen.x, together[parts + part] = seen.y;
}

// Where the first goes of a thread's place, of which there are `own`: behind those of the threads
// before it. By a block; of_warps: in shared memory.
__device__ __forceinline__ int begin_of_place(int own, int* of_warps) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d) sum += other;
    }
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    return __reduce_add_sync(0xffffffffu, lane < warp ? of_warps[lane] : 0) + sum - own;
}
// The list from records of 64 rows, by one block. Entries are dealt by their number of keys:
// `place` is a count of each number of 64 keys, then where its entries go. A thread has a place.
template <int Groups, int Threads>
__device__ __forceinline__ void order_tiles(const int4* records, int4* work, int masks,
                                            int records_of_mask, int tiles_m, Cuts cuts,
                                            int seqlen_k, int* place) {
    constexpr int Places = Threads;
    const int tiles = masks * tiles_m;
    if (PACKED) cuts.check();
    const int unit = ceil_div<64 * (Places - 1)>(seqlen_k) * 64;  // keys of a step
    // The entry of a tile, and its records, from `own` on, `count` of them.
    auto entry_of = [&](int tile, const int4*& own, int& count) {
        const int mask = tile / tiles_m;
        const Cuts::Rows rows = cuts.rows<64 * Groups>(tile - mask * tiles_m);
        const int of_part = (rows.first - cuts.at(rows.part)) / 64;
        own = records + mask * records_of_mask + cuts.slot<64>(rows.part) + of_part;
        count = ceil_div<64>(rows.count);
        int4 entry{count ? rows.first : cuts.seqlen_q, PACKED ? rows.count : mask, NO_KEY, 0};
        for (int i = 0; i < count; ++i)
            entry.z = min(entry.z, own[i].x), entry.w = max(entry.w, own[i].y);
        if (entry.w == 0) entry.z = 0;
        return entry;
    };
    const int4* own;
    int count;
    // Place 0 is of the longest.
    auto step_of = [&](const int4& entry) {
        int steps = entry.w > entry.z ? (entry.w + unit - 1) / unit - entry.z / unit : 0;
        return max(0, Places - 1 - steps);
    };
    place[threadIdx.x] = 0;
    __syncthreads();
    for (int tile = threadIdx.x; tile < tiles; tile += Threads)
        atomicAdd(place + step_of(entry_of(tile, own, count)), 1);
    __syncthreads();
    place[threadIdx.x] = begin_of_place(place[threadIdx.x], place + Threads);
    __syncthreads();
    for (int tile = threadIdx.x; tile < tiles; tile += Threads) {
        int4 entry = entry_of(tile, own, count);
        int4* to = work + atomicAdd(place + step_of(entry), 1) * (1 + Groups);
        *to = entry;
#pragma unroll
        for (int i = 0; i < Groups; ++i)
            to[1 + i] = i < count ? own[i] : int4{NO_KEY, 0, 0, 0};  // past the last query
    }
}

// The longest run of places without a break among them, which a warp meets in their order.
struct LongestRun {
    int begin = 0, end = 0, own = 0;  // own: the place behind the last break
    // breaks: of lanes, each of which has a place. All lanes call it, and have the same run.
    __device__ __forceinline__ void stop(unsigned breaks, int place) {
        if (breaks == 0) return;
        const int lane = threadIdx.x % 32;
        const unsigned before = breaks & ((1u << lane) - 1);
        const int last = __shfl_sync(0xffffffffu, place, 31 - __clz(before | 1));
        const int first = before ? last + 1 : own;  // of the run that a break of this lane ends
        const int length = breaks >> lane & 1 ? place - first : 0;
        const int longest = __reduce_max_sync(0xffffffffu, length);
        if (longest > end - begin) {
            const unsigned found = __ballot_sync(0xffffffffu, length == longest);
            begin = __shfl_sync(0xffffffffu, first, __ffs(found) - 1), end = begin + longest;
        }
        own = __shfl_sync(0xffffffffu, place, 31 - __clz(breaks)) + 1;
    }
};

// What a scan has written of a tile of queries: of each 64 of them what they see together.
template <int Groups>
struct SeenByTile {
    const unsigned* together;
    unsigned first;     // word of it
    int groups, words;  // groups: that have queries; words: of `any`, which are as many of `part`
    __device__ __forceinline__ unsigned of(int group, int word) const {
        return together[first + group * 2 * words + word];
    }
    // The sixteens of keys that its queries see, of a word's keys. Without a branch: in one, the
    // loads of a tile were waited for before those of the next one.
    __device__ __forceinline__ unsigned any(int word) const {
        unsigned any = 0;
#pragma unroll
        for (int g = 0; g < Groups; ++g) any |= of(g < groups ? g : 0, word);
        return any;
    }
    // Words of a lane's tile of keys, the lane-th behind `from`, from the right. A warp reads them
    // long before it uses them, so that it does not wait.
    struct OfLane {
        int key;
        uint2 any[Groups], part[Groups];
    };
    __device__ __forceinline__ OfLane of_lane(int from, int tiles, int block_n) const {
        OfLane seen{(tiles - 1 - from - static_cast<int>(threadIdx.x) % 32) * block_n, {}, {}};
        const int word = seen.key / 512;
        const bool more = word + 1 < words;
#pragma unroll
        for (int g = 0; g < Groups; ++g)
            if (g < groups && seen.key >= 0) {
                seen.any[g] = {of(g, word), more ? of(g, word + 1) : 0};
                seen.part[g] = {of(g, words + word), more ? of(g, words + word + 1) : 0};
            }
        return seen;
    }
    // Writes its tiles of keys and its records, behind an entry's first 16 bytes, and returns the
    // number of those tiles: by a warp, a lane a tile of keys, from the right. next: what
    // of_lane(0, ..) has read. sixteen(group, key): which of 16 keys a group of its queries sees.
    template <class Sixteen>
    __device__ __forceinline__ int list(int4* records, OfLane next, int tiles, int seqlen_k,
                                        int block_n, Sixteen sixteen) const {
        const int lane = threadIdx.x % 32;
        int* key_tiles = reinterpret_cast<int*>(records + Groups);
        // Places of the first and the last, and where in these keys begin to be seen, or end.
        int total = 0, begin[Groups], end[Groups], keys[Groups], before[Groups];
        int key_of_left[Groups];
        LongestRun whole[Groups];
#pragma unroll
        for (int g = 0; g < Groups; ++g) begin[g] = end[g] = -1, keys[g] = before[g] = 0;
        for (int from = 0; from < tiles; from += 32) {
            const OfLane now = next;
            next = of_lane(from + 32, tiles, block_n);
            unsigned any[Groups], of_all = 0;
            bool part[Groups];
#pragma unroll
            for (int g = 0; g < Groups; ++g) {
                any[g] = sixteens(now.any[g], now.key, block_n / 16);
                of_all |= any[g];
                part[g] = !any[g] || now.key + block_n > seqlen_k ||
                          sixteens(now.part[g], now.key, block_n / 16);
            }
            const unsigned lanes = __ballot_sync(0xffffffffu, of_all != 0);
            const int place = total + __popc(lanes & ((1u << lane) - 1));
            if (of_all) key_tiles[place] = now.key;
#pragma unroll
            for (int g = 0; g < Groups; ++g) {
                const unsigned seen = __ballot_sync(0xffffffffu, any[g] != 0);
                whole[g].stop(__ballot_sync(0xffffffffu, part[g]) & lanes, place);
                if (seen == 0) continue;
                const int right = __ffs(seen) - 1, left = 31 - __clz(seen);
                const unsigned bits = __shfl_sync(0xffffffffu, any[g], right);
                const int place_of_right = __shfl_sync(0xffffffffu, place, right);
                if (begin[g] < 0) {
                    const int last = 16 * (31 - __clz(bits));
                    const int key = __shfl_sync(0xffffffffu, now.key, right) + last;
                    begin[g] = place_of_right, keys[g] = last + 32 - __clz(sixteen(g, key));
                }
                end[g] = __shfl_sync(0xffffffffu, place, left);
                before[g] = 16 * (__ffs(__shfl_sync(0xffffffffu, any[g], left)) - 1);
                key_of_left[g] = __shfl_sync(0xffffffffu, now.key, left) + before[g];
            }
            total += __popc(lanes);
        }
#pragma unroll
        for (int g = 0; g < Groups; ++g) {
            LongestRun& run = whole[g];
            run.stop(1, total);
            if (end[g] >= 0) before[g] += __ffs(sixteen(g, key_of_left[g])) - 1;
            const int4 record{(total - 1 - end[g]) * block_n + before[g],
                              begin[g] < 0 ? 0 : (total - 1 - begin[g]) * block_n + keys[g],
                              (total - run.end) * block_n, (total - run.begin) * block_n};
            if (lane == 0) records[g] = record;
        }
        return total;
    }
};

// The same of MASK 2, by how many sixteens of keys its queries see, and its tiles of keys.
// together: what a scan has written of each 64 queries; bits: of each. Each block counts all tiles
// and has entries of some: those of the blocks before it come first among the equally long. place:
// two of each thread, and one of each warp.
template <int Groups, int Threads>
__device__ __forceinline__ void list_tiles(const unsigned* together, const unsigned* bits,
                                           int4* work, int masks, int records_of_mask, int seqlen_q,
                                           int seqlen_k, int words, int block_n, int* place) {
    constexpr int Places = Threads;
    const int tiles_m = ceil_div<Groups>(records_of_mask), tiles = masks * tiles_m;
    const int of_64 = ceil_div<512>(seqlen_k), unit = ceil_div<16 * (Places - 1)>(seqlen_k);
    const int own = (tiles + gridDim.x - 1) / gridDim.x, first_own = blockIdx.x * own;
    const int lane = threadIdx.x % 32;
    int* of_before = place + Threads + Threads / 32;
    auto tile_at = [&](int at) -> SeenByTile<Groups> {
        unsigned mask = static_cast<unsigned>(at) / tiles_m;
        int first_64 = (at - mask * tiles_m) * Groups;
        unsigned record = mask * records_of_mask + first_64;
        return {together, record * 2 * of_64, min(Groups, records_of_mask - first_64), of_64};
    };
    // Place 0 is of the longest.
    auto place_of = [&](unsigned count) { return Places - 1 - (count + unit - 1) / unit; };
    const int key_tiles = (seqlen_k + block_n - 1) / block_n;
    // Lanes of a tile, so that a block counts many at once, and of a lane tiles whose words it
    // waits for together. Their counts go to one lane each.
    constexpr int AT_ONCE = 4;
    const int log_lanes = max(2, 32 - __clz(min(32, of_64) - 1)), lanes = 1 << log_lanes;
    const int step = Threads >> log_lanes, i = threadIdx.x & lanes - 1;
    place[threadIdx.x] = of_before[threadIdx.x] = 0;
    __syncthreads();
    // A warp an entry. Its first words are asked for before the tiles are counted: at 8,192 queries
    // the list takes 4.3 to 4.4 us behind the scan so, and 5.0 if they are asked for after that.
    int at = first_own + threadIdx.x / 32;
    SeenByTile<Groups> seen = tile_at(min(at, tiles - 1));
    grid_wait();
    auto of_lane = seen.of_lane(0, key_tiles, block_n);
    for (int from = 0; from < tiles; from += AT_ONCE * step) {
        int counts[AT_ONCE]{}, tile = from + (threadIdx.x >> log_lanes);
        for (int word = i; word < of_64; word += lanes)
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u)
                counts[u] += __popc(tile_at(min(tile + u * step, tiles - 1)).any(word));
        int d = lanes / 2;
        do {
#pragma unroll
            for (int u = 0; u < AT_ONCE; ++u)
                counts[u] += __shfl_xor_sync(0xffffffffu, counts[u], d);
        } while (d /= 2);
        int count = counts[0];
#pragma unroll
        for (int u = 1; u < AT_ONCE; ++u)
            if (i == u) count = counts[u];
        tile += i * step;
        if (i >= AT_ONCE || tile >= tiles) continue;
        atomicAdd(place + place_of(count), 1);
        if (tile < first_own) atomicAdd(of_before + place_of(count), 1);
    }
    __syncthreads();
    place[threadIdx.x] =
        begin_of_place(place[threadIdx.x], place + Threads) + of_before[threadIdx.x];
    __syncthreads();
    while (at < min(first_own + own, tiles)) {
        int count = 0;
#pragma unroll 2
        for (int word = lane; word < of_64; word += 32) count += __popc(seen.any(word));
        int to = place_of(__reduce_add_sync(0xffffffffu, count));
        if (lane == 0) to = atomicAdd(place + to, 1);
        int4* entry = work + __shfl_sync(0xffffffffu, to, 0) * entry_pitch<Groups>(words);
        const int own_mask = at / tiles_m, first_row = at % tiles_m * Groups * 64;
        auto sixteen = [&](int group, int key) {
            unsigned any = 0;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = min(first_row + group * 64 + 32 * i + lane, seqlen_q - 1);
                any |= bits[(own_mask * static_cast<long long>(seqlen_q) + row) * words + key / 32];
            }
            return __reduce_or_sync(0xffffffffu, any) >> key % 32 & 0xffffu;
        };
        count = seen.list(entry + 1, of_lane, key_tiles, seqlen_k, block_n, sixteen);
        if (lane == 0) *entry = {first_row, own_mask, 0, count};
        at += Threads / 32;
        seen = tile_at(min(at, tiles - 1)), of_lane = seen.of_lane(0, key_tiles, block_n);
    }
}

}  // namespace attn
