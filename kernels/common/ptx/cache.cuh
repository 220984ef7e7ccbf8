// Loads and stores of global memory with a word to the caches about what becomes of the data.
#pragma once

namespace attn {

// Policies of L2, for these and for the copies of common/ptx/tma.cuh.
constexpr unsigned long long EVICT_NORMAL = 0x16f0000000000000ull;
constexpr unsigned long long EVICT_FIRST = 0x12f0000000000000ull,
                             EVICT_LAST = 0x14f0000000000000ull;

// The 128 bytes round `address` into L2.
__device__ __forceinline__ void prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// L1 does not keep what is loaded. Bytes: 2, 4, 8 or 16, which the address is a multiple of.
template <int Bytes>
__device__ __forceinline__ void load_once(unsigned* x, const void* from) {
    if constexpr (Bytes == 16)
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "l"(from));
    else if constexpr (Bytes == 8)
        asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
                     : "=r"(x[0]), "=r"(x[1])
                     : "l"(from));
    else if constexpr (Bytes == 4)
        asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(x[0]) : "l"(from));
    else asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=r"(x[0]) : "l"(from));
}
// L2 holds on to what is stored for as long as it can (evict_last).
template <int Bytes>
__device__ __forceinline__ void store_kept(void* to, const unsigned* x) {
    if constexpr (Bytes == 16)
        asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(to),
                     "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(EVICT_LAST)
                     : "memory");
    else if constexpr (Bytes == 8)
        asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1,%2}, %3;" ::"l"(to), "r"(x[0]),
                     "r"(x[1]), "l"(EVICT_LAST)
                     : "memory");
    else if constexpr (Bytes == 4)
        asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(to), "r"(x[0]),
                     "l"(EVICT_LAST)
                     : "memory");
    else
        asm volatile("st.global.L2::cache_hint.u16 [%0], %1, %2;" ::"l"(to), "r"(x[0]),
                     "l"(EVICT_LAST)
                     : "memory");
}

}  // namespace attn
