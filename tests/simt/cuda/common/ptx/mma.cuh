// The twin of kernels/common/ptx/mma.cuh: products by the CPU.
#pragma once

namespace attn {

template <bool Bf16>
inline void mma_16816(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, SIMT_HERE) {
    simt::mma_16816(d, a, b0, b1, Bf16, SIMT_AT);
}
inline void mma_1688(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, SIMT_HERE) {
    simt::mma_1688(d, a, b0, b1, SIMT_AT);
}

}  // namespace attn
