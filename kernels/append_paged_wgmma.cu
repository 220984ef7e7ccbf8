// append_paged_wgmma: attention of many queries over a paged cache on Hopper, as chunked prefill
// has it: the consumer of flash_fwd_wgmma behind a producer that follows a table of pages. sm_90a
// only. q, o: (items, heads, seqlen_q, HEAD_DIM), or with one item the tokens of all requests; k,
// v: pages of PAGE_SIZE slots of heads_kv rows; any strides, which the maps and the last arguments
// say. block_table (batch, max_blocks): the pages of a request; seqused_k (batch): its keys, of
// which its last queries are the queries' own. With QUERIES, request r has the tokens
// query_begins[r] .. query_ends[r] - 1, counted through all items, and otherwise all tokens of item
// r.
//
// A row of a tile is a token and a query head of one key head, so that K and V are read once for
// all of them: row r of a warpgroup's 64 is its token r / group and query head r % group. That is
// one box of q's map. 64 % group rows are left over: they are zero, and not stored. A tile of
// WARPGROUPS times so many tokens takes the tiles of keys that they see from right to left, a
// tile in boxes of as many slots as divide both it and a page. Nothing is loaded of pages behind a
// request's last key or before a window: their boxes lie outside the map, which gives zeros. V of
// the slots behind the last key is cleared in shared memory. Pages of no multiple of 8 slots, and a
// cache of E4M3, are copied by rows instead: see append_paged_wgmma_rows.cuh. With CACHE_E4M3, k
// and v count times k_scale and v_scale (batch, heads_kv).
//
// The grid is fixed, whatever the lengths are. Blocks take tiles of queries in turn, from a counter
// that the last one to end clears: request by request, of these head by head, and of a head the
// last queries first, which see most. A tile that has more keys than a block's fair share of all is
// cut into up to SPLITS parts for as many blocks, of which the last to end joins what all have
// written.
#ifndef CACHE_E4M3
#define CACHE_E4M3 0
#endif
#define BY_ROWS (PAGE_SIZE % 8 != 0 || CACHE_E4M3)
#define PADDED (!BY_ROWS)  // V behind the last key may be NaN; rows of none come as zeros
#define EMPTY_ROWS 1       // the device alone knows which rows see no key
#define BITS 0
#include "common/hopper/consumer.cuh"
#include "common/ptx/barrier.cuh"
#if SPLITS > 1 || BY_ROWS
#include "common/ptx/decode.cuh"
#endif
#include "common/ptx/launch.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/shared.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"
#include "common/tile/mask_list.cuh"
#include "common/tile/pipeline.cuh"
#include "common/tile/scores.cuh"
#include "common/tile/shared_tile.cuh"
#include "common/tile/softmax.cuh"

using namespace attn;

#if STAGE_RESET
// Before the first call; afterwards each call leaves them so.
extern "C" __global__ void append_paged_reset(int* turns, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) turns[i] = 0;
}
#else

// What flash_fwd_wgmma may choose, and is fixed here.
constexpr int KEY_GROUPS = 1, MULTICAST = 1, PERSISTENT = 1, O_OVER_Q = 0, P_SHARED = 0,
              Q_REGISTERS = 0, SWIZZLE = 128;
constexpr int ROW_GROUPS = WARPGROUPS, STAGES = NUM_STAGES, COLUMNS = (HEAD_DIM + 15) / 16 * 16,
              COLUMNS_V = COLUMNS;
constexpr int CONSUMERS = WARPGROUPS * 128, THREADS = CONSUMERS + 32 * COPY_WARPS;
static_assert(HEAD_DIM % 32 == 0, "a quad stores 32 columns at once");
static_assert(BLOCK_N % 16 == 0, "8 rows are swizzled together");
static_assert(!PINGPONG || (OVERLAP && WARPGROUPS > 1),
              "warpgroups take turns at overlapped tiles");
constexpr unsigned ALL_LANES = 0xffffffffu;

constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }
constexpr int BOX = BY_ROWS ? 1 : common_divisor(PAGE_SIZE, BLOCK_N),  // slots of a copy
    BOXES = BLOCK_N / BOX, PRODUCERS = BY_ROWS ? COPY_WARPS : 1;       // warps
static_assert(BY_ROWS || BOXES <= 32, "a lane has a box");

