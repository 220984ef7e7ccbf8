// The stage keys of flash_bwd_wgmma: dK and dV, and what is added to dQ. The template includes this
// where what both stages of products share is known.
#pragma once

constexpr int WARPGROUPS = KV_WARPGROUPS, BLOCK_N = 64 * WARPGROUPS, DS_BUFFERS = 2, P_BUFFERS = 2;
constexpr bool DQ = !RECOMPUTE;  // whether the block also adds to dQ
constexpr bool APART = DKV_WARPGROUPS > 1, STAGED = DQ && !DQ_ADD;
constexpr int CONSUMERS = WARPGROUPS * DKV_WARPGROUPS;  // warpgroups
static_assert(DQ || !DQ_RING, "sums of dQ");
static_assert(CLUSTER == 1 || APART, "clusters of others were slower at all lengths but one");
static_assert(!APART || WARPGROUPS == 1, "two warpgroups have 64 keys in common");
// Beside dQ's warpgroup a thread begins with 128 registers, which 256 columns of sums would take.
constexpr int SUM_COLUMNS = DQ && COLUMNS > 192 ? 128 : COLUMNS;
// Parts of a tile of dQ: of 64 queries, the PARTS_OF_ROW of PART_COLUMNS, the last clipped.
constexpr int PARTS_OF_ROW = (COLUMNS + PART_COLUMNS - 1) / PART_COLUMNS,
              PARTS = BLOCK_M / 64 * PARTS_OF_ROW, PART_CHUNKS = PART_COLUMNS / 8;
constexpr unsigned PART_BYTES = 64 * PART_COLUMNS * 4;
constexpr int THREADS = 128 * (CONSUMERS + 1 + DQ);
using KTile = SharedTile<element_t, BLOCK_N, COLUMNS, 128>;
using QTile = SharedTile<element_t, BLOCK_M, COLUMNS, 128>;
constexpr unsigned ROW_BYTES = BLOCK_M * 4, DS_BYTES = BLOCK_M * 128;  // dS, P: of a warpgroup
static_assert(!DQ || (BLOCK_M % 64 == 0 && PART_COLUMNS % 8 == 0), "dQ has parts of 64 queries");
// A warp adds each part of a tile of dQ, and one works for other heads: it converts UNIT columns of
// 64 queries at a time, and has panels of 64 columns.
constexpr bool OTHERS = DQ_RING > 0;
constexpr int ADDERS = STAGED ? PARTS : 1, UNIT = 32, UNIT_CHUNKS = UNIT / 8;
constexpr unsigned UNIT_BYTES = 64 * UNIT * 4, PANEL_BYTES = 64 * 128;
static_assert(!STAGED || PARTS + OTHERS <= 3, "warps of the producer's");
constexpr int ROWS_BARRIER = 1, K_READ_BARRIER = 9, ADDED_BARRIER = 10;

// Where everything lies in shared memory. It begins at 1024, as dynamic shared memory does where
// there is no other: constant addresses spare registers. Wgmma takes these of its own block. In a
// cluster other instructions take addresses of the cluster, which `at` makes of them.
struct Memory {
    static constexpr unsigned K = 1024, V = K + KTile::BYTES, Q = V + KTile::BYTES,
                              O = Q + NUM_STAGES * QTile::BYTES, DS = O + NUM_STAGES * QTile::BYTES,
                              P = DS + DQ * DS_BUFFERS * WARPGROUPS * DS_BYTES,
                              STAGING = P + APART * P_BUFFERS * DS_BYTES,
                              PANEL = STAGING + STAGED * PARTS * PART_BYTES,
                              UNITS = PANEL + OTHERS * PANEL_BYTES,
                              ZEROS = UNITS + OTHERS * 2 * UNIT_BYTES,
                              NEG_LSE = ZEROS + OTHERS * UNIT_BYTES,
                              DELTA = NEG_LSE + NUM_STAGES * ROW_BYTES,
                              BARRIERS = DELTA + NUM_STAGES * ROW_BYTES,
                              MORE = BARRIERS + 32 * NUM_STAGES;
    __device__ static __forceinline__ unsigned at(unsigned place) {
        if constexpr (CLUSTER == 1) return place;
        extern __shared__ __align__(1024) unsigned char smem[];
        return smem_address(smem) - K + place;
    }
    __device__ static __forceinline__ unsigned q_full(int i) { return at(BARRIERS + 32 * i); }
    __device__ static __forceinline__ unsigned q_empty(int i) { return at(BARRIERS + 32 * i + 8); }
    __device__ static __forceinline__ unsigned o_full(int i) { return at(BARRIERS + 32 * i + 16); }
    __device__ static __forceinline__ unsigned o_empty(int i) { return at(BARRIERS + 32 * i + 24); }
    __device__ static __forceinline__ unsigned k_full() { return at(MORE); }
    __device__ static __forceinline__ unsigned v_full() { return at(MORE + 8); }
    __device__ static __forceinline__ unsigned ds_full(int i) { return at(MORE + 16 + 16 * i); }
    __device__ static __forceinline__ unsigned ds_empty(int i) { return at(MORE + 24 + 16 * i); }
    // Of each part of dQ's tile: written to staging, and added from there.
    __device__ static __forceinline__ unsigned staged(int part) {
        return at(MORE + 48 + 16 * part);
    }
    __device__ static __forceinline__ unsigned added(int part) { return at(MORE + 56 + 16 * part); }
    // Barriers of the buffers in which one warpgroup gives P to the other.
    static constexpr unsigned OF_P = MORE + 48 + STAGED * PARTS * 16;
    __device__ static __forceinline__ unsigned p_full(int i) { return at(OF_P + 16 * i); }
    __device__ static __forceinline__ unsigned p_empty(int i) { return at(OF_P + 8 + 16 * i); }
    // Of two pairs of panels of O and dO, and of two units of sums.
    static constexpr unsigned OF_OTHERS = OF_P + APART * P_BUFFERS * 16;
    __device__ static __forceinline__ unsigned pair_full(int i) { return at(OF_OTHERS + 8 * i); }
    __device__ static __forceinline__ unsigned unit_full(int i) {
        return at(OF_OTHERS + 16 + 8 * i);
    }
    __device__ static __forceinline__ void init() {
        for (int i = 0; i < NUM_STAGES; ++i) {
            mbarrier_init(q_full(i), 1), mbarrier_init(o_full(i), 1);
            mbarrier_init(q_empty(i), 4 * CONSUMERS * CLUSTER);
            mbarrier_init(o_empty(i), 4 * CONSUMERS * CLUSTER);
        }
        mbarrier_init(k_full(), 1), mbarrier_init(v_full(), 1);
        for (int i = 0; i < DQ * DS_BUFFERS; ++i)
            mbarrier_init(ds_full(i), 4 * WARPGROUPS), mbarrier_init(ds_empty(i), 4);
        for (int i = 0; i < STAGED * PARTS; ++i)
            mbarrier_init(staged(i), 4), mbarrier_init(added(i), 1);
        for (int i = 0; i < APART * P_BUFFERS; ++i)
            mbarrier_init(p_full(i), 4), mbarrier_init(p_empty(i), 4);
        for (int i = 0; i < 2 * (DQ_RING > 0); ++i)
            mbarrier_init(pair_full(i), 1), mbarrier_init(unit_full(i), 1);
        mbarrier_init_fence();
    }
};
constexpr int NEVER = 1 << 30;  // a key that no query sees
// first, tiles: of queries of a head that see a key of the block; 0 or less if none does. Query i
// sees key j if j + diagonal <= i and, with a window, i <= j + reach. Of seqlen_k keys, PADDED
// those from first_key on count.
struct Call {
    const float *neg_lse, *delta;
    float* sums;
    int seqlen_k, first_key, pitch, group, head_kv, key, diagonal, reach, first, tiles;
    TensorLayout::Head of_keys;  // head_kv
#if DQ_RING
    // Counts of each head of keys, by whose blocks others wait: see Counts. ring, lag, lead: heads
    // of keys that have sums, that a block's is behind the one it converts, before the one of its
    // delta.
    unsigned* turns;
    int ring, lag, lead, shares;
    enum Counts { ADDED, CONVERTED, DELTA };
    __device__ __forceinline__ unsigned* count(int head, Counts of) const {
        return turns + 3 * head + of;
    }
    __device__ __forceinline__ float* own_sums() const {
        if (head_kv >= ring) flag_wait(count(head_kv - ring, CONVERTED), shares);
        return sums + static_cast<long long>(head_kv % ring - head_kv) * group * pitch * HEAD_DIM;
    }
#else
    __device__ __forceinline__ float* own_sums() const { return sums; }
#endif
    __device__ __forceinline__ int head(int number) const { return head_kv * group + number; }
    __device__ __forceinline__ TensorLayout::Head of_queries(int number) const {
#if STRIDED
        return {of_keys.head * group + number, of_keys.batch};
#else
        return head(number);
#endif
    }
    __device__ __forceinline__ int row(int tile) const { return (first + tile) * BLOCK_M; }
    __device__ __forceinline__ long long at(int number, int tile) const {
        return static_cast<long long>(head(number)) * pitch + row(tile);
    }
    // The last of `count` keys from `key` on; NEVER if the item has not all of them.
    __device__ __forceinline__ int there(int key, int count) const {
        return key >= first_key && key + count <= seqlen_k ? key + count - 1 : NEVER;
    }
    __device__ __forceinline__ int end_row() const { return (first + tiles) * BLOCK_M; }
};

