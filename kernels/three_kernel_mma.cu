// three_kernel_mma: scores = Q K^T, row softmax in place, O = P V, in three launches that hand the
// scores over through L2. mma.sync, cp.async and ldmatrix only, so it runs on sm_80 and later.
// q, o: (batch, heads, seqlen_q, HEAD_DIM); k, v: (batch, heads_kv, seqlen_k, HEAD_DIM).
// scores: (batch * heads, seqlen_q, stride) with stride = seqlen_k rounded up to CHUNK elements.
// Row i has `visible_keys(i)` keys. What the stages owe each other, in whole 16-byte chunks of a
// row:
//   qk writes every chunk that holds a key of the row; softmax reads these and no others, and
//   zeroes the last one's tail; pv reads these and no others, so nothing above the diagonal ever
//   moves.
#include "common/ptx/mma.cuh"
#include "common/ptx/shared.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"
#include "common/tile/scheduler.cuh"
#include "common/tile/softmax.cuh"

using namespace attn;

constexpr int CHUNK = 8;  // elements in 16 bytes

// The head of K and V that query head `head` of the flat (batch, heads) index reads.
__device__ __forceinline__ long long head_kv_of(int head, int heads, int heads_kv) {
    return static_cast<long long>(head / heads) * heads_kv + head % heads / (heads / heads_kv);
}

#if STAGE_QK || STAGE_PV
#if STAGE_QK
constexpr int BLOCK_M = QK_BLOCK_M, BLOCK_N = QK_BLOCK_N, BLOCK_K = QK_BLOCK_K;
constexpr int WARPS = QK_WARPS, STAGES = QK_STAGES;
constexpr int B_ROWS = BLOCK_N, B_COLUMNS = BLOCK_K;  // a tile of K: keys by head_dim
constexpr int PANELS = HEAD_DIM / BLOCK_K;            // of Q, which stay in shared memory
static_assert(HEAD_DIM % BLOCK_K == 0, "QK_BLOCK_K must divide HEAD_DIM");
static_assert(STAGES > 1 || QK_TILES * PANELS == 1, "one stage is never refilled");
#else
constexpr int BLOCK_M = PV_BLOCK_M, BLOCK_N = PV_BLOCK_N, BLOCK_K = PV_BLOCK_K;
constexpr int WARPS = PV_WARPS, STAGES = PV_STAGES;
constexpr int B_ROWS = BLOCK_K, B_COLUMNS = BLOCK_N;  // a tile of V: keys by head_dim
static_assert(HEAD_DIM % BLOCK_N == 0, "PV_BLOCK_N must divide HEAD_DIM");
static_assert(STAGES > 1, "one stage is never refilled");
#endif
constexpr int THREADS = WARPS * 32;

// Warps along M: the split with the fewest fragment loads for its mma, which is the squarest.
constexpr int warps_along_m() {
    int best = 0, cost = 1 << 30;
    for (int m = 1; m <= WARPS; m *= 2) {
        bool fits = BLOCK_M % (16 * m) == 0 && BLOCK_N % (16 * (WARPS / m)) == 0;
        if (fits && BLOCK_M / m + BLOCK_N * m / WARPS <= cost)
            best = m, cost = BLOCK_M / m + BLOCK_N * m / WARPS;
    }
    return best;
}
constexpr int WARPS_M = warps_along_m();
static_assert(WARPS_M > 0, "the tile is too small for its warps");
constexpr int WARPS_N = WARPS / WARPS_M;
constexpr int WARP_M = BLOCK_M / WARPS_M, WARP_N = BLOCK_N / WARPS_N;
constexpr int MMA_M = WARP_M / 16, MMA_N = WARP_N / 8;

// A tile in shared memory: rows of COLUMNS elements whose chunks are permuted within 128 bytes, so
// that the eight rows of one ldmatrix matrix, and of one epilogue store, lie in different banks.
template <int COLUMNS>
struct Tile {
    static constexpr int CHUNKS = COLUMNS / CHUNK, ROW_BYTES = COLUMNS * 2;
    static constexpr int SPAN = CHUNKS < 8 ? CHUNKS : 8;
    __device__ static unsigned swizzle(unsigned row) { return row / (8 / SPAN) % SPAN; }
    __device__ static unsigned offset(unsigned row, unsigned chunk) {
        return row * ROW_BYTES + (chunk ^ swizzle(row)) * 16;
    }
};
constexpr int A_ROW_BYTES = BLOCK_K * 2, B_ROW_BYTES = B_COLUMNS * 2;
constexpr int A_BYTES = BLOCK_M * BLOCK_K * 2, B_BYTES = B_ROWS * B_COLUMNS * 2;

