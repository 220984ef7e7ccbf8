// The twin of kernels/common/ptx/wmma.cuh. Its fragments are laid out as no GPU lays them out: lane
// l holds column l % 16, every other row. A template that counts on the place of an element fails
// here.
#pragma once
#include "common/ptx/convert.cuh"
#include "common/ptx/shared.cuh"

namespace simt {
// Lanes meet after they read, so that nobody overwrites what others still read, and not before:
// what other lanes store takes a __syncwarp to be seen.
inline void wmma_meet(const char* name, Where where) {
    collective(name, ~0u, nullptr, [](void* const*, unsigned) {}, where);
}
template <class T>
unsigned wmma_at(const T* p, int stride, Where where) {
    unsigned address = address_of(p);
    if (address % 32) fail(where, "wmma: offset %u is not a multiple of 32", address & 0xffffff);
    if (stride * sizeof(T) % 16)
        fail(where, "wmma: a stride of %d elements is not 16 bytes", stride);
    return address;
}
// Element (i, j) of 16x16: `swap` where a row in memory is a column.
template <class T>
void wmma_read(T (&to)[8], const T* from, int stride, bool swap, const char* name, Where where) {
    unsigned address = wmma_at(from, stride, where), fixed = self->lane % 16;
    T read[8];
    for (unsigned e = 0; e < 8; ++e) {
        unsigned other = 2 * e + self->lane / 16;
        load_shared(&read[e],
                    address + (swap ? fixed * stride + other : other * stride + fixed) * sizeof(T),
                    sizeof(T), where);
    }
    memcpy(to, read, sizeof read);
    wmma_meet(name, where);
}
}  // namespace simt

namespace attn {

template <bool Bf16>
struct WmmaA {
    unsigned short x[8];  // row lane % 16, every other element of the inner dimension
};
template <bool Bf16, bool Transposed>
struct WmmaB {
    unsigned short x[8];
};
struct WmmaAccumulator {
    float x[8];
};

template <bool Bf16>
void wmma_load(WmmaA<Bf16>& to, const unsigned short* from, int stride, SIMT_HERE) {
    simt::wmma_read(to.x, from, stride, true, "wmma.load.a", SIMT_AT);
}
template <bool Bf16, bool Transposed>
void wmma_load(WmmaB<Bf16, Transposed>& to, const unsigned short* from, int stride, SIMT_HERE) {
    simt::wmma_read(to.x, from, stride, Transposed, "wmma.load.b", SIMT_AT);
}
inline void wmma_load(WmmaAccumulator& to, const float* from, int stride, SIMT_HERE) {
    simt::wmma_read(to.x, from, stride, false, "wmma.load.c", SIMT_AT);
}
inline void wmma_load_rows(WmmaAccumulator& to, const float* from, SIMT_HERE) {
    simt::wmma_at(from, 0, SIMT_AT);
    for (unsigned e = 0; e < 8; ++e) to.x[e] = from[2 * e + simt::self->lane / 16];
    simt::wmma_meet("wmma.load.c", SIMT_AT);
}
inline void wmma_store(float* to, const WmmaAccumulator& from, int stride, SIMT_HERE) {
    unsigned address = simt::wmma_at(to, stride, SIMT_AT), lane = simt::self->lane;
    float probe;  // the last element must be inside
    simt::load_shared(&probe, address + (15 * stride + 15) * 4, 4, SIMT_AT);
    for (unsigned e = 0; e < 8; ++e) to[(2 * e + lane / 16) * stride + lane % 16] = from.x[e];
}
template <bool Bf16, bool Transposed>
void wmma_multiply(WmmaAccumulator& d, const WmmaA<Bf16>& a, const WmmaB<Bf16, Transposed>& b,
                   SIMT_HERE) {
    struct Lane {
        float* d;
        const unsigned short *a, *b;
    } own{d.x, a.x, b.x};
    simt::collective(
        "wmma.mma", ~0u, &own,
        [](void* const data[32], unsigned) {
            float a[16][16], b[16][16];
            auto value = [](unsigned short x) {
                return Bf16 ? __uint_as_float(static_cast<unsigned>(x) << 16) : from_half(x);
            };
            for (unsigned lane = 0; lane < 32; ++lane)
                for (unsigned e = 0; e < 8; ++e) {
                    a[lane % 16][2 * e + lane / 16] = value(static_cast<Lane*>(data[lane])->a[e]);
                    b[2 * e + lane / 16][lane % 16] = value(static_cast<Lane*>(data[lane])->b[e]);
                }
            for (unsigned lane = 0; lane < 32; ++lane)
                for (unsigned e = 0; e < 8; ++e) {
                    float& sum = static_cast<Lane*>(data[lane])->d[e];
                    for (int k = 0; k < 16; ++k) sum += a[2 * e + lane / 16][k] * b[k][lane % 16];
                }
        },
        SIMT_AT);
}

}  // namespace attn
