// What a CUDA template needs to be compiled by g++ and run as fibers on one CPU thread. Test only.
// A thread is a fiber; it runs until it must wait for others, so a warp gets as far as it can
// before another one moves. What is not here does not compile: a test fails, it never passes by
// accident.
#pragma once
#include <stdint.h>
#include <cstddef>
#include <string.h>
#include <type_traits>
#include <utility>

extern "C" {  // <math.h> in C++ takes half the time of a small template
float exp2f(float) noexcept, expf(float) noexcept, logf(float) noexcept, log2f(float) noexcept;
float fmaf(float, float, float) noexcept, fmaxf(float, float) noexcept,
    fminf(float, float) noexcept;
float fabsf(float) noexcept, sqrtf(float) noexcept, floorf(float) noexcept, ceilf(float) noexcept;
float nearbyintf(float) noexcept;
}

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define SIMT 1
// Defaults of a twin's last parameters: where the template called it, for reports.
#define SIMT_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define SIMT_AT \
    simt::Where { file, line }

struct uint3 {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// A tensor map as the runtime reads it: the fields of a declaration's TensorMap and its pointer.
struct alignas(64) TensorMap {
    unsigned char* base;
    uint64_t strides[4];
    unsigned dims[5], box[5];
    int rank, swizzle;
};
static_assert(sizeof(TensorMap) == 128, "as on the device");

namespace simt {
struct Where {
    const char* file;
    int line;
};
struct Thread {
    uint3 index, block;
    unsigned lane, warp;
};
extern Thread* self;
extern uint3 block_dim, grid_dim;
extern float half_values[65536];  // fp16 bits to float

[[noreturn]] void fail(Where where, const char* format, ...) __attribute__((format(printf, 2, 3)));
// Shared memory: addresses are 32 bits, the top byte 0 (own block) or 1 + a rank of the cluster.
void* dynamic_smem();
// A static __shared__ array of the block: `key` is the address of something of its own.
void* static_smem(const void* key, const char* name, std::size_t bytes);
unsigned address_of(const void* p);
unsigned map_address(unsigned address, unsigned rank);
unsigned cluster_rank();
unsigned cluster_size();

// All lanes of `mask` call it; the last one runs act(data of every lane) before any goes on.
using Act = void (*)(void* const data[32], unsigned mask);
void collective(const char* name, unsigned mask, void* data, Act act, Where where);
void barrier(int id, int threads, bool wait, const char* name, Where where);
void cluster_barrier(bool arrive, bool wait, Where where);
void use_loaded();  // an instruction of this warp needs what its ldmatrix loaded
void ldmatrix(unsigned (&r)[4], unsigned address, bool transposed, Where where);
void load_shared(void* to, unsigned address, unsigned bytes, Where where);
void store_shared(unsigned address, const void* from, unsigned bytes, Where where);
void stmatrix(unsigned address, const unsigned (&r)[4], Where where, bool transposed = false);
void mma_16816(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool bf16,
               Where where);
void mma_1688(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Where where);

void cp_async(unsigned target, const void* source, bool valid, Where where, unsigned bytes = 16);
void cp_async_commit();
void cp_async_wait(int pending);
void mbarrier_init(unsigned barrier, unsigned arrivals, Where where);
void mbarrier_arrive(unsigned barrier, long bytes, unsigned arrivals, Where where);
void mbarrier_wait(unsigned barrier, unsigned parity, Where where);
void tma_load(unsigned target, const TensorMap& map, unsigned barrier, int rank, const int* at,
              unsigned multicast, Where where);
void bulk_load(unsigned target, const void* source, unsigned bytes, unsigned barrier, Where where);
void bulk_out(float* target, unsigned source, unsigned bytes, bool adds, Where where);
void wrote_shared(unsigned address);  // 16 bytes, that TMA and wgmma see after a fence
void store_async(unsigned target, const float (&values)[4], unsigned barrier, Where where);
void tma_store(const TensorMap& map, unsigned source, int rank, const int* at, Where where);
void tma_store_commit();
void tma_store_wait(int pending, bool read_only);
void flag_arrive(unsigned* flag, Where where);
void flag_wait(const unsigned* flag, unsigned least, Where where);
void fence_async_proxy();
struct Wgmma {
    int columns;  // N
    bool bf16, transpose_a, transpose_b;
    bool accumulate;
    const unsigned* a;  // registers, or null: descriptor_a
    uint64_t descriptor_a, descriptor_b;
    bool tf32 = false;  // 8 columns of 4 bytes, not 16 of 2
    bool e4m3 = false;  // 32 columns of a byte
};
void wgmma(float* d, const Wgmma& product, Where where);
void wgmma_fence(Where where);
void wgmma_commit(Where where);
void wgmma_wait(int pending, Where where);
void warpgroup_uniform(const char* what, unsigned value, Where where);
void grid_wait();

template <class T>
T shuffle(unsigned mask, T value, unsigned source, Where where) {
    static_assert(sizeof(T) <= 8, "4 or 8 bytes");
    struct Lane {
        T in, out;
        unsigned source;
    } own{value, value, source};
    collective(
        "shfl", mask, &own,
        [](void* const data[32], unsigned mask) {
            use_loaded();
            for (unsigned lane = 0; lane < 32; ++lane) {
                if (!(mask >> lane & 1)) continue;
                Lane& mine = *static_cast<Lane*>(data[lane]);
                if (mask >> mine.source & 1) mine.out = static_cast<Lane*>(data[mine.source])->in;
                else memset(&mine.out, 0xff, sizeof(T));  // undefined on a GPU
            }
        },
        where);
    return own.out;
}
inline unsigned ballot(unsigned mask, bool predicate, Where where) {
    struct Lane {
        bool in;
        unsigned out;
    } own{predicate, 0};
    collective(
        "vote", mask, &own,
        [](void* const data[32], unsigned mask) {
            use_loaded();
            unsigned all = 0;
            for (unsigned lane = 0; lane < 32; ++lane)
                if (mask >> lane & 1) all |= unsigned{static_cast<Lane*>(data[lane])->in} << lane;
            for (unsigned lane = 0; lane < 32; ++lane)
                if (mask >> lane & 1) static_cast<Lane*>(data[lane])->out = all;
        },
        where);
    return own.out;
}
inline float flush(float x) { return fabsf(x) < 0x1p-126f ? 0.f * x : x; }

// The launch: `args` point to values of the kernel's parameters, whose kinds the signature names.
template <class T>
constexpr char kind_of() {
    if (std::is_pointer_v<T>) return 'p';
    if (std::is_same_v<T, TensorMap>) return 't';
    return std::is_same_v<T, float> ? 'f' : std::is_integral_v<T> && sizeof(T) == 4 ? 'i' : '?';
}
template <class... P>
const char* signature(void (*)(P...)) {
    static const char kinds[] = {kind_of<std::remove_cv_t<P>>()..., 0};
    return kinds;
}
template <class... P, std::size_t... I>
void call(void (*kernel)(P...), void* const* args, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<P>*>(args[I])...);
}
template <class... P>
void invoke(void (*kernel)(P...), void* const* args) {
    call(kernel, args, std::index_sequence_for<P...>{});
}
}  // namespace simt

