// sm_90a building blocks: mbarrier, TMA, wgmma, setmaxnreg, programmatic launch. Include after
// common/element.cuh and common/mma.cuh. Shared-memory addresses are 32-bit, as smem_address gives.
// Sources: PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Instructions" and "Tensor copies".
#pragma once

struct alignas(64) TensorMap {
    char bytes[128];
};  // passed as `const __grid_constant__ TensorMap`

// ---- mbarrier: `arrivals` threads and all expected bytes complete a phase ----
__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes the inits visible to the copy engine; then __syncthreads for the block.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival that also expects `bytes` of copies; a box counts whole, even where it is clipped.
__device__ __forceinline__ void mbarrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Returns when the phase of this parity is complete. A fresh barrier lets parity 1 through. OF_CLUSTER: what
// other blocks of the cluster stored is seen too.
template <bool OF_CLUSTER = false>
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
    unsigned done = 0;
#if SPIN_BOUND  // debug builds: a hang becomes an error after about half a second
    long long begin = clock64();
#endif
    do {
#define MBARRIER_TRY_WAIT(HOW) \
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity" HOW \
                 ".shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n" \
                 : "=r"(done) \
                 : "r"(barrier), "r"(parity) \
                 : "memory")
        if (OF_CLUSTER) MBARRIER_TRY_WAIT(".acquire.cluster");
        else MBARRIER_TRY_WAIT("");
#undef MBARRIER_TRY_WAIT
#if SPIN_BOUND
        if (!done && clock64() - begin > 1000000000LL) asm volatile("trap;");
#endif
    } while (!done);
}

// A position in a ring of STAGES buffers: consumers wait for `phase`, the producer for `phase ^ 1`.
template <int STAGES>
struct Ring {
    unsigned stage = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    // COUNT positions on, at most STAGES; and to the position of the index-th use.
    template <int COUNT>
    __device__ __forceinline__ void skip() {
        stage += COUNT;
        if (stage >= STAGES) stage -= STAGES, phase ^= 1;
    }
    __device__ __forceinline__ void to(unsigned index) {
        stage = index % STAGES, phase = index / STAGES & 1;
    }
};

// ---- TMA ----
__device__ __forceinline__ void tma_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ __forceinline__ void
tma_load(unsigned target, const TensorMap& map, unsigned barrier, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%3,%4,%5}], [%2];" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}
// The same with an L2 policy.
constexpr unsigned long long EVICT_NORMAL = 0x16f0000000000000ull;
constexpr unsigned long long EVICT_FIRST = 0x12f0000000000000ull, EVICT_LAST = 0x14f0000000000000ull;
__device__ __forceinline__ void tma_load(unsigned target, const TensorMap& map, unsigned barrier, int c0,
                                         int c1, int c2, unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3,%4,%5}], [%2], %6;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap& map, unsigned source, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2,%3,%4}], [%1];" ::"l"(&map),
        "r"(source), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}
