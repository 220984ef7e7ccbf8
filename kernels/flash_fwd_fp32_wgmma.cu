// flash_fwd_fp32_wgmma: fp32 attention with heads of 512 to 8192 columns and few queries and keys,
// on Hopper. As in flash_fwd_fp32_wide, SLICES blocks share BLOCK_M queries of a head, and each
// owns a slice of the columns. Here TMA loads and wgmma multiplies, fp32 numbers as two parts each:
// flash_fwd_fp32_wgmma.cuh. Both products are transposed, since wgmma takes TF32 from shared memory
// only where the columns that it sums over are neighbours: S^T = K Q^T, of 64 keys by BLOCK_M
// queries, and O^T = V^T P^T, of 64 columns of V. So K and V come through registers, where they are
// split, and Q and P lie in shared memory, in two parts each. CLUSTER blocks add their scores: each
// gets some rows from all, in the order of the blocks, as counted stores. If CLUSTER is SLICES, it
// then gives all the P of its rows, and there is one launch (fwd). Else the first launch (scores)
// writes them, and the second (output), which may have other slices, adds those of all CLUSTERS. q,
// o: (batch, heads, seqlen_q, HEAD_DIM); k, v: (batch, heads_kv, seqlen_k, HEAD_DIM), all fp32.
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/launch.cuh"
#include "common/ptx/shared.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/tile/scheduler.cuh"
#include "common/tile/shared_tile.cuh"

using namespace attn;

constexpr int THREADS = WARPGROUPS * 128, WARPS = WARPGROUPS * 4;
constexpr int STAGES = NUM_STAGES;
constexpr int KEYS = 64;  // of a tile; a row has MAX_TILES at most
// A warpgroup has PANELS panels of 32 columns of the slice, in both products. They pass through its
// own ring of STAGES: those of Q and K for each tile of keys, then those of V. Only it fills and
// reads that ring.
constexpr int PANELS = ceil_div<SLICES * WARPGROUPS * 64>(HEAD_DIM) * 2;
constexpr int SLICE = PANELS * 32 * WARPGROUPS;
constexpr int SHORT = 4;  // panels that a tensor core sums over
constexpr bool LONG_SUMS = PANELS > SHORT;
constexpr unsigned Q_PANEL = BLOCK_M * 128, KV_PANEL = KEYS * 128;
#if STAGE_OUTPUT
constexpr bool FIRST = false, LAST = true;  // does it multiply Q K^T, and P V
constexpr int ADDED = CLUSTERS, ROWS = BLOCK_M, COPIES = 1;
constexpr unsigned SLOT = KV_PANEL, LOW_BYTES = 0;
#else
#if STAGE_SCORES
constexpr bool FIRST = true, LAST = false;
#else
constexpr bool FIRST = true, LAST = true;
#endif
// Scores to add, rows that this block adds, blocks that need their P.
constexpr int ADDED = CLUSTER, ROWS = BLOCK_M / CLUSTER, COPIES = CLUSTER;
constexpr unsigned SLOT = KV_PANEL + Q_PANEL, LOW_BYTES = WARPGROUPS * 2 * Q_PANEL;
static_assert(ROWS >= 1 && SLICES % CLUSTER == 0, "each block of a cluster adds some rows");
#endif
// Half a warp does a row. Warps that do the same rows, so that each has fewer blocks to give them
// to.
constexpr int WANTED = LAST ? 2 * WARPS / ROWS : 1, MOST = COPIES < WARPS ? COPIES : WARPS;
constexpr int SHARES = WANTED < 1 ? 1 : WANTED < MOST ? WANTED : MOST;
constexpr int ROWS_AT_ONCE = 2 * WARPS / SHARES, TURNS = ceil_div<ROWS_AT_ONCE>(ROWS);

#include "flash_fwd_fp32_wgmma.cuh"

