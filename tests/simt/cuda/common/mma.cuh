// The twin of kernels/common/mma.cuh. cp.async poisons its target at once and delivers at the wait.
#pragma once

inline unsigned smem_address(const void* p) { return simt::address_of(p); }

inline void cp_async_16(unsigned target, const void* source, bool valid, SIMT_HERE) {
    simt::cp_async(target, source, valid, SIMT_AT);
}
inline void cp_async_16(unsigned target, const void* source, SIMT_HERE) {
    simt::cp_async(target, source, true, SIMT_AT);
}
inline void cp_async_commit() { simt::cp_async_commit(); }
template <int PENDING>
void cp_async_wait() {
    simt::cp_async_wait(PENDING);
}

inline void ldmatrix_x4(unsigned (&r)[4], unsigned address, SIMT_HERE) {
    simt::ldmatrix(r, address, false, SIMT_AT);
}
inline void ldmatrix_x4_trans(unsigned (&r)[4], unsigned address, SIMT_HERE) {
    simt::ldmatrix(r, address, true, SIMT_AT);
}
inline void mma_16816(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, SIMT_HERE) {
    simt::mma_16816(d, a, b0, b1, IS_BF16, SIMT_AT);
}
// A template may write `bar.sync` as PTX; the harness turns that into this name.
inline void simt_bar_sync(int barrier, int threads, SIMT_HERE) {
    simt::barrier(barrier, threads, true, "bar.sync", SIMT_AT);
}
