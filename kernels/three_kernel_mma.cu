// three_kernel_mma: scores = Q K^T, row softmax in place, O = P V, in three launches that hand the
// scores over through L2. mma.sync, cp.async and ldmatrix only, so it runs on sm_80 and later.
// q, o: (batch, heads, seqlen_q, HEAD_DIM); k, v: (batch, heads_kv, seqlen_k, HEAD_DIM).
// scores: (batch * heads, seqlen_q, stride) with stride = seqlen_k rounded up to CHUNK elements.
// Row i has `keys_of(i)` keys. What the stages owe each other, in whole 16-byte chunks of a row:
//   qk writes every chunk that holds a key of the row; softmax reads these and no others, and zeroes
//   the last one's tail; pv reads these and no others, so nothing above the diagonal ever moves.
#include "common/element.cuh"
#include "common/mma.cuh"

constexpr int CHUNK = 8;  // elements in 16 bytes

__device__ __forceinline__ int keys_of(int row, int seqlen_q, int seqlen_k) {
    return CAUSAL ? min(seqlen_k, row + 1 + seqlen_k - seqlen_q) : seqlen_k;  // bottom-right
}
__device__ __forceinline__ int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }

// The head of K and V that query head `head` of the flat (batch, heads) index reads.
__device__ __forceinline__ long long head_kv_of(int head, int heads, int heads_kv) {
    return static_cast<long long>(head / heads) * heads_kv + head % heads / (heads / heads_kv);
}

#if STAGE_QK || STAGE_PV
#if STAGE_QK
constexpr int BLOCK_M = QK_BLOCK_M, BLOCK_N = QK_BLOCK_N, BLOCK_K = QK_BLOCK_K;
constexpr int WARPS = QK_WARPS, STAGES = QK_STAGES;
constexpr int B_ROWS = BLOCK_N, B_COLUMNS = BLOCK_K;  // a tile of K: keys by head_dim
static_assert(HEAD_DIM % BLOCK_K == 0, "QK_BLOCK_K must divide HEAD_DIM");
static_assert(STAGES <= HEAD_DIM / BLOCK_K, "more stages than tiles of head_dim");
static_assert(STAGES > 1 || HEAD_DIM == BLOCK_K, "one stage holds one tile and is never refilled");
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
constexpr int A_BYTES = BLOCK_M * BLOCK_K * 2, B_BYTES = B_ROWS * B_COLUMNS * 2;

// ROWS x COLUMNS of a row-major matrix to shared memory. Chunks for which valid(row, column) is
// false are zero and read nothing.
template <int ROWS, int COLUMNS, class Valid>
__device__ __forceinline__ void load_tile(unsigned smem, const element_t* source, int stride, Valid valid) {
    constexpr int CHUNKS = Tile<COLUMNS>::CHUNKS;
    static_assert(THREADS % CHUNKS == 0, "a row's chunks must divide the threads");
    constexpr int STEP = THREADS / CHUNKS;  // rows that the block loads at once
    unsigned row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    const element_t* from = source + static_cast<long long>(row) * stride + chunk * CHUNK;
#pragma unroll
    for (int i = 0; i < (ROWS + STEP - 1) / STEP; ++i, row += STEP) {
        if (ROWS % STEP != 0 && row >= ROWS) break;
        bool ok = valid(row, chunk * CHUNK);
        cp_async_16(smem + Tile<COLUMNS>::offset(row, chunk),
                    ok ? from + static_cast<long long>(i * STEP) * stride : source, ok);
    }
}

// out += A B for one BLOCK_K of the tiles at `a` and `b`.
__device__ __forceinline__ void multiply(float (&out)[MMA_M][MMA_N][4], unsigned a, unsigned b) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int low = lane % 16, high = lane / 16;
    // Every later row is a multiple of 16 further on, every later chunk pair a xor of an even
    // number: one base address each, and a constant apart.
    int a_row = warp / WARPS_N * WARP_M + low;
    unsigned a_base = a + a_row * Tile<BLOCK_K>::ROW_BYTES;
    unsigned a_chunk = (high ^ Tile<BLOCK_K>::swizzle(a_row)) * 16;
    int first = warp % WARPS_N * WARP_N;
