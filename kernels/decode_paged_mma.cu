// decode_paged_mma: attention of few queries over a paged cache by mma.sync, sm_80 on, with a cache
// of E4M3 sm_89 on. It is bound by memory: every key and value is read once. q, o: (batch, heads,
// seqlen_q, HEAD_DIM); k, v: pages of PAGE_SIZE slots of heads_kv rows; strides of all in elements.
// block_table (batch, max_blocks): the pages of a request; seqused_k (batch): its keys, of which
// the last seqlen_q are the queries' own. With CACHE_E4M3, k and v count times k_scale and v_scale
// (batch, heads_kv).
//
// Both products are transposed, scores^T = K Q^T and out^T = V^T P^T: keys, or columns, are the 16
// rows of a fragment, and packed rows its 8 columns. Packed row r of a key head is query r / group
// of query head r % group. A warp has a ring of tiles of KEYS keys of its own, filled by cp.async,
// and meets others only at the end of an item: HEADS neighbouring (key head, tile of packed rows)
// of a request, with WARPS / HEADS warps each that take its tiles in turn. A unit is a tile for
// each warp. The grid is fixed: the units of all items, one after the other, are cut into equal
// runs, one a block, whatever the lengths are. Blocks that share an item store their parts, and the
// last of them to count itself joins them and resets the counter.
#include "common/ptx/barrier.cuh"
#include "common/ptx/decode.cuh"
#include "common/ptx/launch.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/scores.cuh"

using namespace attn;

#if STAGE_RESET
// Before the first call; afterwards each call leaves them so.
extern "C" __global__ void decode_paged_reset(unsigned* counters, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) counters[i] = 0;
}
#else

#ifndef WINDOW
#define WINDOW 0
#endif
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARPS_OF_HEAD = WARPS / HEADS, UNIT = KEYS * WARPS_OF_HEAD;  // keys of a unit
static_assert(PAGE_SIZE >= 16 ? PAGE_SIZE % 16 == 0 : KEYS <= 32 && 16 % PAGE_SIZE == 0,
              "16 keys lie in a page, or a lane has the page of a key");

// ---- the schedule: which units a block takes ----
// What is on the device: lengths, of which those that cannot be are taken for the nearest that can.
struct Lengths {
    const int* seqused_k;
    int batch, seqlen_q, left, capacity;  // left: of a window; capacity: keys of a row of the table

    __device__ __forceinline__ int of(int request) const {
        return min(max(seqused_k[request], 0), capacity);
    }
    // The first key that some query of a request sees, or one up to 15 before it.
    __device__ __forceinline__ int first_key(int length) const {
        return WINDOW ? max(0, length - seqlen_q - left) & ~15 : 0;
    }
    __device__ __forceinline__ int units(int length) const {
        return (length - first_key(length) + UNIT - 1) / UNIT;
    }
};
// A unit: `request`, which of its items, which unit of that, the item's units, the request's keys.
struct Cursor {
    int request, item, unit, units, length;

    // True if another item begins. A schedule of other lengths may ask for more than there are.
    __device__ __forceinline__ bool next(const Lengths& lengths, int items_of_request) {
        if (++unit < units) return false;
        unit = 0;
        if (++item == items_of_request) {
            item = 0;
            do {
                request = min(request + 1, lengths.batch - 1);
                length = lengths.of(request), units = lengths.units(length);
            } while (units == 0 && request < lengths.batch - 1);
        }
        return true;
    }
};
// A block's run: its first unit, where that one's item begins in the list of all, its units, those
// of a full run, and the units that an item counts more than it has, for what its end takes.
struct Run {
    Cursor first;
    int item_begin, left, quota, item_cost;
};
// If all requests are equally long, a run may be longer by one part in ALIGN so that it ends where
// an item does, or an equal part of one.
constexpr int ALIGN = 16;

