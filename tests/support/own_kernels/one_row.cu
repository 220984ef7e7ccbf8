// One query a thread, two passes over the keys, nothing shared.
#include <cuda_fp16.h>
#include <math.h>

extern "C" __global__ void one_row(const half* query, const half* key, const half* value, half* out,
                                   int seqlen_q, int seqlen_k, float scale) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= seqlen_q) return;
    const half* q = query + (size_t(blockIdx.y) * seqlen_q + row) * HEAD_DIM;
    const half* k = key + size_t(blockIdx.y) * seqlen_k * HEAD_DIM;
    const half* v = value + size_t(blockIdx.y) * seqlen_k * HEAD_DIM;
    float most = -INFINITY, sum = 0.f, o[HEAD_DIM] = {};
    for (int pass = 0; pass < 2; ++pass)
        for (int j = 0; j < seqlen_k; ++j) {
            float score = 0.f;
            for (int d = 0; d < HEAD_DIM; ++d) score += float(q[d]) * float(k[j * HEAD_DIM + d]);
            if (pass == 0) {
                most = fmaxf(most, score * scale);
                continue;
            }
            const float p = expf(score * scale - most);
            sum += p;
            for (int d = 0; d < HEAD_DIM; ++d) o[d] += p * float(v[j * HEAD_DIM + d]);
        }
    half* to = out + (size_t(blockIdx.y) * seqlen_q + row) * HEAD_DIM;
    for (int d = 0; d < HEAD_DIM; ++d) to[d] = half(o[d] / sum);
}
