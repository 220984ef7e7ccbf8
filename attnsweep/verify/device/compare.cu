// The judge, compiled for one dtype (DTYPE_FP16, _BF16, _FP32 or _E4M3): attention in float64, and
// how far an output is from it. It shares no code with the kernels that it judges.
// verify/compare.py launches it, and proves `reference` against NumPy's float64 in every process.
// It is compiled as three cubins beside one another, of PART 1, 2 and 3, or as one without PART.
//
// For a backward problem, the gradients in float64, from o and lse as given. The inputs of a mix
// then have dO negated in place of k and v.
//
// Tensors are contiguous: q (batch * heads, seqlen_q, head_dim), k (batch * heads_kv, seqlen_k,
// head_dim); v and o as k and q, but with rows of value_dim elements. Query i sees the keys i + low
// to i + high, of those in its item's key_range or its mask or its sequence, if there is one. Their
// scores are changed as Scores says. In e4m3 (q, k and v, while o is bf16), a stored value times
// its scale is the value.

#include "backward.cuh"
#include "reference.cuh"

// ---- which heads of keys are negated ----
__device__ unsigned long long mixed(unsigned long long x) {  // the finaliser of SplitMix64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}
// A mix of inputs: 0 has all as they were made, 1 has every k and v negated, any other number some
// heads of keys. verify/compare.py has the same function.
__device__ bool negated(unsigned long long mix, long long head_kv) {
    if (mix < 2) return mix;
    return mixed(mix ^ head_kv * 0x9E3779B97F4A7C15ull) >> 63;
}

// ---- how far an output is from it ----
// What judge finds in 64 rows of a head, and summary in all of them. Shares and gains as
// numerics.Measures has them.
struct Found {
    double nans;             // elements that are NaN, or whose reference is
    double squares;          // sum of the squares of the rows' errors
    double row, row_at;      // largest error of a row, and that row over all heads
    double element;          // largest error of an element beyond half an ulp, over the row's rms
    double row_gain;         // largest |gain| of a row
    double tile_gain;        // of 64 rows
    double gains, norm;      // sums of the rows' gains, and of ref^2
    double tilt, tilt_norm;  // sums of (out - ref)(tilted - ref), and of (tilted - ref)^2
};
constexpr int FOUND = sizeof(Found) / sizeof(double);

__device__ void take(Found& all, const Found& one) {
    all.nans += one.nans, all.squares += one.squares;
    if (one.row > all.row) all.row = one.row, all.row_at = one.row_at;
    all.element = fmax(all.element, one.element);
    all.row_gain = fmax(all.row_gain, one.row_gain);
    all.tile_gain = fmax(all.tile_gain, one.tile_gain);
    all.gains += one.gains, all.norm += one.norm;
    all.tilt += one.tilt, all.tilt_norm += one.tilt_norm;
}

// What a warp finds in one row. floor: the norm below which a row counts as this long.
template <class T>
__device__ Found of_row(const typename T::Bits* bits, const double* expected, const double* tilted,
                        int head_dim, double floor, long long row) {
    int lane = threadIdx.x % 32;
    double nans = 0, square = 0, norm = 0, along = 0, tilt = 0, tilt_norm = 0;
    for (int d = lane; d < head_dim; d += 32) {
        double ref = expected[d], out = T::value(bits[d]), off = out - ref;
        nans += off != off;  // also if the reference is NaN, which nothing equals
        square += off * off, norm += ref * ref, along += off * ref;
        if (tilted) {
            double slope = tilted[d] - ref;
            tilt += off * slope, tilt_norm += slope * slope;
        }
    }
    nans = over_warp(nans), square = over_warp(square), norm = over_warp(norm);
    along = over_warp(along), tilt = over_warp(tilt), tilt_norm = over_warp(tilt_norm);
    double length = fmax(sqrt(norm), floor), beyond = 0;
    for (int d = lane; d < head_dim; d += 32) {
        double ref = expected[d], off = fabs(T::value(bits[d]) - ref);
        beyond = fmax(beyond, off - T::HALF_ULP * fabs(ref));
    }
    Found one = {};
    one.nans = nans, one.row = sqrt(square) / length, one.row_at = row;
    one.squares = one.row * one.row;
    one.element = largest_of_warp(beyond) / (length / sqrt(static_cast<double>(head_dim)));
    double gain = along / (length * length);
    one.row_gain = fabs(gain), one.gains = gain;
    one.norm = norm, one.tilt = tilt, one.tilt_norm = tilt_norm;
    return one;
}

// A block judges 64 rows of a head, a warp one row after the other. expected: with the inputs as
// they were made, or negated; *mix says which a head has. In tiles outside the sample it only
// counts what is no finite number.
template <class T>
__device__ void compare(const void* o, const double* plain, const double* opposite,
                        const unsigned long long* mix, const double* tilted, Found* found,
                        int group, int seqlen_q, int head_dim, double floor, Sample sample) {
    extern __shared__ double shared[];
    Found* of_warp = reinterpret_cast<Found*>(shared);
    int tiles = (seqlen_q + TILE - 1) / TILE, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int warps = blockDim.x / 32;
    long long head = blockIdx.x / tiles;
    const double* expected = negated(*mix, head / group) ? opposite : plain;
    Found own = {};
    if (!sample.has(blockIdx.x % tiles, tiles)) expected = nullptr;
    for (int i = warp; i < TILE; i += warps) {
        int row = blockIdx.x % tiles * TILE + i;
        if (row >= seqlen_q) break;
        long long at = (head * seqlen_q + row) * head_dim;
        const typename T::Bits* bits = static_cast<const typename T::Bits*>(o) + at;
        if (!expected) {
            double nans = 0;
            for (int d = lane; d < head_dim; d += 32) nans += !(fabs(T::value(bits[d])) < 1e300);
            own.nans += over_warp(nans);
            continue;
        }
        take(own, of_row<T>(bits, expected + at, tilted ? tilted + at : nullptr, head_dim, floor,
                            head * seqlen_q + row));
    }
    if (lane == 0) of_warp[warp] = own;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < warps; ++i) take(own, of_warp[i]);
        int rows = min(TILE, seqlen_q - static_cast<int>(blockIdx.x % tiles) * TILE);
        own.tile_gain = fabs(own.gains) / sqrt(static_cast<double>(TILE) * rows);
        found[blockIdx.x] = own;
    }
}

