// flash_fwd_wgmma: fused attention forward on Hopper: TMA into an mbarrier ring, wgmma for both
// products, scores and P never leave registers. sm_90a only. q: (batch, heads, seqlen_q, HEAD_DIM),
// k: (batch, heads_kv, seqlen_k, HEAD_DIM); o as q and v as k, but with HEAD_DIM_V columns, which
// are HEAD_DIM if the launch says no other number. A block has WARPGROUPS consumer
// warpgroups and a producer. WARPGROUPS / KEY_GROUPS of them share a tile of keys, 64 queries each;
// KEY_GROUPS of them share their queries and take tiles of keys in turn, and what they have is
// merged last. Tiles of keys are taken right to left, so that those with a mask come first. With
// SPLITS, as many blocks share queries too. The combine stage joins what they store; or, with
// SPLIT_CLUSTER, they are a cluster, and join through its shared memory. With PACK_GQA, the query
// heads of a key head are one head: its rows are the queries of the first, then of the second, and
// so on, as they lie in memory, so that few queries fill a tile together.
#include "common/hopper/consumer.cuh"
#include "common/hopper/producer.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/launch.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/shared.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/tile/epilogue.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/item_keys.cuh"
#include "common/tile/mask.cuh"
#include "common/tile/mask_list.cuh"
#include "common/tile/pipeline.cuh"
#include "common/tile/scheduler.cuh"
#include "common/tile/scores.cuh"
#include "common/tile/shared_tile.cuh"
#include "common/tile/softmax.cuh"

using namespace attn;

#ifndef HEAD_DIM_V  // the launch says it where it is another
#define HEAD_DIM_V HEAD_DIM
#endif
// 1: tensors have any strides, and the launch says how many heads a batch has and where the output
// lies, for code that serves a model; a sweep times contiguous tensors.
#ifndef STRIDED
#define STRIDED 0
#endif
// Code for models has strides, and writes the log-sum-exp in the calls that have a place for it.
#if STRIDED
#define WITH_LSE (LSE && lse != nullptr)
#else
#define WITH_LSE LSE
#endif
#if STRIDED
#define LAYOUT_PARAMETERS , int heads_of_batch, int o_batch, int o_head, int o_row
#define LAYOUT heads_of_batch, o_batch, o_head, o_row
#define ROWS_PARAMETERS , int seqlen_q LAYOUT_PARAMETERS
#else
#define LAYOUT_PARAMETERS
#define LAYOUT
#define ROWS_PARAMETERS
#endif
using TensorLayout = Layout<STRIDED, HEAD_DIM_V>;
// 1: the queries of an item all see one range of its keys, which each block looks up, and with BITS
// those of it alone whose bits are set.
#ifndef ITEM_KEYS
#define ITEM_KEYS 0
#endif
#ifndef BITS
#define BITS 0
#endif
// 1: V may hold anything, NaN too, beside the keys that an item has, or a sequence, or that a mask
// shows. It is not of a dense window, whose keys are all somebody's.
#ifndef PADDED
#define PADDED (ITEM_KEYS || PACKED)
#endif
#if MASK
#define MASK_PARAMETERS                                                           \
    , const int4 *__restrict__ work, const int2 *__restrict__ bounds,             \
        const unsigned *__restrict__ bits, int *turns_of_list, int tiles_of_list, \
        int heads_of_mask, int words
#define MASK_ARGUMENTS \
    , { work, bounds, bits, turns_of_list, tiles_of_list, heads_of_mask, words }
#elif ITEM_KEYS
#define MASK_PARAMETERS \
    , const ItemKeys *item_keys, const unsigned *bits_of_keys, int heads_of_keys, int words
#define MASK_ARGUMENTS \
    , { item_keys, bits_of_keys, heads_of_keys, words }
#else
#define MASK_PARAMETERS
#define MASK_ARGUMENTS
#endif

// softcap: used with SOFTCAP alone, sinks with SINKS, and the rest with BIAS. bias: (items, heads,
// rows, keys), of which bias_items, _heads and _rows are 0 where it has one for all.
#if SOFTCAP || BIAS || SINKS
#define SCORES_PARAMETERS                                                                     \
    , const __grid_constant__ TensorMap bias, float softcap, const float *__restrict__ sinks, \
        int heads_of_item, int bias_items, int bias_heads, int bias_rows
#define SCORES_ARGUMENTS \
    , { &bias, softcap, sinks, heads_of_item, bias_items, bias_heads, bias_rows }
#else
#define SCORES_PARAMETERS
#define SCORES_ARGUMENTS
#endif