// BLOCK_M rows of a panel, for all blocks of a cluster, of which each loads its share.
__device__ __forceinline__ void load_panel(unsigned to, const TensorMap& map, unsigned full,
                                           int column, int row, const TensorLayout::Head& head,
                                           unsigned rank) {
    constexpr int SHARE = BLOCK_M / CLUSTER;
    if constexpr (CLUSTER > 1)
        load_box_multicast(to + rank * SHARE * 128, map, full, column, row + rank * SHARE, head,
                           (1 << CLUSTER) - 1);
    else load_box(to, map, full, column, row, head);
}
__device__ __forceinline__ void load_tiles(const TensorMap& q, const TensorMap& k,
                                           const TensorMap& v, const TensorMap& d_o,
                                           const Call& call, unsigned rank) {
    load_tile<KTile>(Memory::at(Memory::K), k, Memory::k_full(), call.key, call.of_keys);
    load_tile<KTile>(Memory::at(Memory::V), v, Memory::v_full(), call.key, call.of_keys);
    if (PDL) grid_wait();
#if DQ_RING
    if (call.head_kv >= call.lead) flag_wait(call.count(call.head_kv, Call::DELTA), call.shares);
#endif
    Ring<NUM_STAGES> ring;
#pragma unroll 1
    for (int number = 0; number < call.group; ++number)
#pragma unroll 1
        for (int tile = 0; tile < call.tiles; ++tile) {
            const unsigned i = ring.stage;
            const int row = call.row(tile);
            const TensorLayout::Head head = call.of_queries(number);
            const long long at = call.at(number, tile);
            mbarrier_wait(Memory::q_empty(i), ring.phase ^ 1);
            mbarrier_expect(Memory::q_full(i), QTile::BYTES + ROW_BYTES);
#pragma unroll
            for (int p = 0; p < PANELS; ++p)
                load_panel(Memory::at(Memory::Q + i * QTile::BYTES + p * QTile::PANEL_BYTES), q,
                           Memory::q_full(i), p * 64, row, head, rank);
            bulk_load(Memory::at(Memory::NEG_LSE + i * ROW_BYTES), call.neg_lse + at, ROW_BYTES,
                      Memory::q_full(i));
            mbarrier_wait(Memory::o_empty(i), ring.phase ^ 1);
            mbarrier_expect(Memory::o_full(i), QTile::BYTES + ROW_BYTES);
#pragma unroll
            for (int p = 0; p < PANELS; ++p)
                load_panel(Memory::at(Memory::O + i * QTile::BYTES + p * QTile::PANEL_BYTES), d_o,
                           Memory::o_full(i), p * 64, row, head, rank);
            bulk_load(Memory::at(Memory::DELTA + i * ROW_BYTES), call.delta + at, ROW_BYTES,
                      Memory::o_full(i));
            ring.next();
        }
}

