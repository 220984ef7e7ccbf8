// The twin of kernels/common/ptx/decode.cuh.
#pragma once
#include "common/ptx/fp8.cuh"

namespace attn {

inline unsigned long long evict_first_policy() { return 0; }
inline void cp_async_16_hinted(unsigned target, const void* source, bool valid, unsigned long long,
                               SIMT_HERE) {
    simt::cp_async(target, source, valid, SIMT_AT);
}
inline void cp_async_4(unsigned target, const void* source, SIMT_HERE) {
    simt::cp_async(target, source, true, SIMT_AT, 4);
}
inline unsigned transpose_8x8(unsigned x, SIMT_HERE) {
    struct Lane {
        unsigned in, out;
    } own{x, 0};
    simt::collective(
        "movmatrix", 0xffffffffu, &own,
        [](void* const data[32], unsigned) {
            simt::use_loaded();
            for (unsigned row = 0; row < 8; ++row)
                for (unsigned column = 0; column < 8; ++column) {
                    unsigned from = static_cast<Lane*>(data[column * 4 + row / 2])->in;
                    static_cast<Lane*>(data[row * 4 + column / 2])->out |=
                        (from >> row % 2 * 16 & 0xffff) << column % 2 * 16;
                }
        },
        SIMT_AT);
    return own.out;
}
inline void halves_of_e4m3(unsigned x, unsigned& low, unsigned& high) {
    unsigned halves[4];
    for (int i = 0; i < 4; ++i) halves[i] = to_half(simt::from_e4m3(x >> 8 * i & 255));
    low = halves[0] | halves[1] << 16, high = halves[2] | halves[3] << 16;
}
inline unsigned count_arrival(unsigned* counter) { return atomicAdd(counter, 1u); }
inline unsigned arrivals(unsigned* counter) { return atomicAdd(counter, 0u); }

}  // namespace attn