#if STAGE_OUTPUT
#define NAME flash_fwd_fp32_wgmma_output
#elif STAGE_SCORES
#define NAME flash_fwd_fp32_wgmma_scores
#else
#define NAME flash_fwd_fp32_wgmma
#endif
extern "C" __global__ void
#if !STAGE_OUTPUT && CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
    // Blocks of the second launch begin beside those of the first: 128 registers for each of 512
    // threads.
    __launch_bounds__(THREADS, FIRST&& LAST ? 1 : 512 / THREADS)
        NAME(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
             const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o,
             float* partial, int queries_per_key_head, int seqlen_q, int seqlen_k, float to_log2) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const int tiles = MAX_TILES == 1 ? 1 : ceil_div<KEYS>(seqlen_k), keys_padded = tiles * KEYS;
    // Rings; low parts of Q, later the warpgroups' scores; scores of all blocks for this one's
    // rows; P, high and low; barriers.
    const unsigned low_at = WARPGROUPS * STAGES * SLOT, added_at = low_at + LOW_BYTES;
    const unsigned added_bytes = FIRST ? BLOCK_M * keys_padded * 4 : 0,
                   p_at = added_at + added_bytes;
    const unsigned p_half = BLOCK_M * keys_padded * 4, p_bytes = LAST ? 2 * p_half : 0;
    const unsigned base = smem_address(smem), barriers = base + p_at + p_bytes;
    const unsigned scores_full = barriers, p_full = barriers + 8;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), group = warp / 4;
    const int lane = threadIdx.x % 32, rank = blockIdx.x % CLUSTER;
    const bool leader = threadIdx.x % 128 == 0;
    const int slice = blockIdx.x % SLICES, first_row = blockIdx.x / SLICES * BLOCK_M,
              head = blockIdx.y;
    const int head_kv = queries_per_key_head == 1 ? head : head / queries_per_key_head;
    const int first_column = slice * SLICE + group * (PANELS * 32);

    // ---- the ring of this warpgroup ----
    const unsigned own_full = barriers + 16 + group * STAGES * 8, own_ring = group * STAGES * SLOT;
    const int qk_items = FIRST ? tiles * PANELS : 0, items = qk_items + (LAST ? tiles * PANELS : 0);
    // The item-th panel: of V two by two, all tiles of their 64 columns first. A tensor map counts
    // in halves of a float.
    auto load = [&](int item) {
        if (item >= items) return;
        const unsigned full = own_full + item % STAGES * 8,
                       to = base + own_ring + item % STAGES * SLOT;
        if (item < qk_items) {
            const int column = first_column + item % PANELS * 32, tile = item / PANELS;
            mbarrier_expect(full, KV_PANEL + Q_PANEL);
            tma_load(to, k, full, 2 * column, tile * KEYS, head_kv);
            tma_load(to + KV_PANEL, q, full, 2 * column, first_row, head);
        } else {
            const int pair = (item - qk_items) / 2;
            const int column = first_column + (pair / tiles * 2 + item % 2) * 32;
            mbarrier_expect(full, KV_PANEL);
            tma_load(to, v, full, 2 * column, pair % tiles * KEYS, head_kv);
        }
    };
    auto wait_for = [&](int item) {
        mbarrier_wait(own_full + item % STAGES * 8, item / STAGES & 1);
    };
    auto panel_of = [&](int item) { return smem + own_ring + item % STAGES * SLOT; };
    // To the same address of block `to`, whose barrier counts it.
    auto give = [&](unsigned address, unsigned barrier, unsigned to, float4 x) {
        store_async_16(cluster_address(address, to), cluster_address(barrier, to), x.x, x.y, x.z,
                       x.w);
    };
    auto sync_group = [&] { named_barrier_sync(1 + group, 128); };

    if (leader) {
        tma_prefetch(FIRST ? k : v), tma_prefetch(FIRST ? q : o);
        for (int i = 0; i < STAGES; ++i) mbarrier_init(own_full + i * 8, 1);
        if (threadIdx.x == 0) {
            mbarrier_init(scores_full, 1);
            mbarrier_init(p_full, 1);
        }
        mbarrier_init_fence();
#if PDL && !STAGE_OUTPUT
        grid_wait();
#endif
        for (int i = 0; i < STAGES; ++i) load(i);
        if (threadIdx.x == 0) {
            if (FIRST) mbarrier_expect(scores_full, added_bytes);
            if (FIRST && LAST) mbarrier_expect(p_full, p_bytes);
        }
    }
    __syncthreads();
    if (PDL == 1 || !FIRST) grid_launch_dependents();
    if (FIRST && CLUSTER > 1) cluster_arrive_relaxed();
    Sums sums;  // of both products, so that they have the same registers
    Fragments a[2];

