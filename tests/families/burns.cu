// A right kernel of which every block takes CYCLES clock cycles, and some more if a test says so:
// what it is slower by is then known.
#include "twice.cuh"
#define EXTRA_CYCLES 0

extern "C" __global__ void burns(const unsigned short* q, const unsigned short* k,
                                 const unsigned short* v, unsigned short* o, int heads,
                                 int heads_kv, int seqlen_q, int seqlen_k, float scale) {
    long long begin = clock64();
    int row = blockIdx.x, head = blockIdx.y, d = threadIdx.x;
    int kv = head / heads * heads_kv + head % heads / (heads / heads_kv);
    const unsigned short* query = q + (1ll * head * seqlen_q + row) * HEAD_DIM;
    int keys = CAUSAL ? row + seqlen_k - seqlen_q + 1 : seqlen_k;
    float largest = -1e30f, sum = 0.f, out = 0.f;
    for (int j = 0; j < keys; ++j) {
        float s = 0.f;
        for (int i = 0; i < HEAD_DIM; ++i)
            s += half_to_float(query[i]) *
                 half_to_float(k[(1ll * kv * seqlen_k + j) * HEAD_DIM + i]);
        s *= scale;
        float grown = fmaxf(largest, s), shrink = expf(largest - grown), p = expf(s - grown);
        largest = grown, sum = sum * shrink + p;
        out = out * shrink + p * half_to_float(v[(1ll * kv * seqlen_k + j) * HEAD_DIM + d]);
    }
    o[(1ll * head * seqlen_q + row) * HEAD_DIM + d] = float_to_half(out / sum);
    while (clock64() - begin < CYCLES + EXTRA_CYCLES) {}
}