// ROWS x COLUMNS of a row-major matrix to shared memory. Unless the tile is `whole`, chunks for
// which valid(row, column) is false become zeros and read nothing.
template <int ROWS, int COLUMNS, class Valid>
__device__ __forceinline__ void load_tile(unsigned smem, const element_t* source, int stride,
                                          bool whole, Valid valid) {
    constexpr int CHUNKS = Tile<COLUMNS>::CHUNKS, STEP = THREADS / CHUNKS;  // rows loaded at once
    static_assert(THREADS % CHUNKS == 0 && ROWS % STEP == 0, "the threads must divide the tile");
    unsigned first = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    const element_t* from = source + static_cast<long long>(first) * stride + chunk * CHUNK;
    if (whole) {
#pragma unroll
        for (int i = 0; i < ROWS / STEP; ++i)
            cp_async_16(smem + Tile<COLUMNS>::offset(first + i * STEP, chunk),
                        from + static_cast<long long>(i * STEP) * stride, true);
    } else {
#pragma unroll 1  // at edges only: unrolled, its addresses would cost registers everywhere
        for (int row = first; row < ROWS;
             row += STEP, from += static_cast<long long>(STEP) * stride) {
            bool ok = valid(row, chunk * CHUNK);
            cp_async_16(smem + Tile<COLUMNS>::offset(row, chunk), ok ? from : source, ok);
        }
    }
}

// out += A B for one BLOCK_K of the tiles at `a` and `b`.
__device__ __forceinline__ void multiply(float (&out)[MMA_M][MMA_N][4], unsigned a, unsigned b) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int low = lane % 16, high = lane / 16;
    // Every later row is a multiple of 16 further on, every later chunk pair a xor of an even
    // number: one base address each, and a constant apart.
    int a_row = warp / WARPS_N * WARP_M + low;
    unsigned a_base = a + a_row * A_ROW_BYTES;
    unsigned a_chunk = (high ^ Tile<BLOCK_K>::swizzle(a_row)) * 16;
    int first = warp % WARPS_N * WARP_N;
#if STAGE_QK
    int b_row =
        first + lane % 8 + high * 8;  // matrices: keys 0-7 low and high k, keys 8-15 the same
    unsigned b_base = b + b_row * B_ROW_BYTES;
    unsigned b_chunk = (lane / 8 % 2 ^ Tile<B_COLUMNS>::swizzle(b_row)) * 16;
#else
    unsigned b_base = b + low * B_ROW_BYTES;  // columns 0-7 low and high k, columns 8-15
    unsigned b_chunk = (first / CHUNK ^ high ^ Tile<B_COLUMNS>::swizzle(low)) * 16;
#endif
#pragma unroll
    for (int k = 0; k < BLOCK_K / 16; ++k) {
        unsigned fragment_a[MMA_M][4], fragment_b[MMA_N / 2][4];
#pragma unroll
        for (int i = 0; i < MMA_M; ++i)
            ldmatrix_x4(fragment_a[i], a_base + i * 16 * A_ROW_BYTES + (k * 32 ^ a_chunk));
#pragma unroll
        for (int j = 0; j < MMA_N / 2; ++j) {
#if STAGE_QK
            ldmatrix_x4(fragment_b[j], b_base + j * 16 * B_ROW_BYTES + (k * 32 ^ b_chunk));
#else
            ldmatrix_x4_trans(fragment_b[j], b_base + k * 16 * B_ROW_BYTES + (j * 32 ^ b_chunk));
#endif
        }
#pragma unroll
        for (int i = 0; i < MMA_M; ++i)
#pragma unroll
            for (int j = 0; j < MMA_N; ++j) {
                const unsigned* pair = fragment_b[j / 2] + j % 2 * 2;
                mma_16816<IS_BF16>(out[i][j], fragment_a[i], pair[0], pair[1]);
            }
    }
}

// The pipeline over `steps` tiles of the inner dimension: load(step, stage) issues the copies of
// one, use(step, stage) consumes it. A stage is refilled one step after its use: one barrier a
// step.
template <class Load, class Use>
__device__ __forceinline__ void pipeline(int steps, Load load, Use use) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        if (s < steps) load(s, s);
        cp_async_commit();
    }
