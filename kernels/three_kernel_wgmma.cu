// three_kernel_wgmma: scores = Q K^T, softmax, O = P V in three launches that hand the scores over
// through L2; both products by TMA, mbarriers and warp-specialised wgmma. sm_90a only.
// q, o: (batch, heads, seqlen_q, HEAD_DIM); k, v: (batch, heads_kv, seqlen_k, HEAD_DIM).
// scores: (batch * heads, seqlen_q, stride) with stride = seqlen_k rounded up to 8 elements.
// STATS says who does the softmax, and so how often the scores cross L2 (33.5 MB at (1, 16, 1024,
// 64)):
//   0  softmax, in place: written, read, written, read.
//   1  qk: it stores p = 2^(s - m) with m the largest of 128 keys, and m and the sum of p beside;
//   softmax
//      turns these into one factor per 128 keys, by which pv scales what it adds. Written, read.
//   2  pv: qk stores s and m, softmax joins the m of a row, pv reads 2^(s - m) through registers as
//   its
//      A operand, sums it and divides at the end. Written, read.
//   3  qk as with 1, and pv joins the m and sums of its rows itself: two launches. Written, read.
// On an H200, L2 takes 4.5 TB/s of writes and gives 8.3 of reads (results/h200/limits.json), so
// writing these scores is 7.4 us, softmax 8.8 (both ways at 7.6 TB/s), and pv, whose tiles read V
// again, 6.0. Recorded alone, with their launches: qk 10.0 with STATS 0 and 11.2 with 3,
// softmax 11.3, pv 7.3 and 8.2 (results/h200/three_kernel_h200). What the stages owe each other: a
// row i has visible_keys(i) keys. A warpgroup of pv multiplies tiles of at most UNIT x UNIT, so
// softmax (STATS 0) or qk (1, 3) write zeros up to extent_of(i). With STATS 2 pv masks.
#include "common/ptx/barrier.cuh"
#include "common/ptx/cache.cuh"
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

#if STAGE_QK || STAGE_PV
#if STAGE_QK
constexpr int BLOCK_M = QK_BLOCK_M, BLOCK_N = QK_BLOCK_N, BLOCK_K = QK_BLOCK_K;
constexpr int WARPGROUPS = QK_WARPGROUPS, STAGES = QK_STAGES;
static_assert(HEAD_DIM % BLOCK_K == 0, "QK_BLOCK_K must divide HEAD_DIM");
static_assert(STATS == 0 || BLOCK_N % UNIT == 0, "a maximum is of UNIT keys of one tile");
#else
constexpr int BLOCK_M = PV_BLOCK_M, BLOCK_N = PV_BLOCK_N, BLOCK_K = PV_BLOCK_K;
constexpr int WARPGROUPS = PV_WARPGROUPS, STAGES = PV_STAGES;
static_assert(HEAD_DIM % BLOCK_N == 0, "PV_BLOCK_N must divide HEAD_DIM");
static_assert(UNIT % BLOCK_K == 0, "a step of pv has one factor");
#endif
constexpr int WARPS = WARPGROUPS * 4, THREADS = WARPS * 32 + 32;  // the last warp only copies
constexpr int FRAGMENTS = BLOCK_M / (64 * WARPGROUPS);            // 64-row pieces of a warpgroup
static_assert(FRAGMENTS * 64 * WARPGROUPS == BLOCK_M, "a warpgroup computes 64 rows at once");
static_assert(FRAGMENTS * 64 <= UNIT, "zeros are written for a warpgroup of UNIT rows");
using ATile = SharedTile<element_t, BLOCK_M, BLOCK_K>;
constexpr int PANEL = ATile::PANEL, PANELS = ATile::PANELS, SWIZZLE = ATile::ROW_BYTES;
constexpr unsigned A_BYTES = BLOCK_M * BLOCK_K * 2, B_BYTES = BLOCK_N * BLOCK_K * 2;
#if CLUSTER > 1
#define CLUSTER_OF_BLOCKS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_OF_BLOCKS
#endif
// Tiles of queries, and blocks that share them: whole clusters, of neighbours.
__device__ __forceinline__ int clusters_of(int seqlen_q) {
    return ceil_div<BLOCK_M * CLUSTER>(seqlen_q);
}
// Waits for stages that only other rows need, and releases them.
__device__ __forceinline__ void drain(unsigned barriers, Ring<STAGES>& place,
                                      const Release<CLUSTER>& release, int from, int to) {
#pragma unroll 1
    for (int step = from; step < to; ++step, place.next()) {
        mbarrier_wait(barriers + 16 * place.stage, place.phase);
        release(place.stage);
    }
}
// The key head that query head `head` of the flat (batch, heads) index reads.
__device__ __forceinline__ int head_kv_of(int head, int heads, int heads_kv) {
    return head / heads * heads_kv + head % heads / (heads / heads_kv);
}
#endif

