// Matrix products of a warpgroup, sm_90a only: 64 x N += 64 x K times K x N by 128 threads, where K
// is 16 numbers of 16 bits or 8 of TF32. Source: PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions".
#pragma once

namespace attn {

// Thread t, register i of the accumulator: row 16 (t / 32) + t % 32 / 4 + 8 (i / 2 % 2), column
// 8 (i / 4) + 2 (t % 4) + i % 2. A fragment of A from registers is that of mma.m16n8k16.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Keeps the compiler's reads of r after a wait, and its writes before a fence.
template <int N>
__device__ __forceinline__ void warpgroup_fence_operand(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int N>
__device__ __forceinline__ void warpgroup_fence_operand(unsigned (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// The same number, about which the compiler then knows nothing: what follows from it is computed
// here, and not kept in registers from before a loop.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

#define WGMMA_8(i)                                                                              \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_D8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WGMMA_LIST8 WGMMA_8(0)
#define WGMMA_D16 WGMMA_D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_LIST16 WGMMA_LIST8, WGMMA_8(8)
#define WGMMA_D24 WGMMA_D16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_LIST24 WGMMA_LIST16, WGMMA_8(16)
#define WGMMA_D32                                            \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_LIST32 WGMMA_8(0), WGMMA_8(8), WGMMA_8(16), WGMMA_8(24)
#define WGMMA_D40 WGMMA_D32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_LIST40 WGMMA_LIST32, WGMMA_8(32)
#define WGMMA_D48 WGMMA_D40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_LIST48 WGMMA_LIST40, WGMMA_8(40)
#define WGMMA_D56 WGMMA_D48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define WGMMA_LIST56 WGMMA_LIST48, WGMMA_8(48)
#define WGMMA_D64 WGMMA_D56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_LIST64 WGMMA_LIST56, WGMMA_8(56)
#define WGMMA_D72 WGMMA_D64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define WGMMA_LIST72 WGMMA_LIST64, WGMMA_8(64)
#define WGMMA_D80 WGMMA_D72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_LIST80 WGMMA_LIST72, WGMMA_8(72)
#define WGMMA_D88 WGMMA_D80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define WGMMA_LIST88 WGMMA_LIST80, WGMMA_8(80)
#define WGMMA_D96 WGMMA_D88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_LIST96 WGMMA_LIST88, WGMMA_8(88)
#define WGMMA_D104 WGMMA_D96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define WGMMA_LIST104 WGMMA_LIST96, WGMMA_8(96)
#define WGMMA_D112 WGMMA_D104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define WGMMA_LIST112 WGMMA_LIST104, WGMMA_8(104)
#define WGMMA_D120 WGMMA_D112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define WGMMA_LIST120 WGMMA_LIST112, WGMMA_8(112)
#define WGMMA_D128 WGMMA_D120 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_LIST128 WGMMA_LIST120, WGMMA_8(120)

// d += a b; if `accumulate` is 0, d = a b. b is a descriptor of shared memory: N rows of K, or, if
// transposed, K rows of N. a is a descriptor too (ss), or this thread's part of it in registers
// (rs). rs_tf32: of a, lane l of warp w holds rows 16 w + l / 4 and 8 more in column l % 4, then
// the same 4 columns on; b cannot be transposed.
template <int N>
struct Wgmma;
#define WGMMA_SHAPE(N, TYPES) "wgmma.mma_async.sync.aligned.m64n" #N TYPES
#define WGMMA_SS(N, TYPES, D, O0, O1, O2, O3)                                                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O2 ", 0;\n" WGMMA_SHAPE(                    \
                     N, TYPES) " {" WGMMA_D##D "}, %" #O0 ", %" #O1 ", p, 1, 1, 0, %" #O3 ";\n}\n" \
                 : WGMMA_LIST##D                                                                   \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSE_B))
#define WGMMA_RS(N, TYPES, D, O0, O1, O2, O3, O4, O5, O6)                                       \
    asm volatile(                                                                               \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %" #O5 ", 0;\n" WGMMA_SHAPE(N, TYPES) " {" WGMMA_D##D \
        "}, {%" #O0 ",%" #O1 ",%" #O2 ",%" #O3 "}, %" #O4 ", p, 1, 1, %" #O6 ";\n}\n"           \
        : WGMMA_LIST##D                                                                         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANSPOSE_B))
#define WGMMA_RS_TF32(N, TYPES, D, O0, O1, O2, O3, O4, O5, O6)                       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O5                            \
                 ", 0;\n" WGMMA_SHAPE(N, TYPES) " {" WGMMA_D##D                      \
                 "}, {%" #O0 ",%" #O1 ",%" #O2 ",%" #O3 "}, %" #O4 ", p, 1, 1;\n}\n" \
                 : WGMMA_LIST##D                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
#define WGMMA_DEFINE(N, D, O0, O1, O2, O3, O4, O5, O6)                                           \
    template <>                                                                                  \
    struct Wgmma<N> {                                                                            \
        template <bool BF16, int TRANSPOSE_B>                                                    \
        __device__ static __forceinline__ void ss(float (&d)[D], unsigned long long a,           \
                                                  unsigned long long b, int accumulate) {        \
            if constexpr (BF16) WGMMA_SS(N, "k16.f32.bf16.bf16", D, O0, O1, O2, O3);             \
            else WGMMA_SS(N, "k16.f32.f16.f16", D, O0, O1, O2, O3);                              \
        }                                                                                        \
        template <bool BF16, int TRANSPOSE_B>                                                    \
        __device__ static __forceinline__ void rs(float (&d)[D], const unsigned* a,              \
                                                  unsigned long long b, int accumulate) {        \
            if constexpr (BF16) WGMMA_RS(N, "k16.f32.bf16.bf16", D, O0, O1, O2, O3, O4, O5, O6); \
            else WGMMA_RS(N, "k16.f32.f16.f16", D, O0, O1, O2, O3, O4, O5, O6);                  \
        }                                                                                        \
        __device__ static __forceinline__ void rs_tf32(float (&d)[D], const unsigned* a,         \
                                                       unsigned long long b, int accumulate) {   \
            WGMMA_RS_TF32(N, "k8.f32.tf32.tf32", D, O0, O1, O2, O3, O4, O5, O6);                 \
        }                                                                                        \
    };
WGMMA_DEFINE(16, 8, 8, 9, 10, 11, 12, 13, 14)
WGMMA_DEFINE(32, 16, 16, 17, 18, 19, 20, 21, 22)
WGMMA_DEFINE(48, 24, 24, 25, 26, 27, 28, 29, 30)
WGMMA_DEFINE(64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA_DEFINE(80, 40, 40, 41, 42, 43, 44, 45, 46)
WGMMA_DEFINE(96, 48, 48, 49, 50, 51, 52, 53, 54)
WGMMA_DEFINE(112, 56, 56, 57, 58, 59, 60, 61, 62)
WGMMA_DEFINE(128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA_DEFINE(144, 72, 72, 73, 74, 75, 76, 77, 78)
WGMMA_DEFINE(160, 80, 80, 81, 82, 83, 84, 85, 86)
WGMMA_DEFINE(176, 88, 88, 89, 90, 91, 92, 93, 94)
WGMMA_DEFINE(192, 96, 96, 97, 98, 99, 100, 101, 102)
WGMMA_DEFINE(208, 104, 104, 105, 106, 107, 108, 109, 110)
WGMMA_DEFINE(224, 112, 112, 113, 114, 115, 116, 117, 118)
WGMMA_DEFINE(240, 120, 120, 121, 122, 123, 124, 125, 126)
WGMMA_DEFINE(256, 128, 128, 129, 130, 131, 132, 133, 134)

}  // namespace attn