#if STAGE_QK
    int b_row = first + lane % 8 + high * 8;  // matrices: keys 0-7 low k, high k, keys 8-15 low k, high k
    unsigned b_base = b + b_row * Tile<B_COLUMNS>::ROW_BYTES;
    unsigned b_chunk = (lane / 8 % 2 ^ Tile<B_COLUMNS>::swizzle(b_row)) * 16;
#else
    unsigned b_base = b + low * Tile<B_COLUMNS>::ROW_BYTES;  // columns 0-7 low k, high k, columns 8-15 …
    unsigned b_chunk = (first / CHUNK ^ high ^ Tile<B_COLUMNS>::swizzle(low)) * 16;
#endif
#pragma unroll
    for (int k = 0; k < BLOCK_K / 16; ++k) {
        unsigned fragment_a[MMA_M][4], fragment_b[MMA_N / 2][4];
#pragma unroll
        for (int i = 0; i < MMA_M; ++i)
            ldmatrix_x4(fragment_a[i], a_base + i * 16 * Tile<BLOCK_K>::ROW_BYTES + (k * 32 ^ a_chunk));
#pragma unroll
        for (int j = 0; j < MMA_N / 2; ++j) {
#if STAGE_QK
            ldmatrix_x4(fragment_b[j], b_base + j * 16 * Tile<B_COLUMNS>::ROW_BYTES + (k * 32 ^ b_chunk));
#else
            ldmatrix_x4_trans(fragment_b[j], b_base + k * 16 * Tile<B_COLUMNS>::ROW_BYTES + (j * 32 ^ b_chunk));
#endif
        }
#pragma unroll
        for (int i = 0; i < MMA_M; ++i)
#pragma unroll
            for (int j = 0; j < MMA_N; ++j)
                mma_16816(out[i][j], fragment_a[i], fragment_b[j / 2][j % 2 * 2], fragment_b[j / 2][j % 2 * 2 + 1]);
    }
}

// The pipeline over `steps` tiles of the inner dimension. load(step, smem of A, smem of B) issues
// the copies of one. A stage is refilled one step after it was used: one barrier a step.
template <class Load>
__device__ __forceinline__ void accumulate(float (&out)[MMA_M][MMA_N][4], unsigned smem, int steps, Load load) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        if (s < steps) load(s, smem + s * (A_BYTES + B_BYTES), smem + s * (A_BYTES + B_BYTES) + A_BYTES);
        cp_async_commit();
    }
    unsigned stage = smem, used = smem;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        if (step == 0) cp_async_wait<STAGES - 1>();
        else cp_async_wait<STAGES < 2 ? 0 : STAGES - 2>();
        __syncthreads();
        if (STAGES > 1 && step > 0) {
            int next = step - 1 + STAGES;
            if (next < steps) load(next, used, used + A_BYTES);
            cp_async_commit();
        }
        multiply(out, stage, stage + A_BYTES);
        used = stage;
        stage += A_BYTES + B_BYTES;
        if (stage == smem + STAGES * (A_BYTES + B_BYTES)) stage = smem;
    }
}

// Round the block's tile, times `factor`, and store rows 0 .. rows - 1 and columns 0 .. columns - 1
// (a multiple of CHUNK) in 16-byte pieces, by way of the shared memory that the inputs used.
__device__ __forceinline__ void store_tile(const float (&in)[MMA_M][MMA_N][4], float factor, unsigned char* smem,
                                           element_t* target, int stride, int rows, int columns) {
    using Staged = Tile<BLOCK_N>;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int top = warp / WARPS_N * WARP_M + lane / 4, left = warp % WARPS_N * WARP_N;
    __syncthreads();  // every warp is done with the inputs
#pragma unroll
    for (int i = 0; i < MMA_M; ++i)
#pragma unroll
        for (int j = 0; j < MMA_N; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned at = Staged::offset(top + i * 16 + half * 8, left / CHUNK + j) + lane % 4 * 4;
                *reinterpret_cast<unsigned*>(smem + at) =
                    pack(in[i][j][half * 2] * factor, in[i][j][half * 2 + 1] * factor);
            }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < BLOCK_M * Staged::CHUNKS; i += THREADS) {
        int row = i / Staged::CHUNKS, chunk = i % Staged::CHUNKS;
        if (row < rows && chunk * CHUNK < columns)
            *reinterpret_cast<uint4*>(target + static_cast<long long>(row) * stride + chunk * CHUNK) =
                *reinterpret_cast<const uint4*>(smem + Staged::offset(row, chunk));
    }
}
#endif

