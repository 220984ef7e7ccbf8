// The stages of flash_fwd_wgmma that read a mask, lengths or diagonals, once for each: what queries
// see, and the list of tiles by it.
#pragma once

#if STAGE_MASK && ITEM_KEYS
// Writes what the queries of an item see: of its mask, whose bits it writes too, or of its range. A
// block has an item.
extern "C" __global__ void __launch_bounds__(MASK_THREADS)
    flash_fwd_wgmma_mask(const void* __restrict__ seen, unsigned* __restrict__ bits,
                         ItemKeys* __restrict__ item_keys, int seqlen_k, int words,
                         int batch_stride, int head_stride, int row_stride, int key_stride) {
    grid_launch_dependents();
    extern __shared__ __align__(16) unsigned char smem[];
    const int item = blockIdx.x;
#if BITS
    const auto* mask =
        static_cast<const unsigned char*>(seen) + static_cast<long long>(item) * batch_stride;
    see_item<MASK_THREADS>(mask, key_stride, bits + static_cast<long long>(item) * words, words,
                           seqlen_k, reinterpret_cast<int2*>(smem), item_keys + item);
#else
    if (threadIdx.x > 0) return;
    const int2 range = static_cast<const int2*>(seen)[item];
    item_keys[item] = {range.x, max(range.y - range.x, 0), 0, 0};
#endif
}
#elif STAGE_MASK
// Writes which keys each row of a mask sees, and a record for each 64 rows; or, with MASK 2, in
// `bounds`, what these see together. The grid is (records of a mask, masks), and with MASK 2 parts
// of the keys come first, so that blocks side by side read what lies side by side in memory.
// RANGES: 1 with key_range, 2 with packed sequences. words_or_cuts: with MASK 2 words of a row's
// bits, otherwise the cuts of its tiles.
extern "C" __global__ void __launch_bounds__(MASK_THREADS, (MASK == 1 ? 2048 : 1024) / MASK_THREADS)
    flash_fwd_wgmma_mask(const unsigned char* __restrict__ mask, const int2* __restrict__ key_range,
                         const int* __restrict__ cu_seqlens_q, const int* __restrict__ cu_seqlens_k,
                         int2* __restrict__ bounds, unsigned* __restrict__ bits,
                         int4* __restrict__ records, int seqlen_q, int seqlen_k, int low, int high,
                         int words_or_cuts, int sequences, int masks_of_batch, int batch_stride,
                         int head_stride, int row_stride, int key_stride) {
    grid_launch_dependents();  // the list of tiles, which waits for what this grid writes
    extern __shared__ __align__(16) unsigned char smem[];
#if MASK == 1
    const int own = blockIdx.y, of_64 = own * gridDim.x + blockIdx.x;
#else
    const int own = blockIdx.z, of_64 = own * gridDim.y + blockIdx.y;
#endif
    const long long first_row = static_cast<long long>(own) * seqlen_q;
#if MASK == 1
    const int2 range = RANGES == 1 ? key_range[own] : int2{0, seqlen_k};
    const Sequences packed{cu_seqlens_q, cu_seqlens_k, sequences};
    const Cuts own_rows{cu_seqlens_q, PACKED ? words_or_cuts : 0, seqlen_q};
    see_diagonals<RANGES == 2>(low, high, range, packed, own_rows, bounds + first_row,
                               records + of_64, reinterpret_cast<int2*>(smem), seqlen_k);
#else
    const int words = words_or_cuts;
    const int batch = own / masks_of_batch, head = own - batch * masks_of_batch;
    const unsigned char* of_own = mask + static_cast<long long>(batch) * batch_stride +
                                  static_cast<long long>(head) * head_stride;
    unsigned* together = reinterpret_cast<unsigned*>(bounds) +
                         of_64 * static_cast<long long>(2 * ceil_div<512>(seqlen_k));
    see_bytes<MASK_THREADS / 32>(of_own, row_stride, key_stride, bits + first_row * words, together,
                                 reinterpret_cast<uint2*>(smem), blockIdx.y * 64, blockIdx.x,
                                 seqlen_q, seqlen_k, words);
#endif
}
#elif STAGE_ORDER
// The list of the tiles of queries of all masks: from their records, or from what each 64 queries
// see together. It begins while the mask stage writes those. One block an SM: for more, ptxas saves
// registers and waits for a load before it begins the next.
#if MASK == 2
#define LIST_OF const unsigned *together, const unsigned *bits, int words, int block_n, int seqlen_q
#else
#define LIST_OF const int4 *records, const int *cu_seqlens_q, int cuts, int seqlen_q, int tiles_m
#endif
extern "C" __global__ void __launch_bounds__(ORDER_THREADS, 1)
    flash_fwd_wgmma_order(LIST_OF, int4* __restrict__ work, int* turns, int masks,
                          int records_of_mask, int seqlen_k) {
    extern __shared__ __align__(16) unsigned char smem[];
    int* place = reinterpret_cast<int*>(smem);
#if MASK == 2
    list_tiles<ROW_GROUPS, ORDER_THREADS>(together, bits, work, masks, records_of_mask, seqlen_q,
                                          seqlen_k, words, block_n, place);
#else
    grid_wait();
    order_tiles<ROW_GROUPS, ORDER_THREADS>(records, work, masks, records_of_mask, tiles_m,
                                           {cu_seqlens_q, PACKED ? cuts : 0, seqlen_q}, seqlen_k,
                                           place);
#endif
    if (blockIdx.x == 0 && threadIdx.x < 2) turns[threadIdx.x] = 0;
}
#endif
