// flash_fwd_wgmma: fused attention forward on Hopper: TMA into an mbarrier ring, wgmma for both products,
// scores and P never leave registers. sm_90a only.
// q, o: (batch, heads, seqlen_q, HEAD_DIM); k, v: (batch, heads_kv, seqlen_k, HEAD_DIM).
// A block has WARPGROUPS consumer warpgroups and a producer. WARPGROUPS / KEY_GROUPS of them share a tile of
// keys, 64 queries each; KEY_GROUPS of them share their queries and take tiles of keys in turn, and what
// they have is merged last. Tiles of keys are taken right to left, so that those with a mask come first.
// With SPLITS, as many blocks share queries too. The combine stage joins what they store; or, with
// SPLIT_CLUSTER, they are a cluster, and join through its shared memory.
#include "common/element.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/launch.cuh"
#include "common/ptx/shared.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/tile/arithmetic.cuh"
#include "common/tile/rows.cuh"

#if STAGE_COMBINE
#include "common/tile/combine.cuh"
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    flash_fwd_wgmma_combine(const float* __restrict__ partial, const float* __restrict__ partial_lse,
                            element_t* __restrict__ o, float* __restrict__ lse, int rows) {
#if PDL
    grid_launch_dependents();
    grid_wait();
#endif
    constexpr int CHUNKS = HEAD_DIM / 4;
    int at = blockIdx.x * COMBINE_THREADS + threadIdx.x, row = at / CHUNKS, chunk = at % CHUNKS;
    if (row >= rows) return;
    float whole = combine_splits<HEAD_DIM>(partial, partial_lse, o, SPLITS, rows, row, chunk);
    if (LSE && chunk == 0) lse[row] = whole * LN2;
}
#else
#include "common/tile/mask.cuh"
#include "common/tile/merge.cuh"
#include "common/tile/operand.cuh"
#include "common/tile/ring.cuh"
#include "common/tile/schedule.cuh"
#include "common/tile/softmax.cuh"
#include "common/tile/join.cuh"

constexpr int ROW_GROUPS = WARPGROUPS / KEY_GROUPS, BLOCK_M = 64 * ROW_GROUPS;
constexpr int STAGES = NUM_STAGES;
constexpr int CONSUMERS = WARPGROUPS * 128, THREADS = CONSUMERS + PRODUCER_WARPS * 32;
static_assert(ROW_GROUPS * KEY_GROUPS == WARPGROUPS, "KEY_GROUPS must divide WARPGROUPS");
// Else a warpgroup meets stages whose last phase it has not waited for, and takes that for its own.
static_assert(NUM_STAGES % KEY_GROUPS == 0, "a stage of the ring is always the same key group's");
static_assert(HEAD_DIM % 16 == 0 && BLOCK_N % 16 == 0, "wgmma takes 16 columns or keys at once");
// MULTICAST: the blocks of a cluster have neighbouring tiles of queries of one head, and each loads its part
// of every tile of K and V for all. SPLIT_CLUSTER: they are the splits of one tile.
#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif
static_assert(CLUSTER == (SPLIT_CLUSTER ? SPLITS : MULTICAST), "a cluster has one use");
static_assert(MULTICAST == 1 || (!CAUSAL && !ORDER && SPLITS == 1), "who shares loads needs the same keys");
static_assert(SPLITS == 1 || (!PERSISTENT && !ORDER), "the splits of a tile are a dimension of the grid");
static_assert(!PINGPONG || (OVERLAP && KEY_GROUPS == 1 && WARPGROUPS > 1), "turns are of equal length");
// Tiles lie in panels of 64 columns: rows of 128 bytes, swizzled by TMA. Of head_dim 96 the second panel is
// half empty: its columns are outside the tensor, so nothing is moved for them.
constexpr int PANELS = (HEAD_DIM + 63) / 64;
constexpr unsigned Q_PANEL = 64 * 128, Q_BYTES = PANELS * Q_PANEL;  // of one warpgroup's queries
constexpr unsigned KV_PANEL = BLOCK_N * 128, KV_BYTES = PANELS * KV_PANEL;
// P of a warpgroup in shared memory: one buffer, or one being read and one being written.
constexpr unsigned P_PANEL = 64 * 128, P_BYTES = (BLOCK_N + 63) / 64 * P_PANEL, P_BUFFERS = OVERLAP ? 2 : 1;
constexpr unsigned ALL_P_BYTES = P_SHARED ? WARPGROUPS * P_BUFFERS * P_BYTES : 0;
static_assert(!OVERLAP || P_SHARED || MAXIMA == 1, "P beside the one being read goes over its scores");
constexpr unsigned ALL_MERGE_BYTES = (KEY_GROUPS - 1) * ROW_GROUPS * MERGE_BYTES<HEAD_DIM>;
// Blocks that take turns at the tiles stage their output beside Q and the ring, which the producer already
// fills for the next tile; others over Q, and merge over the ring. What splits send each other has room of
// its own too, since a block may send while the other still multiplies.
#if SPLIT_CLUSTER
using JoinSplits = Join<HEAD_DIM, SPLITS>;
constexpr unsigned STAGED_BYTES = ROW_GROUPS * JoinSplits::BYTES;
#else
constexpr unsigned STAGED_BYTES = PERSISTENT ? ROW_GROUPS * Q_BYTES + ALL_MERGE_BYTES : 0;
#endif
constexpr int START_BARRIER = 1, MERGE_BARRIER = 2, MERGED_BARRIER = 3, TURN_BARRIER = 4;

