// The twin of kernels/common/global.cuh.
#pragma once

template <int BYTES>
void load_once(unsigned* x, const void* from) {
    x[0] = 0;
    memcpy(x, from, BYTES);
}
template <int BYTES>
void store_kept(void* to, const unsigned* x) {
    memcpy(to, x, BYTES);
}
