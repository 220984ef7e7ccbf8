// flash_mla_wgmma: decoding with latent keys (MLA) over a paged cache on Hopper. sm_90a only. The
// cache has pages of PAGE keys of HEAD_DIM columns, whose first HEAD_DIM_V are the key's value too.
// q: (batch, rows, HEAD_DIM), o: (batch, rows, HEAD_DIM_V): the rows of a request are the queries
// of all its heads. block_table (batch, max_blocks): the pages of a request; seqused_k (batch): its
// keys, of which the last are the queries' own.
//
// A block has 64 rows, a producer, and two consumer warpgroups that split the columns of values and
// O: the first multiplies Q K^T, takes the softmax, and leaves P in shared memory, then both
// multiply their columns of P V. With LAG, the second begins P V of a tile when Q K^T of the next
// one is done, and so fills the tensor cores beside the softmax of that one. P lies over the
// columns of its own tile that are no values, which nothing reads after Q K^T. A tile of keys has
// three parts, which come and are given back one by one: the first warpgroup's values, the
// second's, the rest.
//
// A block takes tiles of a request left to right. With SPLITS, as many blocks share those of each
// request, and with PLANNED, they share those of all requests evenly, as the plan stage says; what
// they store of a part of a request is joined by the combine stage, or with JOIN by the last of
// them.
#define EMPTY_ROWS 1  // the device alone knows which rows see no key
#include "common/hopper/producer.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/decode.cuh"
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

// The rows of a request: the queries of a head lie together, `apart` 1, or the heads of a query do,
// `apart` heads, which is from a query to the next one of the head.
struct Rows {
    int count, heads, queries, apart;
    __device__ __forceinline__ int query(int row) const { return row / apart % queries; }
    // Of a log-sum-exp, (batch, heads, queries).
    __device__ __forceinline__ int of_lse(int row) const {
        return apart == 1 ? row : row % heads * queries + row / heads;
    }
};

constexpr int PAGE = 64;
// What is on the device: lengths, of which those that cannot be are taken for the nearest that can.
struct Lengths {
    const int* seqused_k;
    int max_blocks;  // pages of a request at most
    __device__ __forceinline__ int of(int request) const {
        return min(max(seqused_k[request], 0), max_blocks * PAGE);
    }
};
// What a block has by the plan: tiles from `first` on of `request`, all of the requests between,
// and of request `last` those before `end`. It has none if `last` is less. slot, last_slot: where
// the results of its first request and of its last go among partial ones; -1: it has the whole.
struct __align__(16) Share {
    int request, first, last, end, slot, last_slot, unused[2];
};
constexpr int NO_END = 0x7fffffff;

