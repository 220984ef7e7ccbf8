// The third stage of three_kernel_wgmma, which includes it: O = P V.
#pragma once

// Block (tile of queries, tile of HEAD_DIM columns, head). P arrives K-major, V row-major as it is stored.
// PV_EVICT_FIRST says to L2 that P is not read again: at (1, 16, 1024, 64) the best call takes 29.3 us with it
// and 30.7 without, 19.1 and 20.6 with STATS 3 (results/h200/three_kernel_h200).
extern "C" __global__ void CLUSTER_OF_BLOCKS __launch_bounds__(THREADS, MIN_BLOCKS)
    three_kernel_wgmma_pv(const __grid_constant__ TensorMap scores, const __grid_constant__ TensorMap v,
                          const __grid_constant__ TensorMap o, const float* __restrict__ maxima,
                          const float* __restrict__ sums, int batch_heads, int heads, int heads_kv,
                          int seqlen_q, int seqlen_k) {
    extern __shared__ __align__(1024) unsigned char smem[];
    using Store = PanelStore<0, false>;
    constexpr unsigned STAGE_BYTES = A_BYTES + B_BYTES;
    constexpr int COLUMN_TILES = HEAD_DIM / BLOCK_N, KEY_STEPS = BLOCK_K / 16;
    unsigned ring = smem_address(smem), staging = ring + STAGES * STAGE_BYTES,
             barriers = staging + BLOCK_M * BLOCK_N * 2;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) tma_prefetch(scores), tma_prefetch(v), tma_prefetch(o);
    init_barriers<STAGES, 0, WARPS, CLUSTER>(barriers);

    int clusters = clusters_of(seqlen_q), items = clusters * CLUSTER * COLUMN_TILES * batch_heads;
    int rank = CLUSTER > 1 ? cluster_rank() : 0;
    int row, column, head, steps, all;  // steps of keys for this block, and for the longest of its cluster
    auto steps_for = [&](int rows) {
        int end = keys_of<CAUSAL>(min(rows, seqlen_q) - 1, seqlen_q, seqlen_k);
        return round_up(end, STATS % 2 ? UNIT : BLOCK_K) / BLOCK_K;
    };
    auto decode = [&](int item) {
        item = (PV_ORDER == 2 ? items - 1 - item : item) / CLUSTER;
        int group;
        column = item % COLUMN_TILES * BLOCK_N;
        item /= COLUMN_TILES;
        if (PV_ORDER == 1) head = item % batch_heads, group = item / batch_heads;
        else head = item / clusters, group = item % clusters;
        row = (CAUSAL ? clusters - 1 - group : group) * CLUSTER * BLOCK_M;  // the longest first
        all = steps_for(row + CLUSTER * BLOCK_M);
        row += rank * BLOCK_M;
        steps = CLUSTER > 1 && CAUSAL ? steps_for(row + BLOCK_M) : all;
    };
    Ring<STAGES> at;
    if (warp == WARPS) {
        auto copy = [&] {
            int item = blockIdx.x;
            auto load_v = [&](int stage, int step) {
                unsigned full = barriers + 16 * stage, tile = ring + stage * STAGE_BYTES + A_BYTES;
                mbarrier_expect(full, step < steps ? STAGE_BYTES : B_BYTES);
#pragma unroll
                for (int i = 0; i < BLOCK_N / 64; ++i)
                    load_shared_panel<CLUSTER, 128>(
                        tile + i * BLOCK_K * 128, v, full, column + i * 64, step * BLOCK_K,
                        head_kv_of(head, heads, heads_kv), BLOCK_K, rank);
            };
            int early = 0;  // steps whose V is under way
#if PDL
            // V is no work of the launches ahead: it is read while they end.
            decode(item);
            for (; early < min(STAGES, all); ++early) load_v(early, early);
            grid_wait();
#endif
            do {
                decode(item);
#pragma unroll 1
                for (int step = 0; step < all; ++step, at.next()) {
                    unsigned full = barriers + 16 * at.stage, tile = ring + at.stage * STAGE_BYTES;
                    if (early > 0) --early;
                    else {
                        mbarrier_wait(full + 8, at.phase ^ 1);
                        load_v(at.stage, step);
                    }
                    if (step < steps)
#pragma unroll
                        for (int i = 0; i < PANELS; ++i)
                            tma_load(tile + i * BLOCK_M * SWIZZLE, scores, full,
                                     step * BLOCK_K + i * PANEL, row, head,
                                     PV_EVICT_FIRST ? EVICT_FIRST : EVICT_NORMAL);
                }
            } while (PV_BLOCKS > 0 && (item += gridDim.x) < items);
#if PDL > 1
            grid_launch_dependents();
#endif
        };
        if (lane == 0) copy();
        if (CLUSTER > 1) __syncwarp(), cluster_arrive(), cluster_wait();  // warps arrive, whole
        return;
    }