#if DTYPE_E4M3
using In = E4m3;
using Out = Bf16;
#else
#if DTYPE_FP16
using In = Fp16;
#elif DTYPE_BF16
using In = Bf16;
#else
using In = Fp32;
#endif
using Out = In;
#endif
// Calls whose rows, or digests, are asked for together; verify/compare.py knows them too.
constexpr int TOGETHER = 16;
struct Calls {
    Given at[TOGETHER];
};
#if !PART || PART == 2
extern "C" __global__ void __launch_bounds__(256)
    reference_64(const __grid_constant__ Given call, const __grid_constant__ Common of, double* out,
                 double* lse, int every, int phase) {
    attend<In, 64>(call, of, out, lse, Sample{every, phase});
}
extern "C" __global__ void __launch_bounds__(256)
    reference_128(const __grid_constant__ Given call, const __grid_constant__ Common of,
                  double* out, double* lse, int every, int phase) {
    attend<In, 128>(call, of, out, lse, Sample{every, phase});
}
#endif
#if !PART || PART == 3
extern "C" __global__ void __launch_bounds__(256)
    backward_delta(const void* o, const void* d_o, double* delta, long long rows, int head_dim) {
    row_products<In>(o, d_o, delta, rows, head_dim);
}
extern "C" __global__ void __launch_bounds__(256)
    backward_queries(const void* q, const void* k, const void* v, const void* d_o, const float* lse,
                     const double* delta, double* dq, double* unused, int group, int seqlen_q,
                     int seqlen_k, int head_dim, double scale, int low, int high, const int* ranges,
                     int heads) {
    gradients<In, false>(q, k, v, d_o, lse, delta, dq, unused, group, seqlen_q, seqlen_k, head_dim,
                         scale, low, high, ranges, heads);
}
extern "C" __global__ void __launch_bounds__(256)
    backward_keys(const void* q, const void* k, const void* v, const void* d_o, const float* lse,
                  const double* delta, double* dk, double* dv, int group, int seqlen_q,
                  int seqlen_k, int head_dim, double scale, int low, int high, const int* ranges,
                  int heads) {
    gradients<In, true>(q, k, v, d_o, lse, delta, dk, dv, group, seqlen_q, seqlen_k, head_dim,
                        scale, low, high, ranges, heads);
}
#endif
#if !PART || PART == 1
// Some rows of every head, one after the other, so that one copy takes them to the host.
extern "C" __global__ void __launch_bounds__(256)
    gather(const double* all, const long long* rows, int count, int seqlen, int head_dim,
           long long elements, double* some) {
    for (long long i = blockIdx.x * 256 + threadIdx.x; i < elements; i += gridDim.x * 256) {
        long long row = i / head_dim, head = row / count;
        some[i] = all[(head * seqlen + rows[row % count]) * head_dim + i % head_dim];
    }
}

