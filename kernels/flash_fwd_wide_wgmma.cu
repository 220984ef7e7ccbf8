// flash_fwd_wide_wgmma: fused attention forward on Hopper for HEAD_DIM 264 to 512, whose output of
// 64 queries is half of an SM's registers. sm_90a only. q, o: (batch, heads, seqlen_q, HEAD_DIM),
// k, v: (batch, heads_kv, seqlen_k, HEAD_DIM). A block has 64 queries, a producer, and two consumer
// warpgroups that split the columns of V and O: the first multiplies Q K^T, takes the softmax and
// leaves P in shared memory, then both multiply their columns of P V. With LAG, the second begins
// P V of a tile when Q K^T of the next one is done, and so fills the tensor cores beside the
// softmax of that one. K and V come in pieces of equal room, through one ring, in the order in
// which they are used: a panel of K is BLOCK_N keys of 64 columns, a piece of V is BLOCK_N / 4 keys
// of one warpgroup's columns. The CLUSTER blocks of a cluster have HEAD_MEMBERS query heads of a
// key head, and neighbouring tiles of queries of each; they visit the same keys, and each loads
// every CLUSTER-th piece for all. Tiles of keys are taken right to left. With SPLITS, as many
// blocks share them, and the combine stage joins what they store. With PACK_GQA, the query heads of
// a key head are one head: its rows are the queries of the first, then of the second, and so on, as
// they lie in memory, so that few queries fill a tile together.
#include "common/hopper/producer.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/launch.cuh"
#include "common/ptx/shared.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/tile/epilogue.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"
#include "common/tile/pipeline.cuh"
#include "common/tile/scheduler.cuh"
#include "common/tile/shared_tile.cuh"
#include "common/tile/softmax.cuh"

using namespace attn;

// 1: items have keys of their own range alone; what lies beside it in K and V may be NaN.
#ifndef PADDED
#define PADDED 0
#endif
// 1: tensors have any strides, for code that serves a model; a sweep times contiguous tensors.
#ifndef STRIDED
#define STRIDED 0
#endif
#if STRIDED
#define WITH_LSE (LSE && lse != nullptr)
#define ROWS_PARAMETERS , int seqlen_q, int heads, int o_batch, int o_head, int o_row
#else
#define WITH_LSE LSE
#define ROWS_PARAMETERS
#endif
using TensorLayout = Layout<STRIDED, HEAD_DIM>;

#if STAGE_COMBINE
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    flash_fwd_wide_wgmma_combine(const float* partial, const SumOfSplit* partial_lse,
                                 element_t* __restrict__ o, float* __restrict__ lse,
                                 int rows ROWS_PARAMETERS) {
    constexpr int CHUNKS = HEAD_DIM / 4;
    const int at = blockIdx.x * COMBINE_THREADS + threadIdx.x, row = at / CHUNKS;
    if (row >= rows) return;
    const auto row_of_o = [&]() -> long long {
#if STRIDED
        const int head = row / seqlen_q;
        return TensorLayout{heads, o_batch, o_head, o_row}.of_output(row, head,
                                                                     row - head * seqlen_q);
#else
        return static_cast<long long>(row) * HEAD_DIM;
#endif
    };
    const float whole =
        combine_splits<HEAD_DIM>(partial, partial_lse, o, row_of_o, SPLITS, rows, row, at % CHUNKS);
    if (WITH_LSE && at % CHUNKS == 0) lse[row] = whole;
}
#else

#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