#if STAGE_QK
using Store = PanelStore<QK_STORE, QK_EVICT_LAST>;
using KTile = SharedTile<element_t, BLOCK_N, BLOCK_K>;
constexpr unsigned Q_PANEL_BYTES = BLOCK_M * SWIZZLE, Q_BYTES = BLOCK_M * HEAD_DIM * 2;
constexpr int STEPS = HEAD_DIM / BLOCK_K, TOGETHER = QK_AHEAD ? 2 : 1;
static_assert(STAGES > 1 || STEPS * TOGETHER == 1,
              "a stage is released when the next is multiplied");
constexpr int OUT_PANELS = QK_STORE == 2 ? 1 : FRAGMENTS * BLOCK_N / 64;  // staged for a buffer
// Q in one part, or a part for each warpgroup, which then waits for no more than it needs.
constexpr int Q_PARTS = QK_SPLIT_Q ? WARPGROUPS : 1, Q_ROWS = BLOCK_M / Q_PARTS;
constexpr int TURN = 2, CONSUMERS = WARPS * 32;  // named barriers 2 and 3: the turn of each half

// What a block computes: runs of QK_TILES tiles of keys for one tile of queries, which stays in
// shared memory.
struct Run {
    int seqlen_q, seqlen_k, clusters, runs, rank;
    int row, key, head, tiles,
        all;  // tiles of keys for this block, and for the longest of its cluster

    __device__ __forceinline__ int tiles_for(int rows) const {
        int last = min(rows, seqlen_q) - 1;
        int end = STATS % 2 ? extent_of(last, seqlen_q, seqlen_k)
                            : visible_keys(last, seqlen_q, seqlen_k).end;
        int n = min(QK_TILES, ceil_div<BLOCK_N>(min(end, seqlen_k) - key));
        return round_up(n, TOGETHER);
    }
    __device__ __forceinline__ void decode(int item) {
        item /= CLUSTER;
        int within = item % (runs * clusters);
        head = item / (runs * clusters);
        row = (QK_ORDER ? within % clusters : within / runs) * CLUSTER * BLOCK_M;
        key = (QK_ORDER ? within / clusters : within % runs) * QK_TILES * BLOCK_N;
        all = tiles_for(row + CLUSTER * BLOCK_M);
        row += rank * BLOCK_M;
        tiles = CLUSTER > 1 && HIDES_LATER ? max(0, tiles_for(row + BLOCK_M)) : all;
    }
};
// Where everything lies in shared memory.
struct Memory {
    unsigned q, ring, staging, barriers, q_full, q_empty;
    __device__ __forceinline__ explicit Memory(unsigned base)
        : q(base),
          ring(q + Q_BYTES),
          staging(ring + STAGES * B_BYTES),
          barriers(staging + QK_BUFFERS * WARPS * OUT_PANELS * 2048),
          q_full(barriers + 16 * STAGES),
          q_empty(q_full + 8) {}
};

