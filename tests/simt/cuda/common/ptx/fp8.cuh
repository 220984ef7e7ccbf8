// The twin of kernels/common/ptx/fp8.cuh: E4M3 by the CPU, and wgmma.cpp's products of it, which
// are summed in fp32.
#pragma once
#include "common/ptx/convert.cuh"
#include "common/ptx/wgmma.cuh"

namespace simt {
// To nearest even, beyond 448 to 448: numbers below 2^-6 are multiples of 2^-9.
inline unsigned to_e4m3(float x) {
    unsigned sign = __float_as_uint(x) >> 24 & 0x80;
    float size = fabsf(x);
    if (size != size) return 0x7f | sign;
    if (size >= 448.f) return 0x7e | sign;
    if (size < 0x1p-6f) return sign | static_cast<unsigned>(nearbyintf(size * 512.f));
    unsigned bits = __float_as_uint(size);
    bits += (1u << 19) - 1 + (bits >> 20 & 1);
    bits = (bits >> 20) - (120 << 3);
    return sign | (bits < 0x7e ? bits : 0x7e);
}
inline float from_e4m3(unsigned x) {
    unsigned exponent = x >> 3 & 15, fraction = x & 7;
    if ((x & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000);
    float size =
        exponent ? __uint_as_float((exponent + 120) << 23 | fraction << 20) : fraction * 0x1p-9f;
    return x & 0x80 ? -size : size;
}
}  // namespace simt

namespace attn {

inline unsigned pack_e4m3(float a, float b, float c, float d) {
    return simt::to_e4m3(a) | simt::to_e4m3(b) << 8 | simt::to_e4m3(c) << 16 |
           simt::to_e4m3(d) << 24;
}
inline void add_e4m3(unsigned (&sum)[2], unsigned x) {
    for (int i = 0; i < 2; ++i) {
        float low = from_half(sum[i] & 0xffff) + simt::from_e4m3(x >> 16 * i & 255),
              high = from_half(sum[i] >> 16) + simt::from_e4m3(x >> (16 * i + 8) & 255);
        sum[i] = pack_half(low, high);
    }
}
inline unsigned byte_permute(unsigned low, unsigned high, unsigned selector) {
    uint64_t both = low | static_cast<uint64_t>(high) << 32;
    unsigned y = 0;
    for (int i = 0; i < 4; ++i) {
        unsigned digit = selector >> 4 * i & 15;
        unsigned byte = both >> 8 * (digit & 7) & 255;
        if (digit & 8) byte = byte & 128 ? 255 : 0;  // its sign alone
        y |= byte << 8 * i;
    }
    return y;
}
template <int N>
void move(unsigned (&to)[N], const unsigned (&from)[N]) {
    for (int i = 0; i < N; ++i) to[i] = from[i];
}
template <int N>
struct WgmmaE4m3 {
    static_assert(N == 72 || N == 136 || (N >= 64 && N <= 256 && N % 32 == 0),
                  "common/ptx/fp8.cuh has no such shape");
    static void ss(float (&d)[N / 2], unsigned long long a, unsigned long long b, int accumulate,
                   SIMT_HERE) {
        simt::Wgmma product{N, false, false, false, accumulate != 0, nullptr, a, b};
        product.e4m3 = true;
        simt::wgmma(d, product, SIMT_AT);
    }
    static void rs(float (&d)[N / 2], const unsigned* a, unsigned long long b, int accumulate,
                   SIMT_HERE) {
        simt::Wgmma product{N, false, false, false, accumulate != 0, a, 0, b};
        product.e4m3 = true;
        simt::wgmma(d, product, SIMT_AT);
    }
};

}  // namespace attn
