// The twin of kernels/common/tf32.cuh: the same names, products by the CPU.
#pragma once

inline void tf32_split(float x, unsigned& high, unsigned& low) {
    high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
}
inline void mma_1688(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, SIMT_HERE) {
    simt::mma_1688(d, a, b0, b1, SIMT_AT);
}
