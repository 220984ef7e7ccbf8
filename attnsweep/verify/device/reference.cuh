// Attention in float64, for compare.cu. It shares no code with the kernels that it judges.
#pragma once

// ---- storage to float64, exactly ----
struct Fp16 {
    using Bits = unsigned short;
    static constexpr double HALF_ULP = 1. / 2048;
    // Exact for 0, for NaN, and for values of this type of at least 2^-14 in size.
    static __device__ Bits exactly(float x) {
        unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
        if (size > 0x7F800000) return 0x7E00;
        return sign | (size ? (size >> 13) - (112 << 10) : 0);
    }
    static __device__ double value(Bits bits) {
        int exponent = bits >> 10 & 31, mantissa = bits & 1023;
        double magnitude = exponent == 0
                               ? mantissa * (1. / (1 << 24))
                               : __hiloint2double((exponent + 1008) << 20 | mantissa << 10, 0);
        if (exponent == 31) magnitude = __hiloint2double(0x7FF00000 | mantissa << 10, 0);
        return bits & 0x8000 ? -magnitude : magnitude;
    }
};
struct Bf16 {
    using Bits = unsigned short;
    static constexpr double HALF_ULP = 1. / 256;
    static __device__ Bits exactly(float x) { return __float_as_uint(x) >> 16; }
    static __device__ double value(Bits bits) {
        return __uint_as_float(static_cast<unsigned>(bits) << 16);
    }
};
struct Fp32 {
    using Bits = unsigned;
    static constexpr double HALF_ULP = 1. / (1 << 24);
    static __device__ Bits exactly(float x) { return __float_as_uint(x); }
    static __device__ double value(Bits bits) { return __uint_as_float(bits); }
};
struct E4m3 {
    using Bits = unsigned char;
    static __device__ Bits exactly(float) { return 0x7F; }  // no cache is gathered in it
    static __device__ double value(Bits bits) {
        int exponent = bits >> 3 & 15, mantissa = bits & 7;
        double magnitude = exponent == 0
                               ? mantissa * (1. / 512)
                               : __hiloint2double((exponent + 1016) << 20 | mantissa << 17, 0);
        if ((bits & 127) == 127) magnitude = __hiloint2double(0x7FF80000, 0);
        return bits & 0x80 ? -magnitude : magnitude;
    }
};
struct Fp64 {
    using Bits = unsigned long long;
    static constexpr double HALF_ULP = 0.;
    static __device__ double value(Bits bits) {
        return __hiloint2double(static_cast<int>(bits >> 32), static_cast<int>(bits));
    }
};

// Keys that no query sees may hold NaN, which a weight of 0 would not take away.
__device__ double unless_nan(double x) { return x == x ? x : 0.; }

// ---- the scales of a head's rows ----
// One of each head of keys and its queries, or of each block of a head of k and v. Null is 1.
struct Scales {
    const float *q, *k, *v;
    int block, blocks;  // keys of a block; blocks of a head
    __device__ double of_q(int) const { return q ? *q : 1.; }
    __device__ double of_k(int row) const { return k ? k[row / block] : 1.; }
    __device__ double of_v(int row) const { return v ? v[row / block] : 1.; }
    __device__ Scales at(long long head_kv) const {
        return {q ? q + head_kv : q, k ? k + head_kv * blocks : k, v ? v + head_kv * blocks : v,
                block, blocks};
    }
};

