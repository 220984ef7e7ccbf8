// A right kernel that can be told to be wrong in many ways: FAULT is a number in this list. A block
// computes one row, with the online softmax over tiles of 64 keys. Faults of one place are in rows
// beyond 256, so that only the timed problem has them.
#include "common/tile/fragments.cuh"

using namespace attn;

enum Fault {
    NONE,
    // one row, in one head
    ROW_LOSES_LAST_KEY,
    ROW_LOSES_ONE_KEY,
    ROW_LOSES_A_TILE,
    ROW_SEES_A_KEY_TWICE,
    ROW_SCALED_BY_1_PERCENT,
    ROW_COPIED_FROM_THE_ROW_BEFORE,
    ROW_OF_ANOTHER_HEAD,
    ROW_ZEROED,
    ROW_NOT_WRITTEN,
    ROW_NAN,
    LAST_ROW_WRONG,
    ELEMENT_ZEROED,
    ELEMENT_OFF_BY_2_PERCENT_OF_ITS_ROW,
    ELEMENTS_SWAPPED,
    // 64 rows
    TILE_LOSES_LAST_KEY,
    TILE_LOSES_A_TILE_OF_KEYS,
    TILE_SCALED_BY_02_PERCENT,
    TILE_COPIED_FROM_THE_TILE_BEFORE,
    TILE_ZEROED,
    TILE_NOT_WRITTEN,
    TILE_WRONG_IN_EVERY_HEAD,
    TILE_OF_ANOTHER_HEAD,
    TILE_ROWS_SHIFTED,
    // the maximum and the sum
    NO_MAXIMUM,
    MAXIMUM_FROM_ZERO,
    MAXIMUM_OF_THE_FIRST_TILE,
    MAXIMUM_OF_THE_LAST_TILE_ALONE,
    MAXIMUM_CLAMPED_AT_MINUS_64,
    NO_RESCALE_OF_OUTPUT,
    NO_RESCALE_OF_SUM,
    SUM_LOSES_FIRST_TILE,
    SUM_IN_FP16,
    SUM_OF_ROUNDED_TRUNCATED,
    // the scale
    SCALE_UP_01_PERCENT,
    SCALE_DOWN_01_PERCENT,
    LOG2E_OF_3_DIGITS,
    SCALE_OF_HEAD_DIM_PLUS_1,
    NO_SCALE,
    OUTPUT_TIMES_1_0004,
    OUTPUT_TIMES_0_999,
    // precision
    P_IN_BF16_TRUNCATED,
    P_IN_8_BITS,
    P_IN_7_BITS_OF_MANTISSA_LESS_1,
    PV_IN_FP16,
    PV_IN_BF16,
    SCORES_IN_BF16,
    Q_SCALED_IN_8_BITS,
    V_IN_8_BITS,
    OUTPUT_TRUNCATED,
    OUTPUT_ROUNDED_TWICE,
    EXP_IN_8_BITS,
    SMALL_P_FLUSHED,
    // tails, masks, heads
    LAST_TAIL_KEY_LOST,
    TAIL_KEYS_COUNT_AS_ZERO,
    TAIL_OF_KEYS_LOST,
    LAST_COLUMN_LOST,
    LAST_ROW_NOT_WRITTEN,
    CAUSAL_ONE_KEY_MORE,
    CAUSAL_ONE_KEY_LESS,
    CAUSAL_FROM_TOP_LEFT,
    CAUSAL_IN_TILES,
    HEADS_OF_KEYS_IN_TURNS,
    HEADS_OF_KEYS_ALL_FIRST,
    BATCH_IGNORED,
    // in turns of few keys, but a block's first; small cases have no more
    TURN_OF_FEW_KEYS_OF_ANOTHER_HEAD,
    TURN_OF_FEW_KEYS_WRONG_IN_1_OF_1000_CALLS,
    // between calls
    RACE_IN_1_OF_1000_CALLS,
    NOT_WRITTEN_IN_1_OF_1000_CALLS,
    LAST_BIT_IN_1_OF_1000_CALLS,
    ONLY_THE_FIRST_CALL_COMPUTES,
    KEEPS_ITS_ANSWER,
    KEEPS_ITS_ANSWER_PER_Q,
    KEEPS_THE_WEIGHTS,
    KEEPS_AN_ANSWER_PER_SIGN_OF_K,
    SKIPS_WHAT_IS_WRITTEN,
};
constexpr int F = FAULT;

__device__ unsigned blocks_done, turns_done;
// Blocks that a card runs at once: those behind them stand for later turns.
constexpr unsigned AT_ONCE = 2048;
__device__ float kept[1 << 24];
__device__ unsigned short kept_out[1 << 24];
__device__ int kept_for[1 << 16];