using Tiles = Schedule<BLOCK_M, BLOCK_N, KEY_GROUPS, SPLITS, SPLIT_CLUSTER, ORDER, (PERSISTENT > 0), CAUSAL>;
using Softmax = OnlineSoftmax<MAXIMA, EXP2_POLY, CAUSAL>;

// Barriers: full and empty of each stage of K and of V, of Q: full of each 64 rows, empty of all. With
// SPLIT_CLUSTER, of each 64 rows: what the other splits have is there.
struct Barriers {
    unsigned base;
    __device__ __forceinline__ unsigned k_full(unsigned stage) const { return base + 32 * stage; }
    __device__ __forceinline__ unsigned k_empty(unsigned stage) const { return base + 32 * stage + 8; }
    __device__ __forceinline__ unsigned v_full(unsigned stage) const { return base + 32 * stage + 16; }
    __device__ __forceinline__ unsigned v_empty(unsigned stage) const { return base + 32 * stage + 24; }
    __device__ __forceinline__ unsigned q_empty() const { return base + 32 * STAGES; }
    __device__ __forceinline__ unsigned q_full(int group) const { return base + 32 * STAGES + 8 + 8 * group; }
    __device__ __forceinline__ unsigned joined(int group) const { return q_full(ROW_GROUPS + group); }
};

__device__ __forceinline__ void
load_queries(unsigned target, const TensorMap& map, unsigned barrier, int row, int head) {
    mbarrier_expect(barrier, Q_BYTES);
#pragma unroll
    for (int i = 0; i < PANELS; ++i) tma_load(target + i * Q_PANEL, map, barrier, i * 64, row, head);
}
__device__ __forceinline__ void
load_keys(unsigned target, const TensorMap& map, unsigned barrier, int key, int head, int rank) {
    mbarrier_expect(barrier, KV_BYTES);
    constexpr int PART = BLOCK_N / MULTICAST;
#pragma unroll
    for (int i = 0; i < PANELS; ++i)
#if MULTICAST > 1
        tma_load_multicast(target + i * KV_PANEL + rank * PART * 128, map, barrier, i * 64, key + rank * PART,
                           head, (1 << MULTICAST) - 1);
#else
        tma_load(target + i * KV_PANEL, map, barrier, i * 64, key, head);
#endif
}