__device__ double over_warp(double x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

// ---- attention in float64 ----
constexpr int TILE = 64;         // queries of a block, and keys of a step
constexpr int CHUNK = 16;        // columns of Q and K, or keys of V, in shared memory
constexpr int PITCH = TILE + 1;  // doubles between rows: columns then begin in other banks
constexpr int LANES = 16;        // threads along the keys; each has 4 x 4 scores, 16 apart

// Which tiles of queries are looked at: the first, the last, and each `every`-th.
struct Sample {
    int every, phase;
    __device__ bool has(int tile, int tiles) const {
        return tile % every == phase || tile == 0 || tile == tiles - 1;
    }
};

// What items of the batch see, if there is any of it: keys from the first to the one after the last
// of each; a mask (seqlen_q, seqlen_k), of each item if they are `apart`; or those of the sequence
// of a query, of `sequences` that begin, and end, at cu_q and cu_k.
struct Seen {
    const int* ranges;
    const unsigned char* mask;
    int heads;  // of queries, of an item
    int apart;
    const int *cu_q, *cu_k;
    int sequences;
    // The keys from `first` on, before `end`, of those from row + low to row + high.
    __device__ void keys_of(long long head, int row, int low, int high, int seqlen_k, int& first,
                            int& end) const {
        first = 0, end = seqlen_k;
        if (ranges) first = ranges[2 * (head / heads)], end = ranges[2 * (head / heads) + 1];
        if (sequences) {
            int own = 0;
            while (own < sequences - 1 && row >= cu_q[own + 1]) ++own;
            first = cu_k[own], end = cu_k[own + 1], row += end - cu_q[own + 1];
        }
        first = max(first, row + low), end = min(end, row + high + 1);
    }
    __device__ bool pair(long long head, int row, int column, int seqlen_q, int seqlen_k) const {
        long long above = (apart ? head / heads * seqlen_q : 0) + row;
        return !mask || (row < seqlen_q && mask[above * seqlen_k + column]);
    }
};

// What changes scaled scores: softcap, 0 of none; a bias (seqlen_q, seqlen_k), of each item and
// head that has its own, whose rows are a multiple of 8 elements apart, and which is added in
// float32, as PyTorch does; and a sink of each head of an item. Null is none.
struct Scores {
    double softcap;
    const void* bias;
    int of_item, of_head;
    const float* sinks;
    int heads;  // of queries, of an item
    template <class T>
    __device__ double of(double s, long long head, int row, int column, int seqlen_q,
                         int seqlen_k) const {
        if (softcap > 0) s = softcap * tanh(s / softcap);
        if (!bias || row >= seqlen_q) return s;
        long long own = of_item ? head / heads : 0;
        if (of_head) own = own * heads + head % heads;
        long long at = (own * seqlen_q + row) * ((seqlen_k + 7) / 8 * 8) + column;
        return static_cast<float>(s + T::value(static_cast<const typename T::Bits*>(bias)[at]));
    }
};

// Where a call's tensors are; lse is one that is judged. verify/compare.py has both structs too.
struct Given {
    const void *q, *k, *v, *o;
    const float *of_q, *of_k, *of_v;
    const int* key_range;
    const unsigned char* mask;
    const int *cu_q, *cu_k;
    const void* bias;
    const float *sinks, *lse;
};
// What calls of a problem have in common. Query i sees keys from i + low to i + high.
struct Common {
    int group, seqlen_q, seqlen_k, head_dim, value_dim, low, high, block, blocks, heads, apart;
    int sequences, of_item, of_head;
    double scale, softcap;
    __device__ Scales scales(const Given& call) const {
        return {call.of_q, call.of_k, call.of_v, block, blocks};
    }
    __device__ Seen seen(const Given& call) const {
        return {call.key_range, call.mask, heads, apart, call.cu_q, call.cu_k, sequences};
    }
    __device__ Scores scores(const Given& call) const {
        return {softcap, call.bias, of_item, of_head, call.sinks, heads};
    }
};

// `columns` of the output for 64 queries of one head, with the online softmax. `lse`, if there is
// one, gets the natural logarithm of the sum of the exponentials. Rows of q and k have head_dim
// elements, those of v and the output value_dim.
template <class T, int COLUMNS>
__device__ void attend(const Given& call, const Common& of, double* out, double* lse,
                       Sample sample) {
    int group = of.group, seqlen_q = of.seqlen_q, seqlen_k = of.seqlen_k, low = of.low;
    int head_dim = of.head_dim, value_dim = of.value_dim, high = of.high;
    double scale = of.scale;
    Seen keys = of.seen(call);
    Scores how = of.scores(call);
    extern __shared__ double shared[];
    using Bits = typename T::Bits;
    double *p = shared, *q_chunk = p + TILE * PITCH, *k_chunk = q_chunk + CHUNK * PITCH;
    double* v_chunk = q_chunk;  // CHUNK x COLUMNS, when Q and K are done with
    int tiles = (seqlen_q + TILE - 1) / TILE, parts = (value_dim + COLUMNS - 1) / COLUMNS;
    if (!sample.has(blockIdx.x % tiles, tiles)) return;
    int first = blockIdx.x % tiles * TILE, begin = blockIdx.x / tiles % parts * COLUMNS;
    long long head = blockIdx.x / tiles / parts;
    const Bits* q = static_cast<const Bits*>(call.q) + head * seqlen_q * head_dim;
    const Bits* k = static_cast<const Bits*>(call.k) + head / group * seqlen_k * head_dim;
    const Bits* v = static_cast<const Bits*>(call.v) + head / group * seqlen_k * value_dim;
    Scales scales = of.scales(call).at(head / group);
    int thread = threadIdx.x, y = thread / LANES, x = thread % LANES;
    double sum[4], largest[4], acc[4][COLUMNS / LANES];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[i] = 0, largest[i] = -1e300;
#pragma unroll
        for (int j = 0; j < COLUMNS / LANES; ++j) acc[i][j] = 0;
    }
    // By constants alone: what is indexed otherwise lies in memory.
    int first_key[4], end_key[4], least, end, unused;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
        int begins, ends;
        keys.keys_of(head, first + y + 16 * i, low, high, seqlen_k, begins, ends);
#pragma unroll
        for (int n = 0; n < 4; ++n)
            if (i == n) first_key[n] = begins, end_key[n] = ends;
    }
    // All keys of the sequences of a tile: a later one may have none for many queries.
    int open = keys.sequences ? 1 << 29 : 0, last = min(first + TILE, seqlen_q) - 1;
    keys.keys_of(head, first, low - open, high, seqlen_k, least, unused);
    keys.keys_of(head, last, low, high + open, seqlen_k, unused, end);
    for (int key = max(0, least) / TILE * TILE; key < end; key += TILE) {
        double s[4][4] = {};
        for (int d = 0; d < head_dim; d += CHUNK) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int row = y + 16 * i, column = d + x;
                bool inside = column < head_dim;
                q_chunk[x * PITCH + row] =
                    inside && first + row < seqlen_q
                        ? T::value(q[static_cast<long long>(first + row) * head_dim + column]) *
                              scales.of_q(first + row)
                        : 0.;
                k_chunk[x * PITCH + row] =
                    inside && key + row < seqlen_k
                        ? T::value(k[static_cast<long long>(key + row) * head_dim + column]) *
                              scales.of_k(key + row)
                        : 0.;
            }
            __syncthreads();
