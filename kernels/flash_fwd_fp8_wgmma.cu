// flash_fwd_fp8_wgmma: fused attention forward on Hopper in E4M3: both products by wgmma of bytes,
// scores and P never leave registers. sm_90a only. q: (batch, heads, seqlen_q, HEAD_DIM); k, v:
// (batch, heads_kv, seqlen_k, HEAD_DIM), all of E4M3; o: as q, of bf16. Floats say what these
// numbers are multiplied by: q_scale, k_scale and v_scale (batch, heads_kv); with SCALE_BLOCK, the
// last two have one for each block of keys of a head, and a tile lies in one block. A CTA has
// WARPGROUPS consumer warpgroups, 64 queries each, and a producer warpgroup: it loads by TMA, and
// transposes V, because wgmma of bytes takes only operands whose rows run along the sum: V^T of a
// tile has a row of keys for each column (see common/tile/shared_tile.cuh, also for the order of
// those keys). Tiles of keys are taken right to left, so that those with a mask come first. The
// tensor core adds with fewer bits than fp32 has. So sums of INTERVAL keys, if that is not 0, are
// added to the output in fp32 registers. With SUMS 1, V^T has rows of ones, and the tensor core
// sums the rows of P, as it is rounded, too.
#include "common/hopper/consumer.cuh"
#include "common/hopper/producer.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/launch.cuh"
#include "common/ptx/shared.cuh"
#include "common/ptx/tma.cuh"
#include "common/tile/pipeline.cuh"
#include "common/tile/scheduler.cuh"
#include "common/tile/shared_tile.cuh"
#include "common/tile/softmax.cuh"

using namespace attn;

constexpr int BLOCK_M = 64 * WARPGROUPS, CONSUMERS = WARPGROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int PRODUCERS = 4;  // warps
static_assert(HEAD_DIM % 64 == 0 && BLOCK_N % 32 == 0, "wgmma takes 32 columns or keys at once");
static_assert(INTERVAL == 0 || INTERVAL % BLOCK_N == 0 || BLOCK_N % INTERVAL == 0,
              "an interval is whole tiles, or a tile whole intervals");
static_assert(INTERVAL % 32 == 0, "an interval is whole products of 32 keys");
static_assert(SCALE_BLOCK == 0 || SCALE_BLOCK % BLOCK_N == 0, "a tile has one scale");
static_assert(!PINGPONG || (OVERLAP && WARPGROUPS > 1),
              "warpgroups take turns at overlapped tiles");

constexpr bool ONES = SUMS == 1;
constexpr int OUT_COLUMNS = HEAD_DIM + (ONES ? 8 : 0);  // rows of V^T; wgmma counts them in eights
using QTile = SharedTile<unsigned char, 64, HEAD_DIM>;  // of a warpgroup
using KVTile = SharedTile<unsigned char, BLOCK_N, HEAD_DIM>;
using TransposedTile = SharedTile<unsigned char, OUT_COLUMNS, BLOCK_N>;  // of V
constexpr unsigned Q_BYTES = QTile::BYTES, KV_BYTES = KVTile::BYTES,
                   T_BYTES = TransposedTile::BYTES;
// The output of a warpgroup on its way, in panels of 64 columns of bf16. Blocks that take turns at
// tiles stage it beside the rings, which are already filled for the next tile, others over V, whose
// last tile has been transposed when its product begins.
using OutTile = SharedTile<unsigned short, 64, HEAD_DIM, 128>;
constexpr unsigned O_PANEL = OutTile::PANEL_BYTES, O_BYTES = OutTile::BYTES;
constexpr unsigned STAGED_BYTES = WARPGROUPS * O_BYTES, V_RING = V_STAGES * KV_BYTES;
constexpr unsigned V_BYTES = PERSISTENT || V_RING > STAGED_BYTES ? V_RING : STAGED_BYTES;
// Producers wait for one of their own: synccheck refuses a barrier that is waited for in two
// places.
constexpr int START_BARRIER = 1, PRODUCERS_BARRIER = 2, TURN_BARRIER = 3;

using Tiles = Schedule<BLOCK_M, BLOCK_N, 1, 1, false, ORDER, (PERSISTENT > 0), false>;
using Softmax = ScaledSoftmax<HEADROOM, EXP2_POLY, MAXIMA, SUMS == 2>;

