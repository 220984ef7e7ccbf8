// Tiles: where their rows lie in global and in shared memory, and how wgmma reads them.
#pragma once
#include "common/ptx/barrier.cuh"
#include "common/ptx/fp8.cuh"
#include "common/ptx/shared.cuh"
#include "common/ptx/tma.cuh"

namespace attn {

// ---- rows of a head in global memory ----
// Heads are counted over all batches: query head `head` is one of batch * heads.

// Strided = false: tensors are contiguous, (batch * heads, seqlen, HeadDim), and so are their maps.
template <bool Strided, int HeadDim>
struct Layout {
    using Head = int;  // as a copy takes it
    __device__ __forceinline__ static Head of_queries(int head) { return head; }
    __device__ __forceinline__ static Head of_keys(int head, int queries_per_key_head) {
        return queries_per_key_head == 1 ? head : head / queries_per_key_head;
    }
    // Elements from the output's first one to that of a row; `at`: head * seqlen_q + row.
    __device__ __forceinline__ static long long of_output(long long at, int, int) {
        return at * HeadDim;
    }
};
// Strided = true: maps are (batch, heads, seqlen, HeadDim) with any strides. heads: of one batch;
// batch_stride, head_stride, row_stride: elements of the output.
template <int HeadDim>
struct Layout<true, HeadDim> {
    struct Head {
        int head, batch;
    };
    int heads, batch_stride, head_stride, row_stride;
    __device__ __forceinline__ Head of_queries(int head) const {
        int batch = head / heads;
        return {head - batch * heads, batch};
    }
    __device__ __forceinline__ Head of_keys(int head, int queries_per_key_head) const {
        int batch = head / heads;
        return {(head - batch * heads) / queries_per_key_head, batch};
    }
    __device__ __forceinline__ long long of_output(long long, int head, int row) const {
        Head to = of_queries(head);
        return static_cast<long long>(to.batch) * batch_stride +
               static_cast<long long>(to.head) * head_stride +
               static_cast<long long>(row) * row_stride;
    }
};

// Copies of columns c0 .. and rows c1 .. of a head.
__device__ __forceinline__ void load_box(unsigned target, const TensorMap& map, unsigned barrier,
                                         int c0, int c1, int head) {
    tma_load(target, map, barrier, c0, c1, head);
}
template <class Head>
__device__ __forceinline__ void load_box(unsigned target, const TensorMap& map, unsigned barrier,
                                         int c0, int c1, const Head& at) {
    tma_load_4d(target, map, barrier, c0, c1, at.head, at.batch);
}
__device__ __forceinline__ void load_box_multicast(unsigned target, const TensorMap& map,
                                                   unsigned barrier, int c0, int c1, int head,
                                                   unsigned short blocks) {
    tma_load_multicast(target, map, barrier, c0, c1, head, blocks);
}
template <class Head>
__device__ __forceinline__ void load_box_multicast(unsigned target, const TensorMap& map,
                                                   unsigned barrier, int c0, int c1, const Head& at,
                                                   unsigned short blocks) {
    tma_load_multicast_4d(target, map, barrier, c0, c1, at.head, at.batch, blocks);
}
__device__ __forceinline__ void store_box(const TensorMap& map, unsigned source, int c0, int c1,
                                          int head) {
    tma_store(map, source, c0, c1, head);
}
template <class Head>
__device__ __forceinline__ void store_box(const TensorMap& map, unsigned source, int c0, int c1,
                                          const Head& at) {
    tma_store_4d(map, source, c0, c1, at.head, at.batch);
}

// ---- tiles in shared memory as wgmma reads them ----

// A tile of rows of Swizzle = 64 or 128 bytes that TMA wrote with that swizzle, 8 * Swizzle
// aligned. row_step: bytes between groups of 8 rows. column_step: of a transposed operand, between
// panels of Swizzle bytes.
template <int Swizzle>
__device__ __forceinline__ unsigned long long wgmma_descriptor(unsigned address, unsigned row_step,
                                                               unsigned column_step = 16) {
    return static_cast<unsigned long long>((address & 0x3ffff) >> 4) |
           static_cast<unsigned long long>(column_step >> 4) << 16 |
           static_cast<unsigned long long>(row_step >> 4) << 32 |
           (Swizzle == 128 ? 1ull : 2ull) << 62;
}

// A tile of T as TMA writes it: in panels whose rows have Swizzle bytes, 64 or 128, and in which 16
// bytes, a chunk, lie in chunk ^ swizzle(row). The last panel may be partly unused. A step is 32
// bytes of columns: what one wgmma multiplies, and one ldmatrix of 16 rows brings.
template <class T, int Rows, int Columns, int Swizzle = Columns * sizeof(T) % 128 == 0 ? 128 : 64>
struct SharedTile {
    static constexpr int PANEL = Swizzle / static_cast<int>(sizeof(T)),  // columns
        PANELS = (Columns + PANEL - 1) / PANEL, ROW_BYTES = Swizzle;
    static constexpr unsigned PANEL_BYTES = Rows * Swizzle, BYTES = PANELS * PANEL_BYTES;
    unsigned address;  // a multiple of 8 * Swizzle

