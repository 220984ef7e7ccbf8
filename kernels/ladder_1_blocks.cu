// ladder_1_blocks: a warp per query row, a block of warps. naive gives a row to one thread: 4096
// threads at (1,8,512,64), where an H200 holds 270336, and each waits alone for its loads. Here a
// row has 32: a lane takes a key for the scores, then HEAD_DIM / 32 columns for the output, which
// makes loads of V whole lines. What it cannot do: every row still reads all of K and V itself. q,
// o: (batch, heads, seqlen_q, HEAD_DIM); k, v: (batch, heads_kv, seqlen_k, HEAD_DIM).
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"
#include "common/tile/softmax.cuh"

using namespace attn;

constexpr int PAIRS =
    HEAD_DIM / 64;  // of columns that a lane holds: 2 * lane + 64 * i and the next
static_assert(HEAD_DIM % 64 == 0, "a lane holds whole pairs of columns");

__device__ __forceinline__ float dot(uint4 a, uint4 b) {
    return low_of(a.x) * low_of(b.x) + high_of(a.x) * high_of(b.x) + low_of(a.y) * low_of(b.y) +
           high_of(a.y) * high_of(b.y) + low_of(a.z) * low_of(b.z) + high_of(a.z) * high_of(b.z) +
           low_of(a.w) * low_of(b.w) + high_of(a.w) * high_of(b.w);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    ladder_1_blocks(const element_t* __restrict__ q, const element_t* __restrict__ k,
                    const element_t* __restrict__ v, element_t* __restrict__ o, int heads,
                    int heads_kv, int seqlen_q, int seqlen_k, float scale) {
    const int lane = threadIdx.x % 32, row = blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= seqlen_q) return;  // the whole warp
    const int head = blockIdx.y,
              head_kv = head / (heads / heads_kv);  // both counted over the batch
    const long long query = (static_cast<long long>(head) * seqlen_q + row) * HEAD_DIM;
    const long long kv = static_cast<long long>(head_kv) * seqlen_k * HEAD_DIM;
    const uint4* q_row = reinterpret_cast<const uint4*>(q + query);
    const int keys = visible_keys(row, seqlen_q, seqlen_k).end;

    float out[PAIRS][2] = {}, largest = minus_infinity(), sum = 0.f;
    for (int first = 0; first < keys; first += 32) {
        // Lanes past the last key read it again, and count for nothing.
        const int key = min(first + lane, keys - 1);
        const uint4* k_row =
            reinterpret_cast<const uint4*>(k + kv + static_cast<long long>(key) * HEAD_DIM);
        float s = 0.f;
#pragma unroll 4
        for (int i = 0; i < HEAD_DIM / 8; ++i) s += dot(q_row[i], k_row[i]);
        s = first + lane < keys ? s * scale : minus_infinity();

        const float grown = fmaxf(largest, row_reduce<32, true>(s, nullptr));
        const float shrink = expf(largest - grown), p = expf(s - grown);
        largest = grown, sum = sum * shrink + p;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) out[i][0] *= shrink, out[i][1] *= shrink;
        const element_t* v_row = v + kv + static_cast<long long>(first) * HEAD_DIM + 2 * lane;
#pragma unroll 4
        for (int j = 0; j < min(32, keys - first); ++j, v_row += HEAD_DIM) {
            const float weight = __shfl_sync(0xffffffffu, p, j);
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                const unsigned two = *reinterpret_cast<const unsigned*>(v_row + 64 * i);
                out[i][0] += weight * low_of(two), out[i][1] += weight * high_of(two);
            }
        }
    }
    const float inverse = 1.f / row_reduce<32, false>(sum, nullptr);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i)
        *reinterpret_cast<unsigned*>(o + query + 2 * lane + 64 * i) =
            pack(out[i][0] * inverse, out[i][1] * inverse);
}
