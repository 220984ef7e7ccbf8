// wgmma: products that are under way until a wait, and the layouts of their operands.
#include "runtime.hpp"

namespace simt {
// Address of element (i, k) of an operand of rows i and 16 columns k (of TF32 8), per the
// descriptor; k or i runs along the rows of shared memory. PTX ISA, "Strides"; CUTLASS writes the
// same as canonical layouts.
static unsigned operand_address(uint64_t descriptor, bool transposed, int i, int k,
                                unsigned bytes = 2) {
    unsigned start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
             stride = (descriptor >> 32 & 0x3fff) << 4;
    unsigned code = descriptor >> 62, width = code == 0   ? 16
                                              : code == 1 ? 128
                                              : code == 2 ? 64
                                                          : 32;
    int across = transposed ? i : k, down = transposed ? k : i, per_row = width / bytes;
    if (code == 0 && transposed) std::swap(leading, stride);
    // Eight rows are one piece; `stride` leads to the next eight, `leading` to the next columns.
    unsigned address = start + down / 8 * stride + down % 8 * width + across / per_row * leading +
                       across % per_row * bytes;
    return address ^ (address >> 7 & (width / 16 - 1)) << 4;
}
// Calls use(i, k, value) for `rows` rows i and 16 columns k, eight values at a time: they lie
// beside each other whatever the swizzle.
template <class Use>
static void for_operand(Cta& cta, uint64_t descriptor, bool transposed, bool bf16, int begin,
                        int rows, Where where, Use use) {
    for (int across = 0; across < (transposed ? rows : 16); across += 8)
        for (int down = 0; down < (transposed ? 16 : rows); ++down) {
            int i = transposed ? across : down, k = transposed ? down : across;
            unsigned short bits[8];
            unsigned address = operand_address(descriptor, transposed, begin + i, k);
            memcpy(bits, async_read(cta, address, "wgmma", where), 16);
            for (int e = 0; e < 8; ++e)
                use(transposed ? i + e : i, transposed ? k : k + e, value_of(bits[e], bf16));
        }
}
static float tf32(unsigned bits) { return __uint_as_float(bits & 0xffffe000u); }
static void multiply_tf32(Cta& cta, unsigned warp, const Product& product) {
    const Wgmma& of = product.of;
    static float b[8][256];
    for (int k = 0; k < 8; k += 4)
        for (int n = 0; n < of.columns; ++n) {
            unsigned address = operand_address(of.descriptor_b, false, n, k, 4), bits[4];
            memcpy(bits, async_read(cta, address, "wgmma", product.where), 16);
            for (int e = 0; e < 4; ++e) b[k + e][n] = tf32(bits[e]);
        }
    Accumulator& to = cta.warps[warp].accumulators.at(product.d[0]);
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < to.count; ++i) {
            float& d = to.values[lane * to.count + i];
            double sum = of.accumulate ? d : 0;
            for (int k = 0; k < 8; ++k)  // the lane that has row lane / 4, or 8 on, in column k
                sum += static_cast<double>(
                           tf32(product.a[lane / 4 * 4 + k % 4][k / 4 * 2 + i / 2 % 2])) *
                       b[k][i / 4 * 8 + lane % 4 * 2 + i % 2];
            d = static_cast<float>(sum);  // tensor cores round towards zero
            if (fabsf(d) > (sum < 0 ? -sum : sum)) d = __uint_as_float(__float_as_uint(d) - 1);
        }
}
// Adds 16 rows of a times b to the warp's accumulators, in fp32 and in the order of K.
template <int K>
static void accumulate(Cta& cta, unsigned warp, const Product& product, const float (&a)[16][K],
                       const float (&b)[K][256]) {
    const Wgmma& of = product.of;
    Accumulator& to = cta.warps[warp].accumulators.at(product.d[0]);
    for (int m = 0; m < 16; ++m) {
        float row[256] = {};
        float* values = to.values.data();
        auto place = [&](int n) {
            return (m % 8 * 4 + n % 8 / 2) * to.count + n / 8 * 4 + m / 8 * 2 + n % 2;
        };
        if (of.accumulate)
            for (int n = 0; n < of.columns; ++n) row[n] = values[place(n)];
        for (int k = 0; k < K; ++k)
            for (int n = 0; n < of.columns; ++n) row[n] += a[m][k] * b[k][n];
        for (int n = 0; n < of.columns; ++n) values[place(n)] = row[n];
    }
}
static float e4m3(unsigned bits) {
    unsigned exponent = bits >> 3 & 15, mantissa = bits & 7;
    float size = exponent ? __uint_as_float((exponent + 120) << 23 | mantissa << 20)
                          : static_cast<float>(mantissa) * 0x1p-9f;
    if ((bits & 127) == 127) size = __uint_as_float(0x7fffffff);
    return bits & 128 ? -size : size;
}
// Sums are fp32's own here, in order; Hopper's keep about 14 bits.
static void multiply_e4m3(Cta& cta, unsigned warp, const Product& product) {
    const Wgmma& of = product.of;
    static float a[16][32], b[32][256];
    auto shared = [&](uint64_t descriptor, int i, int k) {
        unsigned address = operand_address(descriptor, false, i, k, 1);
        return e4m3(async_read(cta, address & ~15u, "wgmma", product.where)[address % 16]);
    };
    for (int k = 0; k < 32; ++k) {
        for (int n = 0; n < of.columns; ++n) b[k][n] = shared(of.descriptor_b, n, k);
        for (int m = 0; m < 16; ++m) {
            int lane = m % 8 * 4 + k % 16 / 4, j = m / 8 + k / 16 * 2;
            a[m][k] = product.a[0] ? e4m3(product.a[lane][j] >> k % 4 * 8 & 255)
                                   : shared(of.descriptor_a, warp % 4 * 16 + m, k);
        }
    }
    accumulate(cta, warp, product, a, b);
}
static void multiply(Cta& cta, unsigned warp, const Product& product) {
    const Wgmma& of = product.of;
    if (of.tf32) return multiply_tf32(cta, warp, product);
    if (of.e4m3) return multiply_e4m3(cta, warp, product);
    static float a[16][16], b[16][256];
    for_operand(cta, of.descriptor_b, of.transpose_b, of.bf16, 0, of.columns, product.where,
                [](int n, int k, float value) { b[k][n] = value; });
    if (!product.a[0])
        for_operand(cta, of.descriptor_a, of.transpose_a, of.bf16, warp % 4 * 16, 16, product.where,
                    [](int m, int k, float value) { a[m][k] = value; });
    for (int m = 0; product.a[0] && m < 16; ++m)
        for (int k = 0; k < 16; ++k) {
            int lane = m % 8 * 4 + k % 8 / 2, j = m / 8 + k / 8 * 2;
            a[m][k] = value_of(product.a[lane][j] >> k % 2 * 16 & 0xffff, of.bf16);
        }
    accumulate(cta, warp, product, a, b);
}
void wgmma(float* d, const Wgmma& product, Where where) {
    struct Lane {
        float* d;
        Wgmma of;
        Where where;
    } own{d, product, where};
    collective(
        "wgmma", ~0u, &own,
        [](void* const data[32], unsigned) {
            Lane& lane = *static_cast<Lane*>(data[self->lane]);
            Cta& cta = *me().cta;
            Warp& warp = cta.warps[self->warp];
            Product product{lane.of, lane.where, {}, {}};
            if (lane.of.a) use_loaded();
            auto& log = cta.warpgroups[self->warp / 4];
            Event event{"wgmma", lane.of.a ? 0 : lane.of.descriptor_a, lane.of.descriptor_b};
            if (warp.logged == log.size()) log.push_back(event);
            const Event& other = log[warp.logged++];
            if (other.what != std::string(event.what) || other.a != event.a || other.b != event.b)
                fail(lane.where, "wgmma differs from the %s that another warp of the warpgroup did",
                     other.what);
            for (int i = 0; i < 32; ++i) {
                Lane& l = *static_cast<Lane*>(data[i]);
                if (l.of.descriptor_b != lane.of.descriptor_b ||
                    l.of.descriptor_a != lane.of.descriptor_a ||
                    l.of.accumulate != lane.of.accumulate)
                    fail(lane.where, "wgmma: lanes of one warp give different descriptors");
                product.d[i] = l.d, product.a[i] = l.of.a;
            }
            auto& acc = warp.accumulators[product.d[0]];
            if (!acc.uses++) {  // take the registers over: NaN until the wait
                if (!warp.fenced)
                    fail(lane.where, "wgmma: its registers were in use, with no wgmma_fence since");
                acc.count = lane.of.columns / 2;
                acc.values.resize(32 * acc.count);
                for (int i = 0; i < 32; ++i) {
                    acc.at[i] = product.d[i];
                    memcpy(&acc.values[i * acc.count], product.d[i], acc.count * 4);
                    memset(product.d[i], 0xff, acc.count * 4);
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
        },
        where);
}
void wgmma_fence(Where where) {
    collective(
        "wgmma_fence", ~0u, nullptr,
        [](void* const*, unsigned) { me().cta->warps[self->warp].fenced = true; }, where);
}
void wgmma_commit(Where where) {
    collective(
        "wgmma_commit", ~0u, nullptr,
        [](void* const*, unsigned) {
            Warp& warp = me().cta->warps[self->warp];
            warp.groups.push_back(std::move(warp.open));
            warp.open.clear();
        },
        where);
}
void wgmma_wait(int pending, Where where) {
    if (late_reads()) leave(DEFERRED);
    struct Lane {
        int pending;
    } own{pending};
    collective(
        "wgmma_wait", ~0u, &own,
        [](void* const data[32], unsigned) {
            Warp& warp = me().cta->warps[self->warp];
            for (int n = static_cast<Lane*>(data[self->lane])->pending;
                 static_cast<int>(warp.groups.size()) > n; warp.groups.pop_front())
                for (const Product& product : warp.groups.front()) {
                    if (product.of.columns) multiply(*me().cta, self->warp, product);
                    Accumulator& acc = warp.accumulators.at(product.d[0]);
                    if (--acc.uses) continue;
                    for (int i = 0; i < 32; ++i)
                        memcpy(acc.at[i], &acc.values[i * acc.count], acc.count * 4);
                    warp.accumulators.erase(product.d[0]);
                    warp.fenced = false;
                }
        },
        where);
}
}  // namespace simt
