// three_kernel_wgmma: scores = Q K^T, softmax, O = P V in three launches that hand the scores over
// through L2; both products by TMA, mbarriers and warp-specialised wgmma. sm_90a only.
// q, o: (batch, heads, seqlen_q, HEAD_DIM); k, v: (batch, heads_kv, seqlen_k, HEAD_DIM).
// scores: (batch * heads, seqlen_q, stride) with stride = seqlen_k rounded up to 8 elements.
// STATS says who does the softmax, and so how often the scores cross L2 (33.5 MB at (1, 16, 1024, 64)):
//   0  softmax, in place: written, read, written, read.
//   1  qk: it stores p = 2^(s - m) with m the largest of 128 keys, and m and the sum of p beside; softmax
//      turns these into one factor per 128 keys, by which pv scales what it adds. Written, read.
//   2  pv: qk stores s and m, softmax joins the m of a row, pv reads 2^(s - m) through registers as its
//      A operand, sums it and divides at the end. Written, read.
// On an H200, L2 takes 4.65 TB/s of writes and gives 11 TB/s of reads (plain loops over 33.5 MB), so storing
// these scores is 7.2 us however it is done: with its launch, qk cannot take less than 8.5 us (measured 10.3
// with STATS 0, 12.0 with 1), softmax 9.3 (11.4), pv 5.8 (6.5 to 7.0; 11 with STATS 2). In sequence they take
// 2 us more than alone; meanwhile 17 to 20 MB of the scores leave L2 for memory during qk (ncu).
// What the stages owe each other: a row i has keys_of(i) keys. pv multiplies whole tiles of at most
// UNIT x UNIT, so softmax (STATS 0) or qk (STATS 1) write zeros up to extent_of(i). With STATS 2 pv masks.
#include "common/element.cuh"
#include "common/mma.cuh"
#include "common/hopper.cuh"
#include "common/rows.cuh"

constexpr int UNIT = 128;  // keys that share one maximum; the largest tile of pv

__device__ __forceinline__ int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }
// Columns of a row that some tile of pv reads, beyond seqlen_k aside.
__device__ __forceinline__ int extent_of(int row, int seqlen_q, int seqlen_k) {
    return round_up(keys_of(min(row | (UNIT - 1), seqlen_q - 1), seqlen_q, seqlen_k), UNIT);
}

#if STAGE_QK || STAGE_PV
#if STAGE_QK
constexpr int BLOCK_M = QK_BLOCK_M, BLOCK_N = QK_BLOCK_N, BLOCK_K = QK_BLOCK_K;
constexpr int WARPGROUPS = QK_WARPGROUPS, STAGES = QK_STAGES, BUFFERS = QK_BUFFERS;
static_assert(HEAD_DIM % BLOCK_K == 0, "QK_BLOCK_K must divide HEAD_DIM");
static_assert(STATS == 0 || BLOCK_N % UNIT == 0, "a maximum is of UNIT keys of one tile");
#else
constexpr int BLOCK_M = PV_BLOCK_M, BLOCK_N = PV_BLOCK_N, BLOCK_K = PV_BLOCK_K;
constexpr int WARPGROUPS = PV_WARPGROUPS, STAGES = PV_STAGES, BUFFERS = 1;
static_assert(HEAD_DIM % BLOCK_N == 0, "PV_BLOCK_N must divide HEAD_DIM");
static_assert(BLOCK_M <= UNIT && BLOCK_K <= UNIT, "zeros are written for tiles of UNIT x UNIT");
static_assert(UNIT % BLOCK_K == 0, "a step of pv has one factor");
#endif
constexpr int WARPS = WARPGROUPS * 4, THREADS = WARPS * 32 + 32;  // the last warp only copies
constexpr int FRAGMENTS = BLOCK_M / (64 * WARPGROUPS);            // 64-row pieces of a warpgroup
static_assert(FRAGMENTS * 64 * WARPGROUPS == BLOCK_M, "a warpgroup computes 64 rows at once");
// A K-major tile lies in panels of PANEL columns: rows of 128 or 64 bytes, swizzled by TMA.
constexpr int PANEL = BLOCK_K < 64 ? BLOCK_K : 64, PANELS = BLOCK_K / PANEL, SWIZZLE = PANEL * 2;
constexpr unsigned A_BYTES = BLOCK_M * BLOCK_K * 2, B_BYTES = BLOCK_N * BLOCK_K * 2;
constexpr unsigned STAGED_BYTES = 16 * BLOCK_N * 2;  // 16 rows of output, one warp's part of a fragment