#if STAGE_PLAN
// By a warp: what each of `parts` blocks has of all tiles, so that all have equally many, if the
// end of each part of a request counts as COST more. Each takes its share of what is left, and
// finishes a request for 1/16 more. first_slot: of each request's partial results, and behind the
// last. It takes from lengths nothing but the balance: any plan is right for any. counters: of
// JOIN, which begin at 0, and so does each call.
extern "C" __global__ void __launch_bounds__(32)
    flash_mla_wgmma_plan(const int* seqused_k, Share* __restrict__ shares,
                         int* __restrict__ first_slot, unsigned* __restrict__ counters, int batch,
                         int max_blocks, int parts, int count) {
    const Lengths lengths{seqused_k, max_blocks};
    const int lane = threadIdx.x;
    for (int i = lane; i < count; i += 32) counters[i] = 0;
    auto tiles_of = [&](int request) {
        return request < batch ? max(ceil_div<BLOCK_N>(lengths.of(request)), 1) : 0;
    };
    int left = 0;
    for (int request = lane; request < batch; request += 32) left += tiles_of(request) + COST;
    left = __reduce_add_sync(0xffffffffu, left);
    int request = 0, tile = 0, slots = 0, most = 0, own = tiles_of(lane);  // of 32 requests
    if (lane == 0) first_slot[0] = 0;
    for (int part = 0; part < parts; ++part) {
        const int quota = (left + parts - part - 1) / (parts - part) + COST,
                  limit = part + 1 < parts ? max(quota + quota / 16, most) : NO_END;
        Share share{request, tile, request - 1, NO_END, tile > 0 ? slots : -1, -1};
        int used = 0;
        while (request < batch && used < quota) {
            const int rest = __shfl_sync(0xffffffffu, own, request % 32) - tile,
                      some = quota - used - COST;
            const bool whole = used + rest + COST <= limit;
            if (!whole && some <= quota / 16) break;
            const bool is_part = tile > 0 || !whole;
            share.last = request;
            if (request > share.request) share.last_slot = is_part ? slots : -1;
            else share.slot = is_part ? slots : -1;
            slots += is_part;
            used += (whole ? rest : some) + COST, left -= whole ? rest + COST : some;
            if (!whole) {
                share.end = tile += some;
                break;
            }
            ++request, tile = 0;
            if (lane == 0) first_slot[request] = slots;
            if (request % 32 == 0) own = tiles_of(request + lane);
        }
        most = max(most, used);
        if (lane == 0) shares[part] = share;
    }
}
#elif STAGE_COMBINE
// A block has rows of one request.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    flash_mla_wgmma_combine(const float* partial, const SumOfSplit* partial_lse,
                            const int* first_slot, element_t* __restrict__ o,
                            float* __restrict__ lse, int count, int heads, int queries, int apart) {
    constexpr int CHUNKS = HEAD_DIM_V / 4;
    const Rows rows{count, heads, queries, apart};
    const int at = blockIdx.x * COMBINE_THREADS + threadIdx.x, row = at / CHUNKS,
              request = blockIdx.y;
    if (row >= count) return;
    const int slot = PLANNED ? first_slot[request] : request * SPLITS,
              splits = PLANNED ? first_slot[request + 1] - slot : SPLITS;
    if (PLANNED && splits == 0) return;
    const long long first = static_cast<long long>(slot) * count,
                    own = static_cast<long long>(request) * count;
    const auto row_of_o = [&] { return (own + row) * HEAD_DIM_V; };
    const float whole =
        combine_splits<HEAD_DIM_V>(partial + first * HEAD_DIM_V, partial_lse + first, o, row_of_o,
                                   splits, count, row, at % CHUNKS);
    if (LSE && at % CHUNKS == 0) lse[own + rows.of_lse(row)] = whole;
}
#else

// They count stored parts, slices of rows that blocks have taken, and blocks that have left.
constexpr int JOIN_COUNTERS = 3;
constexpr int CONSUMERS = 256, THREADS = 384;
constexpr bool PARTIAL = SPLITS > 1 || PLANNED;
static_assert(SPLITS == 1 || !PLANNED, "a plan splits as it needs");
constexpr int PANELS = HEAD_DIM / 64, HALF_PANELS = HEAD_DIM_V / 128, HALF = HEAD_DIM_V / 2;
static_assert(HEAD_DIM % 64 == 0 && HEAD_DIM_V == 512 && HEAD_DIM > HEAD_DIM_V,
              "two halves of 256 values, and columns that are none");
static_assert(PAGE % BLOCK_N == 0 && BLOCK_N % 32 == 0, "a tile lies in a page");
using QTile = SharedTile<element_t, 64, HEAD_DIM, 128>;
using KTile = SharedTile<element_t, BLOCK_N, HEAD_DIM, 128>;
using VTile = SharedTile<element_t, BLOCK_N, HALF, 128>;  // of a warpgroup
using PTile = SharedTile<element_t, 64, BLOCK_N, BLOCK_N * 2>;
using Softmax = OnlineSoftmax<1, 0>;
constexpr unsigned Q_BYTES = QTile::BYTES, K_BYTES = KTile::BYTES, HALF_BYTES = VTile::BYTES;
static_assert(PTile::BYTES <= K_BYTES - 2 * HALF_BYTES, "P lies over what is no value");

// Parts of a tile of keys, in the order in which they lie; they come in the order FIRST, REST,
// SECOND.
enum Part { FIRST, SECOND, REST, PARTS };
__device__ __forceinline__ constexpr int panels_of(int part) {
    return part == REST ? PANELS - 2 * HALF_PANELS : HALF_PANELS;
}
// Named barriers. CLEAR_BARRIER: of a warpgroup, and of the next one the next. P_READY, SCORES: of
// each stage. What waits for P of a stage gives the stage back, so no arrival meets one that has
// not been waited for.
constexpr int END_BARRIER = 1, SCORES_READ = 2, CLEAR_BARRIER = 3, P_READY = 5,
              SCORES = P_READY + STAGES;
