// Numbers and fragments in registers: elements of 16 bits, the fragments of a warp's products, and
// fp32 as two parts.
#pragma once
#include "common/ptx/convert.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/shared.cuh"
#include "common/ptx/wmma.cuh"

namespace attn {

// ---- elements: of 16 bits, as IS_BF16 of the problem chooses ----
// Without CUDA's headers: a template compiles in 0.05 s instead of 0.25 s, and needs no header
// package beside NVRTC.
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
constexpr float LN2 = 0.6931471805599453f;
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// ---- fragments of WMMA: their layout is the hardware's ----
struct WmmaFragments {
    using A = WmmaA<IS_BF16>;
    template <bool Transposed>
    using B = WmmaB<IS_BF16, Transposed>;
    using Accumulator = WmmaAccumulator;
};

// ---- fragments whose layout is known ----
// ldmatrix and mma.sync, which is what WMMA becomes on sm_80 and later, under its names. Since
// every lane gives its own address, rows in shared memory need no common stride: they may be
// swizzled.
struct MmaA {
    unsigned x[4];
};
template <bool Transposed>
struct MmaB {
    unsigned x[4];
};
// Lane l holds rows l / 4 and l / 4 + 8: columns 2 * (l % 4) and the next, then the same 8 further.
struct MmaAccumulator {
    float x[8];
};

// address(row, chunk): where 16 bytes of a row of the 16x16 tile begin, chunk 0 or 1.
template <class Address>
__device__ __forceinline__ void wmma_load(MmaA& to, Address address) {
    const unsigned lane = threadIdx.x % 32;
    ldmatrix_x4(to.x, address(lane % 16, lane / 16));
}
template <class Address>
__device__ __forceinline__ void wmma_load(MmaB<true>& to, Address address) {
    const unsigned lane = threadIdx.x % 32;
    ldmatrix_x4(to.x, address(lane % 8 + lane / 16 * 8, lane / 8 % 2));
}
template <class Address>
__device__ __forceinline__ void wmma_load(MmaB<false>& to, Address address) {
    const unsigned lane = threadIdx.x % 32;
    ldmatrix_x4_trans(to.x, address(lane % 16, lane / 16));
}

__device__ __forceinline__ int row_of(int i) { return threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
__device__ __forceinline__ int column_of(int i) { return threadIdx.x % 4 * 2 + i / 4 * 8 + i % 2; }
__device__ __forceinline__ void wmma_load(MmaAccumulator& to, const float* from, int stride) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const float2 two =
            *reinterpret_cast<const float2*>(from + row_of(i) * stride + column_of(i));
        to.x[i] = two.x, to.x[i + 1] = two.y;
    }
}
__device__ __forceinline__ void wmma_load_rows(MmaAccumulator& to, const float* from) {
#pragma unroll
    for (int i = 0; i < 8; ++i) to.x[i] = from[row_of(i)];
}
__device__ __forceinline__ void wmma_store(float* to, const MmaAccumulator& from, int stride) {
#pragma unroll
    for (int i = 0; i < 8; i += 2)
        *reinterpret_cast<float2*>(to + row_of(i) * stride + column_of(i)) =
            make_float2(from.x[i], from.x[i + 1]);
}

// d += a b
template <bool Transposed>
__device__ __forceinline__ void wmma_multiply(MmaAccumulator& d, const MmaA& a,
                                              const MmaB<Transposed>& b) {
    mma_16816<IS_BF16>(reinterpret_cast<float (&)[4]>(d.x[0]), a.x, b.x[0], b.x[1]);
    mma_16816<IS_BF16>(reinterpret_cast<float (&)[4]>(d.x[4]), a.x, b.x[2], b.x[3]);
}

struct MmaFragments {
    using A = MmaA;
    template <bool Transposed>
    using B = MmaB<Transposed>;
    using Accumulator = MmaAccumulator;
};

// ---- fp32 as two parts ----
// A tensor core reads both without loss: x = high + low. TF32 keeps 11 bits.
// high is x rounded to TF32, and exact on the tensor core; x - high is exact too.
__device__ __forceinline__ float tf32_high(float x) {
    return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
}
// Both parts; of low the tensor core reads 11 bits.
// high * high + high * low + low * high misses the product of two fp32 by about 2^-21 of it.
__device__ __forceinline__ void tf32_split(float x, unsigned& high, unsigned& low) {
    high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
}

// What a tensor core does not read of x, its last 13 bits, rounded to the 11 that it reads of them
// in turn.
__device__ __forceinline__ float tf32_unread(float x) {
    const float low = x - __uint_as_float(__float_as_uint(x) & 0xffffe000u);
    return __uint_as_float(__float_as_uint(low) + 0x1000u);
}

}  // namespace attn