using QTile = SharedTile<element_t, 64, COLUMNS, SWIZZLE>;  // of one warpgroup
using KTile = SharedTile<element_t, BLOCK_N, COLUMNS, SWIZZLE>;
using VTile = KTile;
using PTile = SharedTile<element_t, 64, BLOCK_N, 128>;
constexpr unsigned Q_BYTES = QTile::BYTES, K_BYTES = KTile::BYTES, V_BYTES = VTile::BYTES,
                   P_BYTES = PTile::BYTES, ROOM_BYTES = BLOCK_N * COLUMNS;
constexpr bool SCORES_AGAIN = OVERLAP && MAXIMA == 2;
// Requests end within a tile, and warpgroups then have no query, which pass by all tiles but one.
constexpr bool UNSEEN_TILES = WARPGROUPS > 1,
               HALF_TILES = UNSEEN_TILES && HIDES_LATER && OVERLAP && BLOCK_N == 128;
constexpr int START_BARRIER = 1, PRODUCER_BARRIER = 2, TURN_BARRIER = 4,
              CLEAR_BARRIER = 8;  // the last two of each
using Softmax = OnlineSoftmax<MAXIMA, 0>;
struct Tiles {
    __device__ __forceinline__ static int key(int j, int, int end) {
        return (end - 1 - j) * BLOCK_N;
    }
};

// Tiles of keys that could be computed while parts are joined. A tile of one and a half shares or
// more is shared, of LEAST_SHARE tiles of keys at least: such parts are at most 4/3 of the blocks,
// and twice that where requests have no keys but their own queries'. What none of SLOTS parts has
// memory for is not shared.
constexpr int JOINING = 4;
// A tile of queries: its first row of an item, the key head, the tokens that there are, the first
// one's own key, the request's keys, and the tiles of keys that some token sees, one at least. No
// tokens: there is no tile any more.
struct __align__(16) Work {
    int row, item, head_kv, tokens, position, length, first, end;
#if SPLITS > 1
    int slot, part, parts;  // memory of the first part; of the tile's keys: this one, and how many
#endif
#if BY_ROWS
    alignas(16) int request;
    float k_scale, v_scale;
#endif
    __device__ __forceinline__ static Work load(unsigned from) {
        const uint4 a = load_shared_16(from), b = load_shared_16(from + 16);
        auto of = [](unsigned x) { return static_cast<int>(x); };
        Work work{of(a.x), of(a.y), of(a.z), of(a.w), of(b.x), of(b.y), of(b.z), of(b.w)};
#if SPLITS > 1
        const uint4 c = load_shared_16(from + 32);
        work.slot = of(c.x), work.part = of(c.y), work.parts = of(c.z);
#endif
#if BY_ROWS
        const uint4 d = load_shared_16(from + (SPLITS > 1 ? 48 : 32));
        work.request = of(d.x), work.k_scale = __uint_as_float(d.y),
        work.v_scale = __uint_as_float(d.z);
#endif
        return work;
    }
#if SPLITS > 1
    // Leaves only this part's tiles of keys. There are fewer parts than wanted where there is no
    // memory for them, or where tiles are few.
    __device__ __forceinline__ void take_part(int wanted) {
        const int tiles = end - first,
                  each = slot + wanted > SLOTS ? tiles : (tiles + wanted - 1) / wanted;
        parts = (tiles + each - 1) / each;
        end -= part * each, first = max(first, end - each);
    }
    __device__ __forceinline__ bool is_none() const { return tokens > 0 && part >= parts; }
#endif
};
// The producer tells consumers of a tile here. They read it again when they store, so that they
// keep none of it: by then it may have told of two more.
constexpr int PLACES = 3;
// Behind them a producer of many warps keeps its Place, of which registers would spill 28 bytes.
constexpr bool KEPT_PLACE = BY_ROWS && SPLITS > 1;