static_assert(SCORES + STAGES <= 16, "there are 16");

// Where everything lies in shared memory. factors: of 64 rows, what O is scaled by before P V of a
// stage; then twice, in turns, what O is multiplied by in the end. grew: of each stage, whether a
// warp's rows are scaled. told: of each half, what a thread of it has found.
struct Memory {
    unsigned q, keys, barriers;
    float *factors, *grew;
    int* told;
    __device__ __forceinline__ explicit Memory(unsigned char* smem)
        : q(smem_address(smem)),
          keys(q + Q_BYTES),
          factors(reinterpret_cast<float*>(smem + Q_BYTES + STAGES * K_BYTES)),
          grew(factors + (STAGES + 2) * 64),
          told(reinterpret_cast<int*>(grew + STAGES * 4)) {
        barriers = keys + STAGES * K_BYTES + ((STAGES + 2) * 64 + STAGES * 4 + 4) * 4;
    }
    __device__ __forceinline__ unsigned stage(unsigned stage) const {
        return keys + stage * K_BYTES;
    }
    __device__ __forceinline__ unsigned full(unsigned stage, int part) const {
        return barriers + (stage * PARTS + part) * 16;
    }
    __device__ __forceinline__ unsigned empty(unsigned stage, int part) const {
        return full(stage, part) + 8;
    }
    __device__ __forceinline__ unsigned q_full() const { return full(STAGES, 0); }
    __device__ __forceinline__ unsigned q_empty() const { return q_full() + 8; }
    // Both warpgroups read P, which lies in the rest.
    __device__ __forceinline__ void init() const {
#pragma unroll
        for (int i = 0; i < STAGES * PARTS; ++i)
            mbarrier_init(full(0, i), 1), mbarrier_init(empty(0, i), i % PARTS == REST ? 8 : 4);
        mbarrier_init(q_full(), 1), mbarrier_init(q_empty(), 4);
        mbarrier_init_fence();
    }
};
// lse, partial, partial_lse: written with LSE, and where a request has several blocks.
struct Call {
    Rows rows;
    Lengths lengths;
    const int* block_table;
    int table_row;  // from the pages of a request to those of the next
    const Share* shares;
    float factor;  // of the scores: scale * log2(e)
    element_t* o;
    float *lse, *partial, *partial_lse;
    const int* first_slot;  // with JOIN
    unsigned* counters;     // JOIN_COUNTERS of each request, row tile and half

    // The end of the keys that a row sees, of a request of so many; it may be below 0.
    __device__ __forceinline__ KeyRange visible(int row, int length) const {
        return {0, CAUSAL ? length - rows.queries + 1 + rows.query(row) : length};
    }
};
// Tiles of a request from `begin` on, before `end`, one at least; the last may be behind the last
// key. slot: where the result goes among partial ones; -1: it is the whole. ends: it is the block's
// last.
struct Item {
    int request, length, begin, end, slot;
    bool ends;
};
// Calls body(item) for what this block has.
template <class Body>
__device__ __forceinline__ void for_each_item(const Call& call, Body body) {
    const int block = blockIdx.y;
    const Share share =
        PLANNED ? call.shares[block]
                : Share{static_cast<int>(blockIdx.z), 0, static_cast<int>(blockIdx.z), NO_END};
#pragma unroll 1
    for (int request = share.request; request <= share.last; ++request) {
        const int length = call.lengths.of(request), tiles = max(ceil_div<BLOCK_N>(length), 1);
        Item item{request, length, 0, tiles, -1, request == share.last};
        if (SPLITS > 1) {
            item.slot = request * SPLITS + block;
            item.begin = tiles * block / SPLITS, item.end = tiles * (block + 1) / SPLITS;
        } else if (PLANNED) {
            if (request == share.last)
                item.end = min(tiles, share.end), item.slot = share.last_slot;
            if (request == share.request) item.begin = share.first, item.slot = share.slot;
        }
        if (item.begin >= item.end) item.begin = tiles, item.end = tiles + 1;
        body(item);
        if (!PLANNED) break;
    }
}