__device__ __forceinline__ void load_queries(const Memory& at, const TensorMap& q, const Run& run,
                                             int part, unsigned phase) {
    mbarrier_wait(at.q_empty + 16 * part, phase ^ 1);
    mbarrier_expect(at.q_full + 16 * part, Q_BYTES / Q_PARTS);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / PANEL; ++i)
        tma_load(at.q + i * Q_PANEL_BYTES + part * Q_ROWS * SWIZZLE, q, at.q_full + 16 * part,
                 i * PANEL, run.row + part * Q_ROWS, run.head);
}
// One thread loads Q and K.
__device__ __forceinline__ void producer(const Memory& at, const TensorMap& q, const TensorMap& k,
                                         Run& run, int items, int heads, int heads_kv) {
    Ring<STAGES> place;
    unsigned q_phase = 0;
    int item = blockIdx.x;
    do {
        run.decode(item);
        if (run.all <= 0) continue;
        int head_kv = head_kv_of(run.head, heads, heads_kv);
        load_queries(at, q, run, 0, q_phase);
#pragma unroll 1
        for (int step = 0; step < run.all * STEPS; ++step, place.next()) {
            unsigned full = at.barriers + 16 * place.stage, tile = at.ring + place.stage * B_BYTES;
            mbarrier_wait(full + 8, place.phase ^ 1);
            mbarrier_expect(full, B_BYTES);
#pragma unroll
            for (int i = 0; i < PANELS; ++i)
                load_shared_panel<CLUSTER, SWIZZLE>(
                    tile + i * BLOCK_N * SWIZZLE, k, full, step % STEPS * BLOCK_K + i * PANEL,
                    run.key + step / STEPS * BLOCK_N, head_kv, BLOCK_N, run.rank);
            if (step == 0)
#pragma unroll 1
                for (int part = 1; part < Q_PARTS; ++part) load_queries(at, q, run, part, q_phase);
        }
        q_phase ^= 1;
    } while (QK_BLOCKS > 0 && (item += gridDim.x) < items);
    if (PDL && !PDL_EARLY) grid_launch_dependents();
}

// Where scores and statistics go.
struct Outputs {
    const TensorMap& scores;
    element_t* stored;
    float *maxima, *sums;
    int stride, units;
    float factor;  // of the scores, scale * log2(e), so that softmax is a subtraction and an ex2
};
struct Consumer {
    const Memory& at;
    const Outputs& to;
    const Run& run;  // its row is the first of the warp's 16
    int warp, lane;
    unsigned own_q, own;
    unsigned buffer;