// Barriers: full and empty of each stage of K and of V; of Q, empty of all, full of each 64 rows.
struct Barriers {
    unsigned base;
    __device__ __forceinline__ unsigned k_full(unsigned stage) const { return base + 32 * stage; }
    __device__ __forceinline__ unsigned k_empty(unsigned stage) const { return k_full(stage) + 8; }
    __device__ __forceinline__ unsigned v_full(unsigned stage) const { return k_full(stage) + 16; }
    __device__ __forceinline__ unsigned v_empty(unsigned stage) const { return k_full(stage) + 24; }
    __device__ __forceinline__ unsigned q_empty(int) const { return k_full(STAGES); }
    __device__ __forceinline__ unsigned q_full(int group) const {
        return k_full(STAGES) + 8 + 8 * group;
    }
    __device__ __forceinline__ void init() const {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(k_full(i), PRODUCERS);
            mbarrier_init(v_full(i), PRODUCERS);
            mbarrier_init(k_empty(i), CONSUMERS / 32);
            mbarrier_init(v_empty(i), CONSUMERS / 32);
        }
        mbarrier_init(q_empty(0), CONSUMERS / 32);
#pragma unroll
        for (int i = 0; i < ROW_GROUPS; ++i) mbarrier_init(q_full(i), 1);
        mbarrier_init_fence();
    }
};
// Where everything lies in shared memory.
struct Memory {
    unsigned q, k, v;
#if CACHE_E4M3
    unsigned rooms;  // of tiles that are on their way
#endif
    unsigned told;
    Barriers barriers;
    __device__ __forceinline__ explicit Memory(unsigned base)
        : q(base),
          k(q + ROW_GROUPS * Q_BYTES),
          v(k + STAGES * K_BYTES),
#if CACHE_E4M3
          rooms(v + STAGES * V_BYTES),
          told(rooms + ROOMS * ROOM_BYTES),
#else
          told(v + STAGES * V_BYTES),
#endif
          barriers{told + PLACES * static_cast<unsigned>(sizeof(Work)) + KEPT_PLACE * 16} {
    }
};
// What the consumer asks of a call, and of the request whose tile it has.
struct Call {
    float factor;  // of the scores: scale * log2(e)
    struct {
        float softcap;
        const float* sinks;
        // Products times it are what tanh takes; capped ones times exponent() are exponents of 2.
        __device__ __forceinline__ float inner(float factor) const {
            return factor * LN2 / softcap;
        }
    } scores;
    int group, left, right;  // the last two: keys of a window, before a query's own and after it
    struct {
        struct {
            int begin, count;
        } keys;
    } item = {};

    __device__ __forceinline__ float exponent() const {
        return SOFTCAP ? scores.softcap * LOG2E : factor;
    }
    __device__ __forceinline__ int tokens() const { return 64 / group; }  // of a warpgroup
    // Keys that a token of a tile sees. Their end may be below 0.
    __device__ __forceinline__ KeyRange visible_keys(const Work& work, int token) const {
        const int own = work.position + token;
        return {WINDOW ? own - left : 0,
                HIDES_LATER ? min(work.length, own + 1 + (WINDOW ? right : 0)) : work.length};
    }
};

// ---- the producer: a warp, of which each lane has a box of a tile of keys; or four, by rows ----
// What the device has of requests. What cannot be is taken for the nearest that can.
struct Requests {
    const int *seqused_k, *query_begins, *query_ends, *block_table;
    int batch, heads_kv, seqlen_q, all_tokens, max_blocks, table_row;

