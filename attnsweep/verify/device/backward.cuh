// The gradients of attention in float64, for compare.cu. It shares no code with the kernels that it
// judges.
#pragma once
#include "reference.cuh"

// sum(dO * O) of each query, by a warp.
template <class T>
__device__ void row_products(const void* o, const void* d_o, double* delta, long long rows,
                             int head_dim) {
    long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    double sum = 0;
    for (long long i = row * head_dim + threadIdx.x % 32; i < (row + 1) * head_dim; i += 32)
        sum += T::value(static_cast<const typename T::Bits*>(o)[i]) *
               T::value(static_cast<const typename T::Bits*>(d_o)[i]);
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (threadIdx.x % 32 == 0) delta[row] = sum;
}

// Products of 64 rows of `a`, from a_first on, with 64 of `b`: a thread has 4 x 4, 16 apart.
template <class T>
__device__ void multiply(const typename T::Bits* a, const typename T::Bits* b, int a_first,
                         int b_first, int a_rows, int b_rows, int head_dim, double* a_chunk,
                         double* b_chunk, double (&s)[4][4]) {
    int y = threadIdx.x / LANES, x = threadIdx.x % LANES;
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) s[i][j] = 0;
    for (int d = 0; d < head_dim; d += CHUNK) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int row = y + 16 * i, column = d + x;
            bool inside = column < head_dim;
            a_chunk[x * PITCH + row] =
                inside && a_first + row < a_rows
                    ? T::value(a[static_cast<long long>(a_first + row) * head_dim + column])
                    : 0.;
            b_chunk[x * PITCH + row] =
                inside && b_first + row < b_rows
                    ? T::value(b[static_cast<long long>(b_first + row) * head_dim + column])
                    : 0.;
        }
        __syncthreads();