#pragma unroll 4
            for (int c = 0; c < CHUNK; ++c) {
                double a[4], b[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i] = q_chunk[c * PITCH + y + 16 * i];
#pragma unroll
                for (int j = 0; j < 4; ++j) b[j] = k_chunk[c * PITCH + x + 16 * j];
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) s[i][j] = fma(a[i], b[j], s[i][j]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) p[(x + 16 * j) * PITCH + y + 16 * i] = s[i][j];
        // A thread's own sixteen, one by one: unrolled, compilation took twice as long.
#pragma unroll 1
        for (int own = 0; own < 16; ++own) {
            int i = own / 4, row = first + y + 16 * i, column = key + x + own % 4 * 16;
            double& one = p[(x + own % 4 * 16) * PITCH + y + 16 * i];
            int begins = first_key[0], ends = end_key[0];
#pragma unroll
            for (int n = 1; n < 4; ++n)
                if (i == n) begins = first_key[n], ends = end_key[n];
            bool seen = column >= begins && column < ends &&
                        keys.pair(head, row, column, seqlen_q, seqlen_k);
            one = seen ? how.of<T>(one * scale, head, row, column, seqlen_q, seqlen_k) : -1e300;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            double grown = largest[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                s[i][j] = p[(x + 16 * j) * PITCH + y + 16 * i];
                grown = fmax(grown, s[i][j]);
            }
#pragma unroll
            for (int lanes = LANES / 2; lanes > 0; lanes /= 2)
                grown = fmax(grown, __shfl_xor_sync(0xffffffffu, grown, lanes));
            double shrink = exp(largest[i] - grown), more = 0;
            largest[i] = grown;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                double e = s[i][j] > -1e299 ? exp(s[i][j] - grown) : 0.;
                p[(x + 16 * j) * PITCH + y + 16 * i] = e;
                more += e;
            }
