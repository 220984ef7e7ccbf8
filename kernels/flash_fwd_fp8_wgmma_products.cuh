// The products of flash_fwd_fp8_wgmma's consumer. Its template includes this where its constants,
// Barriers, Memory and Call are known.
#pragma once

// ---- a consumer warpgroup: 64 queries ----
struct Products {
    static constexpr bool Turns = PINGPONG, Overlaps = OVERLAP > 0,
                          UnseenTiles = Tiles::LAST_IS_LONGEST && WARPGROUPS > 1, Masked = false;
    static constexpr int TurnBarrier = TURN_BARRIER, Warpgroups = WARPGROUPS, KeyGroups = 1,
                         key_group = 0, TileKeys = BLOCK_N;
    const Memory& at;
    const Call& call;
    int warp, lane;
    Tiles schedule;
    unsigned long long q_descriptor, k_descriptor, t_descriptor;
    // The present tile of queries: its tiles of keys, the warp's first row, and the factor of its
    // scores, which the k_scale of a tile of keys multiplies if tiles differ in it.
    int first_tile, end_tile, first_row;
    float factor;
    const float *k_scale, *v_scale;  // of the key head
    Ring<NUM_STAGES> at_v;           // of the next tile of V^T; K is at the same one, or after it

    using Scores = float[BLOCK_N / 2];
    using HalfScores = Scores;
    using Output = float[OUT_COLUMNS / 2];  // with ONES, the last four are sums of P's rows
    using Weights = unsigned[BLOCK_N / 8];  // P as fragments