#if STAGE_COMBINE
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    flash_fwd_wgmma_combine(const float* partial, const SumOfSplit* partial_lse,
                            element_t* __restrict__ o, float* __restrict__ lse,
                            int rows ROWS_PARAMETERS) {
#if PDL
    grid_launch_dependents();
    grid_wait();
#endif
    constexpr int CHUNKS = HEAD_DIM_V / 4;
    int at = blockIdx.x * COMBINE_THREADS + threadIdx.x, row = at / CHUNKS, chunk = at % CHUNKS;
    if (row >= rows) return;
    auto row_of_o = [&]() -> long long {
#if STRIDED
        const TensorLayout layout{LAYOUT};
        int head = row / seqlen_q;
        return layout.of_output(row, head, row - head * seqlen_q);
#else
        return static_cast<long long>(row) * HEAD_DIM_V;
#endif
    };
    float whole =
        combine_splits<HEAD_DIM_V>(partial, partial_lse, o, row_of_o, SPLITS, rows, row, chunk);
    if (WITH_LSE && chunk == 0) lse[row] = whole;
}
#elif STAGE_MASK || STAGE_ORDER
#include "flash_fwd_wgmma_scans.cuh"
#else

constexpr int ROW_GROUPS = WARPGROUPS / KEY_GROUPS, BLOCK_M = 64 * ROW_GROUPS;
constexpr int STAGES = NUM_STAGES;
constexpr int CONSUMERS = WARPGROUPS * 128, THREADS = CONSUMERS + PRODUCER_WARPS * 32;
static_assert(ROW_GROUPS * KEY_GROUPS == WARPGROUPS, "KEY_GROUPS must divide WARPGROUPS");
// Otherwise a warpgroup meets stages whose last phase it has not waited for, and takes that for its
// own.
static_assert(NUM_STAGES % KEY_GROUPS == 0, "a stage of the ring is always the same key group's");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0 && BLOCK_N % 16 == 0,
              "TMA takes 16 bytes, wgmma 16 keys at once");
// Columns of a tile of Q and K, and of V and O, since wgmma takes 16 at once. Those from HEAD_DIM
// on are outside the tensors: loads by TMA make them 0, and nothing is stored of them.
constexpr int COLUMNS = (HEAD_DIM + 15) / 16 * 16, COLUMNS_V = (HEAD_DIM_V + 15) / 16 * 16;
// MULTICAST: the blocks of a cluster have neighbouring tiles of queries of one head, and each loads
// its part of every tile of K and V for all. SPLIT_CLUSTER: they are the splits of one tile.
#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif
static_assert(CLUSTER == (SPLIT_CLUSTER ? SPLITS : MULTICAST), "a cluster has one use");
static_assert(MULTICAST == 1 || (!HIDES_LATER && !ORDER && SPLITS == 1),
              "multicast blocks must visit the same keys");
static_assert(SPLITS == 1 || (!PERSISTENT && !ORDER),
              "the splits of a tile are a dimension of the grid");
static_assert(!PINGPONG || (OVERLAP && KEY_GROUPS == 1 && WARPGROUPS > 1),
              "turns are of equal length");
static_assert(!MASK || (!ORDER && KEY_GROUPS == 1 && SPLITS == 1 && MULTICAST == 1 && !PACK_GQA),
              "the list of a mask says the order of its tiles, which one block takes");
static_assert(MASK != 2 || BLOCK_N % 32 == 0, "bits of a mask are in words");
static_assert(!BIAS || (MULTICAST == 1 && !PACK_GQA && !MASK && BLOCK_N % 64 == 0),
              "a bias has panels of 64 keys, of one query head");
static_assert(!SINKS || SPLITS == 1, "a sink counts once");
static_assert(!PACK_GQA || (!STRIDED && !ORDER),
              "packed heads lie one behind the other, and their tiles are of equal length");