// By a warp: the run of `block`, of which there are `blocks`.
__device__ __forceinline__ Run find_run(const Lengths& lengths, int items_of_request, int block,
                                        int blocks) {
    const int lane = threadIdx.x % 32;
    constexpr int AHEAD = 4;  // loads under way
    int total = 0, requests = 0, fewest = 0x7fffffff, most = 0;
    for (int base = 0; base < lengths.batch; base += 32 * AHEAD) {
        int units[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int request = base + 32 * i + lane;
            units[i] = request < lengths.batch ? lengths.units(lengths.of(request)) : 0;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (units[i] > 0) fewest = min(fewest, units[i]), ++requests;
            most = max(most, units[i]), total += units[i];
        }
    }
    total = __reduce_add_sync(ALL_LANES, total), requests = __reduce_add_sync(ALL_LANES, requests);
    fewest = __reduce_min_sync(ALL_LANES, fewest), most = __reduce_max_sync(ALL_LANES, most);
    const bool even = fewest == most;
    const int cost = even ? 0 : ITEM_COST;
    total = (total + requests * cost) * items_of_request;
    // Unsigned, since they are divided in fewer instructions.
    unsigned quota = max((total + blocks - 1u) / blocks, 1u);
    if (even) {
        const unsigned units = most, parts = units / quota;
        const unsigned aligned =
            parts == 0 ? (quota + units - 1) / units * units : (units + parts - 1) / parts;
        if (aligned <= quota + quota / ALIGN) quota = aligned;
    }
    const int begin = block * quota, left = min(static_cast<int>(quota), total - begin);
    Run run{{0, 0, 0, 0, 0}, begin, left, static_cast<int>(quota), cost};
    if (left <= 0) return run;

    // In a list of one item a request: where the run begins, and units of the requests before.
    const int x = static_cast<unsigned>(begin) / items_of_request;
    int before = 0;
    for (int base = 0;; base += 32) {
        const int request = base + lane;
        int units = request < lengths.batch ? lengths.units(lengths.of(request)) : 0;
        if (units > 0) units += cost;
        const int all = __reduce_add_sync(ALL_LANES, units);
        if (x >= before + all) {
            before += all;
            continue;
        }
        int sum = units;
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
            const int lower = __shfl_up_sync(ALL_LANES, sum, i);
            if (lane >= i) sum += lower;
        }
        const int which = __ffs(__ballot_sync(ALL_LANES, before + sum > x)) - 1;
        run.first.request = base + which;
        run.first.units = __shfl_sync(ALL_LANES, units, which);
        before += __shfl_sync(ALL_LANES, sum, which) - run.first.units;
        break;
    }
    Cursor& first = run.first;
    first.length = lengths.of(first.request);
    const unsigned of_request = begin - before * items_of_request;
    first.item = of_request / first.units, first.unit = of_request - first.item * first.units;
    run.item_begin = begin - first.unit;
    first.units -= cost;
    if (first.unit >= first.units) {  // it begins with what an end counts more
        run.left -= first.units + cost - first.unit;
        run.item_begin += first.units + cost;
        first.unit = first.units - 1;
        if (run.left > 0) first.next(lengths, items_of_request);
    }
    return run;
}

#if SCHEDULE
// A run in memory.
constexpr int RUN_INTS = 12;
__device__ __forceinline__ void store_run(int4* to, const Run& run) {
    to[0] = {run.first.request, run.first.item, run.first.unit, run.first.units};
    to[1] = {run.first.length, run.item_begin, run.left, run.quota};
    to[2] = {run.item_cost, 0, 0, 0};
}
__device__ __forceinline__ Run load_run(const int4* from) {
    const int4 a = from[0], b = from[1], c = from[2];
    return {{a.x, a.y, a.z, a.w, b.x}, b.y, b.z, b.w, c.x};
}
#endif

#if STAGE_SCHEDULE
// Writes the run of every block, a warp one: once for all calls with the same lengths.
extern "C" __global__ void decode_paged_schedule(const int* seqused_k, int4* runs, int batch,
                                                 int seqlen_q, int left, int capacity,
                                                 int items_of_request, int blocks) {
#if PDL
    grid_launch_dependents();
    grid_wait();
#endif
    const int block = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (block >= blocks) return;
    const Lengths lengths{seqused_k, batch, seqlen_q, left, capacity};
    const Run run = find_run(lengths, items_of_request, block, blocks);
    if (threadIdx.x % 32 == 0) store_run(runs + block * (RUN_INTS / 4), run);
}
#else

// ---- shared memory ----
constexpr int THREADS = 32 * WARPS, THREADS_OF_HEAD = 32 * WARPS_OF_HEAD;
constexpr int ROWS = 8 * ROW_FRAGMENTS, STEPS = HEAD_DIM / 16, SIXTEENS = KEYS / 16;
__host__ __device__ constexpr int power_of_two(int least) {
    return least <= 4 ? 4 : least <= 8 ? 8 : least <= 16 ? 16 : 32;
}
// Rows of K and of V: chunks of 16 bytes, permuted by the row's number, so that the eight rows that
// ldmatrix reads at one column lie in different banks. LANES load a row.
struct Tile {
    static constexpr int CHUNKS = HEAD_DIM * (CACHE_E4M3 ? 1 : 2) / 16,
                         LANES = power_of_two(CHUNKS), PITCH = 16 * LANES, BYTES = KEYS * PITCH;
    __device__ static __forceinline__ unsigned at(int row, int chunk) {
        return row * PITCH + ((chunk ^ (LANES >= 8 ? row & 7 : row >> 1 & 3)) << 4);
    }
};
// Packed rows of Q, with the item's k_scale and v_scale behind them. They come with its first tile.
struct QTile {
    static constexpr int CHUNKS = HEAD_DIM / 8, PITCH = 16 * power_of_two(CHUNKS),
                         SCALES = ROWS * PITCH, BYTES = SCALES + 16;
    __device__ static __forceinline__ unsigned at(int row, int chunk) {
        return row * PITCH + ((chunk ^ row % 8) << 4);
    }
};
constexpr int RING_BYTES = NUM_STAGES * 2 * Tile::BYTES, Q_RING_BYTES = NUM_STAGES * QTile::BYTES;
// What warps hand over: 8 rows of floats each, then the rows' maxima and sums. Last, a word for
// each head: whether it has the last part.
constexpr int MERGE_PITCH = HEAD_DIM + 4;
constexpr int Q_OFFSET = WARPS * RING_BYTES, MERGE_OFFSET = Q_OFFSET + WARPS * Q_RING_BYTES,
              SUMS_OFFSET = MERGE_OFFSET + WARPS * 8 * MERGE_PITCH * 4,
              LAST_OFFSET = SUMS_OFFSET + WARPS * 8 * 8;

