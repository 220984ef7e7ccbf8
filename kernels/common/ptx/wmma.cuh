// WMMA: products of 16x16x16 by a warp whose fragments have a layout that only the hardware knows.
// A warp loads, multiplies and stores whole fragments; no element of one has a place that code may
// count on. Written here so that no header of CUDA's is needed. Addresses are multiples of 32
// bytes, strides of 16 bytes; all 32 lanes take part. Source: PTX ISA, "Warp-level Matrix Load
// Instruction: wmma.load" and its neighbours.
#pragma once
#include "common/ptx/shared.cuh"

namespace attn {

// 16 rows, 16 of the inner dimension, of fp16 or bf16.
template <bool Bf16>
struct WmmaA {
    unsigned x[Bf16 ? 4 : 8];
};
// 16 of the inner dimension, 16 columns. Transposed: shared memory has a row for every column,
// which is how K lies there; otherwise one for every element of the inner dimension, as V does.
template <bool Bf16, bool Transposed>
struct WmmaB {
    unsigned x[Bf16 ? 4 : 8];
};
struct WmmaAccumulator {
    float x[8];  // fp32, 16x16
};

#define WMMA_LOAD_BF16(OPERAND, LAYOUT)                                       \
    asm volatile("wmma.load." OPERAND ".sync.aligned." LAYOUT                 \
                 ".m16n16k16.shared.bf16 {%0,%1,%2,%3}, [%4], %5;"            \
                 : "=r"(to.x[0]), "=r"(to.x[1]), "=r"(to.x[2]), "=r"(to.x[3]) \
                 : "r"(address), "r"(stride)                                  \
                 : "memory")
#define WMMA_LOAD_F16(OPERAND, LAYOUT)                                                        \
    asm volatile("wmma.load." OPERAND ".sync.aligned." LAYOUT                                 \
                 ".m16n16k16.shared.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8], %9;"                 \
                 : "=r"(to.x[0]), "=r"(to.x[1]), "=r"(to.x[2]), "=r"(to.x[3]), "=r"(to.x[4]), \
                   "=r"(to.x[5]), "=r"(to.x[6]), "=r"(to.x[7])                                \
                 : "r"(address), "r"(stride)                                                  \
                 : "memory")
// `stride`: elements from one row in shared memory to the next.
template <bool Bf16>
__device__ __forceinline__ void wmma_load(WmmaA<Bf16>& to, const unsigned short* from, int stride) {
    unsigned address = smem_address(from);
    if constexpr (Bf16) WMMA_LOAD_BF16("a", "row");
    else WMMA_LOAD_F16("a", "row");
}
template <bool Bf16>
__device__ __forceinline__ void wmma_load(WmmaB<Bf16, true>& to, const unsigned short* from,
                                          int stride) {
    unsigned address = smem_address(from);
    if constexpr (Bf16) WMMA_LOAD_BF16("b", "col");
    else WMMA_LOAD_F16("b", "col");
}
template <bool Bf16>
__device__ __forceinline__ void wmma_load(WmmaB<Bf16, false>& to, const unsigned short* from,
                                          int stride) {
    unsigned address = smem_address(from);
    if constexpr (Bf16) WMMA_LOAD_BF16("b", "row");
    else WMMA_LOAD_F16("b", "row");
}

#define WMMA_ACCUMULATOR_LOAD(LAYOUT, STRIDE)                                                 \
    asm volatile("wmma.load.c.sync.aligned." LAYOUT                                           \
                 ".m16n16k16.shared.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8], %9;"                 \
                 : "=f"(to.x[0]), "=f"(to.x[1]), "=f"(to.x[2]), "=f"(to.x[3]), "=f"(to.x[4]), \
                   "=f"(to.x[5]), "=f"(to.x[6]), "=f"(to.x[7])                                \
                 : "r"(address), "r"(STRIDE)                                                  \
                 : "memory")
__device__ __forceinline__ void wmma_load(WmmaAccumulator& to, const float* from, int stride) {
    unsigned address = smem_address(from);
    WMMA_ACCUMULATOR_LOAD("row", stride);
}
// Element (row, column) becomes from[row]: a column-major matrix whose columns all lie at one
// address. So a fragment can be scaled by row although nobody knows which rows a lane holds.
__device__ __forceinline__ void wmma_load_rows(WmmaAccumulator& to, const float* from) {
    unsigned address = smem_address(from);
    WMMA_ACCUMULATOR_LOAD("col", 0);
}
__device__ __forceinline__ void wmma_store(float* to, const WmmaAccumulator& from, int stride) {
    asm volatile(
        "wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%0], {%1,%2,%3,%4,%5,%6,%7,%8}, %9;" ::
            "r"(smem_address(to)),
        "f"(from.x[0]), "f"(from.x[1]), "f"(from.x[2]), "f"(from.x[3]), "f"(from.x[4]),
        "f"(from.x[5]), "f"(from.x[6]), "f"(from.x[7]), "r"(stride)
        : "memory");
}

// d += a b
#define WMMA_SUMS                                                                       \
    "+f"(d.x[0]), "+f"(d.x[1]), "+f"(d.x[2]), "+f"(d.x[3]), "+f"(d.x[4]), "+f"(d.x[5]), \
        "+f"(d.x[6]), "+f"(d.x[7])
#define WMMA_MULTIPLY_BF16(LAYOUT)                                                               \
    asm volatile("wmma.mma.sync.aligned.row." LAYOUT                                             \
                 ".m16n16k16.f32.bf16.bf16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, "                      \
                 "{%8,%9,%10,%11}, {%12,%13,%14,%15}, {%0,%1,%2,%3,%4,%5,%6,%7};"                \
                 : WMMA_SUMS                                                                     \
                 : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]), \
                   "r"(b.x[2]), "r"(b.x[3]))
#define WMMA_MULTIPLY_F16(LAYOUT)                                                                \
    asm volatile("wmma.mma.sync.aligned.row." LAYOUT                                             \
                 ".m16n16k16.f32.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, "                                \
                 "{%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19,%20,%21,%22,%23}, "          \
                 "{%0,%1,%2,%3,%4,%5,%6,%7};"                                                    \
                 : WMMA_SUMS                                                                     \
                 : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(a.x[4]), "r"(a.x[5]), \
                   "r"(a.x[6]), "r"(a.x[7]), "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]), \
                   "r"(b.x[4]), "r"(b.x[5]), "r"(b.x[6]), "r"(b.x[7]))
template <bool Bf16>
__device__ __forceinline__ void wmma_multiply(WmmaAccumulator& d, const WmmaA<Bf16>& a,
                                              const WmmaB<Bf16, true>& b) {
    if constexpr (Bf16) WMMA_MULTIPLY_BF16("col");
    else WMMA_MULTIPLY_F16("col");
}
template <bool Bf16>
__device__ __forceinline__ void wmma_multiply(WmmaAccumulator& d, const WmmaA<Bf16>& a,
                                              const WmmaB<Bf16, false>& b) {
    if constexpr (Bf16) WMMA_MULTIPLY_BF16("row");
    else WMMA_MULTIPLY_F16("row");
}

}  // namespace attn
