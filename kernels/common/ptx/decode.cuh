// What reading a cache of keys and values takes beside common/ptx/shared.cuh: copies that L2 does
// not hold on to, 8x8 matrices turned in registers, E4M3 as fp16, and counts of blocks. sm_80 on;
// E4M3 sm_89 on. Source: PTX ISA, "cp.async", "createpolicy", "movmatrix", "cvt" and "atom".
#pragma once

namespace attn {

// L2's word for what is read once: it goes first.
__device__ __forceinline__ unsigned long long evict_first_policy() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// cp_async_16 of common/ptx/shared.cuh with such a word.
__device__ __forceinline__ void cp_async_16_hinted(unsigned target, const void* source, bool valid,
                                                   unsigned long long policy) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(target),
                 "l"(source), "r"(bytes), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void cp_async_4(unsigned target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// An 8x8 matrix of 16-bit elements, of which lane l has columns 2 (l % 4) and the next of row
// l / 4, with rows and columns exchanged.
__device__ __forceinline__ unsigned transpose_8x8(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Four numbers of E4M3 as fp16: bytes 0 and 1 to `low`, the others to `high`.
__device__ __forceinline__ void halves_of_e4m3(unsigned x, unsigned& low, unsigned& high) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\n"
        "cvt.rn.f16x2.e4m3x2 %1, h;\n}\n"
        : "=r"(low), "=r"(high)
        : "r"(x));
}

// Counts one more, and returns how many there were before. What each that counted wrote, or waited
// for, is seen by those that count later.
__device__ __forceinline__ unsigned count_arrival(unsigned* counter) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    return before;
}
// How many have been counted; what they wrote is seen then.
__device__ __forceinline__ unsigned arrivals(const unsigned* counter) {
    unsigned count;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
    return count;
}

}  // namespace attn
