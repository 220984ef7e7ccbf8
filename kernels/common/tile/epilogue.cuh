// What becomes of a tile's output: parts of the same rows from other keys are joined, and rows are
// stored.
#pragma once
#include "common/ptx/barrier.cuh"
#include "common/ptx/cache.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/shared.cuh"
#include "common/ptx/tma.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"
#include "common/tile/scores.cuh"

namespace attn {

// ---- merge: groups of warpgroups with the same queries, which took tiles of keys in turn ----

// What a key group hands over: accumulators, maxima and sums of each thread.
template <int HeadDim>
constexpr unsigned MERGE_BYTES = 128 * 4 * (HeadDim / 2 + 4);

// The key groups' accumulators of the same rows become one, in group 0. Takes the named barriers
// Merge and Merged. `region` has MERGE_BYTES for each warpgroup but those of group 0.
template <int HeadDim, int KeyGroups, int RowGroups, int Merge, int Merged, class Rows>
__device__ __forceinline__ void merge(float (&o)[HeadDim / 2], Rows& rows, unsigned char* region,
                                      float factor) {
    constexpr int CONSUMERS = KeyGroups * RowGroups * 128;
    int group = threadIdx.x / (RowGroups * 128), row_group = threadIdx.x / 128 % RowGroups;
    float* own =
        reinterpret_cast<float*>(region + row_group * MERGE_BYTES<HeadDim>) + threadIdx.x % 128;
    constexpr int TO_NEXT = RowGroups * MERGE_BYTES<HeadDim> / 4;
    named_barrier_sync(Merge, CONSUMERS);  // nobody multiplies from the ring any more
    if (group > 0) {
        own += (group - 1) * TO_NEXT;
#pragma unroll
        for (int i = 0; i < HeadDim / 2; ++i) own[i * 128] = o[i];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            own[(HeadDim / 2 + r) * 128] = rows.m[r];
            own[(HeadDim / 2 + 2 + r) * 128] = rows.l[r];
        }
        named_barrier_arrive(Merged, CONSUMERS);
        return;
    }
    named_barrier_sync(Merged, CONSUMERS);
#pragma unroll 1
    for (int other = 1; other < KeyGroups; ++other, own += TO_NEXT) {
        float mine[2], theirs[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            rows.join(r, own[(HeadDim / 2 + r) * 128], own[(HeadDim / 2 + 2 + r) * 128], factor,
                      mine[r], theirs[r]);
#pragma unroll
        for (int i = 0; i < HeadDim / 2; ++i)
            o[i] = fmaf(o[i], mine[i / 2 % 2], own[i * 128] * theirs[i / 2 % 2]);
    }
}

// ---- Join: the blocks of a cluster, through each other's shared memory ----
// The blocks of a cluster have the same queries and each its own keys; what they have becomes one
// through each other's shared memory. Each block finishes HeadDim / Splits columns, so that no
// block does all the work: it sends every other one that one's columns of its accumulators, and its
// maxima and sums. Those of a thread go to the threads of the same index, and are sent rather than
// fetched: a store that counts itself as there is one way through the cluster, where a barrier of
// the cluster and loads after it are three.

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
        // With a bias a reference may be the least finite number: see OnlineSoftmax::FAR.
        auto weight = [&](float m, int r) {
            const float from = largest[r] == minus_infinity() ? 0.f : largest[r];
            return exp2_approx(BIAS ? (m - from) * factor : fmaf(m, factor, offset[r]));
        };
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
            by[r] = weight(rows.m[r], r);
            rows.l[r] *= by[r], rows.m[r] = largest[r];
        }
#pragma unroll
        for (int i = 0; i < SLICE; ++i) mine[i] *= by[i / 2 % 2];
#pragma unroll
        for (int other = 0; other < Splits - 1; ++other) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                by[r] = weight(theirs[other][r], r);
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

// ---- combine_splits: blocks that stored their parts ----

// What a split says of a row beside its part of the output: the base-2 logarithm of the sum with
// its reference, -inf of no key. With a bias, reference and sum apart: beside the least finite
// number a sum is nothing.
#if BIAS
struct SumOfSplit {
    float reference, sum;
    __device__ __forceinline__ float weight(float from) const {
        return sum * exp2_approx((reference - from) * LOG2E);
    }
};
#else
struct SumOfSplit {
    float reference;
    __device__ __forceinline__ float weight(float from) const {
        return exp2_approx(reference - from);
    }
};
#endif

// Columns 4 `chunk` .. of one row. partial: (splits, rows, HeadDim), each normalised by its own
// sum; of_splits: (splits, rows). row_of_o(): where the row begins in o. Returns the natural
// logarithm of the whole row's sum. What is read is not __restrict__: see common/ptx/launch.cuh.
template <int HeadDim, class RowOfO>
__device__ __forceinline__ float combine_splits(const float* partial, const SumOfSplit* of_splits,
                                                element_t* __restrict__ o, const RowOfO& row_of_o,
                                                int splits, int rows, int row, int chunk) {
    float largest = minus_infinity();
    for (int i = 0; i < splits; ++i)
        largest = fmaxf(largest, of_splits[static_cast<long long>(i) * rows + row].reference);
    const bool empty = EMPTY_ROWS && largest == minus_infinity();
    const float from = empty ? 0.f : largest;
    float4 sum = {0.f, 0.f, 0.f, 0.f};
    float weights = 0.f;
#pragma unroll 4
    for (int i = 0; i < splits; ++i) {
        long long at = static_cast<long long>(i) * rows + row;
        float weight = of_splits[at].weight(from);
        float4 x = reinterpret_cast<const float4*>(partial + at * HeadDim)[chunk];
        sum.x = fmaf(x.x, weight, sum.x), sum.y = fmaf(x.y, weight, sum.y);
        sum.z = fmaf(x.z, weight, sum.z), sum.w = fmaf(x.w, weight, sum.w);
        weights += weight;
    }
    float by = empty ? 0.f : 1.f / weights;
    uint2 out = {pack(sum.x * by, sum.y * by), pack(sum.z * by, sum.w * by)};
    reinterpret_cast<uint2*>(o + row_of_o())[chunk] = out;
    return BIAS ? fmaf(log2f(weights), LN2, largest) : (largest + log2f(weights)) * LN2;
}