#pragma unroll
            for (int lanes = LANES / 2; lanes > 0; lanes /= 2)
                more += __shfl_xor_sync(0xffffffffu, more, lanes);
            sum[i] = sum[i] * shrink + more;
#pragma unroll
            for (int j = 0; j < COLUMNS / LANES; ++j) acc[i][j] *= shrink;
        }
        for (int from = 0; from < TILE; from += CHUNK) {
            __syncthreads();
            for (int at = thread; at < CHUNK * COLUMNS; at += LANES * LANES) {
                int row = key + from + at / COLUMNS, column = begin + at % COLUMNS;
                v_chunk[at] = row < seqlen_k && column < value_dim
                                  ? unless_nan(T::value(
                                        v[static_cast<long long>(row) * value_dim + column])) *
                                        scales.of_v(row)
                                  : 0.;
            }
            __syncthreads();
#pragma unroll 4
            for (int c = 0; c < CHUNK; ++c) {
                double a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i] = p[(from + c) * PITCH + y + 16 * i];
#pragma unroll
                for (int j = 0; j < COLUMNS / LANES; ++j) {
                    double b = v_chunk[c * COLUMNS + x + 16 * j];
#pragma unroll
                    for (int i = 0; i < 4; ++i) acc[i][j] = fma(a[i], b, acc[i][j]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        long long row = first + y + 16 * i;
        if (row >= seqlen_q) continue;
        if (how.sinks) {  // one more score, without a value
            double sink = how.sinks[head % how.heads], grown = fmax(largest[i], sink);
            double shrink = exp(largest[i] - grown);
            sum[i] = sum[i] * shrink + exp(sink - grown), largest[i] = grown;
#pragma unroll
            for (int j = 0; j < COLUMNS / LANES; ++j) acc[i][j] *= shrink;
        }
#pragma unroll
        for (int j = 0; j < COLUMNS / LANES; ++j) {
            int column = begin + x + 16 * j;
            if (column < value_dim)
                out[(head * seqlen_q + row) * value_dim + column] =
                    sum[i] > 0. ? acc[i][j] / sum[i] : 0.;  // a query that sees no key
        }
        if (lse && begin == 0 && x == 0)
            lse[head * seqlen_q + row] = (sum[i] > 0. ? largest[i] : 0.) + log(sum[i]);
    }
}

// Sums each of COUNT values over as many lanes in a row: a lane gets the sum of value lane % COUNT.
// They share them out at each step: COUNT - 1 exchanges, where a sum in all lanes takes five each.
template <int COUNT>
__device__ double shared_out(const double (&values)[COUNT]) {
    double kept[COUNT / 2];
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
        bool upper = threadIdx.x & COUNT / 2;
        double given = upper ? values[i] : values[i + COUNT / 2];
        kept[i] = upper ? values[i + COUNT / 2] : values[i];
        kept[i] += __shfl_xor_sync(0xffffffffu, given, COUNT / 2);
    }
    return shared_out(kept);
}
template <>
__device__ double shared_out(const double (&one)[1]) {
    return one[0];
}

