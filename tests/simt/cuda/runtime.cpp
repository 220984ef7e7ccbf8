// The other side of simt.hpp: fibers and their scheduler, shared memory, barriers, and the units that
// work beside the threads (cp.async, TMA, wgmma). These finish as early or as late as the hardware
// may, by `schedule`, and what they will write is NaN from their start on: a missing wait, or a buffer
// given back too early, reads NaN instead of being right by luck.
//   schedule 0: low warps first; TMA loads arrive as late as they can, wgmma and stores read at once.
//   schedule 1: high warps first, blocks and lanes backwards; loads arrive at once, reads come late.
//   schedule n: all of it by a generator seeded with n.
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <deque>
#include <fstream>
#include <map>
#include <random>
#include <vector>
#include "simt.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
constexpr bool ASAN = true;
#else
constexpr bool ASAN = false;
#endif
#if defined(__x86_64__)
extern "C" void simt_switch(void** save, void* load);  // what a call keeps, and the stack pointer
asm(R"(
.text
.globl simt_switch
simt_switch:
    push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
    ret
)");
#else
#include <ucontext.h>
#endif

void simt_kernel(void* const* args);  // made by the harness: the launch, and its kernel's signature
std::string simt_signature();

namespace simt {
constexpr std::size_t STACK = ASAN ? 512 << 10 : 256 << 10, PAGE = 4096;
constexpr unsigned SMEM_BASE = 1024, GRANULE = 16;  // where the driver puts dynamic shared memory
enum State { RUNNABLE, BLOCKED, DEFERRED, DONE };

struct Copy { unsigned target; bool valid; unsigned char data[16]; };
struct Store { TensorMap map; unsigned source; std::array<int, 5> at; Where where; bool done; };
struct Fiber : Thread {
    State state;
    unsigned char* stack;
    void* context;      // the stack pointer, or a ucontext_t
    void* asan_stack;
    const char* what;   // waited for, with two numbers, where
    unsigned long first, second;
    Where where;
    struct Cta* cta;
    std::vector<Copy> copies;
    std::deque<std::vector<Copy>> copy_groups;
    std::vector<Store> stores;
    std::deque<std::vector<Store>> store_groups;
    std::vector<unsigned> unfenced;  // granules written since its last fence_async_proxy
};
struct Gather { const char* name; unsigned mask, arrived; void* data[32]; };
struct Product { Wgmma of; Where where; float* d[32]; const unsigned* a[32]; };
struct Accumulator { std::array<float*, 32> at; int count, uses; std::vector<float> values; };
struct Warp {
    std::vector<Gather> gathers;
    std::vector<Product> open;
    std::deque<std::vector<Product>> groups;
    std::map<float*, Accumulator> accumulators;  // of products under way, by lane 0's registers
    bool fenced = false;
    std::size_t logged = 0;
};
struct Event { const char* what; std::uint64_t a, b; };
struct Barrier { int expected = 0, arrived = 0; std::vector<Fiber*> waiting; };
struct Mbarrier { unsigned count, pending; long bytes; unsigned phase; };
struct Load { struct Cta* cta; unsigned target, barrier; TensorMap map; std::array<int, 5> at; Where where; };
struct Cta {
    uint3 index;
    unsigned rank;
    unsigned char* smem;
    std::vector<Fiber*> fibers;
    std::vector<Warp> warps;
    std::vector<std::vector<Event>> warpgroups;  // what all warps of one must do alike
    Barrier barriers[16];
    std::map<unsigned, Mbarrier> mbarriers;
    std::vector<unsigned short> writer;  // of a granule not fenced yet: thread + 1
};
struct Buffer {
    std::string name, kind, path;  // kind: input, output or workspace
    std::size_t bytes;
    unsigned char *memory, *begin, *end;  // and the pages, or redzones, around it
    std::vector<unsigned char> hidden;
};

Thread* self;
uint3 block_dim, grid_dim;
float half_values[65536];
static Fiber main_fiber;
static std::size_t main_stack;
static std::vector<Cta> cluster;
static std::vector<Load> loads;
static std::map<std::string, Buffer> buffers;
static std::vector<void*> arguments;
static std::size_t smem_bytes;
static unsigned schedule;
static std::mt19937 generator;
static bool hiding;
static const char *kernel_name = "?";

static Fiber& me() { return static_cast<Fiber&>(*self); }
static bool late_reads() { return schedule == 1 || (schedule > 1 && generator() % 2); }

static void describe(FILE* to) {
    if (!self || self == &main_fiber) return;
    fprintf(to, "  in block (%u,%u,%u) thread %u (warp %u lane %u) of %s, schedule %u\n", self->block.x,
            self->block.y, self->block.z, self->index.x, self->warp, self->lane, kernel_name, schedule);
}
void fail(Where where, const char* format, ...) {
    va_list list;
    va_start(list, format);
    if (where.file) fprintf(stderr, "%s:%d: ", where.file, where.line);
    vfprintf(stderr, format, list);
    fprintf(stderr, "\n");
    describe(stderr);
    va_end(list);
    _exit(2);
}
constexpr Where NOWHERE{nullptr, 0};

// ---- fibers ----
[[gnu::no_sanitize("address")]] static void switch_to(Fiber& from, Fiber& to, bool last = false) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(last ? nullptr : &from.asan_stack, to.stack, &to == &main_fiber ? main_stack : STACK);
#endif
    self = &to;
#if defined(__x86_64__)
    simt_switch(&from.context, to.context);
#else
    swapcontext(static_cast<ucontext_t*>(from.context), static_cast<ucontext_t*>(to.context));
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.asan_stack, nullptr, nullptr);
#endif
}
static void leave(State state) {
    me().state = state;
    switch_to(me(), main_fiber, state == DONE);
}
static void block(const char* what, Where where, unsigned long first = 0, unsigned long second = 0) {
    Fiber& fiber = me();
    fiber.what = what, fiber.where = where, fiber.first = first, fiber.second = second;
    leave(BLOCKED);
}
static void wake(Fiber* fiber) { fiber->state = RUNNABLE; }
static void thread_ends();
static void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &main_stack);
    main_fiber.stack = static_cast<unsigned char*>(const_cast<void*>(bottom));
