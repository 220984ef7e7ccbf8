// The twin of kernels/common/ptx/cache.cuh.
#pragma once

namespace attn {

constexpr unsigned long long EVICT_NORMAL = 0x16f0000000000000ull;
constexpr unsigned long long EVICT_FIRST = 0x12f0000000000000ull,
                             EVICT_LAST = 0x14f0000000000000ull;
inline void prefetch_l2(const void*) {}
template <int Bytes>
void load_once(unsigned* x, const void* from) {
    x[0] = 0;
    memcpy(x, from, Bytes);
}
template <int Bytes>
void store_kept(void* to, const unsigned* x) {
    memcpy(to, x, Bytes);
}

}  // namespace attn
