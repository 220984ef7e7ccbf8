// fp32 numbers as two parts that a tensor core reads without loss: x = high + low. TF32 keeps 11
// bits.
#pragma once

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