    // From the tile, or from a row of it, to step k; in 16 bytes, as descriptors count.
    __device__ static __forceinline__ constexpr unsigned offset(int k) {
        return k * 32 / Swizzle * PANEL_BYTES + k * 32 % Swizzle;
    }
    __device__ static __forceinline__ constexpr unsigned step(int k) { return offset(k) / 16; }
    // The operand of wgmma whose rows run along the sum: step k of it, and, with step() to be
    // added, the first one.
    __device__ __forceinline__ unsigned long long descriptor(int k) const {
        return wgmma_descriptor<Swizzle>(address + offset(k), 8 * Swizzle);
    }
    __device__ __forceinline__ unsigned long long descriptor() const {
        return wgmma_descriptor<Swizzle>(address, 8 * Swizzle);
    }
    // The operand whose columns do not, as V's: all of them, and the first 16 rows.
    __device__ __forceinline__ unsigned long long transposed_descriptor() const {
        return wgmma_descriptor<Swizzle>(address, 8 * Swizzle, PANEL_BYTES);
    }

    __device__ static __forceinline__ int swizzle(int row) {
        return row * Swizzle / 128 % (Swizzle / 16);
    }
    // Where the first or second chunk of step k lies in a row, which begins at `at`. Only the bits
    // of `row` that swizzle it count, so that a lane may pass its number.
    __device__ static __forceinline__ unsigned chunk(unsigned at, int row, int k, int second) {
        return at + k * 32 / Swizzle * PANEL_BYTES +
               ((k * 32 % Swizzle / 16 + second ^ swizzle(row)) << 4);
    }
    // The same from the chunk of step 0, by constants alone: the swizzle is an XOR too.
    __device__ static __forceinline__ unsigned to_step(unsigned chunk, int k) {
        return (chunk + k * 32 / Swizzle * PANEL_BYTES) ^ (k * 32 % Swizzle);
    }
};

// By a warpgroup: of Rows rows of each panel of a tile, those before `first` and from `end` on
// become zeros, before its wgmma reads them. They are rows of keys that nobody sees, and may hold
// NaN, which a weight of 0 would not take away.
template <class Tile, int Rows>
__device__ __forceinline__ void clear_rows(unsigned rows, int first, int end, int barrier) {
#pragma unroll 1
    for (int at = threadIdx.x % 128 * 16; at < Rows * Tile::ROW_BYTES; at += 128 * 16) {
        const int row = at / Tile::ROW_BYTES;
        if (row >= first && row < end) continue;
#pragma unroll
        for (int i = 0; i < Tile::PANELS; ++i)
            store_shared_floats(rows + i * Tile::PANEL_BYTES + at, 0.f, 0.f, 0.f, 0.f);
    }
    fence_async_proxy();
    named_barrier_sync(barrier, 128);
}

// ---- transposition of bytes ----

// V of Keys rows and Columns bytes becomes its transpose, whose rows have the keys in the order in
// which P comes. A thread of a warpgroup has of a row of scores, in each 8 keys, the keys 2 q and
// 2 q + 1 with q = lane % 4; as a fragment of A it must have bytes 4 q .. 4 q + 3 of each 16. So of
// each 16 keys the bytes 4 q .. are the keys 2 q, 2 q + 1, 8 + 2 q, 9 + 2 q, and P needs no other
// lane. The same order is what the transposition brings: ldmatrix.trans of two matrices of 8 keys
// gives lane l the columns 2 c and 2 c + 1 with c = l / 4 of the keys 2 q and 2 q + 1, and of the
// same 8 further on; two permutations of bytes make of them four keys of column 2 c and four of
// column 2 c + 1, and stmatrix stores each as bytes 4 q .. of a row. Lanes from 16 on take the two
// in the other order, so that the eight rows of a matrix lie in different banks.
// Four warps share the tile, of which this is `warp`: each has every fourth 16 columns. Its pieces
// are 32 keys and 16 columns, of which it loads Ahead before it stores them. The transpose has
// Rows >= Columns rows. All addresses are two bases and constants.
template <int Keys, int Columns, int Rows, int Ahead>
__device__ __forceinline__ void transpose_bytes(unsigned from, unsigned to, int warp) {
    using From = SharedTile<unsigned char, Keys, Columns>;
    using To = SharedTile<unsigned char, Rows, Keys>;
    constexpr int BLOCKS = Keys / 32, PIECES = BLOCKS * (Columns / 64),
                  CHUNKS = From::ROW_BYTES / 16, KEY_CHUNKS = To::ROW_BYTES / 16;
    static_assert(Keys % 32 == 0 && Columns % 64 == 0, "a piece is 32 keys and 16 columns");
    const int lane = threadIdx.x % 32, row = lane % 8, matrix = lane / 8;
    const unsigned first = lane < 16 ? 0x6420 : 0x7531, second = first ^ 0x1111;
    // Matrices are stored of columns 0, 2, 4, 6, 9, 11, 13, 15 and of the others.
    const int column = 2 * row + ((row >= 4) ^ matrix % 2);
    from += lane * From::ROW_BYTES + ((warp ^ From::swizzle(lane)) << 4);
    to += (warp * 16 + column) * To::ROW_BYTES + ((matrix / 2 ^ To::swizzle(column)) << 4);
#pragma unroll
    for (int begin = 0; begin < PIECES; begin += Ahead) {
        unsigned x[Ahead][4];
#pragma unroll
        for (int i = begin; i < begin + Ahead && i < PIECES; ++i) {
            const int keys = i % BLOCKS * 32, chunk = i / BLOCKS * 4;
            ldmatrix_x4_trans(x[i - begin], (from ^ (chunk % CHUNKS << 4)) +
                                                (chunk / CHUNKS * Keys + keys) * From::ROW_BYTES);
        }
#pragma unroll
        for (int i = begin; i < begin + Ahead && i < PIECES; ++i) {
            const int chunk = i % BLOCKS * 2, columns = i / BLOCKS * 64;
            const unsigned (&piece)[4] = x[i - begin];
            stmatrix_x4(
                (to ^ (chunk % KEY_CHUNKS << 4)) +
                    (chunk / KEY_CHUNKS * Rows + columns) * To::ROW_BYTES,
                byte_permute(piece[0], piece[1], first), byte_permute(piece[0], piece[1], second),
                byte_permute(piece[2], piece[3], first), byte_permute(piece[2], piece[3], second));
        }
    }
}

// 512 bytes times `word`, by a warp.
__device__ __forceinline__ void fill_shared(unsigned to, unsigned word) {
    stmatrix_x4(to + threadIdx.x % 32 * 16, word, word, word, word);
}

}  // namespace attn