constexpr int PANELS = (HEAD_DIM + 63) / 64, CONSUMERS = 256, THREADS = 384;
constexpr int PIECES = 4;                     // of a tile of V, for each warpgroup
constexpr int KEYS_APART = SPLITS * BLOCK_N;  // from tile to tile of a block
constexpr int PIECE_KEYS = BLOCK_N / PIECES, TILE_MEMBERS = CLUSTER / HEAD_MEMBERS;
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM > 256 && HEAD_DIM <= 512, "two halves of at most 256");
static_assert(PIECE_KEYS % 16 == 0, "a piece is whole steps of wgmma");
static_assert(TILE_MEMBERS * HEAD_MEMBERS == CLUSTER, "HEAD_MEMBERS must divide CLUSTER");
static_assert(SLOTS % CLUSTER == 0, "a slot is always loaded by the same block");
static_assert(CLUSTER == 1 || (SPLITS == 1 && !PACK_GQA), "blocks of a cluster have the same keys");
static_assert(!PACK_GQA || !STRIDED, "packed heads lie one behind the other");
// The columns of V and O of a warpgroup. The first one, which has Q K^T too, takes the fewer. Those
// from HEAD_DIM on are outside the tensors: TMA makes them 0, and stores nothing of them.
template <bool Second>
struct Half {
    static constexpr int FIRST_PANEL = Second ? PANELS / 2 : 0,
                         OWN_PANELS = Second ? PANELS - PANELS / 2 : PANELS / 2,
                         COLUMNS = Second ? (HEAD_DIM - FIRST_PANEL * 64 + 15) / 16 * 16
                                          : OWN_PANELS * 64;
    using Piece = SharedTile<element_t, PIECE_KEYS, COLUMNS, 128>;
    using Output = float[COLUMNS / 2];
};
using QTile = SharedTile<element_t, 64, HEAD_DIM, 128>;
using PTile = SharedTile<element_t, 64, BLOCK_N, 128>;
using Softmax = OnlineSoftmax<1, 0>;
constexpr unsigned SLOT_BYTES = BLOCK_N * 128, P_BYTES = PTile::BYTES;

// Named barriers. Both buffers of P have two: it is written, and it has been read.
constexpr int END_BARRIER = 1, P_READY = 2, P_FREE = 4, SCORES = 6, CLEAR_BARRIER = 8;

// Where everything lies in shared memory. factors: of 64 rows, what each buffer of P has O scaled
// by, then what O is multiplied by in the end. grew: whether a warp's rows are scaled, of each
// buffer.
struct Memory {
    unsigned q, ring, p, barriers;
    float *factors, *grew;
    __device__ __forceinline__ explicit Memory(unsigned char* smem)
        : q(smem_address(smem)),
          ring(q + QTile::BYTES),
          p(ring + SLOTS * SLOT_BYTES),
          barriers(p + 2 * P_BYTES + 1024),
          factors(reinterpret_cast<float*>(smem + (p + 2 * P_BYTES - q))),
          grew(factors + 3 * 64) {}
    __device__ __forceinline__ unsigned full(unsigned slot) const { return barriers + 16 * slot; }
    __device__ __forceinline__ unsigned empty(unsigned slot) const { return full(slot) + 8; }
    __device__ __forceinline__ unsigned q_full() const { return full(SLOTS); }
    __device__ __forceinline__ void init() const {
#pragma unroll
        for (int i = 0; i < SLOTS; ++i)
            mbarrier_init(full(i), 1), mbarrier_init(empty(i), 4 * CLUSTER);
        mbarrier_init(q_full(), 1);
        mbarrier_init_fence();
    }
};
// rows: of a head, its queries or, with PACK_GQA, those of the heads that it packs, whose `heads`
// and `group` are of key heads. low, high: with WINDOW, query i sees the keys i + low to i + high
// that there are.
struct Call {
    int heads, group, rows, seqlen_q, seqlen_k, low, high;
    float factor;  // of the scores: scale * log2(e)
    const int2* key_range;
    // The keys that an item of the batch has.
    __device__ __forceinline__ KeyRange keys_of(int head) const {
        if (!PADDED) return {0, seqlen_k};
        const int2 range = key_range[head / heads];
        return {range.x, range.y};
    }
    __device__ __forceinline__ KeyRange visible(int row, const KeyRange& keys) const {
        const int query = PACK_GQA ? row % seqlen_q : row;
        if (WINDOW) return {max(keys.first, query + low), min(keys.end, query + high + 1)};
        return visible_keys(query, seqlen_q, seqlen_k);
    }
    // The first key that any of the rows from `row` on, before `end`, sees, and the end of those
    // that any does; or, with All, of those that all of them do.
    template <bool All>
    __device__ __forceinline__ KeyRange of_rows(int row, int end, const KeyRange& keys) const {
        const int first = PACK_GQA ? 0 : row, last = PACK_GQA ? seqlen_q - 1 : end - 1;
        return {visible(All ? last : first, keys).first, visible(All ? first : last, keys).end};
    }
};
// A head of q or k as copies take it; heads: of an item.
__device__ __forceinline__ TensorLayout::Head in_maps(int head, int heads) {
#if STRIDED
    return TensorLayout{heads}.of_queries(head);
#else
    return head;
#endif
}
// The block's tile of queries, and the keys of its cluster. The grid is (clusters of a section of
// heads, or splits of a tile, tiles of queries, sections); the last tiles, which a causal mask
// makes long, come first. A block without a head of its own has rows behind the last.
struct Work {
    // first_key: of the tile that comes first; the next ones lie KEYS_APART left of each other. A
    // split without a tile takes one behind the last key.
    int head, head_kv, row, first_key, tiles;
    KeyRange keys;
    __device__ __forceinline__ explicit Work(const Call& call) {
        const int member = blockIdx.x % CLUSTER, split = SPLITS > 1 ? blockIdx.x : 0;
        const int cluster =
            SPLITS > 1 ? blockIdx.z : (blockIdx.z * gridDim.x + blockIdx.x) / CLUSTER;
        const int of_key_head = (call.group + HEAD_MEMBERS - 1) / HEAD_MEMBERS;
        head_kv = cluster / of_key_head;
        const int in_group = cluster % of_key_head * HEAD_MEMBERS + member % HEAD_MEMBERS;
        head = head_kv * call.group + min(in_group, call.group - 1);
        const int first_row = (gridDim.y - 1 - blockIdx.y) * (TILE_MEMBERS * 64),
                  end_row = min(first_row + TILE_MEMBERS * 64, call.rows);
        row = in_group < call.group ? first_row + member / HEAD_MEMBERS * 64 : call.rows;
        keys = call.keys_of(head);
        const KeyRange seen = call.of_rows<false>(first_row, end_row, keys);
        const int first = max(0, seen.first) / BLOCK_N, end = ceil_div<BLOCK_N>(seen.end);
        tiles = EMPTY_ROWS ? max(end - first, 1) : end - first;
        first_key = (first + tiles - 1) * BLOCK_N;
        if (SPLITS > 1) {
            first_key = split < tiles ? first_key - split * BLOCK_N : call.seqlen_k;
            tiles = max(ceil_div<SPLITS>(tiles - split), 1);
        }
    }
};