// Tiles lie in panels whose rows have SWIZZLE bytes, which TMA swizzles. With head_dim 96 the
// second panel of 128 bytes is half empty: its columns are outside the tensor, so nothing is moved
// for them, but it has room.
using QTile = SharedTile<element_t, 64, COLUMNS, SWIZZLE>;  // of one warpgroup
using KTile = SharedTile<element_t, BLOCK_N, COLUMNS, SWIZZLE>;
using VTile = SharedTile<element_t, BLOCK_N, COLUMNS_V, SWIZZLE>;
using OTile = SharedTile<element_t, 64, COLUMNS_V, SWIZZLE>;
using PTile = SharedTile<element_t, 64, BLOCK_N, 128>;
using BiasTile = PTile;  // beside K, of each 64 rows
constexpr unsigned K_BYTES = KTile::BYTES, V_BYTES = VTile::BYTES, O_BYTES = OTile::BYTES;
// Where the output has no memory of its own it goes over Q, whose memory must hold either.
constexpr bool BESIDE_Q = PERSISTENT && !O_OVER_Q;
constexpr unsigned Q_BYTES = BESIDE_Q || QTile::BYTES > O_BYTES ? QTile::BYTES : O_BYTES;
constexpr unsigned BIAS_BYTES = BIAS ? ROW_GROUPS * BiasTile::BYTES : 0;
// P of a warpgroup in shared memory: one buffer, or one being read and one being written.
constexpr unsigned P_BYTES = PTile::BYTES, P_BUFFERS = OVERLAP ? 2 : 1;
constexpr unsigned ALL_P_BYTES = P_SHARED ? WARPGROUPS * P_BUFFERS * P_BYTES : 0;
// With P over its scores in registers, MAXIMA 2 computes them again from K where it needs them.
constexpr bool SCORES_AGAIN = OVERLAP && !P_SHARED && MAXIMA == 2;
constexpr unsigned ALL_MERGE_BYTES = (KEY_GROUPS - 1) * ROW_GROUPS * MERGE_BYTES<COLUMNS_V>;
// Blocks that take turns at the tiles stage their output beside Q and the ring, which the producer
// already fills for the next tile; others over Q, and merge over the ring. With O_OVER_Q all stage
// it over Q, so that blocks take turns where wide heads leave no other room. What splits send each
// other has room of its own too, since a block may send while the other still multiplies.
using JoinSplits = Join<COLUMNS_V, SPLITS>;
constexpr unsigned STAGED_BYTES = SPLIT_CLUSTER ? ROW_GROUPS * JoinSplits::BYTES
                                  : PERSISTENT  ? !O_OVER_Q * ROW_GROUPS * O_BYTES + ALL_MERGE_BYTES
                                                : 0;
#if PRODUCER_WARPS == 1  // the roles keep the registers that they have at entry
constexpr int PRODUCER_REGISTERS = 0, CONSUMER_REGISTERS = 0;
#endif
constexpr int START_BARRIER = 1, MERGE_BARRIER = 2, MERGED_BARRIER = 3, TURN_BARRIER = 4,
              CLEAR_BARRIER = 8;  // the last two of each warpgroup

// A tile of packed heads takes all keys: it has some head's last query, which sees them all.
#if MASK
using Tiles = MaskedSchedule<BLOCK_N, ROW_GROUPS>;
#else
using Tiles = Schedule<BLOCK_M, BLOCK_N, KEY_GROUPS, SPLITS, SPLIT_CLUSTER, ORDER, (PERSISTENT > 0),
                       PACK_GQA>;
#endif
// The producer takes the next entry of a list when it is ready for it, and tells the consumers,
// beside Q: two places, so that the one of two turns ago is free, whose Q has been released.
constexpr bool TOLD_TURNS = MASK && PERSISTENT;
constexpr unsigned TOLD_BYTES = 16 * (1 + ROW_GROUPS);
using Softmax = OnlineSoftmax<MAXIMA, EXP2_POLY>;
// Every 64 rows of a tile see fewer keys than the next ones if later rows see more. A warpgroup
// passes by the tiles of keys right of its own rows, and of the first that it sees takes half if
// that is all. At (16,32,1024,64), the best without that took 190.8 us, and 175.9 with it
// (docs/tried.md).
constexpr bool UNSEEN_TILES = MASK || (Tiles::LAST_IS_LONGEST && ROW_GROUPS > 1 &&
                                       KEY_GROUPS == 1 && SPLITS == 1),
               HALF_TILES = UNSEEN_TILES && OVERLAP && !P_SHARED && BLOCK_N == 128;