#endif
    simt_kernel(arguments.data());
    thread_ends();
    leave(DONE);
}
static void start(Fiber& fiber) {
    if (!fiber.stack) {
        void* pages = mmap(nullptr, STACK + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        mprotect(pages, PAGE, PROT_NONE);
        fiber.stack = static_cast<unsigned char*>(pages) + PAGE;
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber.stack, STACK);  // what an ended fiber left
#endif
#if defined(__x86_64__)
    void** top = reinterpret_cast<void**>(fiber.stack + STACK) - 2;
    *top = reinterpret_cast<void*>(&fiber_main);  // entered with the stack as after a call
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    fiber.context = top;
#else
    if (!fiber.context) fiber.context = new ucontext_t;
    auto* context = static_cast<ucontext_t*>(fiber.context);
    getcontext(context);
    context->uc_stack.ss_sp = fiber.stack, context->uc_stack.ss_size = STACK, context->uc_link = nullptr;
    makecontext(context, fiber_main, 0);
#endif
    fiber.state = RUNNABLE;
}

// ---- shared memory ----
void* dynamic_smem() { return me().cta->smem; }
unsigned cluster_rank() { return me().cta->rank; }
unsigned cluster_size() { return cluster.size(); }
unsigned address_of(const void* p) {
    auto offset = static_cast<const unsigned char*>(p) - me().cta->smem;
    if (offset < 0 || offset > static_cast<long>(smem_bytes))
        fail(NOWHERE, "smem_address of a pointer that is not in dynamic shared memory");
    return SMEM_BASE + offset;
}
unsigned map_address(unsigned address, unsigned rank) {
    if (rank >= cluster.size()) fail(NOWHERE, "rank %u of a cluster of %zu", rank, cluster.size());
    return (address & 0xffffff) | (rank + 1) << 24;
}
static Cta& cta_of(unsigned address, Cta& own) { return address >> 24 ? cluster.at((address >> 24) - 1) : own; }
static unsigned char* at(Cta& own, unsigned address, unsigned bytes, unsigned align, const char* what, Where where) {
    Cta& cta = cta_of(address, own);
    unsigned offset = (address & 0xffffff) - SMEM_BASE;
    if (offset > smem_bytes || offset + bytes > smem_bytes)
        fail(where, "%s: %u bytes at offset %d of %zu bytes of shared memory", what, bytes, static_cast<int>(offset), smem_bytes);
    if (address % align) fail(where, "%s: offset %u is not a multiple of %u", what, offset, align);
    return cta.smem + offset;
}
static void written(Cta& own, unsigned address) {  // by a thread: TMA and wgmma see it after a fence
    auto granule = ((address & 0xffffff) - SMEM_BASE) / GRANULE;
    cta_of(address, own).writer[granule] = self->index.x + 1;
    me().unfenced.push_back(granule);
}
static const unsigned char* async_read(Cta& own, unsigned address, const char* what, Where where) {
    const unsigned char* p = at(own, address, 16, 16, what, where);
    Cta& cta = cta_of(address, own);
    unsigned by = cta.writer[(p - cta.smem) / GRANULE];
    if (by) fail(where, "%s reads shared memory at offset %ld, which thread %u wrote with no fence_async_proxy since", what, static_cast<long>(p - cta.smem), by - 1);
    return p;
}
void fence_async_proxy() {
    Fiber& fiber = me();
    for (unsigned granule : fiber.unfenced)
        if (fiber.cta->writer[granule] == fiber.index.x + 1) fiber.cta->writer[granule] = 0;
    fiber.unfenced.clear();
}

// ---- warps and barriers ----
void collective(const char* name, unsigned mask, void* data, Act act, Where where) {
    Fiber& fiber = me();
    if (!(mask >> fiber.lane & 1)) fail(where, "%s: lane %u is not in its own mask %08x", name, fiber.lane, mask);
    Warp& warp = fiber.cta->warps[fiber.warp];
    auto& gathers = warp.gathers;
    auto found = std::find_if(gathers.begin(), gathers.end(), [&](const Gather& g) {
        return g.name == name && g.mask == mask && !(g.arrived >> fiber.lane & 1);
    });
    if (found == gathers.end()) found = gathers.insert(gathers.end(), {name, mask, 0, {}});
    found->data[fiber.lane] = data;
    found->arrived |= 1u << fiber.lane;
    if (found->arrived != mask) return block(name, where, mask);
    Gather all = *found;
    gathers.erase(found);
    act(all.data, mask);
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1 && lane != fiber.lane) wake(fiber.cta->fibers[fiber.warp * 32 + lane]);
}
static void complete(Barrier& barrier) {
    std::for_each(barrier.waiting.begin(), barrier.waiting.end(), wake);
    barrier = Barrier();
}
static int alive(Cta& cta) {
    return std::count_if(cta.fibers.begin(), cta.fibers.end(), [](Fiber* f) { return f->state != DONE; });
}
void barrier(int id, int threads, bool wait, const char* name, Where where) {
    Fiber& fiber = me();
    if (id < 0 || id > 15) fail(where, "%s: there is no barrier %d", name, id);
    if (threads % 32 || threads < 0 || threads > static_cast<int>(fiber.cta->warps.size()) * 32)
        fail(where, "%s of %d threads in a block of %zu", name, threads, fiber.cta->fibers.size());
    Barrier& bar = fiber.cta->barriers[id];
    int expected = threads ? threads : alive(*fiber.cta);
    if (threads && bar.arrived && bar.expected != expected)
        fail(where, "%s: barrier %d of %d threads, where others said %d", name, id, expected, bar.expected);
    bar.expected = threads;
    bar.arrived += 1;
    if (bar.arrived == expected) return complete(bar);
    if (!wait) return;
    bar.waiting.push_back(&fiber);
    block(name, where, id, expected);
}
static Barrier cluster_bar;
void cluster_barrier(bool arrive, bool wait, Where where) {
    static std::map<Fiber*, bool> passed;  // arrived, and its phase is complete
    static std::vector<Fiber*> came;
    if (arrive) {
        came.push_back(&me()), passed[&me()] = false;
        std::size_t expected = 0;
        for (Cta& cta : cluster) expected += alive(cta);
        if (came.size() == expected) {
            for (Fiber* fiber : came) passed[fiber] = true;
            came.clear();
            complete(cluster_bar);
        }
    }
    if (wait && !passed[&me()]) {
        cluster_bar.waiting.push_back(&me());
        block("barrier.cluster", where);
    }
}
void warpgroup_uniform(const char* what, unsigned value, Where where) {
    struct Lane { const char* what; unsigned value; Where where; } own{what, value, where};
    collective(what, ~0u, &own, [](void* const data[32], unsigned) {
        Lane& lane = *static_cast<Lane*>(data[self->lane]);
        Warp& warp = me().cta->warps[self->warp];
        auto& log = me().cta->warpgroups[self->warp / 4];
        if (warp.logged == log.size()) log.push_back({lane.what, lane.value, 0});
        const Event& event = log[warp.logged++];
        if (event.what != lane.what || event.a != lane.value)
            fail(lane.where, "%s %u, where another warp of the warpgroup did %s %lu", lane.what, lane.value, event.what, event.a);
    }, where);
}