// Descriptor of k-columns 16 i .. of a K-major tile of ROWS rows.
template <int ROWS>
__device__ __forceinline__ unsigned long long k_major(unsigned tile, int i) {
    return wgmma_descriptor<SWIZZLE>(tile + i * 16 / PANEL * ROWS * SWIZZLE + i * 16 % PANEL * 2,
                                     8 * SWIZZLE);
}

// 64 columns of the warp's 16 rows, times `low` and `high`, to shared memory in the layout of a swizzled
// box, and from there to columns `column` .. of `map`. Every warp stores its own rows, so that none waits
// for another.
__device__ __forceinline__ void store_panel(const TensorMap& map, unsigned staged, const float* d,
                                            float low, float high, int column, int row, int head,
                                            bool inside) {
    int lane = threadIdx.x % 32, in = lane % 16, chunk = lane / 16;
#pragma unroll
    for (int i = 0; i < 4; ++i, d += 8)
        stmatrix_x4(staged + in * 128 + ((i * 2 + chunk ^ in % 8) << 4), pack(d[0] * low, d[1] * low),
                    pack(d[2] * high, d[3] * high), pack(d[4] * low, d[5] * low),
                    pack(d[6] * high, d[7] * high));
    fence_async_proxy();
    __syncwarp();
    if (lane == 0 && inside) tma_store(map, staged, column, row, head);
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
// Barriers: full and empty of each ring stage, then full and empty of Q. The copying warp makes them and
// goes on to its first loads; the others wait here.
__device__ __forceinline__ void init_barriers(unsigned barriers) {
    if (threadIdx.x < WARPS * 32) {
        named_barrier_sync(1, THREADS);
        return;
    }
    if (threadIdx.x == WARPS * 32) {
#pragma unroll
        for (int i = 0; i <= STAGES; ++i) {
            mbarrier_init(barriers + 16 * i, 1);
            mbarrier_init(barriers + 16 * i + 8, WARPS);
        }
        mbarrier_init_fence();
    }
    __syncwarp();
    named_barrier_arrive(1, THREADS);
}
#endif

#if STAGE_QK
// A block computes runs of QK_TILES tiles of keys for one tile of queries, which stays in shared memory.
// Scores are multiplied by `factor`, scale * log2(e), so that softmax is a subtraction and an ex2.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    three_kernel_wgmma_qk(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                          const __grid_constant__ TensorMap scores, float* __restrict__ maxima,
                          float* __restrict__ sums, int batch_heads, int heads, int heads_kv, int seqlen_q,
                          int seqlen_k, float factor) {
    extern __shared__ __align__(1024) unsigned char smem[];
    constexpr unsigned Q_PANEL_BYTES = BLOCK_M * SWIZZLE, Q_BYTES = BLOCK_M * HEAD_DIM * 2;
    constexpr int STEPS = HEAD_DIM / BLOCK_K;
    unsigned smem_q = smem_address(smem), ring = smem_q + Q_BYTES, staging = ring + STAGES * B_BYTES;
    unsigned barriers = staging + BUFFERS * BLOCK_M * BLOCK_N * 2, q_full = barriers + 16 * STAGES,
             q_empty = q_full + 8;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) tma_prefetch(scores);  // q and k are used at once
    init_barriers(barriers);
#if PDL > 1
    grid_wait();