// Threads that share a head of an item.
__device__ __forceinline__ void sync_head(int which) {
    if (HEADS == 1) __syncthreads();
    else named_barrier_sync(1 + which, THREADS_OF_HEAD);
}

// ---- products ----
constexpr bool PRODUCTS_BF16 = IS_BF16 && !CACHE_E4M3;  // E4M3 is exact in fp16
__device__ __forceinline__ unsigned pack_factor(float low, float high) {
    return CACHE_E4M3 ? pack_half(low, high) : pack(low, high);
}
__device__ __forceinline__ void multiply(float (&d)[4], unsigned a0, unsigned a1, unsigned a2,
                                         unsigned a3, const unsigned (&b)[2]) {
    const unsigned a[4] = {a0, a1, a2, a3};
    mma_16816<PRODUCTS_BF16>(d, a, b[0], b[1]);
}

using QFragments = unsigned[ROW_FRAGMENTS][STEPS][2];
using Scores = float[SIXTEENS][ROW_FRAGMENTS][4];
using Weights = unsigned[SIXTEENS][ROW_FRAGMENTS][2];
using Output = float[STEPS][ROW_FRAGMENTS][4];

// Lane l has row l / 4 of a fragment of Q. With E4M3 its columns are in the order in which ldmatrix
// of bytes brings those of K: 4 neighbours a lane.
__device__ __forceinline__ void load_q_fragments(QFragments& q, const unsigned char* tile) {
    const int row = threadIdx.x % 32 / 4, part = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < ROW_FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            if (CACHE_E4M3) {
                const uint2 x = *reinterpret_cast<const uint2*>(
                    tile + QTile::at(8 * n + row, 2 * i + part / 2) + part % 2 * 8);
                q[n][i][0] = pack_half(low_of(x.x), high_of(x.x));
                q[n][i][1] = pack_half(low_of(x.y), high_of(x.y));
            } else {
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    q[n][i][h] = *reinterpret_cast<const unsigned*>(
                        tile + QTile::at(8 * n + row, 2 * i + h) + part * 4);
            }
        }
}
__device__ __forceinline__ void multiply_k(Scores& s, unsigned tile, const QFragments& q) {
    const int row = threadIdx.x % 16, chunk = threadIdx.x % 32 / 16;
#pragma unroll
    for (int j = 0; j < SIXTEENS; ++j) {
#pragma unroll
        for (int n = 0; n < ROW_FRAGMENTS; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[j][n][e] = 0.f;
#pragma unroll
        for (int i = 0; i < STEPS; i += CACHE_E4M3 ? 2 : 1) {
            unsigned x[4];
            ldmatrix_x4(x, tile + Tile::at(16 * j + row, (CACHE_E4M3 ? i : 2 * i) + chunk));
            if constexpr (CACHE_E4M3) {
                unsigned low[4], high[4];
#pragma unroll
                for (int y = 0; y < 4; ++y) halves_of_e4m3(x[y], low[y], high[y]);
#pragma unroll
                for (int n = 0; n < ROW_FRAGMENTS; ++n) {
                    multiply(s[j][n], low[0], low[1], high[0], high[1], q[n][i]);
                    multiply(s[j][n], low[2], low[3], high[2], high[3], q[n][i + 1]);
                }
            } else {
#pragma unroll
                for (int n = 0; n < ROW_FRAGMENTS; ++n)
                    multiply(s[j][n], x[0], x[1], x[2], x[3], q[n][i]);
            }
        }
    }
}
// With E4M3, ldmatrix brings pairs of columns of a key, which a permutation of bytes makes pairs of
// keys: rows of a fragment of the output are first the even columns of 16, then the odd ones.
__device__ __forceinline__ void multiply_v(Output& o, unsigned tile, const Weights& p) {
    const int lane = threadIdx.x % 32;
    const int row = CACHE_E4M3 ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int chunk = CACHE_E4M3 ? lane / 16 : lane / 8 % 2;
#pragma unroll
    for (int j = 0; j < SIXTEENS; ++j)
#pragma unroll
        for (int i = 0; i < STEPS; i += CACHE_E4M3 ? 2 : 1) {
            unsigned x[4];
            ldmatrix_x4_trans(x, tile + Tile::at(16 * j + row, (CACHE_E4M3 ? i : 2 * i) + chunk));
            if constexpr (CACHE_E4M3) {
                unsigned even[4], odd[4];
#pragma unroll
                for (int y = 0; y < 4; ++y)
                    halves_of_e4m3(__byte_perm(x[y], 0, 0x3120), even[y], odd[y]);
#pragma unroll
                for (int n = 0; n < ROW_FRAGMENTS; ++n) {
                    multiply(o[i][n], even[0], odd[0], even[1], odd[1], p[j][n]);
                    multiply(o[i + 1][n], even[2], odd[2], even[3], odd[3], p[j][n]);
                }
            } else {
#pragma unroll
                for (int n = 0; n < ROW_FRAGMENTS; ++n)
                    multiply(o[i][n], x[0], x[1], x[2], x[3], p[j][n]);
            }
        }
}

// ---- parts of a row: of a warp, of a block, of all ----
// Four columns of a row's weighted values, the largest exponent and the sum of weights.
struct Part {
    float4 values = {0.f, 0.f, 0.f, 0.f};
    float largest = minus_infinity(), sum = 0.f;

    // Takes in Count others. One whose largest is minus infinity counts nothing.
    template <int Count>
    __device__ __forceinline__ void join(const float4 (&others)[Count],
                                         const float2 (&of_others)[Count]) {
        float grown = largest;
#pragma unroll
        for (int i = 0; i < Count; ++i) grown = fmaxf(grown, of_others[i].x);
        const float from = grown == minus_infinity() ? 0.f : grown;
        const float keep = exp2_approx(largest - from);
        largest = grown, sum *= keep;
        values.x *= keep, values.y *= keep, values.z *= keep, values.w *= keep;
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const float weight = exp2_approx(of_others[i].x - from);
            sum = fmaf(weight, of_others[i].y, sum);
            values.x = fmaf(weight, others[i].x, values.x);
            values.y = fmaf(weight, others[i].y, values.y);
            values.z = fmaf(weight, others[i].z, values.z);
            values.w = fmaf(weight, others[i].w, values.w);
        }
    }
};

