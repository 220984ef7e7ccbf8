// Shared memory, and what moves data beside the threads: cp.async, mbarriers, TMA.
#include "runtime.hpp"

namespace simt {
std::vector<std::unique_ptr<Load>> loads;

// ---- shared memory ----
void* dynamic_smem() { return me().cta->smem; }
unsigned cluster_rank() { return me().cta->rank; }
unsigned cluster_size() { return cluster.size(); }
unsigned address_of(const void* p) {
    auto offset = static_cast<const unsigned char*>(p) - me().cta->smem;
    if (offset < 0 || offset > static_cast<long>(smem_bytes))
        fail(NOWHERE, "smem_address of a pointer that is not in dynamic shared memory");
    return cluster.size() > 1 ? map_address(SMEM_BASE + offset, me().cta->rank)
                              : SMEM_BASE + offset;
}
unsigned map_address(unsigned address, unsigned rank) {
    if (rank >= cluster.size()) fail(NOWHERE, "rank %u of a cluster of %zu", rank, cluster.size());
    return (address & 0xffffff) | (rank + 1) << 24;
}
// As a thread gives it: in a cluster the driver places each block's shared memory elsewhere.
unsigned resolved(unsigned address, const char* what, Where where) {
    if (cluster.size() == 1) return address;
    if (!(address >> 24))
        fail(where, "%s: address %u is of no block of the cluster", what, address);
    return (address >> 24) - 1 == me().cta->rank ? address & 0xffffff : address;
}
static Cta& cta_of(unsigned address, Cta& own) {
    return address >> 24 ? cluster.at((address >> 24) - 1) : own;
}
unsigned char* at(Cta& own, unsigned address, unsigned bytes, unsigned align, const char* what,
                  Where where) {
    Cta& cta = cta_of(address, own);
    unsigned offset = (address & 0xffffff) - SMEM_BASE;
    if (offset > smem_bytes || offset + bytes > smem_bytes)
        fail(where, "%s: %u bytes at offset %d of %zu bytes of shared memory", what, bytes,
             static_cast<int>(offset), smem_bytes);
    if (&cta != &own && !cta.alive)
        fail(where, "%s: the block of rank %u has ended", what, cta.rank);
    if (address % align) fail(where, "%s: offset %u is not a multiple of %u", what, offset, align);
    return cta.smem + offset;
}
void written(Cta& own, unsigned address) {  // by a thread: TMA and wgmma see it after a fence
    auto granule = ((address & 0xffffff) - SMEM_BASE) / GRANULE;
    cta_of(address, own).writer[granule] = self->index.x + 1;
    me().unfenced.push_back(granule);
}
const unsigned char* async_read(Cta& own, unsigned address, const char* what, Where where) {
    const unsigned char* p = at(own, address, 16, 16, what, where);
    Cta& cta = cta_of(address, own);
    unsigned by = cta.writer[(p - cta.smem) / GRANULE];
    if (by)
        fail(
            where,
            "%s reads shared memory at offset %ld, which thread %u wrote with no fence_async_proxy since",
            what, static_cast<long>(p - cta.smem), by - 1);
    return p;
}
void load_shared(void* to, unsigned address, unsigned bytes, Where where) {
    address = resolved(address, "load_shared", where);
    memcpy(to, at(*me().cta, address, bytes, bytes, "load_shared", where), bytes);
}
void store_shared(unsigned address, const void* from, unsigned bytes, Where where) {
    address = resolved(address, "store_shared", where);
    memcpy(at(*me().cta, address, bytes, bytes, "store_shared", where), from, bytes);
}
void fence_async_proxy() {
    Fiber& fiber = me();
    for (unsigned granule : fiber.unfenced)
        if (fiber.cta->writer[granule] == fiber.index.x + 1) fiber.cta->writer[granule] = 0;
    fiber.unfenced.clear();
}

// ---- cp.async ----
void cp_async(unsigned target, const void* source, bool valid, Where where, unsigned bytes) {
    target = resolved(target, "cp.async", where);
    Copy copy{target, bytes, {}};
    if (reinterpret_cast<std::uintptr_t>(source) % bytes)
        fail(where, "cp.async: the source is not a multiple of %u bytes", bytes);
    if (valid) memcpy(copy.data, source, bytes);
    memset(at(*me().cta, target, bytes, bytes, "cp.async", where), 0xff, bytes);
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
            memcpy(at(*me().cta, copy.target, copy.bytes, copy.bytes, "cp.async", NOWHERE),
                   copy.data, copy.bytes);
            written(*me().cta, copy.target);
        }
}