    __device__ __forceinline__ int length(int request) const {
        return min(max(seqused_k[request], 0), max_blocks * PAGE_SIZE);
    }
    // The first token of a request, counted through all items, and how many it has: of one item.
    __device__ __forceinline__ int2 tokens(int request) const {
        const int begin = QUERIES ? max(query_begins[request], 0) : request * seqlen_q;
        if (begin >= all_tokens) return {0, 0};
        const int end = begin / seqlen_q * seqlen_q + seqlen_q;
        return {begin, max(min(QUERIES ? query_ends[request] : end, end) - begin, 0)};
    }
    // The page of a key, or none.
    __device__ __forceinline__ int page(int request, int key, int length) const {
        return key < length
                   ? block_table[static_cast<long long>(request) * table_row + key / PAGE_SIZE]
                   : -1;
    }
};
// Where a Finder is: 32 requests, of which `first` is the first, and there are `before` tiles or
// parts before it.
struct __align__(16) Place {
    int first, before;
#if SPLITS > 1
    int slots;    // of the parts before
    float share;  // a block's fair share, in keys
#endif
};
// Finds tiles of queries, or parts of their keys, by their numbers, which grow.
struct Finder {
    const Requests& of;
    const Call& call;
    Place at = {};
    int request = 0;

#if SPLITS > 1
    // How many of these keys a tile of queries sees at most.
    __device__ __forceinline__ float seen(int keys) const {
        const int most = call.tokens() * WARPGROUPS;
        return fmaxf(WINDOW ? fminf(keys, static_cast<float>(call.left) + call.right + most) : keys,
                     0.f);
    }
    __device__ __forceinline__ void find_share() {
        const int most = call.tokens() * WARPGROUPS;
        float keys = 0.f;
#pragma unroll 4
        for (int request = threadIdx.x % 32; request < of.batch; request += 32) {
            const int tokens = of.tokens(request).y, length = of.length(request);
            const float tiles = (tokens + most - 1) / most;
            keys += tiles * (seen(HIDES_LATER ? length - tokens / 2 : length) + BLOCK_N / 2);
        }
#pragma unroll
        for (int d = 16; d > 0; d /= 2) keys += __shfl_xor_sync(ALL_LANES, keys, d);
        at.share = fmaxf(keys * of.heads_kv / gridDim.x + JOINING * BLOCK_N, LEAST_SHARE * BLOCK_N);
    }
    __device__ __forceinline__ int parts(int length) const {
        return min(max(static_cast<int>(seen(length) / at.share + 0.5f), 1), SPLITS);
    }
#endif

    __device__ __forceinline__ Work find(int number) {
        const int lane = threadIdx.x % 32, most = call.tokens() * WARPGROUPS;
        for (; at.first < of.batch; at.first += 32) {
            const bool is = at.first + lane < of.batch;
            const int2 own = is ? of.tokens(at.first + lane) : int2{0, 0};
            const int length = is ? of.length(at.first + lane) : 0;
            const int tiles = (own.y + most - 1) / most;
#if SPLITS > 1
            const int of_tile = parts(length), all = tiles * of.heads_kv * of_tile;
            const int in_slots = of_tile > 1 ? all : 0, slots_end = sum_before(in_slots);
#else
            const int all = tiles * of.heads_kv;
#endif
            const int end = sum_before(all);  // of this lane's, and all before
            const unsigned later = __ballot_sync(ALL_LANES, at.before + end > number);
            if (later == 0) {
                at.before += __shfl_sync(ALL_LANES, end, 31);
#if SPLITS > 1
                at.slots += __shfl_sync(ALL_LANES, slots_end, 31);
#endif
                continue;
            }
            const int which = __ffs(later) - 1;
            auto of_request = [which](int x) { return __shfl_sync(ALL_LANES, x, which); };
            request = at.first + which;
            const int begin = of_request(own.x), tokens = of_request(own.y),
                      of_head = of_request(tiles), item = begin / of.seqlen_q;
            int within = number - at.before - of_request(end - all);
#if SPLITS > 1
            const int wanted = of_request(of_tile), part = within % wanted,
                      slot = at.slots + of_request(slots_end - in_slots) + within - part;
            within /= wanted;
#endif
            const int head_kv = within / of_head;
            const int token = (of_head - 1 - (within - head_kv * of_head)) * most;
            Work work{begin - item * of.seqlen_q + token, item, head_kv, min(tokens - token, most)};
            work.length = of_request(length);
            work.position = work.length - tokens + token;
            work.end = max(ends(call.visible_keys(work, work.tokens - 1).end), 1);
            const int begins = call.visible_keys(work, 0).first;
            work.first = WINDOW ? min(max(begins, 0) / BLOCK_N, work.end - 1) : 0;
#if SPLITS > 1
            work.slot = slot, work.part = part;
            work.take_part(wanted);
#endif
            return work;
        }
        return {};
    }
    // The sum of all lanes up to this one.
    __device__ __forceinline__ static int sum_before(int x) {
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(ALL_LANES, x, d);
            if (threadIdx.x % 32 >= d) x += other;
        }
        return x;
    }
    __device__ __forceinline__ static int ends(int key) { return (key + BLOCK_N - 1) / BLOCK_N; }
};
#if BY_ROWS
#include "append_paged_wgmma_rows.cuh"
#else
// The boxes of a tile of keys, a lane each.
struct Copies {
    using Place = int;  // the page of a lane's box
    const TensorMap &k, &v;

