// What changes scores in accumulators before their softmax: a cap, a bias, and sinks beside them.
#pragma once
#include "common/tile/fragments.cuh"

namespace attn {

// 1: scores s become softcap * tanh(s / softcap). 1: a bias is added to them. 1: each query head
// has one more score, without a value.
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef SINKS
#define SINKS 0
#endif

// s times `inner` becomes its hyperbolic tangent. Up to 1 that is a polynomial, off by 3e-7:
// tanh.approx is off by 2^-11, and 50 times that, as a softcap has it, would change a weight by 2
// %. A warp with a larger one takes exponentials for all: exact too, and twice the special
// functions of the softmax.
template <int N>
__device__ __forceinline__ void cap_scores(float (&s)[N], float inner) {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] *= inner, largest = fmaxf(largest, fabsf(s[i]));
    if (__builtin_expect(__all_sync(0xffffffffu, largest <= 1.f), 1)) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float y = s[i] * s[i];
            float p = fmaf(fmaf(-0.00283946f, y, 0.01611417f), y, -0.05097285f);
            p = fmaf(fmaf(fmaf(p, y, 0.13253525f), y, -0.33324004f), y, 0.99999685f);
            s[i] *= p;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i)  // of an infinite exponential, 1
            s[i] = fmaf(-2.f, rcp_approx(1.f + exp2_approx(s[i] * (2.f * LOG2E))), 1.f);
    }
}

// s = s * outer + bias of 16 rows, by fragments of 16 columns, of which load(fragment, i) brings
// the i-th.
template <int N, class Load>
__device__ __forceinline__ void add_bias(float (&s)[N], float outer, Load load) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
        unsigned fragment[4];
        load(fragment, i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float* two = s + i * 8 + j * 2;
            two[0] = fmaf(two[0], outer, low_of(fragment[j]));
            two[1] = fmaf(two[1], outer, high_of(fragment[j]));
        }
    }
}

}  // namespace attn