// 64 keys of a warpgroup. AHEAD 0: S | P; dP | dS from the rounded P; dV, dK. S and dP have the
// same registers. 3: the same, but dV runs beside dS, and tiles that every query sees whole have a
// loop of their own. 2: dP, dV | dS beside dV; S of the next tile, dK | P of the next beside dK.
// 1: dP and beside it P | dS; dV, dK, and S of the next tile. "|": waits for the products before.
struct Consumer {
    const Call& call;
    float factor;
    int lane, own, key;  // own: the warpgroup's first; key: of this thread, and key + 8
#if PADDED
    int key_8, last_key;  // key + 8, and the warpgroup's last: see Call::there
#endif
    unsigned ds;                    // where this lane's first row of dS goes
    unsigned long long k, v, q, o;  // descriptors
    using Scores = float[BLOCK_M / 2];
    using Fragment = unsigned[BLOCK_M / 4];
    using Sums = float[COLUMNS / 2];

    // What belongs to the queries of a thread's numbers i and i + 1, and of i + 2 and i + 3 too.
    __device__ __forceinline__ float2 statistics(unsigned of, unsigned stage, int i) const {
        return load_shared_floats(Memory::at(of + stage * ROW_BYTES + lane % 4 * 8) + i * 8);
    }
    // What sums begin with. It spares fp32 arithmetic, beside which products whose operand is in
    // registers take up to 1.5 times as long.
    __device__ __forceinline__ void begin_with(Scores& x, unsigned of, unsigned stage,
                                               float sign) const {
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i += 4) {
            const float2 l = statistics(of, stage, i);
            x[i] = x[i + 2] = sign * l.x, x[i + 1] = x[i + 3] = sign * l.y;
        }
        warpgroup_fence_operand(x);
    }
    __device__ __forceinline__ void begin_s(Scores& s, int j) const {
        const Position<NUM_STAGES> at(j);
        mbarrier_wait(Memory::q_full(at.stage), at.phase);
        if constexpr (LSE_FIRST) begin_with(s, Memory::NEG_LSE, at.stage, 1.f);
        wgmma_fence();
        multiply<KTile::PANEL_BYTES, QTile::PANEL_BYTES, !LSE_FIRST>(
            s, k, q + at.stage * (QTile::BYTES / 16));
    }
    __device__ __forceinline__ void begin_dp(Scores& dp, int j) const {
        const Position<NUM_STAGES> at(j);
        mbarrier_wait(Memory::o_full(at.stage), at.phase);
        if constexpr (DELTA_FIRST) begin_with(dp, Memory::DELTA, at.stage, -1.f);
        wgmma_fence();
        multiply<KTile::PANEL_BYTES, QTile::PANEL_BYTES, !DELTA_FIRST>(
            dp, v, o + at.stage * (QTile::BYTES / 16));
    }
    __device__ __forceinline__ void begin_sum(Sums& sum, Fragment& a, unsigned long long b,
                                              int j) const {
        warpgroup_fence_operand(a), warpgroup_fence_operand(sum);
        wgmma_fence();
        accumulate<SUM_COLUMNS, QTile::PANEL_BYTES>(
            sum, a, b + Position<NUM_STAGES>(j).stage * (QTile::BYTES / 16));
    }
    __device__ __forceinline__ void release(int j) const {
        const unsigned i = Position<NUM_STAGES>(j).stage;
        give_back(Memory::q_empty(i)), give_back(Memory::o_empty(i));
    }
    // A stage of Q or of dO, to every block that loads a share of it.
    __device__ __forceinline__ void give_back(unsigned empty) const {
        if constexpr (CLUSTER > 1)
            mbarrier_arrive_remote(cluster_address(empty, lane % CLUSTER), lane, CLUSTER);
        else if (lane == 0) mbarrier_arrive(empty);
    }
    // row: of the tile's first query, column 0.
    __device__ __forceinline__ void mask(Scores& s, int row) const {
        const int key = opaque(this->key);  // so that what follows takes registers here alone
#if PADDED
        const int last = last_key;
#else
        const int last = own + 63;
#endif
        if ((PADDED || own + 64 <= call.seqlen_k) && !(HIDES_LATER && row < last + call.diagonal) &&
            !(HIDES_EARLIER && row + BLOCK_M > own + 1 + call.reach))
            return;
        // The first column that sees each of the two keys; most: the last that sees the first one.
        const int column = lane % 4 * 2, begin = key + call.diagonal - row - column;
#if PADDED
        const int other = opaque(key_8) - key, least = begin, least_8 = begin + other;
#else
        constexpr int other = 8;
        const int least = key < call.seqlen_k ? (HIDES_LATER ? begin : 0) : NEVER,
                  least_8 = key + 8 < call.seqlen_k ? (HIDES_LATER ? begin + 8 : 0) : NEVER;
#endif
        const int most = key + call.reach - row - column;
        auto hide_late = [&](int i) {
            if (HIDES_EARLIER && i / 4 * 8 + i % 2 > (i & 2 ? most + other : most))
                s[i] = minus_infinity();
        };
        // In one loop for both, 128 queries spill; in two, ptxas serialises products of AHEAD 1.
        constexpr bool ONE_LOOP = AHEAD == 1 && !APART;
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; ++i) {
            if (i / 4 * 8 + i % 2 < (i & 2 ? least_8 : least)) s[i] = minus_infinity();
            if (ONE_LOOP) hide_late(i);
        }