// Barriers: full and empty of each stage of K, of V and of V^T; of Q: full of each 64 rows, empty
// of all.
struct Barriers {
    unsigned base;
    __device__ __forceinline__ unsigned k_full(unsigned stage) const { return base + 32 * stage; }
    __device__ __forceinline__ unsigned k_empty(unsigned stage) const { return k_full(stage) + 8; }
    __device__ __forceinline__ unsigned t_full(unsigned stage) const { return k_full(stage) + 16; }
    __device__ __forceinline__ unsigned t_empty(unsigned stage) const { return k_full(stage) + 24; }
    __device__ __forceinline__ unsigned v_full(unsigned stage) const {
        return base + 32 * NUM_STAGES + 16 * stage;
    }
    __device__ __forceinline__ unsigned v_empty(unsigned stage) const { return v_full(stage) + 8; }
    __device__ __forceinline__ unsigned q_empty() const { return v_full(V_STAGES); }
    __device__ __forceinline__ unsigned q_full(int group) const {
        return q_empty() + 8 + 8 * group;
    }
    __device__ __forceinline__ void init() const {
#pragma unroll
        for (int i = 0; i < NUM_STAGES; ++i) {
            mbarrier_init(k_full(i), 1);
            mbarrier_init(k_empty(i), CONSUMERS / 32);
            mbarrier_init(t_full(i), PRODUCERS);
            mbarrier_init(t_empty(i), CONSUMERS / 32);
        }
#pragma unroll
        for (int i = 0; i < V_STAGES; ++i) {
            mbarrier_init(v_full(i), 1);
            mbarrier_init(v_empty(i), PRODUCERS);
        }
        mbarrier_init(q_empty(), CONSUMERS / 32);
#pragma unroll
        for (int i = 0; i < WARPGROUPS; ++i) mbarrier_init(q_full(i), 1);
        mbarrier_init_fence();
    }
};
// Where everything lies in shared memory.
struct Memory {
    unsigned q, k, v, staging, transposed;
    Barriers barriers;
    __device__ __forceinline__ explicit Memory(unsigned base)
        : q(base),
          k(q + WARPGROUPS * Q_BYTES),
          v(k + NUM_STAGES * KV_BYTES),
          staging(PERSISTENT ? v + V_BYTES : v),
          transposed(v + V_BYTES + (PERSISTENT ? STAGED_BYTES : 0)),
          barriers{transposed + NUM_STAGES * T_BYTES} {}
};
struct Call {
    int heads, queries_per_key_head, heads_per_l2_section, seqlen_q, seqlen_k;
    float factor;  // of the scores, besides the heads' own: scale * log2(e)
    __device__ __forceinline__ int key_head(int head) const {
        return queries_per_key_head == 1 ? head : head / queries_per_key_head;
    }
    __device__ __forceinline__ KeyRange visible_keys(int row) const {
        return attn::visible_keys(row, seqlen_q, seqlen_k);
    }
    __device__ __forceinline__ Tiles schedule(int seqlen_q) const {
        return {ceil_div<BLOCK_M>(seqlen_q), heads, seqlen_q, seqlen_k, heads_per_l2_section};
    }
};

// ---- the producer ----
// What the producer's warps keep between tiles: where the next tile to transpose is. The first
// thread of the first warp loads.
struct Producer {
    const TensorMap &q, &k, &v;
    const Memory& at;
    int warp;
    bool loads;
    unsigned q_phase;
    Ring<NUM_STAGES> k_at;  // of K, and of V^T
    Ring<V_STAGES> v_at;

