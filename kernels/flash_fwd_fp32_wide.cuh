// What a block of flash_fwd_fp32_wide does alone: Q K^T of its slice of the columns, then P V of
// it. Reads the family's parameters.
#pragma once
#include "common/ptx/mma.cuh"
#include "common/ptx/shared.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"
#include "common/tile/scheduler.cuh"

using namespace attn;

#if MATH_TF32X3
constexpr bool TENSOR = true;
#else
constexpr bool TENSOR = false;
#endif
constexpr int THREADS = NUM_WARPS * 32;
static_assert(HEAD_DIM % 4 == 0 && BLOCK_M % 16 == 0 && BLOCK_N % 16 == 0 && CHUNK % 16 == 0,
              "whole float4");

// Q K^T: a warp multiplies its own CHUNK columns of all rows of the tile, every NUM_WARPS-th chunk
// of the slice, through a ring that only it fills and reads: no barrier until the warps' scores are
// added.
constexpr int SLICE = ceil_div<SLICES * CHUNK>(HEAD_DIM) * CHUNK;
constexpr bool WHOLE = SLICE * SLICES == HEAD_DIM;
constexpr int CHUNKS = SLICE / CHUNK, QK_WARPS = CHUNKS < NUM_WARPS ? CHUNKS : NUM_WARPS;
// Rows in the ring. FFMA reads 16 bytes of 8 rows at once, which must lie in 8 bank groups:
// padding. A fragment is 64 bytes of 8 rows, and neighbours must lie in different halves of the
// banks: odd rows swap.
constexpr int PITCH = CHUNK + (TENSOR ? 0 : 4);
constexpr int SWAP = TENSOR && CHUNK % 32 == 0 ? 16 : 0;
constexpr int STAGE = (BLOCK_M + BLOCK_N) * PITCH;
constexpr int SCORES_OF_LANE = BLOCK_M * BLOCK_N / 32;
constexpr int MERGE_PITCH = BLOCK_N + 8;
constexpr int P_PITCH = BLOCK_M + 8;  // P is stored by key

// P V: a lane holds VECTOR columns (FFMA) of all BLOCK_M queries, a warp 32 times as many. V goes
// from memory to registers, since nobody else wants it, 8 keys ahead. In a narrow slice warps split
// the keys too.
constexpr int VECTOR = BLOCK_M == 16 && SLICE > 64 ? 4 : 2;
constexpr int COLUMNS = 32 * VECTOR, BLOCKS = ceil_div<COLUMNS>(SLICE);
constexpr int COLUMN_WARPS = BLOCKS < NUM_WARPS ? BLOCKS : NUM_WARPS,
              KEY_WARPS = NUM_WARPS / COLUMN_WARPS;
constexpr int KEYS = 8;  // of one step
constexpr int OUT_PITCH = SLICE + 4;

// What one block works on. Pointers are to its head: k and v to column 0, q and o to its first
// query too.
struct Work {
    const float *q, *k, *v;
    float* o;
    int head, slice, first_row, rows;  // rows: of the output that are left
    int first_column, width;           // the slice's columns, none if width <= 0
    int keys, keys_padded;             // keys that some query sees; seqlen_k in whole tiles

    __device__ __forceinline__ Work(const float* q, const float* k, const float* v, float* o,
                                    int heads, int heads_kv, int seqlen_q, int seqlen_k) {
        head = blockIdx.y, slice = blockIdx.x % SLICES, first_row = blockIdx.x / SLICES * BLOCK_M;
        rows = seqlen_q - first_row;
        const long long row = static_cast<long long>(head) * seqlen_q + first_row;
        const int head_kv =
            heads == heads_kv ? head : head / (heads / heads_kv);  // spares two divisions
        const long long key = static_cast<long long>(head_kv) * seqlen_k;
        this->q = q + row * HEAD_DIM, this->o = o + row * HEAD_DIM;
        this->k = k + key * HEAD_DIM, this->v = v + key * HEAD_DIM;
        first_column = slice * SLICE, width = WHOLE ? SLICE : min(SLICE, HEAD_DIM - first_column);
        keys = visible_keys(min(first_row + BLOCK_M, seqlen_q) - 1, seqlen_q, seqlen_k).end;
        keys_padded = ceil_div<BLOCK_N>(seqlen_k) * BLOCK_N;
    }
};