// ---- the call ----
struct Strides {
    int batch, head, row;
    __device__ __forceinline__ long long of(int b, int h, int r) const {
        return static_cast<long long>(b) * batch + static_cast<long long>(h) * head +
               static_cast<long long>(r) * row;
    }
};
struct Call {
    const element_t* q;
    const unsigned char *k, *v;
    element_t* o;
    const int* block_table;
    const float *k_scale, *v_scale, *sinks;
    float *lse, *parts;  // parts, part_sums: of each block two, of each HEADS, of each ROWS
    float2* part_sums;
    unsigned* counters;
    Lengths lengths;
    // items: of a request; pages: how many there are; table_row: from a request's to the next
    // one's.
    int heads_kv, group, row_tiles, items, right, pages, table_row, scale_batch, scale_head;
    float factor, softcap;
    Strides of_q, of_o;
    long long page_bytes;
    int slot_bytes, head_bytes;

    __device__ __forceinline__ int rows() const { return lengths.seqlen_q * group; }
};
// A key head of an item, the first of its packed rows, and how many there are: the last item of a
// request may have none for some warps.
struct Place {
    int head, row, rows;
};
__device__ __forceinline__ Place place_of(const Call& call, int item, int which) {
    const unsigned at = item * HEADS + which;
    const unsigned head = call.row_tiles == 1 ? at : at / call.row_tiles;
    const int row = (at - head * call.row_tiles) * ROWS;
    const bool there = HEADS == 1 || static_cast<int>(head) < call.heads_kv;
    return {static_cast<int>(head), row, there ? min(ROWS, call.rows() - row) : 0};
}

// ---- loads of a warp, which run ahead of its products ----
struct Loads {
    const Call& call;
    Cursor at;
    int left, item_cost;
    int which, warp;        // the warp's head of an item, and its number among the head's warps
    unsigned ring, q_ring;  // in shared memory
    // Pages that lanes have: of 16 keys each, of TILES tiles of the warp; or, where pages are
    // smaller, of a key each, of one tile. `first`: the unit that the first of them belong to.
    static constexpr int TILES = PAGE_SIZE >= 16 ? 32 / SIXTEENS : 1;
    int pages = 0, next_pages = 0, first = 0;
    bool fresh = true;  // `at` is an item's first here
    Place place{0, 0, 0};

    __device__ __forceinline__ int key_of(int unit) const {
        return call.lengths.first_key(at.length) + (unit * WARPS_OF_HEAD + warp) * KEYS;
    }
    // A number that is no page's becomes that of the nearest.
    __device__ __forceinline__ int pages_from(int unit) const {
        const int lane = threadIdx.x % 32;
        const int key = PAGE_SIZE >= 16 ? key_of(unit + lane / SIXTEENS) + lane % SIXTEENS * 16
                                        : key_of(unit) + lane;
        if (key >= at.length || (PAGE_SIZE < 16 && lane >= KEYS)) return 0;
        const int page =
            call.block_table[static_cast<long long>(at.request) * call.table_row + key / PAGE_SIZE];
        return min(max(page, 0), call.pages - 1);
    }
    __device__ __forceinline__ void read_pages(int unit) {
        first = unit, pages = pages_from(unit), next_pages = pages_from(unit + TILES);
    }

