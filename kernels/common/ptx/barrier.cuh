// Barriers of a block and of its copies: named barriers, mbarriers.
// Addresses of shared memory are 32-bit here and in all of common/ptx, as smem_address gives them.
// Source: PTX ISA, "bar" and "mbarrier".
#pragma once

namespace attn {

// ---- named barriers, sm_80 on: numbers 1 to 15 (0 is __syncthreads), `threads` in whole warps
// ---- What a thread wrote before it arrives is seen by those that wait.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {  // does not wait
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- mbarriers: `arrivals` threads and all expected bytes complete a phase ----
__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}
// Makes the inits visible to the copy engine; __syncthreads then makes them visible to the block.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Lanes below `lanes` arrive, each at a barrier of a block of the cluster (cluster_address). Orders
// reads by wgmma that have been waited for, no writes: a release to the cluster would be a fence of
// the whole GPU before every arrival.
__device__ __forceinline__ void mbarrier_arrive_remote(unsigned barrier, unsigned lane,
                                                       unsigned lanes) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.lt.u32 p, %1, %2;\n"
        "@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n}\n" ::"r"(barrier),
        "r"(lane), "r"(lanes)
        : "memory");
}
// One arrival that also expects `bytes` of copies; a box counts whole, even where it is clipped.
__device__ __forceinline__ void mbarrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Returns when the phase of this parity is complete. A fresh barrier lets parity 1 through.
// OfCluster: what other blocks of the cluster stored is seen too.
template <bool OfCluster = false>
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
    unsigned done = 0;
#if SPIN_BOUND  // debug builds: a hang becomes an error after about half a second
    long long begin = clock64();
#endif
    do {
#define MBARRIER_TRY_WAIT(HOW)                                               \
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity" HOW            \
                 ".shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n" \
                 : "=r"(done)                                                \
                 : "r"(barrier), "r"(parity)                                 \
                 : "memory")
        if (OfCluster) MBARRIER_TRY_WAIT(".acquire.cluster");
        else MBARRIER_TRY_WAIT("");
#undef MBARRIER_TRY_WAIT
#if SPIN_BOUND
        if (!done && clock64() - begin > 1000000000LL) asm volatile("trap;");
#endif
    } while (!done);
}

}  // namespace attn