#endif

    int tiles_m = (seqlen_q + BLOCK_M - 1) / BLOCK_M, units = (seqlen_k + UNIT - 1) / UNIT;
    int runs = (seqlen_k + QK_TILES * BLOCK_N - 1) / (QK_TILES * BLOCK_N),
        items = runs * tiles_m * batch_heads;
    int row, key, head, tiles;
    auto decode = [&](int item) {
        int within = item % (runs * tiles_m);
        head = item / (runs * tiles_m);
        row = (QK_ORDER ? within % tiles_m : within / runs) * BLOCK_M;
        key = (QK_ORDER ? within / tiles_m : within % runs) * QK_TILES * BLOCK_N;
        int last = min(row + BLOCK_M, seqlen_q) - 1;
        int end = STATS == 1 ? extent_of(last, seqlen_q, seqlen_k) : keys_of(last, seqlen_q, seqlen_k);
        tiles = min(QK_TILES, (min(end, seqlen_k) - key + BLOCK_N - 1) / BLOCK_N);
    };
    Ring<STAGES> at;
    unsigned q_phase = 0;
    if (warp == WARPS) {
        if (lane > 0) return;
        int item = blockIdx.x;
        do {
            decode(item);
            if (tiles <= 0) continue;
            int head_kv = head / heads * heads_kv + head % heads / (heads / heads_kv);
            mbarrier_wait(q_empty, q_phase ^ 1);
            mbarrier_expect(q_full, Q_BYTES);
#pragma unroll
            for (int i = 0; i < HEAD_DIM / PANEL; ++i)
                tma_load(smem_q + i * Q_PANEL_BYTES, q, q_full, i * PANEL, row, head);
            q_phase ^= 1;
#pragma unroll 1
            for (int step = 0; step < tiles * STEPS; ++step, at.next()) {
                unsigned full = barriers + 16 * at.stage, tile = ring + at.stage * B_BYTES;
                mbarrier_wait(full + 8, at.phase ^ 1);
                mbarrier_expect(full, B_BYTES);
#pragma unroll
                for (int i = 0; i < PANELS; ++i)
                    tma_load(tile + i * BLOCK_N * SWIZZLE, k, full, step % STEPS * BLOCK_K + i * PANEL,
                             key + step / STEPS * BLOCK_N, head_kv);
            }
        } while (QK_BLOCKS > 0 && (item += gridDim.x) < items);
#if PDL
        grid_launch_dependents();
#endif
        return;
    }

    constexpr unsigned WARP_BYTES = FRAGMENTS * STAGED_BYTES;
    unsigned own_q = smem_q + warp / 4 * FRAGMENTS * 64 * SWIZZLE,
             own = staging + warp * BUFFERS * WARP_BYTES, buffer = 0;
    float by = STATS == 1 ? 1.f : factor;
    // Else all warpgroups multiply, find maxima and exponentiate at the same time (STATS 1: 12.6 to 12.1
    // us).
    constexpr int TURN = 2, CONSUMERS = WARPS * 32;  // named barriers 2 and 3: the turn of each half
    if (QK_TURNS && warp / 4 % 2) named_barrier_arrive(TURN, CONSUMERS);
    int item = blockIdx.x;
    do {
        decode(item);
        if (tiles <= 0) continue;
        mbarrier_wait(q_full, q_phase);
        q_phase ^= 1;
        row += warp / 4 * FRAGMENTS * 64 + warp % 4 * 16;
        int end = key + tiles * BLOCK_N;
#pragma unroll 1
        for (; key < end; key += BLOCK_N) {
            float d[FRAGMENTS][BLOCK_N / 2];
            unsigned before = 0;  // the stage whose products are still under way
#pragma unroll
            for (int step = 0; step < STEPS; ++step, at.next()) {
                mbarrier_wait(barriers + 16 * at.stage, at.phase);
                wgmma_fence();
#pragma unroll
                for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
                    for (int i = 0; i < BLOCK_K / 16; ++i)
                        Wgmma<BLOCK_N>::template ss<0>(
                            d[f],
                            k_major<BLOCK_M>(own_q + step * PANELS * Q_PANEL_BYTES + f * 64 * SWIZZLE, i),
                            k_major<BLOCK_N>(ring + at.stage * B_BYTES, i), step + i > 0);
                wgmma_commit();
                if (step > 0) {
                    wgmma_wait<1>();
                    if (lane == 0) mbarrier_arrive(barriers + 16 * before + 8);
                }
                before = at.stage;
            }
            wgmma_wait<0>();
#pragma unroll
            for (int f = 0; f < FRAGMENTS; ++f) pin(d[f]);
            if (lane == 0) {
                mbarrier_arrive(barriers + 16 * before + 8);
                if (QK_BLOCKS > 0 && key + BLOCK_N == end) mbarrier_arrive(q_empty);
                tma_store_wait_read<BUFFERS - 1>();
            }
            __syncwarp();
            unsigned staged = own + buffer * WARP_BYTES;
            buffer = BUFFERS > 1 ? buffer ^ 1 : 0;
#pragma unroll
            for (int f = 0; f < FRAGMENTS; ++f) {
                int first = row + f * 64;  // of the warp's 16 rows; this thread's are two
                int mine = first + lane / 4;
#if STATS
                if (keys_of(first, seqlen_q, seqlen_k) < key + BLOCK_N) {
                    int limit = keys_of(mine, seqlen_q, seqlen_k) - key,
                        limit_8 = keys_of(mine + 8, seqlen_q, seqlen_k) - key;
#pragma unroll
                    for (int i = 0; i < BLOCK_N / 2; ++i)
                        if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= (i & 2 ? limit_8 : limit))
                            d[f][i] = minus_infinity();
                }
#pragma unroll
                for (int unit = 0; unit < BLOCK_N / UNIT; ++unit) {
                    float low = minus_infinity(), high = minus_infinity(), sum = 0.f, sum_8 = 0.f;
#pragma unroll
                    for (int i = unit * 64; i < unit * 64 + 64; i += 4) {
                        low = fmaxf(low, fmaxf(d[f][i], d[f][i + 1]));
                        high = fmaxf(high, fmaxf(d[f][i + 2], d[f][i + 3]));
                    }
                    low = quad_max(low) * factor, high = quad_max(high) * factor;
#if STATS == 1
                    // A row without a key here: every s is -inf, and 2^(-inf - 0) is the zero it needs.
                    low = low == minus_infinity() ? 0.f : low, high = high == minus_infinity() ? 0.f : high;
#else
                    unsigned rounded = pack(low, high);  // as the scores are, so that the largest p is 1
                    low = low_of(rounded), high = high_of(rounded);
#endif
                    if (QK_TURNS) named_barrier_sync(TURN + warp / 4 % 2, CONSUMERS);
#pragma unroll
                    for (int i = unit * 2; i < unit * 2 + 2; ++i) {
#if STATS == 1
#pragma unroll
                        for (int j = i * 32; j < i * 32 + 32; ++j) {
                            d[f][j] = exp2_approx(fmaf(d[f][j], factor, j & 2 ? -high : -low));
                            (j & 2 ? sum_8 : sum) += d[f][j];
                        }
#endif
                        store_panel(scores, staged + f * STAGED_BYTES + i * 2048, d[f] + i * 32, by, by,
                                    key + i * 64, first, head, first < seqlen_q && key + i * 64 < seqlen_k);
                    }
                    if (QK_TURNS) named_barrier_arrive(TURN + (warp / 4 % 2 ^ 1), CONSUMERS);
                    if (STATS == 1) sum = quad_sum(sum), sum_8 = quad_sum(sum_8);
                    if (lane % 4 == 0 && key / UNIT + unit < units) {
                        long long to =
                            (static_cast<long long>(head) * units + key / UNIT + unit) * seqlen_q + mine;
                        if (mine < seqlen_q) maxima[to] = low;
                        if (mine + 8 < seqlen_q) maxima[to + 8] = high;
                        if (STATS == 1 && mine < seqlen_q) sums[to] = sum;
                        if (STATS == 1 && mine + 8 < seqlen_q) sums[to + 8] = sum_8;
                    }
                }
#else
#pragma unroll
                for (int i = 0; i < BLOCK_N / 64; ++i)
                    store_panel(scores, staged + f * STAGED_BYTES + i * 2048, d[f] + i * 32, by, by,
                                key + i * 64, first, head, first < seqlen_q && key + i * 64 < seqlen_k);
#endif
            }
            if (lane == 0) tma_store_commit();
        }
    } while (QK_BLOCKS > 0 && (item += gridDim.x) < items);
    if (QK_TURNS && warp / 4 % 2 == 0) named_barrier_sync(TURN, CONSUMERS);  // leaves no barrier half full
    if (lane == 0) tma_store_wait_read<0>();  // shared memory must outlive the reads of the last stores
}
#endif

