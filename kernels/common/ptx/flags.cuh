// Counters in global memory by which blocks of a launch wait for blocks before them. Blocks begin
// in the order of their numbers, so that a block waits for such as run or have ended. Source: PTX
// ISA, "Memory consistency model", "fence.proxy".
#pragma once

namespace attn {

// Counts one more, after what this thread wrote, and after bulk copies that it has waited for.
__device__ __forceinline__ void flag_arrive(unsigned* flag) {
    asm volatile("fence.proxy.async;\nred.release.gpu.global.add.u32 [%0], 1;" ::"l"(flag)
                 : "memory");
}
// Returns when `least` have arrived. What they wrote is seen then, by bulk copies too.
__device__ __forceinline__ void flag_wait(const unsigned* flag, unsigned least) {
    unsigned done = 0;
#if SPIN_BOUND  // debug builds: a hang becomes an error after about half a second
    long long begin = clock64();
#endif
    do {
        asm volatile(
            "{\n.reg .pred p;\n.reg .u32 count;\nld.acquire.gpu.global.u32 count, [%1];\n"
            "setp.ge.u32 p, count, %2;\n@!p nanosleep.u32 200;\nselp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "l"(flag), "r"(least)
            : "memory");
#if SPIN_BOUND
        if (!done && clock64() - begin > 1000000000LL) asm volatile("trap;");
#endif
    } while (!done);
    asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace attn
