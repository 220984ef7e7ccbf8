// The twin of kernels/common/hopper.cuh: the same names, run by runtime.cpp.
#pragma once

inline void mbarrier_init(unsigned barrier, unsigned arrivals, SIMT_HERE) {
    simt::mbarrier_init(barrier, arrivals, SIMT_AT);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(unsigned barrier, SIMT_HERE) { simt::mbarrier_arrive(barrier, 0, 1, SIMT_AT); }
inline void mbarrier_expect(unsigned barrier, unsigned bytes, SIMT_HERE) {
    simt::mbarrier_arrive(barrier, bytes, 1, SIMT_AT);
}
template <bool OF_CLUSTER = false>
inline void mbarrier_wait(unsigned barrier, unsigned parity, SIMT_HERE) {
    simt::mbarrier_wait(barrier, parity, SIMT_AT);
}
template <int STAGES>
struct Ring {
    unsigned stage = 0, phase = 0;
    void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    template <int COUNT>
    void skip() {
        static_assert(COUNT <= STAGES, "a ring is passed at most once");
        stage += COUNT;
        if (stage >= STAGES) stage -= STAGES, phase ^= 1;
    }
    void to(unsigned index) { stage = index % STAGES, phase = index / STAGES & 1; }
};

inline void tma_prefetch(const TensorMap&) {}
inline void tma_load(unsigned target, const TensorMap& map, unsigned barrier, int c0, int c1, int c2,
                     SIMT_HERE) {
    const int at[] = {c0, c1, c2};
    simt::tma_load(target, map, barrier, 3, at, 0, SIMT_AT);
}
constexpr unsigned long long EVICT_NORMAL = 0x16f0000000000000ull;
constexpr unsigned long long EVICT_FIRST = 0x12f0000000000000ull, EVICT_LAST = 0x14f0000000000000ull;
inline void tma_load(unsigned target, const TensorMap& map, unsigned barrier, int c0, int c1, int c2,
                     unsigned long long, SIMT_HERE) {
    const int at[] = {c0, c1, c2};
    simt::tma_load(target, map, barrier, 3, at, 0, SIMT_AT);
}
inline void tma_store(const TensorMap& map, unsigned source, int c0, int c1, int c2, SIMT_HERE) {
    const int at[] = {c0, c1, c2};
    simt::tma_store(map, source, 3, at, SIMT_AT);
}
inline void tma_store_commit() { simt::tma_store_commit(); }
template <int PENDING>
void tma_store_wait_read() {
    simt::tma_store_wait(PENDING, true);
}
inline void fence_async_proxy() { simt::fence_async_proxy(); }

inline void stmatrix_x4(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d, SIMT_HERE) {
    const unsigned r[4] = {a, b, c, d};
    simt::stmatrix(address, r, SIMT_AT);
}

inline void wgmma_fence(SIMT_HERE) { simt::wgmma_fence(SIMT_AT); }
inline void wgmma_commit(SIMT_HERE) { simt::wgmma_commit(SIMT_AT); }
template <int PENDING>
void wgmma_wait(SIMT_HERE) {
    simt::wgmma_wait(PENDING, SIMT_AT);
}
template <class T, int N>
void pin(T (&)[N]) {}

inline int opaque(int x) { return x; }

template <int SWIZZLE>
unsigned long long wgmma_descriptor(unsigned address, unsigned row_step, unsigned column_step = 16) {
    return static_cast<unsigned long long>((address & 0x3ffff) >> 4) |
           static_cast<unsigned long long>(column_step >> 4) << 16 |
           static_cast<unsigned long long>(row_step >> 4) << 32 | (SWIZZLE == 128 ? 1ull : 2ull) << 62;
}
template <int N>
struct Wgmma {
    static_assert(N % 8 == 0 && 8 <= N && N <= 256, "wgmma has no such shape");
    template <int TRANSPOSE_B>
    static void ss(float (&d)[N / 2], unsigned long long a, unsigned long long b, int accumulate,
                   SIMT_HERE) {
        simt::wgmma(d, {N, IS_BF16, false, TRANSPOSE_B != 0, accumulate != 0, nullptr, a, b}, SIMT_AT);
    }
    template <int TRANSPOSE_B>
    static void rs(float (&d)[N / 2], const unsigned* a, unsigned long long b, int accumulate, SIMT_HERE) {
        simt::wgmma(d, {N, IS_BF16, false, TRANSPOSE_B != 0, accumulate != 0, a, 0, b}, SIMT_AT);
    }
};

inline void named_barrier_sync(int barrier, int threads, SIMT_HERE) {
    simt::barrier(barrier, threads, true, "named_barrier_sync", SIMT_AT);
}
inline void named_barrier_arrive(int barrier, int threads, SIMT_HERE) {
    simt::barrier(barrier, threads, false, "named_barrier_arrive", SIMT_AT);
}
template <int REGISTERS>
void registers_increase(SIMT_HERE) {
    simt::warpgroup_uniform("setmaxnreg.inc", REGISTERS, SIMT_AT);
}
template <int REGISTERS>
void registers_decrease(SIMT_HERE) {
    simt::warpgroup_uniform("setmaxnreg.dec", REGISTERS, SIMT_AT);
}
inline void grid_wait() { simt::grid_wait(); }
inline void grid_launch_dependents() {}

inline void tma_store(const TensorMap& map, unsigned source, int c0, int c1, int c2, unsigned long long,
                      SIMT_HERE) {
    const int at[] = {c0, c1, c2};
    simt::tma_store(map, source, 3, at, SIMT_AT);
}
inline uint4 load_shared_16(unsigned address, SIMT_HERE) {
    uint4 x;
    simt::load_shared(&x, address, 16, SIMT_AT);
    return x;
}
inline unsigned cluster_rank() { return simt::cluster_rank(); }
inline void cluster_arrive(SIMT_HERE) { simt::cluster_barrier(true, false, SIMT_AT); }
inline void cluster_arrive_relaxed(SIMT_HERE) { simt::cluster_barrier(true, false, SIMT_AT); }
inline void cluster_wait(SIMT_HERE) { simt::cluster_barrier(false, true, SIMT_AT); }
inline unsigned cluster_address(unsigned address, unsigned rank) { return simt::map_address(address, rank); }
inline void mbarrier_arrive_remote(unsigned barrier, unsigned lane, unsigned lanes, SIMT_HERE) {
    if (lane < lanes) simt::mbarrier_arrive(barrier, 0, 1, SIMT_AT);
}
inline void tma_load_multicast(unsigned target, const TensorMap& map, unsigned barrier, int c0, int c1,
                               int c2, unsigned short blocks, SIMT_HERE) {
    const int at[] = {c0, c1, c2};
    simt::tma_load(target, map, barrier, 3, at, blocks, SIMT_AT);
}
inline void store_async_16(unsigned address, unsigned barrier, float a, float b, float c, float d,
                           SIMT_HERE) {
    const float values[] = {a, b, c, d};
    simt::store_async(address, values, barrier, SIMT_AT);
}
