// One launch in a process of its own: reads a request, runs its blocks one after the other (those
// of a cluster together), and writes the buffers back. A fault ends it with a report and status 2.
#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include "runtime.hpp"

namespace simt {
struct Buffer {
    std::string name, kind, path;  // kind: input, output or workspace
    std::size_t bytes;
    unsigned char *memory, *begin, *end;  // and the pages, or redzones, around it
    std::vector<unsigned char> hidden;
};

uint3 block_dim, grid_dim;
float half_values[65536];
std::vector<void*> arguments;
std::size_t smem_bytes;
bool in_order;
unsigned schedule;
const char* kernel_name = "?";
unsigned random_bits() {  // splitmix64, begun with the schedule
    static uint64_t state = schedule;
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z >> 32;
}
static std::map<std::string, Buffer> buffers;
static bool hiding;

void describe(FILE* to) {
    if (!self || self == &main_fiber) return;
    const char* orders[] = {"low warps first", "high warps first", "newest copies first"};
    fprintf(to, "  in block (%u,%u,%u) thread %u (warp %u lane %u) of %s, %s\n", self->block.x,
            self->block.y, self->block.z, self->index.x, self->warp, self->lane, kernel_name,
            schedule < 3 ? orders[schedule] : "threads in a random order");
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

// ---- programmatic launches: what the launch before wrote is NaN until grid_wait ----
static void hide() {
    hiding = true;
    for (auto& [name, buffer] : buffers)
        if (buffer.kind == "workspace") {
            buffer.hidden.assign(buffer.memory, buffer.memory + buffer.bytes);
            memset(buffer.memory, 0xff, buffer.bytes);
        }
}
void grid_wait() {
    if (!hiding) return;
    hiding = false;
    for (auto& [name, buffer] : buffers)
        if (buffer.kind == "workspace") {
            for (std::size_t i = 0; i < buffer.bytes; ++i)
                if (buffer.memory[i] != 0xff)
                    fail(NOWHERE, "a programmatic launch wrote %s before grid_wait", name.c_str());
            memcpy(buffer.memory, buffer.hidden.data(), buffer.bytes);
        }
}

// ---- memory ----
static unsigned char* pages_for(std::size_t bytes,
                                bool at_end) {  // inaccessible pages on both sides
    std::size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
    auto* all = static_cast<unsigned char*>(
        mmap(nullptr, size + 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(all, PAGE, PROT_NONE);
    mprotect(all + PAGE + size, PAGE, PROT_NONE);
    memset(all + PAGE, 0xff, size);
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
    buffer.begin =
        reinterpret_cast<unsigned char*>(reinterpret_cast<std::uintptr_t>(p) / PAGE * PAGE);
    buffer.end = buffer.begin + ((p - buffer.begin) + buffer.bytes + PAGE - 1) / PAGE * PAGE;
    return p;
}
// Static __shared__ arrays by key and rank: they have pages of their own, NaN when a block begins.
struct Static {
    const char* name;
    unsigned char* memory;
    std::size_t bytes;
    unsigned long block;
};
static std::map<std::pair<const void*, unsigned>, Static> statics;
static unsigned long blocks_begun;
void* static_smem(const void* key, const char* name, std::size_t bytes) {
    auto [found, made] = statics.try_emplace({key, me().cta->rank});
    Static& array = found->second;
    if (made) {
        array = {name, pages_for(bytes, schedule == 0), bytes, 0};
        std::size_t all = 0;
        for (auto& [of, other] : statics) all += of.second == me().cta->rank ? other.bytes : 0;
        if (all > 48 << 10)
            fail(NOWHERE, "static __shared__ arrays of %zu bytes, and a block may have 49152", all);
    }
    if (array.block != blocks_begun) memset(array.memory, 0xff, bytes), array.block = blocks_begun;
    return array.memory;
}
// `past the end of buffer k: byte 190 of 128`, if the address is in these pages or beside them.
static bool told(const unsigned char* address, const unsigned char* memory, std::size_t bytes,
                 const char* what, const char* name) {
    auto at = static_cast<long>(address - memory), size = static_cast<long>(bytes);
    if (at < -2 * static_cast<long>(PAGE) || at >= size + 2 * static_cast<long>(PAGE)) return false;
    const char* where = at < 0 ? "before the beginning of " : at >= size ? "past the end of " : "";
    fprintf(stderr, " %s%s%s: byte %ld of %ld", where, what, name, at, size);
    return true;
}
static void on_fault(int number, siginfo_t* info, [[maybe_unused]] void* context) {
    auto* address = static_cast<unsigned char*>(info->si_addr);
    const char* pc = nullptr;
    const char* does = "reads or writes";
#if defined(__x86_64__)
    const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    pc = reinterpret_cast<const char*>(registers[REG_RIP]);
    does = registers[REG_ERR] & 2 ? "writes" : "reads";
#endif
    if (number == SIGFPE) fprintf(stderr, "division by zero");
    else if (self && self != &main_fiber && address >= me().stack - PAGE && address < me().stack)
        fprintf(stderr, "the fiber's stack overflowed");
    else {
        fprintf(stderr, "%s", does);
        bool known = false;
        for (auto& [name, b] : buffers) {
            if (known || !told(address, b.memory, b.bytes, "buffer ", name.c_str())) continue;
            known = true;
            if (b.kind == "input" && address >= b.begin && address < b.end)
                fprintf(stderr, ", an input that must not be written");
        }
        for (auto& [of, array] : statics)
            known =
                known || told(address, array.memory, array.bytes, "the shared array ", array.name);
        for (Cta& cta : cluster)
            known = known || told(address, cta.smem, smem_bytes, "dynamic shared memory", "");
        if (!known) fprintf(stderr, " address %p, where no buffer is", static_cast<void*>(address));
    }
    fprintf(stderr, "\n");
    Dl_info of;
    if (pc && dladdr(pc, &of)) fprintf(stderr, "@pc %#tx\n", pc - static_cast<char*>(of.dli_fbase));
    describe(stderr);
    _exit(2);
}
static void run_block(uint3 first, unsigned ranks, unsigned threads) {
    ++blocks_begun;
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
        memset(cta.smem, 0xff, smem_bytes);
        clear(cta, threads);
        for (unsigned i = 0; i < threads; ++i) {
            Fiber& f = *cta.fibers[i];
            f.index = {i, 0, 0}, f.block = cta.index, f.lane = i % 32, f.warp = i / 32,
            f.cta = &cta;
            f.copies.clear(), f.copy_groups.clear(), f.stores.clear(), f.store_groups.clear(),
                f.unfenced.clear(), f.unwritten = false;
            start(f);
        }
    }
    run_cluster();
    self = nullptr;
    for (Cta& cta : cluster)
        for (Fiber* f : cta.fibers) leave_held(*f);
    if (!loads.empty())
        fail(loads[0]->where, "block (%u,%u,%u) of %s ends before this %s arrived", first.x,
             first.y, first.z, kernel_name, loads[0]->data.empty() ? "tma_load" : "store_async");
    for (Cta& cta : cluster) {
        std::size_t end = (smem_bytes + PAGE - 1) / PAGE * PAGE;
        for (std::size_t i = smem_bytes; !ASAN && i < end; ++i)
            if (cta.smem[i] != 0xff)
                fail(NOWHERE, "%s wrote byte %zu of %zu bytes of shared memory", kernel_name, i,
                     smem_bytes);
        for (const Warp& warp : cta.warps)
            if (&warp - &cta.warps[0] < static_cast<long>(threads / 128 * 4) &&
                warp.logged != cta.warpgroups[(&warp - &cta.warps[0]) / 4].size())
                fail(NOWHERE,
                     "%s: the warps of a warpgroup did different numbers of wgmma or setmaxnreg",
                     kernel_name);
    }
}

// The request: words and numbers between blanks, as harness.py writes them.
static std::string word(FILE* in) {
    char text[4096];
    return fscanf(in, "%4095s", text) == 1 ? text : "";
}
template <class T>
static T number(FILE* in) {
    return static_cast<T>(strtoll(word(in).c_str(), nullptr, 10));
}
static void transfer(Buffer& b, bool out) {
    FILE* file = fopen(b.path.c_str(), out ? "wb" : "rb");
    std::size_t moved = !file ? 0
                        : out ? fwrite(b.memory, 1, b.bytes, file)
                              : fread(b.memory, 1, b.bytes, file);
    if (moved != b.bytes || fclose(file))
        fail(NOWHERE, "%s could not be read or written", b.path.c_str());
}
static int run(const char* request) {
    FILE* in = fopen(request, "r");
    std::string wanted;
    unsigned threads = 0, ranks = 1;
    bool programmatic = false;
    for (std::string field; field = word(in), !field.empty();) {
        if (field == "kernel") kernel_name = strdup(word(in).c_str());
        else if (field == "grid")
            for (unsigned* to : {&grid_dim.x, &grid_dim.y, &grid_dim.z}) *to = number<unsigned>(in);
        else if (field == "threads") threads = number<unsigned>(in);
        else if (field == "cluster") ranks = number<unsigned>(in);
        else if (field == "smem") smem_bytes = number<std::size_t>(in);
        else if (field == "schedule") schedule = number<unsigned>(in);
        else if (field == "programmatic") programmatic = number<int>(in);
        else if (field == "buffer") {
            Buffer b;
            b.name = word(in), b.kind = word(in), b.bytes = number<std::size_t>(in),
            b.path = word(in);
            b.memory = guarded(b);
            transfer(b, false);
            if (b.kind == "input" && !ASAN) mprotect(b.begin, b.end - b.begin, PROT_READ);
            buffers[b.name] = b;
        } else if (field == "pointer") {
            arguments.push_back(new void*(buffers.at(word(in)).memory)), wanted += 'p';
        } else if (field == "int") {
            arguments.push_back(new int(number<int>(in))), wanted += 'i';
        } else if (field == "float") {
            arguments.push_back(new float(strtof(word(in).c_str(), nullptr))), wanted += 'f';
        } else if (field == "map") {
            auto* map = new TensorMap();
            map->base = buffers.at(word(in)).memory;
            map->rank = number<int>(in), map->swizzle = number<int>(in);
            for (int d = 0; d < map->rank; ++d) map->dims[d] = number<unsigned>(in);
            for (int d = 0; d + 1 < map->rank; ++d) map->strides[d] = number<uint64_t>(in);
            for (int d = 0; d < map->rank; ++d) map->box[d] = number<unsigned>(in);
            arguments.push_back(map), wanted += 't';
        } else fail(NOWHERE, "the request says %s", field.c_str());
    }
    if (wanted != simt_signature())
        fail(
            NOWHERE,
            "%s takes (%s), and the declaration passes (%s): p pointer, i int, f float, t TensorMap",
            kernel_name, simt_signature(), wanted.c_str());
    if (grid_dim.x % ranks)
        fail(NOWHERE, "a grid of %u blocks in clusters of %u", grid_dim.x, ranks);
    block_dim = {threads, 1, 1};
    long blocks = static_cast<long>(grid_dim.x) * grid_dim.y * grid_dim.z;
    for (long n = 0; n < blocks; n += ranks) {
        long i = schedule == 1 && !in_order ? blocks - ranks - n : n;
        if (programmatic) hide();
        run_block({static_cast<unsigned>(i % grid_dim.x),
                   static_cast<unsigned>(i / grid_dim.x % grid_dim.y),
                   static_cast<unsigned>(i / grid_dim.x / grid_dim.y)},
                  ranks, threads);
        grid_wait();
    }
    apply_held();
    for (auto& [name, b] : buffers) {
        if (!ASAN)
            for (unsigned char* p = b.begin; p < b.end; ++p)
                if ((p < b.memory || p >= b.memory + b.bytes) && *p != 0xff)
                    fail(NOWHERE, "%s wrote past the end of buffer %s: byte %ld of %zu",
                         kernel_name, name.c_str(), static_cast<long>(p - b.memory), b.bytes);
        if (b.kind != "input") transfer(b, true);
    }
    return 0;
}
}  // namespace simt

void (*simt_kernel)(void* const* args);
const char* (*simt_signature)();

// The arguments: a stage's library and a request.
int main(int, char** argv) {
    using namespace simt;
    void* stage = dlopen(argv[1], RTLD_NOW);
    if (!stage) fail(NOWHERE, "%s", dlerror());
    simt_kernel = reinterpret_cast<decltype(simt_kernel)>(dlsym(stage, "simt_stage"));
    simt_signature =
        reinterpret_cast<decltype(simt_signature)>(dlsym(stage, "simt_stage_signature"));
    in_order = dlsym(stage, "simt_in_order");
    for (unsigned bits = 0; bits < 65536; ++bits)
        half_values[bits] = simt_cast<_Float16>(static_cast<unsigned short>(bits));
    static unsigned char signal_stack[64 << 10];
    stack_t alternate{signal_stack, 0, sizeof signal_stack};
    sigaltstack(&alternate, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    if (!ASAN) sigaction(SIGSEGV, &action, nullptr), sigaction(SIGBUS, &action, nullptr);
    sigaction(SIGFPE, &action, nullptr);
    return run(argv[2]);
}