#pragma unroll 1
    for (int step = 0, stage = 0, used = 0; step < steps; ++step) {
        if (step == 0) cp_async_wait<STAGES - 1>();
        else cp_async_wait < STAGES<2 ? 0 : STAGES - 2>();
        __syncthreads();
        if (STAGES > 1 && step > 0) {
            if (step - 1 + STAGES < steps) load(step - 1 + STAGES, used);
            cp_async_commit();
        }
        use(step, stage);
        used = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
}

// Round the block's tile, times `factor`, and store rows 0 .. rows - 1 and columns 0 .. columns - 1
// (a multiple of CHUNK) in 16-byte pieces, by way of shared memory that no warp uses any more.
__device__ __forceinline__ void store_tile(const float (&in)[MMA_M][MMA_N][4], float factor,
                                           unsigned char* smem, element_t* target, int stride,
                                           int rows, int columns) {
    using Staged = Tile<BLOCK_N>;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int top = warp / WARPS_N * WARP_M + lane / 4, left = warp % WARPS_N * WARP_N;
#pragma unroll
    for (int i = 0; i < MMA_M; ++i)
#pragma unroll
        for (int j = 0; j < MMA_N; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned at =
                    Staged::offset(top + i * 16 + half * 8, left / CHUNK + j) + lane % 4 * 4;
                *reinterpret_cast<unsigned*>(smem + at) =
                    pack(in[i][j][half * 2] * factor, in[i][j][half * 2 + 1] * factor);
            }
    __syncthreads();
    constexpr int STEP = THREADS / Staged::CHUNKS;
    static_assert(THREADS % Staged::CHUNKS == 0, "a row's chunks must divide the threads");
    int row = threadIdx.x / Staged::CHUNKS, chunk = threadIdx.x % Staged::CHUNKS;
    if (chunk * CHUNK >= columns) return;
    target += static_cast<long long>(row) * stride + chunk * CHUNK;
#pragma unroll 4
    for (; row < min(rows, BLOCK_M); row += STEP, target += static_cast<long long>(STEP) * stride)
        *reinterpret_cast<uint4*>(target) =
            *reinterpret_cast<const uint4*>(smem + Staged::offset(row, chunk));
}
#endif

#if STAGE_QK
// Block (QK_TILES tiles of keys for one of queries, head). Scores are scaled by log2(e) as well, so
// that softmax is a subtraction and an ex2. With several tiles, K arrives while scores leave: 14 us
// instead of 18 at (1,16,1024,64) on an H200, where merely filling the scores takes 11 (3 TB/s).
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    three_kernel_mma_qk(const element_t* __restrict__ q, const element_t* __restrict__ k,
                        element_t* __restrict__ scores, int heads, int heads_kv, int seqlen_q,
                        int seqlen_k, int stride, float scale) {
    extern __shared__ __align__(128) unsigned char smem[];
    constexpr int KEYS = QK_TILES * BLOCK_N;
    int blocks_n = ceil_div<KEYS>(seqlen_k);
    int row = blockIdx.x / blocks_n * BLOCK_M, key = blockIdx.x % blocks_n * KEYS;
    int rows = min(BLOCK_M, seqlen_q - row);
    int keys = min(KEYS, visible_keys(row + rows - 1, seqlen_q, seqlen_k).end - key);
    if (HIDES_LATER && keys <= 0) return;
    long long query = static_cast<long long>(blockIdx.y) * seqlen_q + row;
    q += query * HEAD_DIM;
    k += (head_kv_of(blockIdx.y, heads, heads_kv) * seqlen_k + key) * HEAD_DIM;
    scores += query * stride + key;

    unsigned smem_a = smem_address(smem), smem_b = smem_a + PANELS * A_BYTES;
    unsigned char* staged = smem + (QK_TILES == 1 ? 0 : PANELS * A_BYTES + STAGES * B_BYTES);
    float tile[MMA_M][MMA_N][4] = {};
    pipeline(
        ceil_div<BLOCK_N>(keys) * PANELS,
        [&](int step, int stage) {
            int column = step % PANELS * BLOCK_K, left = seqlen_k - key - step / PANELS * BLOCK_N;
            if (step < PANELS)
                load_tile<BLOCK_M, BLOCK_K>(smem_a + step * A_BYTES, q + column, HEAD_DIM,
                                            rows == BLOCK_M, [&](int r, int) { return r < rows; });
            const element_t* from =
                k + static_cast<long long>(step / PANELS * BLOCK_N) * HEAD_DIM + column;
            load_tile<BLOCK_N, BLOCK_K>(smem_b + stage * B_BYTES, from, HEAD_DIM, left >= BLOCK_N,
                                        [&](int r, int) { return r < left; });
        },
        [&](int step, int stage) {
            multiply(tile, smem_a + step % PANELS * A_BYTES, smem_b + stage * B_BYTES);
            if (step % PANELS < PANELS - 1) return;
            if (QK_TILES == 1) __syncthreads();  // the scores go where Q and K were
            int column = step / PANELS * BLOCK_N;
            store_tile(tile, scale * LOG2E, staged, scores + column, stride, rows,
                       stride - key - column);
#pragma unroll
            for (int i = 0; i < MMA_M; ++i)
#pragma unroll
                for (int j = 0; j < MMA_N; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) tile[i][j][e] = 0.f;
        });
}
#endif

