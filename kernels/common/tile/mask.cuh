// Which keys a query sees, and the mask of scores in accumulators.
#pragma once
#include "common/tile/fragments.cuh"

namespace attn {

// The mask of the problem.
#ifndef CAUSAL
#define CAUSAL 0  // of a header that is compiled alone
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
static_assert(!WINDOW || !CAUSAL, "a causal window is a window");
// What the keys of a query follow from, where it is not its position alone. 1: an interval of each
// query is in memory. 2: a bit of each query and key is. See common/tile/mask_list.cuh.
#ifndef MASK
#define MASK 0
#endif
static_assert(!MASK || (!CAUSAL && !WINDOW), "memory says what is causal");
// 1: tiles of queries are cut where packed sequences begin, so that each has a number of rows.
#ifndef PACKED
#define PACKED 0
#endif
static_assert(!PACKED || MASK == 1, "sequences are intervals of keys");

// 1: the mask leaves some queries no key, as a launch knows. Their output is 0 and their
// log-sum-exp minus infinity. Asking costs every kernel up to 11 instructions, and the recorded
// ones have none of such queries.
#ifndef EMPTY_ROWS
#define EMPTY_ROWS 0
#endif

// Whether rows differ in the first key, and in the last, that they see; and whether later rows see
// more of them, so that the longest tile of queries is the last.
enum : bool {
    HIDES_EARLIER = WINDOW || MASK,
    HIDES_LATER = CAUSAL || WINDOW || MASK,
    LATER_SEE_MORE = CAUSAL
};
// Keys from `first` on, before `end`.
struct KeyRange {
    int first, end;
};

// Those that query `row` sees; the mask is aligned bottom-right.
__device__ __forceinline__ KeyRange visible_keys(int row, int seqlen_q, int seqlen_k) {
    return {0, HIDES_LATER ? min(seqlen_k, row + 1 + seqlen_k - seqlen_q) : seqlen_k};
}

// Scores of keys that a row does not see get no weight. low, high: keys of a thread's two rows,
// which are 8 apart; `key`: of column 0. Thread t holds of register i the row i / 2 % 2 and the
// column 8 (i / 4) + 2 (t % 4) + i % 2: see common/ptx/wgmma.cuh.
template <int N>
__device__ __forceinline__ void mask_columns(float (&s)[N], KeyRange low, KeyRange high, int key) {
    int limit = low.end - key, limit_8 = high.end - key;
    int first = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        int column = i / 4 * 8 + i % 2 + first;
        if (column >= (i & 2 ? limit_8 : limit)) s[i] = minus_infinity();
        if (HIDES_EARLIER && column < (i & 2 ? high : low).first - key) s[i] = minus_infinity();
    }
}

// The same by bits: bit 0 of the first word is column 0 of a thread's first row, or of its second.
// Words lie at a multiple of their bytes.
template <int N>
__device__ __forceinline__ void mask_bits(float (&s)[N], const unsigned* low,
                                          const unsigned* high) {
    constexpr int WORDS = N / 16;  // of 32 columns each
    static_assert(N % 16 == 0 && WORDS <= 4, "whole words");
    const unsigned* rows[2] = {low, high};
    unsigned first = threadIdx.x % 4 * 2, word[2][WORDS];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if constexpr (WORDS == 4) {
            uint4 x = *reinterpret_cast<const uint4*>(rows[r]);
            word[r][0] = x.x, word[r][1] = x.y, word[r][2] = x.z, word[r][3] = x.w;
        } else if constexpr (WORDS == 2) {
            uint2 x = *reinterpret_cast<const uint2*>(rows[r]);
            word[r][0] = x.x, word[r][1] = x.y;
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) word[r][i] = rows[r][i];
        }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        unsigned bits = word[i / 2 % 2][i / 16] >> first;
        if (!(bits & 1u << (i / 4 % 4 * 8 + i % 2))) s[i] = minus_infinity();
    }
}

}  // namespace attn