// Barriers: full and empty of each stage of K and of V; of Q, full of each 64 rows, empty of all
// or, with O_OVER_Q, of each 64. With SPLIT_CLUSTER, of each 64 rows: what the other splits have is
// there.
struct Barriers {
    unsigned base;
    __device__ __forceinline__ unsigned k_full(unsigned stage) const { return base + 32 * stage; }
    __device__ __forceinline__ unsigned k_empty(unsigned stage) const {
        return base + 32 * stage + 8;
    }
    __device__ __forceinline__ unsigned v_full(unsigned stage) const {
        return base + 32 * stage + 16;
    }
    __device__ __forceinline__ unsigned v_empty(unsigned stage) const {
        return base + 32 * stage + 24;
    }
    static constexpr int Q_EMPTIES = O_OVER_Q ? ROW_GROUPS : 1;
    __device__ __forceinline__ unsigned q_empty(int group) const {
        return base + 32 * STAGES + (O_OVER_Q ? 8 * group : 0);
    }
    __device__ __forceinline__ unsigned q_full(int group) const {
        return base + 32 * STAGES + 8 * (Q_EMPTIES + group);
    }
    __device__ __forceinline__ unsigned joined(int group) const {
        return q_full(ROW_GROUPS + group);
    }
    __device__ __forceinline__ void init() const {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(k_full(i), 1 + BIAS * ROW_GROUPS);
            mbarrier_init(v_full(i), 1);
            mbarrier_init(k_empty(i), 4 * ROW_GROUPS * MULTICAST);
            mbarrier_init(v_empty(i), 4 * ROW_GROUPS * MULTICAST);
        }
#pragma unroll
        for (int i = 0; i < Q_EMPTIES; ++i) mbarrier_init(q_empty(i), CONSUMERS / 32 / Q_EMPTIES);
#pragma unroll
        for (int i = 0; i < ROW_GROUPS; ++i) mbarrier_init(q_full(i), 1);
#pragma unroll
        for (int i = 0; i < (SPLIT_CLUSTER ? ROW_GROUPS : 0); ++i) {
            mbarrier_init(joined(i), 1);
            mbarrier_expect(joined(i), JoinSplits::BYTES);
        }
        mbarrier_init_fence();
    }
};
// Where everything lies in shared memory.
struct Memory {
    unsigned q, k, v, p, bias, staging, told, seen;
    Barriers barriers;
    __device__ __forceinline__ explicit Memory(unsigned base)
        : q(base),
          k(q + ROW_GROUPS * Q_BYTES),
          v(k + STAGES * K_BYTES),
          p(v + STAGES * V_BYTES),
          bias(p + ALL_P_BYTES),
          staging(bias + STAGES * BIAS_BYTES),
          told(staging + STAGED_BYTES),
          seen(told + 2 * TOLD_TURNS * TOLD_BYTES),
          barriers{seen + (PADDED && MASK ? 64 * WARPGROUPS : 0)} {}
};
#if SOFTCAP || BIAS || SINKS
// What changes scores. scale: of the products, in base e.
struct ScoresOfCall {
    const TensorMap* bias;
    float softcap;
    const float* sinks;
    int heads_of_item, bias_items, bias_heads, bias_rows;
    // Products times `inner` are what tanh takes; times `outer` they are scores, to which a bias is
    // added; and those times `factor` are exponents of 2.
    __device__ __forceinline__ float inner(float factor) const { return factor * LN2 / softcap; }
    __device__ __forceinline__ float outer(float factor) const {
        return SOFTCAP ? softcap : factor * LN2;
    }
    __device__ __forceinline__ float factor_of(float factor) const {
        return BIAS ? LOG2E : SOFTCAP ? softcap * LOG2E : factor;
    }
    // The bias of 64 rows and of a tile of keys. One row of it is a row of the tile.
    __device__ __forceinline__ void load(unsigned target, unsigned barrier, int head, int row,
                                         int key) const {
        int item = head / heads_of_item, of_item = head - item * heads_of_item;
        mbarrier_expect(barrier, BiasTile::PANELS * (bias_rows ? BiasTile::PANEL_BYTES : 128));
#pragma unroll
        for (int i = 0; i < BiasTile::PANELS; ++i)
            tma_load_4d(target + i * BiasTile::PANEL_BYTES, *bias, barrier, key + i * 64,
                        bias_rows * row, bias_heads * of_item, bias_items * item);
    }
};
#endif
// Each role makes its own schedule: what both keep from before they part is spilled by the
// producer, which has 24 registers.
struct Call {
    int heads, queries_per_key_head, heads_per_l2_section;
    int rows, seqlen_k;  // rows of a head: with PACK_GQA of all the query heads that it packs
    float factor;        // of the scores: scale * log2(e)
    TensorLayout layout;
    int queries;  // of one query head
#if MASK
    MaskList list;
#endif
#if ITEM_KEYS
    ItemOfCall item;
    // The same call, of the keys that the block's item has. What wrote them has ended.
    __device__ __forceinline__ Call of_item() const {
        Call own = *this;
        own.item.look_up(blockIdx.y);
        own.seqlen_k = own.item.keys.count;
        return own;
    }
    __device__ __forceinline__ int key_in_memory(int key) const { return item.in_memory(key); }
#else
    __device__ __forceinline__ const Call& of_item() const { return *this; }
    __device__ __forceinline__ int key_in_memory(int key) const { return key; }
#endif
#if SOFTCAP || BIAS || SINKS
    ScoresOfCall scores;
    __device__ __forceinline__ float exponent() const { return scores.factor_of(factor); }
#else
    __device__ __forceinline__ float exponent() const { return factor; }
#endif
    __device__ __forceinline__ KeyRange visible_keys(int row) const {
        return attn::visible_keys(PACK_GQA ? row % queries : row, queries, seqlen_k);
    }
    // Keys that all 16 rows from this one on see. Where a head ends among them, its last query
    // begins last, and the next one's first query ends first.
    __device__ __forceinline__ KeyRange all_see(int row) const {
        bool next = PACK_GQA && row % queries + 15 >= queries;
        int first = HIDES_EARLIER ? visible_keys(next ? queries - 1 : row + 15).first : 0;
        return {first, next ? attn::visible_keys(0, queries, seqlen_k).end : visible_keys(row).end};
    }
    __device__ __forceinline__ Tiles schedule(int rows) const {
#if MASK
        return {list, heads_per_l2_section};
#else
        int tiles_m = ceil_div<MULTICAST * BLOCK_M>(rows) * MULTICAST;
        return {tiles_m, heads, rows, seqlen_k, heads_per_l2_section};
#endif
    }
};