// Pages of a cache as tensors (batch * heads_kv, seqlen_k, head_dim) whose last row is an item's
// last key, and the range of each item. Rows of v have the first head_dim_v columns of a slot: it
// may be k. e4m3: that is how the cache is stored. Strides in elements.
extern "C" __global__ void __launch_bounds__(256)
    gather_pages(const void* k, const void* v, const int* table, const int* lengths, void* k_to,
                 void* v_to, int* ranges, int batch, int heads_kv, int seqlen_k, int head_dim,
                 int head_dim_v, int page_size, int blocks, long long page_stride, int slot_stride,
                 int head_stride, int e4m3) {
    long long elements = static_cast<long long>(batch) * heads_kv * seqlen_k * head_dim;
    long long first = blockIdx.x * 256 + threadIdx.x;
    for (long long i = first; i < elements; i += gridDim.x * 256) {
        int column = i % head_dim, row = i / head_dim % seqlen_k;
        long long head = i / head_dim / seqlen_k, item = head / heads_kv;
        int key = row - (seqlen_k - lengths[item]);
        long long at = 0;
        if (key >= 0)
            at = table[item * blocks + key / page_size] * page_stride +
                 key % page_size * static_cast<long long>(slot_stride) +
                 head % heads_kv * head_stride + column;
        for (int which = 0; which < 1 + (column < head_dim_v); ++which) {
            const void* from = which ? v : k;
            In::Bits bits = 0;
            if (key >= 0)
                bits = e4m3 ? In::exactly(E4m3::value(static_cast<const unsigned char*>(from)[at]))
                            : static_cast<const In::Bits*>(from)[at];
            const long long to = which ? i / head_dim * head_dim_v + column : i;
            static_cast<In::Bits*>(which ? v_to : k_to)[to] = bits;
        }
    }
    if (first < batch) {
        ranges[2 * first] = seqlen_k - lengths[first];
        ranges[2 * first + 1] = seqlen_k;
    }
}

extern "C" __global__ void __launch_bounds__(256)
    judge(const void* o, const double* plain, const double* opposite, const unsigned long long* mix,
          const double* tilted, Found* found, int group, int seqlen_q, int head_dim, double floor,
          int every, int phase) {
    compare<Out>(o, plain, opposite, mix, tilted, found, group, seqlen_q, head_dim, floor,
                 Sample{every, phase});
}
// Judges an output in float64, which exact maths on other inputs gave.
extern "C" __global__ void __launch_bounds__(256)
    judge_exact(const void* o, const double* plain, const double* opposite,
                const unsigned long long* mix, const double* tilted, Found* found, int group,
                int seqlen_q, int head_dim, double floor, int every, int phase) {
    compare<Fp64>(o, plain, opposite, mix, tilted, found, group, seqlen_q, head_dim, floor,
                  Sample{every, phase});
}

