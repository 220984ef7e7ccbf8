// A family that nothing in attnsweep knows of: one block per query row, one thread per column.
#include "twice.cuh"

extern "C" __global__ void twice_scores(const unsigned short* q, const unsigned short* k,
                                        float* scores, int heads, int heads_kv, int seqlen_q,
                                        int seqlen_k, float scale) {
    int head = blockIdx.y, kv = head / heads * heads_kv + head % heads / (heads / heads_kv);
    for (int j = threadIdx.x; j < seqlen_k; j += blockDim.x) {
        float sum = 0.f;
        for (int d = 0; d < HEAD_DIM; ++d)
            sum += half_to_float(q[(1ll * head * seqlen_q + blockIdx.x) * HEAD_DIM + d]) *
                   half_to_float(k[(1ll * kv * seqlen_k + j) * HEAD_DIM + d]);
        scores[(1ll * head * seqlen_q + blockIdx.x) * seqlen_k + j] = sum * scale;
    }
}

extern "C" __global__ void twice_mix(const float* scores, const unsigned short* v,
                                     unsigned short* o, int heads, int heads_kv, int seqlen_q,
                                     int seqlen_k) {
    int head = blockIdx.y, kv = head / heads * heads_kv + head % heads / (heads / heads_kv);
    const float* row = scores + (1ll * head * seqlen_q + blockIdx.x) * seqlen_k;
    int keys = CAUSAL ? blockIdx.x + seqlen_k - seqlen_q + 1 : seqlen_k;
    float largest = row[0];
    for (int j = 1; j < keys; ++j) largest = fmaxf(largest, row[j]);
    for (int d = threadIdx.x; d < HEAD_DIM; d += blockDim.x) {
        float sum = 0.f, out = 0.f;
        for (int j = 0; j < keys; ++j) {
            float p = expf(row[j] - largest);
            sum += p, out += p * half_to_float(v[(1ll * kv * seqlen_k + j) * HEAD_DIM + d]);
        }
        o[(1ll * head * seqlen_q + blockIdx.x) * HEAD_DIM + d] = float_to_half(out / sum);
    }
}
