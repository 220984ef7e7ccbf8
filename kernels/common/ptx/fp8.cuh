// Bytes of E4M3: conversion, permutation, and products of a warpgroup, 64 x N += 64 x 32 times
// 32 x N. sm_90a only. Source: PTX ISA, "cvt", "prmt" and "Asynchronous Warpgroup Level Matrix
// Instructions".
#pragma once
#include "common/ptx/wgmma.cuh"

namespace attn {

// Four numbers in one register, `a` at the lowest address: rounded to nearest even, beyond 448 to
// 448.
__device__ __forceinline__ unsigned pack_e4m3(float a, float b, float c, float d) {
    unsigned y;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}\n"
        : "=r"(y)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return y;
}
// Adds the four numbers of a register to four halves: bytes 0 and 1 to sum[0], the others to
// sum[1].
__device__ __forceinline__ void add_e4m3(unsigned (&sum)[2], unsigned x) {
    asm("{\n.reg .b16 low, high;\n.reg .b32 a, b;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 a, low;\ncvt.rn.f16x2.e4m3x2 b, high;\n"
        "add.rn.f16x2 %0, %0, a;\nadd.rn.f16x2 %1, %1, b;\n}\n"
        : "+r"(sum[0]), "+r"(sum[1])
        : "r"(x));
}
// Byte i is the byte that hex digit i of `selector` names: 0 to 3 of `low`, 4 to 7 of `high`.
__device__ __forceinline__ unsigned byte_permute(unsigned low, unsigned high, unsigned selector) {
    unsigned y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(selector));
    return y;
}
// to = from, by instructions here. For a plain copy ptxas 13.0 gives both the same registers. If
// `from` is then defined during a product, it serialises the products that read `to` (C7513).
template <int N>
__device__ __forceinline__ void move(unsigned (&to)[N], const unsigned (&from)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("mov.b32 %0, %1;" : "=r"(to[i]) : "r"(from[i]));
}

// d += a b; if `accumulate` is 0, d = a b. b is a descriptor of N rows of 32 bytes; a is one of 64
// (ss), or this thread's part of it in registers (rs): lane l of warp w holds, of rows 16 w + l / 4
// and 8 more, columns 4 (l % 4) .. in a[0] and a[1], and the same 16 columns on in a[2] and a[3].
template <int N>
struct WgmmaE4m3;
#define WGMMA_D36 WGMMA_D32 ",%32,%33,%34,%35"
#define WGMMA_LIST36 WGMMA_LIST32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define WGMMA_D68 WGMMA_D64 ",%64,%65,%66,%67"
#define WGMMA_LIST68 WGMMA_LIST64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define WGMMA_E4M3_SS(N, D, O0, O1, O2)                                                            \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O2                                          \
                 ", 0;\n" WGMMA_SHAPE(N, "k32.f32.e4m3.e4m3") " {" WGMMA_D##D "}, %" #O0 ", %" #O1 \
                                                                              ", p, 1, 1;\n}\n"    \
                 : WGMMA_LIST##D                                                                   \
                 : "l"(a), "l"(b), "r"(accumulate))
#define WGMMA_E4M3_RS(N, D, O0, O1, O2, O3, O4, O5)                                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O5                            \
                 ", 0;\n" WGMMA_SHAPE(N, "k32.f32.e4m3.e4m3") " {" WGMMA_D##D        \
                 "}, {%" #O0 ",%" #O1 ",%" #O2 ",%" #O3 "}, %" #O4 ", p, 1, 1;\n}\n" \
                 : WGMMA_LIST##D                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
#define WGMMA_E4M3_DEFINE(N, D, O0, O1, O2, O3, O4, O5)                                   \
    template <>                                                                           \
    struct WgmmaE4m3<N> {                                                                 \
        __device__ static __forceinline__ void ss(float (&d)[D], unsigned long long a,    \
                                                  unsigned long long b, int accumulate) { \
            WGMMA_E4M3_SS(N, D, O0, O1, O2);                                              \
        }                                                                                 \
        __device__ static __forceinline__ void rs(float (&d)[D], const unsigned* a,       \
                                                  unsigned long long b, int accumulate) { \
            WGMMA_E4M3_RS(N, D, O0, O1, O2, O3, O4, O5);                                  \
        }                                                                                 \
    };
WGMMA_E4M3_DEFINE(64, 32, 32, 33, 34, 35, 36, 37)
WGMMA_E4M3_DEFINE(72, 36, 36, 37, 38, 39, 40, 41)
WGMMA_E4M3_DEFINE(96, 48, 48, 49, 50, 51, 52, 53)
WGMMA_E4M3_DEFINE(128, 64, 64, 65, 66, 67, 68, 69)
WGMMA_E4M3_DEFINE(136, 68, 68, 69, 70, 71, 72, 73)
WGMMA_E4M3_DEFINE(160, 80, 80, 81, 82, 83, 84, 85)
WGMMA_E4M3_DEFINE(192, 96, 96, 97, 98, 99, 100, 101)
WGMMA_E4M3_DEFINE(224, 112, 112, 113, 114, 115, 116, 117)
WGMMA_E4M3_DEFINE(256, 128, 128, 129, 130, 131, 132, 133)

}  // namespace attn
