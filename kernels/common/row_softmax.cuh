// Softmax of whole rows, in place: one set of THREADS threads a row, VECTOR elements a load, base 2.
// Include after common/element.cuh, common/global.cuh and common/rows.cuh.
#pragma once

// VECTOR neighbours, two a register, as they lie in memory. ONCE: L1 does not keep what is loaded. KEEP: L2
// is told to hold on to what is stored.
template <int VECTOR, bool ONCE, bool KEEP>
struct RawVector {
    static constexpr int WORDS = (VECTOR + 1) / 2;
    unsigned word[WORDS];

    __device__ __forceinline__ void load(const element_t* from) {
        if constexpr (ONCE) load_once<VECTOR * 2>(word, from);
        else if constexpr (VECTOR == 8)
            *reinterpret_cast<uint4*>(word) = *reinterpret_cast<const uint4*>(from);
        else if constexpr (VECTOR == 4)
            *reinterpret_cast<uint2*>(word) = *reinterpret_cast<const uint2*>(from);
        else if constexpr (VECTOR == 2) word[0] = *reinterpret_cast<const unsigned*>(from);
        else word[0] = *from;
    }
    __device__ __forceinline__ void store(element_t* to) const {
        if constexpr (KEEP) store_kept<VECTOR * 2>(to, word);
        else if constexpr (VECTOR == 8)
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(word);
        else if constexpr (VECTOR == 4)
            *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(word);
        else if constexpr (VECTOR == 2) *reinterpret_cast<unsigned*>(to) = word[0];
        else *to = static_cast<element_t>(word[0]);
    }
    // Elements `keys` and beyond count as masked; this vector begins at element `at`.
    __device__ __forceinline__ void unpack(float (&out)[VECTOR], int at, int keys) const {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
            out[i] = at + i < keys ? (i % 2 ? high_of(word[i / 2]) : low_of(word[i / 2])) : minus_infinity();
    }
    __device__ __forceinline__ void pack_scaled(const float (&in)[VECTOR], float factor) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i)
            word[i] = pack(in[2 * i] * factor, VECTOR > 1 ? in[(2 * i + 1) % VECTOR] * factor : 0.f);
    }
};

// ROWS rows for each set of threads, GROUPS apart; the first is `row`, whose element `first` is this thread's
// first. PASSES 1: a row of at most KEPT stays in registers, and the next is loaded while it is worked
// on; 3: it is read for the maximum, for the sum and to normalise. keys_in(row) says how many keys a row
// has, written_in(row) how many elements to write, with zeros behind the keys; a row that is not there has
// no keys. exchange: two floats a warp of the block if THREADS > 32. Every thread of the block must call it.
template <int THREADS, int VECTOR, int PASSES, int ROWS, int GROUPS, int KEPT, bool ONCE, bool KEEP,
          typename Keys, typename Written>
__device__ __forceinline__ void row_softmax(element_t* scores, int stride, int row, int first,
                                            float* for_maximum, float* for_sum, Keys keys_in,
                                            Written written_in) {
    constexpr int STEP = THREADS * VECTOR;  // keys loaded at once for a row
    constexpr int LOADS = PASSES == 1 ? KEPT / STEP : 1;
    using Raw = RawVector<VECTOR, ONCE, KEEP>;
    scores += first;
    Raw raw[LOADS];
    auto load_row = [&](int r) {
        int keys = keys_in(r);
        const element_t* from = scores + static_cast<long long>(r) * stride;
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (first + i * STEP < keys) raw[i].load(from + i * STEP);
    };
    if constexpr (PASSES == 1) load_row(row);
#pragma unroll 1
    for (int n = 0; n < ROWS; ++n, row += GROUPS) {
        int keys = keys_in(row), written = keys > 0 ? written_in(row) : 0;
        element_t* at = scores + static_cast<long long>(row) * stride;
        float largest = minus_infinity(), sum = 0.f;
        if constexpr (PASSES == 1) {
            float p[LOADS][VECTOR];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) raw[i].unpack(p[i], first + i * STEP, keys);
            if (n + 1 < ROWS) load_row(row + GROUPS);
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) largest = fmaxf(largest, p[i][e]);
            largest = row_reduce<THREADS, true>(largest, for_maximum);
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) sum += p[i][e] = exp2_approx(p[i][e] - largest);
            float inverse = 1.f / row_reduce<THREADS, false>(sum, for_sum);
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
                if (first + i * STEP < written) {
                    Raw out;
                    out.pack_scaled(p[i], inverse);
                    out.store(at + i * STEP);
                }
        } else {
            float p[VECTOR];
            auto get = [&](int i) {
                Raw in;
                if (first + i < keys) in.load(at + i);
                in.unpack(p, first + i, keys);
            };
#pragma unroll 4
            for (int i = 0; first + i < keys; i += STEP) {
                get(i);
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) largest = fmaxf(largest, p[e]);
            }
            largest = row_reduce<THREADS, true>(largest, for_maximum);
#pragma unroll 4
            for (int i = 0; first + i < keys; i += STEP) {
                get(i);
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) sum += exp2_approx(p[e] - largest);
            }
            float inverse = 1.f / row_reduce<THREADS, false>(sum, for_sum);
#pragma unroll 4
            for (int i = 0; first + i < written; i += STEP) {
                get(i);
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) p[e] = exp2_approx(p[e] - largest);
                Raw out;
                out.pack_scaled(p, inverse);
                out.store(at + i);
            }
        }
    }
}