// Judges rows at random, one a block, or all if there are no more, on the inputs as they are now:
// attention of each is computed here. `seed` chooses them, and nothing knows it before the launch.
// rows: of all heads. Blocks with a y judge the y-th call. Two blocks an SM leave it the registers
// that it needs.
extern "C" __global__ void __launch_bounds__(256, 2)
    judge_rows(const __grid_constant__ Calls calls, const __grid_constant__ Common of, Found* found,
               unsigned long long seed, long long rows, double floor) {
    const Given& given = calls.at[blockIdx.y];
    int block = blockIdx.y * gridDim.x + blockIdx.x, value_dim = of.value_dim;
    long long at = mixed(seed ^ block * 0x9E3779B97F4A7C15ull) % rows;
    if (rows <= gridDim.x) at = blockIdx.x;
    const double* expected = attend_row<In>(given, of, at / of.seqlen_q, at % of.seqlen_q);
    if (threadIdx.x >= 32) return;
    const Out::Bits* bits = static_cast<const Out::Bits*>(given.o) + at * value_dim;
    Found one = of_row<Out>(bits, expected, nullptr, value_dim, floor, at);
    if (threadIdx.x > 0) return;
    const float* lse = given.lse;
    double right = expected[8 * value_dim];  // of a thread that wrote it
    one.tile_gain = lse && lse[at] != right ? fabs(lse[at] - right) / fmax(1., fabs(right)) : 0;
    if (!(one.tile_gain <= 1e300)) one.tile_gain = 1e300;
    found[block] = one;
}
#endif
#if !PART || PART == 3
// Judges rows of dQ, or of dK and dV, whose findings follow one another, as judge_rows does.
template <bool KEYS>
__device__ void judge_gradients(const void* q, const void* k, const void* v, const void* o,
                                const void* d_o, const float* lse, const void* of_ds,
                                const void* of_p, Found* found, int group, int seqlen_q,
                                int seqlen_k, int head_dim, double scale, int low, int high,
                                const int* ranges, int heads, unsigned long long seed,
                                long long rows, double floor, double floor_of_p) {
    long long at = mixed(seed ^ blockIdx.x * 0x9E3779B97F4A7C15ull) % rows;
    if (rows <= gridDim.x) at = blockIdx.x;
    int length = KEYS ? seqlen_k : seqlen_q;
    const double* expected =
        gradient_row<In, KEYS>(q, k, v, o, d_o, lse, at / length, at % length, group, seqlen_q,
                               seqlen_k, head_dim, scale, low, high, ranges, heads);
    if (threadIdx.x >= 32) return;
    for (int which = 0; which < 1 + KEYS; ++which) {
        const Out::Bits* bits = static_cast<const Out::Bits*>(which ? of_p : of_ds) + at * head_dim;
        Found one = of_row<Out>(bits, expected + which * head_dim, nullptr, head_dim,
                                which ? floor_of_p : floor, at);
        if (threadIdx.x == 0) found[which * gridDim.x + blockIdx.x] = one;
    }
}
extern "C" __global__ void __launch_bounds__(256, 2)
    judge_queries(const void* q, const void* k, const void* v, const void* o, const void* d_o,
                  const float* lse, const void* dq, const void* unused, Found* found, int group,
                  int seqlen_q, int seqlen_k, int head_dim, double scale, int low, int high,
                  const int* ranges, int heads, unsigned long long seed, long long rows,
                  double floor, double floor_of_p) {
    judge_gradients<false>(q, k, v, o, d_o, lse, dq, unused, found, group, seqlen_q, seqlen_k,
                           head_dim, scale, low, high, ranges, heads, seed, rows, floor,
                           floor_of_p);
}
extern "C" __global__ void __launch_bounds__(256, 2)
    judge_keys(const void* q, const void* k, const void* v, const void* o, const void* d_o,
               const float* lse, const void* dk, const void* dv, Found* found, int group,
               int seqlen_q, int seqlen_k, int head_dim, double scale, int low, int high,
               const int* ranges, int heads, unsigned long long seed, long long rows, double floor,
               double floor_of_p) {
    judge_gradients<true>(q, k, v, o, d_o, lse, dk, dv, found, group, seqlen_q, seqlen_k, head_dim,
                          scale, low, high, ranges, heads, seed, rows, floor, floor_of_p);
}
#endif
#if !PART || PART == 1
// Many tiles' findings as one, by a block of at most 256 threads, of a power of two.
__device__ void summarise(const Found* found, long long tiles, Found* all) {
    extern __shared__ double shared[];
    Found* of_thread = reinterpret_cast<Found*>(shared);
    Found own = {};
    for (long long i = threadIdx.x; i < tiles; i += blockDim.x) take(own, found[i]);
    of_thread[threadIdx.x] = own;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) take(of_thread[threadIdx.x], of_thread[threadIdx.x + half]);
    }
    if (threadIdx.x == 0) *all = of_thread[0];
}
// A block takes the tiles of its own call.
extern "C" __global__ void __launch_bounds__(256)
    summary(const Found* found, long long tiles, Found* all) {
    summarise(found + blockIdx.x * tiles, tiles, all + blockIdx.x);
}

