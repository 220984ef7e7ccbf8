// The twin of kernels/common/ptx/bulk.cuh.
#pragma once

namespace attn {

inline void bulk_load(unsigned target, const void* source, unsigned bytes, unsigned barrier,
                      SIMT_HERE) {
    simt::bulk_load(target, source, bytes, barrier, SIMT_AT);
}
inline void bulk_add(float* target, unsigned source, unsigned bytes, SIMT_HERE) {
    simt::bulk_out(target, source, bytes, true, SIMT_AT);
}
inline void bulk_store(void* target, unsigned source, unsigned bytes, SIMT_HERE) {
    simt::bulk_out(static_cast<float*>(target), source, bytes, false, SIMT_AT);
}
inline void add_floats(float* target, float a, float b, float c, float d) {
    target[0] += a, target[1] += b, target[2] += c, target[3] += d;
}
inline void bulk_wait_all() { simt::tma_store_wait(0, false); }

inline void stmatrix_x4_trans(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d,
                              SIMT_HERE) {
    const unsigned r[4] = {a, b, c, d};
    simt::stmatrix(address, r, SIMT_AT, true);
}
inline float2 load_shared_floats(unsigned address, SIMT_HERE) {
    float2 x;
    simt::load_shared(&x, address, 8, SIMT_AT);
    return x;
}

}  // namespace attn
