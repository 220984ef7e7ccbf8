// Copies of boxes of tensors between global and shared memory by TMA, sm_90 on.
// Source: PTX ISA, "Tensor copies".
#pragma once

namespace attn {

struct alignas(64) TensorMap {
    char bytes[128];
};  // passed as `const __grid_constant__ TensorMap`

__device__ __forceinline__ void tma_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ __forceinline__ void tma_load(unsigned target, const TensorMap& map, unsigned barrier,
                                         int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%3,%4,%5}], [%2];" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}
// The same with a policy of common/ptx/cache.cuh.
__device__ __forceinline__ void tma_load(unsigned target, const TensorMap& map, unsigned barrier,
                                         int c0, int c1, int c2, unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3,%4,%5}], [%2], %6;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
        : "memory");
}
// One copy to the same address of every block whose bit `blocks` has; each one's own barrier counts
// it.
__device__ __forceinline__ void tma_load_multicast(unsigned target, const TensorMap& map,
                                                   unsigned barrier, int c0, int c1, int c2,
                                                   unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3,%4,%5}], [%2], %6;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "h"(blocks)
        : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap& map, unsigned source, int c0, int c1,
                                          int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2,%3,%4}], [%1];" ::"l"(&map),
        "r"(source), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap& map, unsigned source, int c0, int c1,
                                          int c2, unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2,%3,%4}], [%1], "
        "%5;" ::"l"(&map),
        "r"(source), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
        : "memory");
}
// The same for maps of four dimensions.
__device__ __forceinline__ void tma_load_4d(unsigned target, const TensorMap& map, unsigned barrier,
                                            int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%3,%4,%5,%6}], [%2];" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
__device__ __forceinline__ void tma_load_multicast_4d(unsigned target, const TensorMap& map,
                                                      unsigned barrier, int c0, int c1, int c2,
                                                      int c3, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3,%4,%5,%6}], [%2], %7;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks)
        : "memory");
}
__device__ __forceinline__ void tma_store_4d(const TensorMap& map, unsigned source, int c0, int c1,
                                             int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5}], [%1];" ::"l"(
            &map),
        "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
__device__ __forceinline__ void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until at most Pending groups of this thread's stores still read shared memory.
template <int Pending>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
// Ordinary writes to shared memory before it are seen by TMA and wgmma after it (and a barrier).
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace attn