#if PDL && STATS
    grid_wait();
#endif
    int own_row = warp / 4 * FRAGMENTS * 64 + warp % 4 * 16;
    unsigned own = staging + warp * FRAGMENTS * (BLOCK_N / 64) * Store::BYTES;
    Release<CLUSTER> release(barriers);
    int item = blockIdx.x;
    do {
        decode(item);
        int first = row + own_row,
            mine = first + lane / 4;  // this thread's rows: mine + 64 f, and 8 further
        // Of causal tiles, a warpgroup multiplies what its own rows need: further, P may be no numbers.
        if (CAUSAL && WARPGROUPS > 1) steps = steps_for(row + (warp / 4 + 1) * FRAGMENTS * 64);
        float d[FRAGMENTS][BLOCK_N / 2] = {};
        auto v_descriptor = [&](int i) {  // 16 keys of all columns
            return wgmma_descriptor<128>(ring + at.stage * STAGE_BYTES + A_BYTES + i * 2048, 1024,
                                         BLOCK_K * 128);
        };
        auto p_tile = [&](int f) {
            return ring + at.stage * STAGE_BYTES + (warp / 4 * FRAGMENTS + f) * 64 * SWIZZLE;
        };
        unsigned before = 0;  // the stage whose products are still under way
        constexpr int ROWS = FRAGMENTS * 2;  // of this thread
        float scale[ROWS];                   // of each, at the end
#pragma unroll
        for (int i = 0; i < ROWS; ++i) scale[i] = 1.f;
#if STATS == 0
        int step = 0;  // there is one at least; did the loop not know, ptxas would serialise its wgmmas
        do {
            mbarrier_wait(barriers + 16 * at.stage, at.phase);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < KEY_STEPS; ++i)
#pragma unroll
                for (int f = 0; f < FRAGMENTS; ++f)
                    Wgmma<BLOCK_N>::ss<IS_BF16, 1>(d[f], Tile::descriptor<BLOCK_M>(p_tile(f), i),
                                                   v_descriptor(i), 1);
            wgmma_commit();
            wgmma_wait<1>();
            release(before, step > 0);
            before = at.stage;
            at.next();
        } while (++step < steps);
        wgmma_wait<0>();
        release(before);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) pin(d[f]);
#elif STATS % 2
        int units = units_of(seqlen_k);
        const float* unit_0 = maxima + static_cast<long long>(head) * units * seqlen_q + mine;
        auto offset = [&](int i) { return i / 2 * 64 + i % 2 * 8; };
        int own_units[ROWS];  // that have keys for the row
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            own_units[i] = mine + offset(i) < seqlen_q
                               ? units_of(keys_of<CAUSAL>(mine + offset(i), seqlen_q, seqlen_k))
                               : 0;
#if STATS == 3
        float largest[ROWS];
        join_units(largest, scale, unit_0, sums + (unit_0 - maxima), own_units, offset, seqlen_q);
#endif
#pragma unroll 1
        for (int unit = 0; unit < steps / (UNIT / BLOCK_K); ++unit) {
            float by[ROWS], part[FRAGMENTS][BLOCK_N / 2];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                bool has = unit < own_units[i];
                float x = has ? unit_0[unit * seqlen_q + offset(i)] : 0.f;  // STATS 1: factors
#if STATS == 3
                x = has ? exp2_approx(x - largest[i]) : 0.f;
#endif
                by[i] = x;
            }
#pragma unroll
            for (int step = 0; step < UNIT / BLOCK_K; ++step, at.next()) {
                mbarrier_wait(barriers + 16 * at.stage, at.phase);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < KEY_STEPS; ++i)