static float value_of(unsigned bits, bool bf16) {
    return bf16 ? __uint_as_float(bits << 16) : half_values[bits & 0xffff];
}
void ldmatrix(unsigned (&r)[4], unsigned address, bool transposed, Where where) {
    struct Lane { unsigned *r, address; bool transposed; Where where; } own{r, address, transposed, where};
    collective("ldmatrix", ~0u, &own, [](void* const data[32], unsigned) {
        unsigned short matrix[4][8][8];
        for (int i = 0; i < 32; ++i) {
            Lane& lane = *static_cast<Lane*>(data[i]);
            std::memcpy(matrix[i / 8][i % 8], at(*me().cta, lane.address, 16, 16, "ldmatrix", lane.where), 16);
        }
        for (int i = 0; i < 32; ++i) {
            Lane& lane = *static_cast<Lane*>(data[i]);
            for (int j = 0; j < 4; ++j) {
                int row = i / 4, column = i % 4 * 2;
                lane.r[j] = lane.transposed ? matrix[j][column][row] | matrix[j][column + 1][row] << 16
                                            : matrix[j][row][column] | matrix[j][row][column + 1] << 16;
            }
        }
    }, where);
}
void stmatrix(unsigned address, const unsigned (&r)[4], Where where) {
    struct Lane { const unsigned* r; unsigned address; Where where; } own{r, address, where};
    collective("stmatrix", ~0u, &own, [](void* const data[32], unsigned) {
        for (int i = 0; i < 32; ++i) {
            Lane& row = *static_cast<Lane*>(data[i]);
            unsigned char* to = at(*me().cta, row.address, 16, 16, "stmatrix", row.where);
            for (int j = 0; j < 4; ++j)  // lane i gave the address of row i % 8 of matrix i / 8
                std::memcpy(to + j * 4, &static_cast<Lane*>(data[i % 8 * 4 + j])->r[i / 8], 4);
            Fiber* caller = static_cast<Fiber*>(self);
            self = me().cta->fibers[self->warp * 32 + i];
            written(*me().cta, row.address);
            self = caller;
        }
    }, where);
}
void mma_16816(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool bf16, Where where) {
    struct Lane { float* d; const unsigned* a; unsigned b[2]; bool bf16; } own{d, a, {b0, b1}, bf16};
    collective("mma.m16n8k16", ~0u, &own, [](void* const data[32], unsigned) {
        float a[16][16], b[8][16];
        for (int i = 0; i < 32; ++i) {
            Lane& lane = *static_cast<Lane*>(data[i]);
            for (int e = 0; e < 8; ++e)
                a[i / 4 + e / 2 % 2 * 8][i % 4 * 2 + e % 2 + e / 4 * 8] = value_of(lane.a[e / 2] >> e % 2 * 16 & 0xffff, lane.bf16);
            for (int e = 0; e < 4; ++e)
                b[i / 4][i % 4 * 2 + e % 2 + e / 2 * 8] = value_of(lane.b[e / 2] >> e % 2 * 16 & 0xffff, lane.bf16);
        }
        for (int i = 0; i < 32; ++i)
            for (int e = 0; e < 4; ++e) {
                float sum = static_cast<Lane*>(data[i])->d[e];
                for (int k = 0; k < 16; ++k) sum += a[i / 4 + e / 2 * 8][k] * b[i % 4 * 2 + e % 2][k];
                static_cast<Lane*>(data[i])->d[e] = sum;
            }
    }, where);
}