// ---- the producer: one thread loads Q, and the pieces of K and V in order ----
struct Producer {
    const Memory& at;
    int rank;
    TensorLayout::Head head_kv;
    Ring<SLOTS> ring;
    // Panels of `Rows` rows from `key` on, into the next slot.
    template <int Rows, int Panels>
    __device__ __forceinline__ void load(const TensorMap& map, int panel, int key) {
        mbarrier_wait(at.empty(ring.stage), ring.phase ^ 1);
        const unsigned to = at.ring + ring.stage * SLOT_BYTES, full = at.full(ring.stage);
        mbarrier_expect(full, Panels * Rows * 128);
        constexpr unsigned short ALL = (1 << CLUSTER) - 1;
        const bool own = CLUSTER == 1 || ring.stage % CLUSTER == rank;
#if HEAD_DIM % 64 == 0 && !STRIDED  // maps have a dimension of whole panels, not one of items
        if (CLUSTER == 1) tma_load_4d(to, map, full, 0, key, panel, head_kv);
        else if (own) tma_load_multicast_4d(to, map, full, 0, key, panel, head_kv, ALL);
#else
        if (own) {
#pragma unroll
            for (int i = 0; i < Panels; ++i) {
                const unsigned to_panel = to + i * Rows * 128;
                if (CLUSTER == 1) load_box(to_panel, map, full, (panel + i) * 64, key, head_kv);
                else load_box_multicast(to_panel, map, full, (panel + i) * 64, key, head_kv, ALL);
            }
        }
#endif
        ring.next();
    }
    __device__ __forceinline__ void load_k(const TensorMap& k, int key) {
#pragma unroll 1
        for (int i = 0; i < PANELS; ++i) load<BLOCK_N, 1>(k, i, key);
    }
    template <bool Second>
    __device__ __forceinline__ void load_piece(const TensorMap& v, int key, int i) {
        load<PIECE_KEYS, Half<Second>::OWN_PANELS>(v, Half<Second>::FIRST_PANEL,
                                                   key + i * PIECE_KEYS);
    }
    template <bool Second>
    __device__ __forceinline__ void load_half(const TensorMap& v, int key) {
#pragma unroll 1
        for (int i = 0; i < PIECES; ++i) load_piece<Second>(v, key, i);
    }
};
__device__ __forceinline__ void produce(const TensorMap& q, const TensorMap& k,
                                        const TensorMap& v_first, const TensorMap& v_second,
                                        const Memory& at, const Call& call) {
    const Work work(call);
    load_tile<QTile>(at.q, q, at.q_full(), work.row, in_maps(work.head, call.heads));
    Producer own{at, static_cast<int>(blockIdx.x % CLUSTER),
                 in_maps(work.head_kv, call.heads / call.group)};
    int key = work.first_key;
#pragma unroll 1
    for (int j = 0; j < work.tiles; ++j, key -= KEYS_APART) {
        own.load_k(k, key);
        if (LAG) {
            if (j > 0) own.load_half<true>(v_second, key + KEYS_APART);
            own.load_half<false>(v_first, key);
        } else {
#pragma unroll 1
            for (int i = 0; i < PIECES; ++i)
                own.load_piece<false>(v_first, key, i), own.load_piece<true>(v_second, key, i);
        }
    }
    if (LAG) own.load_half<true>(v_second, key + KEYS_APART);
}

