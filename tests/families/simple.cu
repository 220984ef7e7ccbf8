// One thread per query row, which goes over its keys twice for each column of the output.
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"

using namespace attn;

extern "C" __global__ void __launch_bounds__(THREADS)
    simple(const element_t* q, const element_t* k, const element_t* v, element_t* o, int heads,
           int heads_kv, int seqlen_q, int seqlen_k, float scale) {
    int row = blockIdx.x * THREADS + threadIdx.x;
    if (row >= seqlen_q) return;
    int batch = blockIdx.y / heads, head_kv = blockIdx.y % heads / (heads / heads_kv);
    long long kv = static_cast<long long>(batch * heads_kv + head_kv) * seqlen_k * HEAD_DIM;
    long long at = (static_cast<long long>(blockIdx.y) * seqlen_q + row) * HEAD_DIM;
    int keys = visible_keys(row, seqlen_q, seqlen_k).end;

    auto score = [&](int key) {
        float sum = 0.f;
        for (int d = 0; d < HEAD_DIM; ++d)
            sum +=
                to_float(q[at + d]) * to_float(k[kv + static_cast<long long>(key) * HEAD_DIM + d]);
        return sum * scale * LOG2E;
    };
    float largest = minus_infinity();
    for (int key = 0; key < keys; ++key) largest = fmaxf(largest, score(key));
    for (int d = 0; d < HEAD_DIM; ++d) {
        float out = 0.f, sum = 0.f;
        for (int key = 0; key < keys; ++key) {
            float p = exp2_approx(score(key) - largest);
            out += p * to_float(v[kv + static_cast<long long>(key) * HEAD_DIM + d]), sum += p;
        }
        o[at + d] = to_element(out / sum);
    }
}
