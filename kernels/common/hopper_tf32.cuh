// fp32 products on Hopper's tensor cores, by wgmma on TF32 and bf16. Include after common/hopper.cuh.
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

// x = high + low: high is x rounded to TF32, 11 bits, and exact on the tensor core; low is exact too.
__device__ __forceinline__ float tf32_high(float x) {
    return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
}
// What a tensor core does not read of x, its last 13 bits, rounded to the 11 that it reads of them in turn.
__device__ __forceinline__ float tf32_unread(float x) {
    const float low = x - __uint_as_float(__float_as_uint(x) & 0xffffe000u);
    return __uint_as_float(__float_as_uint(low) + 0x1000u);
}
// Two numbers rounded to bf16, 8 bits, in one register.
__device__ __forceinline__ unsigned bf16_pair(float low, float high) {
    unsigned y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// d (64 x N) += a (64 rows, registers) * b (N rows, shared memory) of 8 columns. The accumulator is that of
// Wgmma<N>. Of a, lane l of warp w holds rows 16 w + l / 4 and 8 more in column l % 4, then the same 4
// columns on. accumulate 0 ignores what d held. bf16: the same with two numbers for each.
#define WGMMA_D8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WGMMA_D16 WGMMA_D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
template <int N>
struct WgmmaSplit;
#define WGMMA_LIST8 WGMMA_8(0)
#define WGMMA_LIST16 WGMMA_8(0), WGMMA_8(8)
#define WGMMA_SPLIT_ONE(NAME, KIND, END, N, D, O0, O1, O2, O3, O4, O5) \
    __device__ static __forceinline__ void \
    NAME(float (&d)[N / 2], const unsigned* a, unsigned long long b, int accumulate) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O5 \
                     ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N KIND " {" WGMMA_D##D "}, {%" #O0 ",%" #O1 \
                     ",%" #O2 ",%" #O3 "}, %" #O4 ", p, 1, 1" END ";\n}\n" \
                     : WGMMA_LIST##D \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)); \
    }
#define WGMMA_SPLIT(N, ...) \
    template <> \
    struct WgmmaSplit<N> { \
        WGMMA_SPLIT_ONE(tf32, "k8.f32.tf32.tf32", "", N, __VA_ARGS__) \
        WGMMA_SPLIT_ONE(bf16, "k16.f32.bf16.bf16", ", 0", N, __VA_ARGS__) \
    };
WGMMA_SPLIT(16, 8, 8, 9, 10, 11, 12, 13)
WGMMA_SPLIT(32, 16, 16, 17, 18, 19, 20, 21)
WGMMA_SPLIT(64, 32, 32, 33, 34, 35, 36, 37)