    // d += Q K^T of a stage: all queries of the warpgroup.
    __device__ __forceinline__ void multiply(float (&d)[FRAGMENTS][BLOCK_N / 2], unsigned stage,
                                             int step) const {
        wgmma_fence();
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
            for (int i = 0; i < BLOCK_K / 16; ++i)
                Wgmma<BLOCK_N>::ss<IS_BF16, 0>(
                    d[f],
                    ATile{own_q + step * PANELS * Q_PANEL_BYTES + f * 64 * SWIZZLE}.descriptor(i),
                    KTile{at.ring + stage * B_BYTES}.descriptor(i), step + i > 0);
        wgmma_commit();
    }
    // 64 columns of a fragment, from `column` on.
    __device__ __forceinline__ void store(const float* d, unsigned staged, int f, int i, int first,
                                          int key) const {
        int panel = QK_STORE == 2 ? 0 : f * (BLOCK_N / 64) + i, column = key + i * 64;
        float by = STATS % 2 ? 1.f : to.factor;
        Store::store(to.scores, staged + panel * Store::BYTES, d + i * 32, by, by, column, first,
                     run.head, run.seqlen_q - first, run.seqlen_k - column,
                     to.stored +
                         (static_cast<long long>(run.head) * run.seqlen_q + first) * to.stride +
                         column,
                     to.stride);
    }
    // Of UNIT keys: the maximum m, what the scores become, and their sum, all stored.
    __device__ __forceinline__ void finish_unit(float (&d)[BLOCK_N / 2], unsigned staged, int f,
                                                int unit, int first, int key) const {
        float low, high, sum = 0.f, sum_8 = 0.f;
        row_maxima<UNIT>(d + unit * UNIT / 2, low, high);
        low *= to.factor, high *= to.factor;
        if constexpr (STATS == 2) {
            unsigned rounded = pack(low, high);  // as the scores are, so that the largest p is 1
            low = low_of(rounded), high = high_of(rounded);
        } else {
            // A row without a key here: every s is -inf, and 2^(-inf - 0) is the zero it needs.
            low = low == minus_infinity() ? 0.f : low, high = high == minus_infinity() ? 0.f : high;
        }
        if (QK_TURNS) named_barrier_sync(TURN + warp / 4 % 2, CONSUMERS);
#pragma unroll
        for (int i = unit * 2; i < unit * 2 + 2; ++i) {
            if (STATS % 2) exponentiate<64>(d + i * 32, to.factor, low, high, sum, sum_8);
            store(d, staged, f, i, first, key);
        }
        if (QK_TURNS) named_barrier_arrive(TURN + (warp / 4 % 2 ^ 1), CONSUMERS);
        if (STATS % 2) sum = quad_sum(sum), sum_8 = quad_sum(sum_8);
        // Each lane of a quad writes one of its four numbers. Their place has 32 bits: where those
        // are too few, the scores are a terabyte.
        int to_row = first + lane / 4 + lane % 2 * 8;
        if (to_row < run.seqlen_q && key / UNIT + unit < to.units && (STATS % 2 || !(lane & 2))) {
            unsigned place =
                (unsigned(run.head) * to.units + key / UNIT + unit) * run.seqlen_q + to_row;
            (lane & 2 ? to.sums : to.maxima)[place] =
                lane & 2 ? (lane & 1 ? sum_8 : sum) : (lane & 1 ? high : low);
        }
    }
    // What becomes of a tile whose first key is `key`.
    __device__ __forceinline__ void finish(float (&d)[FRAGMENTS][BLOCK_N / 2], int key) {
        Store::template wait<QK_BUFFERS - 1>();
        unsigned staged = own + buffer * OUT_PANELS * Store::BYTES;
        buffer = QK_BUFFERS > 1 ? buffer ^ 1 : 0;
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
            int first = run.row + f * 64,
                mine = first + lane / 4;  // of the warp's 16 rows; this thread's
            if constexpr (STATS == 0) {
#pragma unroll
                for (int i = 0; i < BLOCK_N / 64; ++i) store(d[f], staged, f, i, first, key);
            } else {
                if (visible_keys(first, run.seqlen_q, run.seqlen_k).end < key + BLOCK_N) {
                    mask_columns(d[f], visible_keys(mine, run.seqlen_q, run.seqlen_k),
                                 visible_keys(mine + 8, run.seqlen_q, run.seqlen_k), key);
                }
#pragma unroll
                for (int unit = 0; unit < BLOCK_N / UNIT; ++unit)
                    finish_unit(d[f], staged, f, unit, first, key);
            }
        }
        Store::commit();
    }
};
__device__ __forceinline__ void consumer(const Memory& at, const Outputs& to, Run& run, int items,
                                         int warp, int lane) {
    unsigned q_full = at.q_full, q_empty = at.q_empty;
    if (QK_SPLIT_Q) q_full += warp / 4 * 16, q_empty += warp / 4 * 16;
    Consumer self{at, to, run, warp, lane, at.q + warp / 4 * FRAGMENTS * 64 * SWIZZLE};
    // Panels of a buffer, one behind the other, for each warp or, with QK_STORE 1, warpgroup that
    // stores.
    self.own = at.staging + warp / (QK_STORE == 1 ? 4 : 1) * QK_BUFFERS * OUT_PANELS * Store::BYTES;
    Release<CLUSTER> release(at.barriers);
    // Without turns all warpgroups multiply, find maxima and exponentiate at the same time.
    if (QK_TURNS && warp / 4 % 2) named_barrier_arrive(TURN, CONSUMERS);
    Ring<STAGES> place;
    unsigned q_phase = 0;
    int item = blockIdx.x;
    do {
        run.decode(item);
        if (run.all <= 0) continue;
        mbarrier_wait(q_full, q_phase);
        q_phase ^= 1;
        run.row += warp / 4 * FRAGMENTS * 64 + warp % 4 * 16;
        int end = run.key + run.tiles * BLOCK_N;
#pragma unroll 1
        for (; run.key < end; run.key += TOGETHER * BLOCK_N) {
            float s[TOGETHER][FRAGMENTS][BLOCK_N / 2];
            unsigned before = 0;  // the stage whose products are still under way
#pragma unroll
            for (int step = 0; step < TOGETHER * STEPS; ++step, place.next()) {  // S = Q K^T
                mbarrier_wait(at.barriers + 16 * place.stage, place.phase);
                self.multiply(s[step / STEPS], place.stage, step % STEPS);
                if (step > 0) {
                    wgmma_wait<1>();
                    release(before);
                }
                before = place.stage;
            }
#pragma unroll
            for (int t = 0; t < TOGETHER; ++t) {
                if (t + 1 == TOGETHER) {
                    wgmma_wait<0>();
                    release(before);
                    if (QK_BLOCKS > 0 && lane == 0 && run.key + TOGETHER * BLOCK_N >= end)
                        mbarrier_arrive(q_empty);
                }
#pragma unroll
                for (int f = 0; f < FRAGMENTS; ++f) warpgroup_fence_operand(s[t][f]);
                self.finish(s[t], run.key + t * BLOCK_N);  // mask; P = 2^(S - m), or S; to memory
            }
        }
        if (CLUSTER > 1 && HIDES_LATER) {  // tiles that only others of the cluster need
            if (QK_BLOCKS > 0 && lane == 0 && run.tiles == 0) mbarrier_arrive(q_empty);
            drain(at.barriers, place, release, run.tiles * STEPS, run.all * STEPS);
        }
    } while (QK_BLOCKS > 0 && (item += gridDim.x) < items);
    if (QK_TURNS && warp / 4 % 2 == 0)
        named_barrier_sync(TURN, CONSUMERS);  // leaves no barrier half full
    Store::template wait<0>();  // shared memory must outlive the reads of the last stores
}