#if !STAGE_OUTPUT
    // ---- Q K^T of this slice, and the scores to the blocks that add them ----
    float* own_low = reinterpret_cast<float*>(smem + low_at + group * 2 * Q_PANEL);
    // Where this lane's part of K begins: rows lane / 4 and 8 more, column lane % 4 of a chunk of
    // 4, which the swizzle moves by an XOR with the row.
    const int k_at = (warp % 4 * 16 + lane / 4) * 32 + lane / 4 * 4 + lane % 4;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll 1
        for (int panel = 0; panel < PANELS; ++panel) {
            const int item = tile * PANELS + panel;
            wait_for(item);
            const float* keys = reinterpret_cast<const float*>(panel_of(item));
            const float4* queries = reinterpret_cast<const float4*>(panel_of(item) + KV_PANEL);
            float4* low = reinterpret_cast<float4*>(own_low) + panel % 2 * (Q_PANEL / 16);
            float4 x[BLOCK_M / 16];
#pragma unroll
            for (int i = 0; i < BLOCK_M / 16; ++i) x[i] = queries[i * 128 + threadIdx.x % 128];
#pragma unroll
            for (int i = 0; i < BLOCK_M / 16; ++i) low[i * 128 + threadIdx.x % 128] = unread4(x[i]);
            wgmma_wait<0>();
            a[0].pinned(), a[1].pinned();
            if constexpr (LONG_SUMS)
                if (panel > 0 && panel % SHORT == 0) sums.put_outside(panel == SHORT);
            fence_async_proxy();
            // The low part is there, and all warps are done with the panel before and its low part.
            sync_group();
            if (leader && panel > 0) load(item - 1 + STAGES);
            const unsigned long long b_high = wgmma_descriptor<128>(smem_address(queries), 1024),
                                     b_low = wgmma_descriptor<128>(smem_address(low), 1024);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {  // instruction, column 4 on, row 8 on
                    const int chunk = half * 4 + i / 4 * 2 + i / 2 % 2;
                    a[half].set<false>(i, keys[(k_at ^ chunk * 4) + i % 2 * 256]);
                }
                sums.add<false>(a[half], b_high + half * 4, b_low + half * 4,
                                panel > 0 || half > 0);
            }
        }
        sums.finish(LONG_SUMS);
        a[0].pinned(), a[1].pinned();
        sync_group();  // all warps are done with the low parts
        if (leader) load(tile * PANELS + PANELS - 1 + STAGES);
        // Query by key, and keys swizzled, so that no two lanes that write meet in a bank.
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; ++i) {
            const int query = i / 4 * 8 + lane % 4 * 2 + i % 2;
            const int key = warp % 4 * 16 + i / 2 % 2 * 8 + lane / 4 % 2 * 4 + lane / 8;
            own_low[query * KEYS + (key ^ lane % 4 * 8)] = sums.big[i];
        }
        __syncthreads();
        if (CLUSTER > 1 && tile == 0) cluster_wait();  // all have their barriers
        const float* scores = reinterpret_cast<const float*>(smem + low_at);
        for (int i = threadIdx.x; i < BLOCK_M * KEYS / 4; i += THREADS) {
            const int row = i / (KEYS / 4), key = i % (KEYS / 4) * 4;
            const float* part = scores + row * KEYS + (key ^ row / 2 % 4 * 8);
            float4 sum = load4(part);
#pragma unroll
            for (int g = 1; g < WARPGROUPS; ++g)
                sum = sum4(sum, load4(part + g * (2 * Q_PANEL / 4)));
            const unsigned at = ((rank * ROWS + row % ROWS) * keys_padded + tile * KEYS + key) * 4;
            give(base + added_at + at, scores_full, row / ROWS, sum);
        }
        if (tile + 1 < tiles) __syncthreads();  // the next tile's low parts go there
    }
    if (PDL == 2)
        grid_launch_dependents();  // its loads of V would have slowed down those of Q and K
    mbarrier_wait<true>(scores_full, 0);
#endif
    // Partial scores: head and tile of queries; cluster; row; key, in the order of P.
    const long long partial_rows =
        (static_cast<long long>(head) * (gridDim.x / SLICES) + blockIdx.x / SLICES) * CLUSTERS;
#if STAGE_OUTPUT
    grid_wait();
    const float* parts = partial + partial_rows * BLOCK_M * keys_padded;
#else
    const float* parts = reinterpret_cast<const float*>(smem + added_at);
#endif
    auto load_scores = [&](int row, int tile) {
        const float* from = parts + row * keys_padded + tile * KEYS + lane % 16 * 4;
        float4 sum = load4(from);
#pragma unroll
        for (int i = 1; i < ADDED; ++i) sum = sum4(sum, load4(from + i * ROWS * keys_padded));
        return sum;
    };