#pragma unroll
        for (int i = 0; i < (ONE_LOOP ? 0 : BLOCK_M / 2); ++i) hide_late(i);
    }
    __device__ __forceinline__ void exponentials(const Scores& s, Scores& p, int j) const {
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i += 4) {
            float2 l = {};
            if constexpr (!LSE_FIRST)
                l = statistics(Memory::NEG_LSE, Position<NUM_STAGES>(j).stage, i);
#pragma unroll
            for (int n = 0; n < 4; ++n)
                p[i + n] = exp2_approx(LSE_FIRST ? s[i + n] * factor
                                                 : fmaf(s[i + n], factor, n % 2 ? l.y : l.x));
        }
    }
    __device__ __forceinline__ static void round(const Scores& x, Fragment& to) {
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i += 2) to[i / 2] = pack(x[i], x[i + 1]);
    }
    // p_of(i): P of the numbers i and i + 1.
    template <class P>
    __device__ __forceinline__ void differences(const Scores& dp, Fragment& ds, int j,
                                                P p_of) const {
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; i += 4) {
            float2 d = {};
            if constexpr (!DELTA_FIRST)
                d = statistics(Memory::DELTA, Position<NUM_STAGES>(j).stage, i);
            const float2 p = p_of(i), p_8 = p_of(i + 2);
            ds[i / 2] = pack(p.x * less(dp[i], d.x), p.y * less(dp[i + 1], d.y));
            ds[i / 2 + 1] = pack(p_8.x * less(dp[i + 2], d.x), p_8.y * less(dp[i + 3], d.y));
        }
    }
    __device__ __forceinline__ static float less(float dp, float delta) {
        return DELTA_FIRST ? dp : dp - delta;
    }
    __device__ __forceinline__ void differences(const Scores& dp, Fragment& ds, int j,
                                                const Fragment& p) const {
        differences(dp, ds, j,
                    [&](int i) { return make_float2(low_of(p[i / 2]), high_of(p[i / 2])); });
    }
    // dS, its columns as rows of queries, to this warpgroup's 64 columns of shared memory.
    __device__ __forceinline__ void put_ds(const Fragment& x, int j) const {
        if constexpr (DQ) {
            const Position<DS_BUFFERS> at(j);
            mbarrier_wait(Memory::ds_empty(at.stage), at.phase ^ 1);
            const unsigned to = ds + at.stage * WARPGROUPS * DS_BYTES;
#pragma unroll
            for (int i = 0; i < BLOCK_M / 16; ++i)
                stmatrix_x4_trans(to + i * 2048, x[4 * i], x[4 * i + 1], x[4 * i + 2],
                                  x[4 * i + 3]);
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(Memory::ds_full(at.stage));
        }
    }
    // Passes by a tile none of whose queries sees a key of the warpgroup.
    __device__ __forceinline__ void pass(int j) const {
        const Position<NUM_STAGES> at(j);
        mbarrier_wait(Memory::q_full(at.stage), at.phase);
        mbarrier_wait(Memory::o_full(at.stage), at.phase);
        if constexpr (DQ) {
            const Fragment zero = {};
            put_ds(zero, j);
        }
        release(j);
    }
    // A tile whose S is there. Next: begins S of the next one.
    template <bool Next>
    __device__ __forceinline__ void step_of_s(Scores& s, Sums& dk, Sums& dv, int j, int row) const {
        Scores p, dp;
        Fragment rounded, difference;
        begin_dp(dp, j);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; ++i) p[i] = s[i];
        mask(p, row);
        exponentials(p, p, j);
        wgmma_wait<0>();
        warpgroup_fence_operand(dp);
        round(p, rounded);
        differences(dp, difference, j, [&](int i) { return make_float2(p[i], p[i + 1]); });
        begin_sum(dv, rounded, o, j), begin_sum(dk, difference, q, j);
        put_ds(difference, j);
        if constexpr (Next) begin_s(s, j + 1);
        wgmma_wait<0>();
        warpgroup_fence_operand(dk), warpgroup_fence_operand(dv);
        if constexpr (Next) warpgroup_fence_operand(s);
        release(j);
    }
    // A tile whose P is there. Next: makes P of the next one.
    template <bool Next>
    __device__ __forceinline__ void step_of_p(Scores& s, Fragment& p, Sums& dk, Sums& dv, int j,
                                              int row) const {
        Fragment ds;
        begin_dp(s, j), begin_sum(dv, p, o, j);
        wgmma_wait<1>();
        warpgroup_fence_operand(s);
        differences(s, ds, j, p);
        if constexpr (Next) begin_s(s, j + 1);
        begin_sum(dk, ds, q, j);
        put_ds(ds, j);
        if constexpr (Next) {
            wgmma_wait<1>();
            warpgroup_fence_operand(s), warpgroup_fence_operand(dv);
            mask(s, row + BLOCK_M);
            exponentials(s, s, j + 1);
            round(s, p);
        }
        wgmma_wait<0>();
        warpgroup_fence_operand(dk), warpgroup_fence_operand(dv);
        release(j);
    }
    // A tile of which nothing is there.
    template <bool Masked>
    __device__ __forceinline__ void step(Sums& dk, Sums& dv, int j, int row) const {
        Scores s;
        Fragment p, ds;
        begin_s(s, j);
        wgmma_wait<0>();
        warpgroup_fence_operand(s);
        if constexpr (Masked) mask(s, row);
        exponentials(s, s, j);
        round(s, p);
        warpgroup_fence_operand(p);
        begin_dp(s, j);
        if constexpr (AHEAD == 3) begin_sum(dv, p, o, j);
        wgmma_wait<AHEAD == 3>();
        warpgroup_fence_operand(s);
        differences(s, ds, j, p);
        if constexpr (AHEAD == 0) begin_sum(dv, p, o, j);
        begin_sum(dk, ds, q, j);
        put_ds(ds, j);
        wgmma_wait<0>();
        warpgroup_fence_operand(dk), warpgroup_fence_operand(dv);
        release(j);
    }
    // ---- DKV_WARPGROUPS 2: the first warpgroup has S, P and dV, the second dP, dS and dK ----
    // AHEAD 0: S | P; dV | and so on; dP | dS; dK | and so on. 1: S and dP of the next tile beside
    // dV and dK. P goes through shared memory, as each thread has it.
    __device__ __forceinline__ static unsigned place_of_p(int buffer) {
        return Memory::at(Memory::P + buffer * DS_BYTES + threadIdx.x % 128 * 16);
    }
    template <bool Second>
    __device__ __forceinline__ void begin(Scores& x, int j) const {
        if constexpr (Second) begin_dp(x, j);
        else begin_s(x, j);
    }
    // P of a tile whose S is there, and what Q's barrier counts is not needed any more.
    __device__ __forceinline__ void give_p(Scores& s, Fragment& p, int j, int row) const {
        const Position<P_BUFFERS> at(j);
        mask(s, row);
        exponentials(s, s, j);
        round(s, p);
        mbarrier_wait(Memory::p_empty(at.stage), at.phase ^ 1);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 16; ++i)
            stmatrix_x4(place_of_p(at.stage) + i * 2048, p[4 * i], p[4 * i + 1], p[4 * i + 2],
                        p[4 * i + 3]);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(Memory::p_full(at.stage));
        give_back(Memory::q_empty(Position<NUM_STAGES>(j).stage));
        mbarrier_wait(Memory::o_full(Position<NUM_STAGES>(j).stage), Position<NUM_STAGES>(j).phase);
    }
    // dS of a tile whose dP is there, and Q, which it is multiplied by.
    __device__ __forceinline__ void take_p(const Scores& dp, Fragment& x, int j) const {
        const Position<P_BUFFERS> at(j);
        mbarrier_wait(Memory::p_full(at.stage), at.phase);
        Fragment p;
#pragma unroll
        for (int i = 0; i < BLOCK_M / 16; ++i)
            ldmatrix_x4(reinterpret_cast<unsigned (&)[4]>(p[4 * i]),
                        place_of_p(at.stage) + i * 2048);
        differences(dp, x, j, p);
        mbarrier_wait(Memory::q_full(Position<NUM_STAGES>(j).stage), Position<NUM_STAGES>(j).phase);
    }
    template <bool Second, bool Next>
    __device__ __forceinline__ void step_apart(Scores& x, Sums& sum, int j, int row) const {
        const unsigned i = Position<NUM_STAGES>(j).stage;
        Fragment a;
        if constexpr (Second) take_p(x, a, j);
        else give_p(x, a, j, row);
        begin_sum(sum, a, Second ? q : o, j);
        if constexpr (Second) {
            put_ds(a, j);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(Memory::p_empty(Position<P_BUFFERS>(j).stage));
            give_back(Memory::o_empty(i));
        }
        if constexpr (Next) begin<Second>(x, j + 1), wgmma_wait<1>();
        else wgmma_wait<0>();
        warpgroup_fence_operand(sum);
        give_back(Second ? Memory::q_empty(i) : Memory::o_empty(i));
        if constexpr (Next) wgmma_wait<0>(), warpgroup_fence_operand(x);
    }
    // As of_head, by one of the two.
    template <bool Second>
    __device__ __forceinline__ int of_head_apart(Sums& sum, int j) const {
        int row = call.first * BLOCK_M;
        const int end = call.end_row();
        if (row >= end) return j;
        Scores x;
        auto first = [&] {
            begin<Second>(x, j);
            wgmma_wait<0>();
            warpgroup_fence_operand(x);
        };
        if constexpr (AHEAD > 0) {
            first();
#pragma unroll 1
            for (; row < end - BLOCK_M; row += BLOCK_M, ++j)
                step_apart<Second, true>(x, sum, j, row);
            step_apart<Second, false>(x, sum, j, row);
            return j + 1;
        }
#pragma unroll 1
        for (; row < end; row += BLOCK_M, ++j) first(), step_apart<Second, false>(x, sum, j, row);
        return j;
    }
    // dV, or dK, of all heads, times `by`, to memory, through the rows of what no other reads then.
    template <bool Second>
    __device__ __forceinline__ void run_apart(const TensorMap& map, float by) const {
        Sums sum;
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) sum[i] = 0.f;
        mbarrier_wait(Second ? Memory::v_full() : Memory::k_full(), 0);
        clear_padding(Memory::at(Second ? Memory::V : Memory::K), ROWS_BARRIER + Second);
        int j = 0;
