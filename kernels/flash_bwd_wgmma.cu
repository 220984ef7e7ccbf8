// flash_bwd_wgmma: the gradients of attention on Hopper, sm_90a only. q, o, dO, dq: (batch, heads,
// seqlen_q, HEAD_DIM); k, v, dk, dv: (batch, heads_kv, seqlen_k, HEAD_DIM); lse: natural, float32,
// (batch, heads, seqlen_q), minus infinity of a query that sees no key. With c = scale * log2(e):
//   P = 2^(c Q K^T - log2(e) lse), dV = P^T dO, dP = dO V^T, dS = P * (dP - delta),
//   delta = rowsum(dO * O), dQ = scale dS K, dK = scale dS^T Q.
//
// keys: a block has KV_WARPGROUPS consumer warpgroups of 64 keys each, and passes the queries that
// see them, of all query heads of its key head, in tiles of BLOCK_M. S^T = K Q^T and dP^T = V dO^T,
// so that P^T and dS^T are operands in registers as they are.
// dQ without RECOMPUTE: the consumers leave dS in shared memory, a warpgroup of its own multiplies
// it by K, and threads of the producer's warpgroup, or with DQ_ADD its own, add 64 queries and some
// columns at a time to fp32 sums in memory, in any order. Stages: delta, which also clears the
// sums; keys; convert. With DQ_RING the sums are a ring of as many heads as stay in L2, and a warp
// of each block of keys converts and clears a share of a head `lag` before its own: delta clears
// the ring once, and convert has the last heads. Blocks count in `turns` what they added and
// converted. With RECOMPUTE: the stage queries computes S and dP again, 64 queries a warpgroup, and
// before that delta. It runs first. Equal calls then give equal bits.
//
// Wide heads, DKV_WARPGROUPS 2: of two warpgroups with the same 64 keys one computes S, P and dV,
// the other dP, dS and dK, and P crosses over. The blocks of a CLUSTER have neighbouring keys, and
// each loads its share of Q and dO for all.
//
// Statistics of queries lie in `neg_lse` (-log2(e) lse) and `delta`, `pitch` of each head: those
// past the last query are minus infinity and 0, and so have no weight. With STATISTICS the sums of
// dP begin with -delta and, with 2, those of S with -lse / scale, which then is in `neg_lse`.
//
// PDL: a launch lets the next begin at once, and waits for the one ahead where it needs what that
// wrote: neg_lse, delta and the cleared sums; the sums.
#ifndef STATISTICS
#define STATISTICS 0
#endif
#ifndef DQ_RING
#define DQ_RING 0
#endif
#include "common/hopper/producer.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/bulk.cuh"
#include "common/ptx/cluster.cuh"
#if DQ_RING && STAGE_KEYS
#include "common/ptx/flags.cuh"
#endif
#include "common/ptx/launch.cuh"
#include "common/ptx/shared.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/ptx/wgmma_first.cuh"
#include "common/tile/fragments.cuh"
#include "common/tile/mask.cuh"
#include "common/tile/pipeline.cuh"
#include "common/tile/shared_tile.cuh"

using namespace attn;

// 1: tensors have any strides, for code that serves a model. The launch says how many heads of them
// a batch has, and where rows of those lie that are read and written without a map.
#ifndef STRIDED
#define STRIDED 0
#endif
#if STRIDED
#define HEADS_PARAMETER , int heads_of_batch
#define STRIDES_PARAMETERS(x) , int x##_batch, int x##_head, int x##_row
#define LAYOUT_OF(x) {heads_of_batch, x##_batch, x##_head, x##_row}
#define HEADS_LAYOUT {heads_of_batch, 0, 0, 0}
#else
#define HEADS_PARAMETER
#define STRIDES_PARAMETERS(x)
#define LAYOUT_OF(x) \
    {}
#define HEADS_LAYOUT \
    {}
#endif
using TensorLayout = Layout<STRIDED, HEAD_DIM>;
// Query i sees the keys i + low to i + high; with WINDOW the launch says both.
#if WINDOW
#define WINDOW_PARAMETERS , int low, int high
#else
#define WINDOW_PARAMETERS
#endif
// 1: each item of the batch has keys of its own range alone, in key_range: the first, and the one
// after the last. heads_of_item: of those that the stage's blocks have. It comes with WINDOW, so
// that one code does every mask.
#ifndef PADDED
#define PADDED 0
#endif
#if PADDED
static_assert(WINDOW, "one code does every mask");
#define RANGE_PARAMETERS , const int *key_range, int heads_of_item
#else
#define RANGE_PARAMETERS
#endif