// s = Q K^T of 64 queries and BLOCK_N keys.
__device__ __forceinline__ void
multiply_qk(float (&s)[BLOCK_N / 2], unsigned long long q, unsigned long long k) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i) {
        constexpr int IN_PANEL = 4;  // 16 columns are 32 bytes
        unsigned at = i % IN_PANEL * 32;
        Wgmma<BLOCK_N>::ss<IS_BF16, 0>(s, q + (i / IN_PANEL * Q_PANEL + at) / 16,
                                       k + (i / IN_PANEL * KV_PANEL + at) / 16, i > 0);
    }
    wgmma_commit();
}
// o += P V, with P in registers or in shared memory.
__device__ __forceinline__ void
multiply_pv(float (&o)[HEAD_DIM / 2], const unsigned* p, unsigned long long shared_p, unsigned long long v) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 16; ++i)
        if (P_SHARED)
            Wgmma<HEAD_DIM>::ss<IS_BF16, 1>(o, shared_p + (i / 4 * P_PANEL + i % 4 * 32) / 16,
                                            v + i * 2048 / 16, 1);
        else Wgmma<HEAD_DIM>::rs<IS_BF16, 1>(o, p + i * 4, v + i * 2048 / 16, 1);
    wgmma_commit();
}
__device__ __forceinline__ void scale_rows(float (&o)[HEAD_DIM / 2], const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] *= by[i / 2 % 2];
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, BLOCKS_PER_SM)
    flash_fwd_wgmma(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                    const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o,
                    float* __restrict__ lse,
#if SPLIT_CLUSTER
                    element_t* __restrict__ joined,  // o: what a split stores of a row is no box of TMA's
#else
                    float* __restrict__ partial,
#endif
                    int heads, int queries_per_key_head, int heads_together, int seqlen_q, int seqlen_k,
                    float factor) {
    extern __shared__ __align__(1024) unsigned char smem[];
    unsigned smem_q = smem_address(smem), smem_k = smem_q + ROW_GROUPS * Q_BYTES,
             smem_v = smem_k + STAGES * KV_BYTES, smem_p = smem_v + STAGES * KV_BYTES,
             staging = smem_p + ALL_P_BYTES;
    Barriers barriers{staging + STAGED_BYTES};
    // Each role makes its own: what both keep from before they part is spilled by the producer, which has 24
    // registers.
    auto schedule_of = [&](int seqlen_q) -> Tiles {
        constexpr int CLUSTER_M = MULTICAST * BLOCK_M;
        int tiles_m = ceil_div<CLUSTER_M>(seqlen_q) * MULTICAST;
        return {tiles_m, heads, seqlen_q, seqlen_k, heads_together};
    };
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // so that it is known to be uniform

    if (warp >= CONSUMERS / 32) {
#if PRODUCER_WARPS == 4
        registers_decrease<PRODUCER_REGISTERS>();
#endif
        if (warp > CONSUMERS / 32) return;
        if (threadIdx.x % 32 == 0) {
#pragma unroll
            for (int i = 0; i < STAGES; ++i) {
                mbarrier_init(barriers.k_full(i), 1);
                mbarrier_init(barriers.v_full(i), 1);
                mbarrier_init(barriers.k_empty(i), 4 * ROW_GROUPS * MULTICAST);
                mbarrier_init(barriers.v_empty(i), 4 * ROW_GROUPS * MULTICAST);
            }
            mbarrier_init(barriers.q_empty(), CONSUMERS / 32);
#pragma unroll
            for (int i = 0; i < ROW_GROUPS; ++i) mbarrier_init(barriers.q_full(i), 1);
#if SPLIT_CLUSTER
#pragma unroll
            for (int i = 0; i < ROW_GROUPS; ++i) {
                mbarrier_init(barriers.joined(i), 1);
                mbarrier_expect(barriers.joined(i), JoinSplits::BYTES);
            }
#endif
            mbarrier_init_fence();
        }
        __syncwarp();
        int rank = 0;
#if MULTICAST > 1
        rank = cluster_rank();
        cluster_arrive();
        cluster_wait();  // the others' copies come to barriers of this block
#else
#if SPLIT_CLUSTER
        cluster_arrive_relaxed();  // nobody has to wait yet: the others' barriers are needed last
#endif
        named_barrier_arrive(START_BARRIER, CONSUMERS + 32);
#endif
#if SPLIT_CLUSTER
        if (threadIdx.x % 32 == 0)  // and the warp waits as a whole
#else
        if (threadIdx.x % 32 > 0) return;
#endif
        {
#if PDL
            if (PDL == 2) grid_launch_dependents();
            grid_wait();
#endif
            Tiles schedule = schedule_of(opaque(seqlen_q));
            Ring<STAGES> k_at, v_at;
            unsigned q_phase = 0;
#pragma unroll 1
            for (int turn = 0;; ++turn) {
                TileOfQueries work = schedule.of(turn);
                if (PERSISTENT && work.row < 0) break;
                int head_kv = queries_per_key_head == 1 ? work.head : work.head / queries_per_key_head;
#pragma unroll 1
                for (int j = 0; j <= work.tiles; ++j) {
                    if (j < work.tiles) {
                        mbarrier_wait(barriers.k_empty(k_at.stage), k_at.phase ^ 1);
                        load_keys(smem_k + k_at.stage * KV_BYTES, k, barriers.k_full(k_at.stage),
                                  schedule.key(j, work.all), head_kv, rank);
                        k_at.next();
                    }
                    if (j == 0) {
                        if (PERSISTENT) mbarrier_wait(barriers.q_empty(), q_phase ^ 1);
                        q_phase ^= 1;
#pragma unroll
                        for (int i = 0; i < ROW_GROUPS; ++i)
                            load_queries(smem_q + i * Q_BYTES, q, barriers.q_full(i), work.row + i * 64,
                                         work.head);
                        continue;
                    }
                    mbarrier_wait(barriers.v_empty(v_at.stage), v_at.phase ^ 1);
                    load_keys(smem_v + v_at.stage * KV_BYTES, v, barriers.v_full(v_at.stage),
                              schedule.key(j - 1, work.all), head_kv, rank);
                    v_at.next();
                }
                if (!PERSISTENT) break;
            }
#if PDL == 1
            grid_launch_dependents();
#endif
        }
#if SPLIT_CLUSTER
        __syncwarp();
        cluster_wait();
#endif
        return;
    }

#if PRODUCER_WARPS == 4
    registers_increase<CONSUMER_REGISTERS>();
#endif
    int lane = threadIdx.x % 32, key_group = warp / (4 * ROW_GROUPS), row_group = warp / 4 % ROW_GROUPS;
    if (!SPLIT_CLUSTER && threadIdx.x == 0) tma_prefetch(o);  // the others are used at once
    unsigned own_q = smem_q + row_group * Q_BYTES;
    unsigned long long q_descriptor = wgmma_descriptor<128>(own_q, 1024),
                       k_descriptor = wgmma_descriptor<128>(smem_k, 1024),
                       v_descriptor = wgmma_descriptor<128>(smem_v, 1024, KV_PANEL);
    // stmatrix: this lane's row and 16-byte chunk of the warp's 16 rows of a panel; `^ 32 n` is n chunk
    // pairs on, since the swizzle is an XOR too.
    unsigned lane_at = warp % 4 * 2048 + lane % 16 * 128 + ((lane / 16 ^ lane % 8) << 4);
    unsigned own_p = smem_p + warp / 4 * P_BUFFERS * P_BYTES, p_buffer = 0;
    unsigned long long p_descriptor = wgmma_descriptor<128>(own_p, 1024);
#if MULTICAST > 1
    cluster_arrive();
    cluster_wait();
#else
#if SPLIT_CLUSTER
    cluster_arrive_relaxed();
#endif
    named_barrier_sync(START_BARRIER, CONSUMERS + 32);
#endif
#if PINGPONG
    if (warp / 4 == 0) named_barrier_arrive(TURN_BARRIER, 256);  // the first turn is warpgroup 0's
#endif

    Tiles schedule = schedule_of(seqlen_q);
    Ring<STAGES> k_at, v_at;  // of this key group's tiles, KEY_GROUPS apart
    unsigned q_phase = 0, taken = 0;  // tiles of the ring before this turn
#if MULTICAST > 1
    unsigned remote = cluster_address(barriers.base, lane % MULTICAST) - barriers.base;
#endif
    auto release = [&](unsigned barrier) {  // to the producers of all blocks that load into its stage
#if MULTICAST > 1
        mbarrier_arrive_remote(remote + barrier, lane, MULTICAST);
#else
        if (lane == 0) mbarrier_arrive(barrier);
#endif
    };
#pragma unroll 1
    for (int turn = 0;; ++turn) {
        TileOfQueries work = schedule.of(turn);
        if (PERSISTENT && work.row < 0) break;
        int first_row = work.row + row_group * 64 + warp % 4 * 16, row = first_row + lane / 4;
        int tiles = work.tiles;
        // All of a warp's rows see the keys below this.
        int unmasked = keys_of<CAUSAL>(first_row, seqlen_q, seqlen_k);
        int limit = keys_of<CAUSAL>(row, seqlen_q, seqlen_k), limit_8 = keys_of<CAUSAL>(row + 8, seqlen_q, seqlen_k);
        float out[HEAD_DIM / 2], by[2];
        Softmax rows;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) out[i] = 0.f;

        if (KEY_GROUPS > 1) k_at.to(taken + key_group), v_at = k_at, taken += tiles;
        mbarrier_wait(barriers.q_full(row_group), q_phase);
        q_phase ^= 1;
        auto mask_tile = [&](float(&s)[BLOCK_N / 2], int j) {
            int key = schedule.key(j, work.all);
            if (__builtin_expect(key + BLOCK_N > unmasked, 0)) mask_columns(s, limit - key, limit_8 - key);
        };
        auto wait_k = [&] { mbarrier_wait(barriers.k_full(k_at.stage), k_at.phase); };
        auto wait_v = [&] { mbarrier_wait(barriers.v_full(v_at.stage), v_at.phase); };
        auto release_k = [&] { release(barriers.k_empty(k_at.stage)), k_at.template skip<KEY_GROUPS>(); };
        auto release_v = [&] { release(barriers.v_empty(v_at.stage)), v_at.template skip<KEY_GROUPS>(); };
        auto begin_qk = [&](float(&s)[BLOCK_N / 2]) {
            wgmma_fence();
            multiply_qk(s, q_descriptor, k_descriptor + k_at.stage * (KV_BYTES / 16));
        };
        // Where the exponentials go: eight of them are a fragment of P's 16 keys.
        auto to_registers = [](unsigned(&p)[BLOCK_N / 4]) {
            return [&p](int i, const float(&e)[8]) {
#pragma unroll
                for (int j = 0; j < 4; ++j) p[i / 2 + j] = pack(e[2 * j], e[2 * j + 1]);
            };
        };
        auto to_shared = [&](int i, const float(&e)[8]) {
            stmatrix_x4((own_p + p_buffer * P_BYTES + lane_at + i / 32 * P_PANEL) ^ (i / 8 % 4 * 32),
                        pack(e[0], e[1]), pack(e[2], e[3]), pack(e[4], e[5]), pack(e[6], e[7]));
        };
        // A fence of its own: with a wait between two products ptxas otherwise serialises them (C7519).
        auto begin_pv = [&](unsigned(&p)[BLOCK_N / 4], unsigned buffer) {
            if (!P_SHARED) pin(p);
            pin(out);
            wgmma_fence();
            multiply_pv(out, p, p_descriptor + buffer * (P_BYTES / 16),
                        v_descriptor + v_at.stage * (KV_BYTES / 16));
        };
        auto end_pv = [&](unsigned(&p)[BLOCK_N / 4]) {
            wgmma_wait<0>();
            pin(out);
            if (!P_SHARED) pin(p);
            release_v();
        };
        auto shared_p_written = [&] {  // by this warp, which reads no other's rows
            fence_async_proxy();
            __syncwarp();
        };
        unsigned p[BLOCK_N / 4];
        // The softmax of a tile that nothing runs beside.
        auto softmax = [&](const float(&s)[BLOCK_N / 2], bool first) {
            bool grew;
            if (P_SHARED) {
                grew = rows.tile(s, factor, first, by, to_shared);
                shared_p_written();
            } else {
                grew = rows.tile(s, factor, first, by, to_registers(p));
            }
            if (grew) scale_rows(out, by);
        };
#if OVERLAP == 0
#pragma unroll 1
        for (int j = key_group; j < tiles; j += KEY_GROUPS) {
            float s[BLOCK_N / 2];
            wait_k();
            begin_qk(s);
            wgmma_wait<0>();
            pin(s);
            release_k();
            mask_tile(s, j);
            softmax(s, j == key_group);
            wait_v();
            begin_pv(p, 0);
            end_pv(p);
        }
        if (PERSISTENT && lane == 0) mbarrier_arrive(barriers.q_empty());
#else
        {
            float s[BLOCK_N / 2];
            wait_k();
            begin_qk(s);
            wgmma_wait<0>();
            pin(s);
            release_k();
            mask_tile(s, key_group);
            softmax(s, true);
        }
        // The products of a tile's scores and of the P before it are under way together, and the softmax of
        // the tile runs beside the latter. The P before is being read, so the new one goes elsewhere: to the
        // other buffer, or, since with MAXIMA 1 the tile is not done again, over the scores.
#pragma unroll 1
        for (int j = key_group + KEY_GROUPS; j < tiles; j += KEY_GROUPS) {
            float s[BLOCK_N / 2];
            wait_k();
            if (PINGPONG) named_barrier_sync(TURN_BARRIER + warp / 4, 256);
            begin_qk(s);
            wait_v();
            begin_pv(p, p_buffer);
            if (PINGPONG) named_barrier_arrive(TURN_BARRIER + (warp / 4 + 1) % WARPGROUPS, 256);
            wgmma_wait<1>();
            pin(s);
            release_k();
            mask_tile(s, j);
            bool grew;
            if (P_SHARED) {
                p_buffer ^= 1;
                grew = rows.tile(s, factor, false, by, to_shared);
                shared_p_written();
                end_pv(p);
            } else {
                grew = rows.tile(s, factor, false, by, [&s](int i, const float(&e)[8]) {
#pragma unroll
                    for (int j = 0; j < 8; ++j) s[i + j] = e[j];
                });
                pin(s);
                end_pv(p);
#pragma unroll
                for (int i = 0; i < BLOCK_N / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
            }
            if (grew) scale_rows(out, by);
        }
        if (PERSISTENT && lane == 0) mbarrier_arrive(barriers.q_empty());
        wait_v();
        begin_pv(p, p_buffer);
        end_pv(p);
#endif

        rows.l[0] = quad_sum(rows.l[0]), rows.l[1] = quad_sum(rows.l[1]);
#if SPLIT_CLUSTER
        cluster_wait();  // all blocks have begun, and their barriers are there: long since
#endif
        if (KEY_GROUPS > 1) {
            merge<HEAD_DIM, KEY_GROUPS, ROW_GROUPS, MERGE_BARRIER, MERGED_BARRIER>(out, rows, smem + (PERSISTENT ? staging + ROW_GROUPS * Q_BYTES : smem_k) - smem_q, factor);
            if (PERSISTENT && key_group > 0) continue;
            if (key_group > 0) break;
        }
#if SPLIT_CLUSTER
        float mine[JoinSplits::SLICE];
        int rank = cluster_rank();
        JoinSplits::run(out, rows, mine, staging + row_group * JoinSplits::BYTES, barriers.joined(row_group), rank,
                    factor);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (row + r * 8 >= seqlen_q) continue;
            long long at = static_cast<long long>(work.head) * seqlen_q + row + r * 8;
            float by = 1.f / rows.l[r];
            element_t* to = joined + at * HEAD_DIM + rank * (HEAD_DIM / SPLITS) + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < JoinSplits::SLICE; i += 4)
                *reinterpret_cast<unsigned*>(to + i * 2) =
                    pack(mine[i + r * 2] * by, mine[i + r * 2 + 1] * by);
            if (LSE && rank == 0 && lane % 4 == 0) lse[at] = fmaf(rows.m[r], factor, log2f(rows.l[r])) * LN2;
        }
