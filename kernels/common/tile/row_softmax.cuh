// Softmax of whole rows, in place: one set of Threads threads a row, Vector elements a load,
// base 2.
#pragma once
#include "common/element.cuh"
#include "common/ptx/cache.cuh"
#include "common/tile/rows.cuh"

// Vector neighbours, two a register, as they lie in memory. Once: L1 does not keep what is loaded.
// Keep: L2 is told to hold on to what is stored.
template <int Vector, bool Once, bool Keep>
struct RawVector {
    static constexpr int WORDS = (Vector + 1) / 2;
    unsigned word[WORDS];

    __device__ __forceinline__ void load(const element_t* from) {
        if constexpr (Once) load_once<Vector * 2>(word, from);
        else if constexpr (Vector == 8)
            *reinterpret_cast<uint4*>(word) = *reinterpret_cast<const uint4*>(from);
        else if constexpr (Vector == 4)
            *reinterpret_cast<uint2*>(word) = *reinterpret_cast<const uint2*>(from);
        else if constexpr (Vector == 2) word[0] = *reinterpret_cast<const unsigned*>(from);
        else word[0] = *from;
    }
    __device__ __forceinline__ void store(element_t* to) const {
        if constexpr (Keep) store_kept<Vector * 2>(to, word);
        else if constexpr (Vector == 8)
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(word);
        else if constexpr (Vector == 4)
            *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(word);
        else if constexpr (Vector == 2) *reinterpret_cast<unsigned*>(to) = word[0];
        else *to = static_cast<element_t>(word[0]);
    }
    // Elements `keys` and beyond count as masked; this vector begins at element `at`.
    __device__ __forceinline__ void unpack(float (&out)[Vector], int at, int keys) const {
#pragma unroll
        for (int i = 0; i < Vector; ++i)
            out[i] = at + i < keys ? (i % 2 ? high_of(word[i / 2]) : low_of(word[i / 2]))
                                   : minus_infinity();
    }
    __device__ __forceinline__ void pack_scaled(const float (&in)[Vector], float factor) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i)
            word[i] =
                pack(in[2 * i] * factor, Vector > 1 ? in[(2 * i + 1) % Vector] * factor : 0.f);
    }
};

// Rows rows for each set of threads, Groups apart; the first is `row`, whose element `first` is
// this thread's first. Passes 1: a row of at most Kept stays in registers, and the next is loaded
// while it is worked on; 3: it is read for the maximum, for the sum and to normalise. keys_in(row)
// says how many keys a row has, written_in(row) how many elements to write, with zeros behind the
// keys; a row that is not there has no keys. exchange: two floats a warp of the block if Threads
// > 32. Every thread of the block must call it.
template <int Threads, int Vector, int Passes, int Rows, int Groups, int Kept, bool Once, bool Keep,
          typename Keys, typename Written>
__device__ __forceinline__ void row_softmax(element_t* scores, int stride, int row, int first,
                                            float* for_maximum, float* for_sum, Keys keys_in,
                                            Written written_in) {
    constexpr int STEP = Threads * Vector;  // keys loaded at once for a row
    constexpr int LOADS = Passes == 1 ? Kept / STEP : 1;
    using Raw = RawVector<Vector, Once, Keep>;
    scores += first;
    Raw raw[LOADS];
    auto load_row = [&](int r) {
        int keys = keys_in(r);
        const element_t* from = scores + static_cast<long long>(r) * stride;
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (first + i * STEP < keys) raw[i].load(from + i * STEP);
    };
    if constexpr (Passes == 1) load_row(row);
#pragma unroll 1
    for (int n = 0; n < Rows; ++n, row += Groups) {
        int keys = keys_in(row), written = keys > 0 ? written_in(row) : 0;
        element_t* at = scores + static_cast<long long>(row) * stride;
        float largest = minus_infinity(), sum = 0.f;
        if constexpr (Passes == 1) {
            float p[LOADS][Vector];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) raw[i].unpack(p[i], first + i * STEP, keys);
            if (n + 1 < Rows) load_row(row + Groups);
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
#pragma unroll
                for (int e = 0; e < Vector; ++e) largest = fmaxf(largest, p[i][e]);
            largest = row_reduce<Threads, true>(largest, for_maximum);
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
#pragma unroll
                for (int e = 0; e < Vector; ++e) sum += p[i][e] = exp2_approx(p[i][e] - largest);
            float inverse = 1.f / row_reduce<Threads, false>(sum, for_sum);
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
                if (first + i * STEP < written) {
                    Raw out;
                    out.pack_scaled(p[i], inverse);
                    out.store(at + i * STEP);
                }
        } else {
            float p[Vector];
            auto get = [&](int i) {
                Raw in;
                if (first + i < keys) in.load(at + i);
                in.unpack(p, first + i, keys);
            };
#pragma unroll 4
            for (int i = 0; first + i < keys; i += STEP) {
                get(i);
#pragma unroll
                for (int e = 0; e < Vector; ++e) largest = fmaxf(largest, p[e]);
            }
            largest = row_reduce<Threads, true>(largest, for_maximum);
#pragma unroll 4
            for (int i = 0; first + i < keys; i += STEP) {
                get(i);
#pragma unroll
                for (int e = 0; e < Vector; ++e) sum += exp2_approx(p[e] - largest);
            }
            float inverse = 1.f / row_reduce<Threads, false>(sum, for_sum);
#pragma unroll 4
            for (int i = 0; first + i < written; i += STEP) {
                get(i);
#pragma unroll
                for (int e = 0; e < Vector; ++e) p[e] = exp2_approx(p[e] - largest);
                Raw out;
                out.pack_scaled(p, inverse);
                out.store(at + i);
            }
        }
    }
}
