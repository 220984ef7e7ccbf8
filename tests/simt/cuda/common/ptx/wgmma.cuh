// The twin of kernels/common/ptx/wgmma.cuh: the same names, run by wgmma.cpp.
#pragma once

namespace attn {

inline void wgmma_fence(SIMT_HERE) { simt::wgmma_fence(SIMT_AT); }
inline void wgmma_commit(SIMT_HERE) { simt::wgmma_commit(SIMT_AT); }
template <int Pending>
void wgmma_wait(SIMT_HERE) {
    simt::wgmma_wait(Pending, SIMT_AT);
}
template <class T, int N>
void warpgroup_fence_operand(T (&)[N]) {}

inline int opaque(int x) { return x; }

template <int N>
struct Wgmma {
    static_assert(N >= 16 && N <= 256 && N % 16 == 0, "common/ptx/wgmma.cuh has no such shape");
    template <bool Bf16, int TransposeB>
    static void ss(float (&d)[N / 2], unsigned long long a, unsigned long long b, int accumulate,
                   SIMT_HERE) {
        simt::wgmma(d, {N, Bf16, false, TransposeB != 0, accumulate != 0, nullptr, a, b}, SIMT_AT);
    }
    template <bool Bf16, int TransposeB>
    static void rs(float (&d)[N / 2], const unsigned* a, unsigned long long b, int accumulate,
                   SIMT_HERE) {
        simt::wgmma(d, {N, Bf16, false, TransposeB != 0, accumulate != 0, a, 0, b}, SIMT_AT);
    }
    static void rs_tf32(float (&d)[N / 2], const unsigned* a, unsigned long long b, int accumulate,
                        SIMT_HERE) {
        simt::wgmma(d, {N, false, false, false, accumulate != 0, a, 0, b, true}, SIMT_AT);
    }
};

}  // namespace attn
