// The third stage of three_kernel_wgmma, which includes it: O = P V.
#pragma once

using Store = PanelStore<0, false>;
using VTile = SharedTile<element_t, BLOCK_K, BLOCK_N>;
constexpr unsigned STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int COLUMN_TILES = HEAD_DIM / BLOCK_N, KEY_STEPS = BLOCK_K / 16;
constexpr int ROWS = FRAGMENTS * 2;  // of a thread

// What a block computes: (tile of queries, tile of HEAD_DIM columns, head).
struct Item {
    int seqlen_q, seqlen_k, batch_heads, clusters, items, rank;
    int row, column, head, steps,
        all;  // steps of keys for this block, and for the longest of its cluster

    __device__ __forceinline__ int steps_for(int rows) const {
        int end = visible_keys(min(rows, seqlen_q) - 1, seqlen_q, seqlen_k).end;
        return round_up(end, STATS % 2 ? UNIT : BLOCK_K) / BLOCK_K;
    }
    __device__ __forceinline__ void decode(int item) {
        item = (PV_ORDER == 2 ? items - 1 - item : item) / CLUSTER;
        int group;
        column = item % COLUMN_TILES * BLOCK_N;
        item /= COLUMN_TILES;
        if (PV_ORDER == 1) head = item % batch_heads, group = item / batch_heads;
        else head = item / clusters, group = item % clusters;
        row = (LATER_SEE_MORE ? clusters - 1 - group : group) * CLUSTER *
              BLOCK_M;  // the longest first
        all = steps_for(row + CLUSTER * BLOCK_M);
        row += rank * BLOCK_M;
        steps = CLUSTER > 1 && HIDES_LATER ? steps_for(row + BLOCK_M) : all;
    }
};

__device__ __forceinline__ void load_v(unsigned ring, unsigned barriers, const TensorMap& v,
                                       const Item& item, int heads, int heads_kv, int stage,
                                       int step) {
    unsigned full = barriers + 16 * stage, tile = ring + stage * STAGE_BYTES + A_BYTES;
    mbarrier_expect(full, step < item.steps ? STAGE_BYTES : B_BYTES);
#pragma unroll
    for (int i = 0; i < BLOCK_N / 64; ++i)
        load_shared_panel<CLUSTER, 128>(tile + i * BLOCK_K * 128, v, full, item.column + i * 64,
                                        step * BLOCK_K, head_kv_of(item.head, heads, heads_kv),
                                        BLOCK_K, item.rank);
}
// One thread loads P and V. V is no work of the launches ahead: it is read while they end.
__device__ __forceinline__ void producer(unsigned ring, unsigned barriers, const TensorMap& scores,
                                         const TensorMap& v, Item& item, int heads, int heads_kv) {
    Ring<STAGES> at;
    int index = blockIdx.x, early = 0;  // steps whose V is under way
    if constexpr (PDL) {
        item.decode(index);
        for (; early < min(STAGES, item.all); ++early)
            load_v(ring, barriers, v, item, heads, heads_kv, early, early);
        grid_wait();
    }
    do {
        item.decode(index);
#pragma unroll 1
        for (int step = 0; step < item.all; ++step, at.next()) {
            unsigned full = barriers + 16 * at.stage, tile = ring + at.stage * STAGE_BYTES;
            if (early > 0) --early;
            else {
                mbarrier_wait(full + 8, at.phase ^ 1);
                load_v(ring, barriers, v, item, heads, heads_kv, at.stage, step);
            }
            if (step < item.steps)
#pragma unroll
                for (int i = 0; i < PANELS; ++i)
                    tma_load(tile + i * BLOCK_M * SWIZZLE, scores, full, step * BLOCK_K + i * PANEL,
                             item.row, item.head, PV_EVICT_FIRST ? EVICT_FIRST : EVICT_NORMAL);
        }
    } while (PV_BLOCKS > 0 && (index += gridDim.x) < item.items);
    if (PDL > 1) grid_launch_dependents();
}

struct Consumer {
    unsigned ring, barriers;
    int warp, lane;
    Release<CLUSTER> release;
    Ring<STAGES> at;

    using Output = float[FRAGMENTS][BLOCK_N / 2];