// Columns of a tile, since wgmma takes 16 at once. Those from HEAD_DIM on are outside the tensors:
// loads by TMA make them 0, and nothing is stored of them. They lie in panels of 64.
constexpr int COLUMNS = (HEAD_DIM + 15) / 16 * 16, PANELS = (COLUMNS + 63) / 64;
constexpr int LANES = HEAD_DIM / 8;  // 16 bytes of a row in global memory
static_assert(HEAD_DIM % 8 == 0, "TMA takes 16 bytes");

// The keys that a head's item has. All lanes have the same, and the compiler must know it: after a
// branch that may part them, ptxas reads descriptors through WARPSYNC and R2UR.
__device__ __forceinline__ KeyRange keys_of_item(const int* key_range, int item, int seqlen_k) {
    const int first = __shfl_sync(0xffffffffu, key_range[2 * item], 0),
              end = __shfl_sync(0xffffffffu, key_range[2 * item + 1], 0);
    return {max(0, first), min(seqlen_k, end)};
}
// -lse as kernels add it, times `by`, to exponents of 2, or to S: what it makes of them has no
// weight where there is no query, or one that sees no key.
__device__ __forceinline__ float negated(float lse, float by) {
    return lse == minus_infinity() ? lse : -lse * by;
}
constexpr bool DELTA_FIRST = STATISTICS > 0, LSE_FIRST = STATISTICS > 1;
__device__ __forceinline__ float lse_factor(float scale) { return LSE_FIRST ? 1.f / scale : LOG2E; }
// The sum of eight products of pairs.
__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
    const unsigned x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += low_of(x[i]) * low_of(y[i]) + high_of(x[i]) * high_of(y[i]);
    return sum;
}

#if DQ_RING
#define IF_RING(...) , __VA_ARGS__
#else
#define IF_RING(...)
#endif

#if STAGE_DELTA
// A row is read by LANES of ROW_THREADS threads, each of which clears 32 bytes of the sums of dQ.
extern "C" __global__ void __launch_bounds__(256)
    flash_bwd_wgmma_delta(const uint4* __restrict__ o, const uint4* __restrict__ d_o,
                          const float* __restrict__ lse, float* __restrict__ neg_lse,
                          float* __restrict__ delta, float4* __restrict__ sums, int seqlen_q,
                          int pitch,
                          float lse_by IF_RING(unsigned* turns, int counts, int lead, int ring)
                              HEADS_PARAMETER STRIDES_PARAMETERS(o) STRIDES_PARAMETERS(d_o)) {
    const TensorLayout of_o LAYOUT_OF(o), of_do LAYOUT_OF(d_o);
    if (PDL) grid_launch_dependents();
    const int row = blockIdx.x * (256 / ROW_THREADS) + threadIdx.x / ROW_THREADS;
    const int head = blockIdx.y, lane = threadIdx.x % ROW_THREADS;
    const bool has_columns = LANES == ROW_THREADS || lane < LANES;
    const long long at = static_cast<long long>(head) * pitch + row;
    float sum = 0.f, own = minus_infinity();
#if DQ_RING
    const int thread = (blockIdx.y * gridDim.x + blockIdx.x) * 256 + threadIdx.x;
    if (thread < counts) turns[thread] = 0;
    if (head >= lead) seqlen_q = 0;  // of which blocks of keys make delta
#endif
    if (row < seqlen_q) {
        const long long from = static_cast<long long>(head) * seqlen_q + row;
        if (has_columns)
            sum = dot(o[of_o.of_output(from, head, row) / 8 + lane],
                      d_o[of_do.of_output(from, head, row) / 8 + lane]);
        own = lse[from];
    }
#pragma unroll
    for (int i = ROW_THREADS / 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    if (lane == 0) neg_lse[at] = negated(own, lse_by), delta[at] = sum;
    const float4 zero = make_float4(0.f, 0.f, 0.f, 0.f);
#if DQ_RING
    if (head >= ring) return;
#endif
    if (has_columns) sums[(at * LANES + lane) * 2] = sums[(at * LANES + lane) * 2 + 1] = zero;
}
#elif STAGE_CONVERT
// The sums lie as the threads that made them had them: of 64 queries and each 8 columns, 128
// threads' four numbers.
extern "C" __global__ void __launch_bounds__(128)
    flash_bwd_wgmma_convert(const float4* sums, uint4* __restrict__ dq, int seqlen_q, int pitch,
                            float scale IF_RING(int first_head, int ring)
                                HEADS_PARAMETER STRIDES_PARAMETERS(dq)) {
    const TensorLayout of_dq LAYOUT_OF(dq);
    extern __shared__ __align__(16) unsigned char smem[];
    if (PDL) grid_wait();
    constexpr int ROW = HEAD_DIM / 2 + 4;  // words, of which four keep rows in other banks
    unsigned* tile = reinterpret_cast<unsigned*>(smem);
    const int t = threadIdx.x, first = blockIdx.x * 64;
#if DQ_RING
    const int head = first_head + blockIdx.y, slot = head % ring;
#else
    const int head = blockIdx.y, slot = head;
#endif
    const float4* from = sums + (static_cast<long long>(slot) * pitch + first) * (HEAD_DIM / 4);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; ++i) {
        const float4 x = from[i * 128 + t];
        unsigned* to = tile + (t / 32 * 16 + t % 32 / 4) * ROW + i * 4 + t % 4;
        to[0] = pack(x.x * scale, x.y * scale), to[8 * ROW] = pack(x.z * scale, x.w * scale);
    }
    __syncthreads();
    const int count = min(64, seqlen_q - first) * LANES;
    for (int i = t; i < count; i += 128) {
        const int row = first + i / LANES;
        const long long at = static_cast<long long>(head) * seqlen_q + row;
        dq[of_dq.of_output(at, head, row) / 8 + i % LANES] =
            *reinterpret_cast<const uint4*>(tile + i / LANES * ROW + i % LANES * 4);
    }
}
#else

