// Where the rows of a head lie. Heads are counted over all batches: query head `head` is one of
// batch * heads.
#pragma once
#include "common/ptx/tma.cuh"

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
