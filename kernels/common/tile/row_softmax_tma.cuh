// Softmax of whole rows, in place, by warps that work alone: rows come and go by TMA, Group at a
// time, while Depth groups of a warp are in shared memory.
#pragma once
#include "common/element.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/cache.cuh"
#include "common/ptx/shared.cuh"
#include "common/ptx/tma.cuh"
#include "common/tile/arithmetic.cuh"
#include "common/tile/ring.cuh"
#include "common/tile/rows.cuh"

// Rows of at most Kept columns, a multiple of 256, in boxes of 256 columns. Each warp has Depth
// barriers, and rows and barriers of its own, so no thread waits for another warp. Keep: L2 is told
// to hold on to the rows.
template <int Group, int Depth, int Kept, bool Keep, bool Causal>
struct WarpRows {
    static constexpr int BOX = 256, BOXES = Kept / BOX, BOX_BYTES = Group * BOX * 2;
    static constexpr int SLOT_BYTES = BOXES * BOX_BYTES;

    const TensorMap& map;
    unsigned char* rows;  // of this warp: Depth slots
    unsigned barriers;
    int seqlen_q, seqlen_k;

    __device__ __forceinline__ int boxes(int columns) const { return ceil_div<BOX>(columns); }
    // The group's boxes up to the last key of its last row.
    __device__ __forceinline__ void load(int slot, int row, int head) const {
        int n = boxes(keys_of<Causal>(min(row + Group, seqlen_q) - 1, seqlen_q, seqlen_k));
        mbarrier_expect(barriers + 8 * slot, n * BOX_BYTES);
        for (int i = 0; i < n; ++i)
            tma_load(smem_address(rows) + slot * SLOT_BYTES + i * BOX_BYTES, map,
                     barriers + 8 * slot, i * BOX, row, head);
    }
    __device__ __forceinline__ void store(int slot, int row, int head, int columns) const {
        for (int i = 0; i < boxes(columns); ++i) {
            unsigned from = smem_address(rows) + slot * SLOT_BYTES + i * BOX_BYTES;
            if (Keep) tma_store(map, from, i * BOX, row, head, EVICT_LAST);
            else tma_store(map, from, i * BOX, row, head);
        }
    }
    // One row: 8 columns of each box a lane. Beyond its keys it becomes zeros.
    __device__ __forceinline__ void normalise(int slot, int r, int keys) const {
        int lane = threadIdx.x % 32;
        uint4* at = reinterpret_cast<uint4*>(rows + slot * SLOT_BYTES + r * BOX * 2) + lane;
        float p[BOXES][8], largest = minus_infinity(), sum = 0.f;
#pragma unroll
        for (int i = 0; i < BOXES; ++i) {
            uint4 in = at[i * (BOX_BYTES / 16)];
            unsigned word[4] = {in.x, in.y, in.z, in.w};
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                p[i][e] = i * BOX + lane * 8 + e < keys
                              ? (e % 2 ? high_of(word[e / 2]) : low_of(word[e / 2]))
                              : minus_infinity();
                largest = fmaxf(largest, p[i][e]);
            }
        }
        largest = row_reduce<32, true>(largest, nullptr);
#pragma unroll
        for (int i = 0; i < BOXES; ++i)
#pragma unroll
            for (int e = 0; e < 8; ++e) sum += p[i][e] = exp2_approx(p[i][e] - largest);
        float inverse = 1.f / row_reduce<32, false>(sum, nullptr);
#pragma unroll
        for (int i = 0; i < BOXES; ++i)
            at[i * (BOX_BYTES / 16)] = {pack(p[i][0] * inverse, p[i][1] * inverse),
                                        pack(p[i][2] * inverse, p[i][3] * inverse),
                                        pack(p[i][4] * inverse, p[i][5] * inverse),
                                        pack(p[i][6] * inverse, p[i][7] * inverse)};
    }

    // Groups `group`, `group` + `step` .. of `heads`; written_in(row) says how many columns a row
    // needs.
    template <typename Written>
    __device__ __forceinline__ void run(int group, int step, int heads, Written written_in) const {
        int lane = threadIdx.x % 32, a_head = ceil_div<Group>(seqlen_q), groups = a_head * heads;
        int ahead = group;  // the next group to be loaded
        if (lane == 0)
            for (int slot = 0; slot < Depth && ahead < groups; ++slot, ahead += step)
                load(slot, ahead % a_head * Group, ahead / a_head);
        __syncwarp();
        Ring<Depth> at;
        int free = -1;  // the slot whose rows were stored last
#pragma unroll 1
        for (; group < groups; group += step, at.next()) {
            int row = group % a_head * Group, head = group / a_head;
            mbarrier_wait(barriers + 8 * at.stage, at.phase);
#pragma unroll(Group < 2 ? 1 : 2)
            for (int r = 0; r < Group; ++r)
                if (row + r < seqlen_q)
                    normalise(at.stage, r, keys_of<Causal>(row + r, seqlen_q, seqlen_k));
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) {
                store(at.stage, row, head, written_in(min(row + Group, seqlen_q) - 1));
                tma_store_commit();
                tma_store_wait_read<1>();
                if (free >= 0 && ahead < groups) {
                    load(free, ahead % a_head * Group, ahead / a_head);
                    ahead += step;
                }
            }
            free = at.stage;
        }
        if (lane == 0) tma_store_wait_read<0>();
    }
};
