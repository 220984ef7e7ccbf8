// Blocks that work together, sm_90 on: a cluster is of blocks along x, declared by
// __cluster_dims__, and what is remote is only its shared memory. Source: PTX ISA,
// "barrier.cluster", "mapa" and "st.async".
#pragma once

namespace attn {

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Every thread of the cluster that has not ended: what it did before arriving is seen after the
// wait. The relaxed form promises no more than mbarrier_init_fence does, and spares a fence of the
// whole GPU.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Where block `rank` has what this block has at `address`. That block must not have ended.
__device__ __forceinline__ unsigned cluster_address(unsigned address, unsigned rank) {
    unsigned remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}
__device__ __forceinline__ float2 cluster_load2(unsigned address) {
    float2 x;
    asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];"
                 : "=f"(x.x), "=f"(x.y)
                 : "r"(address)
                 : "memory");
    return x;
}
__device__ __forceinline__ void cluster_store(unsigned address, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
// 16 bytes to an address of the cluster, whose block's mbarrier counts them as it does a copy's:
// only the thread that reads them waits, by mbarrier_wait<true>, and neither side needs a fence.
__device__ __forceinline__ void store_async_16(unsigned address, unsigned barrier, float a, float b,
                                               float c, float d) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::
            "r"(address),
        "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
        : "memory");
}

}  // namespace attn
