// The twin of kernels/common/element.cuh: the same names, conversions by the CPU.
#pragma once

typedef unsigned short element_t;

inline float to_float(element_t x) {
#if IS_BF16
    return __uint_as_float(static_cast<unsigned>(x) << 16);
#else
    return simt::half_values[x];
#endif
}
inline element_t to_element(float x) {
#if IS_BF16
    if (x != x) return 0x7fff;
    unsigned bits = __float_as_uint(x);
    return static_cast<element_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#else
    return simt_cast<element_t>(static_cast<_Float16>(x));
#endif
}
inline unsigned pack(float low, float high) {
    return to_element(low) | static_cast<unsigned>(to_element(high)) << 16;
}
inline float low_of(unsigned x) { return to_float(static_cast<element_t>(x & 0xffffu)); }
inline float high_of(unsigned x) { return to_float(static_cast<element_t>(x >> 16)); }
inline float exp2_approx(float x) { return simt::flush(exp2f(simt::flush(x))); }

constexpr float LOG2E = 1.4426950408889634f;
inline float minus_infinity() { return __int_as_float(static_cast<int>(0xff800000)); }
