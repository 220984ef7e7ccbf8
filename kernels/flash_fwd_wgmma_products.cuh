// The products of flash_fwd_wgmma's consumer. Its template includes this where its constants,
// Barriers, Memory and Call are known.
#pragma once

// ---- a consumer warpgroup: 64 queries, in turns with the other key groups ----
struct Products {
    static constexpr bool Turns = PINGPONG, Overlaps = OVERLAP, UnseenTiles = UNSEEN_TILES,
                          Masked = MASK;
    static constexpr int IN_PANEL = SWIZZLE / 32;  // times 16 columns
    static constexpr int TurnBarrier = TURN_BARRIER, Warpgroups = WARPGROUPS,
                         KeyGroups = KEY_GROUPS, TileKeys = BLOCK_N;
    const Memory& at;
    const Call& call;
    int warp, lane, key_group, row_group;
    Tiles schedule;
    unsigned own_q, own_p, p_buffer;
    // stmatrix: this lane's row and 16-byte chunk of the warp's 16 rows of a panel of P, and of O
    // where that is another: for one expression of both, ptxas orders some winners otherwise.
    unsigned lane_at, lane_at_o;
    unsigned long long q_descriptor, k_descriptor, v_descriptor, p_descriptor;
    // The tiles of keys of this tile of queries, and the keys that all rows of the warp see, that
    // each of this thread's two rows sees, and that the last query of the warpgroup's 64 sees; or,
    // with MASK, those that all 64 see, and that any of them sees, and keys in the place of tiles.
    int first_tile, end_tile;
    KeyRange all_see, visible[2], group_sees;
#if MASK == 2
    const unsigned* bits[2];  // of each row
    int key_tiles;            // where its tiles of keys are told
#endif
    unsigned remote;          // from a barrier to that of the block that this lane tells
    Ring<STAGES> k_at, v_at;  // of this key group's tiles, KEY_GROUPS apart
    unsigned q_columns[Q_REGISTERS > 0 ? Q_REGISTERS : 1][4];  // Q's first, as fragments

    using Scores = float[BLOCK_N / 2];
    using Output = float[COLUMNS_V / 2];
    using HalfScores = float[HALF_TILES ? BLOCK_N / 4 : BLOCK_N / 2];
    using Weights = unsigned[BLOCK_N / 4];  // P as fragments; unused if P is in shared memory
    struct State {
        Output out;
        Softmax rows;
        Weights p;
    };
    struct Factors {};  // a tile has none of its own

    __device__ __forceinline__ KeyRange seen() const { return group_sees; }
    __device__ __forceinline__ bool sees_half(int j) const {
        return HALF_TILES && group_sees.end <= schedule.key(j, first_tile, end_tile) + BLOCK_N / 2;
    }
    __device__ __forceinline__ Factors factors_of(int) const { return {}; }