#pragma unroll
                    for (int f = 0; f < FRAGMENTS; ++f)
                        Wgmma<BLOCK_N>::ss<IS_BF16, 1>(part[f], Tile::descriptor<BLOCK_M>(p_tile(f), i),
                                                       v_descriptor(i), step + i > 0);
                wgmma_commit();
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
                pin(part[f]);
#pragma unroll
                for (int i = 0; i < BLOCK_N / 2; ++i)
                    d[f][i] = fmaf(part[f][i], by[f * 2 + i / 2 % 2], d[f][i]);
            }
        }
#else
        static_assert(FRAGMENTS == 1, "P takes BLOCK_K / 4 registers for every 64 rows");
        const float* largest = sums + static_cast<long long>(head) * seqlen_q + mine;
        float from = mine < seqlen_q ? largest[0] : 0.f, from_8 = mine + 8 < seqlen_q ? largest[8] : 0.f;
        float sum = 0.f, sum_8 = 0.f;
        int limit = keys_of<CAUSAL>(mine, seqlen_q, seqlen_k), limit_8 = keys_of<CAUSAL>(mine + 8, seqlen_q, seqlen_k);
        int whole = keys_of<CAUSAL>(first, seqlen_q, seqlen_k);
#pragma unroll 1
        for (int step = 0; step < steps; ++step, at.next()) {
            unsigned p[BLOCK_K / 4];
            mbarrier_wait(barriers + 16 * at.stage, at.phase);
            __syncwarp();
            int in = warp % 4 * 16 + lane % 16;  // ldmatrix: this lane's row and chunk of each 16 keys
            unsigned tile = p_tile(0) + in * SWIZZLE, swizzle = SWIZZLE == 128 ? in % 8 : in / 2 % 4;
            bool edge = whole < (step + 1) * BLOCK_K;
#pragma unroll
            for (int i = 0; i < KEY_STEPS; ++i) {
                unsigned s[4];
                ldmatrix_x4(s, tile + i * 16 / PANEL * BLOCK_M * SWIZZLE +
                                   ((i * 16 % PANEL / 8 + lane / 16 ^ swizzle) << 4));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float x = low_of(s[j]), y = high_of(s[j]);
                    if (edge) {
                        int key = step * BLOCK_K + i * 16 + j / 2 * 8 + lane % 4 * 2,
                            end = j % 2 ? limit_8 : limit;
                        x = key < end ? x : minus_infinity();
                        y = key + 1 < end ? y : minus_infinity();
                    }
                    x = exp2_approx(x - (j % 2 ? from_8 : from)),
                    y = exp2_approx(y - (j % 2 ? from_8 : from));
                    (j % 2 ? sum_8 : sum) += x + y;
                    p[i * 4 + j] = pack(x, y);
                }
            }
            pin(p);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < KEY_STEPS; ++i)
                Wgmma<BLOCK_N>::rs<IS_BF16, 1>(d[0], p + i * 4, v_descriptor(i), 1);
            wgmma_commit();
            // Not later: ptxas gives the registers of p to the next step's scores while wgmma still reads
            // them, and rows came out NaN. Other warpgroups cover the wait.
            wgmma_wait<0>();
            pin(d[0]);
            pin(p);
            release(at.stage);
        }
        scale[0] = 1.f / quad_sum(sum), scale[1] = 1.f / quad_sum(sum_8);
#endif
        if (CAUSAL && WARPGROUPS * CLUSTER > 1)  // steps that only other rows need
#pragma unroll 1
            for (int step = steps; step < all; ++step, at.next()) {
                mbarrier_wait(barriers + 16 * at.stage, at.phase);
                release(at.stage);
            }
        Store::wait<0>();
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
            for (int i = 0; i < BLOCK_N / 64; ++i)
                Store::store(o, own + (f * (BLOCK_N / 64) + i) * Store::BYTES, d[f] + i * 32, scale[f * 2],
                             scale[f * 2 + 1], column + i * 64, first + f * 64, head,
                             seqlen_q - first - f * 64, 64, nullptr, 0);
        Store::commit();
    } while (PV_BLOCKS > 0 && (item += gridDim.x) < items);
    Store::wait<0>();
    if (CLUSTER > 1) cluster_arrive(), cluster_wait();
}