#if STAGE_SCORES
    partial +=
        ((partial_rows + slice / CLUSTER) * BLOCK_M + rank * ROWS) * keys_padded + lane % 16 * 4;
    for (int row = row_of_lane(0); row < ROWS; row += ROWS_AT_ONCE)
        for (int tile = 0; tile < tiles; ++tile)
            *reinterpret_cast<float4*>(partial + row * keys_padded + tile * KEYS) =
                load_scores(row, tile);
#else
    const int p_row = FIRST ? rank * ROWS : 0;
    softmax_rows(tiles, first_row + p_row, seqlen_q, seqlen_k, to_log2, load_scores,
                 [&](int row, int tile, float4 p) {
                     row += p_row;
                     const unsigned panel = p_at + (tile * 2 + lane % 16 / 8) * Q_PANEL;
                     const unsigned at = panel + row * 128 + (lane % 8 ^ row % 8) * 16;
                     const float4 high = high4(p), cross = pair4(high, sub4(p, high));
                     if (!FIRST) {
                         *reinterpret_cast<float4*>(smem + at) = high;
                         *reinterpret_cast<float4*>(smem + at + p_half) = cross;
                         return;
                     }
#pragma unroll
                     for (int i = 0; i < ceil_div<SHARES>(COPIES); ++i) {
                         const int to = warp % SHARES + i * SHARES;
                         give(base + at, p_full, to, high);
                         give(base + at + p_half, p_full, to, cross);
                     }
                 });
    if (!FIRST) {
        fence_async_proxy();
        __syncthreads();
    }

    // ---- P V of this slice ----
    // Where this lane's part of V begins: key 2 (lane % 4) and the next of 8, column lane / 4 and 8
    // more of the warp's 16. Its part of O, query by column, lies alike.
    int v_at[2][2];
#pragma unroll
    for (int next = 0; next < 2; ++next)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int key = lane % 4 * 2 + next, chunk = warp % 2 * 4 + i * 2 + lane / 16;
            v_at[next][i] = key * 32 + (chunk ^ key) * 4 + lane / 4 % 4;
        }
    const unsigned long long p_high = wgmma_descriptor<128>(base + p_at, 1024);
#pragma unroll 1
    for (int pair = 0; pair < PANELS / 2; ++pair) {
        unsigned char* own = nullptr;
        int item = qk_items + pair * tiles * 2;
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile, item += 2) {
            wait_for(item);
            wait_for(item + 1);
            own = panel_of(item + warp % 4 / 2);
            const float* values = reinterpret_cast<const float*>(own);
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // 16 keys
                wgmma_wait<1>();
                a[i % 2].pinned();
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    a[i % 2].set<true>(j, values[(i * 2 + j / 4) * 256 + v_at[j / 2 % 2][j % 2]]);
                if (FIRST && i == 0 &&
                    pair + tile == 0) {  // the values did not have to wait for it
                    mbarrier_wait<true>(p_full, 0);
                    fence_async_proxy();
                }
                const unsigned at = (tile * 2 + i / 2) * Q_PANEL + i % 2 * 64;
                sums.add<true>(a[i % 2], p_high + at / 16, p_high + (at + p_half) / 16,
                               tile > 0 || i > 0);
            }
            if (tile + 1 < tiles && item + STAGES < items) {
                sync_group();  // all warps have read the values
                if (leader) load(item + STAGES), load(item + 1 + STAGES);
            }
        }
        sums.finish(false);
        a[0].pinned(), a[1].pinned();
        sync_group();
        // O goes to where the values were, in the layout of two swizzled boxes.
        float* staged = reinterpret_cast<float*>(own);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; ++i)
            staged[i / 4 * 256 + v_at[i % 2][i / 2 % 2]] = sums.big[i];
        fence_async_proxy();
        sync_group();
        if (leader) {
            item -= 2;
#pragma unroll
            for (int i = 0; i < 2; ++i)
                tma_store(o, smem_address(panel_of(item + i)),
                          2 * (first_column + (pair * 2 + i) * 32), first_row, head);
            tma_store_commit();
            if (item + STAGES < items) {
                tma_store_wait_read<0>();
                load(item + STAGES), load(item + 1 + STAGES);
            }
        }
    }
    if (leader)
        tma_store_wait_read<0>();  // shared memory must outlive the reads of the last stores
#endif
}