__device__ __forceinline__ float4 load4(const float* p) {
    return *reinterpret_cast<const float4*>(p);
}
__device__ __forceinline__ void store4(float* p, float4 x) { *reinterpret_cast<float4*>(p) = x; }
__device__ __forceinline__ float part(const float4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// ---- Q K^T ----
// CHUNK columns of ROWS rows to the ring. Rows from rows_left on repeat the last: what they give is
// not used. Columns that are not there become zeros.
template <int ROWS>
__device__ __forceinline__ void load_rows(float* target, const float* source, int rows_left,
                                          bool inside) {
    constexpr int STEP = 128 / CHUNK;  // rows that a warp takes at once
    static_assert(ROWS % STEP == 0, "whole rows for every lane");
    const int row = threadIdx.x % 32 / (CHUNK / 4), column = threadIdx.x % 32 % (CHUNK / 4) * 4;
    static_assert(STEP % 2 == 0, "a lane's rows are all odd or all even");
    const unsigned to = smem_address(target + row * PITCH + (column ^ row % 2 * SWAP));
    if (WHOLE && rows_left >= ROWS) {
        source += static_cast<long long>(row) * HEAD_DIM + column;
#pragma unroll
        for (int i = 0; i < ROWS; i += STEP)
            cp_async_16(to + i * PITCH * 4, source + static_cast<long long>(i) * HEAD_DIM);
    } else {
#pragma unroll 1
        for (int i = 0; i < ROWS; i += STEP) {
            const float* from =
                source + static_cast<long long>(min(row + i, rows_left - 1)) * HEAD_DIM;
            cp_async_16(to + i * PITCH * 4, from + (inside ? column : 0), inside);
        }
    }
}

// FFMA: lane l has queries l / 8 + 4 i and keys l % 8 + 8 j.
__device__ __forceinline__ void multiply_ffma(float (&s)[SCORES_OF_LANE], const float* stage,
                                              int lane) {
    constexpr int M = BLOCK_M / 4, N = BLOCK_N / 8;
    const float *queries = stage + lane / 8 * PITCH, *keys = stage + (BLOCK_M + lane % 8) * PITCH;
#pragma unroll 2
    for (int d = 0; d < CHUNK; d += 4) {
        float4 b[N];
#pragma unroll
        for (int j = 0; j < N; ++j) b[j] = load4(keys + j * 8 * PITCH + d);
#pragma unroll
        for (int i = 0; i < M; ++i) {
            const float4 a = load4(queries + i * 4 * PITCH + d);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                float& sum = s[i * N + j];
                sum = fmaf(a.x, b[j].x, sum), sum = fmaf(a.y, b[j].y, sum);
                sum = fmaf(a.z, b[j].z, sum), sum = fmaf(a.w, b[j].w, sum);
            }
        }
    }
}

// d[i] += a * b[i] in three TF32 products, the small ones first; COUNT of them, which do not wait
// for one another. The tensor core rounds its sums towards zero: callers add few of them there, and
// the rest in fp32.
template <int COUNT>
__device__ __forceinline__ void
mma_split(float (&d)[COUNT][4], const unsigned (&a_high)[4], const unsigned (&a_low)[4],
          const unsigned (&b_high)[COUNT][2], const unsigned (&b_low)[COUNT][2]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) mma_1688(d[i], a_low, b_high[i][0], b_high[i][1]);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) mma_1688(d[i], a_high, b_low[i][0], b_low[i][1]);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) mma_1688(d[i], a_high, b_high[i][0], b_high[i][1]);
}