#if STAGE_SOFTMAX && STATS
// One thread a row. STATS 1: maxima becomes the factor of each 128 keys, 2^(their maximum - the row's) /
// the row's sum. STATS 2: sums receives the row's maximum.
extern "C" __global__ void __launch_bounds__(SOFTMAX_BLOCK, MIN_BLOCKS)
    three_kernel_wgmma_softmax(float* __restrict__ maxima, float* __restrict__ sums, int rows, int seqlen_q,
                               int seqlen_k) {
#if PDL
    grid_launch_dependents();
    grid_wait();
#endif
    int row = blockIdx.x * SOFTMAX_BLOCK + threadIdx.x;
    if (row >= rows) return;
    int head = row / seqlen_q, within = row % seqlen_q, units = (seqlen_k + UNIT - 1) / UNIT;
    int own = (keys_of(within, seqlen_q, seqlen_k) + UNIT - 1) / UNIT;
    long long first = static_cast<long long>(head) * units * seqlen_q + within;
    auto at = [&](int i) { return first + static_cast<long long>(i) * seqlen_q; };
    float largest = minus_infinity();
#if STATS == 1
    float sum = 0.f;
#pragma unroll 8
    for (int i = 0; i < own; ++i) {  // in one pass, for its loads to be in flight together
        float m = maxima[at(i)], part = sums[at(i)], grown = fmaxf(largest, m);
        sum = sum * exp2_approx(largest - grown) + part * exp2_approx(m - grown);
        largest = grown;
    }
    float inverse = 1.f / sum;
    int all = CAUSAL ? min(units, extent_of(within, seqlen_q, seqlen_k) / UNIT) : own;
#pragma unroll 8
    for (int i = 0; i < all; ++i)
        maxima[at(i)] = i < own ? exp2_approx(maxima[at(i)] - largest) * inverse : 0.f;
#else
#pragma unroll 8
    for (int i = 0; i < own; ++i) largest = fmaxf(largest, maxima[at(i)]);
    sums[row] = largest;
#endif
}
#elif STAGE_SOFTMAX
constexpr int VECTOR = SOFTMAX_VECTOR, STEP = SOFTMAX_THREADS * VECTOR;  // keys loaded at once for a row
constexpr int GROUPS = SOFTMAX_BLOCK / SOFTMAX_THREADS;  // rows that a block works on at once
constexpr int WORDS = (VECTOR + 1) / 2;

