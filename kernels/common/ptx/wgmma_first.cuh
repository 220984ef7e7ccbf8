// The first product of a sum, sm_90a only: d = a b, as Wgmma<N>::ss with `accumulate` 0, but d is
// an output alone. Otherwise ptxas takes what its registers held before for a part of the product,
// and serialises products that are under way. Source: PTX ISA, "wgmma.mma_async".
#pragma once
#include "common/ptx/wgmma.cuh"

namespace attn {

#define WGMMA_OUT_8(i)                                                                          \
    "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), \
        "=f"(d[i + 6]), "=f"(d[i + 7])
#define WGMMA_OUT_16 WGMMA_OUT_8(0), WGMMA_OUT_8(8)
#define WGMMA_OUT_24 WGMMA_OUT_16, WGMMA_OUT_8(16)
#define WGMMA_OUT_32 WGMMA_OUT_24, WGMMA_OUT_8(24)
#define WGMMA_OUT_40 WGMMA_OUT_32, WGMMA_OUT_8(32)
#define WGMMA_OUT_48 WGMMA_OUT_40, WGMMA_OUT_8(40)
#define WGMMA_OUT_64 WGMMA_OUT_48, WGMMA_OUT_8(48), WGMMA_OUT_8(56)

template <int N>
struct WgmmaFirst;
#define WGMMA_FIRST_SS(N, TYPES, D, O0, O1, O2)                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n" WGMMA_SHAPE(N, TYPES) " {" WGMMA_D##D \
                 "}, %" #O0 ", %" #O1 ", p, 1, 1, 0, %" #O2 ";\n}\n"                              \
                 : WGMMA_OUT_##D                                                                  \
                 : "l"(a), "l"(b), "n"(TRANSPOSE_B))
#define WGMMA_FIRST_DEFINE(N, D, O0, O1, O2)                                           \
    template <>                                                                        \
    struct WgmmaFirst<N> {                                                             \
        template <bool BF16, int TRANSPOSE_B>                                          \
        __device__ static __forceinline__ void ss(float (&d)[D], unsigned long long a, \
                                                  unsigned long long b) {              \
            if constexpr (BF16) WGMMA_FIRST_SS(N, "k16.f32.bf16.bf16", D, O0, O1, O2); \
            else WGMMA_FIRST_SS(N, "k16.f32.f16.f16", D, O0, O1, O2);                  \
        }                                                                              \
    };
WGMMA_FIRST_DEFINE(32, 16, 16, 17, 18)
WGMMA_FIRST_DEFINE(48, 24, 24, 25, 26)
WGMMA_FIRST_DEFINE(64, 32, 32, 33, 34)
WGMMA_FIRST_DEFINE(80, 40, 40, 41, 42)
WGMMA_FIRST_DEFINE(96, 48, 48, 49, 50)
WGMMA_FIRST_DEFINE(128, 64, 64, 65, 66)

}  // namespace attn