    __device__ __forceinline__ void load_q(int stage) const {
        const unsigned to = q_ring + stage * QTile::BYTES;
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < ROW_FRAGMENTS; ++n) {
            const int row = 8 * n + lane / 4, packed = place.row + min(row, place.rows - 1);
            const int query = packed / call.group, head = packed - query * call.group;
            const element_t* from =
                call.q + call.of_q.of(at.request, place.head * call.group + head, query);
#pragma unroll
            for (int i = 0; i < QTile::CHUNKS; i += 4)
                cp_async_16(to + QTile::at(row, i + lane % 4), from + 8 * (i + lane % 4),
                            row < place.rows);
        }
        if (CACHE_E4M3 && lane < 2)
            cp_async_4(to + QTile::SCALES + 4 * lane,
                       (lane ? call.v_scale : call.k_scale) +
                           static_cast<long long>(at.request) * call.scale_batch +
                           static_cast<long long>(place.head) * call.scale_head);
    }
    __device__ __forceinline__ static void copy(unsigned to, const unsigned char* from,
                                                bool valid) {
        if (EVICT_FIRST) cp_async_16_hinted(to, from, valid, evict_first_policy());
        else cp_async_16(to, from, valid);
    }
    // Keys behind the length become zeros, of V too: there may be NaN, which a weight of 0 would
    // not take away.
    __device__ __forceinline__ void load_tile(int stage) const {
        const int lane = threadIdx.x % 32, row = lane / Tile::LANES, chunk = lane % Tile::LANES;
        constexpr int STEP = 32 / Tile::LANES;  // rows from a lane's copy to its next
        const bool inside = Tile::LANES == Tile::CHUNKS || chunk < Tile::CHUNKS;
        const unsigned to_k = ring + stage * 2 * Tile::BYTES, to_v = to_k + Tile::BYTES;
        const int key = key_of(at.unit);
        const long long of_lane = static_cast<long long>(place.head) * call.head_bytes + chunk * 16;
        if constexpr (PAGE_SIZE >= 16) {
#pragma unroll
            for (int j = 0; j < SIXTEENS; ++j) {
                const int page = __shfl_sync(ALL_LANES, pages, (at.unit - first) * SIXTEENS + j);
                const int seen = at.length - (key + 16 * j) - row;
                const long long from = page * call.page_bytes + of_lane +
                                       ((key + 16 * j) % PAGE_SIZE + row) * call.slot_bytes;
#pragma unroll
                for (int v = 0; v < 2; ++v)
#pragma unroll
                    for (int i = 0; i < 16; i += STEP)
                        if (inside)
                            copy((v ? to_v : to_k) + Tile::at(16 * j + i + row, chunk),
                                 (v ? call.v : call.k) + from + i * call.slot_bytes, seen > i);
            }
        } else {
#pragma unroll
            for (int i = 0; i < KEYS; i += STEP) {
                const int page = __shfl_sync(ALL_LANES, pages, i + row);
                const long long from = page * call.page_bytes + of_lane +
                                       (key + i + row) % PAGE_SIZE * call.slot_bytes;
                const bool valid = key + i + row < at.length;
                if (inside) {
                    copy(to_k + Tile::at(i + row, chunk), call.k + from, valid);
                    copy(to_v + Tile::at(i + row, chunk), call.v + from, valid);
                }
            }
        }
    }
    // The next unit to a stage of the ring; nothing behind the last one.
    __device__ __forceinline__ void issue(int stage) {
        if (left > 0) {
            if (fresh) place = place_of(call, at.item, which);
            if (HEADS == 1 || place.rows > 0) {
                if (fresh) load_q(stage);
                if (key_of(at.unit) < at.length) load_tile(stage);
            }
            fresh = false;
            left -= at.unit == at.units - 1 ? 1 + item_cost : 1;
            if (left > 0) {
                fresh = at.next(call.lengths, call.items);
                if (fresh) read_pages(0);
                else if (at.unit == first + TILES)
                    first = at.unit, pages = next_pages, next_pages = pages_from(first + TILES);
            }
        }
        cp_async_commit();
    }
};

// ---- the softmax of a warp's keys ----
struct Rows {
    float largest[ROW_FRAGMENTS][2], sum[ROW_FRAGMENTS][2];  // of columns 2 (lane % 4) and the next
    int first[ROW_FRAGMENTS][2], end[ROW_FRAGMENTS][2];      // the keys that such a row sees
    int first_of_all, end_of_all;                            // and those that all rows see

    __device__ __forceinline__ void begin(const Call& call, const Cursor& at, const Place& place) {
        const int later = at.length - call.lengths.seqlen_q;  // from a query to its own key
        first_of_all = WINDOW ? at.length - 1 - call.lengths.left : 0;
        end_of_all =
            CAUSAL || WINDOW ? min(at.length, later + 1 + (WINDOW ? call.right : 0)) : at.length;
#pragma unroll
        for (int n = 0; n < ROW_FRAGMENTS; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                largest[n][e] = minus_infinity(), sum[n][e] = 0.f;
                first[n][e] = 0, end[n][e] = at.length;
                if ((CAUSAL || WINDOW) && (WINDOW || call.lengths.seqlen_q > 1)) {
                    const int row = place.row + 8 * n + threadIdx.x % 4 * 2 + e;
                    const int own = later + row / call.group;
                    if (WINDOW) first[n][e] = own - call.lengths.left;
                    end[n][e] = min(at.length, own + 1 + (WINDOW ? call.right : 0));
                }
            }
    }
    // Weights of a tile's scores, transposed, and what the output must be multiplied by. True if
    // that is not 1 for all.
    __device__ __forceinline__ bool weigh(Scores& s, Weights& p, float (&by)[ROW_FRAGMENTS][2],
                                          int key, float inner, float factor) {
        if (SOFTCAP)
            cap_scores(reinterpret_cast<float (&)[SIXTEENS * ROW_FRAGMENTS * 4]>(s), inner);
        const bool masked = key + KEYS > end_of_all || (WINDOW && key < first_of_all);
        bool changed = false;
        key += threadIdx.x % 32 / 4;
#pragma unroll
        for (int n = 0; n < ROW_FRAGMENTS; ++n) {
            float grown[2] = {largest[n][0], largest[n][1]};
#pragma unroll
            for (int j = 0; j < SIXTEENS; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float& x = s[j][n][e];
                    const int own = key + 16 * j + e / 2 * 8;
                    x *= factor;
                    if (masked && (own >= end[n][e % 2] || (WINDOW && own < first[n][e % 2])))
                        x = minus_infinity();
                    grown[e % 2] = fmaxf(grown[e % 2], x);
                }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2)
                    grown[e] = fmaxf(grown[e], __shfl_xor_sync(ALL_LANES, grown[e], lanes));
                const float from = grown[e] == minus_infinity() ? 0.f : grown[e];
                by[n][e] = exp2_approx(largest[n][e] - from);
                changed |= grown[e] != largest[n][e];
                largest[n][e] = grown[e], sum[n][e] *= by[n][e];
#pragma unroll
                for (int j = 0; j < SIXTEENS; ++j)
#pragma unroll
                    for (int h = e; h < 4; h += 2)
                        sum[n][e] += s[j][n][h] = exp2_approx(s[j][n][h] - from);
            }
#pragma unroll
            for (int j = 0; j < SIXTEENS; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    p[j][n][h] = transpose_8x8(pack_factor(s[j][n][2 * h], s[j][n][2 * h + 1]));
        }
        return __any_sync(ALL_LANES, changed);
    }
};