#pragma unroll 1
        for (int number = 0; number < call.group; ++number) j = of_head_apart<Second>(sum, j);
        named_barrier_sync(K_READ_BARRIER, 128 * (CONSUMERS + DQ));
        store_rows<KTile::PANEL_BYTES>(sum, by, Memory::at(Second ? Memory::K : Memory::V), map,
                                       call.key, call.of_keys, ROWS_BARRIER + Second);
        if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
    }
    // Of a tile, 64 rows of the warpgroup's keys, which are there: padding may hold NaN, which is
    // one times a dS of 0 too, and dS one of V's.
    __device__ __forceinline__ void clear_padding(unsigned rows, int barrier) const {
        const int begin = call.first_key - own, end = call.seqlen_k - own;
        if (PADDED && (begin > 0 || end < 64)) clear_rows<KTile, 64>(rows, begin, end, barrier);
    }
    // One head of queries, whose first tile is the j-th of the block; returns the next head's.
    __device__ __forceinline__ int of_head(Sums& dk, Sums& dv, int j) const {
        const int end = call.end_row();
        int row = call.first * BLOCK_M;
        const bool none = own >= call.seqlen_k || (PADDED && own + 64 <= call.first_key);
        const int seen = none ? end : HIDES_LATER ? own + call.diagonal : 0;
#pragma unroll 1
        for (; row < end && row + BLOCK_M <= seen; row += BLOCK_M, ++j) pass(j);
        if constexpr (HIDES_EARLIER) {
            // The last key of the warpgroup is seen last.
            of_rows<true>(dk, dv, j, row, min(end, min(own + 64, call.seqlen_k) + call.reach));
#pragma unroll 1
            for (; row < end; row += BLOCK_M, ++j) pass(j);
            return j;
        }
        if constexpr (AHEAD == 3 && !PADDED) {
            // The queries from this one on see all keys of the warpgroup.
            const int whole = own + 64 > call.seqlen_k ? end
                              : HIDES_LATER            ? own + 63 + call.diagonal
                                                       : row;
            of_rows<true>(dk, dv, j, row, min(end, whole));
            of_rows<false>(dk, dv, j, row, end);
        } else {
            of_rows<true>(dk, dv, j, row, end);
        }
        return j;
    }
    // The tiles from `row` on that begin before `end`; j and row become those after them. Masked:
    // some of them may not be seen whole.
    template <bool Masked>
    __device__ __forceinline__ void of_rows(Sums& dk, Sums& dv, int& j, int& row, int end) const {
        if constexpr (AHEAD == 0 || AHEAD == 3) {
#pragma unroll 1
            for (; row < end; row += BLOCK_M, ++j) step<Masked>(dk, dv, j, row);
            return;
        }
        if (row >= end) return;
        Scores s;
        begin_s(s, j);
        wgmma_wait<0>();
        warpgroup_fence_operand(s);
        if constexpr (AHEAD == 1) {
#pragma unroll 1
            for (; row < end - BLOCK_M; row += BLOCK_M, ++j) step_of_s<true>(s, dk, dv, j, row);
            step_of_s<false>(s, dk, dv, j, row);
        } else {
            Fragment p;
            mask(s, row);
            exponentials(s, s, j);
            round(s, p);
#pragma unroll 1
            for (; row < end - BLOCK_M; row += BLOCK_M, ++j) step_of_p<true>(s, p, dk, dv, j, row);
            step_of_p<false>(s, p, dk, dv, j, row);
        }
        row += BLOCK_M, ++j;
    }
};

