// The twin of kernels/common/ptx/cluster.cuh.
#pragma once

namespace attn {

inline unsigned cluster_rank() { return simt::cluster_rank(); }
inline void cluster_arrive(SIMT_HERE) { simt::cluster_barrier(true, false, SIMT_AT); }
inline void cluster_arrive_relaxed(SIMT_HERE) { simt::cluster_barrier(true, false, SIMT_AT); }
inline void cluster_wait(SIMT_HERE) { simt::cluster_barrier(false, true, SIMT_AT); }
inline unsigned cluster_address(unsigned address, unsigned rank) {
    return simt::map_address(address, rank);
}
inline float2 cluster_load2(unsigned address, SIMT_HERE) {
    float2 x;
    simt::load_shared(&x, address, 8, SIMT_AT);
    return x;
}
inline void cluster_store(unsigned address, float x, SIMT_HERE) {
    simt::store_shared(address, &x, 4, SIMT_AT);
}
inline void store_async_16(unsigned address, unsigned barrier, float a, float b, float c, float d,
                           SIMT_HERE) {
    const float values[] = {a, b, c, d};
    simt::store_async(address, values, barrier, SIMT_AT);
}

}  // namespace attn
