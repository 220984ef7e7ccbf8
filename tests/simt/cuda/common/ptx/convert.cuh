// The twin of kernels/common/ptx/convert.cuh: conversions by the CPU.
#pragma once

namespace attn {

inline float from_half(unsigned short x) { return simt::half_values[x]; }
inline unsigned short to_half(float x) {
    return simt_cast<unsigned short>(static_cast<_Float16>(x));
}
inline unsigned short to_bf16(float x) {
    if (x != x) return 0x7fff;
    unsigned bits = __float_as_uint(x);
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline unsigned pack_half(float low, float high) {
    return to_half(low) | static_cast<unsigned>(to_half(high)) << 16;
}
inline unsigned pack_bf16(float low, float high) {
    return to_bf16(low) | static_cast<unsigned>(to_bf16(high)) << 16;
}
inline float ex2_approx(float x) { return simt::flush(exp2f(simt::flush(x))); }
inline float rcp_approx(float x) { return simt::flush(1.f / simt::flush(x)); }

}  // namespace attn