#if STAGE_SOFTMAX
constexpr int BLOCK_ROWS = SOFTMAX_BLOCK / SOFTMAX_THREADS, VECTOR = SOFTMAX_VECTOR;
constexpr int STEP = SOFTMAX_THREADS * VECTOR;  // keys that a row's threads load at once

// VECTOR neighbours of one row. Elements `keys` and beyond count as masked.
__device__ __forceinline__ void load_scores(float (&out)[VECTOR], const element_t* row, int at,
                                            int keys) {
    unsigned packed[(VECTOR + 1) / 2];
    row += at;
    if constexpr (VECTOR == 8)
        *reinterpret_cast<uint4*>(packed) = *reinterpret_cast<const uint4*>(row);
    else if constexpr (VECTOR == 4)
        *reinterpret_cast<uint2*>(packed) = *reinterpret_cast<const uint2*>(row);
    else if constexpr (VECTOR == 2) packed[0] = *reinterpret_cast<const unsigned*>(row);
    else packed[0] = row[0];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        float s = i % 2 ? high_of(packed[i / 2]) : low_of(packed[i / 2]);
        out[i] = at + i < keys ? s : minus_infinity();
    }
}

__device__ __forceinline__ void store_scores(element_t* row, int at, const float (&in)[VECTOR],
                                             float factor) {
    row += at;
    if constexpr (VECTOR == 1) {
        row[0] = to_element(in[0] * factor);
    } else {
        unsigned packed[(VECTOR + 1) / 2];
#pragma unroll
        for (int i = 0; i < VECTOR / 2; ++i)
            packed[i] = pack(in[2 * i] * factor, in[2 * i + 1] * factor);
        if constexpr (VECTOR == 8)
            *reinterpret_cast<uint4*>(row) = *reinterpret_cast<uint4*>(packed);
        else if constexpr (VECTOR == 4)
            *reinterpret_cast<uint2*>(row) = *reinterpret_cast<uint2*>(packed);
        else *reinterpret_cast<unsigned*>(row) = packed[0];
    }
}

// Bound by the stores: 12.5 us at (1,16,1024,64), and 12.1 for multiplying the scores by one.
extern "C" __global__ void __launch_bounds__(SOFTMAX_BLOCK, MIN_BLOCKS)
    three_kernel_mma_softmax(element_t* __restrict__ scores, int rows, int seqlen_q, int seqlen_k,
                             int stride) {
    extern __shared__ float exchange[];  // one float a warp for the maximum, one for the sum
    // The last rows first: qk left these in L2. Of no use while all scores fit (16 heads of 1024²),
    // 79 us a call instead of 87 at 32 heads, where they do not. If later rows see more keys, also
    // the longest first.
    int row = (gridDim.x - 1 - blockIdx.x) * BLOCK_ROWS + threadIdx.x / SOFTMAX_THREADS;
    // Threads without a row stay for the barriers: they have no key, and so touch nothing.
    int keys =
        row < rows ? visible_keys(HIDES_LATER ? row % seqlen_q : 0, seqlen_q, seqlen_k).end : 0;
    int written = round_up(keys, CHUNK), first = threadIdx.x % SOFTMAX_THREADS * VECTOR;
    scores += static_cast<long long>(row) * stride;

#if SOFTMAX_READS == 1
    constexpr int LOADS = MAX_KEYS / STEP;  // the whole row in registers
    float p[LOADS][VECTOR], largest = minus_infinity(), sum = 0.f;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        if (first + i * STEP < written) {
            load_scores(p[i], scores, first + i * STEP, keys);
        } else {
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) p[i][e] = minus_infinity();
        }
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) largest = fmaxf(largest, p[i][e]);
    largest = row_reduce<SOFTMAX_THREADS, true>(largest, exchange);
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) sum += p[i][e] = exp2_approx(p[i][e] - largest);
    float inverse = 1.f / row_reduce<SOFTMAX_THREADS, false>(sum, exchange + SOFTMAX_BLOCK / 32);
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
        if (first + i * STEP < written) store_scores(scores, first + i * STEP, p[i], inverse);