#pragma unroll 4
        for (int c = 0; c < CHUNK; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    s[i][j] = fma(a_chunk[c * PITCH + y + 16 * i], b_chunk[c * PITCH + x + 16 * j],
                                  s[i][j]);
    }
}
// acc += w^T rows: w of 64 rows of `from`, from `first` on, and the thread's four of the tile.
template <class T>
__device__ void accumulate(const double* w, const typename T::Bits* from, int first, int rows,
                           int head_dim, int begin, double* chunk, double (&acc)[4][4]) {
    int y = threadIdx.x / LANES, x = threadIdx.x % LANES;
    for (int at = 0; at < TILE; at += CHUNK) {
        __syncthreads();
        for (int i = threadIdx.x; i < CHUNK * TILE; i += LANES * LANES) {
            int row = first + at + i / TILE, column = begin + i % TILE;
            chunk[i] =
                row < rows && column < head_dim
                    ? unless_nan(T::value(from[static_cast<long long>(row) * head_dim + column]))
                    : 0.;
        }
        __syncthreads();
#pragma unroll 4
        for (int c = 0; c < CHUNK; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    acc[i][j] = fma(w[(at + c) * PITCH + y + 16 * i], chunk[c * TILE + x + 16 * j],
                                    acc[i][j]);
    }
}

// 64 columns of dQ of 64 queries of a head; or, KEYS, of dK and dV of 64 keys, over all `group`
// query heads. of_ds: dQ or dK; of_p: dV. ranges: of each item, whose query heads `heads` are.
template <class T, bool KEYS>
__device__ void gradients(const void* q_all, const void* k_all, const void* v_all,
                          const void* d_o_all, const float* lse_all, const double* delta_all,
                          double* of_ds, double* of_p, int group, int seqlen_q, int seqlen_k,
                          int head_dim, double scale, int low, int high, const int* ranges,
                          int heads) {
    extern __shared__ double shared[];
    using Bits = typename T::Bits;
    double *p_tile = shared, *ds_tile = p_tile + TILE * PITCH, *chunk = ds_tile + TILE * PITCH;
    const int rows = KEYS ? seqlen_k : seqlen_q, others = KEYS ? seqlen_q : seqlen_k;
    int tiles = (rows + TILE - 1) / TILE, parts = (head_dim + TILE - 1) / TILE;
    int first = blockIdx.x % tiles * TILE, begin = blockIdx.x / tiles % parts * TILE;
    long long head = blockIdx.x / tiles / parts;
    int y = threadIdx.x / LANES, x = threadIdx.x % LANES;
    double sum[4][4] = {}, sum_p[4][4] = {};
    for (int number = 0; number < (KEYS ? group : 1); ++number) {
        long long head_q = KEYS ? head * group + number : head, head_k = KEYS ? head : head / group;
        const Bits* q = static_cast<const Bits*>(q_all) + head_q * seqlen_q * head_dim;
        const Bits* d_o = static_cast<const Bits*>(d_o_all) + head_q * seqlen_q * head_dim;
        const Bits* k = static_cast<const Bits*>(k_all) + head_k * seqlen_k * head_dim;
        const Bits* v = static_cast<const Bits*>(v_all) + head_k * seqlen_k * head_dim;
        const float* lse = lse_all + head_q * seqlen_q;
        const double* delta = delta_all + head_q * seqlen_q;
        const int* range = ranges ? ranges + 2 * (head_q / heads) : nullptr;
        int first_key = range ? range[0] : 0, end_key = range ? range[1] : seqlen_k;
        for (int other = 0; other < others; other += TILE) {
            int query = KEYS ? other : first, key = KEYS ? first : other;
            if (key + TILE - 1 - query < low || key - (query + TILE - 1) > high) continue;
            if (key + TILE <= first_key || key >= end_key) continue;
            double s[4][4], dp[4][4];
            double* more = chunk + CHUNK * PITCH;
            multiply<T>(KEYS ? k : q, KEYS ? q : k, first, other, rows, others, head_dim, chunk,
                        more, s);
            multiply<T>(KEYS ? v : d_o, KEYS ? d_o : v, first, other, rows, others, head_dim, chunk,
                        more, dp);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    int own = first + y + 16 * i, with = other + x + 16 * j;
                    int row = KEYS ? with : own, column = KEYS ? own : with;
                    bool seen = own < rows && with < others && column - row >= low &&
                                column - row <= high && column >= first_key && column < end_key;
                    double p = seen ? exp(s[i][j] * scale - lse[row]) : 0.;
                    int at = (x + 16 * j) * PITCH + y + 16 * i;
                    p_tile[at] = p, ds_tile[at] = seen ? p * (dp[i][j] - delta[row]) : 0.;
                }
            accumulate<T>(ds_tile, KEYS ? q : k, other, others, head_dim, begin, chunk, sum);
            if (KEYS) accumulate<T>(p_tile, d_o, other, others, head_dim, begin, chunk, sum_p);
            __syncthreads();
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            long long row = first + y + 16 * i;
            int column = begin + x + 16 * j;
            if (row >= rows || column >= head_dim) continue;
            long long at = (head * rows + row) * head_dim + column;
            of_ds[at] = sum[i][j] * scale;
            if (KEYS) of_p[at] = sum_p[i][j];
        }
}

// dQ of one query by a block of 256 threads, of which each warp takes some of the keys; or, KEYS,
// dK of one key and behind it dV, over all `group` query heads. Returns where it is in shared
// memory, in which there is room for 18 * head_dim doubles.
template <class T, bool KEYS>
__device__ const double* gradient_row(const void* q_all, const void* k_all, const void* v_all,
                                      const void* o_all, const void* d_o_all, const float* lse_all,
                                      long long head, int own, int group, int seqlen_q,
                                      int seqlen_k, int head_dim, double scale, int low, int high,
                                      const int* ranges, int heads) {
    extern __shared__ double shared[];
    using Bits = typename T::Bits;
    constexpr int WARPS = 8;
    double *with_s = shared, *with_dp = with_s + head_dim, *parts = with_dp + head_dim;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double *of_ds = parts + 2 * warp * head_dim, *of_p = of_ds + head_dim;
    long long at = (head * (KEYS ? seqlen_k : seqlen_q) + own) * head_dim;
    for (int d = threadIdx.x; d < head_dim; d += 256) {
        with_s[d] = T::value(static_cast<const Bits*>(KEYS ? k_all : q_all)[at + d]);
        with_dp[d] = T::value(static_cast<const Bits*>(KEYS ? v_all : d_o_all)[at + d]);
    }
    for (int d = lane; d < 2 * head_dim; d += 32) of_ds[d] = 0;
    __syncthreads();
    for (int number = 0; number < (KEYS ? group : 1); ++number) {
        long long head_q = KEYS ? head * group + number : head, head_k = KEYS ? head : head / group;
        const int* range = ranges ? ranges + 2 * (head_q / heads) : nullptr;
        int first_key = range ? range[0] : 0, end_key = range ? range[1] : seqlen_k;
        for (int other = warp; other < (KEYS ? seqlen_q : seqlen_k); other += WARPS) {
            int row = KEYS ? other : own, key = KEYS ? own : other;
            if (key - row < low || key - row > high || key < first_key || key >= end_key) continue;
            long long at_q = (head_q * seqlen_q + row) * head_dim;
            long long at_k = (head_k * seqlen_k + key) * head_dim;
            const Bits* o = static_cast<const Bits*>(o_all) + at_q;
            const Bits* d_o = static_cast<const Bits*>(d_o_all) + at_q;
            const Bits* x = KEYS ? static_cast<const Bits*>(q_all) + at_q
                                 : static_cast<const Bits*>(k_all) + at_k;
            const Bits* y = KEYS ? d_o : static_cast<const Bits*>(v_all) + at_k;
            double s = 0, dp = 0, delta = 0;
            for (int d = lane; d < head_dim; d += 32) {
                s += with_s[d] * T::value(x[d]), dp += with_dp[d] * T::value(y[d]);
                delta += T::value(o[d]) * T::value(d_o[d]);
            }
            double p = exp(over_warp(s) * scale - lse_all[head_q * seqlen_q + row]);
            double ds = p * (over_warp(dp) - over_warp(delta)) * scale;
            for (int d = lane; d < head_dim; d += 32)
                of_ds[d] += ds * T::value(x[d]), of_p[d] += p * T::value(y[d]);
        }
    }
    __syncthreads();
    for (int d = threadIdx.x; d < 2 * head_dim; d += 256) {
        double sum = 0;
        for (int i = 0; i < WARPS; ++i) sum += parts[2 * i * head_dim + d];
        shared[d] = sum;
    }
    __syncthreads();
    return shared;
}
