// The twin of kernels/common/hopper_tf32.cuh: the same names, run by wgmma.cpp.
#pragma once

inline float tf32_high(float x) { return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u); }
inline float tf32_unread(float x) {
    const float low = x - __uint_as_float(__float_as_uint(x) & 0xffffe000u);
    return __uint_as_float(__float_as_uint(low) + 0x1000u);
}
inline unsigned bf16_pair(float low, float high) {
    auto rounded = [](float x) {
        unsigned bits = __float_as_uint(x);
        return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fffu;
    };
    return rounded(low) | rounded(high) << 16;
}
template <int N>
struct WgmmaSplit {
    static_assert(N % 8 == 0 && 8 <= N && N <= 256, "wgmma has no such shape");
    static void tf32(float (&d)[N / 2], const unsigned* a, unsigned long long b, int accumulate, SIMT_HERE) {
        simt::wgmma(d, {N, false, false, false, accumulate != 0, a, 0, b, true}, SIMT_AT);
    }
    static void bf16(float (&d)[N / 2], const unsigned* a, unsigned long long b, int accumulate, SIMT_HERE) {
        simt::wgmma(d, {N, true, false, false, accumulate != 0, a, 0, b, false}, SIMT_AT);
    }
};
