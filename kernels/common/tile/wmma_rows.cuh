// What a warp does with 16 rows whose fragments are opaque: scores and the output go through shared
// memory, where lane l works on row l % 16, every other four of its columns beginning with l / 16.
// The fragments are those of common/tile/wmma_fragments.cuh or of common/tile/mma_fragments.cuh.
#pragma once
#include "common/element.cuh"

// Floats from one row of N scores to the next: 16 bytes more, so that 8 rows lie in different
// banks. Probabilities replace the scores of their row, at the same address, so their pitch is
// twice that.
template <int N>
constexpr int SCORE_PITCH = N + 4;
constexpr int OUTPUT_PITCH = 20;  // of 16 columns on their way out

struct RowState {
    float largest = __int_as_float(0xff800000), sum = 0.f;  // of the row; of this lane's columns
};

// Scores of a tile to probabilities in place. A row sees the first `keys` of its N. Returns what
// the row's output must be multiplied by; it is in factors[row] too. Approximate: 2^x in one
// instruction.
template <int N, bool Approximate>
__device__ __forceinline__ float softmax_rows(float* scores, float* factors, int keys,
                                              float to_log2, RowState& state) {
    const int row = threadIdx.x % 16, half = threadIdx.x / 16 % 2;
    auto power = [](float x) { return Approximate ? exp2_approx(x) : exp2f(x); };
    float* own = scores + row * SCORE_PITCH<N> + half * 4;
    float s[N / 8][4], largest = minus_infinity();
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
        const float4 four = *reinterpret_cast<const float4*>(own + 8 * i);
        s[i][0] = four.x, s[i][1] = four.y, s[i][2] = four.z, s[i][3] = four.w;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            s[i][e] = half * 4 + 8 * i + e < keys ? s[i][e] * to_log2 : minus_infinity();
            largest = fmaxf(largest, s[i][e]);
        }
    }
    // A row's first tile has a key for it, so this is finite.
    largest = fmaxf(state.largest, fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 16)));
    const float shrink = power(state.largest - largest);
    state.largest = largest, state.sum *= shrink;
    __syncwarp();  // both lanes of a row have read it
    element_t* p = reinterpret_cast<element_t*>(scores + row * SCORE_PITCH<N>) + half * 4;
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.sum += s[i][e] = power(s[i][e] - largest);
        *reinterpret_cast<uint2*>(p + 8 * i) =
            make_uint2(pack(s[i][0], s[i][1]), pack(s[i][2], s[i][3]));
    }
    if (half == 0) factors[row] = shrink;
    __syncwarp();
    return shrink;
}

__device__ __forceinline__ float inverse_of(const RowState& state) {
    return 1.f / (state.sum + __shfl_xor_sync(0xffffffffu, state.sum, 16));
}

// Every row of the fragment times its factor.
template <class Accumulator>
__device__ __forceinline__ void scale_rows(Accumulator& x, const Accumulator& factors) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x.x[i] *= factors.x[i];
}

// Eight output columns of this lane's row from shared memory.
__device__ __forceinline__ void store_eight(element_t* to, const float* from, float factor) {
    const float4 a = *reinterpret_cast<const float4*>(from),
                 b = *reinterpret_cast<const float4*>(from + 4);
    *reinterpret_cast<uint4*>(to) =
        make_uint4(pack(a.x * factor, a.y * factor), pack(a.z * factor, a.w * factor),
                   pack(b.x * factor, b.y * factor), pack(b.z * factor, b.w * factor));
}

// The warp's fragments, 16 columns each, to rows 0 .. rows - 1 of `o`, by way of 16 * OUTPUT_PITCH
// floats.
template <class Accumulator, int Count>
__device__ __forceinline__ void store_rows(element_t* o, Accumulator (&out)[Count], float* scratch,
                                           int rows, float factor) {
    const int row = threadIdx.x % 16, column = threadIdx.x / 16 % 2 * 8;
#pragma unroll
    for (int d = 0; d < Count; ++d) {
        __syncwarp();
        wmma_store(scratch, out[d], OUTPUT_PITCH);
        __syncwarp();
        if (row < rows)
            store_eight(o + row * (16 * Count) + d * 16 + column,
                        scratch + row * OUTPUT_PITCH + column, factor);
    }
}