// ---- cp.async ----
void cp_async(unsigned target, const void* source, bool valid, Where where) {
    Copy copy{target, valid, {}};
    if (reinterpret_cast<std::uintptr_t>(source) % 16) fail(where, "cp.async: the source is not a multiple of 16 bytes");
    if (valid) std::memcpy(copy.data, source, 16);
    std::memset(at(*me().cta, target, 16, 16, "cp.async", where), 0xff, 16);
    me().copies.push_back(copy);
}
void cp_async_commit() {
    me().copy_groups.push_back(std::move(me().copies));
    me().copies.clear();
}
void cp_async_wait(int pending) {
    auto& groups = me().copy_groups;
    for (; static_cast<int>(groups.size()) > pending; groups.pop_front())
        for (Copy& copy : groups.front()) {
            std::memcpy(at(*me().cta, copy.target, 16, 16, "cp.async", NOWHERE), copy.data, 16);
            written(*me().cta, copy.target);
        }
}

// ---- mbarrier ----
static std::uint64_t mark_of(unsigned address) { return 0x5bad'ba44'0000'0000u | address; }
static Mbarrier& mbarrier_at(Cta& own, unsigned address, Where where) {
    Cta& cta = cta_of(address, own);
    unsigned local = address & 0xffffff;
    auto found = cta.mbarriers.find(local);
    if (found == cta.mbarriers.end()) fail(where, "no mbarrier was initialised at offset %d", static_cast<int>(local - SMEM_BASE));
    std::uint64_t mark;
    std::memcpy(&mark, at(own, address, 8, 8, "mbarrier", where), 8);
    if (mark != mark_of(local)) fail(where, "the mbarrier at offset %u was overwritten", local - SMEM_BASE);
    return found->second;
}
static void settle(Cta& own, unsigned address, Mbarrier& barrier) {
    if (barrier.pending || barrier.bytes) return;
    barrier.phase ^= 1, barrier.pending = barrier.count;
    Cta& cta = cta_of(address, own);
    for (Fiber* fiber : cta.fibers)
        if (fiber->state == BLOCKED && fiber->what == std::string("mbarrier_wait") && fiber->first == (address & 0xffffff)) wake(fiber);
}
void mbarrier_init(unsigned address, unsigned arrivals, Where where) {
    if (me().cta->mbarriers.count(address)) fail(where, "the mbarrier at offset %u is initialised twice", address - SMEM_BASE);
    if (!arrivals) fail(where, "an mbarrier of no arrivals");
    std::uint64_t mark = mark_of(address);
    std::memcpy(at(*me().cta, address, 8, 8, "mbarrier_init", where), &mark, 8);
    me().cta->mbarriers[address] = {arrivals, arrivals, 0, 0};
}
void mbarrier_arrive(unsigned address, long bytes, unsigned arrivals, Where where) {
    Mbarrier& barrier = mbarrier_at(*me().cta, address, where);
    if (barrier.pending < arrivals) fail(where, "the mbarrier at offset %u has more arrivals than its %u in one phase", (address & 0xffffff) - SMEM_BASE, barrier.count);
    barrier.bytes += bytes, barrier.pending -= arrivals;
    settle(*me().cta, address, barrier);
}
void mbarrier_wait(unsigned address, unsigned parity, Where where) {
    if (parity > 1) fail(where, "mbarrier_wait: parity %u", parity);
    while (mbarrier_at(*me().cta, address, where).phase == parity) block("mbarrier_wait", where, address, parity);
}

// ---- TMA ----
// Calls use(address in shared memory, element pointers or nulls) for every 16 bytes of the box.
template <class Use>
static void for_box(const TensorMap& map, unsigned start, const std::array<int, 5>& from, Use use) {
    unsigned count[5] = {1, 1, 1, 1, 1}, i[5];
    for (int d = 0; d < map.rank; ++d) count[d] = map.box[d];
    unsigned linear = start, swizzle = map.swizzle / 16;
    for (i[4] = 0; i[4] < count[4]; ++i[4])
    for (i[3] = 0; i[3] < count[3]; ++i[3])
    for (i[2] = 0; i[2] < count[2]; ++i[2])
    for (i[1] = 0; i[1] < count[1]; ++i[1])
    for (i[0] = 0; i[0] < count[0]; i[0] += 8, linear += 16) {
        bool inside = true;
        std::int64_t offset = 0;
        for (int d = 1; d < map.rank; ++d) {
            std::int64_t c = std::int64_t{from[d]} + i[d];
            inside = inside && c >= 0 && c < map.dims[d];
            offset += c * static_cast<std::int64_t>(map.strides[d - 1]);
        }
        unsigned short* elements[8];
        for (int e = 0; e < 8; ++e) {
            std::int64_t c = std::int64_t{from[0]} + i[0] + e;
            bool here = inside && c >= 0 && c < map.dims[0];
            elements[e] = here ? reinterpret_cast<unsigned short*>(map.base + offset + c * 2) : nullptr;
        }
        unsigned row = linear >> 7 & (swizzle ? swizzle - 1 : 0);  // bits 4-6 by bits 7-9 at 128 bytes
        use(linear ^ row << 4, elements);
    }
}
static unsigned box_bytes(const TensorMap& map) {
    unsigned bytes = 2;
    for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
    return bytes;
}
static void check_copy(const char* what, const TensorMap& map, unsigned address, int rank, Where where) {
    if (map.rank != rank) fail(where, "%s: %d coordinates for a tensor map of %d dims", what, rank, map.rank);
    if (address % 128) fail(where, "%s: shared memory offset %u is not a multiple of 128", what, (address & 0xffffff) - SMEM_BASE);
    if (map.swizzle && static_cast<int>(map.box[0] * 2) > map.swizzle) fail(where, "%s: a box of %u bytes with swizzle %d", what, map.box[0] * 2, map.swizzle);
}
static void deliver(const Load& load) {
    for_box(load.map, load.target, load.at, [&](unsigned to, unsigned short** elements) {
        unsigned short data[8];
        for (int e = 0; e < 8; ++e) data[e] = elements[e] ? *elements[e] : 0;
        unsigned char* p = at(*load.cta, to, 16, 16, "tma_load", load.where);
        std::memcpy(p, data, 16);
        load.cta->writer[(p - load.cta->smem) / GRANULE] = 0;
    });
    Mbarrier& barrier = mbarrier_at(*load.cta, load.barrier, load.where);
    barrier.bytes -= box_bytes(load.map);
    settle(*load.cta, load.barrier, barrier);
}
void tma_load(unsigned target, const TensorMap& map, unsigned barrier, int rank, const int* from, unsigned multicast, Where where) {
    check_copy("tma_load", map, target, rank, where);
    if (!multicast) multicast = 1u << me().cta->rank;
    for (Cta& cta : cluster) {
        if (!(multicast >> cta.rank & 1)) continue;
        Load load{&cta, target & 0xffffff, barrier & 0xffffff, map, {}, where};
        std::copy(from, from + rank, load.at.begin());
        mbarrier_at(cta, load.barrier, where);
        for_box(map, load.target, load.at, [&](unsigned to, unsigned short**) { std::memset(at(cta, to, 16, 16, "tma_load", where), 0xff, 16); });
        if (schedule == 1 || (schedule > 1 && generator() % 2)) deliver(load);
        else loads.push_back(load);
    }
}
static void carry_out(const Store& store) {
    for_box(store.map, store.source, store.at, [&](unsigned from, unsigned short** elements) {
        unsigned short data[8];
        std::memcpy(data, async_read(*me().cta, from, "tma_store", store.where), 16);
        for (int e = 0; e < 8; ++e)
            if (elements[e]) *elements[e] = data[e];
    });
}
void tma_store(const TensorMap& map, unsigned source, int rank, const int* to, Where where) {
    check_copy("tma_store", map, source, rank, where);
    Store store{map, source, {}, where, false};
    std::copy(to, to + rank, store.at.begin());
    if (!late_reads()) {
        carry_out(store);
        store.done = true;
    }
    me().stores.push_back(store);
}
void tma_store_commit() {
    me().store_groups.push_back(std::move(me().stores));
    me().stores.clear();
}
void tma_store_wait(int pending, bool) {
    auto& groups = me().store_groups;
    if (static_cast<int>(groups.size()) > pending && late_reads()) leave(DEFERRED);
    for (; static_cast<int>(groups.size()) > pending; groups.pop_front())
        for (const Store& store : groups.front())
            if (!store.done) carry_out(store);
}

// ---- wgmma ----
// Address of element (i, k) of an operand of rows i and 16 columns k, per the descriptor; k or i runs along
// the rows of shared memory. PTX ISA, "Strides"; CUTLASS writes the same as canonical layouts.
static unsigned operand_address(std::uint64_t descriptor, bool transposed, int i, int k) {
    unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    unsigned code = descriptor >> 62, width = code == 0 ? 16 : code == 1 ? 128 : code == 2 ? 64 : 32;
    int across = transposed ? i : k, down = transposed ? k : i, per_row = width / 2;
    if (code == 0 && transposed) std::swap(leading, stride);
    // Eight rows are one piece; `stride` leads to the next eight, `leading` to the next columns.
    unsigned address = start + down / 8 * stride + down % 8 * width + across / per_row * leading + across % per_row * 2;
    return address ^ (address >> 7 & (width / 16 - 1)) << 4;
}
static float operand(Cta& cta, std::uint64_t descriptor, bool transposed, bool bf16, int i, int k, Where where) {
    unsigned address = operand_address(descriptor, transposed, i, k);
    const unsigned char* p = async_read(cta, address & ~15u, "wgmma", where) + address % 16;
    unsigned short bits;
    std::memcpy(&bits, p, 2);
    return value_of(bits, bf16);
}
static void multiply(Cta& cta, unsigned warp, const Product& product) {
    const Wgmma& of = product.of;
    static float a[16][16], b[16][256];
    for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < of.columns; ++n) b[k][n] = operand(cta, of.descriptor_b, of.transpose_b, of.bf16, n, k, product.where);
        for (int m = 0; m < 16; ++m) {
            int lane = m % 8 * 4 + k % 8 / 2, j = m / 8 + k / 8 * 2;
            a[m][k] = product.a[0] ? value_of(product.a[lane][j] >> k % 2 * 16 & 0xffff, of.bf16)
                                   : operand(cta, of.descriptor_a, of.transpose_a, of.bf16, warp % 4 * 16 + m, k, product.where);
        }
    }
    Accumulator& to = cta.warps[warp].accumulators.at(product.d[0]);
    for (int m = 0; m < 16; ++m) {
        float row[256] = {};
        float* values = to.values.data();
        auto place = [&](int n) { return (m % 8 * 4 + n % 8 / 2) * to.count + n / 8 * 4 + m / 8 * 2 + n % 2; };
        if (of.accumulate) for (int n = 0; n < of.columns; ++n) row[n] = values[place(n)];
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < of.columns; ++n) row[n] += a[m][k] * b[k][n];
        for (int n = 0; n < of.columns; ++n) values[place(n)] = row[n];
    }
}
void wgmma(float* d, const Wgmma& product, Where where) {
    struct Lane { float* d; Wgmma of; Where where; } own{d, product, where};
    collective("wgmma", ~0u, &own, [](void* const data[32], unsigned) {
        Lane& lane = *static_cast<Lane*>(data[self->lane]);
        Cta& cta = *me().cta;
        Warp& warp = cta.warps[self->warp];
        Product product{lane.of, lane.where, {}, {}};
        auto& log = cta.warpgroups[self->warp / 4];
        Event event{"wgmma", lane.of.a ? 0 : lane.of.descriptor_a, lane.of.descriptor_b};
        if (warp.logged == log.size()) log.push_back(event);
        const Event& other = log[warp.logged++];
        if (other.what != std::string(event.what) || other.a != event.a || other.b != event.b)
            fail(lane.where, "wgmma differs from the %s that another warp of the warpgroup did", other.what);
        for (int i = 0; i < 32; ++i) {
            Lane& l = *static_cast<Lane*>(data[i]);
            if (l.of.descriptor_b != lane.of.descriptor_b || l.of.descriptor_a != lane.of.descriptor_a || l.of.accumulate != lane.of.accumulate)
                fail(lane.where, "wgmma: lanes of one warp give different descriptors");
            product.d[i] = l.d, product.a[i] = l.of.a;
        }
        auto& acc = warp.accumulators[product.d[0]];
        if (!acc.uses++) {  // take the registers over: NaN until the wait
            if (!warp.fenced) fail(lane.where, "wgmma: its registers were in use, with no wgmma_fence since");
            acc.count = lane.of.columns / 2;
            acc.values.resize(32 * acc.count);
            for (int i = 0; i < 32; ++i) {
                acc.at[i] = product.d[i];
                std::memcpy(&acc.values[i * acc.count], product.d[i], acc.count * 4);
                std::memset(product.d[i], 0xff, acc.count * 4);
            }
        }
        if (late_reads()) return warp.open.push_back(product);
        for (const Product& before : warp.open)  // in order, whatever was put off
            if (before.of.columns) goto put_off;
        for (const auto& group : warp.groups)
            for (const Product& before : group)
                if (before.of.columns) goto put_off;
        multiply(cta, self->warp, product);
        product.of.columns = 0;
    put_off:
        warp.open.push_back(product);
    }, where);
}
void wgmma_fence(Where where) {
    collective("wgmma_fence", ~0u, nullptr, [](void* const*, unsigned) { me().cta->warps[self->warp].fenced = true; }, where);
}
void wgmma_commit(Where where) {
    collective("wgmma_commit", ~0u, nullptr, [](void* const*, unsigned) {
        Warp& warp = me().cta->warps[self->warp];
        warp.groups.push_back(std::move(warp.open));
        warp.open.clear();
    }, where);
}
void wgmma_wait(int pending, Where where) {
    if (late_reads()) leave(DEFERRED);
    struct Lane { int pending; } own{pending};
    collective("wgmma_wait", ~0u, &own, [](void* const data[32], unsigned) {
        Warp& warp = me().cta->warps[self->warp];
        for (int n = static_cast<Lane*>(data[self->lane])->pending; static_cast<int>(warp.groups.size()) > n; warp.groups.pop_front())
            for (const Product& product : warp.groups.front()) {
                if (product.of.columns) multiply(*me().cta, self->warp, product);
                Accumulator& acc = warp.accumulators.at(product.d[0]);
                if (--acc.uses) continue;
                for (int i = 0; i < 32; ++i) std::memcpy(acc.at[i], &acc.values[i * acc.count], acc.count * 4);
                warp.accumulators.erase(product.d[0]);
                warp.fenced = false;
            }
    }, where);
}