// ---- the end of an item, or of a block's part of it ----
// A row of the output: 4 columns a thread.
__device__ __forceinline__ void store_row(const Call& call, Part part, const Cursor& at,
                                          const Place& place, int row, int chunk, float v_scale) {
    const int packed = place.row + row, query = packed / call.group;
    const int head = place.head * call.group + packed - query * call.group;
    float by = v_scale;
    if (SINKS) {  // one more score, without a value
        const float sink = call.sinks[head] * LOG2E, grown = fmaxf(part.largest, sink);
        const float from = grown == minus_infinity() ? 0.f : grown;
        const float keep = exp2_approx(part.largest - from);
        part.sum = fmaf(part.sum, keep, exp2_approx(sink - from));
        part.largest = grown, by *= keep;
    }
    by = part.sum == 0.f ? 0.f : by / part.sum;
    *reinterpret_cast<uint2*>(call.o + call.of_o.of(at.request, head, query) + 4 * chunk) =
        make_uint2(pack(part.values.x * by, part.values.y * by),
                   pack(part.values.z * by, part.values.w * by));
    if (LSE && call.lse != nullptr && chunk == 0)
        call.lse[(static_cast<long long>(at.request) * call.heads_kv * call.group + head) *
                     call.lengths.seqlen_q +
                 query] = (part.largest + log2f(part.sum)) * LN2;
}

struct ItemEnd {
    const Call& call;
    const Cursor& at;
    Place place;
    int which, warp;
    unsigned char* smem;
    float v_scale;
    // A thread has 4 columns of a row, and LANES of them a row: some have none if the head_dim is
    // no power of two. WAYS rows are worked on at once.
    static constexpr int CHUNKS = HEAD_DIM / 4, LANES = HEAD_DIM == 96 ? 32 : CHUNKS,
                         WAYS = THREADS_OF_HEAD / LANES;
    static constexpr int PARTS_AHEAD = 8;  // loads of parts under way
    static_assert(WAYS > 0, "the warps of a head have a row");

    __device__ __forceinline__ int thread() const { return warp * 32 + threadIdx.x % 32; }
    __device__ __forceinline__ int way() const { return thread() / LANES; }
    __device__ __forceinline__ int chunk() const { return thread() % LANES; }
    // Of the head's warps.
    __device__ __forceinline__ float* merged() const {
        return reinterpret_cast<float*>(smem + MERGE_OFFSET) +
               which * WARPS_OF_HEAD * 8 * MERGE_PITCH;
    }
    __device__ __forceinline__ float2* merged_sums() const {
        return reinterpret_cast<float2*>(smem + SUMS_OFFSET) + which * WARPS_OF_HEAD * 8;
    }
    // Where a block's part of an item lies: it has two, of the item that begins before it, and of
    // the one that ends behind it, of which it is the first.
    __device__ __forceinline__ int part_row(int block, int first, int row) const {
        return ((2 * block + (block == first)) * HEADS + which) * ROWS + row;
    }

