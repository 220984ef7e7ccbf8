// The twin of kernels/common/cluster.cuh: the same names, run by threads.cpp and copies.cpp.
#pragma once

inline void cluster_barrier_arrive(SIMT_HERE) { simt::cluster_barrier(true, false, SIMT_AT); }
inline void cluster_barrier_wait(SIMT_HERE) { simt::cluster_barrier(false, true, SIMT_AT); }
inline unsigned address_in(unsigned address, unsigned rank) { return simt::map_address(address, rank); }
inline float2 cluster_load2(unsigned address, SIMT_HERE) {
    float2 x;
    simt::load_shared(&x, address, 8, SIMT_AT);
    return x;
}
inline void cluster_store(unsigned address, float x, SIMT_HERE) {
    simt::store_shared(address, &x, 4, SIMT_AT);
}
inline void prefetch_l2(const void*) {}
inline void wait_for_launch_ahead() { simt::grid_wait(); }
inline void let_launch_behind_begin() {}
