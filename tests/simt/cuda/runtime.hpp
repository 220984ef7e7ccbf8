// What runs the templates, the other side of simt.hpp: fibers and their scheduler, shared memory,
// barriers, and the units that work beside the threads (cp.async, TMA, wgmma). These finish as
// early or as late as the hardware may, by `schedule`, and what they will write is NaN from their
// start on: a missing wait, or a buffer given back too early, reads NaN instead of being right by
// luck.
//   schedule 0: low warps first; TMA loads arrive as late as they can, wgmma and stores read at
//   once. schedule 1: high warps first, blocks and lanes backwards; loads arrive at once, reads
//   come late. schedule 2: as 0, but of the loads that somebody waits for the newest arrives first.
//   schedule n: all of it by a generator seeded with n.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>
#include "simt.hpp"

#if defined(__SANITIZE_ADDRESS__)
constexpr bool ASAN = true;
#else
constexpr bool ASAN = false;
#endif

// Of the stage's library, which the harness makes: the launch, and its kernel's signature.
extern void (*simt_kernel)(void* const* args);
extern const char* (*simt_signature)();

namespace simt {
constexpr std::size_t STACK = ASAN ? 512 << 10 : 256 << 10, PAGE = 4096;
constexpr unsigned SMEM_BASE = 1024, GRANULE = 16;  // where the driver puts dynamic shared memory
constexpr Where NOWHERE{nullptr, 0};
enum State { RUNNABLE, BLOCKED, DEFERRED, DONE };  // DEFERRED: until nobody else can go on

struct Copy {
    unsigned target, bytes;
    unsigned char data[16];
};
struct Store {
    TensorMap map;
    unsigned source;
    std::array<int, 5> at;
    Where where;
    bool done;
    float* plain = nullptr;  // of a bulk copy, which has no map, and its bytes
    unsigned bytes = 0;
    bool adds = false;
};
struct Held {  // a bulk copy that nobody sees before a flag is waited for
    float* to;
    std::vector<float> data;
    bool adds;
};
struct Fiber : Thread {
    State state;
    unsigned char* stack;
    void* context;  // the stack pointer, or a ucontext_t
    void* asan_stack;
    const char* what;  // waited for, with two numbers, where
    unsigned long first, second;
    Where where;
    struct Cta* cta;
    std::vector<Copy> copies;
    std::deque<std::vector<Copy>> copy_groups;
    std::vector<Store> stores;
    std::deque<std::vector<Store>> store_groups;
    std::vector<Held> held;
    bool unwritten = false;          // it has only waited until its stores were read
    std::vector<unsigned> unfenced;  // granules written since its last fence_async_proxy
};
struct Gather {
    const char* name;
    unsigned mask, arrived;
    void* data[32];
};
struct Product {
    Wgmma of;
    Where where;
    float* d[32];
    const unsigned* a[32];
};
struct Accumulator {
    std::array<float*, 32> at;
    int count, uses;
    std::vector<float> values;
};
// For each warp of the cluster, by rank and number: how many of its ldmatrix are known to be used.
using Clock = std::vector<unsigned>;
struct Read {
    Where where;
    std::array<unsigned, 32> rows;  // addresses of 16 bytes
};
struct Warp {
    std::vector<Gather> gathers;
    std::vector<Product> open;
    std::deque<std::vector<Product>> groups;
    std::map<float*, Accumulator> accumulators;  // of products under way, by lane 0's registers
    std::array<unsigned, DONE + 1> threads{};    // how many are in each state
    bool fenced = false;
    std::size_t logged = 0;
    std::deque<Read> reads;  // its last ldmatrix
    unsigned begun = 0;      // ldmatrix so far
    Clock known;
};
struct Event {
    const char* what;
    uint64_t a, b;
};
struct Barrier {
    int expected = 0, arrived = 0;
    std::vector<Fiber*> waiting;
    Clock told;
};
struct Mbarrier {
    unsigned count, pending;
    long bytes;
    unsigned phase;
    std::vector<Fiber*> waiting;
    Clock told, complete;  // by those that arrived, and of them up to the last whole phase
};
struct Load {
    struct Cta* cta;
    unsigned target, barrier;
    TensorMap map;
    std::array<int, 5> at;
    Where where;
    std::vector<unsigned char> data;  // of a store_async or a bulk_load, which have no map
};
struct Cta {
    uint3 index;
    unsigned rank;
    unsigned char* smem;
    unsigned alive;  // threads that have not ended
    std::vector<Fiber*> fibers;
    std::vector<Warp> warps;
    std::vector<std::vector<Event>> warpgroups;  // what all warps of one must do alike
    Barrier barriers[16];
    std::map<unsigned, Mbarrier> mbarriers;
    std::vector<unsigned short> writer;  // of a granule not fenced yet: thread + 1
};

// ---- main.cpp ----
extern std::vector<void*> arguments;
extern std::size_t smem_bytes;
extern unsigned schedule;
constexpr unsigned NEWEST_FIRST = 2;
inline bool at_random() { return schedule > NEWEST_FIRST; }
extern bool in_order;  // blocks wait for those before them
void leave_held(Fiber& fiber);
void apply_held();
unsigned random_bits();
extern const char* kernel_name;
void describe(FILE* to);  // the thread that runs

// ---- threads.cpp ----
extern Fiber main_fiber;
extern std::vector<Cta> cluster;         // the blocks that run now
void clear(Cta& cta, unsigned threads);  // for its next block
void start(Fiber& fiber);
void run_cluster();
void leave(State state);
void block(const char* what, Where where, unsigned long first = 0, unsigned long second = 0);
inline void set_state(Fiber& fiber, State state) {
    auto& threads = fiber.cta->warps[fiber.warp].threads;
    --threads[fiber.state], ++threads[state];
    if (state == DONE) --fiber.cta->alive;
    fiber.state = state;
}
inline void wake(Fiber* fiber) { set_state(*fiber, RUNNABLE); }
inline Fiber& me() { return static_cast<Fiber&>(*self); }
inline bool late_reads() { return schedule == 1 || (at_random() && random_bits() % 2); }
inline float value_of(unsigned bits, bool bf16) {
    return bf16 ? __uint_as_float(bits << 16) : half_values[bits & 0xffff];
}

// ---- reads.cpp ----
void may_read(const Read& read);                 // an ldmatrix of this warp begins
void tell(Clock& at);                            // this warp arrives
void hear(const Fiber& fiber, const Clock& at);  // the fiber's warp has waited
void tell_cluster();                             // all warps of a cluster have met
// Fails if a copy that this warp begins writes what another may still read.
void check_reads(const Cta& cta, unsigned begin, unsigned bytes, const char* what, Where where);

// ---- copies.cpp ----
extern std::vector<std::unique_ptr<Load>> loads;  // under way
extern const char MBARRIER_WAIT[];
unsigned char* at(Cta& own, unsigned address, unsigned bytes, unsigned align, const char* what,
                  Where where);
unsigned resolved(unsigned address, const char* what, Where where);
void written(Cta& own, unsigned address);
const unsigned char* async_read(Cta& own, unsigned address, const char* what, Where where);
Mbarrier& mbarrier_at(Cta& own, unsigned address, Where where);
bool is_waited_for(const Load& load);
void deliver(const Load& load);
}  // namespace simt
