// The twin of CUDA's mma.h, for fp16 and bf16. Its fragments are laid out as no GPU lays them out:
// lane l holds every 32nd element of a tile, from the l-th on.
#pragma once
#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace nvcuda::wmma {
struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment {
    static constexpr bool A = std::is_same_v<Use, matrix_a>, B = std::is_same_v<Use, matrix_b>;
    static constexpr int rows = B ? K : M, columns = A ? K : N, num_elements = rows * columns / 32;
    static constexpr bool turned = std::is_same_v<Layout, col_major>;
    using element_type = T;
    T x[num_elements];
};

namespace simt_parts {
inline void meet(const char* name, simt::Where where) {
    simt::collective(name, ~0u, nullptr, [](void* const*, unsigned) {}, where);
}
template <class T>
void check(const T* p, unsigned stride, simt::Where where) {
    auto at = reinterpret_cast<uintptr_t>(p);
    if (at % 32)
        simt::fail(where, "wmma: an address is %d bytes off a multiple of 32", int(at % 32));
    if (stride * sizeof(T) % 16)
        simt::fail(where, "wmma: a stride of %u elements is not a multiple of 16 bytes", stride);
}
// The place of a lane's element e in memory.
template <class Fragment>
unsigned place(unsigned e, unsigned stride, bool turned) {
    unsigned at = 32 * e + simt::self->lane;
    unsigned row = at / Fragment::columns, column = at % Fragment::columns;
    return turned ? column * stride + row : row * stride + column;
}
}  // namespace simt_parts

template <class Fragment, class T>
void fill_fragment(Fragment& to, T value) {
    for (auto& x : to.x) x = typename Fragment::element_type(value);
}
template <class Use, int M, int N, int K, class T, class Layout>
void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& to, const T* from, unsigned stride,
                      SIMT_HERE) {
    using Fragment = fragment<Use, M, N, K, T, Layout>;
    simt_parts::check(from, stride, SIMT_AT);
    for (unsigned e = 0; e < Fragment::num_elements; ++e)
        to.x[e] = from[simt_parts::place<Fragment>(e, stride, Fragment::turned)];
    simt_parts::meet("load_matrix_sync", SIMT_AT);
}
template <int M, int N, int K, class T>
void load_matrix_sync(fragment<accumulator, M, N, K, T>& to, const T* from, unsigned stride,
                      layout_t layout, SIMT_HERE) {
    using Fragment = fragment<accumulator, M, N, K, T>;
    simt_parts::check(from, stride, SIMT_AT);
    for (unsigned e = 0; e < Fragment::num_elements; ++e)
        to.x[e] = from[simt_parts::place<Fragment>(e, stride, layout == mem_col_major)];
    simt_parts::meet("load_matrix_sync", SIMT_AT);
}
template <int M, int N, int K, class T>
void store_matrix_sync(T* to, const fragment<accumulator, M, N, K, T>& from, unsigned stride,
                       layout_t layout, SIMT_HERE) {
    using Fragment = fragment<accumulator, M, N, K, T>;
    simt_parts::check(to, stride, SIMT_AT);
    for (unsigned e = 0; e < Fragment::num_elements; ++e)
        to[simt_parts::place<Fragment>(e, stride, layout == mem_col_major)] = from.x[e];
    simt_parts::meet("store_matrix_sync", SIMT_AT);
}
template <int M, int N, int K, class T, class LayoutA, class LayoutB, class Sum>
void mma_sync(fragment<accumulator, M, N, K, Sum>& d,
              const fragment<matrix_a, M, N, K, T, LayoutA>& a,
              const fragment<matrix_b, M, N, K, T, LayoutB>& b,
              const fragment<accumulator, M, N, K, Sum>& c, SIMT_HERE) {
    struct Lane {
        Sum* d;
        const T *a, *b;
        const Sum* c;
    } own{d.x, a.x, b.x, c.x};
    simt::collective(
        "mma_sync", ~0u, &own,
        [](void* const data[32], unsigned) {
            auto lane = [&](int at) { return static_cast<Lane*>(data[at % 32]); };
            static float sums[M * N];
            for (int i = 0; i < M; ++i)
                for (int j = 0; j < N; ++j) {
                    float sum = lane(i * N + j)->c[(i * N + j) / 32];
                    for (int k = 0; k < K; ++k)
                        sum += float(lane(i * K + k)->a[(i * K + k) / 32]) *
                               float(lane(k * N + j)->b[(k * N + j) / 32]);
                    sums[i * N + j] = sum;
                }
            for (int at = 0; at < M * N; ++at) lane(at)->d[at / 32] = Sum(sums[at]);
        },
        SIMT_AT);
}
}  // namespace nvcuda::wmma