// Chunks of 8 columns of a part of dQ's tile that dQ has, and the part's place in the tile's sums.
__device__ __forceinline__ int chunks(int part) {
    if constexpr (HEAD_DIM % PART_COLUMNS == 0) return PART_CHUNKS;
    return min(PART_CHUNKS, LANES - part % PARTS_OF_ROW * PART_CHUNKS);
}
__device__ __forceinline__ int place(int part) {
    if constexpr (HEAD_DIM % PART_COLUMNS == 0) return part * (64 * PART_COLUMNS);
    return 64 * (part / PARTS_OF_ROW * HEAD_DIM + part % PARTS_OF_ROW * PART_COLUMNS);
}
#if DQ_RING
// What a warp of a block does for a share of the rows of other heads of keys: delta of one `lead`
// after its own, and the conversion of dQ of one `lag` before, whose sums it clears for the head
// that has them next.
struct OtherHeads {
    const Call& call;
    const TensorMap &o, &d_o, &dq;
    const TensorLayout& layout;
    const float* lse;
    float scale;
    int seqlen_q, heads_kv, lane;

    // 64 queries of each item; those of one query head after the other.
    struct Share {
        int first, rows, count;
    };
    __device__ __forceinline__ Share share(int tiles) const {
        const int number = call.key / BLOCK_N, first = number * tiles / call.shares;
        const int rows = (number + 1) * tiles / call.shares - first;
        return {first, rows, call.group * rows};
    }
    __device__ __forceinline__ TensorLayout::Head head(int of, int number) const {
        const TensorLayout::Head keys = layout.of_queries(of);
#if STRIDED
        return {keys.head * call.group + number, keys.batch};
#else
        return keys * call.group + number;
#endif
    }
    __device__ __forceinline__ void run() const {
        if (call.key / BLOCK_N >= call.shares) return;
        if (PDL) grid_wait();
        if (call.head_kv + call.lead < heads_kv) add_up(call.head_kv + call.lead);
        if (call.head_kv >= call.lag) convert(call.head_kv - call.lag);
    }
    // delta, and neg_lse. A lane has two rows.
    __device__ __forceinline__ void add_up(int of) const {
        const Share own = share(call.pitch / 64);
        const unsigned base = Memory::at(Memory::PANEL), row = lane * 128;
        auto load = [&](int j) {  // the j-th pair of panels
            const int item = j / PANELS, number = item / own.rows;
            const int first = (own.first + item % own.rows) * 64;
            const unsigned full = Memory::pair_full(j % 2), to = base + j % 2 * 2 * PANEL_BYTES;
            const TensorLayout::Head from = head(of, number);
            mbarrier_expect(full, 2 * PANEL_BYTES);
            load_box(to, o, full, j % PANELS * 64, first, from);
            load_box(to + PANEL_BYTES, d_o, full, j % PANELS * 64, first, from);
        };
        const int count = own.count * PANELS;
        if (lane == 0)
            for (int j = 0; j < min(2, count); ++j) load(j);
        float sum = 0.f, sum_32 = 0.f;
#pragma unroll 1
        for (int j = 0; j < count; ++j) {
            const unsigned at = base + j % 2 * 2 * PANEL_BYTES + row;
            const int chunks = min(8, LANES - j % PANELS * 8);
            mbarrier_wait(Memory::pair_full(j % 2), j / 2 & 1);
#pragma unroll 1
            for (int i = 0; i < chunks; ++i) {
                const unsigned from = at + ((i ^ lane % 8) << 4);
                sum += dot(load_shared_16(from), load_shared_16(from + PANEL_BYTES));
                sum_32 += dot(load_shared_16(from + 32 * 128),
                              load_shared_16(from + 32 * 128 + PANEL_BYTES));
            }
            __syncwarp();
            if (lane == 0 && j + 2 < count) load(j + 2);
            if (j % PANELS < PANELS - 1) continue;
            const int item = j / PANELS, query = of * call.group + item / own.rows;
            const int first = (own.first + item % own.rows) * 64 + lane;
            put(query, first, sum), put(query, first + 32, sum_32);
            sum = sum_32 = 0.f;
        }
        __syncwarp();
        if (lane == 0) flag_arrive(call.count(of, Call::DELTA));
    }
    __device__ __forceinline__ void put(int query, int row, float sum) const {
        const long long at = static_cast<long long>(query) * call.pitch + row;
        const_cast<float*>(call.delta)[at] = sum;
        const_cast<float*>(call.neg_lse)[at] =
            row < seqlen_q
                ? negated(lse[static_cast<long long>(query) * seqlen_q + row], lse_factor(scale))
                : minus_infinity();
    }

