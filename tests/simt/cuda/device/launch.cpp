// A launch on buffers of the calling process, in place of main.cpp, which reads buffers from files.
// A failed check or a deadlock ends the launch, whose report is then in a file.
#include <setjmp.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <unistd.h>
#include "../runtime.hpp"

void (*simt_kernel)(void* const* args);
const char* (*simt_signature)();
static jmp_buf failed;
// What the runtime ends its process by.
extern "C" [[noreturn]] void simt_exit(int) { longjmp(failed, 1); }

namespace simt {
uint3 block_dim, grid_dim;
float half_values[65536];
std::vector<void*> arguments;
std::size_t smem_bytes;
unsigned schedule;
bool in_order;  // no kernel here waits for others
const char* kernel_name = "?";
unsigned random_bits() {
    static uint64_t state = schedule;
    return (state = state * 6364136223846793005u + 1442695040888963407u) >> 33;
}
void describe(FILE* to) {
    if (!self || self == &main_fiber) return;
    fprintf(to, "  in block (%u,%u,%u) thread %u of %s, schedule %u\n", self->block.x,
            self->block.y, self->block.z, self->index.x, kernel_name, schedule);
}
void fail(Where where, const char* format, ...) {
    va_list list;
    va_start(list, format);
    if (where.file) fprintf(stderr, "%s:%d: ", where.file, where.line);
    vfprintf(stderr, format, list);
    fprintf(stderr, "\n");
    describe(stderr);
    simt_exit(2);
}
void grid_wait() {}

static void run_block(uint3 index, unsigned threads) {
    Cta& cta = cluster[0];
    cta.index = index, cta.rank = 0;
    std::size_t size = (smem_bytes + PAGE - 1) / PAGE * PAGE;
    memset(cta.smem, 0xff, size);
    clear(cta, threads);
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& f = *cta.fibers[i];
        f.index = {i, 0, 0}, f.block = index, f.lane = i % 32, f.warp = i / 32, f.cta = &cta;
        f.store_groups.clear(), f.stores.clear();
        start(f);
    }
    run_cluster();
    self = nullptr;
    for (std::size_t i = smem_bytes; i < size; ++i)
        if (cta.smem[i] != 0xff)
            fail(NOWHERE, "%s wrote byte %zu of %zu of shared memory", kernel_name, i, smem_bytes);
}
}  // namespace simt

// Whether the launch ended well; the report of one that did not goes to a file descriptor.
extern "C" int simt_launch(void (*kernel)(void* const*), const char* name, void* const* args,
                           unsigned count, const unsigned* grid, unsigned threads,
                           std::size_t smem_bytes, unsigned schedule, int report) {
    using namespace simt;
    simt_kernel = kernel, kernel_name = name;
    arguments.assign(args, args + count);
    simt::smem_bytes = smem_bytes, simt::schedule = schedule;
    block_dim = {threads, 1, 1}, grid_dim = {grid[0], grid[1], grid[2]};
    cluster.resize(1);
    Cta& cta = cluster[0];
    while (cta.fibers.size() < threads) cta.fibers.push_back(new Fiber());
    cta.fibers.resize(threads);
    std::size_t size = (smem_bytes + PAGE - 1) / PAGE * PAGE;
    void* pages =
        mmap(nullptr, size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cta.smem = static_cast<unsigned char*>(pages);
    mprotect(cta.smem + size, PAGE, PROT_NONE);
    int error = dup(2);
    dup2(report, 2);
    int wrong = setjmp(failed);
    if (!wrong) {
        long blocks = static_cast<long>(grid[0]) * grid[1] * grid[2];
        for (long n = 0; n < blocks; ++n) {
            long i = schedule == 1 ? blocks - 1 - n : n;
            run_block(
                {static_cast<unsigned>(i % grid[0]), static_cast<unsigned>(i / grid[0] % grid[1]),
                 static_cast<unsigned>(i / grid[0] / grid[1])},
                threads);
        }
    }
    self = nullptr;
    dup2(error, 2), close(error);
    munmap(pages, size + PAGE);
    return wrong;
}