#else
    float p[VECTOR], largest = minus_infinity(), sum = 0.f;
#pragma unroll 4
    for (int at = first; at < keys; at += STEP) {  // each holds a key, so `grown` is finite
        load_scores(p, scores, at, keys);
        float grown = largest;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) grown = fmaxf(grown, p[e]);
        sum *= exp2_approx(largest - grown), largest = grown;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) sum += exp2_approx(p[e] - grown);
    }
    float all = row_reduce<SOFTMAX_THREADS, true>(largest, exchange);
    // A thread that saw no key has sum 0 and largest -inf, and ex2(-inf) is 0.
    float inverse = 1.f / row_reduce<SOFTMAX_THREADS, false>(sum * exp2_approx(largest - all),
                                                             exchange + SOFTMAX_BLOCK / 32);
#pragma unroll 4
    for (int at = first; at < written; at += STEP) {
        load_scores(p, scores, at, keys);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) p[e] = exp2_approx(p[e] - all);
        store_scores(scores, at, p, inverse);
    }
#endif
}
#endif

#if STAGE_PV
// Block (tile of head_dim + tiles of head_dim * tile of queries, head).
// At (1,16,1024,64) on an H200 it takes 9 us, and as long with half the heads, when half the SMs
// are idle: a block's own chain of steps, not traffic. Eight warps that share each stage's keys out
// and add up at the end were no faster (37.6 us a call against 36.9), nor are more stages than two
// (2 %).
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    three_kernel_mma_pv(const element_t* __restrict__ scores, const element_t* __restrict__ v,
                        element_t* __restrict__ o, int heads, int heads_kv, int seqlen_q,
                        int seqlen_k, int stride) {
    extern __shared__ __align__(128) unsigned char smem[];
    constexpr int TILES_N = HEAD_DIM / BLOCK_N;
    int tile_m = blockIdx.x / TILES_N, column = blockIdx.x % TILES_N * BLOCK_N;
    if (LATER_SEE_MORE) tile_m = gridDim.x / TILES_N - 1 - tile_m;  // the longest first
    int row = tile_m * BLOCK_M, rows = min(BLOCK_M, seqlen_q - row);
    int keys = visible_keys(row + rows - 1, seqlen_q, seqlen_k).end;
    long long query = static_cast<long long>(blockIdx.y) * seqlen_q + row;
    scores += query * stride;
    v += head_kv_of(blockIdx.y, heads, heads_kv) * seqlen_k * HEAD_DIM + column;

    int whole =
        rows < BLOCK_M ? 0 : visible_keys(row, seqlen_q, seqlen_k).end;  // keys that all rows have
    unsigned smem_a = smem_address(smem), smem_b = smem_a + STAGES * A_BYTES;
    float tile[MMA_M][MMA_N][4] = {};
    pipeline(
        ceil_div<BLOCK_K>(keys),
        [&](int step, int stage) {
            int key = step * BLOCK_K;
            load_tile<BLOCK_M, BLOCK_K>(
                smem_a + stage * A_BYTES, scores + key, stride, key + BLOCK_K <= whole,
                [&](int r, int c) {
                    return r < rows && key + c < visible_keys(row + r, seqlen_q, seqlen_k).end;
                });
            load_tile<BLOCK_K, BLOCK_N>(
                smem_b + stage * B_BYTES, v + static_cast<long long>(key) * HEAD_DIM, HEAD_DIM,
                key + BLOCK_K <= seqlen_k, [&](int r, int) { return key + r < seqlen_k; });
        },
        [&](int, int stage) {
            multiply(tile, smem_a + stage * A_BYTES, smem_b + stage * B_BYTES);
        });
    __syncthreads();  // the output goes where P and V were
    store_tile(tile, 1.f, smem, o + query * HEAD_DIM + column, HEAD_DIM, rows, BLOCK_N);
}
#endif