    static constexpr int OF_ROW = (LANES + UNIT_CHUNKS - 1) / UNIT_CHUNKS;  // units of 64 queries
    __device__ __forceinline__ static int chunks_of(int unit) {
        if constexpr (LANES % UNIT_CHUNKS == 0) return UNIT_CHUNKS;
        return min(UNIT_CHUNKS, LANES - unit * UNIT_CHUNKS);
    }
    __device__ __forceinline__ static float4 floats(unsigned at) {
        const uint4 x = load_shared_16(at);
        return {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                __uint_as_float(x.w)};
    }
    // A unit of shared memory, rounded, to the panel's columns.
    __device__ __forceinline__ void round(unsigned from, int unit) const {
        const int row = lane % 16, chunks = chunks_of(unit);
        const unsigned to = Memory::at(Memory::PANEL) + row * 128;
#pragma unroll 1
        for (int rows = 0; rows < 4; ++rows)
#pragma unroll
            for (int i = 0; i < UNIT_CHUNKS; i += 2) {
                const unsigned at = from + (i * 128 + rows * 32 + lane) * 16;
                if (i >= chunks) break;
                const float4 zero = {}, a = floats(at),
                             b = i + 1 < chunks ? floats(at + 2048) : zero;
                stmatrix_x4(to + rows * 2048 + ((unit % 2 * 4 + i + lane / 16 ^ row % 8) << 4),
                            pack(a.x * scale, a.y * scale), pack(a.z * scale, a.w * scale),
                            pack(b.x * scale, b.y * scale), pack(b.z * scale, b.w * scale));
            }
    }
    __device__ __forceinline__ void convert(int of) const {
        const Share own = share((seqlen_q + 63) / 64);
        const int count = own.count * OF_ROW;
        auto place = [&](int i) {
            const int query = of % call.ring * call.group + i / OF_ROW / own.rows;
            return call.sums +
                   (static_cast<long long>(query) * call.pitch +
                    (own.first + i / OF_ROW % own.rows) * 64) *
                       HEAD_DIM +
                   i % OF_ROW * (UNIT * 64);
        };
        auto load = [&](int i) {
            const unsigned full = Memory::unit_full(i % 2), bytes = chunks_of(i % OF_ROW) * 2048;
            mbarrier_expect(full, bytes);
            bulk_load(Memory::at(Memory::UNITS) + i % 2 * UNIT_BYTES, place(i), bytes, full);
        };
        if (lane == 0) {
            flag_wait(call.count(of, Call::ADDED), gridDim.x / heads_kv * ADDERS);
            for (int i = 0; i < min(2, count); ++i) load(i);
        }
        for (unsigned i = lane * 16; i < UNIT_BYTES; i += 512)
            store_shared_floats(Memory::at(Memory::ZEROS) + i, 0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const int unit = i % OF_ROW;
            mbarrier_wait(Memory::unit_full(i % 2), i / 2 & 1);
            if (unit % 2 == 0) {
                if (lane == 0) tma_store_wait_read<0>();
                __syncwarp();
            }
            round(Memory::at(Memory::UNITS) + i % 2 * UNIT_BYTES, unit);
            fence_async_proxy();
            __syncwarp();
            if (lane != 0) continue;
            if (of + call.ring < heads_kv)
                bulk_store(place(i), Memory::at(Memory::ZEROS), chunks_of(unit) * 2048);
            if (unit % 2 || unit == OF_ROW - 1)
                store_box(dq, Memory::at(Memory::PANEL), unit / 2 * 64,
                          (own.first + i / OF_ROW % own.rows) * 64,
                          head(of, i / OF_ROW / own.rows));
            tma_store_commit();
            if (i + 2 < count) load(i + 2);
        }
        if (lane == 0) bulk_wait_all(), flag_arrive(call.count(of, Call::CONVERTED));
    }
};
#endif
// dQ = dS K of each tile, by a warpgroup of its own, to staging, or from registers to the sums.
__device__ __forceinline__ void multiply_dq(const Call& call, int lane) {
    const int t = threadIdx.x % 128;
    if (PDL && !STAGED) grid_wait();
    float* sums = STAGED ? nullptr : call.own_sums();
    const unsigned long long a0 = wgmma_descriptor<128>(Memory::DS, 1024),
                             b0 = wgmma_descriptor<128>(Memory::K, 1024, KTile::PANEL_BYTES);
#pragma unroll 1
    for (int j = 0; j < call.group * call.tiles; ++j) {
        const Position<DS_BUFFERS> at(j);
        mbarrier_wait(Memory::ds_full(at.stage), at.phase);
#pragma unroll 1
        for (int part = 0; part < PARTS; ++part) {
            float d[PART_COLUMNS / 2];
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < BLOCK_N / 16; ++i) {
                const unsigned long long a = a0 + ((at.stage * WARPGROUPS + i / 4) * DS_BYTES +
                                                   part / PARTS_OF_ROW * 8192 + i % 4 * 32) /
                                                      16,
                                         b = b0 +
                                             (part % PARTS_OF_ROW * KTile::PANEL_BYTES + i * 2048) /
                                                 16;
                if (i == 0) WgmmaFirst<PART_COLUMNS>::template ss<IS_BF16, 1>(d, a, b);
                else Wgmma<PART_COLUMNS>::template ss<IS_BF16, 1>(d, a, b, 1);
            }
            wgmma_commit();
            if (STAGED) mbarrier_wait(Memory::added(part), (j & 1) ^ 1);
            wgmma_wait<0>();
            warpgroup_fence_operand(d);
            if (part == PARTS - 1 && lane == 0) mbarrier_arrive(Memory::ds_empty(at.stage));
            if constexpr (!STAGED) {
                float* to =
                    sums + call.at(j / call.tiles, j % call.tiles) * HEAD_DIM + place(part) + t * 4;
#pragma unroll
                for (int i = 0; i < PART_CHUNKS; ++i)
                    if (i < chunks(part))
                        add_floats(to + i * 512, d[4 * i], d[4 * i + 1], d[4 * i + 2],
                                   d[4 * i + 3]);
                continue;
            }
            const unsigned to = Memory::at(Memory::STAGING) + part * PART_BYTES + t * 16;
#pragma unroll
            for (int i = 0; i < PART_CHUNKS; ++i)
                if (i < chunks(part))
                    store_shared_floats(to + i * 2048, d[4 * i], d[4 * i + 1], d[4 * i + 2],
                                        d[4 * i + 3]);
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(Memory::staged(part));
        }
    }
#if DQ_RING
    if constexpr (!STAGED) {
        named_barrier_sync(ADDED_BARRIER, 128);
        if (t == 0) flag_arrive(call.count(call.head_kv, Call::ADDED));
    }
#endif
}
// One thread of each part adds it to the sums.
__device__ __forceinline__ void add_dq(const Call& call, int part) {
    if (PDL) grid_wait();
    float* sums = call.own_sums();
    int j = 0;
#pragma unroll 1
    for (int number = 0; number < call.group; ++number)
#pragma unroll 1
        for (int tile = 0; tile < call.tiles; ++tile, ++j) {
            mbarrier_wait(Memory::staged(part), j & 1);
            bulk_add(sums + call.at(number, tile) * HEAD_DIM + place(part),
                     Memory::at(Memory::STAGING) + part * PART_BYTES, chunks(part) * 2048);
            tma_store_commit();
            tma_store_wait_read<0>();
            mbarrier_arrive(Memory::added(part));
        }
    bulk_wait_all();
#if DQ_RING
    flag_arrive(call.count(call.head_kv, Call::ADDED));
#endif
}

// Until no block of the cluster writes to this one's barriers any more.
__device__ __forceinline__ void leave_cluster() {
    if (CLUSTER > 1) __syncwarp(), cluster_arrive(), cluster_wait();
}