    __device__ __forceinline__ void wait_for_k(bool) const {
        mbarrier_wait(at.barriers.k_full(k_at.stage), k_at.phase);
    }
    __device__ __forceinline__ void wait_for_v() const {
        mbarrier_wait(at.barriers.v_full(v_at.stage), v_at.phase);
    }
#if PADDED && MASK
    // Keys that any query of the block sees, which no thread has registers to keep: a warp has them
    // in shared memory.
    __device__ __forceinline__ KeyRange block_sees() const {
        const int4 seen = load_told(at.seen + 16 * warp);
        return {seen.x, seen.y};
    }
    __device__ __forceinline__ void keep_block_sees(const KeyRange& seen) const {
        __syncwarp();
        if (lane == 0)
            store_shared_floats(at.seen + 16 * warp, __int_as_float(seen.first),
                                __int_as_float(seen.end), 0.f, 0.f);
        __syncwarp();
    }
#elif PADDED
    __device__ __forceinline__ KeyRange block_sees() const {
        return {BITS ? call.item.keys.begin : 0, call.item.keys.count};
    }
#endif
    // V of keys beside those that the block sees may be NaN: of those behind the last, in the tile
    // that comes first, and, once that is waited for, of those before the first, in the last one.
    __device__ __forceinline__ void clear_behind(int j) const {
#if PADDED
        const int end = block_sees().end - schedule.key(j, first_tile, end_tile);
        if (__builtin_expect(uniform(end < BLOCK_N), 0)) wait_for_v(), clear_v(0, end);
#endif
    }
    __device__ __forceinline__ void clear_before(int j) const {
#if PADDED
        const int first = block_sees().first - schedule.key(j, first_tile, end_tile);
        if (__builtin_expect(uniform(first > 0), 0)) clear_v(first, BLOCK_N);
#endif
    }
    __device__ __forceinline__ void clear_v(int first, int end) const {
        clear_rows<VTile, BLOCK_N>(at.v + v_at.stage * V_BYTES, first, end,
                                   CLEAR_BARRIER + warp / 4);
    }
    // To the producers of all blocks that load into the barrier's stage.
    __device__ __forceinline__ void release(unsigned barrier) const {
        if constexpr (MULTICAST > 1) mbarrier_arrive_remote(remote + barrier, lane, MULTICAST);
        else if (lane == 0) mbarrier_arrive(barrier);
    }
    // Behind the last instruction that reads Q in shared memory: the last product, or, if all of Q
    // is in registers, the first, which needed them. Not right behind their ldmatrix: no arrival
    // waits for these, and the next Q then came over this one in 1 of 1,024 calls (docs/tried.md).
    // With O_OVER_Q the output goes there first: see store_tile.
    __device__ __forceinline__ void release_q(bool first) const {
        if (PERSISTENT && !O_OVER_Q && first == (Q_REGISTERS == COLUMNS / 16) && lane == 0)
            mbarrier_arrive(at.barriers.q_empty(0));
    }
    // The i-th 16 columns of this warp's 16 rows of Q, as a fragment.
    __device__ __forceinline__ void load_q(unsigned (&fragment)[4], int i) const {
        unsigned q = own_q + warp % 4 * (16 * SWIZZLE) + lane % 16 * SWIZZLE;
        // By SharedTile::chunk, ptxas orders some of the recorded winners otherwise.
        ldmatrix_x4(fragment, q + i / IN_PANEL * QTile::PANEL_BYTES +
                                  ((i % IN_PANEL * 2 + lane / 16 ^ QTile::swizzle(lane)) << 4));
    }
    __device__ __forceinline__ void load_q_registers() {
#pragma unroll
        for (int i = 0; i < Q_REGISTERS; ++i) load_q(q_columns[i], i);
    }
    // s = Q K^T of 64 queries and the first 2 N keys of a tile, BLOCK_N or half of them.
    template <int N>
    __device__ __forceinline__ void begin_qk(float (&s)[N], bool) const {
        wgmma_fence();
        unsigned long long k = k_descriptor + k_at.stage * (K_BYTES / 16);
#pragma unroll
        for (int i = 0; i < COLUMNS / 16; ++i) {
            unsigned long long of_k = k + KTile::step(i);
            if (i < Q_REGISTERS)
                Wgmma<2 * N>::template rs<IS_BF16, 0>(s, q_columns[i], of_k, i > 0);
            else
                Wgmma<2 * N>::template ss<IS_BF16, 0>(s, q_descriptor + QTile::step(i), of_k,
                                                      i > 0);
        }
        wgmma_commit();
    }
    // P V that began later may go on.
    template <int N>
    __device__ __forceinline__ void end_qk(float (&s)[N], bool beside_pv) {
        if (beside_pv) wgmma_wait<1>();
        else wgmma_wait<0>();
        warpgroup_fence_operand(s);
        if (!BIAS && (!SCORES_AGAIN || !beside_pv)) release_k();
    }
    __device__ __forceinline__ void release_k() {
        release(at.barriers.k_empty(k_at.stage)), k_at.skip<KEY_GROUPS>();
    }
    // s = Q K^T once more of this warp's 16 rows alone, which is rare: the others do not take part.
    __device__ __forceinline__ void qk_again(Scores& s) const {
        unsigned k = at.k + k_at.stage * K_BYTES + (lane / 16 * 8 + lane % 8) * SWIZZLE;
#pragma unroll
        for (int n = 0; n < BLOCK_N / 16; ++n) {
            float d[2][4] = {};
#pragma unroll
            for (int i = 0; i < COLUMNS / 16; ++i) {
                unsigned a[4], b[4];
                if (i >= Q_REGISTERS) load_q(a, i);
#pragma unroll
                for (int j = 0; j < (i < Q_REGISTERS ? 4 : 0); ++j) a[j] = q_columns[i][j];
                ldmatrix_x4(b, k + n * 16 * SWIZZLE + i / IN_PANEL * KTile::PANEL_BYTES +
                                   ((i % IN_PANEL * 2 + lane / 8 % 2 ^ KTile::swizzle(lane)) << 4));
                mma_16816<IS_BF16>(d[0], a, b[0], b[1]);
                mma_16816<IS_BF16>(d[1], a, b[2], b[3]);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) s[n * 8 + i] = d[i / 4][i % 4];
        }
    }
    // out += P V, with P in registers or in shared memory.
    // A fence of its own: with a wait between two products ptxas otherwise serialises them (C7519).
    __device__ __forceinline__ void begin_pv(State& state) const {
        auto& [out, rows, p] = state;
        if (!P_SHARED) warpgroup_fence_operand(p);
        warpgroup_fence_operand(out);
        wgmma_fence();
        unsigned long long shared_p = p_descriptor + p_buffer * (P_BYTES / 16),
                           v = v_descriptor + v_at.stage * (V_BYTES / 16);
#pragma unroll
        for (int i = 0; i < BLOCK_N / 16; ++i)
            if (P_SHARED)
                Wgmma<COLUMNS_V>::ss<IS_BF16, 1>(out, shared_p + PTile::step(i), v + i * SWIZZLE,
                                                 1);
            else Wgmma<COLUMNS_V>::rs<IS_BF16, 1>(out, p + i * 4, v + i * SWIZZLE, 1);
        wgmma_commit();
    }
    __device__ __forceinline__ void end_pv(State& state) {
        wgmma_wait<0>();
        warpgroup_fence_operand(state.out);
        if (!P_SHARED) warpgroup_fence_operand(state.p);
        release_v();
    }
    __device__ __forceinline__ void release_v() {
        release(at.barriers.v_empty(v_at.stage)), v_at.skip<KEY_GROUPS>();
    }
    // Makes of the products of a tile what the softmax takes. The stage of a bias is given back
    // behind the softmax, whose vote needs all that ldmatrix brings: no arrival waits for that.
    template <int N>
    __device__ __forceinline__ void mask(float (&s)[N], int j) const {
#if SOFTCAP
        cap_scores(s, call.scores.inner(call.factor));
#endif
#if BIAS
        const unsigned of_tile = at.bias + k_at.stage * BIAS_BYTES + row_group * BiasTile::BYTES;
        const int row = call.scores.bias_rows * (warp % 4 * 16 + lane % 16);
        add_bias(s, call.scores.outer(call.factor), [=](unsigned (&fragment)[4], int i) {
            ldmatrix_x4(fragment, BiasTile::chunk(of_tile + row * 128, row, i, lane / 16));
        });
#endif
        int key = schedule.key(j, first_tile, end_tile);
#if BITS
        if (__builtin_expect(key < call.item.keys.holes, 0)) {
            const unsigned* of_tile = call.item.bits + key / 32;
            return mask_bits(s, of_tile, of_tile);
        }
#endif
        if (__builtin_expect(key + BLOCK_N > all_see.end || (HIDES_EARLIER && key < all_see.first),
                             0)) {
#if MASK == 2
            int word = schedule.key_tile(j, key_tiles) / 32;
            mask_bits(s, bits[0] + word, bits[1] + word);
#else
            mask_columns(s, visible[0], visible[1], key);
#endif
        }
    }
#if MASK
    // What this thread's rows, `row` and 8 further, see of a mask, and their 64 by its record.
    __device__ __forceinline__ void look_up(const MaskList& list, const MaskedTile& work,
                                            const int4& record, int row) {
        group_sees = {record.x, record.y}, all_see = {record.z, record.w};
#if MASK == 2
        key_tiles = work.key_tiles;
#endif
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int last = (PACKED ? work.row + work.rows : call.rows) - 1;
            int at = work.mask * call.rows + min(row + 8 * r, last);
#if MASK == 2
            bits[r] = list.bits + static_cast<long long>(at) * list.words;
#else
            int2 bounds = list.bounds[at];
            visible[r] = {bounds.x, bounds.y};
#endif
        }
    }