__device__ __forceinline__ void load_raw(unsigned (&out)[WORDS], const element_t* from) {
    if constexpr (VECTOR == 8) *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(from);
    else if constexpr (VECTOR == 4) *reinterpret_cast<uint2*>(out) = *reinterpret_cast<const uint2*>(from);
    else if constexpr (VECTOR == 2) out[0] = *reinterpret_cast<const unsigned*>(from);
    else out[0] = *from;
}
// Elements `keys` and beyond count as masked.
__device__ __forceinline__ void
unpack(float (&out)[VECTOR], const unsigned (&in)[WORDS], int at, int keys) {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i)
        out[i] = at + i < keys ? (i % 2 ? high_of(in[i / 2]) : low_of(in[i / 2])) : minus_infinity();
}
__device__ __forceinline__ void store(element_t* to, const float (&in)[VECTOR], float factor) {
    unsigned out[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
        out[i] = pack(in[2 * i] * factor, VECTOR > 1 ? in[(2 * i + 1) % VECTOR] * factor : 0.f);
    if constexpr (VECTOR == 8) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<uint4*>(out);
    else if constexpr (VECTOR == 4) *reinterpret_cast<uint2*>(to) = *reinterpret_cast<uint2*>(out);
    else if constexpr (VECTOR == 2) *reinterpret_cast<unsigned*>(to) = out[0];
    else *to = static_cast<element_t>(out[0]);
}

// Block: GROUPS * SOFTMAX_ROWS rows, GROUPS at once. With one pass, a row is loaded while the one before
// is worked on.
extern "C" __global__ void __launch_bounds__(SOFTMAX_BLOCK, MIN_BLOCKS)
    three_kernel_wgmma_softmax(element_t* __restrict__ scores, int rows, int seqlen_q, int seqlen_k,
                               int stride) {
    extern __shared__ float exchange[];  // one float a warp for the maximum, one for the sum
    float *for_maximum = exchange, *for_sum = exchange + SOFTMAX_BLOCK / 32;
    int first = threadIdx.x % SOFTMAX_THREADS * VECTOR;
    int row = blockIdx.x * GROUPS * SOFTMAX_ROWS + threadIdx.x / SOFTMAX_THREADS;
    scores += first;
    // Threads without a row stay for the barriers: they have no key, and so touch nothing.
    auto keys_in = [&](int r) {
        return r < rows ? keys_of(CAUSAL ? r % seqlen_q : 0, seqlen_q, seqlen_k) : 0;
    };
    auto written_in = [&](int r) {
        return !CAUSAL ? stride : min(stride, extent_of(r % seqlen_q, seqlen_q, seqlen_k));
    };
#if PDL
    grid_wait();
#endif
#if SOFTMAX_PASSES == 1
    constexpr int LOADS = MAX_KEYS / STEP;  // the whole row in registers
    unsigned raw[LOADS][WORDS];
    auto load_row = [&](int r) {
        int keys = keys_in(r);
        const element_t* from = scores + static_cast<long long>(r) * stride;
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (first + i * STEP < keys) load_raw(raw[i], from + i * STEP);
    };
    load_row(row);
#endif
#pragma unroll 1
    for (int n = 0; n < SOFTMAX_ROWS; ++n, row += GROUPS) {
        int keys = keys_in(row), written = keys > 0 ? written_in(row) : 0;
        element_t* at = scores + static_cast<long long>(row) * stride;
        float largest = minus_infinity(), sum = 0.f;
#if SOFTMAX_PASSES == 1
        float p[LOADS][VECTOR];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) unpack(p[i], raw[i], first + i * STEP, keys);
        if (n + 1 < SOFTMAX_ROWS) load_row(row + GROUPS);
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) largest = fmaxf(largest, p[i][e]);
        largest = row_reduce<SOFTMAX_THREADS, true>(largest, for_maximum);
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) sum += p[i][e] = exp2_approx(p[i][e] - largest);
        float inverse = 1.f / row_reduce<SOFTMAX_THREADS, false>(sum, for_sum);
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (first + i * STEP < written) store(at + i * STEP, p[i], inverse);
#else
        float p[VECTOR];
        auto get = [&](int i) {
            unsigned raw[WORDS];
            if (first + i < keys) load_raw(raw, at + i);
            unpack(p, raw, first + i, keys);
        };