// ---- mbarrier ----
static uint64_t mark_of(unsigned address) { return 0x5bad'ba44'0000'0000u | address; }
Mbarrier& mbarrier_at(Cta& own, unsigned address, Where where) {
    Cta& cta = cta_of(address, own);
    unsigned local = address & 0xffffff;
    auto found = cta.mbarriers.find(local);
    if (found == cta.mbarriers.end())
        fail(where, "no mbarrier was initialised at offset %d",
             static_cast<int>(local - SMEM_BASE));
    uint64_t mark;
    memcpy(&mark, at(own, address, 8, 8, "mbarrier", where), 8);
    if (mark != mark_of(local))
        fail(where, "the mbarrier at offset %u was overwritten", local - SMEM_BASE);
    return found->second;
}
const char MBARRIER_WAIT[] = "mbarrier_wait";
bool is_waited_for(const Load& load) {
    auto found = load.cta->mbarriers.find(load.barrier);
    return found != load.cta->mbarriers.end() && !found->second.waiting.empty();
}
static void settle(Mbarrier& barrier) {
    if (barrier.pending || barrier.bytes) return;
    barrier.phase ^= 1, barrier.pending = barrier.count, barrier.complete = barrier.told;
    std::for_each(barrier.waiting.begin(), barrier.waiting.end(), wake);
    barrier.waiting.clear();
}
void mbarrier_init(unsigned address, unsigned arrivals, Where where) {
    address = resolved(address, "mbarrier_init", where);
    if (me().cta->mbarriers.count(address))
        fail(where, "the mbarrier at offset %u is initialised twice", address - SMEM_BASE);
    if (!arrivals) fail(where, "an mbarrier of no arrivals");
    uint64_t mark = mark_of(address);
    memcpy(at(*me().cta, address, 8, 8, "mbarrier_init", where), &mark, 8);
    me().cta->mbarriers[address] = {arrivals, arrivals, 0, 0, {}, {}, {}};
}
void mbarrier_arrive(unsigned address, long bytes, unsigned arrivals, Where where) {
    address = resolved(address, "mbarrier_arrive", where);
    Mbarrier& barrier = mbarrier_at(*me().cta, address, where);
    if (barrier.pending < arrivals)
        fail(where, "the mbarrier at offset %u has more arrivals than its %u in one phase",
             (address & 0xffffff) - SMEM_BASE, barrier.count);
    barrier.bytes += bytes, barrier.pending -= arrivals;
    tell(barrier.told);
    settle(barrier);
}
void mbarrier_wait(unsigned address, unsigned parity, Where where) {
    if (parity > 1) fail(where, "mbarrier_wait: parity %u", parity);
    address = resolved(address, MBARRIER_WAIT, where);
    for (;;) {
        Mbarrier& barrier = mbarrier_at(*me().cta, address, where);
        if (barrier.phase != parity) return hear(me(), barrier.complete);
        // Nobody waits for an mbarrier of another block.
        if (&cta_of(address, *me().cta) == me().cta) barrier.waiting.push_back(&me());
        block(MBARRIER_WAIT, where, address & 0xffffff, parity);
    }
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
                        int64_t offset = 0;
                        for (int d = 1; d < map.rank; ++d) {
                            int64_t c = int64_t{from[d]} + i[d];
                            inside = inside && c >= 0 && c < map.dims[d];
                            offset += c * static_cast<int64_t>(map.strides[d - 1]);
                        }
                        unsigned short* elements[8];
                        for (int e = 0; e < 8; ++e) {
                            int64_t c = int64_t{from[0]} + i[0] + e;
                            bool here = inside && c >= 0 && c < map.dims[0];
                            elements[e] =
                                here ? reinterpret_cast<unsigned short*>(map.base + offset + c * 2)
                                     : nullptr;
                        }
                        unsigned row =
                            linear >> 7 &
                            (swizzle ? swizzle - 1 : 0);  // bits 4-6 by bits 7-9 at 128 bytes
                        use(linear ^ row << 4, elements);
                    }
}
static unsigned box_bytes(const TensorMap& map) {
    unsigned bytes = 2;
    for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
    return bytes;
}
static void check_copy(const char* what, const TensorMap& map, unsigned address, int rank,
                       Where where) {
    if (map.rank != rank)
        fail(where, "%s: %d coordinates for a tensor map of %d dims", what, rank, map.rank);
    if (address % 128)
        fail(where, "%s: shared memory offset %u is not a multiple of 128", what,
             (address & 0xffffff) - SMEM_BASE);
    if (map.swizzle && static_cast<int>(map.box[0] * 2) > map.swizzle)
        fail(where, "%s: a box of %u bytes with swizzle %d", what, map.box[0] * 2, map.swizzle);
}
void deliver(const Load& load) {
    const char* what = load.data.empty() ? "tma_load" : "store_async";
    if (!load.cta->alive) fail(load.where, "this %s arrives at a block that has ended", what);
    if (!load.data.empty())
        memcpy(at(*load.cta, load.target, load.data.size(), 16, what, load.where), load.data.data(),
               load.data.size());
    else
        for_box(load.map, load.target, load.at, [&](unsigned to, unsigned short** elements) {
            unsigned short data[8];
            for (int e = 0; e < 8; ++e) data[e] = elements[e] ? *elements[e] : 0;
            unsigned char* p = at(*load.cta, to, 16, 16, what, load.where);
            memcpy(p, data, 16);
            load.cta->writer[(p - load.cta->smem) / GRANULE] = 0;
        });
    Mbarrier& barrier = mbarrier_at(*load.cta, load.barrier, load.where);
    barrier.bytes -= load.data.empty() ? box_bytes(load.map) : load.data.size();
    settle(barrier);
}
void tma_load(unsigned target, const TensorMap& map, unsigned barrier, int rank, const int* from,
              unsigned multicast, Where where) {
    target = resolved(target, "tma_load", where), barrier = resolved(barrier, "tma_load", where);
    check_copy("tma_load", map, target, rank, where);
    if (!multicast) multicast = 1u << me().cta->rank;
    for (Cta& cta : cluster) {
        if (!(multicast >> cta.rank & 1)) continue;
        Load load{&cta, target & 0xffffff, barrier & 0xffffff, map, {}, where, {}};
        std::copy(from, from + rank, load.at.begin());
        mbarrier_at(cta, load.barrier, where);
        check_reads(cta, load.target, box_bytes(map), "tma_load", where);
        for_box(map, load.target, load.at, [&](unsigned to, unsigned short**) {
            memset(at(cta, to, 16, 16, "tma_load", where), 0xff, 16);
        });
        if (schedule == 1 || (at_random() && random_bits() % 2)) deliver(load);
        else loads.push_back(std::make_unique<Load>(load));
    }
}
void store_async(unsigned target, const float (&values)[4], unsigned barrier, Where where) {
    target = resolved(target, "store_async", where);
    barrier = resolved(barrier, "store_async", where);
    Cta& cta = cta_of(target, *me().cta);
    if (&cta != &cta_of(barrier, *me().cta))
        fail(where, "store_async: the mbarrier is another block's");
    mbarrier_at(*me().cta, barrier, where);
    memset(at(*me().cta, target, 16, 16, "store_async", where), 0xff, 16);
    check_reads(cta, target & 0xffffff, 16, "store_async", where);
    Load load{
        &cta, target & 0xffffff, barrier & 0xffffff, {}, {}, where, std::vector<unsigned char>(16)};
    memcpy(load.data.data(), values, 16);
    if (schedule == 1 || (at_random() && random_bits() % 2)) deliver(load);
    else loads.push_back(std::make_unique<Load>(load));
}
void bulk_load(unsigned target, const void* source, unsigned bytes, unsigned barrier, Where where) {
    if (bytes % 16 || reinterpret_cast<std::uintptr_t>(source) % 16)
        fail(where, "bulk_load: the source or %u bytes are not a multiple of 16", bytes);
    target = resolved(target, "bulk_load", where);
    barrier = resolved(barrier, "bulk_load", where);
    Cta& cta = *me().cta;
    mbarrier_at(cta, barrier, where);
    memset(at(cta, target, bytes, 16, "bulk_load", where), 0xff, bytes);
    check_reads(cta, target, bytes, "bulk_load", where);
    auto* from = static_cast<const unsigned char*>(source);
    Load load{&cta, target, barrier, {}, {}, where, std::vector<unsigned char>(from, from + bytes)};
    if (schedule == 1 || (at_random() && random_bits() % 2)) deliver(load);
    else loads.push_back(std::make_unique<Load>(load));
}
void wrote_shared(unsigned address) {
    written(*me().cta, resolved(address, "wrote_shared", NOWHERE));
}
// ---- flags: in schedule 1 nobody sees bulk copies to memory but those who wait for their flag
// ----
static std::map<const unsigned*, std::vector<Held>> held_by;
static void apply(const Held& copy) {
    for (std::size_t i = 0; i < copy.data.size(); ++i)
        copy.to[i] = copy.adds ? copy.to[i] + copy.data[i] : copy.data[i];
}
static void apply_all(std::vector<Held>& copies) {
    for (const Held& copy : copies) apply(copy);
    copies.clear();
}
void flag_arrive(unsigned* flag, Where where) {
    Fiber& own = me();
    if (own.unwritten || !own.stores.empty() || !own.store_groups.empty())
        fail(where, "flag_arrive: its stores are not waited for until they are written");
    auto& to = held_by[flag];
    to.insert(to.end(), own.held.begin(), own.held.end());
    own.held.clear();
    ++*flag;
}
void flag_wait(const unsigned* flag, unsigned least, Where where) {
    if (*flag < least)
        fail(where, "flag_wait: %u of %u have arrived before this block", *flag, least);
    apply_all(held_by[flag]);
}
void apply_held() {  // at the end of a launch
    for (auto& [flag, copies] : held_by) apply_all(copies);
}
void leave_held(Fiber& fiber) {  // at the end of a block
    auto& to = held_by[nullptr];
    to.insert(to.end(), fiber.held.begin(), fiber.held.end());
    fiber.held.clear();
}
static void carry_out(const Store& store) {
    if (store.plain) {
        Held copy{store.plain, std::vector<float>(store.bytes / 4), store.adds};
        for (unsigned i = 0; i < store.bytes; i += 16)
            memcpy(&copy.data[i / 4],
                   async_read(*me().cta, store.source + i, "bulk_out", store.where), 16);
        if (in_order && schedule == 1) me().held.push_back(std::move(copy));
        else apply(copy);
        return;
    }
    for_box(store.map, store.source, store.at, [&](unsigned from, unsigned short** elements) {
        unsigned short data[8];
        memcpy(data, async_read(*me().cta, from, "tma_store", store.where), 16);
        for (int e = 0; e < 8; ++e)
            if (elements[e]) *elements[e] = data[e];
    });
}
void tma_store(const TensorMap& map, unsigned source, int rank, const int* to, Where where) {
    source = resolved(source, "tma_store", where);
    check_copy("tma_store", map, source, rank, where);
    Store store{map, source, {}, where, false};
    std::copy(to, to + rank, store.at.begin());
    if (!late_reads()) {
        carry_out(store);
        store.done = true;
    }
    me().stores.push_back(store);
}
void bulk_out(float* target, unsigned source, unsigned bytes, bool adds, Where where) {
    source = resolved(source, "bulk_out", where);
    if (bytes % 16 || reinterpret_cast<std::uintptr_t>(target) % 16)
        fail(where, "bulk_out: the target or %u bytes are not a multiple of 16", bytes);
    Store store{{}, source, {}, where, false, target, bytes, adds};
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
void tma_store_wait(int pending, bool read_only) {
    auto& groups = me().store_groups;
    if (read_only) me().unwritten |= static_cast<int>(groups.size()) > pending;
    else if (!pending) me().unwritten = false;
    if (static_cast<int>(groups.size()) > pending && late_reads()) leave(DEFERRED);
    for (; static_cast<int>(groups.size()) > pending; groups.pop_front())
        for (const Store& store : groups.front())
            if (!store.done) carry_out(store);
}
}  // namespace simt
