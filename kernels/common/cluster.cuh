// Blocks that work together: clusters and their shared memory (sm_90 on), and launches that overlap.
// Addresses are 32-bit, as smem_address of common/mma.cuh gives. Source: PTX ISA, "barrier.cluster", "mapa".
#pragma once

// All threads of all blocks of the cluster arrive, and then wait; what any of them wrote to shared memory
// before it arrived, all of them see after.
__device__ __forceinline__ void cluster_barrier_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_barrier_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Where block `rank` has what this block has at `address`. That block must not have ended.
__device__ __forceinline__ unsigned address_in(unsigned address, unsigned rank) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
__device__ __forceinline__ float2 cluster_load2(unsigned address) {
    float2 x;
    asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void cluster_store(unsigned address, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// The 128 bytes round `address` into L2.
__device__ __forceinline__ void prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Programmatic launches. The first: until the launch ahead has ended and its writes are seen. The second:
// lets the launch behind begin when every block has said so or ended.
__device__ __forceinline__ void wait_for_launch_ahead() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_launch_behind_begin() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