// Tensor cores: accumulators of 16 queries by 8 keys. Which 8 columns an instruction sums over is
// free, so lane l takes 4 neighbours of each row, 16 bytes, and they serve two instructions.
__device__ __forceinline__ void multiply_tensor(float (&s)[SCORES_OF_LANE], const float* stage,
                                                int lane) {
    constexpr int M = BLOCK_M / 16, N = BLOCK_N / 8, D = CHUNK / 16, GROUP = M > 1 || N < 4 ? 2 : 4;
    const float* own = stage + lane / 4 * PITCH + lane % 4 * 4;
    const int swap = lane / 4 % 2 * SWAP;
    unsigned high[M][2 * D][4], low[M][2 * D][4];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int d = 0; d < D; ++d)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float4 a = load4(own + (m * 16 + h * 8) * PITCH + (d * 16 ^ swap));
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int at = h + e % 2 * 2;
                    tf32_split(part(a, e), high[m][2 * d + e / 2][at], low[m][2 * d + e / 2][at]);
                }
            }
#pragma unroll
    for (int first = 0; first < N; first += GROUP) {
        float sum[M][GROUP][4] = {};
#pragma unroll
        for (int d = 0; d < D; ++d) {
            float4 b[GROUP];
#pragma unroll
            for (int n = 0; n < GROUP; ++n)
                b[n] = load4(own + (BLOCK_M + (first + n) * 8) * PITCH + (d * 16 ^ swap));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned b_high[GROUP][2], b_low[GROUP][2];
#pragma unroll
                for (int n = 0; n < GROUP; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        tf32_split(part(b[n], half * 2 + e), b_high[n][e], b_low[n][e]);
#pragma unroll
                for (int m = 0; m < M; ++m)
                    mma_split(sum[m], high[m][2 * d + half], low[m][2 * d + half], b_high, b_low);
            }
        }
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int i = 0; i < GROUP * 4; ++i) s[(m * N + first) * 4 + i] += sum[m][i / 4][i % 4];
    }
}

// This warp's part of the scores of one tile of keys. after_first() is called when the first copies
// are on their way.
template <class After>
__device__ __forceinline__ void multiply_qk(float (&s)[SCORES_OF_LANE], const Work& work,
                                            float* ring, int seqlen_k, int tile,
                                            After after_first) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int count = ceil_div<NUM_WARPS>(CHUNKS - warp);
    const int keys_left = seqlen_k - tile * BLOCK_N;
    const float* k = work.k + static_cast<long long>(tile) * BLOCK_N * HEAD_DIM;
    ring += warp * (NUM_STAGES * STAGE);
    auto load = [&](int i, int stage) {
        const int column = (warp + i * NUM_WARPS) * CHUNK;
        const bool inside = WHOLE || column + lane % (CHUNK / 4) * 4 < work.width;
        const int from = inside ? work.first_column + column : 0;
        float* target = ring + stage * STAGE;
        load_rows<BLOCK_M>(target, work.q + from, work.rows, inside);
        load_rows<BLOCK_N>(target + BLOCK_M * PITCH, k + from, keys_left, inside);
    };
#pragma unroll
    for (int i = 0; i < SCORES_OF_LANE; ++i) s[i] = 0.f;
#pragma unroll 1
    for (int i = 0; i < NUM_STAGES - 1; ++i) {
        if (i < count) load(i, i);
        cp_async_commit();
    }
    after_first();
    int stage = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        cp_async_wait<NUM_STAGES - 2>();
        __syncwarp();  // all lanes' copies have arrived, and all lanes are done with the stage
                       // before
        const int ahead = i + NUM_STAGES - 1;
        if (ahead < count) load(ahead, stage == 0 ? NUM_STAGES - 1 : stage - 1);
        cp_async_commit();
        if (TENSOR) multiply_tensor(s, ring + stage * STAGE, lane);
        else multiply_ffma(s, ring + stage * STAGE, lane);
        if (++stage == NUM_STAGES) stage = 0;
    }
}

