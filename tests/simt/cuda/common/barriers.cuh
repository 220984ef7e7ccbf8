// The twin of kernels/common/barriers.cuh.
#pragma once

inline void named_barrier_sync(int barrier, int threads, SIMT_HERE) {
    simt::barrier(barrier, threads, true, "named_barrier_sync", SIMT_AT);
}
inline void named_barrier_arrive(int barrier, int threads, SIMT_HERE) {
    simt::barrier(barrier, threads, false, "named_barrier_arrive", SIMT_AT);
}
