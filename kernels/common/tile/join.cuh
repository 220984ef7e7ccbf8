// The blocks of a cluster have the same queries and each its own keys; what they have becomes one
// through each other's shared memory. Each block finishes HeadDim / Splits columns, so that no
// block does all the work: it sends every other one that one's columns of its accumulators, and its
// maxima and sums. Those of a thread go to the threads of the same index, and are sent rather than
// fetched: a store that counts itself as there is one way through the cluster, where a barrier of
// the cluster and loads after it are three.
#pragma once
#include "common/element.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/shared.cuh"

template <int HeadDim, int Splits>
struct Join {
    static constexpr int SLICE =
        HeadDim / 2 / Splits;  // accumulators of a thread that a block finishes
    // 128 times 16 bytes: maxima and sums of a warpgroup's threads, or four of the accumulators.
    static constexpr unsigned PART = 128 * 16, SENT = (1 + SLICE / 4) * PART;
    static constexpr unsigned BYTES = (Splits - 1) * SENT;  // that a warpgroup receives

    // By a warpgroup, of its accumulators `o` and `rows`: `mine` becomes this block's share of the
    // columns, from all keys, and `rows` what the whole row has. `region` and `barrier`: where this
    // warpgroup, in every block, gets BYTES, which the barrier expects; nothing else writes there,
    // and all blocks have begun.
    template <class Rows>
    __device__ static __forceinline__ void run(const float (&o)[HeadDim / 2], Rows& rows,
                                               float (&mine)[SLICE], unsigned region,
                                               unsigned barrier, int rank, float factor) {
        static_assert(Splits > 1 && HeadDim % (8 * Splits) == 0,
                      "a share is of whole groups of 8 columns");
        region += threadIdx.x % 128 * 16;
#pragma unroll
        for (int to = 0; to < Splits; ++to) {
            const float* share = o + to * SLICE;
            if (to == rank) {
#pragma unroll
                for (int i = 0; i < SLICE; ++i) mine[i] = share[i];
                continue;
            }
            // A block's sender `rank` has the place `rank`, but the block's own is left out.
            unsigned there = cluster_address(region + (rank - (rank > to)) * SENT, to);
            unsigned count = cluster_address(barrier, to);
            store_async_16(there, count, rows.m[0], rows.m[1], rows.l[0], rows.l[1]);
#pragma unroll
            for (int i = 0; i < SLICE; i += 4)
                store_async_16(there + (1 + i / 4) * PART, count, share[i], share[i + 1],
                               share[i + 2], share[i + 3]);
        }
        auto load = [&](int other, int part, float (&x)[4]) {
            uint4 bits = load_shared_16(region + other * SENT + part * PART);
            x[0] = __uint_as_float(bits.x), x[1] = __uint_as_float(bits.y);
            x[2] = __uint_as_float(bits.z), x[3] = __uint_as_float(bits.w);
        };
        mbarrier_wait<true>(barrier, 0);
        // All references first, so that no exponential waits for another: one after the other takes
        // Splits times as long.
        float theirs[Splits - 1][4], largest[2] = {rows.m[0], rows.m[1]}, offset[2], by[2];
#pragma unroll
        for (int other = 0; other < Splits - 1; ++other) {
            load(other, 0, theirs[other]);
            largest[0] = fmaxf(largest[0], theirs[other][0]),
            largest[1] = fmaxf(largest[1], theirs[other][1]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            offset[r] =
                largest[r] == minus_infinity() ? 0.f : -largest[r] * factor;  // a row without a key
            by[r] = exp2_approx(fmaf(rows.m[r], factor, offset[r]));
            rows.l[r] *= by[r], rows.m[r] = largest[r];
        }
#pragma unroll
        for (int i = 0; i < SLICE; ++i) mine[i] *= by[i / 2 % 2];
#pragma unroll
        for (int other = 0; other < Splits - 1; ++other) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                by[r] = exp2_approx(fmaf(theirs[other][r], factor, offset[r]));
                rows.l[r] = fmaf(theirs[other][2 + r], by[r], rows.l[r]);
            }
#pragma unroll
            for (int i = 0; i < SLICE; i += 4) {
                float x[4];
                load(other, 1 + i / 4, x);
#pragma unroll
                for (int j = 0; j < 4; ++j) mine[i + j] = fmaf(x[j], by[j / 2], mine[i + j]);
            }
        }
    }
};
