// Conversions between fp32 and the two types of 16 bits, which are passed as their bits; 2^x and
// 1/x.
#pragma once

namespace attn {

__device__ __forceinline__ float from_half(unsigned short x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ __forceinline__ unsigned short to_half(float x) {
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ unsigned short to_bf16(float x) {
    unsigned short y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
// Two numbers in one register, `low` at the lower address.
__device__ __forceinline__ unsigned pack_half(float low, float high) {
    unsigned y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
    unsigned y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
// On the special function unit, which does 16 a clock and SM. Error 2 ulp; 2^-inf is 0.
__device__ __forceinline__ float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// On the same unit. Error 1 ulp; 0 of infinity.
__device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace attn