// ---- the producer: one thread loads Q, K and V ----
#if MASK && PERSISTENT
// Entries of the list, taken from its counter. The last one told has a row below 0.
struct ListTurns {
    const Tiles& schedule;
    int4* told;
    int item = blockIdx.x;
    __device__ __forceinline__ MaskedTile next(unsigned place) {
        int4* to = told + place * Tiles::ENTRY;
        if (item >= schedule.items()) {
            to->x = -1;
            return {{-1, 0, 0, 0, 0}, 0, 0, 0};
        }
        int head;
        const int4* entry = schedule.entry_of(item, head);
        int4 first = schedule.with_head(entry, head);
        *to = first;
#pragma unroll
        for (int i = 1; i < Tiles::ENTRY; ++i) to[i] = entry[i];
        item = gridDim.x + atomicAdd(schedule.list.turns, 1);
        return schedule.tile(first);
    }
    __device__ __forceinline__ void end() const {  // the last block to end clears the counters
        int* turns = schedule.list.turns;
        if (atomicAdd(turns + 1, 1) == static_cast<int>(gridDim.x) - 1) turns[0] = turns[1] = 0;
    }
};
#endif
// K of a tile comes before Q of the first, and V of the tile before.
__device__ __forceinline__ void load_tiles(const TensorMap& q, const TensorMap& k,
                                           const TensorMap& v, const Memory& at, const Call& call,
                                           int rank, int4* told) {
    const Barriers& barriers = at.barriers;
    Tiles schedule = call.schedule(opaque(call.rows));
    Ring<STAGES> k_at, v_at;
    unsigned q_phase = 0;
#if MASK && PERSISTENT
    ListTurns turns{schedule, told};
#endif
#pragma unroll 1
    for (int turn = 0;; ++turn) {
#if MASK && PERSISTENT
        auto work = turns.next(q_phase);
#else
        auto work = schedule.of(turn);
        if (PERSISTENT && work.row < 0) break;
#endif
        auto head_kv = call.layout.of_keys(work.head, PACK_GQA ? 1 : call.queries_per_key_head);
#pragma unroll 1
        for (int j = 0; j <= work.tiles; ++j) {
            if (j < work.tiles) {
                mbarrier_wait(barriers.k_empty(k_at.stage), k_at.phase ^ 1);
                load_tile<KTile, MULTICAST>(
                    at.k + k_at.stage * K_BYTES, k, barriers.k_full(k_at.stage),
                    call.key_in_memory(schedule.key_of(j, work)), head_kv, rank);
#if BIAS
#pragma unroll
                for (int i = 0; i < ROW_GROUPS; ++i)
                    call.scores.load(at.bias + k_at.stage * BIAS_BYTES + i * BiasTile::BYTES,
                                     barriers.k_full(k_at.stage), work.head, work.row + i * 64,
                                     schedule.key_of(j, work));
#endif
                k_at.next();
            }
            if (j == 0) {
#pragma unroll
                for (int i = 0; i < ROW_GROUPS; ++i) {
                    if (PERSISTENT && i < Barriers::Q_EMPTIES)
                        mbarrier_wait(barriers.q_empty(i), q_phase ^ 1);
                    if (MASK && work.tiles == 0) mbarrier_arrive(barriers.q_full(i));
                    else
                        load_tile<QTile>(at.q + i * Q_BYTES, q, barriers.q_full(i),
                                         work.row + i * 64, call.layout.of_queries(work.head));
                }
                q_phase ^= 1;
                continue;
            }
            mbarrier_wait(barriers.v_empty(v_at.stage), v_at.phase ^ 1);
            load_tile<VTile, MULTICAST>(at.v + v_at.stage * V_BYTES, v, barriers.v_full(v_at.stage),
                                        call.key_in_memory(schedule.key_of(j - 1, work)), head_kv,
                                        rank);
            v_at.next();
        }
        if (!PERSISTENT || (TOLD_TURNS && work.row < 0)) break;
    }
#if MASK && PERSISTENT
    turns.end();
#endif
}
__device__ __forceinline__ void producer(const TensorMap& q, const TensorMap& k, const TensorMap& v,
                                         const Memory& at, const Call& call, unsigned char* smem) {
    if (threadIdx.x % 32 == 0) at.barriers.init();
    __syncwarp();
    int rank = 0;
    if constexpr (MULTICAST > 1) {
        rank = cluster_rank();
        cluster_arrive();
        cluster_wait();  // the others' copies come to barriers of this block
    } else {
        if (SPLIT_CLUSTER)
            cluster_arrive_relaxed();  // the others' barriers are needed last: nobody waits yet
        named_barrier_arrive(START_BARRIER, CONSUMERS + 32);
    }
    if (threadIdx.x % 32 == 0) {
        if (PDL == 2) grid_launch_dependents();
        if (PDL) grid_wait();
        load_tiles(q, k, v, at, call.of_item(), rank,
                   reinterpret_cast<int4*>(smem + (at.told - at.q)));
        if (PDL == 1) grid_launch_dependents();
    }
    if constexpr (SPLIT_CLUSTER) {
        __syncwarp();
        cluster_wait();
    }
}