#pragma unroll 4
        for (int i = 0; first + i < keys; i += STEP) {
            get(i);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) largest = fmaxf(largest, p[e]);
        }
        largest = row_reduce<SOFTMAX_THREADS, true>(largest, for_maximum);
#pragma unroll 4
        for (int i = 0; first + i < keys; i += STEP) {
            get(i);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) sum += exp2_approx(p[e] - largest);
        }
        float inverse = 1.f / row_reduce<SOFTMAX_THREADS, false>(sum, for_sum);
#pragma unroll 4
        for (int i = 0; first + i < written; i += STEP) {
            get(i);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) p[e] = exp2_approx(p[e] - largest);
            store(at + i, p, inverse);
        }
#endif
    }
#if PDL
    grid_launch_dependents();
#endif
}
#endif

#if STAGE_PV
// Block (tile of queries, tile of HEAD_DIM columns, head). P arrives K-major, V row-major as it is stored.
// PV_EVICT_FIRST says to L2 that P is not read again. At (1, 16, 1024, 64) that takes 0.5 to 0.9 of 23 us off
// the whole, though pv alone, on scores that lie in L2 for good, is slower with it (6.5 to 8.8 us).
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    three_kernel_wgmma_pv(const __grid_constant__ TensorMap scores, const __grid_constant__ TensorMap v,
                          const __grid_constant__ TensorMap o, const float* __restrict__ factors,
                          const float* __restrict__ maxima, int batch_heads, int heads, int heads_kv,
                          int seqlen_q, int seqlen_k) {
    extern __shared__ __align__(1024) unsigned char smem[];
    constexpr unsigned STAGE_BYTES = A_BYTES + B_BYTES;
    constexpr int COLUMN_TILES = HEAD_DIM / BLOCK_N, KEY_STEPS = BLOCK_K / 16;
    unsigned ring = smem_address(smem), staging = ring + STAGES * STAGE_BYTES,
             barriers = staging + BLOCK_M * BLOCK_N * 2;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) tma_prefetch(scores), tma_prefetch(v), tma_prefetch(o);
    init_barriers(barriers);

    int tiles_m = (seqlen_q + BLOCK_M - 1) / BLOCK_M, items = tiles_m * COLUMN_TILES * batch_heads;
    int row, column, head, steps;
    auto decode = [&](int item) {
        int tile_m;
        column = item % COLUMN_TILES * BLOCK_N;
        item /= COLUMN_TILES;
        if (PV_ORDER) head = item % batch_heads, tile_m = item / batch_heads;
        else head = item / tiles_m, tile_m = item % tiles_m;
        row = (CAUSAL ? tiles_m - 1 - tile_m : tile_m) * BLOCK_M;  // the longest first
        int end = keys_of(min(row + BLOCK_M, seqlen_q) - 1, seqlen_q, seqlen_k);
        steps = round_up(end, STATS == 1 ? UNIT : BLOCK_K) / BLOCK_K;
    };