    __device__ __forceinline__ void wait_for_stage() const {
        mbarrier_wait(barriers + 16 * at.stage, at.phase);
    }
    __device__ __forceinline__ unsigned long long
    v_descriptor(int i) const {  // 16 keys of all columns
        return VTile{ring + at.stage * STAGE_BYTES + A_BYTES + i * 2048}.transposed_descriptor();
    }
    __device__ __forceinline__ ATile p_tile(int f) const {
        return {ring + at.stage * STAGE_BYTES + (warp / 4 * FRAGMENTS + f) * 64 * SWIZZLE};
    }
    // d += P V of a stage; `first`: d held nothing.
    __device__ __forceinline__ void multiply(Output& d, bool first) const {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < KEY_STEPS; ++i)
#pragma unroll
            for (int f = 0; f < FRAGMENTS; ++f)
                Wgmma<BLOCK_N>::ss<IS_BF16, 1>(d[f], p_tile(f).descriptor(i), v_descriptor(i),
                                               !first || i > 0);
        wgmma_commit();
    }

    // STATS 0: P comes as it is.
    __device__ __forceinline__ void multiply_p(Output& d, int steps) {
        unsigned before = 0;  // the stage whose products are still under way
        int step =
            0;  // there is one at least; did the loop not know, ptxas would serialise its wgmmas
        do {
            wait_for_stage();
            multiply(d, false);  // O += P V
            wgmma_wait<1>();
            release(before, step > 0);
            before = at.stage;
            at.next();
        } while (++step < steps);
        wgmma_wait<0>();
        release(before);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) warpgroup_fence_operand(d[f]);
    }
    // STATS 1 and 3: what a unit of keys adds is multiplied by its factor; `mine` is this thread's
    // first row. With 3 the factors follow from maxima and sums: scale becomes what a row is
    // multiplied by in the end.
    __device__ __forceinline__ void multiply_units(Output& d, float (&scale)[ROWS],
                                                   const Item& item, int mine, const float* maxima,
                                                   const float* sums) {
        unsigned before = 0;
        int units = units_of(item.seqlen_k);
        const float* unit_0 =
            maxima + static_cast<long long>(item.head) * units * item.seqlen_q + mine;
        auto offset = [&](int i) { return i / 2 * 64 + i % 2 * 8; };
        int own_units[ROWS];  // that have keys for the row
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            own_units[i] =
                mine + offset(i) < item.seqlen_q
                    ? units_of(visible_keys(mine + offset(i), item.seqlen_q, item.seqlen_k).end)
                    : 0;
        float largest[ROWS];
        if constexpr (STATS == 3)
            join_units(largest, scale, unit_0, sums + (unit_0 - maxima), own_units, offset,
                       item.seqlen_q);
#pragma unroll 1
        for (int unit = 0; unit < item.steps / (UNIT / BLOCK_K); ++unit) {
            float by[ROWS];
            Output part;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                bool has = unit < own_units[i];
                float x = has ? unit_0[unit * item.seqlen_q + offset(i)] : 0.f;  // STATS 1: factors
                if constexpr (STATS == 3) x = has ? exp2_approx(x - largest[i]) : 0.f;
                by[i] = x;
            }
#pragma unroll
            for (int step = 0; step < UNIT / BLOCK_K; ++step, at.next()) {
                wait_for_stage();
                multiply(part, step == 0);  // P V of the unit
                if (step > 0) {
                    wgmma_wait<1>();
                    release(before);
                }
                before = at.stage;
            }
            wgmma_wait<0>();
            release(before);
#pragma unroll
            for (int f = 0; f < FRAGMENTS; ++f) {
                warpgroup_fence_operand(part[f]);
#pragma unroll
                for (int i = 0; i < BLOCK_N / 2; ++i)  // O += factor * P V
                    d[f][i] = fmaf(part[f][i], by[f * 2 + i / 2 % 2], d[f][i]);
            }
        }
    }

    // STATS 2: scores become P in registers. A row's reference is its largest score, and keys from
    // its limit on are masked.
    struct Exponents {
        float from[2], sum[2];
        int limit[2], whole;  // whole: keys that all rows of the warp have
    };
    __device__ __forceinline__ void exponentials(unsigned (&p)[BLOCK_K / 4], Exponents& rows,
                                                 int step) const {
        int row = warp % 4 * 16 + lane % 16;  // of ldmatrix
        unsigned tile = p_tile(0).address + row * SWIZZLE;
        bool edge = rows.whole < (step + 1) * BLOCK_K;
#pragma unroll
        for (int i = 0; i < KEY_STEPS; ++i) {
            unsigned s[4];
            ldmatrix_x4(s, ATile::chunk(tile, row, i, lane / 16));
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float x = low_of(s[j]), y = high_of(s[j]);
                if (edge) {
                    int key = step * BLOCK_K + i * 16 + j / 2 * 8 + lane % 4 * 2,
                        end = rows.limit[j % 2];
                    x = key < end ? x : minus_infinity();
                    y = key + 1 < end ? y : minus_infinity();
                }
                x = exp2_approx(x - rows.from[j % 2]), y = exp2_approx(y - rows.from[j % 2]);
                rows.sum[j % 2] += x + y;
                p[i * 4 + j] = pack(x, y);
            }
        }
    }
    __device__ __forceinline__ void multiply_exponentials(Output& d, float (&scale)[ROWS],
                                                          const Item& item, int first,
                                                          const float* maxima) {
        static_assert(FRAGMENTS == 1 || STATS != 2,
                      "P takes BLOCK_K / 4 registers for every 64 rows");
        int mine = first + lane / 4;
        const float* largest = maxima + static_cast<long long>(item.head) * item.seqlen_q + mine;
        Exponents rows;
        rows.from[0] = mine < item.seqlen_q ? largest[0] : 0.f;
        rows.from[1] = mine + 8 < item.seqlen_q ? largest[8] : 0.f;
        rows.sum[0] = rows.sum[1] = 0.f;
        rows.limit[0] = visible_keys(mine, item.seqlen_q, item.seqlen_k).end;
        rows.limit[1] = visible_keys(mine + 8, item.seqlen_q, item.seqlen_k).end;
        rows.whole = visible_keys(first, item.seqlen_q, item.seqlen_k).end;
#pragma unroll 1
        for (int step = 0; step < item.steps; ++step, at.next()) {
            unsigned p[BLOCK_K / 4];
            wait_for_stage();
            __syncwarp();
            exponentials(p, rows, step);  // P = 2^(S - m)
            warpgroup_fence_operand(p);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < KEY_STEPS; ++i)  // O += P V
                Wgmma<BLOCK_N>::rs<IS_BF16, 1>(d[0], p + i * 4, v_descriptor(i), 1);
            wgmma_commit();
            // Not later: ptxas gives the registers of p to the next step's scores while wgmma still
            // reads them, and rows came out NaN. Other warpgroups cover the wait.
            wgmma_wait<0>();
            warpgroup_fence_operand(d[0]);
            warpgroup_fence_operand(p);
            release(at.stage);
        }
        scale[0] = 1.f / quad_sum(rows.sum[0]), scale[1] = 1.f / quad_sum(rows.sum[1]);
    }
};