// ---- the consumers ----
// A warpgroup's way through the ring, of whose slots it releases its own. A parity says nothing of
// a phase two ahead: who waits for a piece must know that its slot's piece before has come. So the
// first warpgroup waits for all pieces in order, also for the second's, and only then lets the
// second take these (P_READY, or with LAG SCORES).
struct Walk {
    const Memory& at;
    int lane;
    unsigned remote = 0;  // from a barrier to that of the block that this lane tells
    Ring<SLOTS> ring;
    unsigned oldest = 0;  // slot that this warpgroup has not released

    __device__ __forceinline__ void wait() const { mbarrier_wait(at.full(ring.stage), ring.phase); }
    // For Count pieces from the next one on, of every Step.
    template <int Count, int Step = 1>
    __device__ __forceinline__ void wait_ahead() const {
        Ring<SLOTS> next = ring;
#pragma unroll
        for (int i = 0; i < Count; ++i)
            mbarrier_wait(at.full(next.stage), next.phase), next.skip<Step>();
    }
    // The oldest slot; this warpgroup's next one lies Step further.
    template <int Step>
    __device__ __forceinline__ void release() {
        if constexpr (CLUSTER > 1) mbarrier_arrive_remote(remote + at.empty(oldest), lane, CLUSTER);
        else if (lane == 0) mbarrier_arrive(at.empty(oldest));
        pass<Step>();
    }
    template <int Count>
    __device__ __forceinline__ void pass() {
        oldest += Count;
        if (oldest >= SLOTS) oldest -= SLOTS;
    }
    // Count pieces of the other warpgroup.
    template <int Count>
    __device__ __forceinline__ void skip() {
        ring.skip<Count>(), pass<Count>();
    }
    // From the ring's descriptor to the next piece.
    __device__ __forceinline__ unsigned long long piece() const {
        return ring.stage * (SLOT_BYTES / 16);
    }
};
// Slots from a piece of V of a warpgroup to its next one.
constexpr int STEP = LAG ? 1 : 2;

struct Consumer {
    const Memory& at;
    const Call& call;
    const Work& work;
    int warp, lane;
    Walk walk;
    unsigned buffer = 0;  // of P
    // Of this thread's first row, in the first buffer: the second one is 64 further.
    float* factors;
    float* grew;  // of this warp's rows, in the first buffer: 4 further in the second
    // stmatrix: this lane's row and 16-byte chunk of the warp's 16 rows of a panel.
    unsigned lane_at;

