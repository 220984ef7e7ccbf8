// Reads by ldmatrix. One is under way until an instruction needs what it loads, and an arrival is
// not ordered behind it for the async proxy: on an H100, the next Q now and then came over one
// whose place was given back right behind its ldmatrix. So a copy may write there only if its warp
// has waited, through whatever barriers, for something that the reader did after such a use.
#include "runtime.hpp"

namespace simt {
constexpr std::size_t KEPT = 1024;  // reads of a warp; older ones are taken for done

static Warp& warp_of(const Fiber& fiber) { return fiber.cta->warps[fiber.warp]; }
static void join(Clock& to, const Clock& from) {
    if (to.size() < from.size()) to.resize(from.size());
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}
static std::size_t index_of(const Cta& cta, std::size_t warp) {
    return cta.rank * cta.warps.size() + warp;
}

void may_read(const Read& read) {
    if (me().cta->mbarriers.empty()) return;  // no copy of TMA comes
    Warp& warp = warp_of(me());
    warp.reads.push_back(read), ++warp.begun;
    if (warp.reads.size() > KEPT) warp.reads.pop_front();
}
void use_loaded() {
    Warp& warp = warp_of(me());
    if (!warp.begun) return;
    std::size_t own = index_of(*me().cta, me().warp);
    if (warp.known.size() <= own) warp.known.resize(own + 1);
    warp.known[own] = warp.begun;
}
void tell(Clock& at) { join(at, warp_of(me()).known); }
void hear(const Fiber& fiber, const Clock& at) { join(warp_of(fiber).known, at); }
void tell_cluster() {
    Clock all;
    for (const Cta& cta : cluster)
        for (const Warp& warp : cta.warps) join(all, warp.known);
    for (Cta& cta : cluster)
        for (Warp& warp : cta.warps) join(warp.known, all);
}
void check_reads(const Cta& cta, unsigned begin, unsigned bytes, const char* what, Where where) {
    const Clock& known = warp_of(me()).known;
    for (std::size_t w = 0; w < cta.warps.size(); ++w) {
        const Warp& warp = cta.warps[w];
        const std::size_t index = index_of(cta, w);
        const unsigned used = index < known.size() ? known[index] : 0;
        const std::size_t unsure = std::min<std::size_t>(warp.begun - used, warp.reads.size());
        for (std::size_t i = warp.reads.size() - unsure; i < warp.reads.size(); ++i)
            for (unsigned row : warp.reads[i].rows)
                if (row - begin < bytes)
                    fail(where,
                         "%s writes shared memory at offset %u, which warp %zu of block (%u,%u,%u) "
                         "may still read: it has waited for nothing that this warp did after it "
                         "used what the ldmatrix at %s:%d loads",
                         what, row - SMEM_BASE, w, cta.index.x, cta.index.y, cta.index.z,
                         warp.reads[i].where.file, warp.reads[i].where.line);
    }
}
}  // namespace simt