    // Where the tile to transpose lies in a ring, or the one after it.
    template <class Ring>
    __device__ __forceinline__ static Ring position(Ring at, bool after) {
        if (after) at.next();
        return at;
    }
    __device__ __forceinline__ void load_k(int key, int head, bool after) const {
        const auto to = position(k_at, after);
        mbarrier_wait(at.barriers.k_empty(to.stage), to.phase ^ 1);
        load_tile<KVTile>(at.k + to.stage * KV_BYTES, k, at.barriers.k_full(to.stage), key, head);
    }
    __device__ __forceinline__ void load_v(int key, int head, bool after) const {
        const auto to = position(v_at, after);
        mbarrier_wait(at.barriers.v_empty(to.stage), to.phase ^ 1);
        load_tile<KVTile>(at.v + to.stage * KV_BYTES, v, at.barriers.v_full(to.stage), key, head);
    }
    __device__ __forceinline__ void load_q(int row, int head) {
        if (PERSISTENT) mbarrier_wait(at.barriers.q_empty(), q_phase ^ 1);
        q_phase ^= 1;
#pragma unroll
        for (int i = 0; i < WARPGROUPS; ++i)
            load_tile<QTile>(at.q + i * Q_BYTES, q, at.barriers.q_full(i), row + i * 64, head);
    }
    __device__ __forceinline__ void transpose() {
        mbarrier_wait(at.barriers.t_empty(k_at.stage), k_at.phase ^ 1);
        mbarrier_wait(at.barriers.v_full(v_at.stage), v_at.phase);
        transpose_bytes<BLOCK_N, HEAD_DIM, OUT_COLUMNS, 2>(
            at.v + v_at.stage * KV_BYTES, at.transposed + k_at.stage * T_BYTES, warp);
        fence_async_proxy();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            mbarrier_arrive(at.barriers.v_empty(v_at.stage));
            mbarrier_arrive(at.barriers.t_full(k_at.stage));
        }
        k_at.next(), v_at.next();
    }
    // Rows of ones below V^T in all panels of every stage, which stay there; 512 bytes at a time.
    __device__ __forceinline__ void write_ones() const {
        using Tile = TransposedTile;
        constexpr unsigned ONES = 0x38383838, PARTS = Tile::ROW_BYTES * 8 / 512;
#pragma unroll 1
        for (unsigned i = warp; i < NUM_STAGES * Tile::PANELS * PARTS; i += PRODUCERS)
            fill_shared(at.transposed + i / PARTS * Tile::PANEL_BYTES + HEAD_DIM * Tile::ROW_BYTES +
                            i % PARTS * 512,
                        ONES);
    }
    // K of the first tile comes before Q. Tiles are loaded one ahead of the one that is transposed;
    // but V after it, if there is room for one alone.
    __device__ __forceinline__ void run(const Call& call) {
        Tiles schedule = call.schedule(opaque(call.seqlen_q));
        if (ONES) write_ones();
#pragma unroll 1
        for (int turn = 0;; ++turn) {
            WorkTile work = schedule.of(turn);
            if (PERSISTENT && work.row < 0) break;
            const int head_kv = call.key_head(work.head);
            bool begun = false;
            // key: the first key of the tile to load; below 0 after the last tile.
#pragma unroll 1
            for (int key = schedule.key(0, work.first, work.end);; key -= BLOCK_N) {
                const bool load_next = loads && key >= 0;
                if (load_next) {
                    load_k(key, head_kv, begun);
                    if (!begun) load_q(work.row, work.head);
                    if (V_STAGES > 1) load_v(key, head_kv, begun);
                }
                __syncwarp();
                if (begun) transpose();
                if (V_STAGES == 1 && load_next) load_v(key, head_kv, false);
                if (key < 0) break;
                begun = true;
            }
            if (!PERSISTENT) break;
        }
    }
};
__device__ __forceinline__ void produce(const TensorMap& q, const TensorMap& k, const TensorMap& v,
                                        const Memory& at, const Call& call, int warp) {
    const bool first = threadIdx.x % 32 == 0;
    if (warp == 0) {
        if (first) at.barriers.init();
        __syncwarp();
        named_barrier_arrive(START_BARRIER, CONSUMERS + 32);
        named_barrier_arrive(PRODUCERS_BARRIER, PRODUCERS * 32);
        if (PDL == 2) grid_launch_dependents();
        if (PDL) grid_wait();
    } else {
        named_barrier_sync(PRODUCERS_BARRIER, PRODUCERS * 32);
    }
    Producer{q, k, v, at, warp, warp == 0 && first}.run(call);
    if (PDL == 1) grid_launch_dependents();
}

#include "flash_fwd_fp8_wgmma_products.cuh"