// The largest |written - expected| / max(1, |expected|) of float32 values; NaN counts as 1e300. Of
// rows that are not in the sample it only looks for NaN.
extern "C" __global__ void __launch_bounds__(256)
    judge_lse(const float* written, const double* expected, long long count, double* worst,
              int seqlen_q, int every, int phase) {
    extern __shared__ double shared[];
    double own = 0;
    Sample sample = {every, phase};
    int tiles = (seqlen_q + TILE - 1) / TILE;
    for (long long i = threadIdx.x; i < count; i += blockDim.x) {
        if (!sample.has(i % seqlen_q / TILE, tiles)) {
            own = written[i] == written[i] ? own : 1e300;
            continue;
        }
        if (written[i] == expected[i]) continue;  // -infinity of a row that sees no key, too
        double off = fabs(written[i] - expected[i]) / fmax(1., fabs(expected[i]));
        own = off >= 0 ? fmax(own, off) : 1e300;
    }
    shared[threadIdx.x] = own;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < blockDim.x; ++i) own = fmax(own, shared[i]);
        *worst = own;
    }
}

// ---- watching many calls ----
// Sixteen bytes are read and written at once, and STEPS of them by a thread before it needs the
// first: with one word at a time, a thread waits for each. What lies at another address, and what
// is left over, goes word by word.
struct alignas(16) Four {
    unsigned at[4];
};
constexpr int STEPS = 2;
__device__ bool in_fours(const void* at) {
    return reinterpret_cast<unsigned long long>(at) % sizeof(Four) == 0;
}
// Gives `use` each word from words[first] on, with its place, and writes what it returns if
// `write`. All threads of gridDim.x blocks share the words. From the first word on, the compiler
// sees which places of four words are even.
template <class Use>
__device__ void each_word(unsigned* words, long long first, long long end, bool write, Use use) {
    long long fours = in_fours(words + first) && end > first ? (end - first) / 4 : 0;
    long long own = blockIdx.x * 256 + threadIdx.x, all = gridDim.x * 256;
    Four* at = reinterpret_cast<Four*>(words + first);
    for (long long i = own; i < fours; i += STEPS * all) {
        Four read[STEPS];
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            if (i + step * all < fours) read[step] = at[i + step * all];
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (i + step * all >= fours) continue;
#pragma unroll
            for (int word = 0; word < 4; ++word)
                read[step].at[word] =
                    use(read[step].at[word], first + (4 * (i + step * all) | word));
            if (write) at[i + step * all] = read[step];
        }
    }
    for (long long i = first + 4 * fours + own; i < end; i += all) {
        unsigned word = use(words[i], i);
        if (write) words[i] = word;
    }
}

// A digest adds these for a word, by its place, and for a byte behind the last whole word.
__device__ unsigned long long of_word(unsigned word, long long i) {
    return mixed(static_cast<unsigned long long>(word) << 32 ^ i * 0x9E3779B97F4A7C15ull);
}
__device__ unsigned long long of_byte(unsigned char byte, int i) {
    return mixed(byte + ((i + 1ull) << 8));
}
// Adds what the threads of a block have: one atomic, as those of all warps queue up.
__device__ void add_of_block(unsigned long long own, unsigned long long* sum) {
    extern __shared__ double shared[];
    unsigned long long* of_warp = reinterpret_cast<unsigned long long*>(shared);
    for (int lanes = 16; lanes > 0; lanes /= 2) own += __shfl_xor_sync(0xffffffffu, own, lanes);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = own;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < 8; ++warp) own += of_warp[warp];
        if (own) atomicAdd(sum, own);
    }
    __syncthreads();
}

