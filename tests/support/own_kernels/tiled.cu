// Attention, a tile of keys and values in shared memory at a time; two queries a thread would be
// faster.
#include <cuda_fp16.h>
#include <math.h>

#ifndef ROWS
#define ROWS 32
#endif
#ifndef COLS
#define COLS 16
#endif

extern "C" __global__ void __launch_bounds__(ROWS)
    tiled(const __half* __restrict__ Q, const __half* __restrict__ K, const __half* __restrict__ V,
          __half* __restrict__ O, int N, int M, float scale) {
    __shared__ __half2 keys[COLS][HEAD_DIM / 2], values[COLS][HEAD_DIM / 2];
    const int row = blockIdx.x * ROWS + threadIdx.x, head = blockIdx.y;
    const bool mine = row < N;
    __half2 q[HEAD_DIM / 2];
    float out[HEAD_DIM] = {}, sum = 0.f, most = -INFINITY;
    const __half2* own = reinterpret_cast<const __half2*>(Q + (size_t(head) * N + row) * HEAD_DIM);
    for (int d = 0; d < HEAD_DIM / 2; ++d) q[d] = mine ? own[d] : __float2half2_rn(0.f);
    for (int first = 0; first < M; first += COLS) {
        for (int i = threadIdx.x; i < COLS * HEAD_DIM / 2; i += ROWS) {
            const int key = first + i / (HEAD_DIM / 2), d = i % (HEAD_DIM / 2);
            const size_t at = (size_t(head) * M + key) * HEAD_DIM + 2 * d;
            const __half2 none = __float2half2_rn(0.f);
            keys[key - first][d] = key < M ? *reinterpret_cast<const __half2*>(K + at) : none;
            values[key - first][d] = key < M ? *reinterpret_cast<const __half2*>(V + at) : none;
        }
        __syncthreads();
        for (int j = 0; j < COLS && first + j < M; ++j) {
            float score = 0.f;
            for (int d = 0; d < HEAD_DIM / 2; ++d) {
                const float2 a = __half22float2(q[d]), b = __half22float2(keys[j][d]);
                score += a.x * b.x + a.y * b.y;
            }
            score *= scale;
            const float next = fmaxf(most, score), keep = expf(most - next), p = expf(score - next);
            for (int d = 0; d < HEAD_DIM / 2; ++d) {
                const float2 b = __half22float2(values[j][d]);
                out[2 * d] = out[2 * d] * keep + p * b.x;
                out[2 * d + 1] = out[2 * d + 1] * keep + p * b.y;
            }
            sum = sum * keep + p, most = next;
        }
        __syncthreads();
    }
    if (!mine) return;
    for (int d = 0; d < HEAD_DIM; ++d)
        O[(size_t(head) * N + row) * HEAD_DIM + d] = __float2half(out[d] / sum);
}