#if PDL
    grid_wait();
#endif
    Ring<STAGES> at;
    if (warp == WARPS) {
        if (lane > 0) return;
        int item = blockIdx.x;
        do {
            decode(item);
            int head_kv = head / heads * heads_kv + head % heads / (heads / heads_kv);
#pragma unroll 1
            for (int step = 0; step < steps; ++step, at.next()) {
                unsigned full = barriers + 16 * at.stage, tile = ring + at.stage * STAGE_BYTES;
                mbarrier_wait(full + 8, at.phase ^ 1);
                mbarrier_expect(full, STAGE_BYTES);
#pragma unroll
                for (int i = 0; i < PANELS; ++i)
                    tma_load(tile + i * BLOCK_M * SWIZZLE, scores, full, step * BLOCK_K + i * PANEL, row,
                             head, PV_EVICT_FIRST ? EVICT_FIRST : EVICT_NORMAL);
#pragma unroll
                for (int i = 0; i < BLOCK_N / 64; ++i)
                    tma_load(tile + A_BYTES + i * BLOCK_K * 128, v, full, column + i * 64, step * BLOCK_K,
                             head_kv);
            }
        } while (PV_BLOCKS > 0 && (item += gridDim.x) < items);
#if PDL > 1
        grid_launch_dependents();
#endif
        return;
    }

    int own_row = warp / 4 * FRAGMENTS * 64 + warp % 4 * 16;
    unsigned own = staging + warp * FRAGMENTS * STAGED_BYTES;
    int item = blockIdx.x;
    do {
        decode(item);
        int first = row + own_row,
            mine = first + lane / 4;  // this thread's rows: mine + 64 f, and 8 further
        float d[FRAGMENTS][BLOCK_N / 2] = {};
        auto v_descriptor = [&](int i) {  // 16 keys of all columns
            return wgmma_descriptor<128>(ring + at.stage * STAGE_BYTES + A_BYTES + i * 2048, 1024,
                                         BLOCK_K * 128);
        };
        auto p_tile = [&](int f) {
            return ring + at.stage * STAGE_BYTES + (warp / 4 * FRAGMENTS + f) * 64 * SWIZZLE;
        };
        unsigned before = 0;  // the stage whose products are still under way
        auto release = [&](unsigned stage) {
            if (lane == 0) mbarrier_arrive(barriers + 16 * stage + 8);
        };
#if STATS == 0
#pragma unroll 1
        for (int step = 0; step < steps; ++step, at.next()) {
            mbarrier_wait(barriers + 16 * at.stage, at.phase);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < KEY_STEPS; ++i)
#pragma unroll
                for (int f = 0; f < FRAGMENTS; ++f)
                    Wgmma<BLOCK_N>::template ss<1>(d[f], k_major<BLOCK_M>(p_tile(f), i), v_descriptor(i),
                                                   1);
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0) release(before);
            before = at.stage;
        }
        wgmma_wait<0>();
        release(before);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) pin(d[f]);
#elif STATS == 1
        int units = (seqlen_k + UNIT - 1) / UNIT;
        const float* factor = factors + static_cast<long long>(head) * units * seqlen_q + mine;
        float by[FRAGMENTS][2];
        auto load_factors = [&]() {
#pragma unroll
            for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    by[f][i] = mine + f * 64 + i * 8 < seqlen_q ? factor[f * 64 + i * 8] : 0.f;
        };
