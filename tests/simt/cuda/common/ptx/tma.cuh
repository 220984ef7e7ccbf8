// The twin of kernels/common/ptx/tma.cuh.
#pragma once

namespace attn {

inline void tma_prefetch(const TensorMap&) {}
inline void tma_load(unsigned target, const TensorMap& map, unsigned barrier, int c0, int c1,
                     int c2, SIMT_HERE) {
    const int at[] = {c0, c1, c2};
    simt::tma_load(target, map, barrier, 3, at, 0, SIMT_AT);
}
inline void tma_load(unsigned target, const TensorMap& map, unsigned barrier, int c0, int c1,
                     int c2, unsigned long long, SIMT_HERE) {
    const int at[] = {c0, c1, c2};
    simt::tma_load(target, map, barrier, 3, at, 0, SIMT_AT);
}
inline void tma_load_multicast(unsigned target, const TensorMap& map, unsigned barrier, int c0,
                               int c1, int c2, unsigned short blocks, SIMT_HERE) {
    const int at[] = {c0, c1, c2};
    simt::tma_load(target, map, barrier, 3, at, blocks, SIMT_AT);
}
inline void tma_store(const TensorMap& map, unsigned source, int c0, int c1, int c2, SIMT_HERE) {
    const int at[] = {c0, c1, c2};
    simt::tma_store(map, source, 3, at, SIMT_AT);
}
inline void tma_store(const TensorMap& map, unsigned source, int c0, int c1, int c2,
                      unsigned long long, SIMT_HERE) {
    const int at[] = {c0, c1, c2};
    simt::tma_store(map, source, 3, at, SIMT_AT);
}
inline void tma_load_4d(unsigned target, const TensorMap& map, unsigned barrier, int c0, int c1,
                        int c2, int c3, SIMT_HERE) {
    const int at[] = {c0, c1, c2, c3};
    simt::tma_load(target, map, barrier, 4, at, 0, SIMT_AT);
}
inline void tma_load_multicast_4d(unsigned target, const TensorMap& map, unsigned barrier, int c0,
                                  int c1, int c2, int c3, unsigned short blocks, SIMT_HERE) {
    const int at[] = {c0, c1, c2, c3};
    simt::tma_load(target, map, barrier, 4, at, blocks, SIMT_AT);
}
inline void tma_store_4d(const TensorMap& map, unsigned source, int c0, int c1, int c2, int c3,
                         SIMT_HERE) {
    const int at[] = {c0, c1, c2, c3};
    simt::tma_store(map, source, 4, at, SIMT_AT);
}
inline void tma_store_commit() { simt::tma_store_commit(); }
template <int Pending>
void tma_store_wait_read() {
    simt::tma_store_wait(Pending, true);
}
inline void fence_async_proxy() { simt::fence_async_proxy(); }

}  // namespace attn
