// Building blocks of a warp-specialised GEMM: one warp copies tiles by TMA, whole warpgroups multiply them.
// Include after common/hopper.cuh and common/global.cuh.
#pragma once

// A K-major tile of BLOCK_K columns lies in panels of PANEL columns: rows of 128 or 64 bytes, which TMA
// swizzles over that width.
template <int BLOCK_K>
struct KMajor {
    static constexpr int PANEL = BLOCK_K < 64 ? BLOCK_K : 64, PANELS = BLOCK_K / PANEL, SWIZZLE = PANEL * 2;

    // Descriptor of columns 16 i .. of the tile, which has ROWS rows.
    template <int ROWS>
    __device__ static __forceinline__ unsigned long long descriptor(unsigned tile, int i) {
        return wgmma_descriptor<SWIZZLE>(tile + i * 16 / PANEL * ROWS * SWIZZLE + i * 16 % PANEL * 2,
                                         8 * SWIZZLE);
    }
};

// Barriers: full and empty of each of STAGES ring stages, then of each of PARTS of an operand that stays,
// with an equal share of the warps. WARPS multiply, one more copies: it makes the barriers and goes on to its
// first loads, the others wait here. In a cluster, the ring
// is filled for all blocks at once, so a stage is empty when the warps of all have said so, and no block goes
// on before all have barriers. Takes named barrier 1.
template <int STAGES, int PARTS, int WARPS, int BLOCKS>
__device__ __forceinline__ void init_barriers(unsigned barriers) {
    constexpr int THREADS = WARPS * 32 + 32;
    if (threadIdx.x < WARPS * 32) {
        named_barrier_sync(1, THREADS);
    } else {
        if (threadIdx.x == WARPS * 32) {
#pragma unroll
            for (int i = 0; i < STAGES + PARTS; ++i) {
                mbarrier_init(barriers + 16 * i, 1);
                mbarrier_init(barriers + 16 * i + 8, i < STAGES ? WARPS * BLOCKS : WARPS / max(1, PARTS));
            }
            mbarrier_init_fence();
        }
        __syncwarp();
        named_barrier_arrive(1, THREADS);
    }
    if (BLOCKS > 1) cluster_arrive_relaxed(), cluster_wait();
}
// A warp's word that it no longer reads a ring stage, to every block that fills it: a lane tells one block.
template <int BLOCKS>
struct Release {
    unsigned barriers;  // of the block that this lane tells
    __device__ __forceinline__ explicit Release(unsigned own)
        : barriers(BLOCKS > 1 ? cluster_address(own, threadIdx.x % BLOCKS) : own) {}
    __device__ __forceinline__ void operator()(unsigned stage, bool really = true) const {
        unsigned lane = threadIdx.x % 32;
        if (BLOCKS > 1) mbarrier_arrive_remote(barriers + 16 * stage + 8, lane, really ? BLOCKS : 0);
        else if (lane == 0 && really) mbarrier_arrive(barriers + 16 * stage + 8);
    }
};
// A box of `rows` rows of a panel whose rows have ROW_BYTES. In a cluster, a box is the share of one block,
// `rows` / BLOCKS, and each block gives all of them its share.
template <int BLOCKS, int ROW_BYTES>
__device__ __forceinline__ void load_shared_panel(unsigned panel, const TensorMap& map, unsigned full,
                                                  int column, int row, int head, int rows, unsigned rank) {
    if (BLOCKS == 1) tma_load(panel, map, full, column, row, head);
    else
        tma_load_multicast(panel + rank * (rows / BLOCKS) * ROW_BYTES, map, full, column,
                           row + rank * (rows / BLOCKS), head, (1 << BLOCKS) - 1);
}

// Where a warp puts its 16 rows of an accumulator on their way to memory, 64 columns at a time.
// STORE 0: a box of 16 rows by TMA, so that no warp waits for another. 1: a box of the warpgroup's 64 rows by
// TMA, its four warps' panels being one; takes named barriers 4 .. 7. 2: by the warp's own stores of 16 bytes
// a lane, in which `to` is where the first of its rows and columns goes, `stride` elements a row.
// KEEP: L2 is told to hold on to what is stored.
template <int STORE, bool KEEP>
struct PanelStore {
    static constexpr int ROWS = STORE == 1 ? 64 : 16;  // of a box
    static constexpr unsigned BYTES = ROWS * 128;      // of a panel

    __device__ static __forceinline__ void sync() {
        if (STORE == 1) named_barrier_sync(4 + threadIdx.x / 128, 128);
        else __syncwarp();
    }
    __device__ static __forceinline__ bool issues() { return threadIdx.x % (STORE == 1 ? 128 : 32) == 0; }

    // Until at most PENDING groups of panels stored before are still read.
    template <int PENDING>
    __device__ static __forceinline__ void wait() {
        if (STORE < 2 && issues()) tma_store_wait_read<PENDING>();
        sync();
    }
    __device__ static __forceinline__ void commit() {
        if (STORE < 2 && issues()) tma_store_commit();
    }
    __device__ static __forceinline__ void put(element_t* to, uint4 x) {
        if (KEEP) store_kept<16>(to, &x.x);
        else *reinterpret_cast<uint4*>(to) = x;
    }
    // d times `low` and `high` to columns `column` .. and rows `row` .. of the warp; `panel`: of the box.
    // rows: how many are inside, columns: how many of the 64.
    __device__ static __forceinline__ void store(const TensorMap& map, unsigned panel, const float* d,
                                                 float low, float high, int column, int row, int head,
                                                 int rows, int columns, element_t* to, int stride) {
        int lane = threadIdx.x % 32, in = lane % 16, chunk = lane / 16, slice = threadIdx.x / 32 % 4;
        unsigned own = panel + (STORE == 1 ? slice * 2048 : 0);
#pragma unroll
        for (int i = 0; i < 4; ++i, d += 8)
            stmatrix_x4(own + in * 128 + ((i * 2 + chunk ^ in % 8) << 4), pack(d[0] * low, d[1] * low),
                        pack(d[2] * high, d[3] * high), pack(d[4] * low, d[5] * low),
                        pack(d[6] * high, d[7] * high));
        if constexpr (STORE < 2) {
            fence_async_proxy();
            sync();
            if (issues() && rows > 0 && columns > 0) {  // of the first warp, if the box is of four
                if (KEEP) tma_store(map, panel, column, row, head, EVICT_LAST);
                else tma_store(map, panel, column, row, head);
            }
        } else {
            sync();
            if (lane % 8 * 8 >= columns) rows = 0;
            to += lane / 8 * stride + lane % 8 * 8;
#pragma unroll
            for (int r = lane / 8; r < 16; r += 4, to += 4 * stride) {
                uint4 x = load_shared_16(own + r * 128 + ((lane % 8 ^ r % 8) << 4));
                if (r < rows) put(to, x);
            }
            sync();
        }
    }
};

// The four lanes that hold a row of an accumulator join what they have.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
