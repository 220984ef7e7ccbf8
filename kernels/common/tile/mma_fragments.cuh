// Fragments under the names of common/tile/wmma_fragments.cuh whose layout is known: ldmatrix and
// mma.sync, which is what WMMA becomes on sm_80 and later. Since every lane gives its own address,
// rows in shared memory need no common stride: they may be swizzled.
#pragma once
#include "common/element.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/shared.cuh"

struct FragmentA {
    unsigned x[4];
};
template <bool Transposed>
struct FragmentB {
    unsigned x[4];
};
// Lane l holds rows l / 4 and l / 4 + 8: columns 2 * (l % 4) and the next, then the same 8 further.
struct Accumulator {
    float x[8];
};

// address(row, chunk): where 16 bytes of a row of the 16x16 tile begin, chunk 0 or 1.
template <class Address>
__device__ __forceinline__ void wmma_load(FragmentA& to, Address address) {
    const unsigned lane = threadIdx.x % 32;
    ldmatrix_x4(to.x, address(lane % 16, lane / 16));
}
template <class Address>
__device__ __forceinline__ void wmma_load(FragmentB<true>& to, Address address) {
    const unsigned lane = threadIdx.x % 32;
    ldmatrix_x4(to.x, address(lane % 8 + lane / 16 * 8, lane / 8 % 2));
}
template <class Address>
__device__ __forceinline__ void wmma_load(FragmentB<false>& to, Address address) {
    const unsigned lane = threadIdx.x % 32;
    ldmatrix_x4_trans(to.x, address(lane % 16, lane / 16));
}

__device__ __forceinline__ int row_of(int i) { return threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
__device__ __forceinline__ int column_of(int i) { return threadIdx.x % 4 * 2 + i / 4 * 8 + i % 2; }
__device__ __forceinline__ void wmma_load(Accumulator& to, const float* from, int stride) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const float2 two =
            *reinterpret_cast<const float2*>(from + row_of(i) * stride + column_of(i));
        to.x[i] = two.x, to.x[i + 1] = two.y;
    }
}
__device__ __forceinline__ void wmma_load_rows(Accumulator& to, const float* from) {
#pragma unroll
    for (int i = 0; i < 8; ++i) to.x[i] = from[row_of(i)];
}
__device__ __forceinline__ void wmma_store(float* to, const Accumulator& from, int stride) {
#pragma unroll
    for (int i = 0; i < 8; i += 2)
        *reinterpret_cast<float2*>(to + row_of(i) * stride + column_of(i)) =
            make_float2(from.x[i], from.x[i + 1]);
}

// d += a b
template <bool Transposed>
__device__ __forceinline__ void wmma_multiply(Accumulator& d, const FragmentA& a,
                                              const FragmentB<Transposed>& b) {
    mma_16816<IS_BF16>(reinterpret_cast<float (&)[4]>(d.x[0]), a.x, b.x[0], b.x[1]);
    mma_16816<IS_BF16>(reinterpret_cast<float (&)[4]>(d.x[4]), a.x, b.x[2], b.x[3]);
}