extern "C" __global__ void CLUSTER_OF_BLOCKS __launch_bounds__(THREADS, MIN_BLOCKS)
    three_kernel_wgmma_qk(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                          const __grid_constant__ TensorMap scores, element_t* __restrict__ stored,
                          float* __restrict__ maxima, float* __restrict__ sums, int batch_heads,
                          int heads, int heads_kv, int seqlen_q, int seqlen_k, int stride,
                          float factor) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const Memory at(smem_address(smem));
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) tma_prefetch(scores);  // q and k are used at once
    init_barriers<STAGES, Q_PARTS, WARPS, CLUSTER>(at.barriers);
    if (PDL > 1) grid_wait();
    if (PDL && PDL_EARLY) grid_launch_dependents();

    Run run{seqlen_q, seqlen_k, clusters_of(seqlen_q)};
    const Outputs to{scores, stored, maxima, sums, stride, units_of(seqlen_k), factor};
    run.runs = ceil_div<QK_TILES * BLOCK_N>(seqlen_k);
    int items = run.runs * run.clusters * CLUSTER * batch_heads;
    run.rank = CLUSTER > 1 ? cluster_rank() : 0;
    if (warp == WARPS) {
        if (lane == 0) producer(at, q, k, run, items, heads, heads_kv);
        if (CLUSTER > 1) __syncwarp();  // warps arrive whole
    } else consumer(at, to, run, items, warp, lane);
    if (CLUSTER > 1) cluster_arrive(), cluster_wait();
}
#endif

