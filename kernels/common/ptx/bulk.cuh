// Copies of plain bytes between global and shared memory by TMA, sm_90 on, and other moves of a
// backward. Addresses and sizes are multiples of 16. Source: PTX ISA, "cp.async.bulk",
// "cp.reduce.async.bulk", "stmatrix".
#pragma once

namespace attn {

__device__ __forceinline__ void bulk_load(unsigned target, const void* source, unsigned bytes,
                                          unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}
// Writes bytes to global memory. In a group, as TMA stores are.
__device__ __forceinline__ void bulk_store(void* target, unsigned source, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
                 "r"(source), "r"(bytes)
                 : "memory");
}
// Adds fp32 numbers to those in global memory, in any order. In a group, as TMA stores are.
__device__ __forceinline__ void bulk_add(float* target, unsigned source, unsigned bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
        "r"(source), "r"(bytes)
        : "memory");
}
// The same of four numbers, in 16 bytes, that a thread has.
__device__ __forceinline__ void add_floats(float* target, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(target), "f"(a),
                 "f"(b), "f"(c), "f"(d)
                 : "memory");
}
// Until all groups of this thread have been written.
__device__ __forceinline__ void bulk_wait_all() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// As stmatrix_x4, of matrices whose columns become rows.
__device__ __forceinline__ void stmatrix_x4_trans(unsigned address, unsigned a, unsigned b,
                                                  unsigned c, unsigned d) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
        "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
}
__device__ __forceinline__ float2 load_shared_floats(unsigned address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                 : "=f"(x.x), "=f"(x.y)
                 : "r"(address)
                 : "memory");
    return x;
}

}  // namespace attn