    __device__ __forceinline__ Consumer(const Memory& at, const Call& call, const Work& work,
                                        int warp)
        : at(at), call(call), work(work), warp(warp % 4), lane(threadIdx.x % 32), walk{at, lane} {
        factors = at.factors + this->warp * 16 + lane / 4, grew = at.grew + this->warp;
        lane_at = PTile::chunk(this->warp * 2048 + lane % 16 * 128, lane, 0, lane / 16);
        if (CLUSTER > 1) walk.remote = cluster_address(at.barriers, lane % CLUSTER) - at.barriers;
    }
    // This thread's first row, from which the other is 8 further; and, of all rows of all splits,
    // the number of such a one of this block's.
    __device__ __forceinline__ int own_row() const { return work.row + warp * 16 + lane / 4; }
    __device__ __forceinline__ long long of_split(int r) const {
        return (static_cast<long long>(blockIdx.x) * gridDim.z + work.head) * call.rows +
               own_row() + r * 8;
    }
    __device__ __forceinline__ int key(int j) const { return work.first_key - j * KEYS_APART; }
    template <int N>
    __device__ __forceinline__ static void scale_rows(float (&out)[N], const float (&by)[2]) {
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] *= by[i / 2 % 2];
    }
    // s = Q K^T.
    __device__ __forceinline__ void multiply_qk(float (&s)[BLOCK_N / 2],
                                                unsigned long long q_descriptor,
                                                unsigned long long k_descriptor) {
#pragma unroll
        for (int p = 0; p < PANELS; ++p) {
            walk.wait();
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4 && p * 64 + i * 16 < HEAD_DIM; ++i)
                Wgmma<BLOCK_N>::ss<IS_BF16, 0>(s, q_descriptor + QTile::step(4 * p + i),
                                               k_descriptor + walk.piece() + 2 * i, p + i > 0);
            wgmma_commit();
            if (p > 0) wgmma_wait<1>(), walk.release<1>();
            walk.ring.next();
        }
        wgmma_wait<0>(), walk.release<1>();
        warpgroup_fence_operand(s);
    }
    // V of keys beside those of the item may be NaN, which a weight of 0 would not take away.
    template <bool Second>
    __device__ __forceinline__ void clear_pieces(int key) const {
#if PADDED
        if (__builtin_expect(key >= work.keys.first && key + BLOCK_N <= work.keys.end, 1)) return;
        walk.wait_ahead<PIECES, STEP>();
        Ring<SLOTS> next = walk.ring;
#pragma unroll 1
        for (int i = 0; i < PIECES; ++i, key += PIECE_KEYS, next.skip<STEP>())
            clear_rows<typename Half<Second>::Piece, PIECE_KEYS>(
                at.ring + next.stage * SLOT_BYTES, work.keys.first - key, work.keys.end - key,
                CLEAR_BARRIER + Second);
#endif
    }
    // out += P V of a tile: P of the first warpgroup is in registers too.
    template <bool Second>
    __device__ __forceinline__ void multiply_pv(typename Half<Second>::Output& out,
                                                const unsigned* p, int key) {
        using Product = Wgmma<Half<Second>::COLUMNS>;
        clear_pieces<Second>(key);
        const unsigned long long v_descriptor =
            typename Half<Second>::Piece{at.ring}.transposed_descriptor();
        const unsigned long long p_descriptor = PTile{at.p + buffer * P_BYTES}.descriptor();
#pragma unroll
        for (int q = 0; q < PIECES; ++q) {
            walk.wait();
            warpgroup_fence_operand(out);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < PIECE_KEYS / 16; ++i) {
                const int step = q * (PIECE_KEYS / 16) + i;
                const unsigned long long v = v_descriptor + walk.piece() + i * 128;
                if constexpr (Second)
                    Product::template ss<IS_BF16, 1>(out, p_descriptor + PTile::step(step), v, 1);
                else Product::template rs<IS_BF16, 1>(out, p + step * 4, v, 1);
            }
            wgmma_commit();
            walk.ring.skip<STEP>();
            if (q > 0) wgmma_wait<1>(), walk.release<STEP>();
        }
        wgmma_wait<0>();
        warpgroup_fence_operand(out);
        walk.release<STEP>();
    }
    // Of a split: what it would be without the others.
    template <bool Second>
    __device__ __forceinline__ void store_split(float* partial,
                                                const typename Half<Second>::Output& out, float low,
                                                float high) const {
        constexpr int FIRST = Half<Second>::FIRST_PANEL * 64;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (own_row() + r * 8 >= call.rows) continue;
            const float by = r ? high : low;
            float2* o =
                reinterpret_cast<float2*>(partial + of_split(r) * HEAD_DIM + FIRST) + lane % 4;
#pragma unroll
            for (int i = 0; i < Half<Second>::COLUMNS / 8 && FIRST + i * 8 < HEAD_DIM; ++i)
                o[i * 4] = float2{out[i * 4 + r * 2] * by, out[i * 4 + r * 2 + 1] * by};
        }
    }
    // Each warp stores its own 16 rows over Q, in the layout of a swizzled box.
    template <bool Second>
    __device__ __forceinline__ void store(const TensorMap& o,
                                          const typename Half<Second>::Output& out, float low,
                                          float high) const {
        using Own = Half<Second>;
        const unsigned to = at.q + Own::FIRST_PANEL * QTile::PANEL_BYTES;
#pragma unroll
        for (int i = 0; i < Own::COLUMNS / 16; ++i)
            stmatrix_x4(QTile::to_step(to + lane_at, i),
                        pack(out[i * 8] * low, out[i * 8 + 1] * low),
                        pack(out[i * 8 + 2] * high, out[i * 8 + 3] * high),
                        pack(out[i * 8 + 4] * low, out[i * 8 + 5] * low),
                        pack(out[i * 8 + 6] * high, out[i * 8 + 7] * high));
        fence_async_proxy();
        __syncwarp();
        const int row = work.row + warp * 16;
        if (lane == 0 && row < call.rows) {
            const TensorLayout::Head head = in_maps(work.head, call.heads);
#pragma unroll
            for (int i = 0; i < Own::OWN_PANELS; ++i)
                store_box(o, to + i * QTile::PANEL_BYTES + warp * 2048, (Own::FIRST_PANEL + i) * 64,
                          row, head);
            tma_store_commit();
            tma_store_wait_read<0>();  // shared memory must outlive the reads
        }
    }

    __device__ __forceinline__ void first(const TensorMap& o, float* lse, float* partial,
                                          float* partial_lse) {
        const int row = work.row + warp * 16, own = own_row();
        const KeyRange low = call.visible(own, work.keys), high = call.visible(own + 8, work.keys);
        const KeyRange all = call.of_rows<true>(row, row + 16, work.keys);
        const unsigned long long q_descriptor = QTile{at.q}.descriptor(),
                                 k_descriptor = wgmma_descriptor<128>(at.ring, 1024);
        Half<false>::Output out;
#pragma unroll
        for (int i = 0; i < Half<false>::COLUMNS / 2; ++i) out[i] = 0.f;
        Softmax rows;
        mbarrier_wait(at.q_full(), 0);
#pragma unroll 1
        for (int j = 0; j < work.tiles; ++j, buffer ^= 1) {
            float s[BLOCK_N / 2], by[2];
            unsigned p[BLOCK_N / 4];
            multiply_qk(s, q_descriptor, k_descriptor);
            if (j >= 2) named_barrier_sync(P_FREE + buffer, CONSUMERS);
            // Behind P_FREE, so that the arrival before this one has been met.
            if (LAG && j > 0) {
                walk.wait_ahead<PIECES>(), walk.skip<PIECES>();
                named_barrier_arrive(SCORES, CONSUMERS);
            }
            if (key(j) + BLOCK_N > all.end || (HIDES_EARLIER && key(j) < all.first))
                mask_columns(s, low, high, key(j));
            const unsigned to = at.p + buffer * P_BYTES + lane_at;
            const bool outgrown =
                rows.tile(s, call.factor, j == 0, by, [&](int i, const float (&e)[8]) {
#pragma unroll
                    for (int c = 0; c < 4; ++c) p[i / 2 + c] = pack(e[2 * c], e[2 * c + 1]);
                    stmatrix_x4(PTile::to_step(to, i / 8), p[i / 2], p[i / 2 + 1], p[i / 2 + 2],
                                p[i / 2 + 3]);
                });
            if (outgrown && lane % 4 == 0)
                factors[buffer * 64] = by[0], factors[buffer * 64 + 8] = by[1];
            if (lane == 0) grew[buffer * 4] = outgrown ? 1.f : 0.f;
            fence_async_proxy();
            if (!LAG) walk.wait_ahead<2 * PIECES>();
            named_barrier_arrive(P_READY + buffer, CONSUMERS);
            if (outgrown) scale_rows(out, by);
            warpgroup_fence_operand(p);
            multiply_pv<false>(out, p, key(j));
        }
        if (LAG) {
            if (work.tiles > 1) named_barrier_sync(P_FREE + buffer, CONSUMERS);
            named_barrier_arrive(SCORES, CONSUMERS);
        }
        rows.l[0] = quad_sum(rows.l[0]), rows.l[1] = quad_sum(rows.l[1]);
        float by_low = rows.inverse(0), by_high = rows.inverse(1);
        if (SPLITS > 1)  // one may have no key of a row
            by_low = rows.l[0] > 0.f ? by_low : 0.f, by_high = rows.l[1] > 0.f ? by_high : 0.f;
        if (lane % 4 == 0) factors[128] = by_low, factors[136] = by_high;
        named_barrier_sync(END_BARRIER, CONSUMERS);  // behind it nobody reads Q
        if constexpr (SPLITS > 1) store_split<false>(partial, out, by_low, by_high);
        else store<false>(o, out, by_low, by_high);
        if (lane % 4 != 0) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (own + r * 8 >= call.rows) continue;
            if (SPLITS > 1)
                partial_lse[of_split(r)] = fmaf(rows.m[r], call.factor, log2f(rows.l[r]));
            else if (WITH_LSE)
                lse[static_cast<long long>(work.head) * call.rows + own + r * 8] =
                    rows.log_sum_exp(r, call.factor);
        }
    }
    __device__ __forceinline__ void second(const TensorMap& o, float* partial) {
        Half<true>::Output out;
#pragma unroll
        for (int i = 0; i < Half<true>::COLUMNS / 2; ++i) out[i] = 0.f;
        // Before its first piece come K and V of the first warpgroup, with LAG K of two tiles.
        if (LAG) walk.skip<PANELS>(), walk.skip<PIECES>();
        else walk.skip<1>();
#pragma unroll 1
        for (int j = 0; j < work.tiles; ++j, buffer ^= 1) {
            if (!LAG || j + 1 < work.tiles) walk.skip<PANELS>();
            named_barrier_sync(P_READY + buffer, CONSUMERS);
            if (grew[buffer * 4] != 0.f) {
                const float by[2] = {factors[buffer * 64], factors[buffer * 64 + 8]};
                scale_rows(out, by);
            }
            if (LAG) named_barrier_sync(SCORES, CONSUMERS);
            multiply_pv<true>(out, nullptr, key(j));
            if (LAG && j + 1 < work.tiles) walk.skip<PIECES>();
            if (j + 2 < work.tiles + LAG) named_barrier_arrive(P_FREE + buffer, CONSUMERS);
        }
        named_barrier_sync(END_BARRIER, CONSUMERS);
        if constexpr (SPLITS > 1) store_split<true>(partial, out, factors[128], factors[136]);
        else store<true>(o, out, factors[128], factors[136]);
    }
};