// Adds the warps' scores of a tile, in the order of the warps; store(row, key, four sums) takes
// them.
template <class Store>
__device__ __forceinline__ void merge_scores(const float (&s)[SCORES_OF_LANE], float* scratch,
                                             int tile, Store store) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();  // the scratch is the ring
    if (warp < QK_WARPS) {
        float* own = scratch + warp * (BLOCK_M * MERGE_PITCH);
#pragma unroll
        for (int i = 0; i < SCORES_OF_LANE; ++i) {
            constexpr int N = BLOCK_N / 8;
            if (TENSOR) {
                const int row = i / 4 / N * 16 + lane / 4 + i / 2 % 2 * 8,
                          key = i / 4 % N * 8 + lane % 4 * 2;
                own[row * MERGE_PITCH + key + i % 2] = s[i];
            } else own[(lane / 8 + i / N * 4) * MERGE_PITCH + lane % 8 + i % N * 8] = s[i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BLOCK_M * BLOCK_N / 4; i += THREADS) {
        const int row = i / (BLOCK_N / 4), key = i % (BLOCK_N / 4) * 4;
        float4 sum = load4(scratch + row * MERGE_PITCH + key);
#pragma unroll
        for (int w = 1; w < QK_WARPS; ++w) {
            const float4 x = load4(scratch + (w * BLOCK_M + row) * MERGE_PITCH + key);
            sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
        store(row, tile * BLOCK_N + key, sum);
    }
    __syncthreads();
}

// ---- P V ----
struct Values {
    float x[KEYS * VECTOR];
};
// Where a lane's columns of step `step`, block `block` begin. Tensor cores: lane l loads 4 columns
// of keys l % 4 and l % 4 + 4, for each 32 columns of the block; they belong to four instructions.
__device__ __forceinline__ Values load_values(const Work& work, int seqlen_k, int block, int step) {
    const int lane = threadIdx.x % 32;
    Values values;
    auto source = [&](int key, int column) {
        const bool inside = (WHOLE && SLICE % COLUMNS == 0) || column < work.width;
        return work.v + static_cast<long long>(min(step * KEYS + key, seqlen_k - 1)) * HEAD_DIM +
               (inside ? work.first_column + column : 0);
    };
    if (TENSOR) {
#pragma unroll
        for (int i = 0; i < 2 * VECTOR; ++i) {
            const float4 x =
                load4(source(lane % 4 + i % 2 * 4, block * COLUMNS + i / 2 * 32 + lane / 4 * 4));
#pragma unroll
            for (int e = 0; e < 4; ++e) values.x[i * 4 + e] = part(x, e);
        }
    } else {
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
            const float* from = source(i, block * COLUMNS + lane * VECTOR);
            if (VECTOR == 4) {
                const float4 x = load4(from);
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) values.x[i * VECTOR + e] = part(x, e);
            } else {
                const float2 x = *reinterpret_cast<const float2*>(from);
                values.x[i * VECTOR] = x.x, values.x[i * VECTOR + 1] = x.y;
            }
        }
    }
    return values;
}

// out: FFMA, row by column; tensor cores, 16 rows by instruction (column / 32, column % 4) by its
// four.
__device__ __forceinline__ void multiply_pv(float (&out)[BLOCK_M * VECTOR], const float* p,
                                            const Values& values) {
    const int lane = threadIdx.x % 32;
    if (TENSOR) {
        constexpr int M = BLOCK_M / 16;
        const float* own = p + lane % 4 * P_PITCH + lane / 4;
        unsigned high[M][4], low[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                tf32_split(own[e / 2 * 4 * P_PITCH + m * 16 + e % 2 * 8], high[m][e], low[m][e]);
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) {  // 32 columns: four instructions
            unsigned b_high[4][2], b_low[4][2];
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    tf32_split(values.x[c * 8 + e * 4 + n], b_high[n][e], b_low[n][e]);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                float sum[4][4] = {};
                mma_split(sum, high[m], low[m], b_high, b_low);
#pragma unroll
                for (int i = 0; i < 16; ++i) out[(m * VECTOR + c) * 16 + i] += sum[i / 4][i % 4];
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < KEYS; ++i)
#pragma unroll
            for (int m = 0; m < BLOCK_M; m += 4) {
                const float4 weights = load4(p + i * P_PITCH + m);
#pragma unroll
                for (int e = 0; e < 4; ++e)
#pragma unroll
                    for (int c = 0; c < VECTOR; ++c) {
                        float& sum = out[(m + e) * VECTOR + c];
                        sum = fmaf(part(weights, e), values.x[i * VECTOR + c], sum);
                    }
            }
    }
}

