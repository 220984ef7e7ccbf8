// The twin of kernels/common/ptx/shared.cuh: cp.async poisons its target at once and delivers at
// the wait.
#pragma once

namespace attn {

inline unsigned smem_address(const void* p) { return simt::address_of(p); }

inline void cp_async_16(unsigned target, const void* source, bool valid, SIMT_HERE) {
    simt::cp_async(target, source, valid, SIMT_AT);
}
inline void cp_async_16(unsigned target, const void* source, SIMT_HERE) {
    simt::cp_async(target, source, true, SIMT_AT);
}
inline void cp_async_commit() { simt::cp_async_commit(); }
template <int Pending>
void cp_async_wait() {
    simt::cp_async_wait(Pending);
}

inline void ldmatrix_x4(unsigned (&r)[4], unsigned address, SIMT_HERE) {
    simt::ldmatrix(r, address, false, SIMT_AT);
}
inline void ldmatrix_x4_trans(unsigned (&r)[4], unsigned address, SIMT_HERE) {
    simt::ldmatrix(r, address, true, SIMT_AT);
}
inline void stmatrix_x4(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d,
                        SIMT_HERE) {
    const unsigned r[4] = {a, b, c, d};
    simt::stmatrix(address, r, SIMT_AT);
}

inline uint4 load_shared_16(unsigned address, SIMT_HERE) {
    uint4 x;
    simt::load_shared(&x, address, 16, SIMT_AT);
    return x;
}
inline void store_shared_floats(unsigned address, float a, float b, float c, float d, SIMT_HERE) {
    const float x[] = {a, b, c, d};
    simt::store_shared(address, x, 16, SIMT_AT);
    simt::wrote_shared(address);
}

}  // namespace attn