    __device__ __forceinline__ static int first_key() { return threadIdx.x % 32 * BOX; }
    __device__ __forceinline__ static Place place(int page, int) { return page; }
    __device__ __forceinline__ static void load(unsigned target, const TensorMap& map,
                                                unsigned barrier, int key, int head_kv, int page) {
        const int lane = threadIdx.x % 32;
        if (lane == 0) mbarrier_expect(barrier, KTile::BYTES);
        __syncwarp();
        if (lane >= BOXES) return;
#pragma unroll
        for (int i = 0; i < KTile::PANELS; ++i)
            tma_load_4d(target + i * KTile::PANEL_BYTES + lane * (BOX * KTile::ROW_BYTES), map,
                        barrier, i * KTile::PANEL,
                        static_cast<unsigned>(key + lane * BOX) % PAGE_SIZE, head_kv, page);
    }
    __device__ __forceinline__ void load_k(unsigned to, unsigned barrier, int key, int head_kv,
                                           int page) const {
        load(to, k, barrier, key, head_kv, page);
    }
    __device__ __forceinline__ void load_v(unsigned to, unsigned barrier, int key, int head_kv,
                                           int page) const {
        load(to, v, barrier, key, head_kv, page);
    }
};
#endif
// A box for each warpgroup: it may have tokens behind those of the tile.
__device__ __forceinline__ void load_queries(const TensorMap& q, const Memory& at, const Call& call,
                                             const Work& work) {
    const int tokens = call.tokens(), bytes = tokens * call.group * QTile::ROW_BYTES;
#pragma unroll
    for (int i = 0; i < ROW_GROUPS; ++i) {
        const unsigned full = at.barriers.q_full(i);
        mbarrier_expect(full, QTile::PANELS * bytes);
#pragma unroll
        for (int c = 0; c < QTile::PANELS; ++c)
            tma_load_4d(at.q + i * Q_BYTES + c * QTile::PANEL_BYTES, q, full, c * QTile::PANEL,
                        work.head_kv * call.group, work.row + i * tokens, work.item);
    }
}
// K of a tile comes before Q of the first, and V of the tile before.
__device__ __forceinline__ void load_tiles(const TensorMap& q, Copies copies, const Memory& at,
                                           const Call& call, const Requests& requests, int* turns,
                                           Work* told, bool first_warp) {
    const Barriers& barriers = at.barriers;
    const int lane = threadIdx.x % 32;
    Finder finder{requests, call};
    Place* kept = reinterpret_cast<Place*>(told + PLACES);
#if SPLITS > 1
    if (first_warp) finder.find_share();
    if (KEPT_PLACE && first_warp && lane == 0) *kept = finder.at;
    __syncwarp();
#endif
    Ring<STAGES> k_at, v_at;
    Ring<PLACES> place;
    unsigned q_phase = 0;
    int number = blockIdx.x;
    auto take_next = [&] {
        if (lane == 0) number = gridDim.x + atomicAdd(turns, 1);
        number = __shfl_sync(ALL_LANES, number, 0);
    };
#pragma unroll 1
    for (;;) {
#if BY_ROWS
        if (first_warp) {
            if (KEPT_PLACE) finder.at = *kept;
            Work work = finder.find(number);
#if SPLITS > 1
            while (work.is_none()) take_next(), work = finder.find(number);
#endif
            if (KEPT_PLACE && lane == 0) *kept = finder.at;
            work.request = finder.request;
            if (CACHE_E4M3 && work.tokens > 0) copies.read_scales(work);
            if (lane == 0) told[place.stage] = work;
        }
        copies.finish();
        named_barrier_sync(PRODUCER_BARRIER, 32 * PRODUCERS);
        const Work work = Work::load(at.told + place.stage * static_cast<unsigned>(sizeof(Work)));
        const int request = work.request;
#else
        const Work work = finder.find(number);
#if SPLITS > 1
        if (work.is_none()) {
            take_next();
            continue;
        }
#endif
        if (lane == 0) told[place.stage] = work;
        const int& request = finder.request;
#endif
        place.next();
        if (work.tokens == 0) break;
        // Where a window begins; no page before it is loaded.
        const int begin = WINDOW ? call.visible_keys(work, 0).first : 0;
        auto place_of = [&](int key) {
            key += Copies::first_key();
            return copies.place(key + BOX > begin ? requests.page(request, key, work.length) : -1,
                                key);
        };
        const int tiles = work.end - work.first;
        int key = (work.end - 1) * BLOCK_N;
        Copies::Place from = place_of(key), from_before = -1;
#pragma unroll 1
        for (int j = 0; j <= tiles; ++j, key -= BLOCK_N) {
            Copies::Place from_next = -1;
            if (j < tiles) {
                if (!CACHE_E4M3) mbarrier_wait(barriers.k_empty(k_at.stage), k_at.phase ^ 1);
                copies.load_k(at.k + k_at.stage * K_BYTES,
                              barriers.k_full(k_at.stage) | (CACHE_E4M3 ? k_at.phase ^ 1 : 0), key,
                              work.head_kv, from);
                k_at.next();
                if (j + 1 < tiles) from_next = place_of(key - BLOCK_N);
            }
            if (j == 0) {
                if (first_warp) {
                    mbarrier_wait(barriers.q_empty(0), q_phase ^ 1), q_phase ^= 1;
                    if (lane == 0) load_queries(q, at, call, work);
                }
            } else {
                if (!CACHE_E4M3) mbarrier_wait(barriers.v_empty(v_at.stage), v_at.phase ^ 1);
                copies.load_v(at.v + v_at.stage * V_BYTES,
                              barriers.v_full(v_at.stage) | (CACHE_E4M3 ? v_at.phase ^ 1 : 0),
                              key + BLOCK_N, work.head_kv, from_before);
                v_at.next();
            }
            from_before = from, from = from_next;
        }
        if (first_warp) take_next();
    }
    if (!first_warp) return;
    mbarrier_wait(barriers.q_empty(0), q_phase ^ 1);
    if (lane != 0) return;
#pragma unroll
    for (int i = 0; i < ROW_GROUPS; ++i) mbarrier_arrive(barriers.q_full(i));
    if (atomicAdd(turns + 1, 1) == static_cast<int>(gridDim.x) - 1) turns[0] = turns[1] = 0;
}

