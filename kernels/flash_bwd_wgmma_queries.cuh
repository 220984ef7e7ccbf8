// The stage queries of flash_bwd_wgmma: dQ computed again, and delta. The template includes this
// where what both stages of products share is known.
#pragma once

constexpr int WARPGROUPS = Q_WARPGROUPS, BLOCK_M = 64 * WARPGROUPS, BLOCK_N = Q_BLOCK_N;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
// Tiles of K and of V have stages of their own, or take turns in three stages.
constexpr bool TURNS = Q_STAGES == 1;
constexpr int STAGES = TURNS ? 3 : Q_STAGES;
constexpr unsigned BARRIERS = TURNS ? 16 : 32, OF_V = TURNS ? 0 : 16;  // of a stage; of V in it
using QTile = SharedTile<element_t, 64, COLUMNS, 128>;                 // of a warpgroup
using KTile = SharedTile<element_t, BLOCK_N, COLUMNS, 128>;

struct Memory {
    unsigned q, o, k, v, barriers;
    __device__ __forceinline__ explicit Memory(unsigned base)
        : q(base),
          o(q + WARPGROUPS * QTile::BYTES),
          k(o + WARPGROUPS * QTile::BYTES),
          v(k + !TURNS * STAGES * KTile::BYTES),
          barriers(v + STAGES * KTile::BYTES) {}
    __device__ __forceinline__ unsigned k_full(int i) const { return barriers + BARRIERS * i; }
    __device__ __forceinline__ unsigned k_empty(int i) const { return k_full(i) + 8; }
    __device__ __forceinline__ unsigned v_full(int i) const { return k_full(i) + OF_V; }
    __device__ __forceinline__ unsigned v_empty(int i) const { return v_full(i) + 8; }
    __device__ __forceinline__ unsigned q_full(int i) const { return k_full(STAGES) + 8 * i; }
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(k_full(i), 1);
            if (!TURNS) mbarrier_init(v_full(i), 1);
            mbarrier_init(k_empty(i), 4 * WARPGROUPS);
            if (!TURNS) mbarrier_init(v_empty(i), 4 * WARPGROUPS);
        }
        for (int i = 0; i < WARPGROUPS; ++i) mbarrier_init(q_full(i), 1);
        mbarrier_init_fence();
    }
};

// 64 queries of a warpgroup, and tiles of keys from right to left.
struct Consumer {
    const Memory& at;
    int lane, wg, own, row;  // own: the warpgroup's first; row: of this thread, and row + 8
    int before, tiles;  // of keys: tiles before the block's, and its own, which may be 0 or less
    int seqlen_k, low, end;  // a row sees the keys from row + low on, before row + end
    int first_key;           // PADDED: and not those before it
    float factor, neg_lse[2], delta[2];
    unsigned long long q, o, k, v;  // descriptors
    using Scores = float[BLOCK_N / 2];
    using Fragment = unsigned[BLOCK_N / 4];

    __device__ __forceinline__ int key(int j) const { return (before + tiles - 1 - j) * BLOCK_N; }
    __device__ __forceinline__ static Position<STAGES> of_k(int j) {
        return Position<STAGES>(TURNS ? 2 * j : j);
    }
    __device__ __forceinline__ static Position<STAGES> of_v(int j) {
        return Position<STAGES>(TURNS ? 2 * j + 1 : j);
    }
    __device__ __forceinline__ int seen_by(int query) const {
        return HIDES_LATER ? min(seqlen_k, query + end) : seqlen_k;
    }
    __device__ __forceinline__ void arrive(unsigned barrier) const {
        if (lane == 0) mbarrier_arrive(barrier);
    }
    __device__ __forceinline__ void mask(Scores& s, int j) const {
        if (key(j) + BLOCK_N <= seen_by(own) && !(HIDES_EARLIER && key(j) < own + 63 + low) &&
            !(PADDED && key(j) < first_key))
            return;
        const int limit = seen_by(row), limit_8 = seen_by(row + 8), first = key(j) + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) {
            const int of_i = first + i / 4 * 8 + i % 2;
            if (of_i >= (i & 2 ? limit_8 : limit)) s[i] = minus_infinity();
            if (HIDES_EARLIER && of_i - (i & 2 ? 8 : 0) < row + low) s[i] = minus_infinity();
            if (PADDED && of_i < first_key) s[i] = minus_infinity();
        }
    }
    // Padding may hold NaN, which is one times a dS of 0 too, and dS one of V's.
    __device__ __forceinline__ void clear_padding(int j, const Position<STAGES>& of_k,
                                                  const Position<STAGES>& of_v) const {
        const int begin = first_key - key(j), end = seqlen_k - key(j);
        if (begin <= 0 && end >= BLOCK_N) return;
        mbarrier_wait(at.v_full(of_v.stage), of_v.phase);
        clear_rows<KTile, BLOCK_N>(at.k + of_k.stage * KTile::BYTES, begin, end, 1 + wg);
        clear_rows<KTile, BLOCK_N>(at.v + of_v.stage * KTile::BYTES, begin, end, 1 + wg);
    }
    __device__ __forceinline__ void run(float (&dq)[COLUMNS / 2]) const {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) dq[i] = 0.f;
        // The last query sees most.
        const int seen = (max(0, seen_by(own + 63)) + BLOCK_N - 1) / BLOCK_N;
        int unseen = tiles - min(tiles, seen - before);
        if (PADDED) unseen = min(tiles, unseen);
        // The first query sees the first of the keys. At most one tile is left after that, whose
        // room nobody waits for.
        const int until =
            tiles - (HIDES_EARLIER ? max(PADDED ? first_key : 0, own + low) / BLOCK_N - before : 0);
        int j = 0;