// ---- what both stages of products share ----
// d = A B^T of two tiles of COLUMNS columns, whose panels are APanel and BPanel bytes. Not First:
// it is added to d.
template <unsigned APanel, unsigned BPanel, bool First, int R>
__device__ __forceinline__ void multiply(float (&d)[R], unsigned long long a,
                                         unsigned long long b) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; ++i) {
        const unsigned long long x = a + (i / 4 * APanel + i % 4 * 32) / 16,
                                 y = b + (i / 4 * BPanel + i % 4 * 32) / 16;
        if (First && i == 0) WgmmaFirst<2 * R>::template ss<IS_BF16, 0>(d, x, y);
        else Wgmma<2 * R>::template ss<IS_BF16, 0>(d, x, y, 1);
    }
    wgmma_commit();
}
// d += A B. A: X / 4 sixteens of columns in registers. B: as many rows of COLUMNS, in panels of
// Panel bytes, multiplied by Width columns at a time: whole panels, or all.
template <int Width, unsigned Panel, int X>
__device__ __forceinline__ void accumulate(float (&d)[COLUMNS / 2], const unsigned (&a)[X],
                                           unsigned long long b) {
#pragma unroll
    for (int i = 0; i < X / 4; ++i) {
        auto& first = reinterpret_cast<float (&)[Width / 2]>(d);
        Wgmma<Width>::template rs<IS_BF16, 1>(first, a + 4 * i, b + i * 2048 / 16, 1);
        if constexpr (Width < COLUMNS) {
            auto& rest = reinterpret_cast<float (&)[(COLUMNS - Width) / 2]>(d[Width / 2]);
            Wgmma<COLUMNS - Width>::template rs<IS_BF16, 1>(
                rest, a + 4 * i, b + (Width / 64 * Panel + i * 2048) / 16, 1);
        }
    }
    wgmma_commit();
}
// A warpgroup's 64 rows, times `by`, through its rows of panels of Panel bytes to global memory.
template <unsigned Panel>
__device__ __forceinline__ void store_rows(const float (&d)[COLUMNS / 2], float by, unsigned at,
                                           const TensorMap& map, int row,
                                           const TensorLayout::Head& head, int barrier) {
    const int lane = threadIdx.x % 32, in = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; ++i)
        stmatrix_x4(
            at + i / 4 * Panel + in * 128 + ((i % 4 * 2 + lane / 16 ^ in % 8) << 4),
            pack(d[8 * i] * by, d[8 * i + 1] * by), pack(d[8 * i + 2] * by, d[8 * i + 3] * by),
            pack(d[8 * i + 4] * by, d[8 * i + 5] * by), pack(d[8 * i + 6] * by, d[8 * i + 7] * by));
    fence_async_proxy();
    named_barrier_sync(barrier, 128);
    if (threadIdx.x % 128 == 0) {
#pragma unroll
        for (int i = 0; i < PANELS; ++i) store_box(map, at + i * Panel, i * 64, row, head);
        tma_store_commit();
    }
}
// Blocks in the order of their length, heads in groups of `together`, whose tensors share L2.
struct Work {
    int tile, head;
    __device__ __forceinline__ Work(unsigned block, int tiles, int heads, int together) {
        int group = block / (together * tiles), in = block % (together * tiles);
        int of_group = min(together, heads - group * together);
        tile = in / of_group, head = group * together + in % of_group;
    }
};
// The stage and the phase of the j-th use of a ring.
template <int Stages>
struct Position {
    unsigned stage, phase;
    __device__ __forceinline__ explicit Position(int j)
        : stage(static_cast<unsigned>(j) % Stages), phase(static_cast<unsigned>(j) / Stages & 1) {}
};

#if STAGE_KEYS
#include "flash_bwd_wgmma_keys.cuh"
#elif STAGE_QUERIES
#include "flash_bwd_wgmma_queries.cuh"
#endif
#endif
