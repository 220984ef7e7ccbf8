// The twin of kernels/common/ptx/wgmma_first.cuh.
#pragma once
#include "common/ptx/wgmma.cuh"

namespace attn {

template <int N>
struct WgmmaFirst {
    static_assert((N >= 32 && N <= 96 && N % 16 == 0) || N == 128,
                  "common/ptx/wgmma_first.cuh has no such shape");
    template <bool Bf16, int TransposeB>
    static void ss(float (&d)[N / 2], unsigned long long a, unsigned long long b, SIMT_HERE) {
        simt::wgmma(d, {N, Bf16, false, TransposeB != 0, false, nullptr, a, b}, SIMT_AT);
    }
};

}  // namespace attn
