// Groups of warpgroups that have the same queries and take tiles of keys in turn: what they have is
// merged last.
#pragma once
#include "common/ptx/barrier.cuh"

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