    // Keys that the tensor core sums before they are added to the output; tiles, if those are more.
    static constexpr int AT_ONCE = INTERVAL == 0 || INTERVAL > BLOCK_N ? BLOCK_N : INTERVAL;
    static constexpr int PARTS = BLOCK_N / AT_ONCE,
                         TILES = INTERVAL > BLOCK_N ? INTERVAL / BLOCK_N : 1;
    // Next to the output of a wide head there is room for the sums of 64 columns alone: they are
    // taken one slice of columns after the other.
    static constexpr int SLICES = INTERVAL > 0 && HEAD_DIM > 128 ? HEAD_DIM / 64 : 1,
                         COLUMNS = OUT_COLUMNS / SLICES;
    static_assert(SLICES == 1 || TILES == 1, "a slice does not stay in registers");
    // Without INTERVAL the tensor core adds to the output itself, and there is no `part`.
    struct Sums {
        Output out;
        float part[COLUMNS / 2];
        int tiles = 0;  // that part has
        __device__ __forceinline__ auto& target() {
            if constexpr (INTERVAL > 0) return part;
            else return out;
        }
        __device__ __forceinline__ void clear() {
#pragma unroll
            for (int i = 0; i < OUT_COLUMNS / 2; ++i) out[i] = 0.f;
        }
        __device__ __forceinline__ void add(int slice) {
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) out[slice * (COLUMNS / 2) + i] += part[i];
            tiles = 0;
        }
        // Behind the last tile: what is left of an interval.
        __device__ __forceinline__ void finish() {
            if (TILES > 1 && tiles > 0) add(0);
        }
        // Columns from First to End / 2 - 1 accumulators, for both rows.
        template <int First, int End>
        __device__ __forceinline__ void scale(const float (&by)[2]) {
#pragma unroll
            for (int i = First / 2; i < End / 2; ++i) out[i] *= by[i / 2 % 2];
            if (TILES > 1 && tiles > 0) {
#pragma unroll
                for (int i = First / 2; i < End / 2 && i < COLUMNS / 2; ++i)
                    part[i] *= by[i / 2 % 2];
            }
        }
    };

    // Factors of a tile. With SCALE_BLOCK the output is in units of the v_scale of the tile that
    // was added last, so that a tile is added as it is.
    struct Factors {
        float scores, v;
    };
    struct State {
        Sums sums;
        Softmax rows;
        Weights p;
        Factors last;
    };

    __device__ __forceinline__ KeyRange seen() const {
        return {0, call.visible_keys((first_row / 64 + 1) * 64 - 1).end};
    }
    __device__ __forceinline__ bool sees_half(int) const { return false; }

    // The place of the tile of K: V's, or, beside P V of the tile before, the next.
    __device__ __forceinline__ Ring<NUM_STAGES> at_k(bool beside_pv) const {
        Ring<NUM_STAGES> position = at_v;
        if (beside_pv) position.next();
        return position;
    }
    __device__ __forceinline__ void wait_for_k(bool beside_pv) const {
        const auto k = at_k(beside_pv);
        mbarrier_wait(at.barriers.k_full(k.stage), k.phase);
    }
    __device__ __forceinline__ void clear_behind(int) const {}  // there is no padding
    __device__ __forceinline__ void clear_before(int) const {}
    __device__ __forceinline__ void wait_for_v() const {
        mbarrier_wait(at.barriers.t_full(at_v.stage), at_v.phase);
    }
    __device__ __forceinline__ void release(unsigned barrier) const {
        if (lane == 0) mbarrier_arrive(barrier);
    }
    __device__ __forceinline__ void release_k(bool beside_pv = ALONE) const {
        release(at.barriers.k_empty(at_k(beside_pv).stage));
    }
    __device__ __forceinline__ void release_v() {
        release(at.barriers.t_empty(at_v.stage)), at_v.next();
    }
    __device__ __forceinline__ void release_q(bool first) const {
        if (PERSISTENT && !first) release(at.barriers.q_empty());
    }
    // s = Q K^T of 64 queries and BLOCK_N keys.
    __device__ __forceinline__ void begin_qk(Scores& s, bool beside_pv) const {
        wgmma_fence();
        unsigned long long k = k_descriptor + at_k(beside_pv).stage * (KV_BYTES / 16);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; ++i)
            WgmmaE4m3<BLOCK_N>::ss(s, q_descriptor + QTile::step(i), k + KVTile::step(i), i > 0);
        wgmma_commit();
    }
    // P V that began later may go on.
    __device__ __forceinline__ void end_qk(Scores& s, bool beside_pv) const {
        if (beside_pv) wgmma_wait<1>();
        else wgmma_wait<0>();
        warpgroup_fence_operand(s);
        release_k(beside_pv);
    }
    // Adds P V of a part of the tile's keys, in a slice of columns.
    // A fence of its own: with a wait between two products ptxas otherwise serialises them (C7519).
    __device__ __forceinline__ void begin_part(Sums& sums, Weights& p, int part, int slice) const {
        auto& to = sums.target();
        warpgroup_fence_operand(p), warpgroup_fence_operand(to);
        wgmma_fence();
        unsigned long long v = t_descriptor + at_v.stage * (T_BYTES / 16) +
                               slice * (COLUMNS * TransposedTile::ROW_BYTES / 16);
#pragma unroll
        for (int i = part * (AT_ONCE / 32); i < (part + 1) * (AT_ONCE / 32); ++i) {
            bool begins = INTERVAL > 0 && i == part * (AT_ONCE / 32);
            WgmmaE4m3<COLUMNS>::rs(to, p + i * 4, v + TransposedTile::step(i),
                                   !begins || (TILES > 1 && sums.tiles > 0));
        }
        wgmma_commit();
    }
    __device__ __forceinline__ void begin_pv(State& state) const {
        begin_part(state.sums, state.p, 0, 0);
    }
    __device__ __forceinline__ void end_pv(State& state) {
        auto& [sums, rows, p, last] = state;
        wgmma_wait<0>();
        warpgroup_fence_operand(sums.target()), warpgroup_fence_operand(p);
#pragma unroll
        for (int n = 1; n < PARTS * SLICES; ++n) {
            sums.add((n - 1) % SLICES);
            begin_part(sums, p, n / SLICES, n % SLICES);
            wgmma_wait<0>();
            warpgroup_fence_operand(sums.target()), warpgroup_fence_operand(p);
        }
        release_v();
        if (INTERVAL > 0 && ++sums.tiles == TILES) sums.add(SLICES - 1);
    }
    __device__ __forceinline__ Factors factors_of(int j) const {
        if constexpr (SCALE_BLOCK == 0) return {factor, 1.f};
        int block = schedule.key(j, first_tile, end_tile) / (SCALE_BLOCK ? SCALE_BLOCK : 1);
        return {factor * k_scale[block], v_scale[block]};
    }
    // To the units of the next tile.
    __device__ __forceinline__ static void convert(Sums& sums, Factors& last, const Factors& own) {
        if constexpr (SCALE_BLOCK > 0) {
            float units = last.v / own.v, by[2] = {units, units};
            sums.scale<0, HEAD_DIM>(by);
        }
        last = own;
    }
    __device__ __forceinline__ void mask(Scores& s, int j) const {
        const int key = schedule.key(j, first_tile, end_tile), row = first_row + lane / 4;
        if (__builtin_expect(key + BLOCK_N > call.visible_keys(first_row).end ||
                                 (HIDES_EARLIER && key < call.visible_keys(first_row + 15).first),
                             0))
            mask_columns(s, call.visible_keys(row), call.visible_keys(row + 8), key);
    }
    __device__ __forceinline__ static auto to_fragments(Weights& p) {
        return [&p](int i, unsigned low, unsigned high) { p[2 * i] = low, p[2 * i + 1] = high; };
    }
    // ptxas moves exponentials below the wait for P V, beside which they are to run. Nothing moves
    // them below a vote on all weights. They have no sign, so that the wait here, which is over, is
    // never met.
    __device__ __forceinline__ void hold(const Weights& p) const {
        unsigned all = 0;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; ++i) all |= p[i];
        if (__builtin_expect(__any_sync(0xffffffffu, all & 0x80808080u), 0)) wait_for_v();
    }
    // P = softmax(S) of a tile next to which none of this warpgroup's products runs.
    __device__ __forceinline__ void softmax(Scores& s, State& state, const Factors& own,
                                            bool first) const {
        auto& [sums, rows, p, last] = state;
        float by[2];
        bool grew = rows.tile(s, own.scores, first, by, to_fragments(p));
        if (grew) sums.scale<0, OUT_COLUMNS>(by);
        if (first) last = own;
        convert(sums, last, own);
    }
    // The same of a later tile, and the end of P V of the tile before. OVERLAP 1: next to it only
    // the maxima are taken, so that P needs no second place. 2: all of it.
    __device__ __forceinline__ void softmax_beside_pv(Scores& s, State& state, const Factors& own,
                                                      int) {
        auto& [sums, rows, p, last] = state;
        float by[2];
        if constexpr (OVERLAP == 1 && MAXIMA == 2) {
            float sum[2];
            end_pv(state);
            if (!rows.fits(s, own.scores, sum, to_fragments(p))) {
                rows.refer(s, own.scores, false, by, sum);
                rows.add(s, own.scores, to_fragments(p));
                sums.scale<0, OUT_COLUMNS>(by);
            }
        } else {
            bool grew;
            if constexpr (OVERLAP == 2) {
                Weights next;
                grew = rows.tile(s, own.scores, false, by, to_fragments(next));
                warpgroup_fence_operand(next);
                hold(next);
                end_pv(state);
                move(p, next);
            } else {
                grew = rows.refer(s, own.scores, false, by);
                end_pv(state);
                rows.add(s, own.scores, to_fragments(p));
            }
            if (grew) sums.scale<0, OUT_COLUMNS>(by);
        }
        convert(sums, last, own);
    }
};
using Consumer = FlashConsumer<Products>;