// ---- the producer: one thread loads Q of an item, and its tiles in parts ----
struct Producer {
    const Memory& at;
    Ring<STAGES> ring;
    // Nothing is read of no page.
    template <Part P>
    __device__ __forceinline__ void load(const TensorMap& keys, int slot, int page) const {
        const unsigned full = at.full(ring.stage, P);
        mbarrier_wait(at.empty(ring.stage, P), ring.phase ^ 1);
        mbarrier_expect(full, panels_of(P) * KTile::PANEL_BYTES);
        tma_load_4d(at.stage(ring.stage) + P * HALF_BYTES, keys, full, 0, slot, P * HALF_PANELS,
                    page);
    }
};
__device__ __forceinline__ void produce(const TensorMap& q, const TensorMap& values,
                                        const TensorMap& rest, const Memory& at, const Call& call) {
    Producer own{at};
    unsigned q_phase = 0;
    for_each_item(call, [&](const Item& item) {
        const int* table = call.block_table + static_cast<long long>(item.request) * call.table_row;
        auto page_of = [&](int tile) {
            return tile * BLOCK_N < item.length ? table[tile * BLOCK_N / PAGE] : -1;
        };
        int page = page_of(item.begin);
#pragma unroll 1
        for (int j = item.begin; j < item.end; ++j, own.ring.next()) {
            const int next = j + 1 < item.end ? page_of(j + 1) : -1, slot = j * BLOCK_N % PAGE;
            own.load<FIRST>(values, slot, page);
            own.load<REST>(rest, slot, page);
            own.load<SECOND>(values, slot, page);
            page = next;
            if (j > item.begin) continue;
            mbarrier_wait(at.q_empty(), q_phase ^ 1), q_phase ^= 1;
            load_tile<QTile>(at.q, q, at.q_full(), blockIdx.x * 64, item.request);
        }
    });
}

// ---- the consumers ----
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
            const unsigned other = __shfl_xor_sync(0xffffffffu, upper ? x[low] : x[high], d);
            (upper ? x[low] : x[high]) = other;
        }
}

struct Consumer {
    const Memory& at;
    const Call& call;
    int warp, lane;  // the warp of its warpgroup
    Ring<STAGES> ring;
    unsigned turn = 0;  // of the two places for what O is multiplied by in the end
    using Output = float[HALF / 2];