__device__ double largest_of_warp(double x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x = fmax(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

// The output of one query by a block of 256 threads, of which each warp takes some of the keys.
// Returns where it is in shared memory; there is room for head_dim + 8 * (value_dim + 2) doubles.
template <class T>
__device__ const double* attend_row(const Given& call, const Common& of, long long head, int row) {
    int group = of.group, seqlen_q = of.seqlen_q, seqlen_k = of.seqlen_k, low = of.low;
    int head_dim = of.head_dim, value_dim = of.value_dim, high = of.high;
    double scale = of.scale;
    Seen keys = of.seen(call);
    Scores how = of.scores(call);
    extern __shared__ double shared[];
    using Bits = typename T::Bits;
    // A warp takes KEYS keys at once, whose reads are under way together; two lanes have the score
    // of each. With four keys, and a score in all lanes, it waited for reads and sums four times as
    // often.
    constexpr int WARPS = 8, KEYS = 16;
    double *q_row = shared, *parts = q_row + head_dim, *sums = parts + WARPS * value_dim;
    double* largests = sums + WARPS;
    const Bits* q = static_cast<const Bits*>(call.q) + (head * seqlen_q + row) * head_dim;
    const Bits* k = static_cast<const Bits*>(call.k) + head / group * seqlen_k * head_dim;
    const Bits* v = static_cast<const Bits*>(call.v) + head / group * seqlen_k * value_dim;
    Scales scales = of.scales(call).at(head / group);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first, end;
    double* own = parts + warp * value_dim;
    for (int d = threadIdx.x; d < head_dim; d += 256) q_row[d] = T::value(q[d]) * scales.of_q(row);
    for (int d = lane; d < value_dim; d += 32) own[d] = 0;
    __syncthreads();
    keys.keys_of(head, row, low, high, seqlen_k, first, end);
    double sum = 0, largest = -1e300;
    for (int key = max(0, first) + warp * KEYS; key < end; key += WARPS * KEYS) {
        double s[KEYS] = {};
        int last = end - 1 - key;  // the last of these keys that there is
#pragma unroll 2
        for (int d = lane; d < head_dim; d += 32) {
            const Bits* at = k + static_cast<long long>(key) * head_dim + d;
            double of_q = q_row[d];
#pragma unroll
            for (int i = 0; i < KEYS; ++i) s[i] += of_q * T::value(at[min(i, last) * head_dim]);
        }
        int mine = key + lane % KEYS;
        double score = shared_out(s);
        score += __shfl_xor_sync(0xffffffffu, score, KEYS);  // of the columns of other lanes
        bool seen = mine < end && keys.pair(head, row, mine, seqlen_q, seqlen_k);
        score =
            seen ? how.of<T>(score * scales.of_k(mine) * scale, head, row, mine, seqlen_q, seqlen_k)
                 : -1e300;
        double grown = fmax(largest, largest_of_warp(score)), shrink = exp(largest - grown);
        double weight = score > -1e299 ? exp(score - grown) : 0.;
        largest = grown;
        sum = sum * shrink + over_warp(lane < KEYS ? weight : 0.);
        weight *= scales.of_v(min(mine, end - 1));
#pragma unroll
        for (int i = 0; i < KEYS; ++i) s[i] = __shfl_sync(0xffffffffu, weight, i);
#pragma unroll 2
        for (int d = lane; d < value_dim; d += 32) {
            const Bits* at = v + static_cast<long long>(key) * value_dim + d;
            double all = own[d] * shrink;
#pragma unroll
            for (int i = 0; i < KEYS; ++i)
                all += s[i] * unless_nan(T::value(at[min(i, last) * value_dim]));
            own[d] = all;
        }
    }
    if (lane == 0) sums[warp] = sum, largests[warp] = largest;
    __syncthreads();
    for (int i = 0; i < WARPS; ++i) largest = fmax(largest, largests[i]);
    double sink = how.sinks ? how.sinks[head % how.heads] : -1e300;  // one more score, no value
    largest = fmax(largest, sink);
    sum = how.sinks ? exp(sink - largest) : 0.;
    for (int i = 0; i < WARPS; ++i) sum += sums[i] * exp(largests[i] - largest);
    for (int d = threadIdx.x; d < value_dim; d += 256) {
        double all = 0;
        for (int i = 0; i < WARPS; ++i)
            all += parts[i * value_dim + d] * exp(largests[i] - largest);
        parts[d] = sum > 0. ? all / sum : 0.;
    }
    __syncthreads();
    if (threadIdx.x == 0) sums[0] = sum > 0. ? largest + log(sum) : log(0.);
    return parts;
}
