// A consumer warpgroup of a fused forward: 64 queries, and its tiles of keys from right to left.
#pragma once
#include "common/ptx/barrier.cuh"
#include "common/tile/scheduler.cuh"

namespace attn {

// Where S = Q K^T runs: alone, or next to P V of the tile before.
constexpr bool ALONE = false, BESIDE_PV = true;

// What the formats share. Traits are the rest of a consumer: its constants; the two products, and
// the stages of the rings that they read; what of V is not to be read; P's format and the softmax;
// the factors of a tile's scores and V. State is what stays from tile to tile: O, the softmax's
// rows, and P of a tile. HalfScores are of half a tile, for a first tile of which the warpgroup
// sees no more.
template <class Traits>
struct FlashConsumer : Traits {
    using State = typename Traits::State;

    // Warpgroups that overlap tiles take turns to begin their products.
    __device__ __forceinline__ void take_turn() const {
        if (Traits::Turns) named_barrier_sync(Traits::TurnBarrier + this->warp / 4, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (Traits::Turns)
            named_barrier_arrive(Traits::TurnBarrier + (this->warp / 4 + 1) % Traits::Warpgroups,
                                 256);
    }
    // The first turn is warpgroup 0's. It takes the last, so that no barrier is left half full.
    __device__ __forceinline__ void begin_turns() const {
        if (Traits::Turns && this->warp / 4 == 0) named_barrier_arrive(Traits::TurnBarrier, 256);
    }
    __device__ __forceinline__ void end_turns() const {
        if (Traits::Turns && this->warp / 4 == 0) named_barrier_sync(Traits::TurnBarrier, 256);
    }

    // Passes by tiles from the j-th on, before `end`, and returns the first other one. A stage is
    // given back when it is full: before, its barrier may be one phase behind.
    __device__ __forceinline__ int pass(int j, int end) {
        Traits& own = *this;
#pragma unroll 1
        for (; j < end; ++j) {
            own.wait_for_k(ALONE), own.release_k();
            take_turn(), pass_turn();  // all warpgroups have as many turns
            own.wait_for_v(), own.release_v();
        }
        return j;
    }
    // Passes by the tiles that the block's later queries alone see.
    __device__ __forceinline__ int pass_unseen(int tiles) {
        Traits& own = *this;
        if (Traits::Masked)
            return pass(0, min((own.end_tile - own.seen().end) / Traits::TileKeys, tiles - 1));
        int seen = ceil_div<Traits::TileKeys>(own.seen().end);
        return pass(0, min(own.end_tile - seen, tiles - 1));
    }
    // Gives Q back unread.
    __device__ __forceinline__ void release_queries() const {
        this->release_q(true), this->release_q(false);
    }
    // S = Q K^T and P = softmax(S) of the first tile of keys, or of half of it.
    template <class Scores, class Factors>
    __device__ __forceinline__ void begin(State& state, const Factors& factors, int j) {
        Traits& own = *this;
        Scores s;
        own.begin_qk(s, ALONE);
        own.end_qk(s, ALONE);
        own.release_q(true);
        own.mask(s, j);
        own.softmax(s, state, factors, true);
    }
    // O = softmax(Q K^T) V, not yet divided by the sums of its rows.
    __device__ __forceinline__ void attend(State& state, int tiles) {
        Traits& own = *this;
        if (Traits::Masked && tiles == 0) return release_queries();
        const int first = Traits::UnseenTiles ? pass_unseen(tiles) : own.key_group, all = tiles;
        if constexpr (Traits::Masked) {
            // Tiles left of what the warpgroup's 64 queries see are passed by too, at the end.
            if (own.seen().end == 0) {  // none of them sees a key, and the last tile has no turn
                own.wait_for_k(ALONE), own.release_k();
                own.wait_for_v(), own.release_v();
                return release_queries();
            }
            tiles = ceil_div<Traits::TileKeys>(own.end_tile - own.seen().first);
            own.load_q_registers();  // not before it is known that they are used
        }
        if constexpr (!Traits::Overlaps) {
#pragma unroll 1
            for (int j = first; j < tiles; j += Traits::KeyGroups) {
                typename Traits::Scores s;
                const auto factors = own.factors_of(j);
                own.wait_for_k(ALONE);
                own.begin_qk(s, ALONE);  // S = Q K^T
                own.end_qk(s, ALONE);
                if (j == first) own.release_q(true);
                own.mask(s, j);
                own.softmax(s, state, factors, j == first);  // P = softmax(S)
                if (j == first) own.clear_behind(j);
                own.wait_for_v(), own.clear_before(j);
                own.begin_pv(state);  // O += P V
                own.end_pv(state);
            }
            own.release_q(false);
        } else {
            const auto factors = own.factors_of(first);
            own.wait_for_k(ALONE);
            if (own.sees_half(first)) begin<typename Traits::HalfScores>(state, factors, first);
            else begin<typename Traits::Scores>(state, factors, first);
            own.clear_behind(first);
#pragma unroll 1
            for (int j = first + Traits::KeyGroups; j < tiles; j += Traits::KeyGroups) {
                typename Traits::Scores s;
                const auto factors = own.factors_of(j);
                own.wait_for_k(BESIDE_PV), take_turn();
                own.begin_qk(s, BESIDE_PV);  // S = Q K^T
                own.wait_for_v();
                own.begin_pv(state), pass_turn();  // O += P V, of the tile before
                own.end_qk(s, BESIDE_PV);
                own.mask(s, j);
                own.softmax_beside_pv(s, state, factors, j);  // P = softmax(S)
            }
            own.release_q(false);
            own.wait_for_v(), own.clear_before(tiles - 1 - (tiles - 1 - first) % Traits::KeyGroups);
            own.begin_pv(state);
            own.end_pv(state);
        }
        if (Traits::Masked) pass(tiles, all);
    }
};

}  // namespace attn