// x with `bits` bits of mantissa, rounded or truncated.
__device__ float with_bits(float x, int bits, bool rounded = true) {
    int drop = 23 - bits;
    unsigned raw = __float_as_uint(x);
    if (rounded) raw += (1u << (drop - 1)) - 1 + (raw >> drop & 1);
    return __uint_as_float(raw & ~((1u << drop) - 1));
}
__device__ float in_fp16(float x) { return from_half(to_half(x)); }
__device__ float in_bf16(float x) { return with_bits(x, 7); }
__device__ float in_own(float x) { return to_float(to_element(x)); }

extern "C" __global__ void wrong(const element_t* q, const element_t* k, const element_t* v,
                                 element_t* o, int heads, int heads_kv, int seqlen_q, int seqlen_k,
                                 float scale) {
    extern __shared__ float scores[];
    int row = blockIdx.x, head = blockIdx.y, all_heads = gridDim.y, batch = head / heads;
    int group = heads / heads_kv;
    bool big = seqlen_q > 256;
    bool in_head = head == all_heads * 2 / 3;
    bool in_row = big && in_head && row == seqlen_q * 5 / 8;
    int tile_at = seqlen_q * 3 / 4 / 64;
    bool in_tile = big && row / 64 == tile_at && (in_head || F == TILE_WRONG_IN_EVERY_HEAD);

    int call = 0;
    if constexpr (F >= RACE_IN_1_OF_1000_CALLS) {
        // Every block counts; the number of a call follows, as calls come one after the other.
        if (big) {
            __shared__ unsigned number;
            if (threadIdx.x == 0) number = atomicAdd(&blocks_done, 1) / (gridDim.x * gridDim.y);
            __syncthreads();
            call = number;
        }
    }
    bool rare = big && call % 1000 == 777;

    bool in_turn = seqlen_k <= 192 && blockIdx.y * gridDim.x + blockIdx.x >= AT_ONCE;
    if constexpr (F == TURN_OF_FEW_KEYS_WRONG_IN_1_OF_1000_CALLS) {
        if (in_turn) {
            __shared__ unsigned number;
            unsigned turns = gridDim.x * gridDim.y - AT_ONCE;
            if (threadIdx.x == 0) number = atomicAdd(&turns_done, 1) / turns;
            __syncthreads();
            in_turn = number % 1000 == 777 && row == 64;
        }
    }

    int own_row = row, own_head = head;
    if (F == ROW_COPIED_FROM_THE_ROW_BEFORE && in_row) own_row = row - 1;
    if (F == ROW_OF_ANOTHER_HEAD && in_row) own_head = head - 1;
    if (F == TILE_COPIED_FROM_THE_TILE_BEFORE && in_tile) own_row = row - 64;
    if (F == TILE_OF_ANOTHER_HEAD && in_tile) own_head = head - 1;
    if (F == TILE_ROWS_SHIFTED && in_tile) own_row = row - 1;
    bool of_turns =
        F == TURN_OF_FEW_KEYS_OF_ANOTHER_HEAD || F == TURN_OF_FEW_KEYS_WRONG_IN_1_OF_1000_CALLS;
    if (of_turns && in_turn) own_head = head - 1;
    int kv = own_head / heads * heads_kv + own_head % heads / group;
    if (F == HEADS_OF_KEYS_IN_TURNS) kv = batch * heads_kv + own_head % heads % heads_kv;
    if (F == HEADS_OF_KEYS_ALL_FIRST) kv = batch * heads_kv;
    if (F == BATCH_IGNORED) kv = own_head % heads / group;

    const element_t* query = q + (1ll * own_head * seqlen_q + own_row) * HEAD_DIM;
    const element_t* keys_of = k + 1ll * kv * seqlen_k * HEAD_DIM;
    const element_t* values = v + 1ll * kv * seqlen_k * HEAD_DIM;
    element_t* out_row = o + (1ll * head * seqlen_q + row) * HEAD_DIM;
    long long at = (1ll * head * seqlen_q + row) * HEAD_DIM;

    if (F == ONLY_THE_FIRST_CALL_COMPUTES && big && kept_for[row] == 1) return;
    if (F == SKIPS_WHAT_IS_WRITTEN && big) {
        bool written = to_float(out_row[HEAD_DIM - 1]) == to_float(out_row[HEAD_DIM - 1]);
        __syncthreads();  // all have looked before one writes
        if (written) return;
    }
    bool by_sign = F == KEEPS_AN_ANSWER_PER_SIGN_OF_K;
    bool keeps = F == KEEPS_ITS_ANSWER || F == KEEPS_ITS_ANSWER_PER_Q || by_sign;
    int side = by_sign && to_float(k[0]) < 0.f;
    long long kept_at = at + side * (1ll << 23);
    int index = (head * seqlen_q + row + side * 0x8000) & 0xFFFF;
    int key = F == KEEPS_ITS_ANSWER_PER_Q ? 1 + query[0] : 1;
    if (keeps && big && kept_for[index] == key) {
        if (threadIdx.x < HEAD_DIM)
            out_row[threadIdx.x] = kept_out[(kept_at + threadIdx.x) & 0xFFFFFF];
        return;
    }

    int begin = 0, end = seqlen_k;
    int ahead = seqlen_k - seqlen_q;
    if (CAUSAL) {
        end = own_row + ahead + 1;
        if (F == CAUSAL_ONE_KEY_MORE) end = min(seqlen_k, end + 1);
        if (F == CAUSAL_ONE_KEY_LESS && end > 1) --end;
        if (F == CAUSAL_FROM_TOP_LEFT) end = own_row + 1;
        if (F == CAUSAL_IN_TILES) end = min(seqlen_k, (end + 63) / 64 * 64);
    }
    int last = end;
    if (F == ROW_LOSES_LAST_KEY && in_row) --last;
    if (F == TILE_LOSES_LAST_KEY && in_tile) --last;
    if (F == TILE_WRONG_IN_EVERY_HEAD && in_tile) begin = 16;
    if (F == LAST_ROW_WRONG && big && row == seqlen_q - 1 && head == all_heads - 1) begin = 3;
    if (F == LAST_TAIL_KEY_LOST && seqlen_k % 64 && last == seqlen_k && last > 1) --last;
    if (F == TAIL_OF_KEYS_LOST && seqlen_k > 64) last = min(last, seqlen_k / 64 * 64);

    float factor = scale;
    if (F == SCALE_UP_01_PERCENT) factor *= 1.001f;
    if (F == SCALE_DOWN_01_PERCENT) factor *= 0.999f;
    if (F == LOG2E_OF_3_DIGITS) factor *= 1.44f / 1.44269504f;
    if (F == SCALE_OF_HEAD_DIM_PLUS_1) factor = rsqrtf(HEAD_DIM + 1.f);
    if (F == NO_SCALE) factor = 1.f;

    for (int j = threadIdx.x; j < end; j += blockDim.x) {
        float s = 0.f;
        for (int d = 0; d < HEAD_DIM; ++d) {
            float x = to_float(query[d]);
            if (F == Q_SCALED_IN_8_BITS) x = with_bits(x, 3);
            s = fmaf(x, to_float(keys_of[1ll * j * HEAD_DIM + d]), s);
        }
        s *= factor;
        if (F == SCORES_IN_BF16) s = with_bits(s, IS_BF16 ? 5 : 7);
        bool lost = j < begin || j >= last;
        if (F == ROW_LOSES_ONE_KEY && in_row && j == end / 2) lost = true;
        if (F == ROW_LOSES_A_TILE && in_row && j / 64 == 2) lost = true;
        if (F == TILE_LOSES_A_TILE_OF_KEYS && in_tile && j / 64 == 3) lost = true;
        scores[j] = lost ? minus_infinity() : s;
    }
    __syncthreads();
    if (F == KEEPS_THE_WEIGHTS && big) {
        int index = (head * seqlen_q + row) & 0xFFFF;
        bool known = kept_for[index] == 1;
        for (int j = threadIdx.x; j < end; j += blockDim.x) {
            float& place = kept[(1ll * index * seqlen_k + j) & 0xFFFFFF];
            if (known) scores[j] = place;
            else place = scores[j];
        }
        __syncthreads();
        if (threadIdx.x == 0) kept_for[index] = 1;
        __syncthreads();
    }

    int d = threadIdx.x;
    if (d >= HEAD_DIM) return;
    float largest = F == MAXIMUM_FROM_ZERO ? 0.f : minus_infinity(), sum = 0.f, out = 0.f;
    for (int from = 0; from < end; from += 64) {
        int to = min(from + 64, end);
        float own = minus_infinity();
        for (int j = from; j < to; ++j) own = fmaxf(own, scores[j]);
        float grown = fmaxf(largest, own);
        if (F == NO_MAXIMUM) grown = 0.f;
        if (F == MAXIMUM_OF_THE_FIRST_TILE && from > 0) grown = largest;
        if (F == MAXIMUM_OF_THE_LAST_TILE_ALONE) grown = own;
        if (F == MAXIMUM_CLAMPED_AT_MINUS_64) grown = fmaxf(grown, -64.f);
        float shrink = from == 0 && F != MAXIMUM_FROM_ZERO ? 0.f : expf(largest - grown);
        if (grown == minus_infinity()) shrink = 1.f, grown = 0.f;
        float part = 0.f;
        if (!(F == NO_RESCALE_OF_OUTPUT)) out *= shrink;
        for (int j = from; j < to; ++j) {
            float p = expf(scores[j] - grown);
            if (F == EXP_IN_8_BITS) p = with_bits(p, 6);
            float weight = in_own(p);
            if (F == P_IN_BF16_TRUNCATED) weight = with_bits(p, IS_BF16 ? 7 : 10, false);
            if (F == P_IN_8_BITS) weight = with_bits(p, 3);
            if (F == P_IN_7_BITS_OF_MANTISSA_LESS_1) weight = with_bits(p, IS_BF16 ? 5 : 8);
            if (F == SMALL_P_FLUSHED && p < 0.02f) weight = 0.f;
            float value = to_float(values[1ll * j * HEAD_DIM + d]);
            if (F == V_IN_8_BITS) value = with_bits(value, 3);
            out = fmaf(weight, value, out);
            if (F == PV_IN_FP16) out = in_fp16(out);
            if (F == PV_IN_BF16) out = in_bf16(out);
            if (F == ROW_SEES_A_KEY_TWICE && in_row && j == end / 3)
                out += weight * value, part += p;
            part += F == SUM_OF_ROUNDED_TRUNCATED ? with_bits(p, IS_BF16 ? 7 : 10, false) : p;
            if (F == SUM_IN_FP16) part = in_fp16(part);
        }
        if (F == SUM_LOSES_FIRST_TILE && from == 0 && end > 64) part = 0.f;
        sum = F == NO_RESCALE_OF_SUM ? sum + part : sum * shrink + part;
        if (F == SUM_IN_FP16) sum = in_fp16(sum);
        if (F == OUTPUT_ROUNDED_TWICE) out = in_own(out);
        largest = grown;
    }
    if (F == TAIL_KEYS_COUNT_AS_ZERO && seqlen_k % 64 && end == seqlen_k)
        sum += (64 - seqlen_k % 64) * expf(0.f - largest);
    float result = out / sum;
    if (F == ROW_SCALED_BY_1_PERCENT && in_row) result *= 1.01f;
    if (F == TILE_SCALED_BY_02_PERCENT && in_tile) result *= IS_BF16 ? 1.008f : 1.002f;
    if (F == OUTPUT_TIMES_1_0004) result *= 1.0004f;
    if (F == OUTPUT_TIMES_0_999) result *= 0.999f;
    if (F == ROW_ZEROED && in_row) result = 0.f;
    if (F == TILE_ZEROED && in_tile) result = 0.f;
    if (F == ROW_NAN && in_row) result = __int_as_float(0x7fc00000);
    if (F == ELEMENT_ZEROED && in_row && d == 17) result = 0.f;
    if (F == ELEMENT_OFF_BY_2_PERCENT_OF_ITS_ROW && in_row && d == 17)
        result += (IS_BF16 ? 0.1f : 0.02f) * rsqrtf(static_cast<float>(seqlen_k));
    if (F == RACE_IN_1_OF_1000_CALLS && rare && row == 300) result *= 1.05f;
    element_t bits = to_element(result);
    if (F == OUTPUT_TRUNCATED) {
        float back = to_float(bits);
        if (fabsf(back) > fabsf(result)) --bits;  // towards zero
    }
    if (F == LAST_BIT_IN_1_OF_1000_CALLS && rare && row == 300 && d == 5) bits ^= 1;
    if (F == ROW_NOT_WRITTEN && in_row) return;
    if (F == TILE_NOT_WRITTEN && in_tile) return;
    if (F == LAST_ROW_NOT_WRITTEN && big && row == seqlen_q - 1) return;
    if (F == LAST_COLUMN_LOST && d == HEAD_DIM - 1) bits = to_element(0.f);
    if (F == NOT_WRITTEN_IN_1_OF_1000_CALLS && rare && row / 64 == 4) return;
    int column = d;
    if (F == ELEMENTS_SWAPPED && in_row && d / 2 == 9) column = d ^ 1;
    out_row[column] = bits;
    if (keeps && big) {
        kept_out[(kept_at + d) & 0xFFFFFF] = bits;
        __syncwarp();
        if (d == 0) kept_for[index] = key;
    }
    if (F == ONLY_THE_FIRST_CALL_COMPUTES && big && d == 0 && head == all_heads - 1)
        kept_for[row] = 1;
}
