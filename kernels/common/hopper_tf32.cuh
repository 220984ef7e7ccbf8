// fp32 products on Hopper's tensor cores: wgmma on TF32, three products for one, and stores to other blocks
// of a cluster that an mbarrier counts. Include after common/hopper.cuh.
// Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "st.async".
#pragma once

// x = high + low: the tensor core reads the upper 19 bits of a float, so high is x with the others cut off,
// and x itself does where nothing is saved by cutting. low is exact, and the tensor core reads 11 bits of it.
__device__ __forceinline__ unsigned tf32_high(float x) { return __float_as_uint(x) & 0xffffe000u; }
__device__ __forceinline__ float tf32_low(float x) { return x - __uint_as_float(tf32_high(x)); }

// WgmmaTf32<N>::rs(d, a, b, accumulate): d (64 x N) += a (64 x 8, registers) * b (8 x N, shared memory: N rows
// of 8 columns). The accumulator is that of Wgmma<N>. Of a, lane l of warp w holds rows 16 w + l / 4 and 8
// more in column l % 4, then the same in column l % 4 + 4. accumulate 0 ignores what d held.
#define WGMMA_D8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WGMMA_D16 WGMMA_D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
template <int N>
struct WgmmaTf32;
#define WGMMA_TF32_DEFINE(N, D, LIST, O0, O1, O2, O3, O4, O5) \
    template <> \
    struct WgmmaTf32<N> { \
        __device__ static __forceinline__ void \
        rs(float (&d)[N / 2], const unsigned* a, unsigned long long b, int accumulate) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O5 \
                         ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {" D "}, {%" #O0 \
                         ",%" #O1 ",%" #O2 ",%" #O3 "}, %" #O4 ", p, 1, 1;\n}\n" \
                         : LIST \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)); \
        } \
    };
WGMMA_TF32_DEFINE(16, WGMMA_D8, WGMMA_8(0), 8, 9, 10, 11, 12, 13)
#define WGMMA_LIST16 WGMMA_8(0), WGMMA_8(8)
WGMMA_TF32_DEFINE(32, WGMMA_D16, WGMMA_LIST16, 16, 17, 18, 19, 20, 21)
WGMMA_TF32_DEFINE(64, WGMMA_D32, WGMMA_LIST32, 32, 33, 34, 35, 36, 37)

// To shared memory of any block of the cluster; `barrier`, of the same block, counts the bytes.
__device__ __forceinline__ void cluster_store_counted(unsigned address, float4 x, unsigned barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
        : "memory");
}