#if STAGE_SOFTMAX && STATS
// One thread a row. STATS 1: maxima becomes the factor of each unit, 2^(its maximum - the row's) /
// the row's sum. STATS 2: sums receives the row's maximum. Not __restrict__: see
// common/ptx/launch.cuh.
extern "C" __global__ void __launch_bounds__(SOFTMAX_BLOCK, MIN_BLOCKS)
    three_kernel_wgmma_softmax(float* maxima, float* sums, int rows, int seqlen_q, int seqlen_k) {
#if PDL
    grid_launch_dependents();
    grid_wait();
#endif
    int row = blockIdx.x * SOFTMAX_BLOCK + threadIdx.x;
    if (row >= rows) return;
    int head = row / seqlen_q, within = row % seqlen_q, units = units_of(seqlen_k);
    int own = units_of(visible_keys(within, seqlen_q, seqlen_k).end);
    long long first = static_cast<long long>(head) * units * seqlen_q + within;
    if (STATS == 1) {
        int all = HIDES_LATER ? min(units, extent_of(within, seqlen_q, seqlen_k) / UNIT) : own;
        factors_of_row(maxima + first, sums + first, own, all, seqlen_q);
    } else sums[row] = maximum_of_row(maxima + first, own, seqlen_q);
}
#elif STAGE_SOFTMAX && SOFTMAX_DEPTH
// Warp: SOFTMAX_ROWS rows, in groups that lie a grid apart.
extern "C" __global__ void __launch_bounds__(SOFTMAX_BLOCK, MIN_BLOCKS)
    three_kernel_wgmma_softmax(const __grid_constant__ TensorMap scores, int batch_heads,
                               int seqlen_q, int seqlen_k, int stride) {
    extern __shared__ __align__(1024) unsigned char smem[];
    using Rows = WarpRows<SOFTMAX_GROUP, SOFTMAX_DEPTH, MAX_KEYS, SOFTMAX_EVICT_LAST>;
    constexpr int WARPS = SOFTMAX_BLOCK / 32, OWN = SOFTMAX_DEPTH * Rows::SLOT_BYTES;
    int warp = threadIdx.x / 32, block = SOFTMAX_ORDER ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    unsigned barriers = smem_address(smem) + WARPS * OWN + warp * SOFTMAX_DEPTH * 8;
    Rows rows{scores, smem + warp * OWN, barriers, seqlen_q, seqlen_k};
    if (threadIdx.x % 32 == 0) {
        tma_prefetch(scores);
        for (int i = 0; i < SOFTMAX_DEPTH; ++i) mbarrier_init(rows.barriers + 8 * i, 1);
        mbarrier_init_fence();
    }
    __syncwarp();
#if PDL
    grid_wait();
#endif
#if PDL && PDL_EARLY
    grid_launch_dependents();
#endif
    rows.run(block * WARPS + warp, gridDim.x * WARPS, batch_heads, [&](int row) {
        return !HIDES_LATER ? stride : min(stride, extent_of(row, seqlen_q, seqlen_k));
    });
#if PDL && !PDL_EARLY
    grid_launch_dependents();
#endif
}
#elif STAGE_SOFTMAX
// Block: GROUPS * SOFTMAX_ROWS rows, GROUPS at once.
extern "C" __global__ void __launch_bounds__(SOFTMAX_BLOCK, MIN_BLOCKS)
    three_kernel_wgmma_softmax(element_t* __restrict__ scores, int rows, int seqlen_q, int seqlen_k,
                               int stride) {
    extern __shared__ float exchange[];  // one float a warp for the maximum, one for the sum
    constexpr int GROUPS = SOFTMAX_BLOCK / SOFTMAX_THREADS;
    int first = threadIdx.x % SOFTMAX_THREADS * SOFTMAX_VECTOR;
    int block = SOFTMAX_ORDER ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    int row = block * GROUPS * SOFTMAX_ROWS + threadIdx.x / SOFTMAX_THREADS;
    // Threads without a row stay for the barriers: they have no key, and so touch nothing.
    auto keys_in = [&](int r) {
        return r < rows ? visible_keys(HIDES_LATER ? r % seqlen_q : 0, seqlen_q, seqlen_k).end : 0;
    };
    auto written_in = [&](int r) {
        return !HIDES_LATER ? stride : min(stride, extent_of(r % seqlen_q, seqlen_q, seqlen_k));
    };
#if PDL
    grid_wait();
#endif
#if PDL && PDL_EARLY
    grid_launch_dependents();
#endif
    row_softmax<SOFTMAX_THREADS, SOFTMAX_VECTOR, SOFTMAX_PASSES, SOFTMAX_ROWS, GROUPS, MAX_KEYS,
                SOFTMAX_ONCE, SOFTMAX_EVICT_LAST>(
        scores, stride, row, first, exchange, exchange + SOFTMAX_BLOCK / 32, keys_in, written_in);
#if PDL && !PDL_EARLY
    grid_launch_dependents();
#endif
}
#endif

#if STAGE_PV
#include "three_kernel_wgmma_pv.cuh"
#endif