// ---- what becomes of the output ----
// Each warp stores its own 16 rows, so that none waits for another, in the layout of a swizzled
// box. low, high: of this thread's rows, what their numbers are multiplied by.
__device__ __forceinline__ void store_tile(const Consumer& self, int head, int first_row,
                                           const Consumer::Output& out, float low, float high,
                                           const TensorMap& o) {
    const int lane = self.lane;
    unsigned staged = self.at.staging + self.warp / 4 * O_BYTES + self.warp % 4 * 2048;
    unsigned lane_at = OutTile::chunk(staged + lane % 16 * 128, lane, 0, lane / 16);
    if (PERSISTENT) {
        if (lane == 0) tma_store_wait_read<0>();
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i)
        stmatrix_x4(OutTile::to_step(lane_at, i), pack_bf16(out[i * 8] * low, out[i * 8 + 1] * low),
                    pack_bf16(out[i * 8 + 2] * high, out[i * 8 + 3] * high),
                    pack_bf16(out[i * 8 + 4] * low, out[i * 8 + 5] * low),
                    pack_bf16(out[i * 8 + 6] * high, out[i * 8 + 7] * high));
    fence_async_proxy();
    __syncwarp();
    if (lane == 0 && first_row < self.call.seqlen_q) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 64; ++i)
            tma_store(o, staged + i * O_PANEL, i * 64, first_row, head);
        tma_store_commit();
    }
}
__device__ __forceinline__ void consumer(const TensorMap& o, const Memory& at, const Call& call,
                                         int warp, const float* q_scale, const float* k_scale,
                                         const float* v_scale, float* lse) {
    const int lane = threadIdx.x % 32, row_group = warp / 4;
    if (threadIdx.x == 0) tma_prefetch(o);  // the others are used at once
    Consumer self{{at, call, warp, lane}};
    self.q_descriptor = QTile{at.q + row_group * Q_BYTES}.descriptor();
    self.k_descriptor = KVTile{at.k}.descriptor();
    self.t_descriptor = TransposedTile{at.transposed}.descriptor();
    named_barrier_sync(START_BARRIER, CONSUMERS + 32);
    self.begin_turns();
    if (PDL) grid_wait();  // for the scales

    self.schedule = call.schedule(call.seqlen_q);
    unsigned q_phase = 0;
#pragma unroll 1
    for (int turn = 0;; ++turn) {
        WorkTile work = self.schedule.of(turn);
        if (PERSISTENT && work.row < 0) break;
        const int first_row = work.row + row_group * 64 + warp % 4 * 16,
                  head_kv = call.key_head(work.head);
        const int blocks = SCALE_BLOCK ? ceil_div<SCALE_BLOCK ? SCALE_BLOCK : 1>(call.seqlen_k) : 1;
        self.k_scale = k_scale + head_kv * blocks, self.v_scale = v_scale + head_kv * blocks;
        self.factor = call.factor * q_scale[head_kv];
        if (SCALE_BLOCK == 0) self.factor *= self.k_scale[0];
        self.first_tile = work.first, self.end_tile = work.end, self.first_row = first_row;
        Consumer::State state;
        auto& [sums, rows, p, last] = state;
        sums.clear();

        mbarrier_wait(at.barriers.q_full(row_group), q_phase);
        q_phase ^= 1;
        self.attend(state, work.tiles);
        sums.finish();
        float units = last.v;

        if (ONES)
            rows.l[0] = sums.out[OUT_COLUMNS / 2 - 4], rows.l[1] = sums.out[OUT_COLUMNS / 2 - 2];
        else rows.l[0] = quad_sum(rows.l[0]), rows.l[1] = quad_sum(rows.l[1]);
        if (SCALE_BLOCK == 0) units = self.v_scale[0];
        store_tile(self, work.head, first_row, sums.out, rows.inverse(0, units),
                   rows.inverse(1, units), o);
        if (LSE && lane % 4 == 0) {
            const int row = first_row + lane / 4;
            float* of_row = lse + static_cast<long long>(work.head) * call.seqlen_q + row;
            if (row < call.seqlen_q) of_row[0] = rows.log_sum_exp(0);
            if (row + 8 < call.seqlen_q) of_row[8] = rows.log_sum_exp(1);
        }
        if (!PERSISTENT) break;
    }
    self.end_turns();
    if (lane == 0)
        tma_store_wait_read<0>();  // shared memory must outlive the reads of the last stores
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    flash_fwd_fp8_wgmma(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                        const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o,
                        const float* q_scale, const float* k_scale, const float* v_scale,
                        float* __restrict__ lse, int heads, int queries_per_key_head,
                        int heads_per_l2_section, int seqlen_q, int seqlen_k, float factor) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const Memory at(smem_address(smem));
    const Call call{heads, queries_per_key_head, heads_per_l2_section, seqlen_q, seqlen_k, factor};
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // so that it is known to be uniform
    if (warp >= CONSUMERS / 32) {
        registers_decrease<PRODUCER_REGISTERS>();
        produce(q, k, v, at, call, warp - CONSUMERS / 32);
    } else {
        registers_increase<CONSUMER_REGISTERS>();
        consumer(o, at, call, warp, q_scale, k_scale, v_scale, lse);
    }
}