#endif

    // Where exponentials go: eight of them are this thread's fragment of P's 16 keys.
    __device__ __forceinline__ auto to_registers(Weights& p) const {
        return [&p](int i, const float (&e)[8]) {
#pragma unroll
            for (int j = 0; j < 4; ++j) p[i / 2 + j] = pack(e[2 * j], e[2 * j + 1]);
        };
    }
    __device__ __forceinline__ auto to_shared() const {
        return [this](int i, const float (&e)[8]) {
            stmatrix_x4(PTile::to_step(own_p + p_buffer * P_BYTES + lane_at, i / 8),
                        pack(e[0], e[1]), pack(e[2], e[3]), pack(e[4], e[5]), pack(e[6], e[7]));
        };
    }
    __device__ __forceinline__ void
    shared_p_written() const {  // by this warp, which reads no other's rows
        fence_async_proxy();
        __syncwarp();
    }
    __device__ __forceinline__ static void scale_rows(Output& out, const float (&by)[2]) {
#pragma unroll
        for (int i = 0; i < COLUMNS_V / 2; ++i) out[i] *= by[i / 2 % 2];
    }
    // The softmax of a tile that nothing runs beside.
    template <int N>
    __device__ __forceinline__ void softmax(float (&s)[N], State& state, Factors, bool first) {
        auto& [out, rows, p] = state;
        float by[2];
        bool grew;
        if constexpr (P_SHARED) {
            grew = rows.tile(s, call.exponent(), first, by, to_shared());
            shared_p_written();
        } else {
            grew = rows.tile(s, call.exponent(), first, by, to_registers(p));
        }
        if (BIAS) release_k();
        if (grew) scale_rows(out, by);
#pragma unroll
        for (int i = N / 2; i < BLOCK_N / 4; ++i) p[i] = 0;  // of the half that is not seen
    }
    // The same beside P V of the tile before, which is then waited for. The P before is being read,
    // so the new one goes elsewhere: to the other buffer, or over the scores. With MAXIMA 1 no tile
    // is done again; with 2 its scores are then computed again, so that K must still be there.
    __device__ __forceinline__ void softmax_beside_pv(Scores& s, State& state, Factors, int j) {
        auto& [out, rows, p] = state;
        float by[2];
        bool grew;
        if constexpr (P_SHARED) {
            p_buffer ^= 1;
            grew = rows.tile(s, call.exponent(), false, by, to_shared());
            if (BIAS) release_k();
            shared_p_written();
            end_pv(state);
        } else {
            if constexpr (SCORES_AGAIN) {
                grew = rows.tile_over(s, call.exponent(), by, [this, j](Scores& s) {
                    qk_again(s);
                    mask(s, j);
                    __syncwarp();
                });
                release_k();
            } else {
                grew = rows.tile(s, call.exponent(), false, by, [&s](int i, const float (&e)[8]) {
#pragma unroll
                    for (int j = 0; j < 8; ++j) s[i + j] = e[j];
                });
                if (BIAS) release_k();
            }
            warpgroup_fence_operand(s);
            end_pv(state);
#pragma unroll
            for (int i = 0; i < BLOCK_N / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
        }
        if (grew) scale_rows(out, by);
    }
};
using Consumer = FlashConsumer<Products>;