    // The warps' parts become one. first, last: the blocks that share the item.
    __device__ __forceinline__ void merge(const Output& o, Rows& rows_of_warp, int first,
                                          int last) const {
        const int lane = threadIdx.x % 32, block = blockIdx.x;
#pragma unroll
        for (int n = 0; n < ROW_FRAGMENTS; ++n) {
            if (n > 0 && 8 * n >= place.rows) break;
            float* own = merged() + (warp * 8 + lane % 4 * 2) * MERGE_PITCH;
#pragma unroll
            for (int i = 0; i < STEPS; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    own[e % 2 * MERGE_PITCH + 16 * i +
                        (CACHE_E4M3 ? lane / 4 * 2 + e / 2 : lane / 4 + e / 2 * 8)] = o[i][n][e];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float sum = rows_of_warp.sum[n][e];
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2)
                    sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
                if (lane < 4)
                    merged_sums()[warp * 8 + 2 * lane + e] =
                        make_float2(rows_of_warp.largest[n][e], sum);
            }
            sync_head(which);
#pragma unroll 1
            for (int row = way(); chunk() < CHUNKS && row < min(8, place.rows - 8 * n);
                 row += WAYS) {
                float4 values[WARPS_OF_HEAD];
                float2 sums[WARPS_OF_HEAD];
#pragma unroll
                for (int w = 0; w < WARPS_OF_HEAD; ++w) {
                    sums[w] = merged_sums()[w * 8 + row];
                    values[w] = *reinterpret_cast<const float4*>(
                        merged() + (w * 8 + row) * MERGE_PITCH + 4 * chunk());
                }
                Part part;
                part.join(values, sums);
                if (first == last) {
                    store_row(call, part, at, place, 8 * n + row, chunk(), v_scale);
                } else {
                    const int to = part_row(block, first, 8 * n + row);
                    *reinterpret_cast<float4*>(call.parts + to * HEAD_DIM + 4 * chunk()) =
                        part.values;
                    if (chunk() == 0) call.part_sums[to] = make_float2(part.largest, part.sum);
                }
            }
            sync_head(which);
        }
    }

    // The blocks' parts become one, by the last that comes here. Threads that are left over share
    // the parts of a row.
    __device__ __forceinline__ void join(int first, int last) const {
        int* is_last = reinterpret_cast<int*>(smem + LAST_OFFSET) + which;
        if (thread() == 0) {
            unsigned* counter = call.counters + first * HEADS + which;
            *is_last = count_arrival(counter) == static_cast<unsigned>(last - first);
            if (*is_last) *counter = 0;
        }
        sync_head(which);
        if (!*is_last) return;
        const int bits = 32 - __clz(place.rows - 1), at_once = min(WAYS, 1 << bits);
        const int sharers = WAYS / at_once, own = way() >> bits;
#pragma unroll 1
        for (int first_row = 0; first_row < place.rows; first_row += at_once) {
            const int row = first_row + (way() & (at_once - 1));
            const bool has = row < place.rows && chunk() < CHUNKS;
            Part part;
#pragma unroll 1
            for (int block = first + own; has && block <= last; block += PARTS_AHEAD * sharers) {
                float4 values[PARTS_AHEAD];
                float2 sums[PARTS_AHEAD];
#pragma unroll
                for (int i = 0; i < PARTS_AHEAD; ++i) {
                    const int other = block + i * sharers;
                    const int from = part_row(min(other, last), first, row);
                    sums[i] = __ldcg(call.part_sums + from);
                    values[i] = __ldcg(
                        reinterpret_cast<const float4*>(call.parts + from * HEAD_DIM) + chunk());
                    if (other > last) sums[i].x = minus_infinity();
                }
                part.join(values, sums);
            }
            if (sharers > 1) {
                float4* shared = reinterpret_cast<float4*>(merged());
                float2* shared_sums = reinterpret_cast<float2*>(shared + THREADS_OF_HEAD);
                shared[thread()] = part.values;
                shared_sums[thread()] = make_float2(part.largest, part.sum);
                sync_head(which);
#pragma unroll 1
                for (int i = 1; own == 0 && i < sharers; ++i) {
                    const int other = thread() + i * at_once * LANES;
                    const float4 values[1] = {shared[other]};
                    const float2 sums[1] = {shared_sums[other]};
                    part.join(values, sums);
                }
            }
            if (own == 0 && has) store_row(call, part, at, place, row, chunk(), v_scale);
        }
        sync_head(which);
    }
};

// Requests without a key: blocks share them. length: of a block's first.
__device__ __forceinline__ void store_empty(const Call& call, int length) {
    constexpr int CHUNKS = HEAD_DIM / 8;
    const int heads = call.heads_kv * call.group, rows = heads * call.lengths.seqlen_q;
#pragma unroll 1
    for (int request = blockIdx.x; request < call.lengths.batch; request += gridDim.x) {
        if (request > static_cast<int>(blockIdx.x)) length = call.lengths.of(request);
        if (length > 0) continue;
#pragma unroll 1
        for (int x = threadIdx.x; x < rows * CHUNKS; x += THREADS) {
            const int row = x / CHUNKS, head = row / call.lengths.seqlen_q,
                      query = row - head * call.lengths.seqlen_q;
            element_t* to = call.o + call.of_o.of(request, head, query) + x % CHUNKS * 8;
            *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
            if (LSE && call.lse != nullptr && x % CHUNKS == 0)
                call.lse[static_cast<long long>(request) * rows + row] =
                    SINKS ? call.sinks[head] : minus_infinity();
        }
    }
}