#include "flash_fwd_wgmma_products.cuh"

// ---- what becomes of the output ----
// This thread's two rows: `row` and 8 further, of `head`.
struct Place {
    int head, first_row, row;  // first_row: of the warp's 16
    int end;                   // PACKED: of the tile's rows
};
// Of a split that is a block of a cluster: its columns, from all keys.
template <class Join>
__device__ __forceinline__ void store_joined(const Consumer& self, const Place& to,
                                             const float (&out)[COLUMNS_V / 2], Softmax& rows,
                                             element_t* joined, float* lse) {
    float mine[Join::SLICE];
    int rank = cluster_rank();
    Join::run(out, rows, mine, self.at.staging + self.row_group * Join::BYTES,
              self.at.barriers.joined(self.row_group), rank, self.call.exponent());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (to.row + r * 8 >= self.call.rows) continue;
        long long at = static_cast<long long>(to.head) * self.call.rows + to.row + r * 8;
        float by = rows.inverse(r);
        element_t* o = joined + self.call.layout.of_output(at, to.head, to.row + r * 8) +
                       rank * (COLUMNS_V / SPLITS) + self.lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < Join::SLICE; i += 4) {
            if (HEAD_DIM_V < COLUMNS_V && rank * (COLUMNS_V / SPLITS) + i * 2 >= HEAD_DIM_V)
                continue;
            *reinterpret_cast<unsigned*>(o + i * 2) =
                pack(mine[i + r * 2] * by, mine[i + r * 2 + 1] * by);
        }
        if (WITH_LSE && rank == 0 && self.lane % 4 == 0)
            lse[at] = rows.log_sum_exp(r, self.call.exponent());
    }
}
// Of a split whose blocks the combine stage joins: what it would be without the others, and its
// weight.
__device__ __forceinline__ void store_split(const Consumer& self, const Place& to,
                                            const float (&out)[COLUMNS_V / 2], const Softmax& rows,
                                            float* partial, float* lse) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (to.row + r * 8 >= self.call.rows) continue;
        long long at =
            (static_cast<long long>(blockIdx.z) * self.call.heads + to.head) * self.call.rows +
            to.row + r * 8;
        float by = rows.l[r] > 0.f ? 1.f / rows.l[r] : 0.f;
        float2* o = reinterpret_cast<float2*>(partial + at * HEAD_DIM_V) + self.lane % 4;
#pragma unroll
        for (int i = 0; i < HEAD_DIM_V / 8; ++i)
            o[i * 4] = float2{out[i * 4 + r * 2] * by, out[i * 4 + r * 2 + 1] * by};
        if (self.lane % 4 != 0) continue;
#if BIAS
        reinterpret_cast<SumOfSplit*>(lse)[at] = {rows.m[r], rows.l[r]};
#else
        lse[at] = fmaf(rows.m[r], self.call.exponent(), log2f(rows.l[r]));
