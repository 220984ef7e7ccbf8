// The twin of kernels/common/ptx/barrier.cuh.
#pragma once

namespace attn {

inline void named_barrier_sync(int barrier, int threads, SIMT_HERE) {
    simt::barrier(barrier, threads, true, "named_barrier_sync", SIMT_AT);
}
inline void named_barrier_arrive(int barrier, int threads, SIMT_HERE) {
    simt::barrier(barrier, threads, false, "named_barrier_arrive", SIMT_AT);
}

inline void mbarrier_init(unsigned barrier, unsigned arrivals, SIMT_HERE) {
    simt::mbarrier_init(barrier, arrivals, SIMT_AT);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(unsigned barrier, SIMT_HERE) {
    simt::mbarrier_arrive(barrier, 0, 1, SIMT_AT);
}
inline void mbarrier_expect(unsigned barrier, unsigned bytes, SIMT_HERE) {
    simt::mbarrier_arrive(barrier, bytes, 1, SIMT_AT);
}
template <bool OfCluster = false>
inline void mbarrier_wait(unsigned barrier, unsigned parity, SIMT_HERE) {
    simt::mbarrier_wait(barrier, parity, SIMT_AT);
}
inline void mbarrier_arrive_remote(unsigned barrier, unsigned lane, unsigned lanes, SIMT_HERE) {
    if (lane < lanes) simt::mbarrier_arrive(barrier, 0, 1, SIMT_AT);
}

}  // namespace attn