// put(row, column of the slice, VECTOR or 4 floats) takes what multiply_pv gave.
template <class Put>
__device__ __forceinline__ void take_out(const float (&out)[BLOCK_M * VECTOR], int block, Put put) {
    const int lane = threadIdx.x % 32;
    if (TENSOR) {
#pragma unroll
        for (int i = 0; i < BLOCK_M * VECTOR / 4; ++i) {  // (16 rows, 32 columns, which four)
            const int m = i / (VECTOR * 4), c = i / 4 % VECTOR, e = i % 4;
            const float* own = out + (m * VECTOR + c) * 16 + e;
            put(m * 16 + lane / 4 + e / 2 * 8, block * COLUMNS + c * 32 + lane % 4 * 8 + e % 2 * 4,
                make_float4(own[0], own[4], own[8], own[12]));
        }
    } else {
#pragma unroll
        for (int m = 0; m < BLOCK_M; ++m) {
            const float* own = out + m * VECTOR;
            const int column = block * COLUMNS + lane * VECTOR;
            if constexpr (VECTOR == 4) put(m, column, make_float4(own[0], own[1], own[2], own[3]));
            else put(m, column, make_float2(own[0], own[1]));
        }
    }
}

__device__ __forceinline__ int first_block() {
    const int warp = threadIdx.x / 32;
    return warp / COLUMN_WARPS < KEY_WARPS ? warp % COLUMN_WARPS : BLOCKS;
}
// All of P V. `ahead` are the first values that this warp needs.
__device__ __forceinline__ void multiply_all_pv(const Work& work, int seqlen_k, const float* p,
                                                float* scratch, Values ahead) {
    const int key_warp = threadIdx.x / 32 / COLUMN_WARPS, steps = ceil_div<KEYS>(work.keys);
    float* o = work.o + work.first_column;
    auto to_output = [&](int row, int column, auto x) {
        if (row < work.rows && column < work.width)
            *reinterpret_cast<decltype(x)*>(o + static_cast<long long>(row) * HEAD_DIM + column) =
                x;
    };
    for (int block = first_block(); block < BLOCKS; block += COLUMN_WARPS) {
        float out[BLOCK_M * VECTOR];
#pragma unroll
        for (int i = 0; i < BLOCK_M * VECTOR; ++i) out[i] = 0.f;
#pragma unroll 1
        for (int step = key_warp; step < steps; step += KEY_WARPS) {
            const Values values = ahead;
            const bool last = step + KEY_WARPS >= steps;
            const int next_block = last ? block + COLUMN_WARPS : block;
            if (next_block < BLOCKS)
                ahead = load_values(work, seqlen_k, next_block, last ? key_warp : step + KEY_WARPS);
            multiply_pv(out, p + step * (KEYS * P_PITCH), values);
        }
        if constexpr (KEY_WARPS == 1) take_out(out, block, to_output);
        else
            take_out(out, block, [&](int row, int column, auto x) {
                float* to = scratch + (key_warp * BLOCK_M + row) * OUT_PITCH + column;
                if (column < SLICE) *reinterpret_cast<decltype(x)*>(to) = x;
            });
    }
    if constexpr (KEY_WARPS > 1) {
        __syncthreads();
        for (int i = threadIdx.x; i < BLOCK_M * SLICE / 4; i += THREADS) {
            const int row = i / (SLICE / 4), column = i % (SLICE / 4) * 4;
            float4 sum = load4(scratch + row * OUT_PITCH + column);
#pragma unroll
            for (int w = 1; w < KEY_WARPS; ++w) {
                const float4 x = load4(scratch + (w * BLOCK_M + row) * OUT_PITCH + column);
                sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
            }
            to_output(row, column, sum);
        }
    }
}
