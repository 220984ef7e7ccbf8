// Fibers, what they wait for each other in, and who runs next.
#include <sys/mman.h>
#include <unistd.h>
#include "runtime.hpp"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__x86_64__) && !defined(SIMT_UCONTEXT)
#define SIMT_SWITCH 1
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

namespace simt {
Thread* self;
Fiber main_fiber;
std::vector<Cta> cluster;
[[maybe_unused]] static std::size_t main_stack;

// ---- fibers ----
[[gnu::no_sanitize("address")]] static void switch_to(Fiber& from, Fiber& to,
                                                      [[maybe_unused]] bool last = false) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(last ? nullptr : &from.asan_stack, to.stack,
                                   &to == &main_fiber ? main_stack : STACK);
#endif
    self = &to;
#if SIMT_SWITCH
    simt_switch(&from.context, to.context);
#else
    swapcontext(static_cast<ucontext_t*>(from.context), static_cast<ucontext_t*>(to.context));
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.asan_stack, nullptr, nullptr);
#endif
}
void leave(State state) {
    set_state(me(), state);
    switch_to(me(), main_fiber, state == DONE);
}
void block(const char* what, Where where, unsigned long first, unsigned long second) {
    Fiber& fiber = me();
    fiber.what = what, fiber.where = where, fiber.first = first, fiber.second = second;
    leave(BLOCKED);
}
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
void clear(Cta& cta, unsigned threads) {
    cta.alive = 0;
    cta.warps.assign((threads + 31) / 32, {});
    cta.warpgroups.assign((threads + 127) / 128, {});
    for (Barrier& bar : cta.barriers) bar = Barrier();
    cta.mbarriers.clear();
    cta.writer.assign(smem_bytes / GRANULE + 1, 0);
}
void start(Fiber& fiber) {
    if (!fiber.stack) {
        void* pages = mmap(nullptr, STACK + PAGE, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        mprotect(pages, PAGE, PROT_NONE);
        fiber.stack = static_cast<unsigned char*>(pages) + PAGE;
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber.stack, STACK);  // what an ended fiber left
#endif
#if SIMT_SWITCH
    void** top = reinterpret_cast<void**>(fiber.stack + STACK) - 2;
    *top = reinterpret_cast<void*>(&fiber_main);  // entered with the stack as after a call
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    fiber.context = top;
#else
    if (!main_fiber.context) main_fiber.context = new ucontext_t;
    if (!fiber.context) fiber.context = new ucontext_t;
    auto* context = static_cast<ucontext_t*>(fiber.context);
    getcontext(context);
    context->uc_stack.ss_sp = fiber.stack, context->uc_stack.ss_size = STACK,
    context->uc_link = nullptr;
    makecontext(context, fiber_main, 0);
#endif
    fiber.state = RUNNABLE;
    ++fiber.cta->warps[fiber.warp].threads[RUNNABLE], ++fiber.cta->alive;
}

// ---- warps and barriers ----
void collective(const char* name, unsigned mask, void* data, Act act, Where where) {
    Fiber& fiber = me();
    if (!(mask >> fiber.lane & 1))
        fail(where, "%s: lane %u is not in its own mask %08x", name, fiber.lane, mask);
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
    for (Fiber* fiber : barrier.waiting) hear(*fiber, barrier.told), wake(fiber);
    barrier = Barrier();
}
void barrier(int id, int threads, bool wait, const char* name, Where where) {
    Fiber& fiber = me();
    if (id < 0 || id > 15) fail(where, "%s: there is no barrier %d", name, id);
    if (threads % 32 || threads < 0 || threads > static_cast<int>(fiber.cta->warps.size()) * 32)
        fail(where, "%s of %d threads in a block of %zu", name, threads, fiber.cta->fibers.size());
    Barrier& bar = fiber.cta->barriers[id];
    int expected = threads ? threads : static_cast<int>(fiber.cta->alive);
    if (threads && bar.arrived && bar.expected != expected)
        fail(where, "%s: barrier %d of %d threads, where others said %d", name, id, expected,
             bar.expected);
    bar.expected = threads;
    bar.arrived += 1;
    tell(bar.told);
    if (bar.arrived == expected) {
        if (wait) hear(fiber, bar.told);
        return complete(bar);
    }
    if (!wait) return;
    bar.waiting.push_back(&fiber);
    block(name, where, id, expected);
}
// Threads that arrived at the cluster's barrier; whether the phase that a thread arrived in is
// complete.
static std::vector<Fiber*> cluster_came;
static std::map<Fiber*, bool> cluster_passed;
static const char CLUSTER_WAIT[] = "cluster_wait";
static void settle_cluster(std::size_t ending = 0) {
    std::size_t expected = 0;
    for (Cta& cta : cluster) expected += cta.alive;
    if (cluster_came.empty() || cluster_came.size() != expected - ending) return;
    tell_cluster();
    for (Fiber* fiber : cluster_came) {
        cluster_passed[fiber] = true;
        if (fiber->state == BLOCKED && fiber->what == CLUSTER_WAIT) wake(fiber);
    }
    cluster_came.clear();
}
void cluster_barrier(bool arrive, bool wait, Where where) {
    if (arrive) {
        if (std::count(cluster_came.begin(), cluster_came.end(), &me()))
            fail(where, "cluster_arrive twice, with no wait between");
        cluster_came.push_back(&me()), cluster_passed[&me()] = false;
        settle_cluster();
    }
    if (wait && !cluster_passed[&me()]) block(CLUSTER_WAIT, where);
}
void warpgroup_uniform(const char* what, unsigned value, Where where) {
    struct Lane {
        const char* what;
        unsigned value;
        Where where;
    } own{what, value, where};
    collective(
        what, ~0u, &own,
        [](void* const data[32], unsigned) {
            Lane& lane = *static_cast<Lane*>(data[self->lane]);
            Warp& warp = me().cta->warps[self->warp];
            auto& log = me().cta->warpgroups[self->warp / 4];
            if (warp.logged == log.size()) log.push_back({lane.what, lane.value, 0});
            const Event& event = log[warp.logged++];
            if (event.what != lane.what || event.a != lane.value)
                fail(lane.where, "%s %u, where another warp of the warpgroup did %s %lu", lane.what,
                     lane.value, event.what, event.a);
        },
        where);
}

void ldmatrix(unsigned (&r)[4], unsigned address, bool transposed, Where where) {
    struct Lane {
        unsigned *r, address;
        bool transposed;
        Where where;
    } own{r, resolved(address, "ldmatrix", where), transposed, where};
    collective(
        "ldmatrix", ~0u, &own,
        [](void* const data[32], unsigned) {
            unsigned short matrix[4][8][8];
            Read read{static_cast<Lane*>(data[0])->where, {}};
            for (int i = 0; i < 32; ++i) {
                Lane& lane = *static_cast<Lane*>(data[i]);
                read.rows[i] = lane.address;
                memcpy(matrix[i / 8][i % 8],
                       at(*me().cta, lane.address, 16, 16, "ldmatrix", lane.where), 16);
            }
            for (int i = 0; i < 32; ++i) {
                Lane& lane = *static_cast<Lane*>(data[i]);
                for (int j = 0; j < 4; ++j) {
                    int row = i / 4, column = i % 4 * 2;
                    lane.r[j] = lane.transposed
                                    ? matrix[j][column][row] | matrix[j][column + 1][row] << 16
                                    : matrix[j][row][column] | matrix[j][row][column + 1] << 16;
                }
            }
            may_read(read);
        },
        where);
}
void stmatrix(unsigned address, const unsigned (&r)[4], Where where, bool transposed) {
    struct Lane {
        const unsigned* r;
        unsigned address;
        Where where;
        bool transposed;
    } own{r, resolved(address, "stmatrix", where), where, transposed};
    collective(
        "stmatrix", ~0u, &own,
        [](void* const data[32], unsigned) {
            use_loaded();
            for (int i = 0; i < 32; ++i) {
                Lane& row = *static_cast<Lane*>(data[i]);
                unsigned char* to = at(*me().cta, row.address, 16, 16, "stmatrix", row.where);
                // Lane i gave the address of row i % 8 of matrix i / 8.
                for (int j = 0; j < 8; ++j) {
                    int other = row.transposed ? j * 4 + i % 8 / 2 : i % 8 * 4 + j / 2;
                    unsigned pair = static_cast<Lane*>(data[other])->r[i / 8];
                    unsigned short x = pair >> (row.transposed ? i : j) % 2 * 16;
                    memcpy(to + j * 2, &x, 2);
                }
                Fiber* caller = static_cast<Fiber*>(self);
                self = me().cta->fibers[self->warp * 32 + i];
                written(*me().cta, row.address);
                self = caller;
            }
        },
        where);
}
void mma_16816(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool bf16,
               Where where) {
    struct Lane {
        float* d;
        const unsigned* a;
        unsigned b[2];
        bool bf16;
    } own{d, a, {b0, b1}, bf16};
    collective(
        "mma.m16n8k16", ~0u, &own,
        [](void* const data[32], unsigned) {
            use_loaded();
            float a[16][16], b[8][16];
            for (int i = 0; i < 32; ++i) {
                Lane& lane = *static_cast<Lane*>(data[i]);
                for (int e = 0; e < 8; ++e)
                    a[i / 4 + e / 2 % 2 * 8][i % 4 * 2 + e % 2 + e / 4 * 8] =
                        value_of(lane.a[e / 2] >> e % 2 * 16 & 0xffff, lane.bf16);
                for (int e = 0; e < 4; ++e)
                    b[i / 4][i % 4 * 2 + e % 2 + e / 2 * 8] =
                        value_of(lane.b[e / 2] >> e % 2 * 16 & 0xffff, lane.bf16);
            }
            for (int i = 0; i < 32; ++i)
                for (int e = 0; e < 4; ++e) {
                    float sum = static_cast<Lane*>(data[i])->d[e];
                    for (int k = 0; k < 16; ++k)
                        sum += a[i / 4 + e / 2 * 8][k] * b[i % 4 * 2 + e % 2][k];
                    static_cast<Lane*>(data[i])->d[e] = sum;
                }
        },
        where);
}
void mma_1688(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Where where) {
    struct Lane {
        float* d;
        const unsigned* a;
        unsigned b[2];
    } own{d, a, {b0, b1}};
    collective(
        "mma.m16n8k8", ~0u, &own,
        [](void* const data[32], unsigned) {
            use_loaded();
            auto tf32 = [](unsigned bits) { return __uint_as_float(bits & 0xffffe000u); };
            float a[16][8], b[8][8];
            for (int i = 0; i < 32; ++i) {
                Lane& lane = *static_cast<Lane*>(data[i]);
                for (int e = 0; e < 4; ++e)
                    a[i / 4 + e % 2 * 8][i % 4 + e / 2 * 4] = tf32(lane.a[e]);
                for (int e = 0; e < 2; ++e) b[i / 4][i % 4 + e * 4] = tf32(lane.b[e]);
            }
            for (int i = 0; i < 32; ++i)
                for (int e = 0; e < 4; ++e) {
                    float& d = static_cast<Lane*>(data[i])->d[e];
                    double sum = d;
                    for (int k = 0; k < 8; ++k)
                        sum +=
                            static_cast<double>(a[i / 4 + e / 2 * 8][k]) * b[i % 4 * 2 + e % 2][k];
                    d = static_cast<float>(sum);  // tensor cores round towards zero
                    if (fabsf(d) > (sum < 0 ? -sum : sum))
                        d = __uint_as_float(__float_as_uint(d) - 1);
                }
        },
        where);
}

// ---- scheduling ----
static void thread_ends() {
    Fiber& fiber = me();
    fiber.store_groups.push_back(fiber.stores);
    for (const auto& group : fiber.store_groups)
        if (!group.empty())
            fail(group[0].where,
                 "the thread ends while this tma_store may still read shared memory");
    Warp& warp = fiber.cta->warps[fiber.warp];
    if (!warp.accumulators.empty()) fail(NOWHERE, "the warp ends while a wgmma is under way");
    Barrier& all = fiber.cta->barriers[0];
    if (all.arrived && !all.expected && all.arrived == static_cast<int>(fiber.cta->alive) - 1)
        complete(all);
    settle_cluster(1);
}
[[noreturn]] static void deadlock() {
    self = nullptr;
    fprintf(stderr, "deadlock in %s, schedule %u: no thread can go on\n", kernel_name, schedule);
    for (Cta& cta : cluster) {
        fprintf(stderr, "block (%u,%u,%u):\n", cta.index.x, cta.index.y, cta.index.z);
        for (std::size_t i = 0; i < cta.fibers.size();) {
            Fiber& f = *cta.fibers[i];
            std::size_t end = i + 1;  // as long as threads wait alike
            auto same = [&](const Fiber& g) {
                return g.state == f.state &&
                       (f.state == DONE || (g.what == f.what && g.where.line == f.where.line &&
                                            g.first == f.first && g.second == f.second));
            };
            while (end < cta.fibers.size() && same(*cta.fibers[end])) ++end;
            fprintf(stderr, "  threads %zu-%zu (warp %u): ", i, end - 1, f.warp);
            if (f.state == DONE) fprintf(stderr, "ended\n");
            else {
                fprintf(stderr, "%s at %s:%d", f.what, f.where.file ? f.where.file : "?",
                        f.where.line);
                if (f.what == MBARRIER_WAIT) {
                    const Mbarrier& b = mbarrier_at(cta, f.first, f.where);
                    fprintf(
                        stderr,
                        " of offset %lu for parity %lu: its phase is %u, %u of %u arrivals and %ld "
                        "bytes are missing\n",
                        (f.first & 0xffffff) - SMEM_BASE, f.second, b.phase, b.pending, b.count,
                        b.bytes);
                } else if (f.what == CLUSTER_WAIT)
                    fprintf(stderr, ": %zu threads of the cluster arrived\n", cluster_came.size());
                else if (f.second)
                    fprintf(stderr, ": barrier %lu, %d of %lu threads came\n", f.first,
                            cta.barriers[f.first].arrived, f.second);
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
    return &from[at_random() ? random_bits() % from.size() : schedule == 1 ? from.size() - 1 : 0];
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
        if (at_random() && random_bits() % 4 == 0) return;
    }
}
// The load that arrives next. Schedules 0 and 2 deliver nothing but what somebody waits for, as
// long as there is any.
static auto next_load() {
    if (at_random()) return loads.begin() + random_bits() % loads.size();
    auto awaited = [](const auto& load) { return is_waited_for(*load); };
    auto found = std::find_if(loads.begin(), loads.end(), awaited);
    if (schedule == NEWEST_FIRST && found != loads.end())
        found = std::find_if(loads.rbegin(), loads.rend(), awaited).base() - 1;
    return found == loads.end() ? found - 1 : found;
}
void run_cluster() {
    cluster_came.clear(), cluster_passed.clear();
    struct Ready {
        Cta* cta;
        unsigned warp;
    };
    std::vector<Ready> runnable, deferred;
    for (;;) {
        runnable.clear(), deferred.clear();
        unsigned alive = 0;
        for (Cta& cta : cluster) {
            alive += cta.alive;
            for (unsigned warp = 0; warp < cta.warps.size(); ++warp) {
                const auto& threads = cta.warps[warp].threads;
                if (threads[RUNNABLE]) runnable.push_back({&cta, warp});
                else if (threads[DEFERRED]) deferred.push_back({&cta, warp});
            }
        }
        if (!alive) return;
        if (Ready* next = choose(runnable)) {
            run_warp(*next->cta, next->warp);
        } else if (!loads.empty() && (deferred.empty() || !at_random() || random_bits() % 2)) {
            auto next = next_load();
            const std::unique_ptr<Load> load = std::move(*next);
            loads.erase(next);
            deliver(*load);
        } else if (Ready* next = choose(deferred)) {
            for (Fiber* fiber : next->cta->fibers)
                if (fiber->warp == next->warp && fiber->state == DEFERRED) wake(fiber);
        } else {
            deadlock();
        }
    }
}
}  // namespace simt
