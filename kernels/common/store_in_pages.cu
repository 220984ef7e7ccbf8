// store_in_pages: new rows of K and V of a decoding step, behind the keys that requests have in
// their pages. new_k, new_v: (batch, rows, heads); k, v: (pages, page_size, heads), rows of
// PIECES * BYTES bytes, strides in pieces of BYTES. seqused_k (batch): the keys before; `lengths`
// (batch) gets those after. Rows that fall outside the table, or in pages that the cache has not,
// are stored nowhere.

#if BYTES == 16
using Piece = uint4;
#elif BYTES == 8
using Piece = uint2;
#elif BYTES == 4
using Piece = unsigned;
#elif BYTES == 2
using Piece = unsigned short;
#else
using Piece = unsigned char;
#endif

extern "C"
    __global__ void store_in_pages(const Piece* new_k, const Piece* new_v, Piece* k, Piece* v,
                                   const int* seqused_k, const int* block_table, int* lengths,
                                   int batch, int rows, int heads, int pages, int max_blocks,
                                   int table_stride, int from_request, int from_row, int from_head,
                                   int v_from_request, int v_from_row, int v_from_head, int of_page,
                                   int of_slot, int of_head) {
    const long long all = 1ll * batch * rows * heads * PIECES;
    for (long long at = blockIdx.x * 1ll * blockDim.x + threadIdx.x; at < all;
         at += 1ll * gridDim.x * blockDim.x) {
        const int piece = static_cast<int>(at % PIECES);
        const long long row_of_head = at / PIECES;
        const int head = static_cast<int>(row_of_head % heads);
        const int row = static_cast<int>(row_of_head / heads % rows);
        const int request = static_cast<int>(row_of_head / heads / rows);
        const long long key = 1ll * seqused_k[request] + row, block = key / PAGE_SIZE;
        if (row == rows - 1 && head == 0 && piece == 0)
            lengths[request] = static_cast<int>(min(max(key + 1, 0ll), 0x7fffffffll));
        if (key < 0 || block >= max_blocks) continue;
        const int page = block_table[1ll * request * table_stride + block];
        if (page < 0 || page >= pages) continue;
        const long long to =
            1ll * page * of_page + key % PAGE_SIZE * of_slot + 1ll * head * of_head + piece;
        k[to] = new_k[1ll * request * from_request + 1ll * row * from_row + 1ll * head * from_head +
                      piece];
        v[to] = new_v[1ll * request * v_from_request + 1ll * row * v_from_row +
                      1ll * head * v_from_head + piece];
    }
}