// heads: of an item; group: query heads of a key head; with PACK_GQA these are key heads, and 1.
// key_range: read with PADDED alone; partial, partial_lse: written with SPLITS alone.
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1)
    flash_fwd_wide_wgmma(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                         const __grid_constant__ TensorMap v_first,
                         const __grid_constant__ TensorMap v_second,
                         const __grid_constant__ TensorMap o, float* __restrict__ lse,
                         float* __restrict__ partial, float* __restrict__ partial_lse,
                         const int2* __restrict__ key_range, int heads, int group, int rows,
                         int seqlen_q, int seqlen_k, int low, int high, float factor) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const Memory at(smem);
    const Call call{heads, group, rows, seqlen_q, seqlen_k, low, high, factor, key_range};
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be uniform
    if (threadIdx.x == CONSUMERS) at.init();
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive(), cluster_wait();  // copies come to barriers of all blocks
    if (warp >= CONSUMERS / 32) {
        registers_decrease<PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS) produce(q, k, v_first, v_second, at, call);
    } else {
        registers_increase<CONSUMER_REGISTERS>();
        const Work work(call);
        Consumer self(at, call, work, warp);
        if (warp < 4) self.first(o, lse, partial, partial_lse);
        else self.second(o, partial);
    }
    if (CLUSTER > 1) {
        __syncwarp();
        cluster_arrive(), cluster_wait();  // others' copies and arrivals have come
    }
}
#endif