#elif SPLITS > 1
        // Each split stores what it would be without the others, and its weight.
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (row + r * 8 >= seqlen_q) continue;
            long long at = (static_cast<long long>(blockIdx.z) * heads + work.head) * seqlen_q + row + r * 8;
            float by = rows.l[r] > 0.f ? 1.f / rows.l[r] : 0.f;
            float2* to = reinterpret_cast<float2*>(partial + at * HEAD_DIM) + lane % 4;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; ++i)
                to[i * 4] = float2{out[i * 4 + r * 2] * by, out[i * 4 + r * 2 + 1] * by};
            if (lane % 4 == 0) lse[at] = fmaf(rows.m[r], factor, log2f(rows.l[r]));
        }
#else
        // Each warp stores its own 16 rows, so that none waits for another: over its own part of Q, which
        // no other warp reads, in the layout of a swizzled box.
        float low = 1.f / rows.l[0], high = 1.f / rows.l[1];
        unsigned staged = PERSISTENT ? staging + row_group * Q_BYTES : own_q;
        if (PERSISTENT) {
            if (lane == 0) tma_store_wait_read<0>();
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; ++i)
            stmatrix_x4((staged + lane_at + i / 4 * Q_PANEL) ^ (i % 4 * 32),
                        pack(out[i * 8] * low, out[i * 8 + 1] * low),
                        pack(out[i * 8 + 2] * high, out[i * 8 + 3] * high),
                        pack(out[i * 8 + 4] * low, out[i * 8 + 5] * low),
                        pack(out[i * 8 + 6] * high, out[i * 8 + 7] * high));
        fence_async_proxy();
        __syncwarp();
        if (lane == 0 && first_row < seqlen_q) {
#pragma unroll
            for (int i = 0; i < PANELS; ++i)
                tma_store(o, staged + warp % 4 * 2048 + i * Q_PANEL, i * 64, first_row, work.head);
            tma_store_commit();
        }
#if LSE
        if (lane % 4 == 0) {
            float* to = lse + static_cast<long long>(work.head) * seqlen_q + row;
            if (row < seqlen_q) to[0] = fmaf(rows.m[0], factor, log2f(rows.l[0])) * LN2;
            if (row + 8 < seqlen_q) to[8] = fmaf(rows.m[1], factor, log2f(rows.l[1])) * LN2;
        }
#endif
#endif
        if (!PERSISTENT) break;
    }
#if PINGPONG
    if (warp / 4 == 0) named_barrier_sync(TURN_BARRIER, 256);  // takes the last turn: none is left half full
#endif
    if (lane == 0) tma_store_wait_read<0>();  // shared memory must outlive the reads of the last stores
#if MULTICAST > 1
    __syncwarp();
    cluster_arrive();
    cluster_wait();  // and the others' copies and arrivals
#endif
}
#endif