#endif
    }
}
// Each warp stores its own 16 rows, so that none waits for another: over its own part of Q, which
// no other warp reads, in the layout of a swizzled box.
__device__ __forceinline__ void store_tile(const Consumer& self, const Place& to,
                                           const float (&out)[COLUMNS_V / 2], const Softmax& rows,
                                           const TensorMap& o, float* lse, element_t* of_rows) {
    auto store_lse = [&] {
        if (!WITH_LSE || self.lane % 4 != 0) return;
        const int end = PACKED ? to.end : self.call.rows;
        float* of_row = lse + static_cast<long long>(to.head) * self.call.rows + to.row;
        if (to.row < end) of_row[0] = rows.log_sum_exp(0, self.call.exponent());
        if (to.row + 8 < end) of_row[8] = rows.log_sum_exp(1, self.call.exponent());
    };
    // With P in shared memory, (8,32,512,64) took 42.0 us with the question behind the stores of
    // the output, and 40.8 with it here; with P in registers it costs 0.5 % more here.
    if (P_SHARED) store_lse();
    float low = rows.inverse(0), high = rows.inverse(1);
    unsigned staged = BESIDE_Q ? self.at.staging + self.row_group * O_BYTES : self.own_q;
    if (BESIDE_Q) {
        if (self.lane == 0) tma_store_wait_read<0>();
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < COLUMNS_V / 16; ++i)
        stmatrix_x4(OTile::to_step(staged + self.lane_at_o, i),
                    pack(out[i * 8] * low, out[i * 8 + 1] * low),
                    pack(out[i * 8 + 2] * high, out[i * 8 + 3] * high),
                    pack(out[i * 8 + 4] * low, out[i * 8 + 5] * low),
                    pack(out[i * 8 + 6] * high, out[i * 8 + 7] * high));
    fence_async_proxy();
    __syncwarp();
    const int end = PACKED ? to.end : self.call.rows;
#if PACKED
    const bool boxed = end >= to.first_row + 16;  // otherwise a box would reach the next sequence
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = to.row + r * 8;
        if (boxed || row >= end) continue;
        long long at = static_cast<long long>(to.head) * self.call.rows + row;
        element_t* of_row =
            of_rows + self.call.layout.of_output(at, to.head, row) + self.lane % 4 * 2;
        float by = r ? high : low;
#pragma unroll
        for (int i = 0; i < HEAD_DIM_V; i += 8)
            *reinterpret_cast<unsigned*>(of_row + i) =
                pack(out[i / 2 + r * 2] * by, out[i / 2 + r * 2 + 1] * by);
    }
#else
    constexpr bool boxed = true;
#endif
    if (boxed && self.lane == 0 && to.first_row < end) {
#pragma unroll
        for (int i = 0; i < OTile::PANELS; ++i)
            store_box(o, staged + self.warp % 4 * (16 * SWIZZLE) + i * OTile::PANEL_BYTES,
                      i * OTile::PANEL, to.first_row, self.call.layout.of_queries(to.head));
        tma_store_commit();
    }
    if (!P_SHARED) store_lse();
    if (O_OVER_Q && self.lane == 0) {  // only now is Q's place free
        tma_store_wait_read<0>();
        mbarrier_arrive(self.at.barriers.q_empty(self.row_group));
    }
}

