// Tiles in shared memory as wgmma reads them: descriptors, and the layout of a K-major tile.
#pragma once

// A tile of rows of Swizzle = 64 or 128 bytes that TMA wrote with that swizzle, 8 * Swizzle
// aligned. row_step: bytes between groups of 8 rows. column_step: of a transposed operand, between
// 64-column panels.
template <int Swizzle>
__device__ __forceinline__ unsigned long long wgmma_descriptor(unsigned address, unsigned row_step,
                                                               unsigned column_step = 16) {
    return static_cast<unsigned long long>((address & 0x3ffff) >> 4) |
           static_cast<unsigned long long>(column_step >> 4) << 16 |
           static_cast<unsigned long long>(row_step >> 4) << 32 |
           (Swizzle == 128 ? 1ull : 2ull) << 62;
}

// A K-major tile of BlockK columns lies in panels of PANEL columns: rows of 128 or 64 bytes, which
// TMA swizzles over that width.
template <int BlockK>
struct KMajor {
    static constexpr int PANEL = BlockK < 64 ? BlockK : 64, PANELS = BlockK / PANEL,
                         ROW_BYTES = PANEL * 2;

    // Descriptor of columns 16 i .. of the tile, which has Rows rows.
    template <int Rows>
    __device__ static __forceinline__ unsigned long long descriptor(unsigned tile, int i) {
        return wgmma_descriptor<ROW_BYTES>(
            tile + i * 16 / PANEL * Rows * ROW_BYTES + i * 16 % PANEL * 2, 8 * ROW_BYTES);
    }
};