#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif
// neg_lse, delta and sums are what the launch ahead wrote.
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, BLOCKS_PER_SM)
    flash_bwd_wgmma_keys(
        const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
        const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap d_o,
        const __grid_constant__ TensorMap dk_map,
        const __grid_constant__ TensorMap dv_map IF_RING(const __grid_constant__ TensorMap dq_map,
                                                         const __grid_constant__ TensorMap o_map,
                                                         const __grid_constant__ TensorMap do_map),
        const float* neg_lse, const float* delta, float* sums, int seqlen_q, int seqlen_k,
        int pitch, int heads_kv, int group, int together, float factor,
        float scale IF_RING(const float* lse, unsigned* turns, int ring, int lag, int lead,
                            int shares) WINDOW_PARAMETERS RANGE_PARAMETERS HEADS_PARAMETER) {
    const TensorLayout layout HEADS_LAYOUT;
    extern __shared__ __align__(1024) unsigned char smem[];
    if (CLUSTER == 1 && smem_address(smem) != Memory::K) __trap();
    if (PDL && DQ) grid_launch_dependents();
    // The blocks of a cluster have neighbouring keys of a head, and pass the same queries.
    constexpr int CLUSTER_N = CLUSTER * BLOCK_N;
    const Work work(blockIdx.x / CLUSTER, (seqlen_k + CLUSTER_N - 1) / CLUSTER_N, heads_kv,
                    together);
    const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
#if !WINDOW
    const int low = 0, high = seqlen_k - seqlen_q;
#endif
    const int key = work.tile * CLUSTER_N + rank * BLOCK_N, diagonal = -high, reach = -low;
    const int first = HIDES_LATER ? max(0, work.tile * CLUSTER_N + diagonal) / BLOCK_M : 0;
    int end = seqlen_q, first_key = 0;
#if PADDED
    const KeyRange own_keys = keys_of_item(key_range, work.head / heads_of_item, seqlen_k);
    seqlen_k = own_keys.end, first_key = own_keys.first;
    // No query sees a key of the blocks.
    if (work.tile * CLUSTER_N >= seqlen_k || (work.tile + 1) * CLUSTER_N <= first_key) end = 0;
#endif
    if (HIDES_EARLIER) end = min(end, min((work.tile + 1) * CLUSTER_N, seqlen_k) + reach);
    const Call call{neg_lse,
                    delta,
                    sums,
                    seqlen_k,
                    first_key,
                    pitch,
                    group,
                    work.head,
                    key,
                    diagonal,
                    reach,
                    first,
                    (end + BLOCK_M - 1) / BLOCK_M - first,
                    layout.of_queries(work.head)
#if DQ_RING
                        ,
                    turns,
                    ring,
                    lag,
                    lead,
                    shares
#endif
    };
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == CONSUMERS * 128) Memory::init();
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive_relaxed(), cluster_wait();
    if (DQ && warp >= 4 * CONSUMERS + 4) {
        registers_decrease<DQ_REGISTERS>();
        multiply_dq(call, lane);
        named_barrier_arrive(K_READ_BARRIER, 128 * CONSUMERS + 128);
        leave_cluster();
    } else if (warp >= 4 * CONSUMERS) {
        registers_decrease<PRODUCER_REGISTERS>();
        const int own = warp - 4 * CONSUMERS;
        if (own == 0 && lane == 0) load_tiles(q, k, v, d_o, call, rank);
        if (STAGED && own > 0 && own <= PARTS && lane == 0) add_dq(call, own - 1);
#if DQ_RING
        if (own == STAGED * PARTS + 1)
            OtherHeads{call, o_map, do_map, dq_map, layout, lse, scale, seqlen_q, heads_kv, lane}
                .run();
#endif
        leave_cluster();
    } else {
        registers_increase<CONSUMER_REGISTERS>();
        const int wg = APART ? 0 : warp / 4, own = key + wg * 64;
        const unsigned ds = Memory::at(Memory::DS) + wg * DS_BYTES +
                            (lane % 8 + lane / 16 * 8) * 128 +
                            ((warp % 4 * 2 + lane / 8 % 2 ^ lane % 8) << 4);
        const Consumer self{call,
                            factor,
                            lane,
                            own,
#if PADDED
                            call.there(own + warp % 4 * 16 + lane / 4, 1),
                            call.there(own + warp % 4 * 16 + lane / 4 + 8, 1),
                            call.there(own, 64),
#else
                            own + warp % 4 * 16 + lane / 4,
#endif
                            ds,
                            wgmma_descriptor<128>(Memory::K + wg * 8192, 1024),
                            wgmma_descriptor<128>(Memory::V + wg * 8192, 1024),
                            wgmma_descriptor<128>(Memory::Q, 1024, QTile::PANEL_BYTES),
                            wgmma_descriptor<128>(Memory::O, 1024, QTile::PANEL_BYTES)};
        if constexpr (APART) {
            if (warp < 4) self.run_apart<false>(dv_map, 1.f);
            else self.run_apart<true>(dk_map, scale);
            leave_cluster();
            return;
        }
        Consumer::Sums dk, dv;
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) dk[i] = dv[i] = 0.f;
        mbarrier_wait(Memory::k_full(), 0), mbarrier_wait(Memory::v_full(), 0);
        self.clear_padding(Memory::at(Memory::K + wg * 8192), ROWS_BARRIER + wg);
        self.clear_padding(Memory::at(Memory::V + wg * 8192), ROWS_BARRIER + wg);
        int j = 0;
#pragma unroll 1
        for (int number = 0; number < call.group; ++number) j = self.of_head(dk, dv, j);
        if (DQ) named_barrier_sync(K_READ_BARRIER, 128 * WARPGROUPS + 128);
        // Four warps read the same rows of V and K.
        named_barrier_sync(ROWS_BARRIER + wg, 128);
        store_rows<KTile::PANEL_BYTES>(dv, 1.f, Memory::at(Memory::V + wg * 8192), dv_map,
                                       key + wg * 64, call.of_keys, ROWS_BARRIER + wg);
        store_rows<KTile::PANEL_BYTES>(dk, scale, Memory::at(Memory::K + wg * 8192), dk_map,
                                       key + wg * 64, call.of_keys, ROWS_BARRIER + wg);
        if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
        leave_cluster();
    }
}