__device__ __forceinline__ void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until at most PENDING groups of this thread's stores still read shared memory.
template <int PENDING>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// Ordinary writes to shared memory before it are seen by TMA and wgmma after it (and a barrier).
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Four 8x8 matrices to shared memory; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void
stmatrix_x4(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// ---- wgmma: 64 x N += 64 x 16 times 16 x N, by 128 threads ----
// Thread t, register i of the accumulator: row 16 (t / 32) + t % 32 / 4 + 8 (i / 2 % 2), column
// 8 (i / 4) + 2 (t % 4) + i % 2. A fragment of A from registers is that of mma.m16n8k16.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler's reads of r after a wait, and its writes before a fence.
template <int N>
__device__ __forceinline__ void pin(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(unsigned (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// The same number, about which the compiler then knows nothing: what follows from it is computed here, and
// not kept in registers from before a loop.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// A tile of rows of SWIZZLE = 64 or 128 bytes that TMA wrote with that swizzle, 8 * SWIZZLE aligned.
// row_step: bytes between groups of 8 rows. column_step: of a transposed operand, between 64-column panels.
template <int SWIZZLE>
__device__ __forceinline__ unsigned long long
wgmma_descriptor(unsigned address, unsigned row_step, unsigned column_step = 16) {
    return static_cast<unsigned long long>((address & 0x3ffff) >> 4) |
           static_cast<unsigned long long>(column_step >> 4) << 16 |
           static_cast<unsigned long long>(row_step >> 4) << 32 | (SWIZZLE == 128 ? 1ull : 2ull) << 62;
}

#if IS_BF16
#define WGMMA_NAME(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16"
#else
#define WGMMA_NAME(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16"
#endif
#define WGMMA_8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_D32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_LIST32 WGMMA_8(0), WGMMA_8(8), WGMMA_8(16), WGMMA_8(24)
#define WGMMA_D40 WGMMA_D32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_LIST40 WGMMA_LIST32, WGMMA_8(32)
#define WGMMA_D48 WGMMA_D40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_LIST48 WGMMA_LIST40, WGMMA_8(40)
#define WGMMA_D56 WGMMA_D48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define WGMMA_LIST56 WGMMA_LIST48, WGMMA_8(48)
#define WGMMA_D64 WGMMA_D56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_LIST64 WGMMA_LIST56, WGMMA_8(56)
#define WGMMA_D72 WGMMA_D64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define WGMMA_LIST72 WGMMA_LIST64, WGMMA_8(64)
#define WGMMA_D80 WGMMA_D72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_LIST80 WGMMA_LIST72, WGMMA_8(72)
#define WGMMA_D88 WGMMA_D80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define WGMMA_LIST88 WGMMA_LIST80, WGMMA_8(80)
#define WGMMA_D96 WGMMA_D88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_LIST96 WGMMA_LIST88, WGMMA_8(88)
#define WGMMA_D104 WGMMA_D96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define WGMMA_LIST104 WGMMA_LIST96, WGMMA_8(96)
#define WGMMA_D112 WGMMA_D104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define WGMMA_LIST112 WGMMA_LIST104, WGMMA_8(104)
#define WGMMA_D120 WGMMA_D112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define WGMMA_LIST120 WGMMA_LIST112, WGMMA_8(112)
#define WGMMA_D128 WGMMA_D120 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_LIST128 WGMMA_LIST120, WGMMA_8(120)

// Wgmma<N>::ss<TRANSPOSE_B>(d, descriptor of A, of B, accumulate): B row-major (K x N) if transposed, else
// N rows of K. ::rs takes A from registers. accumulate 0 ignores what d held.
template <int N>
struct Wgmma;
#define WGMMA_DEFINE(N, D, LIST, O0, O1, O2, O3, O4, O5, O6) \
    template <> \
    struct Wgmma<N> { \
        template <int TRANSPOSE_B> \
        __device__ static __forceinline__ void \
        ss(float (&d)[N / 2], unsigned long long a, unsigned long long b, int accumulate) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O2 \
                         ", 0;\n" WGMMA_NAME(N) " {" D "}, %" #O0 ", %" #O1 ", p, 1, 1, 0, %" #O3 ";\n}\n" \
                         : LIST \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSE_B)); \
        } \
        template <int TRANSPOSE_B> \
        __device__ static __forceinline__ void \
        rs(float (&d)[N / 2], const unsigned* a, unsigned long long b, int accumulate) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O5 \
                         ", 0;\n" WGMMA_NAME(N) " {" D "}, {%" #O0 ",%" #O1 ",%" #O2 ",%" #O3 "}, %" #O4 \
                                                ", p, 1, 1, %" #O6 ";\n}\n" \
                         : LIST \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), \
                           "n"(TRANSPOSE_B)); \
        } \
    };