// Where tensors of one size are.
struct Places {
    unsigned* at[TOGETHER];
};
// Adds to sums[part] a value of the bits and places of each of `parts` equal parts, which does not
// depend on the order; all parts' values add up to that of the whole. The sums of the next tensor
// follow. poison: 1 if the bytes are then filled with NaN, so that the next call must write all of
// them, else 0.
extern "C" __global__ void __launch_bounds__(256)
    digest(const __grid_constant__ Places places, long long bytes, int parts, int poison,
           unsigned long long* sums) {
    unsigned* words = places.at[blockIdx.z];
    sums += static_cast<long long>(blockIdx.z) * parts;
    long long count = bytes / 4, length = (count + parts - 1) / parts;
    // Not a constant, so that a store waits until its word is read.
    unsigned poisoned = -poison;
    for (int part = blockIdx.y; part < parts; part += gridDim.y) {
        unsigned long long own = 0;
        long long begin = length * part, end = min(count, begin + length);
        each_word(words, begin, end, poison, [&](unsigned word, long long i) {
            own += of_word(word, i);
            return word | poisoned;
        });
        if (part == parts - 1 && blockIdx.x == 0 && threadIdx.x < bytes % 4) {
            unsigned char* last = reinterpret_cast<unsigned char*>(words + count) + threadIdx.x;
            own += of_byte(*last, threadIdx.x);
            if (poison) *last = 0xFF;
        }
        add_of_block(own, sums + part);
    }
}
// Takes two tensors from one mix to another, and says so in *now. `heads` is 1 if a head has half a
// word, and then all turn together. sign: the sign bits of a word.
extern "C" __global__ void __launch_bounds__(256)
    negate(unsigned* one, unsigned* other, long long of_one, long long of_other, int heads,
           unsigned sign, unsigned long long from, unsigned long long to, unsigned long long* now) {
    unsigned* words = blockIdx.z ? other : one;
    long long bytes = blockIdx.z ? of_other : of_one;
    long long length = bytes / 4 / heads;
    for (int head = blockIdx.y; head < heads; head += gridDim.y) {
        if (negated(from, head) == negated(to, head)) continue;
        each_word(words, length * head, length * (head + 1), true,
                  [&](unsigned word, long long) { return word ^ sign; });
        if (bytes % 4 && blockIdx.x == 0 && threadIdx.x == 0)
            reinterpret_cast<unsigned short*>(words)[bytes / 2 - 1] ^= 0x8000;
    }
    if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) *now = to;
}
// How many of a thread's share of `count` bytes are not `byte`. count: a multiple of 16.
__device__ unsigned long long others(const unsigned char* at, int count, int byte) {
    unsigned long long own = 0;
    if (!in_fours(at)) {
        for (int i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256)
            own += at[i] != byte;
        return own;
    }
    for (int i = blockIdx.x * 256 + threadIdx.x; i < count / 16; i += gridDim.x * 256) {
        Four read = reinterpret_cast<const Four*>(at)[i];
#pragma unroll
        for (int bit = 0; bit < 128; bit += 8) own += (read.at[bit / 32] >> bit % 32 & 255) != byte;
    }
    return own;
}
// Counts the bytes of two regions that are not `byte`.
extern "C" __global__ void __launch_bounds__(256)
    differing(const unsigned char* one, const unsigned char* other, int count, int byte,
              unsigned long long* sum) {
    add_of_block(others(one, count, byte) + others(other, count, byte), sum);
}