#if STAGE_QK
// Block (tile of keys + tiles of keys * tile of queries, head). Scores are scaled by log2(e) as
// well, so that softmax is a subtraction and an ex2.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
three_kernel_mma_qk(const element_t* __restrict__ q, const element_t* __restrict__ k, element_t* __restrict__ scores,
                    int heads, int heads_kv, int seqlen_q, int seqlen_k, int stride, float scale) {
    extern __shared__ __align__(128) unsigned char smem[];
    int tiles_n = (seqlen_k + BLOCK_N - 1) / BLOCK_N;
    int row = blockIdx.x / tiles_n * BLOCK_M, key = blockIdx.x % tiles_n * BLOCK_N;
    int rows = min(BLOCK_M, seqlen_q - row), keys = min(BLOCK_N, seqlen_k - key);
    if (CAUSAL && key >= keys_of(row + rows - 1, seqlen_q, seqlen_k)) return;
    long long query = static_cast<long long>(blockIdx.y) * seqlen_q + row;
    q += query * HEAD_DIM;
    k += (head_kv_of(blockIdx.y, heads, heads_kv) * seqlen_k + key) * HEAD_DIM;

    float tile[MMA_M][MMA_N][4] = {};
    accumulate(tile, smem_address(smem), HEAD_DIM / BLOCK_K, [&](int step, unsigned smem_a, unsigned smem_b) {
        load_tile<BLOCK_M, BLOCK_K>(smem_a, q + step * BLOCK_K, HEAD_DIM, [&](int r, int) { return r < rows; });
        load_tile<BLOCK_N, BLOCK_K>(smem_b, k + step * BLOCK_K, HEAD_DIM, [&](int r, int) { return r < keys; });
    });
    store_tile(tile, scale * LOG2E, smem, scores + query * stride + key, stride, rows, stride - key);
}
#endif

#if STAGE_SOFTMAX
constexpr int BLOCK_ROWS = SOFTMAX_BLOCK / SOFTMAX_THREADS, VECTOR = SOFTMAX_VECTOR;
constexpr int STEP = SOFTMAX_THREADS * VECTOR;  // keys that a row's threads load at once

// VECTOR neighbours of one row. Elements `keys` and beyond count as masked.
__device__ __forceinline__ void load_scores(float (&out)[VECTOR], const element_t* row, int at, int keys) {
    unsigned packed[(VECTOR + 1) / 2];
    if constexpr (VECTOR == 8) *reinterpret_cast<uint4*>(packed) = *reinterpret_cast<const uint4*>(row + at);
    else if constexpr (VECTOR == 4) *reinterpret_cast<uint2*>(packed) = *reinterpret_cast<const uint2*>(row + at);
    else if constexpr (VECTOR == 2) packed[0] = *reinterpret_cast<const unsigned*>(row + at);
    else packed[0] = row[at];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        float s = i % 2 ? high_of(packed[i / 2]) : low_of(packed[i / 2]);
        out[i] = at + i < keys ? s : minus_infinity();
    }
}

__device__ __forceinline__ void store_scores(element_t* row, int at, const float (&in)[VECTOR], float factor) {
    if constexpr (VECTOR == 1) {
        row[at] = to_element(in[0] * factor);
    } else {
        unsigned packed[(VECTOR + 1) / 2];
#pragma unroll
        for (int i = 0; i < VECTOR / 2; ++i) packed[i] = pack(in[2 * i] * factor, in[2 * i + 1] * factor);
        if constexpr (VECTOR == 8) *reinterpret_cast<uint4*>(row + at) = *reinterpret_cast<uint4*>(packed);
        else if constexpr (VECTOR == 4) *reinterpret_cast<uint2*>(row + at) = *reinterpret_cast<uint2*>(packed);
        else *reinterpret_cast<unsigned*>(row + at) = packed[0];
    }
}