#pragma unroll 1
        for (int unit = 0; unit < steps / (UNIT / BLOCK_K); ++unit, factor += seqlen_q) {
            load_factors();
            float part[FRAGMENTS][BLOCK_N / 2];
#pragma unroll
            for (int step = 0; step < UNIT / BLOCK_K; ++step, at.next()) {
                mbarrier_wait(barriers + 16 * at.stage, at.phase);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < KEY_STEPS; ++i)
#pragma unroll
                    for (int f = 0; f < FRAGMENTS; ++f)
                        Wgmma<BLOCK_N>::template ss<1>(part[f], k_major<BLOCK_M>(p_tile(f), i),
                                                       v_descriptor(i), step + i > 0);
                wgmma_commit();
                if (step > 0) {
                    wgmma_wait<1>();
                    release(before);
                }
                before = at.stage;
            }
            wgmma_wait<0>();
            release(before);
#pragma unroll
            for (int f = 0; f < FRAGMENTS; ++f) {
                pin(part[f]);
#pragma unroll
                for (int i = 0; i < BLOCK_N / 2; ++i) d[f][i] = fmaf(part[f][i], by[f][i / 2 % 2], d[f][i]);
            }
        }
#else
        static_assert(FRAGMENTS == 1, "P takes BLOCK_K / 4 registers for every 64 rows");
        const float* largest = maxima + static_cast<long long>(head) * seqlen_q + mine;
        float from = mine < seqlen_q ? largest[0] : 0.f, from_8 = mine + 8 < seqlen_q ? largest[8] : 0.f;
        float sum = 0.f, sum_8 = 0.f;
        int limit = keys_of(mine, seqlen_q, seqlen_k), limit_8 = keys_of(mine + 8, seqlen_q, seqlen_k);
        int whole = keys_of(first, seqlen_q, seqlen_k);
#pragma unroll 1
        for (int step = 0; step < steps; ++step, at.next()) {
            unsigned p[BLOCK_K / 4];
            mbarrier_wait(barriers + 16 * at.stage, at.phase);
            __syncwarp();
            int in = warp % 4 * 16 + lane % 16;  // ldmatrix: this lane's row and chunk of each 16 keys
            unsigned tile = p_tile(0) + in * SWIZZLE, swizzle = SWIZZLE == 128 ? in % 8 : in / 2 % 4;
            bool edge = whole < (step + 1) * BLOCK_K;
#pragma unroll
            for (int i = 0; i < KEY_STEPS; ++i) {
                unsigned s[4];
                ldmatrix_x4(s, tile + i * 16 / PANEL * BLOCK_M * SWIZZLE +
                                   ((i * 16 % PANEL / 8 + lane / 16 ^ swizzle) << 4));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float x = low_of(s[j]), y = high_of(s[j]);
                    if (edge) {
                        int key = step * BLOCK_K + i * 16 + j / 2 * 8 + lane % 4 * 2,
                            end = j % 2 ? limit_8 : limit;
                        x = key < end ? x : minus_infinity();
                        y = key + 1 < end ? y : minus_infinity();
                    }
                    x = exp2_approx(x - (j % 2 ? from_8 : from)),
                    y = exp2_approx(y - (j % 2 ? from_8 : from));
                    (j % 2 ? sum_8 : sum) += x + y;
                    p[i * 4 + j] = pack(x, y);
                }
            }
            pin(p);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < KEY_STEPS; ++i)
                Wgmma<BLOCK_N>::template rs<1>(d[0], p + i * 4, v_descriptor(i), 1);
            wgmma_commit();
            // Not later: ptxas gives the registers of p to the next step's scores while wgmma still reads
            // them, and rows came out NaN. Other warpgroups cover the wait.
            wgmma_wait<0>();
            pin(d[0]);
            pin(p);
            release(at.stage);
        }
        sum = quad_sum(sum), sum_8 = quad_sum(sum_8);
#endif
        if (lane == 0) tma_store_wait_read<0>();
        __syncwarp();
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
#if STATS == 2
            float low = 1.f / sum, high = 1.f / sum_8;
#else
            float low = 1.f, high = 1.f;
#endif
#pragma unroll
            for (int i = 0; i < BLOCK_N / 64; ++i)
                store_panel(o, own + f * STAGED_BYTES + i * 2048, d[f] + i * 32, low, high, column + i * 64,
                            first + f * 64, head, first + f * 64 < seqlen_q);
        }
        if (lane == 0) tma_store_commit();
    } while (PV_BLOCKS > 0 && (item += gridDim.x) < items);
    if (lane == 0) tma_store_wait_read<0>();
}
#endif
