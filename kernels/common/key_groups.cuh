// Groups of warpgroups that have the same queries and take tiles of keys in turn: what they have is merged
// last. Include after common/online_softmax.cuh; needs HEAD_DIM, KEY_GROUPS, ROW_GROUPS, CONSUMERS,
// MERGE_BYTES, and two named barriers, MERGE_BARRIER and MERGED_BARRIER.
#pragma once

// The key groups' accumulators of the same rows become one, in group 0.
__device__ __forceinline__ void
merge(float (&o)[HEAD_DIM / 2], OnlineSoftmax& rows, unsigned char* region, float factor) {
    int group = threadIdx.x / (ROW_GROUPS * 128), row_group = threadIdx.x / 128 % ROW_GROUPS;
    float* own = reinterpret_cast<float*>(region + row_group * MERGE_BYTES) + threadIdx.x % 128;
    constexpr int TO_NEXT = ROW_GROUPS * MERGE_BYTES / 4;
    named_barrier_sync(MERGE_BARRIER, CONSUMERS);  // nobody multiplies from the ring any more
    if (group > 0) {
        own += (group - 1) * TO_NEXT;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i) own[i * 128] = o[i];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            own[(HEAD_DIM / 2 + r) * 128] = rows.m[r];
            own[(HEAD_DIM / 2 + 2 + r) * 128] = rows.l[r];
        }
        named_barrier_arrive(MERGED_BARRIER, CONSUMERS);
        return;
    }
    named_barrier_sync(MERGED_BARRIER, CONSUMERS);
#pragma unroll 1
    for (int other = 1; other < KEY_GROUPS; ++other, own += TO_NEXT) {
        float mine[2], theirs[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            rows.join(r, own[(HEAD_DIM / 2 + r) * 128], own[(HEAD_DIM / 2 + 2 + r) * 128], factor, mine[r],
                      theirs[r]);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; ++i)
            o[i] = fmaf(o[i], mine[i / 2 % 2], own[i * 128] * theirs[i / 2 % 2]);
    }
}