WGMMA_DEFINE(64, WGMMA_D32, WGMMA_LIST32, 32, 33, 34, 35, 36, 37, 38)
WGMMA_DEFINE(80, WGMMA_D40, WGMMA_LIST40, 40, 41, 42, 43, 44, 45, 46)
WGMMA_DEFINE(96, WGMMA_D48, WGMMA_LIST48, 48, 49, 50, 51, 52, 53, 54)
WGMMA_DEFINE(112, WGMMA_D56, WGMMA_LIST56, 56, 57, 58, 59, 60, 61, 62)
WGMMA_DEFINE(128, WGMMA_D64, WGMMA_LIST64, 64, 65, 66, 67, 68, 69, 70)
WGMMA_DEFINE(144, WGMMA_D72, WGMMA_LIST72, 72, 73, 74, 75, 76, 77, 78)
WGMMA_DEFINE(160, WGMMA_D80, WGMMA_LIST80, 80, 81, 82, 83, 84, 85, 86)
WGMMA_DEFINE(176, WGMMA_D88, WGMMA_LIST88, 88, 89, 90, 91, 92, 93, 94)
WGMMA_DEFINE(192, WGMMA_D96, WGMMA_LIST96, 96, 97, 98, 99, 100, 101, 102)
WGMMA_DEFINE(208, WGMMA_D104, WGMMA_LIST104, 104, 105, 106, 107, 108, 109, 110)
WGMMA_DEFINE(224, WGMMA_D112, WGMMA_LIST112, 112, 113, 114, 115, 116, 117, 118)
WGMMA_DEFINE(240, WGMMA_D120, WGMMA_LIST120, 120, 121, 122, 123, 124, 125, 126)
WGMMA_DEFINE(256, WGMMA_D128, WGMMA_LIST128, 128, 129, 130, 131, 132, 133, 134)

// ---- named barriers 1 .. 15 of `threads` threads; 0 is __syncthreads ----
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {  // does not wait
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- registers of a warpgroup, and programmatic launch ----
template <int REGISTERS>
__device__ __forceinline__ void registers_increase() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void registers_decrease() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
// Until the launch ahead has ended and its writes are seen; at once if this launch is not programmatic.
__device__ __forceinline__ void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the launch behind begin when every block has said so or ended.
__device__ __forceinline__ void grid_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ==== L2 policies of stores, vectors of shared memory, clusters ====
__device__ __forceinline__ void tma_store(const TensorMap& map, unsigned source, int c0, int c1, int c2,
                                          unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2,%3,%4}], [%1], "
        "%5;" ::"l"(&map),
        "r"(source), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
        : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(unsigned address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

// A cluster is of blocks along x, declared by __cluster_dims__; what is remote is only its shared memory.
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Every thread of the cluster that has not ended: what it did before arriving is seen after the wait. The
// relaxed form promises no more than mbarrier_init_fence does, and spares a fence of the whole GPU.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// What has this address in block `rank`: for mbarrier_arrive_remote. That block must not have ended.
__device__ __forceinline__ unsigned cluster_address(unsigned address, unsigned rank) {
    unsigned remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}
// If lane < lanes. Orders reads by wgmma that have been waited for, no writes: a release to the cluster would
// be a fence of the whole GPU before every arrival.
__device__ __forceinline__ void mbarrier_arrive_remote(unsigned barrier, unsigned lane, unsigned lanes) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.lt.u32 p, %1, %2;\n"
        "@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n}\n" ::"r"(barrier),
        "r"(lane), "r"(lanes)
        : "memory");
}
// One copy to the same address of every block whose bit `blocks` has; each one's own barrier counts it.
__device__ __forceinline__ void tma_load_multicast(unsigned target, const TensorMap& map, unsigned barrier,
                                                   int c0, int c1, int c2, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3,%4,%5}], [%2], %6;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "h"(blocks)
        : "memory");
}
// 16 bytes to an address of the cluster, whose block's mbarrier counts them as it does a copy's: only who reads
// them waits, by mbarrier_wait<true>, and neither side needs a fence.
__device__ __forceinline__ void
store_async_16(unsigned address, unsigned barrier, float a, float b, float c, float d) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(
            address),
        "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
        : "memory");
}