#pragma unroll 1
        for (; j < unseen; ++j) {
            const Position<STAGES> now = of_k(j), now_v = of_v(j);
            mbarrier_wait(at.k_full(now.stage), now.phase);
            mbarrier_wait(at.v_full(now_v.stage), now_v.phase);
            arrive(at.k_empty(now.stage)), arrive(at.v_empty(now_v.stage));
        }
        mbarrier_wait(at.q_full(wg), 0);
#pragma unroll 1
        for (; j < until; ++j) {
            Scores s, dp;
            Fragment ds;
            const Position<STAGES> now = of_k(j), now_v = of_v(j);
            mbarrier_wait(at.k_full(now.stage), now.phase);
            if (PADDED) clear_padding(j, now, now_v);
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i) {
                if (LSE_FIRST) s[i] = neg_lse[i / 2 % 2];
                if (DELTA_FIRST) dp[i] = -delta[i / 2 % 2];
            }
            if (LSE_FIRST) warpgroup_fence_operand(s);
            if (DELTA_FIRST) warpgroup_fence_operand(dp);
            wgmma_fence();
            multiply<QTile::PANEL_BYTES, KTile::PANEL_BYTES, !LSE_FIRST>(
                s, q, k + now.stage * (KTile::BYTES / 16));
            mbarrier_wait(at.v_full(now_v.stage), now_v.phase);
            wgmma_fence();
            multiply<QTile::PANEL_BYTES, KTile::PANEL_BYTES, !DELTA_FIRST>(
                dp, o, v + now_v.stage * (KTile::BYTES / 16));
            wgmma_wait<1>();
            warpgroup_fence_operand(s);
            mask(s, j);
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i)
                s[i] =
                    exp2_approx(LSE_FIRST ? s[i] * factor : fmaf(s[i], factor, neg_lse[i / 2 % 2]));
            wgmma_wait<0>();
            warpgroup_fence_operand(dp);
            arrive(at.v_empty(now_v.stage));
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; i += 2) {
                auto less = [&](int n) { return DELTA_FIRST ? dp[n] : dp[n] - delta[i / 2 % 2]; };
                ds[i / 2] = pack(s[i] * less(i), s[i + 1] * less(i + 1));
            }
            warpgroup_fence_operand(ds), warpgroup_fence_operand(dq);
            wgmma_fence();
            accumulate<COLUMNS, KTile::PANEL_BYTES>(
                dq, ds,
                wgmma_descriptor<128>(at.k, 1024, KTile::PANEL_BYTES) +
                    now.stage * (KTile::BYTES / 16));
            wgmma_wait<0>();
            warpgroup_fence_operand(dq);
            arrive(at.k_empty(now.stage));
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_bwd_wgmma_queries(
    const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
    const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap d_o,
    const __grid_constant__ TensorMap dq_map, const uint4* __restrict__ out,
    const uint4* __restrict__ d_out, const float* __restrict__ lse, float* __restrict__ neg_lse,
    float* __restrict__ delta, int seqlen_q, int seqlen_k, int pitch, int heads, int group,
    int together, float factor,
    float scale WINDOW_PARAMETERS RANGE_PARAMETERS HEADS_PARAMETER STRIDES_PARAMETERS(out)
        STRIDES_PARAMETERS(d_out)) {
    const TensorLayout of_o LAYOUT_OF(out), of_do LAYOUT_OF(d_out);
    extern __shared__ __align__(1024) unsigned char smem[];
    const Memory at(smem_address(smem));
    if (PDL) grid_launch_dependents();
    const int tiles_m = (seqlen_q + BLOCK_M - 1) / BLOCK_M;
    const Work work(blockIdx.x, tiles_m, heads, together);
#if PADDED
    const KeyRange own_keys = keys_of_item(key_range, work.head / heads_of_item, seqlen_k);
    seqlen_k = own_keys.end;
    const int first_key = own_keys.first;
    const bool longest_last = low <= 1 - seqlen_q;  // as with a causal mask
#else
    constexpr int first_key = 0;
    constexpr bool longest_last = CAUSAL;
#endif
    const int query = (longest_last ? tiles_m - 1 - work.tile : work.tile) * BLOCK_M;
#if WINDOW
    const int end = 1 + high;
#else
    const int low = 0, end = 1 + seqlen_k - seqlen_q;
#endif
    const int seen = HIDES_LATER ? min(seqlen_k, query + BLOCK_M - 1 + end) : seqlen_k;
    const int after = (max(0, seen) + BLOCK_N - 1) / BLOCK_N;
    const int before = HIDES_EARLIER ? max(first_key, query + low) / BLOCK_N : 0;
    const int tiles = after - before;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == WARPGROUPS * 128) at.init();
    __syncthreads();
    if (warp >= 4 * WARPGROUPS) {
        registers_decrease<PRODUCER_REGISTERS>();
        if (threadIdx.x == WARPGROUPS * 128) {
            const TensorLayout::Head head = of_o.of_queries(work.head),
                                     head_kv = of_o.of_keys(work.head, group);
            Ring<STAGES> ring;
#pragma unroll 1
            for (int i = 0; i < WARPGROUPS; ++i) {
                mbarrier_expect(at.q_full(i), 2 * QTile::BYTES);
#pragma unroll
                for (int p = 0; p < PANELS; ++p) {
                    const unsigned to = i * QTile::BYTES + p * QTile::PANEL_BYTES;
                    load_box(at.q + to, q, at.q_full(i), p * 64, query + i * 64, head);
                    load_box(at.o + to, d_o, at.q_full(i), p * 64, query + i * 64, head);
                }
            }
#pragma unroll 1
            for (int j = 0; j < tiles; ++j) {
                const int key = (after - 1 - j) * BLOCK_N;
                mbarrier_wait(at.k_empty(ring.stage), ring.phase ^ 1);
                load_tile<KTile>(at.k + ring.stage * KTile::BYTES, k, at.k_full(ring.stage), key,
                                 head_kv);
                if (TURNS) ring.next();
                mbarrier_wait(at.v_empty(ring.stage), ring.phase ^ 1);
                load_tile<KTile>(at.v + ring.stage * KTile::BYTES, v, at.v_full(ring.stage), key,
                                 head_kv);
                ring.next();
            }
        }
    } else {
        registers_increase<CONSUMER_REGISTERS>();
        const int wg = warp / 4, row = query + warp * 16 + lane / 4;
        float sum[COLUMNS / 2], l[2], d[2] = {0.f, 0.f};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            l[r] = minus_infinity();
            if (const int own = row + 8 * r; own < seqlen_q) {
                const long long from = static_cast<long long>(work.head) * seqlen_q + own;
                const uint4* of_out = out + of_o.of_output(from, work.head, own) / 8;
                const uint4* of_d_out = d_out + of_do.of_output(from, work.head, own) / 8;
                l[r] = negated(lse[from], lse_factor(scale));
#pragma unroll
                for (int i = 0; i < (LANES + 3) / 4; ++i)
                    if (LANES % 4 == 0 || i * 4 + lane % 4 < LANES)
                        d[r] += dot(of_out[i * 4 + lane % 4], of_d_out[i * 4 + lane % 4]);
            }
            d[r] += __shfl_xor_sync(0xffffffffu, d[r], 1);
            d[r] += __shfl_xor_sync(0xffffffffu, d[r], 2);
            const long long to = static_cast<long long>(work.head) * pitch + row + 8 * r;
            if (lane % 4 == 0) neg_lse[to] = l[r], delta[to] = d[r];
        }
        const Consumer self{at,
                            lane,
                            wg,
                            query + wg * 64,
                            row,
                            before,
                            tiles,
                            seqlen_k,
                            low,
                            end,
                            first_key,
                            factor,
                            {l[0], l[1]},
                            {d[0], d[1]},
                            wgmma_descriptor<128>(at.q + wg * QTile::BYTES, 1024),
                            wgmma_descriptor<128>(at.o + wg * QTile::BYTES, 1024),
                            wgmma_descriptor<128>(at.k, 1024, KTile::PANEL_BYTES),
                            wgmma_descriptor<128>(at.v, 1024, KTile::PANEL_BYTES)};
        self.run(sum);
        named_barrier_sync(1 + wg, 128);
        store_rows<QTile::PANEL_BYTES>(sum, scale, at.q + wg * QTile::BYTES, dq_map,
                                       query + wg * 64, of_o.of_queries(work.head), 1 + wg);
        if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
    }
}