// parts, part_sums, counters, runs: workspaces; runs are read with SCHEDULE alone, sinks and
// softcap with SINKS and SOFTCAP, left and right with WINDOW, scales with CACHE_E4M3. pages: how
// many there are. Of the strides, page_stride is to the next page, slot_stride to the next key in
// it.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    decode_paged_mma(const element_t* q, const unsigned char* k, const unsigned char* v,
                     element_t* o, const int* block_table, const int* seqused_k,
                     const float* k_scale, const float* v_scale, const float* sinks, float* lse,
                     float* parts, float2* part_sums, unsigned* counters, const int4* runs,
                     int batch, int heads_kv, int group, int seqlen_q, int pages, int max_blocks,
                     int left, int right, float factor, float softcap, int q_batch, int q_head,
                     int q_row, int o_batch, int o_head, int o_row, int page_stride,
                     int slot_stride, int head_stride, int table_row, int scale_batch,
                     int scale_head) {
    extern __shared__ __align__(128) unsigned char smem[];
    constexpr int BYTES = CACHE_E4M3 ? 1 : 2;
    const int row_tiles = (seqlen_q * group + ROWS - 1) / ROWS;
    const Call call{q,
                    k,
                    v,
                    o,
                    block_table,
                    k_scale,
                    v_scale,
                    sinks,
                    lse,
                    parts,
                    part_sums,
                    counters,
                    {seqused_k, batch, seqlen_q, left, max_blocks * PAGE_SIZE},
                    heads_kv,
                    group,
                    row_tiles,
                    (heads_kv * row_tiles + HEADS - 1) / HEADS,
                    right,
                    pages,
                    table_row,
                    scale_batch,
                    scale_head,
                    factor,
                    softcap,
                    {q_batch, q_head, q_row},
                    {o_batch, o_head, o_row},
                    static_cast<long long>(page_stride) * BYTES,
                    slot_stride * BYTES,
                    head_stride * BYTES};
    const int warp = threadIdx.x / 32, which = warp / WARPS_OF_HEAD,
              warp_of_head = warp % WARPS_OF_HEAD;
#if PDL
    grid_launch_dependents();
    grid_wait();
#endif
#if SCHEDULE
    const Run run = load_run(runs + blockIdx.x * (RUN_INTS / 4));
#else
    const Run run = find_run(call.lengths, call.items, blockIdx.x, gridDim.x);
#endif
    // Asked for now, since it is cold if the schedule was made before.
    const int request = blockIdx.x;
    const int first_length = request < batch ? call.lengths.of(request) : 0;
    const unsigned ring = smem_address(smem) + warp * RING_BYTES;
    unsigned char* q_ring = smem + Q_OFFSET + warp * Q_RING_BYTES;
    Cursor at = run.first;
    int left_units = run.left, item_begin = run.item_begin, stage = 0;
    bool fresh = true;
    QFragments q_fragments;
    Output out;
    Rows rows;
    float inner = 0.f, outer = factor, of_v = 1.f;
    if (left_units > 0) {
        Loads loads{call,  run.first,    run.left, run.item_cost,
                    which, warp_of_head, ring,     smem_address(q_ring)};
        loads.read_pages(at.unit);
        Place place = place_of(call, at.item, which);
        // The first steps only fill the ring.
#pragma unroll 1
        for (int step = -NUM_STAGES; left_units > 0; ++step) {
            if (step >= 0) {
                cp_async_wait<NUM_STAGES - 1>();
                __syncwarp();
                if (fresh) {
                    const unsigned char* tile = q_ring + stage * QTile::BYTES;
                    load_q_fragments(q_fragments, tile);
                    float scaled = factor;
                    if (CACHE_E4M3) {
                        const float2 scales =
                            *reinterpret_cast<const float2*>(tile + QTile::SCALES);
                        scaled *= scales.x, of_v = scales.y;
                    }
                    inner = SOFTCAP ? scaled * LN2 / softcap : 0.f;
                    outer = SOFTCAP ? softcap * LOG2E : scaled;
                    rows.begin(call, at, place);
#pragma unroll
                    for (int i = 0; i < STEPS; ++i)
#pragma unroll
                        for (int n = 0; n < ROW_FRAGMENTS; ++n)
#pragma unroll
                            for (int e = 0; e < 4; ++e) out[i][n][e] = 0.f;
                    fresh = false;
                }
                const int key = call.lengths.first_key(at.length) +
                                (at.unit * WARPS_OF_HEAD + warp_of_head) * KEYS;
                if (key < at.length && (HEADS == 1 || place.rows > 0)) {
                    const unsigned tile = ring + stage * 2 * Tile::BYTES;
                    Scores s;
                    Weights p;
                    float by[ROW_FRAGMENTS][2];
                    multiply_k(s, tile, q_fragments);
                    if (rows.weigh(s, p, by, key, inner, outer)) {
#pragma unroll
                        for (int i = 0; i < STEPS; ++i)
#pragma unroll
                            for (int n = 0; n < ROW_FRAGMENTS; ++n)
#pragma unroll
                                for (int e = 0; e < 4; ++e) out[i][n][e] *= by[n][e % 2];
                    }
                    multiply_v(out, tile + Tile::BYTES, p);
                }
                __syncwarp();  // all have read the tile that is loaded over now
            }
            loads.issue(stage);
            if (++stage == NUM_STAGES) stage = 0;
            if (step < 0) continue;
            const bool ends = at.unit == at.units - 1;
            if (--left_units > 0 && !ends) {
                ++at.unit;
                continue;
            }
            const int first = item_begin / run.quota,
                      last = (item_begin + at.units - 1) / run.quota;
            if (HEADS == 1 || place.rows > 0) {
                const ItemEnd end{call, at, place, which, warp_of_head, smem, of_v};
                end.merge(out, rows, first, last);
                if (first != last) end.join(first, last);
            }
            if (ends) {
                left_units -= run.item_cost, item_begin += at.units + run.item_cost;
                if (left_units > 0) at.next(call.lengths, call.items);
                place = place_of(call, at.item, which);
            }
            fresh = true;
        }
    }
    store_empty(call, first_length);
}
#endif
#endif
