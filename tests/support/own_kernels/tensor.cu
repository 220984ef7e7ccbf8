// Sixteen queries a warp: QK^T and PV on tensor cores through mma.h, the softmax in shared memory.
#include <cuda_fp16.h>
#include <math.h>
#include <mma.h>

#ifndef COLS
#define COLS 32
#endif
using namespace nvcuda;

extern "C" __global__ void __launch_bounds__(32)
    tensor(const half* __restrict__ q, const half* __restrict__ k, const half* __restrict__ v,
           half* __restrict__ o, int seqlen_q, int seqlen_k, float scale) {
    __shared__ __align__(32) half queries[16 * HEAD_DIM], keys[COLS * HEAD_DIM], p[16 * COLS];
    __shared__ __align__(32) float scores[16 * COLS], out[16 * HEAD_DIM], most[16], sum[16],
        keep[16];
    const int first_row = blockIdx.x * 16, lane = threadIdx.x;
    q += size_t(blockIdx.y) * seqlen_q * HEAD_DIM, o += size_t(blockIdx.y) * seqlen_q * HEAD_DIM;
    k += size_t(blockIdx.y) * seqlen_k * HEAD_DIM, v += size_t(blockIdx.y) * seqlen_k * HEAD_DIM;
    for (int i = lane; i < 16 * HEAD_DIM; i += 32) {
        const int row = first_row + i / HEAD_DIM;
        queries[i] = row < seqlen_q ? q[row * HEAD_DIM + i % HEAD_DIM] : half(0.f);
        out[i] = 0.f;
    }
    if (lane < 16) most[lane] = -INFINITY, sum[lane] = 0.f;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> kt;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> b;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
    for (int first = 0; first < seqlen_k; first += COLS) {
        __syncthreads();
        for (int i = lane; i < COLS * HEAD_DIM; i += 32) {
            const int key = first + i / HEAD_DIM;
            keys[i] = key < seqlen_k ? k[key * HEAD_DIM + i % HEAD_DIM] : half(0.f);
        }
        __syncthreads();
        for (int j = 0; j < COLS; j += 16) {
            wmma::fill_fragment(c, 0.f);
            for (int d = 0; d < HEAD_DIM; d += 16) {
                wmma::load_matrix_sync(a, queries + d, HEAD_DIM);
                wmma::load_matrix_sync(kt, keys + j * HEAD_DIM + d, HEAD_DIM);
                wmma::mma_sync(c, a, kt, c);
            }
            wmma::store_matrix_sync(scores + j, c, COLS, wmma::mem_row_major);
        }
        __syncthreads();
        if (lane < 16) {
            float next = most[lane], total = 0.f;
            const int there = min(COLS, seqlen_k - first);
            for (int j = 0; j < there; ++j) next = fmaxf(next, scores[lane * COLS + j] * scale);
            for (int j = 0; j < COLS; ++j) {
                const float x = j < there ? expf(scores[lane * COLS + j] * scale - next) : 0.f;
                p[lane * COLS + j] = half(x), total += x;
            }
            keep[lane] = expf(most[lane] - next);
            sum[lane] = sum[lane] * keep[lane] + total, most[lane] = next;
        }
        __syncthreads();
        for (int i = lane; i < 16 * HEAD_DIM; i += 32) out[i] *= keep[i / HEAD_DIM];
        for (int i = lane; i < COLS * HEAD_DIM; i += 32) {
            const int key = first + i / HEAD_DIM;
            keys[i] = key < seqlen_k ? v[key * HEAD_DIM + i % HEAD_DIM] : half(0.f);
        }
        __syncthreads();
        for (int d = 0; d < HEAD_DIM; d += 16) {
            wmma::load_matrix_sync(c, out + d, HEAD_DIM, wmma::mem_row_major);
            for (int j = 0; j < COLS; j += 16) {
                wmma::load_matrix_sync(a, p + j, COLS);
                wmma::load_matrix_sync(b, keys + j * HEAD_DIM + d, HEAD_DIM);
                wmma::mma_sync(c, a, b, c);
            }
            wmma::store_matrix_sync(out + d, c, HEAD_DIM, wmma::mem_row_major);
        }
    }
    __syncthreads();
    for (int i = lane; i < 16 * HEAD_DIM; i += 32) {
        const int row = first_row + i / HEAD_DIM;
        if (row < seqlen_q) o[row * HEAD_DIM + i % HEAD_DIM] = half(out[i] / sum[i / HEAD_DIM]);
    }
}
