// fp32 products on tensor cores: mma.m16n8k8 on TF32, which keeps 11 bits of each factor (sm_80 on).
// Fragment layouts: PTX ISA, "Matrix Fragments for mma.m16n8k8".
#pragma once

// x = high + low: high is x rounded to TF32, low what is left, of which the tensor core reads 11 bits.
// high * high + high * low + low * high misses the product of two fp32 by about 2^-21 of it.
__device__ __forceinline__ void tf32_split(float x, unsigned& high, unsigned& low) {
    high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
}

// d (16x8, fp32) += a (16x8) * b (8x8). Lane l holds of a: rows l / 4 and l / 4 + 8 in column l % 4, then
// the same in column l % 4 + 4; of b: column l / 4 in rows l % 4 and l % 4 + 4; of d as mma_16816.
__device__ __forceinline__ void mma_1688(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
