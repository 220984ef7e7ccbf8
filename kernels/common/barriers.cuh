// Named barriers, sm_80 and later (common/hopper.cuh has them too): numbers 1 to 15, `threads` of the
// block in whole warps. What a thread wrote before it arrives, who waits there sees.
#pragma once

__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {  // does not wait
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