#define threadIdx (simt::self->index)
#define blockIdx (simt::self->block)
#define blockDim (simt::block_dim)
#define gridDim (simt::grid_dim)
constexpr int warpSize = 32;

inline void __syncthreads(SIMT_HERE) { simt::barrier(0, 0, true, "__syncthreads", SIMT_AT); }
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_HERE) {
    simt::collective("__syncwarp", mask, nullptr, [](void* const*, unsigned) {}, SIMT_AT);
}
inline void __trap() { simt::fail({nullptr, 0}, "trap"); }
inline long long clock64() {
    static long long cycles = 0;
    return cycles += 16;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int by, int width = 32, SIMT_HERE) {
    unsigned lane = simt::self->lane, to = lane ^ by;
    return simt::shuffle(mask, x, to / width > lane / width ? lane : to % 32, SIMT_AT);
}
template <class T>
T __shfl_sync(unsigned mask, T x, int from, int width = 32, SIMT_HERE) {
    return simt::shuffle(mask, x, simt::self->lane / width * width + from % unsigned(width),
                         SIMT_AT);
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32, SIMT_HERE) {
    unsigned lane = simt::self->lane;
    return simt::shuffle(mask, x, lane % width + by < unsigned(width) ? lane + by : lane, SIMT_AT);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32, SIMT_HERE) {
    unsigned lane = simt::self->lane;
    return simt::shuffle(mask, x, lane % width >= by ? lane - by : lane, SIMT_AT);
}
inline unsigned __ballot_sync(unsigned mask, int x, SIMT_HERE) {
    return simt::ballot(mask, x, SIMT_AT);
}
inline int __any_sync(unsigned mask, int x, SIMT_HERE) {
    return simt::ballot(mask, x, SIMT_AT) != 0;
}
inline int __all_sync(unsigned mask, int x, SIMT_HERE) {
    return simt::ballot(mask, !x, SIMT_AT) == 0;
}
inline int __reduce_max_sync(unsigned mask, int x, SIMT_HERE) {
    for (int d = 16; d > 0; d /= 2) {
        int other = simt::shuffle(mask, x, simt::self->lane ^ d, SIMT_AT);
        x = x > other ? x : other;
    }
    return x;
}
inline int __reduce_min_sync(unsigned mask, int x, SIMT_HERE) {
    return -1 - __reduce_max_sync(mask, -1 - x, file, line);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned x, SIMT_HERE) {
    for (int d = 16; d > 0; d /= 2) x |= simt::shuffle(mask, x, simt::self->lane ^ d, SIMT_AT);
    return x;
}
inline int __reduce_add_sync(unsigned mask, int x, SIMT_HERE) {
    for (int d = 16; d > 0; d /= 2) x += simt::shuffle(mask, x, simt::self->lane ^ d, SIMT_AT);
    return x;
}

template <class To, class From>
To simt_cast(From x) {
    static_assert(sizeof(To) == sizeof(From), "bits stay");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> shift % 32);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return shift % 32 ? high << shift % 32 | low >> (32 - shift % 32) : high;
}
inline unsigned __dp4a(unsigned x, unsigned y, unsigned sum) {
    for (int shift = 0; shift < 32; shift += 8) sum += (x >> shift & 255) * (y >> shift & 255);
    return sum;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
    unsigned y = 0;
    for (int i = 0; i < 4; ++i) y |= (both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return y;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline float __int_as_float(int x) { return simt_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return simt_cast<float>(x); }
inline int __float_as_int(float x) { return simt_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return simt_cast<unsigned>(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __log2f(float x) { return log2f(x); }
inline float __saturatef(float x) { return x > 0.f ? fminf(x, 1.f) : 0.f; }  // a NaN becomes 0
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
template <class T>
T __ldg(const T* p) {
    return *p;
}
template <class T>
T __ldcs(const T* p) {
    return *p;
}
template <class T>
T __ldcg(const T* p) {
    return *p;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
// Blocks run one after the other and fibers switch only where they wait, so this is atomic.
template <class T>
T atomicAdd(T* p, T x) {
    T old = *p;
    *p = old + x;
    return old;
}
inline unsigned atomicOr(unsigned* p, unsigned x) {
    unsigned old = *p;
    *p = old | x;
    return old;
}