__device__ __forceinline__ void consumer(const TensorMap& o, const Memory& at, const Call& whole,
                                         int warp, unsigned char* smem, float* lse,
                                         void* of_split) {
    int lane = threadIdx.x % 32, key_group = warp / (4 * ROW_GROUPS),
        row_group = warp / 4 % ROW_GROUPS;
    if (ITEM_KEYS && PDL) grid_wait();
    decltype(auto) call = whole.of_item();
    if (!SPLIT_CLUSTER && threadIdx.x == 0) tma_prefetch(o);  // the others are used at once
    Consumer self{{at, call, warp, lane, key_group, row_group}};
    self.own_q = at.q + row_group * Q_BYTES;
    self.q_descriptor = QTile{self.own_q}.descriptor();
    self.k_descriptor = KTile{at.k}.descriptor();
    self.v_descriptor = VTile{at.v}.transposed_descriptor();
    self.lane_at = warp % 4 * 2048 + lane % 16 * 128 + ((lane / 16 ^ lane % 8) << 4);
    self.lane_at_o = SWIZZLE == 128
                         ? self.lane_at
                         : OTile::chunk((warp % 4 * 16 + lane % 16) * SWIZZLE, lane, 0, lane / 16);
    self.own_p = at.p + warp / 4 * P_BUFFERS * P_BYTES, self.p_buffer = 0;
    self.p_descriptor = PTile{self.own_p}.descriptor();
    if constexpr (MULTICAST > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        if (SPLIT_CLUSTER) cluster_arrive_relaxed();
        named_barrier_sync(START_BARRIER, CONSUMERS + 32);
    }
    self.begin_turns();

    self.schedule = call.schedule(call.rows);
    if constexpr (MULTICAST > 1)
        self.remote = cluster_address(at.barriers.base, lane % MULTICAST) - at.barriers.base;
    unsigned q_phase = 0, taken = 0;  // tiles of the ring before this turn
#pragma unroll 1
    for (int turn = 0;; ++turn) {
#if MASK
        int4 entry, record;
        if constexpr (TOLD_TURNS) {
            mbarrier_wait(at.barriers.q_full(row_group), q_phase);
            unsigned told = at.told + q_phase * TOLD_BYTES;
            entry = load_told(told), record = load_told(told + 16 + 16 * row_group);
            q_phase ^= 1;
        } else {
            entry = self.schedule.of_block();
            record = self.schedule.entry_of_block()[1 + row_group];
        }
        entry = uniform(entry);
        MaskedTile work = self.schedule.tile(entry);
        if (PERSISTENT && uniform(work.row < 0)) break;
#if PADDED
        KeyRange all{MASK == 1 ? entry.z : NO_KEY, MASK == 1 ? entry.w : 0};
#pragma unroll
        for (int i = 0; i < (MASK == 1 ? 0 : ROW_GROUPS); ++i) {
            int4 of_group;
            if constexpr (TOLD_TURNS)
                of_group = load_told(at.told + (q_phase ^ 1) * TOLD_BYTES + 16 + 16 * i);
            else of_group = self.schedule.entry_of_block()[1 + i];
            all = {min(all.first, of_group.x), max(all.end, of_group.y)};
        }
        self.keep_block_sees(all);
#endif
#else
        WorkTile work = self.schedule.of(turn);
        if (PERSISTENT && work.row < 0) break;
#endif
        int first_row = work.row + row_group * 64 + warp % 4 * 16;
        Place to{work.head, first_row, first_row + lane / 4, 0};
        self.first_tile = work.first, self.end_tile = work.end;
#if MASK
        to.end = work.row + work.rows;
        self.look_up(call.list, work, uniform(record), to.row);
#else
        self.all_see = call.all_see(first_row);
        self.visible[0] = call.visible_keys(to.row);
        self.visible[1] = call.visible_keys(to.row + 8);
        if (UNSEEN_TILES) self.group_sees = call.visible_keys(work.row + row_group * 64 + 63);
#endif
        Consumer::State state;
        auto& [out, rows, p] = state;
#pragma unroll
        for (int i = 0; i < COLUMNS_V / 2; ++i) out[i] = 0.f;

        if (KEY_GROUPS > 1)
            self.k_at.to(taken + key_group), self.v_at = self.k_at, taken += work.tiles;
        if constexpr (!TOLD_TURNS) {
            mbarrier_wait(at.barriers.q_full(row_group), q_phase);
            q_phase ^= 1;
        }
        if constexpr (MASK) rows.clear();
        else self.load_q_registers();
        self.attend(state, work.tiles);

        rows.l[0] = quad_sum(rows.l[0]), rows.l[1] = quad_sum(rows.l[1]);
        if constexpr (SPLIT_CLUSTER)
            cluster_wait();  // all blocks have begun, and have their barriers: long since
        if constexpr (KEY_GROUPS > 1) {
            unsigned region = PERSISTENT ? at.staging + ROW_GROUPS * O_BYTES : at.k;
            merge<COLUMNS_V, KEY_GROUPS, ROW_GROUPS, MERGE_BARRIER, MERGED_BARRIER>(
                out, rows, smem + region - at.q, call.exponent());
            if (PERSISTENT && key_group > 0) continue;
            if (key_group > 0) break;
        }
#if SINKS
        rows.add_sink(call.scores.sinks[work.head % call.scores.heads_of_item], call.exponent());
#endif
        if constexpr (SPLIT_CLUSTER)
            store_joined<JoinSplits>(self, to, out, rows, static_cast<element_t*>(of_split), lse);
        else if constexpr (SPLITS > 1)
            store_split(self, to, out, rows, static_cast<float*>(of_split), lse);
        else store_tile(self, to, out, rows, o, lse, static_cast<element_t*>(of_split));
        if (!PERSISTENT) break;
    }
    self.end_turns();
    if (lane == 0)
        tma_store_wait_read<0>();  // shared memory must outlive the reads of the last stores
    if constexpr (MULTICAST > 1) {
        __syncwarp();
        cluster_arrive();
        cluster_wait();  // and the others' copies and arrivals
    }
}

// of_split: what a split stores of a row is no box of TMA's. With SPLIT_CLUSTER or PACKED it is the
// output, of element_t, otherwise partial outputs of float. heads, heads_per_l2_section: with
// PACK_GQA, of k and v; seqlen_q is of one query head all the same.
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, BLOCKS_PER_SM)
    flash_fwd_wgmma(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                    const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o,
                    float* __restrict__ lse, void* __restrict__ of_split, int heads,
                    int queries_per_key_head, int heads_per_l2_section, int seqlen_q, int seqlen_k,
                    float factor MASK_PARAMETERS SCORES_PARAMETERS LAYOUT_PARAMETERS) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const Memory at(smem_address(smem));
    int rows = PACK_GQA ? queries_per_key_head * seqlen_q : seqlen_q;
    const Call call{heads,
                    queries_per_key_head,
                    heads_per_l2_section,
                    rows,
                    seqlen_k,
                    factor,
                    {LAYOUT},
                    seqlen_q MASK_ARGUMENTS SCORES_ARGUMENTS};
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // so that it is known to be uniform
    if (warp >= CONSUMERS / 32) {
        if constexpr (PRODUCER_WARPS == 4) registers_decrease<PRODUCER_REGISTERS>();
        if (warp == CONSUMERS / 32) producer(q, k, v, at, call, smem);
    } else {
        if constexpr (PRODUCER_WARPS == 4) registers_increase<CONSUMER_REGISTERS>();
        consumer(o, at, call, warp, smem, lse, of_split);
    }
}
#endif
