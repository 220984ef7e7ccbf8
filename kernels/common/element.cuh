// The 16-bit elements that IS_BF16 of the problem chooses, without CUDA's headers: a template that
// includes only this compiles in 0.05 s instead of 0.25 s, and needs no header package beside
// NVRTC.
#pragma once
#include "common/ptx/convert.cuh"

#ifndef IS_BF16
#define IS_BF16 0  // of a family of fp32, and of a header that is compiled alone
#endif

typedef unsigned short element_t;  // fp16 or bf16 bits

__device__ __forceinline__ float to_float(element_t x) {
    if constexpr (IS_BF16) return __uint_as_float(static_cast<unsigned>(x) << 16);
    else return from_half(x);
}
__device__ __forceinline__ element_t to_element(float x) {
    if constexpr (IS_BF16) return to_bf16(x);
    else return to_half(x);
}
// Two neighbours in one register, `low` at the lower address.
__device__ __forceinline__ unsigned pack(float low, float high) {
    if constexpr (IS_BF16) return pack_bf16(low, high);
    else return pack_half(low, high);
}
__device__ __forceinline__ float low_of(unsigned x) {
    return to_float(static_cast<element_t>(x & 0xffffu));
}
__device__ __forceinline__ float high_of(unsigned x) {
    return to_float(static_cast<element_t>(x >> 16));
}

// 2^x on the special function unit; 0 of minus infinity.
__device__ __forceinline__ float exp2_approx(float x) { return ex2_approx(x); }

constexpr float LOG2E = 1.4426950408889634f;
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
