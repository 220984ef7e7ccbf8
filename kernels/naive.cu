// naive: one thread per query row, no shared memory, no tensor cores. The first rung of the ladder
// and the smallest complete family: read it beside naive.py.
// q, o: (batch, heads, seqlen_q, HEAD_DIM); k, v: (batch, heads_kv, seqlen_k, HEAD_DIM).
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"

using namespace attn;

// Output columns held in registers at once; wider heads recompute the scores once a slice.
constexpr int SLICE = 64;
static_assert(HEAD_DIM % SLICE == 0, "HEAD_DIM must be a multiple of 64");

__device__ float score(const element_t* q, const element_t* k) {
    float sum = 0.f;
    for (int d = 0; d < HEAD_DIM; ++d) sum += to_float(q[d]) * to_float(k[d]);
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    naive(const element_t* __restrict__ q, const element_t* __restrict__ k,
          const element_t* __restrict__ v, element_t* __restrict__ o, int heads, int heads_kv,
          int seqlen_q, int seqlen_k, float scale) {
    int row = blockIdx.x * THREADS + threadIdx.x;
    if (row >= seqlen_q) return;
    int batch = blockIdx.y / heads, head_kv = blockIdx.y % heads / (heads / heads_kv);
    long long kv = static_cast<long long>(batch * heads_kv + head_kv) * seqlen_k * HEAD_DIM;
    long long at = (static_cast<long long>(blockIdx.y) * seqlen_q + row) * HEAD_DIM;
    q += at, o += at, k += kv, v += kv;
    int keys = visible_keys(row, seqlen_q, seqlen_k).end;

    for (int slice = 0; slice < HEAD_DIM; slice += SLICE) {
        float out[SLICE] = {}, largest = minus_infinity(), sum = 0.f;
        for (int j = 0; j < keys; ++j) {
            float s = score(q, k + static_cast<long long>(j) * HEAD_DIM) * (scale * LOG2E);
            float grown = fmaxf(largest, s), shrink = exp2_approx(largest - grown),
                  p = exp2_approx(s - grown);
            largest = grown, sum = sum * shrink + p;
#pragma unroll
            for (int d = 0; d < SLICE; ++d)
                out[d] = out[d] * shrink +
                         p * to_float(v[static_cast<long long>(j) * HEAD_DIM + slice + d]);
        }
        for (int d = 0; d < SLICE; ++d) o[slice + d] = to_element(out[d] / sum);
    }
}
