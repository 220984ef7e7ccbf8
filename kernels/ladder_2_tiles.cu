// ladder_2_tiles: BLOCK_M query rows share tiles of 64 keys in shared memory, and a thread computes
// a small rectangle of scores in registers. In ladder_1_blocks every row reads all of K and V from
// L2, and each multiplication waits for its own two loads. Here a value of K is read from L2 once
// for BLOCK_M rows, and from shared memory once for the thread's ROWS rows. What it cannot do:
// multiply on tensor cores, which are 16 times as fast. q, o: (batch, heads, seqlen_q, HEAD_DIM);
// k, v: (batch, heads_kv, seqlen_k, HEAD_DIM).
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"
#include "common/tile/softmax.cuh"

using namespace attn;

// 16 x 16 threads: thread (y, x) has rows y + 16 * i; of the scores the keys x + 16 * j, of the
// output the column pairs x + 16 * c. So the 16 threads of a row are half a warp, and reduce it by
// shuffles.
constexpr int THREADS = 256, BLOCK_N = 64;
constexpr int ROWS = BLOCK_M / 16, KEYS = BLOCK_N / 16, PAIRS = HEAD_DIM / 32;
static_assert(BLOCK_M % 16 == 0 && BLOCK_M <= HEAD_DIM, "P must fit where K was");
// Rows of one element pair more than HEAD_DIM: 16 threads read 16 keys in 16 different banks.
constexpr int PITCH = HEAD_DIM / 2 + 1, PITCH_P = BLOCK_N / 2 + 1;  // in pairs
constexpr int CHUNKS = HEAD_DIM / 8;

// ROWS rows of 16-byte chunks to shared memory; rows from rows_left on become zeros.
template <int COUNT>
__device__ __forceinline__ void load_rows(unsigned* target, const element_t* source,
                                          int rows_left) {
#pragma unroll
    for (int i = 0; i < COUNT * CHUNKS / THREADS; ++i) {
        const int at = i * THREADS + threadIdx.x, row = at / CHUNKS, chunk = at % CHUNKS;
        uint4 x = {0, 0, 0, 0};
        if (row < rows_left) x = reinterpret_cast<const uint4*>(source)[at];
        unsigned* to = target + row * PITCH + chunk * 4;
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    ladder_2_tiles(const element_t* __restrict__ q, const element_t* __restrict__ k,
                   const element_t* __restrict__ v, element_t* __restrict__ o, int heads,
                   int heads_kv, int seqlen_q, int seqlen_k, float scale) {
    extern __shared__ __align__(128) unsigned smem[];
    unsigned *q_tile = smem, *k_tile = q_tile + BLOCK_M * PITCH, *v_tile = k_tile + BLOCK_N * PITCH;
    element_t* p_tile = reinterpret_cast<element_t*>(k_tile);  // over K, once the scores are there
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const int head = blockIdx.y,
              head_kv = head / (heads / heads_kv);  // both counted over the batch
    const int first_row = blockIdx.x * BLOCK_M, rows = min(BLOCK_M, seqlen_q - first_row);
    const int block_keys = visible_keys(first_row + rows - 1, seqlen_q, seqlen_k).end;
    const long long query = (static_cast<long long>(head) * seqlen_q + first_row) * HEAD_DIM;
    k += static_cast<long long>(head_kv) * seqlen_k * HEAD_DIM;
    v += static_cast<long long>(head_kv) * seqlen_k * HEAD_DIM;
    load_rows<BLOCK_M>(q_tile, q + query, rows);

    float out[ROWS][PAIRS][2] = {}, largest[ROWS], sum[ROWS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) largest[i] = minus_infinity();
    for (int first = 0; first < block_keys; first += BLOCK_N) {
        const long long tile = static_cast<long long>(first) * HEAD_DIM;
        __syncthreads();  // P and V of the tile before are read
        load_rows<BLOCK_N>(k_tile, k + tile, seqlen_k - first);
        load_rows<BLOCK_N>(v_tile, v + tile, seqlen_k - first);
        __syncthreads();

        float s[ROWS][KEYS] = {};
#pragma unroll 8
        for (int d = 0; d < HEAD_DIM / 2; ++d) {
            float low[KEYS], high[KEYS];
#pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                const unsigned two = k_tile[(x + 16 * j) * PITCH + d];
                low[j] = low_of(two), high[j] = high_of(two);
            }
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const unsigned two = q_tile[(y + 16 * i) * PITCH + d];
#pragma unroll
                for (int j = 0; j < KEYS; ++j)
                    s[i][j] += low_of(two) * low[j] + high_of(two) * high[j];
            }
        }
        __syncthreads();  // K is read: P may lie there

#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int row = y + 16 * i,
                      keys = visible_keys(first_row + row, seqlen_q, seqlen_k).end - first;
            float most = minus_infinity(), weights = 0.f;
#pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                s[i][j] = x + 16 * j < keys ? s[i][j] * scale : minus_infinity();
                most = fmaxf(most, s[i][j]);
            }
            // Every row has a key in the first tile, so that `grown` is finite.
            const float grown = fmaxf(largest[i], row_reduce<16, true>(most, nullptr));
            const float shrink = expf(largest[i] - grown);
#pragma unroll
            for (int j = 0; j < KEYS; ++j) {
                const float p = expf(s[i][j] - grown);
                p_tile[row * (2 * PITCH_P) + x + 16 * j] = to_element(p);
                weights += p;
            }
            largest[i] = grown, sum[i] = sum[i] * shrink + weights;
#pragma unroll
            for (int c = 0; c < PAIRS; ++c) out[i][c][0] *= shrink, out[i][c][1] *= shrink;
        }
        __syncwarp();  // rows of P belong to half a warp

#pragma unroll 4
        for (int j = 0; j < BLOCK_N / 2; ++j) {
            unsigned p[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) p[i] = k_tile[(y + 16 * i) * PITCH_P + j];
#pragma unroll
            for (int c = 0; c < PAIRS; ++c) {
                const unsigned even = v_tile[2 * j * PITCH + x + 16 * c];
                const unsigned odd = v_tile[(2 * j + 1) * PITCH + x + 16 * c];
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    out[i][c][0] += low_of(p[i]) * low_of(even) + high_of(p[i]) * low_of(odd);
                    out[i][c][1] += low_of(p[i]) * high_of(even) + high_of(p[i]) * high_of(odd);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const float inverse = 1.f / row_reduce<16, false>(sum[i], nullptr);
        if (y + 16 * i >= rows) continue;
        unsigned* to = reinterpret_cast<unsigned*>(o + query + (y + 16 * i) * HEAD_DIM) + x;
#pragma unroll
        for (int c = 0; c < PAIRS; ++c)
            to[16 * c] = pack(out[i][c][0] * inverse, out[i][c][1] * inverse);
    }
}