#include "flash_fwd_wgmma_products.cuh"

// ---- what becomes of the output ----
struct Out {
    element_t* o;
    float* lse;
    int heads, seqlen_q, batch_stride, head_stride, row_stride;
    float4* parts;
    unsigned* arrived;  // of each tile whose keys are shared, and of each warp
};
#if SPLITS > 1
// Writes what a warp has of a part of its tile's keys. The last part to end joins all of them, in
// their order, so that equal calls give equal bits. Whether this is it.
__device__ __forceinline__ bool join_parts(const Work& work, int warp, Consumer::Output& out,
                                           Softmax& rows, float exponent, const Out& to) {
    if (work.parts == 1) return true;
    constexpr int WARPS = CONSUMERS / 32, VALUES = COLUMNS_V / 8, WORDS = VALUES + 1;
    const int lane = threadIdx.x % 32, of_warp = work.slot * WARPS + warp;
    // A word of each lane after the other: values of both rows, and then their m and l.
    auto words_of = [&](int part) {
        return to.parts + ((work.slot + part) * WARPS + warp) * (WORDS * 32) + lane;
    };
    float4* own = words_of(work.part);
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        own[i * 32] = make_float4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
    own[VALUES * 32] = make_float4(rows.m[0], rows.l[0], rows.m[1], rows.l[1]);
    __syncwarp();
    int before = 0;
    if (lane == 0) before = count_arrival(to.arrived + of_warp);
    if (__shfl_sync(ALL_LANES, before, 0) != work.parts - 1) return false;
    if (lane == 0) to.arrived[of_warp] = 0;
    __syncwarp();
#pragma unroll 1
    for (int part = 0; part < work.parts; ++part) {
        const float4* words = words_of(part);
        const float4 sums = __ldcg(words + VALUES * 32);
        float mine[2] = {0.f, 0.f}, theirs[2] = {1.f, 1.f};
        if (part == 0) {
            rows.m[0] = sums.x, rows.l[0] = sums.y, rows.m[1] = sums.z, rows.l[1] = sums.w;
#pragma unroll
            for (int i = 0; i < COLUMNS_V / 2; ++i) out[i] = 0.f;
        } else {
            rows.join(0, sums.x, sums.y, exponent, mine[0], theirs[0]);
            rows.join(1, sums.z, sums.w, exponent, mine[1], theirs[1]);
        }
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const float4 x = __ldcg(words + i * 32);
            out[4 * i] = out[4 * i] * mine[0] + x.x * theirs[0];
            out[4 * i + 1] = out[4 * i + 1] * mine[0] + x.y * theirs[0];
            out[4 * i + 2] = out[4 * i + 2] * mine[1] + x.z * theirs[1];
            out[4 * i + 3] = out[4 * i + 3] * mine[1] + x.w * theirs[1];
        }
    }
    return true;
}
#endif
// Words of four columns of a matrix whose rows are those of a quad's lanes become those of four
// rows: lane i has word j of lane j's i-th.
__device__ __forceinline__ void transpose_quad(unsigned (&x)[4]) {
    const int lane = threadIdx.x;
#pragma unroll
    for (int d = 1; d < 4; d *= 2)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int low = d == 1 ? 2 * i : i, high = low + d;
            const bool upper = lane & d;
            const unsigned other = __shfl_xor_sync(ALL_LANES, upper ? x[low] : x[high], d);
            (upper ? x[low] : x[high]) = other;
        }
}
// This thread's two rows, `row` of the warpgroup's 64 and 8 further. A lane stores 16 bytes of a
// row, and the quad 64.
__device__ __forceinline__ void store_rows(const Consumer& self, const Work& work,
                                           const Consumer::Output& out, Softmax& rows,
                                           const Out& to) {
    const int group = self.call.group, tokens = self.call.tokens();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = self.warp % 4 * 16 + self.lane / 4 + 8 * r, token_of_group = row / group,
                  token = self.row_group * tokens + token_of_group,
                  head = work.head_kv * group + row - token_of_group * group;
        const bool is = token_of_group < tokens && token < work.tokens;
#if SINKS
        float of_sink;
        rows.join(r, self.call.scores.sinks[head] * LOG2E / self.call.exponent(), 1.f,
                  self.call.exponent(), rows.share[r], of_sink);
#endif
#if CACHE_E4M3
        const float by = rows.inverse(r) * work.v_scale;
#else
        const float by = rows.inverse(r);
#endif
        element_t* of_row = to.o + static_cast<long long>(work.item) * to.batch_stride +
                            static_cast<long long>(head) * to.head_stride +
                            static_cast<long long>(work.row + token) * to.row_stride +
                            self.lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i += 16) {
            unsigned x[4];
#pragma unroll
            for (int c = 0; c < 4; ++c)
                x[c] = pack(out[i + c * 4 + r * 2] * by, out[i + c * 4 + r * 2 + 1] * by);
            transpose_quad(x);
            if (is) *reinterpret_cast<uint4*>(of_row + i * 2) = make_uint4(x[0], x[1], x[2], x[3]);
        }
        if (LSE && to.lse != nullptr && is && self.lane % 4 == 0)
            to.lse[(static_cast<long long>(work.item) * to.heads + head) * to.seqlen_q + work.row +
                   token] = rows.log_sum_exp(r, self.call.exponent());
    }
}

