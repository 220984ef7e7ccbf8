// Matrix products of a warp, sm_80 on. Fragment layouts: PTX ISA, "Matrix Fragments for
// mma.m16n8k16" and "for mma.m16n8k8".
#pragma once

namespace attn {

// d (16x8, fp32) += a (16x16) * b (16x8), of fp16 or bf16. Lane l holds rows l / 4 and l / 4 + 8,
// columns 2 * (l % 4) and the next: d[0], d[1] in the first row, d[2], d[3] in the second.
template <bool Bf16>
__device__ __forceinline__ void mma_16816(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                          unsigned b1) {
#define MMA_16816(TYPE)                                                       \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE       \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (Bf16) MMA_16816("bf16");
    else MMA_16816("f16");
#undef MMA_16816
}

// The same of TF32, which keeps 11 bits of each factor: a (16x8), b (8x8). Lane l holds of a: rows
// l / 4 and l / 4 + 8 in column l % 4, then the same in column l % 4 + 4; of b: column l / 4 in
// rows l % 4 and l % 4 + 4.
__device__ __forceinline__ void mma_1688(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace attn
