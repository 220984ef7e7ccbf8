// How append_paged_wgmma's producer copies keys where a box of TMA cannot: from pages that are no
// multiple of 8 slots, of which a box would be a few rows, and from a cache of E4M3, which wgmma
// does not multiply by 16 bits. Its template includes this where its tiles and Requests are known.
#pragma once

// A warp has as many of a tile's rows as the others, and each of its lanes 16 bytes of some of
// them, by cp.async. The tile that came before is told full when the next one is on its way.
//
// Bytes of E4M3 come into rooms of their own, so that copies need not wait until a tile of 16 bits
// is free: ROOMS - 1 tiles are on their way while a lane widens what it has copied itself of the
// one before, and no thread waits for another's copies.
struct Copies {
    static constexpr int WARPS = COPY_WARPS, ROWS = BLOCK_N / WARPS, BYTES = CACHE_E4M3 ? 1 : 2;
    static constexpr int CHUNKS = COLUMNS * BYTES / 16,
                         LANES = CHUNKS <= 4    ? 4
                                 : CHUNKS <= 8  ? 8
                                 : CHUNKS <= 16 ? 16
                                                : 32,
                         STEP = 32 / LANES;  // rows that a warp copies at once
    static_assert(ROWS <= 32, "a lane has the place of a row");
    using Place = long long;  // bytes from the cache's first row to that of a lane's key; below 0:
                              // there is none, and zeros come in its place
    const unsigned char *k, *v;
    const float *k_scale, *v_scale;
    int pages, scale_batch, scale_head;
    long long page_bytes, slot_bytes, head_bytes;
#if CACHE_E4M3
    // A tile of 16 bits, and its barrier `full`, whose lowest bit is the parity to wait for at the
    // next barrier, `empty`.
    struct Tile {
        unsigned to, barrier;
    };
    unsigned rooms, next = 0;     // the latter: the room of the next tile
    Tile coming[ROOMS - 1] = {};  // what is on its way, the first one first; 0: nothing is
#else
    unsigned tile = 0, full = 0;  // what is on its way, and its barrier
#endif

    __device__ __forceinline__ static int warp() { return threadIdx.x / 32 % WARPS; }
    __device__ __forceinline__ static int first_key() { return warp() * ROWS + threadIdx.x % 32; }
    __device__ __forceinline__ Place place(int page, int key) const {
        if (static_cast<unsigned>(page) >= static_cast<unsigned>(pages)) return -1;
        return page * page_bytes + key % PAGE_SIZE * slot_bytes;
    }
    // Of a request and key head. A factor of 0 would make NaN of keys that nobody sees.
    __device__ __forceinline__ void read_scales(Work& work) const {
        const long long of = static_cast<long long>(work.request) * scale_batch +
                             static_cast<long long>(work.head_kv) * scale_head;
        work.k_scale = k_scale[of], work.v_scale = v_scale[of];
        if (work.k_scale == 0.f) work.k_scale = 1e-30f;
    }

    // Where a chunk of 16 bytes lies in a row of a tile of 16 bits.
    __device__ __forceinline__ static unsigned at(unsigned tile, int row, int chunk) {
        return tile + row * KTile::ROW_BYTES + chunk / 8 * KTile::PANEL_BYTES +
               ((chunk % 8 ^ KTile::swizzle(row)) << 4);
    }
    // This lane's chunk of a row. Of E4M3 it becomes two: lanes of the second panel write the other
    // one first, so that eight lie in different banks.
    __device__ __forceinline__ static int chunk() { return threadIdx.x % LANES; }
    __device__ __forceinline__ static int side() { return chunk() / 4 % 2; }
    // Where this lane's chunk of a row comes to.
    __device__ __forceinline__ unsigned target(unsigned to, int row) const {
#if CACHE_E4M3
        return rooms + next * ROOM_BYTES + row * COLUMNS + chunk() * 16;
#else
        return at(to, row, chunk());
#endif
    }
    // Calls copy(row of the tile, row of the warp) for each of this lane's rows.
    template <class Copy>
    __device__ __forceinline__ static void for_rows(Copy copy) {
        const int own = threadIdx.x % 32 / LANES;
#pragma unroll 2
        for (int i = 0; i < ROWS; i += STEP) copy(warp() * ROWS + i + own, i + own);
    }
    __device__ __forceinline__ void load(unsigned to, unsigned barrier, const unsigned char* cache,
                                         int head_kv, Place place) {
        const unsigned char* of_lane = cache + head_kv * head_bytes + chunk() * 16;
        for_rows([&](int row, int own) {
            const Place from = __shfl_sync(ALL_LANES, place, own % 32);
            if (chunk() < CHUNKS && own < ROWS)
                cp_async_16(target(to, row), of_lane + max(from, 0ll), from >= 0);
        });
        cp_async_commit();
#if CACHE_E4M3
        next = after(next);
        const Tile first = coming[0];
#pragma unroll
        for (int i = 0; i < ROOMS - 2; ++i) coming[i] = coming[i + 1];
        coming[ROOMS - 2] = {to, barrier};
        if (first.barrier != 0) cp_async_wait<ROOMS - 1>(), tell(first, next);
#else
        if (full != 0) cp_async_wait<1>(), tell();
        tile = to, full = barrier;
#endif
    }
    __device__ __forceinline__ void load_k(unsigned to, unsigned barrier, int, int head_kv,
                                           Place place) {
        load(to, barrier, k, head_kv, place);
    }
    __device__ __forceinline__ void load_v(unsigned to, unsigned barrier, int, int head_kv,
                                           Place place) {
        load(to, barrier, v, head_kv, place);
    }
    // Waits for what is on its way, and tells consumers of it.
    __device__ __forceinline__ void finish() {
#if CACHE_E4M3
        cp_async_wait<0>();
        unsigned room = next;
#pragma unroll
        for (int i = 0; i < ROOMS - 1; ++i) {
            room = after(room);
            if (coming[i].barrier != 0) tell(coming[i], room);
            coming[i] = {};
        }
#else
        if (full != 0) cp_async_wait<0>(), tell();
        full = 0;
#endif
    }
#if CACHE_E4M3
    __device__ __forceinline__ static unsigned after(unsigned room) {
        return room == ROOMS - 1 ? 0 : room + 1;
    }
    __device__ __forceinline__ void tell(Tile tile, unsigned room) const {
        const unsigned full = tile.barrier & ~1u;
        mbarrier_wait(full + 8, tile.barrier & 1);
        widen(rooms + room * ROOM_BYTES, tile.to);
        fence_async_proxy();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
    }
    // E4M3 is exact in both types of 16 bits.
    __device__ __forceinline__ static void widen(unsigned room, unsigned tile) {
        for_rows([&](int row, int own) {
            if (chunk() >= CHUNKS || own >= ROWS) return;
            const uint4 x = load_shared_16(room + row * COLUMNS + chunk() * 16);
            unsigned y[8];
            halves_of_e4m3(x.x, y[0], y[1]), halves_of_e4m3(x.y, y[2], y[3]);
            halves_of_e4m3(x.z, y[4], y[5]), halves_of_e4m3(x.w, y[6], y[7]);
            float z[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (IS_BF16) y[i] = pack(from_half(y[i] & 0xffff), from_half(y[i] >> 16));
                z[i] = __uint_as_float(y[i]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bool high = i != side();
                auto of = [&](int e) { return high ? z[4 + e] : z[e]; };
                store_shared_floats(at(tile, row, 2 * chunk() + high), of(0), of(1), of(2), of(3));
            }
        });
    }
#else
    __device__ __forceinline__ void tell() const {
        fence_async_proxy();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
    }
#endif
};