__device__ __forceinline__ void consume(const Memory& at, const Call& whole, const Out& to,
                                        int warp) {
    const int lane = threadIdx.x % 32, row_group = warp / 4;
    Call call = whole;
    Consumer self{{at, call, warp, lane, 0, row_group}};
    self.own_q = at.q + row_group * Q_BYTES;
    self.q_descriptor = QTile{self.own_q}.descriptor();
    self.k_descriptor = KTile{at.k}.descriptor();
    self.v_descriptor = VTile{at.v}.transposed_descriptor();
    clear_rows<QTile, 64>(self.own_q, 0, call.tokens() * call.group, CLEAR_BARRIER + row_group);
    named_barrier_sync(START_BARRIER, CONSUMERS + 32);
    self.begin_turns();
    unsigned q_phase = 0;
    Ring<PLACES> place;
#pragma unroll 1
    for (;; place.next()) {
        mbarrier_wait(at.barriers.q_full(row_group), q_phase);
        q_phase ^= 1;
        const unsigned told = at.told + place.stage * static_cast<unsigned>(sizeof(Work));
        Consumer::State state;
        auto& [out, rows, p] = state;
        {
            const Work work = Work::load(told);
            if (__any_sync(ALL_LANES, work.tokens == 0)) break;
            const int group = opaque(call.group), tokens = 64 / group, before = row_group * tokens,
                      first_row = warp % 4 * 16;
            auto visible = [&](int row) { return call.visible_keys(work, before + row / group); };
            self.first_tile = work.first, self.end_tile = work.end;
            self.visible[0] = visible(first_row + lane / 4);
            self.visible[1] = visible(first_row + lane / 4 + 8);
            self.all_see = {visible(first_row + 15).first, visible(first_row).end};
            const int last = min(work.tokens, before + tokens) - 1;
            self.group_sees = {0, last < before ? 0 : call.visible_keys(work, last).end};
            call.item.keys.count = work.length;
#if CACHE_E4M3
            call.factor = whole.factor * work.k_scale;
#endif
        }
#pragma unroll
        for (int i = 0; i < COLUMNS_V / 2; ++i) out[i] = 0.f;
        self.attend(state, self.end_tile - self.first_tile);
        rows.l[0] = quad_sum(rows.l[0]), rows.l[1] = quad_sum(rows.l[1]);
#if SPLITS > 1
        if (!join_parts(Work::load(told), warp, out, rows, call.exponent(), to)) continue;
#endif
        store_rows(self, Work::load(told), out, rows, to);
    }
    self.end_turns();
}