// ---- PanelStore: accumulators through shared memory to global memory ----

// Where a warp puts its 16 rows of an accumulator on their way to memory, 64 columns at a time.
// Store 0: a box of 16 rows by TMA, so that no warp waits for another. 1: a box of the warpgroup's
// 64 rows by TMA, its four warps' panels being one; takes named barriers 4 .. 7. 2: by the warp's
// own stores of 16 bytes a lane, in which `to` is where the first of its rows and columns goes,
// `stride` elements a row. Keep: L2 is told to hold on to what is stored.
template <int Store, bool Keep>
struct PanelStore {
    static constexpr int BOX_ROWS = Store == 1 ? 64 : 16;  // of a box
    static constexpr unsigned BYTES = BOX_ROWS * 128;      // of a panel

    __device__ static __forceinline__ void sync() {
        if (Store == 1) named_barrier_sync(4 + threadIdx.x / 128, 128);
        else __syncwarp();
    }
    __device__ static __forceinline__ bool issues() {
        return threadIdx.x % (Store == 1 ? 128 : 32) == 0;
    }

    // Until at most Pending groups of panels stored before are still read.
    template <int Pending>
    __device__ static __forceinline__ void wait() {
        if (Store < 2 && issues()) tma_store_wait_read<Pending>();
        sync();
    }
    __device__ static __forceinline__ void commit() {
        if (Store < 2 && issues()) tma_store_commit();
    }
    __device__ static __forceinline__ void put(element_t* to, uint4 x) {
        if (Keep) store_kept<16>(to, &x.x);
        else *reinterpret_cast<uint4*>(to) = x;
    }
    // d times `low` and `high` to columns `column` .. and rows `row` .. of the warp; `panel`: of
    // the box. rows: how many are inside, columns: how many of the 64.
    __device__ static __forceinline__ void store(const TensorMap& map, unsigned panel,
                                                 const float* d, float low, float high, int column,
                                                 int row, int head, int rows, int columns,
                                                 element_t* to, int stride) {
        int lane = threadIdx.x % 32, in = lane % 16, chunk = lane / 16,
            slice = threadIdx.x / 32 % 4;
        unsigned own = panel + (Store == 1 ? slice * 2048 : 0);
#pragma unroll
        for (int i = 0; i < 4; ++i, d += 8)
            stmatrix_x4(own + in * 128 + ((i * 2 + chunk ^ in % 8) << 4),
                        pack(d[0] * low, d[1] * low), pack(d[2] * high, d[3] * high),
                        pack(d[4] * low, d[5] * low), pack(d[6] * high, d[7] * high));
        if constexpr (Store < 2) {
            fence_async_proxy();
            sync();
            if (issues() && rows > 0 && columns > 0) {  // of the first warp, if the box is of four
                if (Keep) tma_store(map, panel, column, row, head, EVICT_LAST);
                else tma_store(map, panel, column, row, head);
            }
        } else {
            sync();
            if (lane % 8 * 8 >= columns) rows = 0;
            to += lane / 8 * stride + lane % 8 * 8;
#pragma unroll
            for (int r = lane / 8; r < 16; r += 4, to += 4 * stride) {
                uint4 x = load_shared_16(own + r * 128 + ((lane % 8 ^ r % 8) << 4));
                if (r < rows) put(to, x);
            }
            sync();
        }
    }
};

// ---- store_rows: fragments of common/tile/fragments.cuh ----
constexpr int OUTPUT_PITCH = 20;  // floats from one row of 16 columns on their way out to the next

// Every row of the fragment times its factor.
template <class Accumulator>
__device__ __forceinline__ void scale_rows(Accumulator& x, const Accumulator& factors) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x.x[i] *= factors.x[i];
}

// Eight output columns of this lane's row from shared memory.
__device__ __forceinline__ void store_eight(element_t* to, const float* from, float factor) {
    const float4 a = *reinterpret_cast<const float4*>(from),
                 b = *reinterpret_cast<const float4*>(from + 4);
    *reinterpret_cast<uint4*>(to) =
        make_uint4(pack(a.x * factor, a.y * factor), pack(a.z * factor, a.w * factor),
                   pack(b.x * factor, b.y * factor), pack(b.z * factor, b.w * factor));
}

// The warp's fragments, 16 columns each, to rows 0 .. rows - 1 of `o`, by way of 16 * OUTPUT_PITCH
// floats.
template <class Accumulator, int Count>
__device__ __forceinline__ void store_rows(element_t* o, Accumulator (&out)[Count], float* scratch,
                                           int rows, float factor) {
    const int row = threadIdx.x % 16, column = threadIdx.x / 16 % 2 * 8;
#pragma unroll
    for (int d = 0; d < Count; ++d) {
        __syncwarp();
        wmma_store(scratch, out[d], OUTPUT_PITCH);
        __syncwarp();
        if (row < rows)
            store_eight(o + row * (16 * Count) + d * 16 + column,
                        scratch + row * OUTPUT_PITCH + column, factor);
    }
}

}  // namespace attn