// P arrives K-major, V row-major as it is stored. PV_EVICT_FIRST says to L2 that P is not read
// again: at (1, 16, 1024, 64) the best call takes 29.3 us with it and 30.7 without, 19.1 and 20.6
// with STATS 3 (results/h200/three_kernel_h200). maxima and sums are not __restrict__: see
// common/ptx/launch.cuh.
extern "C" __global__ void CLUSTER_OF_BLOCKS __launch_bounds__(THREADS, MIN_BLOCKS)
    three_kernel_wgmma_pv(const __grid_constant__ TensorMap scores,
                          const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap o,
                          const float* maxima, const float* sums, int batch_heads, int heads,
                          int heads_kv, int seqlen_q, int seqlen_k) {
    extern __shared__ __align__(1024) unsigned char smem[];
    unsigned ring = smem_address(smem), staging = ring + STAGES * STAGE_BYTES,
             barriers = staging + BLOCK_M * BLOCK_N * 2;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) tma_prefetch(scores), tma_prefetch(v), tma_prefetch(o);
    init_barriers<STAGES, 0, WARPS, CLUSTER>(barriers);

    Item item{seqlen_q, seqlen_k, batch_heads, clusters_of(seqlen_q)};
    item.items = item.clusters * CLUSTER * COLUMN_TILES * batch_heads;
    item.rank = CLUSTER > 1 ? cluster_rank() : 0;
    if (warp == WARPS) {
        if (lane == 0) producer(ring, barriers, scores, v, item, heads, heads_kv);
        if (CLUSTER > 1) __syncwarp(), cluster_arrive(), cluster_wait();  // warps arrive, whole
        return;
    }

    if (PDL && STATS) grid_wait();
    int own_row = warp / 4 * FRAGMENTS * 64 + warp % 4 * 16;
    unsigned own = staging + warp * FRAGMENTS * (BLOCK_N / 64) * Store::BYTES;
    Consumer self{ring, barriers, warp, lane, Release<CLUSTER>(barriers)};
    int index = blockIdx.x;
    do {
        item.decode(index);
        int first = item.row + own_row,
            mine = first + lane / 4;  // this thread's rows: mine + 64 f, and 8 further
        // A warpgroup multiplies what its own rows need: further, P may be no numbers.
        if (HIDES_LATER && WARPGROUPS > 1)
            item.steps = item.steps_for(item.row + (warp / 4 + 1) * FRAGMENTS * 64);
        float d[FRAGMENTS][BLOCK_N / 2] = {}, scale[ROWS];  // scale: of each row, at the end
#pragma unroll
        for (int i = 0; i < ROWS; ++i) scale[i] = 1.f;
        if constexpr (STATS == 0) self.multiply_p(d, item.steps);
        else if constexpr (STATS == 2) self.multiply_exponentials(d, scale, item, first, sums);
        else self.multiply_units(d, scale, item, mine, maxima, sums);
        if (HIDES_LATER && WARPGROUPS * CLUSTER > 1)
            drain(barriers, self.at, self.release, item.steps, item.all);
        Store::wait<0>();
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
            for (int i = 0; i < BLOCK_N / 64; ++i)
                Store::store(o, own + (f * (BLOCK_N / 64) + i) * Store::BYTES, d[f] + i * 32,
                             scale[f * 2], scale[f * 2 + 1], item.column + i * 64, first + f * 64,
                             item.head, seqlen_q - first - f * 64, 64, nullptr, 0);
        Store::commit();
    } while (PV_BLOCKS > 0 && (index += gridDim.x) < item.items);
    Store::wait<0>();
    if (CLUSTER > 1) cluster_arrive(), cluster_wait();
}
