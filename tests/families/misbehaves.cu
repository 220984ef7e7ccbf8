// A right kernel that can be told to go wrong in one way: FAULT says which.
#include "twice.cuh"

extern "C" __global__ void misbehaves(const unsigned short* q, const unsigned short* k,
                                      const unsigned short* v, unsigned short* o, int heads,
                                      int heads_kv, int seqlen_q, int seqlen_k, float scale) {
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
#if FAULT == 1  // never ends
    while (*reinterpret_cast<volatile const unsigned short*>(query) != 0xFFFF) {}
#elif FAULT == 2  // illegal address
    *reinterpret_cast<volatile int*>(16) = 1;
#elif FAULT == 3  // one element past the end
    if (row == seqlen_q - 1 && head == gridDim.y - 1 && d == HEAD_DIM - 1)
        o[1ll * (head + 1) * seqlen_q * HEAD_DIM] = 0;
#elif FAULT == 4  // one NaN
    if (row == seqlen_q - 1 && d == 3) out = __int_as_float(0x7fc00000);
#elif FAULT == 5  // one row not written
    if (row == seqlen_q / 2) return;
#elif FAULT == 6  // one per cent off on long rows only
    if (keys > 100) sum *= 1.01f;
#elif FAULT == \
    7  // which of two warps comes last changes the last bit of one small output: within any limit
    extern __shared__ int last[];
    for (long long begin = clock64(), wait = begin * 40503 >> 4 & 1023; clock64() - begin < wait;) {
    }
    *last = threadIdx.x / 32;
    __syncthreads();
    if (*last && d == 5 && fabsf(out / sum) < 0.05f) out *= 1.0006f;
#endif
    o[(1ll * head * seqlen_q + row) * HEAD_DIM + d] = float_to_half(out / sum);
}
