// The twin of kernels/common/hopper_tf32.cuh: the same names, run by wgmma.cpp and copies.cpp.
#pragma once

inline unsigned tf32_high(float x) { return __float_as_uint(x) & 0xffffe000u; }
inline float tf32_low(float x) { return x - __uint_as_float(tf32_high(x)); }
template <int N>
struct WgmmaTf32 {
    static_assert(N % 8 == 0 && 8 <= N && N <= 256, "wgmma has no such shape");
    static void rs(float (&d)[N / 2], const unsigned* a, unsigned long long b, int accumulate, SIMT_HERE) {
        simt::wgmma(d, {N, false, false, false, accumulate != 0, a, 0, b, true}, SIMT_AT);
    }
};
inline void cluster_store_counted(unsigned address, float4 x, unsigned barrier, SIMT_HERE) {
    simt::store_counted(address, &x, 16, barrier, SIMT_AT);
}