// ---- programmatic launches: what the launch before wrote is NaN until grid_wait ----
static void hide() {
    hiding = true;
    for (auto& [name, buffer] : buffers)
        if (buffer.kind == "workspace") {
            buffer.hidden.assign(buffer.memory, buffer.memory + buffer.bytes);
            std::memset(buffer.memory, 0xff, buffer.bytes);
        }
}
void grid_wait() {
    if (!hiding) return;
    hiding = false;
    for (auto& [name, buffer] : buffers)
        if (buffer.kind == "workspace") {
            for (std::size_t i = 0; i < buffer.bytes; ++i)
                if (buffer.memory[i] != 0xff) fail(NOWHERE, "a programmatic launch wrote %s before grid_wait", name.c_str());
            std::memcpy(buffer.memory, buffer.hidden.data(), buffer.bytes);
        }
}

// ---- scheduling ----
static void thread_ends() {
    Fiber& fiber = me();
    fiber.store_groups.push_back(fiber.stores);
    for (const auto& group : fiber.store_groups)
        if (!group.empty()) fail(group[0].where, "the thread ends while this tma_store may still read shared memory");
    Warp& warp = fiber.cta->warps[fiber.warp];
    if (!warp.accumulators.empty()) fail(NOWHERE, "the warp ends while a wgmma is under way");
    Barrier& all = fiber.cta->barriers[0];
    if (all.arrived && !all.expected && all.arrived == alive(*fiber.cta) - 1) complete(all);
}
[[noreturn]] static void deadlock() {
    self = nullptr;
    fprintf(stderr, "deadlock in %s, schedule %u: no thread can go on\n", kernel_name, schedule);
    for (Cta& cta : cluster) {
        fprintf(stderr, "block (%u,%u,%u):\n", cta.index.x, cta.index.y, cta.index.z);
        for (std::size_t i = 0; i < cta.fibers.size();) {
            Fiber& f = *cta.fibers[i];
            std::size_t end = i + 1;  // as long as threads wait alike
            auto same = [&](const Fiber& g) { return g.state == f.state && (f.state == DONE || (g.what == f.what && g.where.line == f.where.line && g.first == f.first && g.second == f.second)); };
            while (end < cta.fibers.size() && same(*cta.fibers[end])) ++end;
            fprintf(stderr, "  threads %zu-%zu (warp %u): ", i, end - 1, f.warp);
            if (f.state == DONE) fprintf(stderr, "ended\n");
            else {
                fprintf(stderr, "%s at %s:%d", f.what, f.where.file ? f.where.file : "?", f.where.line);
                if (f.what == std::string("mbarrier_wait")) {
                    const Mbarrier& b = mbarrier_at(cta, f.first, f.where);
                    fprintf(stderr, " of offset %lu for parity %lu: its phase is %u, %u of %u arrivals and %ld bytes are missing\n",
                            (f.first & 0xffffff) - SMEM_BASE, f.second, b.phase, b.pending, b.count, b.bytes);
                } else if (f.second) fprintf(stderr, ": barrier %lu, %d of %lu threads came\n", f.first, cta.barriers[f.first].arrived, f.second);
                else fprintf(stderr, ": the other lanes of mask %08lx did not come\n", f.first);
            }
            i = end;
        }
    }
    _exit(2);
}
template <class T>
static T* choose(std::vector<T>& from) {  // the one the schedule prefers
    if (from.empty()) return nullptr;
    return &from[schedule == 0 ? 0 : schedule == 1 ? from.size() - 1 : generator() % from.size()];
}
static void run_warp(Cta& cta, unsigned warp) {
    unsigned begin = warp * 32, end = std::min<unsigned>(begin + 32, cta.fibers.size());
    for (bool moved = true; moved;) {
        moved = false;
        for (unsigned n = begin; n < end; ++n) {
            Fiber& fiber = *cta.fibers[schedule == 1 ? end - 1 - (n - begin) : n];
            if (fiber.state != RUNNABLE) continue;
            moved = true;
            switch_to(main_fiber, fiber);
            self = &main_fiber;
        }
        if (schedule > 1 && generator() % 4 == 0) return;
    }
}
static void run_cluster() {
    struct Ready { Cta* cta; unsigned warp; };
    for (;;) {
        std::vector<Ready> runnable, deferred;
        bool all_done = true;
        for (Cta& cta : cluster)
            for (unsigned warp = 0; warp < cta.warps.size(); ++warp) {
                bool run = false, wait = false;
                for (unsigned i = warp * 32; i < std::min<std::size_t>(warp * 32 + 32, cta.fibers.size()); ++i) {
                    State state = cta.fibers[i]->state;
                    run |= state == RUNNABLE, wait |= state == DEFERRED, all_done &= state == DONE;
                }
                if (run) runnable.push_back({&cta, warp});
                else if (wait) deferred.push_back({&cta, warp});
            }
        if (all_done) return;
        if (Ready* next = choose(runnable)) {
            run_warp(*next->cta, next->warp);
        } else if (!loads.empty() && (deferred.empty() || schedule < 2 || generator() % 2)) {
            auto last = schedule == 0 ? loads.end() - 1 : loads.begin() + generator() % loads.size();
            Load load = *last;
            loads.erase(last);
            deliver(load);
        } else if (Ready* next = choose(deferred)) {
            for (Fiber* fiber : next->cta->fibers)
                if (fiber->warp == next->warp && fiber->state == DEFERRED) wake(fiber);
        } else {
            deadlock();
        }
    }
}
static unsigned char* pages_for(std::size_t bytes, bool at_end) {  // inaccessible pages on both sides
    std::size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
    auto* all = static_cast<unsigned char*>(mmap(nullptr, size + 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(all, PAGE, PROT_NONE);
    mprotect(all + PAGE + size, PAGE, PROT_NONE);
    std::memset(all + PAGE, 0xff, size);
    return all + PAGE + (at_end ? (size - bytes) / 16 * 16 : 0);
}
static unsigned char* guarded(Buffer& buffer) {
    if (ASAN) {
        void* p = nullptr;
        if (posix_memalign(&p, 256, buffer.bytes)) abort();
        buffer.begin = static_cast<unsigned char*>(p), buffer.end = buffer.begin + buffer.bytes;
        return buffer.begin;
    }
    unsigned char* p = pages_for(buffer.bytes, schedule == 0);
    buffer.begin = reinterpret_cast<unsigned char*>(reinterpret_cast<std::uintptr_t>(p) / PAGE * PAGE);
    buffer.end = buffer.begin + ((p - buffer.begin) + buffer.bytes + PAGE - 1) / PAGE * PAGE;
    return p;
}
static void on_fault(int number, siginfo_t* info, void*) {
    fprintf(stderr, "signal %d (%s)", number, number == SIGFPE ? "division by zero" : "memory fault");
    auto* address = static_cast<unsigned char*>(info->si_addr);
    if (number != SIGFPE)
        for (auto& [name, buffer] : buffers)
            if (address >= buffer.begin - PAGE && address < buffer.end + PAGE)
                fprintf(stderr, ": byte %ld of buffer %s, which has %zu%s", static_cast<long>(address - buffer.memory), name.c_str(), buffer.bytes,
                        buffer.kind == "input" ? " (an input: it must not be written)" : "");
    if (self && self != &main_fiber && address >= me().stack - PAGE && address < me().stack) fprintf(stderr, ": the fiber's stack overflowed");
    fprintf(stderr, "\n");
    describe(stderr);
    _exit(2);
}
static void run_block(uint3 first, unsigned ranks, unsigned threads) {
    cluster.resize(ranks);
    for (unsigned rank = 0; rank < ranks; ++rank) {
        Cta& cta = cluster[rank];
        cta.index = {first.x + rank, first.y, first.z}, cta.rank = rank;
        if (!cta.smem) {
            if (ASAN) {
                void* p = nullptr;
                if (posix_memalign(&p, 1024, smem_bytes)) abort();
                cta.smem = static_cast<unsigned char*>(p);
            } else cta.smem = pages_for(smem_bytes, false);
            for (unsigned i = 0; i < threads; ++i) cta.fibers.push_back(new Fiber());
        }
        std::memset(cta.smem, 0xff, smem_bytes);
        cta.warps.assign((threads + 31) / 32, {});
        cta.warpgroups.assign((threads + 127) / 128, {});
        for (Barrier& bar : cta.barriers) bar = Barrier();
        cta.mbarriers.clear();
        cta.writer.assign(smem_bytes / GRANULE + 1, 0);
        for (unsigned i = 0; i < threads; ++i) {
            Fiber& f = *cta.fibers[i];
            f.index = {i, 0, 0}, f.block = cta.index, f.lane = i % 32, f.warp = i / 32, f.cta = &cta;
            f.copies.clear(), f.copy_groups.clear(), f.stores.clear(), f.store_groups.clear(), f.unfenced.clear();
            start(f);
        }
    }
    run_cluster();
    self = nullptr;
    if (!loads.empty()) fail(loads[0].where, "block (%u,%u,%u) of %s ends before this tma_load arrived", first.x, first.y, first.z, kernel_name);
    for (Cta& cta : cluster) {
        std::size_t end = (smem_bytes + PAGE - 1) / PAGE * PAGE;
        for (std::size_t i = smem_bytes; !ASAN && i < end; ++i)
            if (cta.smem[i] != 0xff) fail(NOWHERE, "%s wrote byte %zu of %zu bytes of shared memory", kernel_name, i, smem_bytes);
        for (const Warp& warp : cta.warps)
            if (&warp - &cta.warps[0] < static_cast<long>(threads / 128 * 4) && warp.logged != cta.warpgroups[(&warp - &cta.warps[0]) / 4].size())
                fail(NOWHERE, "%s: the warps of a warpgroup did different numbers of wgmma or setmaxnreg", kernel_name);
    }
}

static int run(const char* request) {
    std::ifstream in(request);
    std::string word, wanted;
    unsigned threads = 0, ranks = 1;
    bool programmatic = false;
    std::vector<std::pair<Buffer*, std::string>> outputs;
    while (in >> word) {
        if (word == "kernel") in >> word, kernel_name = strdup(word.c_str());
        else if (word == "grid") in >> grid_dim.x >> grid_dim.y >> grid_dim.z;
        else if (word == "threads") in >> threads;
        else if (word == "cluster") in >> ranks;
        else if (word == "smem") in >> smem_bytes;
        else if (word == "schedule") in >> schedule;
        else if (word == "programmatic") in >> programmatic;
        else if (word == "buffer") {
            Buffer b;
            in >> b.name >> b.kind >> b.bytes >> b.path;
            b.memory = guarded(b);
            std::ifstream(b.path, std::ios::binary).read(reinterpret_cast<char*>(b.memory), b.bytes);
            if (b.kind == "input" && !ASAN) mprotect(b.begin, b.end - b.begin, PROT_READ);
            buffers[b.name] = b;
        } else if (word == "pointer") {
            in >> word;
            arguments.push_back(new void*(buffers.at(word).memory)), wanted += 'p';
        } else if (word == "int") {
            arguments.push_back(new int()), wanted += 'i';
            in >> *static_cast<int*>(arguments.back());
        } else if (word == "float") {
            in >> word;
            arguments.push_back(new float(strtof(word.c_str(), nullptr))), wanted += 'f';
        } else if (word == "map") {
            auto* map = new TensorMap();
            in >> word >> map->rank >> map->swizzle;
            map->base = buffers.at(word).memory;
            for (int d = 0; d < map->rank; ++d) in >> map->dims[d];
            for (int d = 0; d + 1 < map->rank; ++d) in >> map->strides[d];
            for (int d = 0; d < map->rank; ++d) in >> map->box[d];
            arguments.push_back(map), wanted += 't';
        } else fail(NOWHERE, "the request says %s", word.c_str());
    }
    if (wanted != simt_signature())
        fail(NOWHERE, "%s takes (%s), and the declaration passes (%s): p pointer, i int, f float, t TensorMap", kernel_name, simt_signature().c_str(), wanted.c_str());
    if (grid_dim.x % ranks) fail(NOWHERE, "a grid of %u blocks in clusters of %u", grid_dim.x, ranks);
    generator.seed(schedule);
    block_dim = {threads, 1, 1};
    long blocks = static_cast<long>(grid_dim.x) * grid_dim.y * grid_dim.z;
    for (long n = 0; n < blocks; n += ranks) {
        long i = schedule == 1 ? blocks - ranks - n : n;
        if (programmatic) hide();
        run_block({static_cast<unsigned>(i % grid_dim.x), static_cast<unsigned>(i / grid_dim.x % grid_dim.y), static_cast<unsigned>(i / grid_dim.x / grid_dim.y)}, ranks, threads);
        grid_wait();
    }
    for (auto& [name, b] : buffers) {
        if (!ASAN)
            for (unsigned char* p = b.begin; p < b.end; ++p)
                if ((p < b.memory || p >= b.memory + b.bytes) && *p != 0xff) fail(NOWHERE, "%s wrote byte %ld of buffer %s, which has %zu", kernel_name, static_cast<long>(p - b.memory), name.c_str(), b.bytes);
        if (b.kind != "input") std::ofstream(b.path, std::ios::binary).write(reinterpret_cast<char*>(b.memory), b.bytes);
    }
    return 0;
}
}  // namespace simt

int main(int, char** argv) {
    using namespace simt;
    for (unsigned bits = 0; bits < 65536; ++bits)
        half_values[bits] = simt_cast<_Float16>(static_cast<unsigned short>(bits));
    static unsigned char signal_stack[64 << 10];
    stack_t alternate{signal_stack, 0, sizeof signal_stack};
    sigaltstack(&alternate, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    if (!ASAN) sigaction(SIGSEGV, &action, nullptr), sigaction(SIGBUS, &action, nullptr);
    sigaction(SIGFPE, &action, nullptr);
    return run(argv[1]);
}