    // This thread's first row, from which the other is 8 further: of the block, and of the request.
    __device__ __forceinline__ int row_of_block() const { return warp * 16 + lane / 4; }
    __device__ __forceinline__ int own_row() const { return blockIdx.x * 64 + row_of_block(); }
    __device__ __forceinline__ float* factors(unsigned which) const {
        return at.factors + which * 64 + row_of_block();
    }
    __device__ __forceinline__ void release(int part) const {
        if (lane == 0) mbarrier_arrive(at.empty(ring.stage, part));
    }
    __device__ __forceinline__ static void clear(Output& out) {
#pragma unroll
        for (int i = 0; i < HALF / 2; ++i) out[i] = 0.f;
    }
    __device__ __forceinline__ static void scale_rows(Output& out, const float (&by)[2]) {
#pragma unroll
        for (int i = 0; i < HALF / 2; ++i) out[i] *= by[i / 2 % 2];
    }
    // s = Q K^T. Nobody of the warpgroup reads the tile for it any more: each warp has products of
    // its own, and P goes over what others multiply.
    __device__ __forceinline__ void multiply_qk(float (&s)[BLOCK_N / 2]) const {
        const unsigned long long q = QTile{at.q}.descriptor(),
                                 k = KTile{at.stage(ring.stage)}.descriptor();
#pragma unroll
        for (int turn = 0; turn < PARTS; ++turn) {
            const int part = (PARTS - turn) % PARTS;  // in the order in which they come
            mbarrier_wait(at.full(ring.stage, part), ring.phase);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < panels_of(part) * 4; ++i) {
                const int step = part * HALF_PANELS * 4 + i;
                Wgmma<BLOCK_N>::ss<IS_BF16, 0>(s, q + QTile::step(step), k + KTile::step(step),
                                               turn + i > 0);
            }
            wgmma_commit();
        }
        wgmma_wait<0>();
        warpgroup_fence_operand(s);
        named_barrier_sync(SCORES_READ, 128);
    }
    // Values behind a request's last key may be NaN, which a weight of 0 would not take away.
    template <Part P>
    __device__ __forceinline__ void clear_tail(int keys) const {
        if (__builtin_expect(keys < BLOCK_N, 0))
            clear_rows<VTile, BLOCK_N>(at.stage(ring.stage) + P * HALF_BYTES, 0, keys,
                                       CLEAR_BARRIER + P);
    }
    // out += P V: P of the first warpgroup is in registers too.
    template <Part P>
    __device__ __forceinline__ void multiply_pv(Output& out, const unsigned* p) const {
        const unsigned stage = at.stage(ring.stage);
        const unsigned long long v = VTile{stage + P * HALF_BYTES}.transposed_descriptor(),
                                 of_p = PTile{stage + REST * HALF_BYTES}.descriptor();
        warpgroup_fence_operand(out);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_N / 16; ++i)
            if constexpr (P == FIRST) Wgmma<HALF>::rs<IS_BF16, 1>(out, p + i * 4, v + i * 128, 1);
            else Wgmma<HALF>::ss<IS_BF16, 1>(out, of_p + PTile::step(i), v + i * 128, 1);
        wgmma_commit();
        wgmma_wait<0>();
        warpgroup_fence_operand(out);
        release(P), release(REST);
    }
    // This warpgroup's columns of an item's rows, times low and high.
    template <Part P>
    __device__ __forceinline__ void store(const Item& item, const Output& out, float low,
                                          float high) const {
        const bool whole = !PARTIAL || item.slot < 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = own_row() + r * 8;
            const float by = r ? high : low;
            const long long at_row =
                static_cast<long long>(whole ? item.request : item.slot) * call.rows.count + row;
            const long long first = at_row * HEAD_DIM_V + P * HALF;
            if (whole) {
                element_t* to = call.o + first + lane % 4 * 8;
#pragma unroll
                for (int i = 0; i < HALF / 2; i += 16) {
                    unsigned x[4];
#pragma unroll
                    for (int c = 0; c < 4; ++c)
                        x[c] = pack(out[i + c * 4 + r * 2] * by, out[i + c * 4 + r * 2 + 1] * by);
                    transpose_quad(x);
                    if (row < call.rows.count)
                        *reinterpret_cast<uint4*>(to + i * 2) = make_uint4(x[0], x[1], x[2], x[3]);
                }
            } else if (row < call.rows.count) {
                float2* to = reinterpret_cast<float2*>(call.partial + first) + lane % 4;
#pragma unroll
                for (int i = 0; i < HALF / 8; ++i)
                    to[i * 4] = float2{out[i * 4 + r * 2] * by, out[i * 4 + r * 2 + 1] * by};
            }
        }
    }
    // With JOIN, the parts of an item's rows become one when all are stored. The last block that
    // comes here joins them, and blocks that have nothing else to do wait a moment to help it: a
    // long request among short ones has 27 parts, of 0.9 MB, for which one SM takes 7 us. Each
    // warpgroup joins its columns.
    template <Part P>
    __device__ __forceinline__ void join(const Item& item) const {
        if (!JOIN || item.slot < 0) return;
        constexpr int POLLS = 12, ROWS_AT_ONCE = 2, CHUNKS = HALF / 4, WAYS = 128 / CHUNKS;
        const int thread = threadIdx.x % 128, slot = call.first_slot[item.request],
                  parts = call.first_slot[item.request + 1] - slot, first = blockIdx.x * 64,
                  end = min(first + 64, call.rows.count);
        unsigned* stored =
            call.counters + ((item.request * gridDim.x + blockIdx.x) * 2 + P) * JOIN_COUNTERS;
        unsigned *taken = stored + 1, *left = stored + 2;
        // What one thread finds, all know.
        auto told = [&](auto find) {
            named_barrier_sync(CLEAR_BARRIER + P, 128);
            if (thread == 0) at.told[P] = find();
            named_barrier_sync(CLEAR_BARRIER + P, 128);
            return at.told[P];
        };
        const bool whole = told([&]() -> int {
            unsigned count = count_arrival(stored) + 1;
#pragma unroll 1
            for (int i = 0; item.ends && count < parts && i < POLLS; ++i) count = arrivals(stored);
            return count == parts;
        });
        while (whole) {
            const int top =
                first + told([&]() -> int { return count_arrival(taken); }) * WAYS * ROWS_AT_ONCE;
            if (top >= end) break;
            join_rows<P, ROWS_AT_ONCE, WAYS>(item, slot, parts, top + thread / CHUNKS, end,
                                             thread % CHUNKS);
        }
        // Nobody reads the counters after the last that leaves.
        if (thread == 0 && count_arrival(left) + 1 == parts) *stored = *taken = *left = 0;
    }
    // Some rows from `top` on, of this thread's 4 columns: all parts of each, many at once.
    template <Part P, int ROWS, int WAYS>
    __device__ __forceinline__ void join_rows(const Item& item, int slot, int parts, int top,
                                              int end, int chunk) const {
        constexpr int PARTS_AT_ONCE = 12;
        float largest[ROWS], weights[ROWS];
        float4 sum[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            largest[r] = minus_infinity(), weights[r] = 0.f, sum[r] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
        for (int part = 0; part < parts; part += PARTS_AT_ONCE) {
            float4 x[PARTS_AT_ONCE][ROWS];
            float reference[PARTS_AT_ONCE][ROWS];
#pragma unroll
            for (int i = 0; i < PARTS_AT_ONCE * ROWS; ++i) {
                const int p = i / ROWS, r = i % ROWS;
                const long long row = static_cast<long long>(slot + part + p) * call.rows.count +
                                      min(top + r * WAYS, end - 1);
                reference[p][r] = minus_infinity(), x[p][r] = {0.f, 0.f, 0.f, 0.f};
                if (part + p >= parts) continue;
                reference[p][r] = __ldcg(call.partial_lse + row);
                x[p][r] = __ldcg(
                    reinterpret_cast<const float4*>(call.partial + row * HEAD_DIM_V + P * HALF) +
                    chunk);
            }
#pragma unroll
            for (int i = 0; i < PARTS_AT_ONCE * ROWS; ++i) {
                const int p = i / ROWS, r = i % ROWS;
                const float most = fmaxf(largest[r], reference[p][r]),
                            from = most == minus_infinity() ? 0.f : most,
                            old = exp2_approx(largest[r] - from),
                            by = exp2_approx(reference[p][r] - from);
                sum[r].x = fmaf(x[p][r].x, by, sum[r].x * old);
                sum[r].y = fmaf(x[p][r].y, by, sum[r].y * old);
                sum[r].z = fmaf(x[p][r].z, by, sum[r].z * old);
                sum[r].w = fmaf(x[p][r].w, by, sum[r].w * old);
                weights[r] = fmaf(weights[r], old, by);
                largest[r] = most;
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = top + r * WAYS;
            if (row >= end) break;
            const long long own = static_cast<long long>(item.request) * call.rows.count;
            const float by = largest[r] == minus_infinity() ? 0.f : 1.f / weights[r];
            *reinterpret_cast<uint2*>(call.o + (own + row) * HEAD_DIM_V + P * HALF + chunk * 4) =
                make_uint2(pack(sum[r].x * by, sum[r].y * by), pack(sum[r].z * by, sum[r].w * by));
            if (LSE && P == FIRST && chunk == 0)
                call.lse[own + call.rows.of_lse(row)] = (largest[r] + log2f(weights[r])) * LN2;
        }
    }
    __device__ __forceinline__ void store_sums(const Item& item, const Softmax& rows) const {
        if (lane % 4 != 0) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = own_row() + r * 8, count = call.rows.count;
            if (row >= count) continue;
            if (PARTIAL && item.slot >= 0)
                call.partial_lse[static_cast<long long>(item.slot) * count + row] =
                    fmaf(rows.m[r], call.factor, log2f(rows.l[r]));
            else if (LSE)
                call.lse[static_cast<long long>(item.request) * count + call.rows.of_lse(row)] =
                    rows.log_sum_exp(r, call.factor);
        }
    }

    __device__ __forceinline__ void first() {
        const unsigned lane_at =
            PTile::chunk((warp * 16 + lane % 16) * PTile::ROW_BYTES, lane, 0, lane / 16);
        unsigned q_phase = 0;
        for_each_item(call, [&](const Item& item) {
            const int low = own_row(), hidden = CAUSAL ? call.rows.queries - 1 : 0;
            Output out;
            Softmax rows;
            clear(out);
            mbarrier_wait(at.q_full(), q_phase), q_phase ^= 1;
            unsigned before = 0;  // the stage of the tile before
#pragma unroll 1
            for (int j = item.begin; j < item.end; ++j, ring.next()) {
                const int key = j * BLOCK_N, keys = item.length - key;
                float s[BLOCK_N / 2], by[2];
                unsigned p[BLOCK_N / 4];
                multiply_qk(s);
                if (j + 1 == item.end && lane == 0) mbarrier_arrive(at.q_empty());
                if (LAG && j > item.begin) named_barrier_arrive(SCORES + before, CONSUMERS);
                if (keys - hidden < BLOCK_N)
                    mask_columns(s, call.visible(low, item.length),
                                 call.visible(low + 8, item.length), key);
                const unsigned to = at.stage(ring.stage) + REST * HALF_BYTES + lane_at;
                const bool outgrown =
                    rows.tile(s, call.factor, j == item.begin, by, [&](int i, const float (&e)[8]) {
#pragma unroll
                        for (int c = 0; c < 4; ++c) p[i / 2 + c] = pack(e[2 * c], e[2 * c + 1]);
                        stmatrix_x4(PTile::to_step(to, i / 8), p[i / 2], p[i / 2 + 1], p[i / 2 + 2],
                                    p[i / 2 + 3]);
                    });
                if (outgrown && lane % 4 == 0)
                    factors(ring.stage)[0] = by[0], factors(ring.stage)[8] = by[1];
                if (lane == 0) at.grew[ring.stage * 4 + warp] = outgrown ? 1.f : 0.f;
                fence_async_proxy();
                named_barrier_arrive(P_READY + ring.stage, CONSUMERS);
                if (outgrown) scale_rows(out, by);
                clear_tail<FIRST>(keys);
                warpgroup_fence_operand(p);
                multiply_pv<FIRST>(out, p);
                before = ring.stage;
            }
            if (LAG) named_barrier_arrive(SCORES + before, CONSUMERS);
            rows.l[0] = quad_sum(rows.l[0]), rows.l[1] = quad_sum(rows.l[1]);
            const float by_low = rows.inverse(0), by_high = rows.inverse(1);
            float* last = factors(STAGES + turn);
            if (lane % 4 == 0) last[0] = by_low, last[8] = by_high;
            turn ^= 1;
            store_sums(item, rows);
            named_barrier_sync(END_BARRIER, CONSUMERS);
            store<FIRST>(item, out, by_low, by_high);
            join<FIRST>(item);
        });
    }
    __device__ __forceinline__ void second() {
        for_each_item(call, [&](const Item& item) {
            Output out;
            clear(out);
#pragma unroll 1
            for (int j = item.begin; j < item.end; ++j, ring.next()) {
                mbarrier_wait(at.full(ring.stage, SECOND), ring.phase);
                named_barrier_sync(P_READY + ring.stage, CONSUMERS);
                if (at.grew[ring.stage * 4 + warp] != 0.f) {
                    const float by[2] = {factors(ring.stage)[0], factors(ring.stage)[8]};
                    scale_rows(out, by);
                }
                clear_tail<SECOND>(item.length - j * BLOCK_N);
                if (LAG) named_barrier_sync(SCORES + ring.stage, CONSUMERS);
                multiply_pv<SECOND>(out, nullptr);
            }
            named_barrier_sync(END_BARRIER, CONSUMERS);
            const float* last = factors(STAGES + turn);
            turn ^= 1;
            store<SECOND>(item, out, last[0], last[8]);
            join<SECOND>(item);
        });
    }
};

// values, rest: of the cache, whose boxes are a part of a tile. shares: read with PLANNED alone.
// heads, queries, apart: see Rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    flash_mla_wgmma(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap values,
                    const __grid_constant__ TensorMap rest, const int* seqused_k,
                    const int* block_table, const Share* shares, element_t* o, float* lse,
                    float* partial, float* partial_lse, const int* first_slot, unsigned* counters,
                    int count, int heads, int queries, int apart, int max_blocks, int table_row,
                    float factor) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const Memory at(smem);
    const Call call{{count, heads, queries, apart},
                    {seqused_k, max_blocks},
                    block_table,
                    table_row,
                    shares,
                    factor,
                    o,
                    lse,
                    partial,
                    partial_lse,
                    first_slot,
                    counters};
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be uniform
    if (threadIdx.x == CONSUMERS) at.init();
    __syncthreads();
    if (warp >= CONSUMERS / 32) {
        registers_decrease<PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS) produce(q, values, rest, at, call);
    } else {
        registers_increase<CONSUMER_REGISTERS>();
        Consumer self{at, call, warp % 4, static_cast<int>(threadIdx.x % 32)};
        if (warp < 4) self.first();
        else self.second();
    }
}
#endif