// ---- many small cases at once: a launch costs the host more than the device's work ----
// A buffer between two guards; verify/device_case.py has the same struct.
struct Region {
    unsigned char* at;
    long long bytes;
    long long guard;     // each byte of its guards
    long long digested;  // 0, or which of its slot's regions it is, if a digest of it is wanted
    long long slot;
};
// Adds to each region's slot how many bytes of its guards are others, and its digest, in which the
// same bytes count otherwise in each of a slot's regions: two may not change places.
extern "C" __global__ void __launch_bounds__(256)
    look(const Region* regions, int guard_bytes, unsigned long long* slots) {
    Region one = regions[blockIdx.y];
    unsigned long long own = others(one.at - guard_bytes, guard_bytes, one.guard) +
                             others(one.at + one.bytes, guard_bytes, one.guard);
    if (one.digested) {
        unsigned* words = reinterpret_cast<unsigned*>(one.at);
        long long before = (one.digested - 1) << 40;
        each_word(words, 0, one.bytes / 4, false, [&](unsigned word, long long i) {
            own += of_word(word, before + i);
            return word;
        });
        int left = threadIdx.x;
        if (blockIdx.x == 0 && left < one.bytes % 4)
            own += of_byte(one.at[one.bytes / 4 * 4 + left], before / (1ll << 40) * 4 + left);
    }
    add_of_block(own, slots + one.slot);
}
// The bits that a content changes of the i-th word: signs, if they are drawn, and mantissas but for
// their first three bits. Exponents stay, so that values have the sizes that they had, none becomes
// NaN, and the same content once more takes it back. (With whole mantissas squares were 27 % larger
// on average, and so were scores' deviations; kernels that take maxima only where they must were
// timed as 3 to 6 % slower on short calls.) In FP8 whole mantissas change. In other formats those
// of zeros and subnormals stay: as 1e-39, a zero of Q made a kernel that scales rows twice as slow.
// Content 0 is the inputs as they were made. Two words share a number: with one for each, drawing
// them took longer than reading and writing them.
__device__ unsigned drawn(unsigned long long content, long long i) {
    unsigned long long of_two = mixed(content ^ (i >> 1) * 0x9E3779B97F4A7C15ull);
    return content ? of_two >> (i & 1) * 32 : 0;
}
__device__ unsigned to_draw(unsigned word, bool signs) {
#if DTYPE_E4M3
    unsigned mantissas = 0x07070707u;
    for (int byte = 0; byte < 32; byte += 8)  // with the largest exponent, some are NaN
        if ((word >> byte & 0x78) == 0x78) mantissas &= ~(0xFFu << byte);
    return mantissas | (signs ? 0x80808080u : 0u);
#else
#if DTYPE_FP16
    constexpr unsigned BITS = 16, MANTISSA = 0x03FFu, DRAWN = 0x007Fu;
#elif DTYPE_BF16
    constexpr unsigned BITS = 16, MANTISSA = 0x007Fu, DRAWN = 0x000Fu;
#else
    constexpr unsigned BITS = 32, MANTISSA = 0x007FFFFFu, DRAWN = 0x000FFFFFu;
#endif
    unsigned change = 0;
    for (unsigned at = 0; at < 32; at += BITS) {
        constexpr unsigned SIGN = 1u << BITS - 1;
        if (word >> at & SIGN - 1 & ~MANTISSA) change |= DRAWN << at;
        if (signs) change |= SIGN << at;
    }
    return change;
#endif
}
// Takes a region from one content to another, each to one of its own; those whose `digested` is 1
// have their signs drawn too. Bytes behind the last whole word stay as they are.
__device__ void take_to(Region one, unsigned long long from, unsigned long long to) {
    unsigned long long own = mixed(one.slot + 1);
    unsigned long long before = from ? from ^ own : 0, after = to ? to ^ own : 0;
    each_word(reinterpret_cast<unsigned*>(one.at), 0, one.bytes / 4, true,
              [&](unsigned word, long long i) {
                  unsigned change = drawn(before, i) ^ drawn(after, i);
                  return word ^ (change & to_draw(word, one.digested == 1));
              });
}
extern "C" __global__ void __launch_bounds__(256)
    redraw(const Region* regions, unsigned long long from, unsigned long long to) {
    take_to(regions[blockIdx.y], from, to);
}
// Takes regions to the content of a chain's next call, which follows from the last one's and from
// the digest of what that call wrote: nobody can know it before. contents[0] is given.
extern "C" __global__ void __launch_bounds__(256)
    chain(const Region* regions, unsigned long long* contents, const unsigned long long* digests,
          int call) {
    unsigned long long from = call ? contents[call - 1] : 0, to = contents[0];
    if (call) to = mixed(from ^ mixed(digests[call - 1] + 0x9E3779B97F4A7C15ull));
    if (!to) to = 1;
    take_to(regions[blockIdx.y], from, to);
    if (call && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) contents[call] = to;
}
// Fills each region with NaN, and writes the `guard_bytes` before and behind it anew.
extern "C" __global__ void __launch_bounds__(256) renew(const Region* regions, int guard_bytes) {
    Region one = regions[blockIdx.y];
    each_word(reinterpret_cast<unsigned*>(one.at), 0, one.bytes / 4, true,
              [](unsigned, long long) { return ~0u; });
    long long first = blockIdx.x * 256 + threadIdx.x, all = gridDim.x * 256;
    if (first < one.bytes % 4) one.at[one.bytes / 4 * 4 + first] = 0xFF;
    for (long long i = first; i < guard_bytes; i += all)
        one.at[i - guard_bytes] = one.at[one.bytes + i] = one.guard;
}

// An output, and all that `judge` takes beside it.
struct Output {
    const void* o;
    const double *plain, *opposite;
    const unsigned long long* mix;
    const double* tilted;
    Found *tiles, *all;
    long long count;  // of tiles
    long long group, seqlen_q, head_dim;
    double floor;
};
// Judges outputs as `judge` and `summary` do one.
extern "C" __global__ void __launch_bounds__(256) judge_each(const Output* outputs) {
    Output one = outputs[blockIdx.y];
    if (blockIdx.x < one.count)
        compare<Out>(one.o, one.plain, one.opposite, one.mix, one.tilted, one.tiles, one.group,
                     one.seqlen_q, one.head_dim, one.floor, Sample{1, 0});
}
extern "C" __global__ void __launch_bounds__(256) summary_each(const Output* outputs) {
    Output one = outputs[blockIdx.x];
    summarise(one.tiles, one.count, one.all);
}
#endif