// turns: words of a workspace, 0 before a call and after it; parts: another, with SPLITS alone.
// query_begins and query_ends are read with QUERIES alone, left
// and right with WINDOW, softcap and sinks with SOFTCAP and SINKS. group: query heads of a key
// head. seqlen_q: tokens of an item of q; all_tokens: of all. The log-sum-exp is (items, heads,
// seqlen_q). By rows, k and v are addresses; pages: how many there are; page_stride is to the next
// page, slot_stride to the next key in it; scales are read with CACHE_E4M3 alone.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    append_paged_wgmma(const __grid_constant__ TensorMap q,
#if BY_ROWS
                       const unsigned char* k, const unsigned char* v,
#else
                       const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
#endif
                       element_t* o, const int* block_table, const int* seqused_k,
                       const int* query_begins, const int* query_ends, const float* sinks,
                       float* lse, int* turns, float4* parts, int batch, int heads_kv, int group,
                       int seqlen_q, int all_tokens, int max_blocks, int left, int right,
                       float factor, float softcap, int o_batch, int o_head, int o_row,
                       int table_row
#if BY_ROWS
                       ,
                       const float* k_scale, const float* v_scale, int pages, int page_stride,
                       int slot_stride, int head_stride, int scale_batch, int scale_head
#endif
    ) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const Memory at(smem_address(smem));
    const Call call{factor, {softcap, sinks}, group, left, right};
    int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0);  // so that it is known to be uniform
    if (warp >= CONSUMERS / 32) {
        registers_decrease<PRODUCER_REGISTERS>();
        const bool first_warp = warp == CONSUMERS / 32;
        if (!BY_ROWS && !first_warp) return;
        if (first_warp) {
            if (threadIdx.x % 32 == 0) at.barriers.init();
            __syncwarp();
            named_barrier_arrive(START_BARRIER, CONSUMERS + 32);
        }
        const Requests requests{seqused_k, query_begins, query_ends, block_table, batch,
                                heads_kv,  seqlen_q,     all_tokens, max_blocks,  table_row};
#if BY_ROWS
        constexpr long long BYTES = Copies::BYTES;
        const Copies copies{k,
                            v,
                            k_scale,
                            v_scale,
                            pages,
                            scale_batch,
                            scale_head,
                            page_stride * BYTES,
                            slot_stride * BYTES,
                            head_stride * BYTES
#if CACHE_E4M3
                            ,
                            at.rooms
#endif
        };
#else
        const Copies copies{k, v};
#endif
        load_tiles(q, copies, at, call, requests, turns,
                   reinterpret_cast<Work*>(smem + (at.told - at.q)), !BY_ROWS || first_warp);
    } else {
        registers_increase<CONSUMER_REGISTERS>();
        consume(at, call,
                {o, lse, heads_kv * group, seqlen_q, o_batch, o_head, o_row, parts,
                 reinterpret_cast<unsigned*>(turns + 2)},
                warp);
    }
}
#endif