// Maximum or sum over the threads of a row: shuffles in the warp, then one exchange if it has more.
template <bool MAXIMUM>
__device__ __forceinline__ float reduce(float x, float* exchange) {
    constexpr int LANES = SOFTMAX_THREADS < 32 ? SOFTMAX_THREADS : 32, ROW_WARPS = SOFTMAX_THREADS / LANES;
    auto join = [](float a, float b) { return MAXIMUM ? fmaxf(a, b) : a + b; };
#pragma unroll
    for (int d = LANES / 2; d > 0; d /= 2) x = join(x, __shfl_xor_sync(0xffffffffu, x, d));
    if constexpr (ROW_WARPS > 1) {
        int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) exchange[warp] = x;
        __syncthreads();
        const float* own = exchange + warp / ROW_WARPS * ROW_WARPS;
        x = own[0];
#pragma unroll
        for (int i = 1; i < ROW_WARPS; ++i) x = join(x, own[i]);
    }
    return x;
}

extern "C" __global__ void __launch_bounds__(SOFTMAX_BLOCK, MIN_BLOCKS)
three_kernel_mma_softmax(element_t* __restrict__ scores, int rows, int seqlen_q, int seqlen_k, int stride) {
    extern __shared__ float exchange[];  // one float a warp for the maximum, one for the sum
    int row = blockIdx.x * BLOCK_ROWS + threadIdx.x / SOFTMAX_THREADS;
    // Threads without a row stay for the barriers: they have no key, and so touch nothing.
    int keys = row < rows ? keys_of(CAUSAL ? row % seqlen_q : 0, seqlen_q, seqlen_k) : 0;
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
    largest = reduce<true>(largest, exchange);
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) sum += p[i][e] = exp2_approx(p[i][e] - largest);
    float inverse = 1.f / reduce<false>(sum, exchange + SOFTMAX_BLOCK / 32);
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
    float all = reduce<true>(largest, exchange);
    // A thread that saw no key has sum 0 and largest -inf, and ex2(-inf) is 0.
    float inverse = 1.f / reduce<false>(sum * exp2_approx(largest - all), exchange + SOFTMAX_BLOCK / 32);
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
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
three_kernel_mma_pv(const element_t* __restrict__ scores, const element_t* __restrict__ v, element_t* __restrict__ o,
                    int heads, int heads_kv, int seqlen_q, int seqlen_k, int stride) {
    extern __shared__ __align__(128) unsigned char smem[];
    constexpr int TILES_N = HEAD_DIM / BLOCK_N;
    int tile_m = blockIdx.x / TILES_N, column = blockIdx.x % TILES_N * BLOCK_N;
    if (CAUSAL) tile_m = gridDim.x / TILES_N - 1 - tile_m;  // the longest first
    int row = tile_m * BLOCK_M, rows = min(BLOCK_M, seqlen_q - row);
    int keys = keys_of(row + rows - 1, seqlen_q, seqlen_k);
    long long query = static_cast<long long>(blockIdx.y) * seqlen_q + row;
    scores += query * stride;
    v += head_kv_of(blockIdx.y, heads, heads_kv) * seqlen_k * HEAD_DIM + column;

    float tile[MMA_M][MMA_N][4] = {};
    accumulate(tile, smem_address(smem), (keys + BLOCK_K - 1) / BLOCK_K, [&](int step, unsigned smem_a, unsigned smem_b) {
        int key = step * BLOCK_K;
        load_tile<BLOCK_M, BLOCK_K>(smem_a, scores + key, stride, [&](int r, int c) {
            return r < rows && key + c < keys_of(row + r, seqlen_q, seqlen_k);
        });
        load_tile<BLOCK_K, BLOCK_N>(smem_b, v + static_cast<long long>(key) * HEAD_DIM, HEAD_DIM,
                                    [&](int r, int) { return key + r < seqlen_k; });
    });
    store_tile(tile, 1.f, smem, o + query * HEAD_DIM + column, HEAD_DIM, rows, BLOCK_N);
}
#endif
