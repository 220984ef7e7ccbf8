// What cuda_fp16.h and cuda_bf16.h have in common: a number of 16 bits, two of them, and what
// kernels do with these. Each operation is rounded once from float.
#pragma once
#include "simt.hpp"

namespace simt {
struct Half {
    static float widen(unsigned short bits) { return half_values[bits]; }
    static unsigned short narrow(float x) {
        return simt_cast<unsigned short>(static_cast<_Float16>(x));
    }
};
struct Bfloat {
    static float widen(unsigned short bits) { return __uint_as_float(unsigned{bits} << 16); }
    static unsigned short narrow(float x) {
        unsigned bits = __float_as_uint(x);
        if (x != x) return 0x7fff;
        return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};
template <class Format>
struct alignas(2) Number {
    unsigned short bits;
    Number() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
    Number(T x) : bits(Format::narrow(static_cast<float>(x))) {}
    operator float() const { return Format::widen(bits); }
    Number& operator+=(Number y) { return *this = Number(float(*this) + float(y)); }
    Number& operator-=(Number y) { return *this = Number(float(*this) - float(y)); }
    Number& operator*=(Number y) { return *this = Number(float(*this) * float(y)); }
    Number& operator/=(Number y) { return *this = Number(float(*this) / float(y)); }
};
template <class Format>
struct alignas(4) Pair {
    Number<Format> x, y;
};
template <class F>
Number<F> operator+(Number<F> a, Number<F> b) {
    return Number<F>(float(a) + float(b));
}
template <class F>
Number<F> operator-(Number<F> a, Number<F> b) {
    return Number<F>(float(a) - float(b));
}
template <class F>
Number<F> operator*(Number<F> a, Number<F> b) {
    return Number<F>(float(a) * float(b));
}
template <class F>
Number<F> operator/(Number<F> a, Number<F> b) {
    return Number<F>(float(a) / float(b));
}
template <class F>
Number<F> operator-(Number<F> a) {
    return Number<F>(-float(a));
}
template <class F>
Pair<F> operator+(Pair<F> a, Pair<F> b) {
    return {a.x + b.x, a.y + b.y};
}
template <class F>
Pair<F> operator-(Pair<F> a, Pair<F> b) {
    return {a.x - b.x, a.y - b.y};
}
template <class F>
Pair<F> operator*(Pair<F> a, Pair<F> b) {
    return {a.x * b.x, a.y * b.y};
}
template <class F>
Pair<F> operator/(Pair<F> a, Pair<F> b) {
    return {a.x / b.x, a.y / b.y};
}
template <class F>
Pair<F>& operator+=(Pair<F>& a, Pair<F> b) {
    return a = a + b;
}
template <class F>
Pair<F>& operator*=(Pair<F>& a, Pair<F> b) {
    return a = a * b;
}
}  // namespace simt

// Names of one number, and of pairs of it: `h` and `h2` in CUDA's.
#define SIMT_ONE(name, expression)               \
    template <class F>                           \
    simt::Number<F> h##name(simt::Number<F> a) { \
        float x = a;                             \
        return simt::Number<F>(expression);      \
    }                                            \
    template <class F>                           \
    simt::Pair<F> h2##name(simt::Pair<F> a) {    \
        return {h##name(a.x), h##name(a.y)};     \
    }
#define SIMT_TWO(name, expression)                                    \
    template <class F>                                                \
    simt::Number<F> __h##name(simt::Number<F> a, simt::Number<F> b) { \
        float x = a, y = b;                                           \
        return simt::Number<F>(expression);                           \
    }                                                                 \
    template <class F>                                                \
    simt::Pair<F> __h##name##2(simt::Pair<F> a, simt::Pair<F> b) {    \
        return {__h##name(a.x, b.x), __h##name(a.y, b.y)};            \
    }
#define SIMT_COMPARE(name, sign)                           \
    template <class F>                                     \
    bool __h##name(simt::Number<F> a, simt::Number<F> b) { \
        return float(a) sign float(b);                     \
    }
SIMT_ONE(exp, expf(x))
SIMT_ONE(exp2, exp2f(x))
SIMT_ONE(log, logf(x))
SIMT_ONE(log2, log2f(x))
SIMT_ONE(sqrt, sqrtf(x))
SIMT_ONE(rsqrt, 1.f / sqrtf(x))
SIMT_ONE(rcp, 1.f / x)
SIMT_TWO(add, x + y)
SIMT_TWO(sub, x - y)
SIMT_TWO(mul, x* y)
SIMT_TWO(max, fmaxf(x, y))
SIMT_TWO(min, fminf(x, y))
SIMT_COMPARE(lt, <)
SIMT_COMPARE(le, <=)
SIMT_COMPARE(gt, >)
SIMT_COMPARE(ge, >=)
SIMT_COMPARE(eq, ==)
SIMT_COMPARE(ne, !=)
#undef SIMT_ONE
#undef SIMT_TWO
#undef SIMT_COMPARE

template <class F>
simt::Number<F> __hdiv(simt::Number<F> a, simt::Number<F> b) {
    return a / b;
}
template <class F>
simt::Pair<F> __h2div(simt::Pair<F> a, simt::Pair<F> b) {
    return a / b;
}
template <class F>
simt::Number<F> __hfma(simt::Number<F> a, simt::Number<F> b, simt::Number<F> c) {
    return simt::Number<F>(fmaf(a, b, c));
}
template <class F>
simt::Pair<F> __hfma2(simt::Pair<F> a, simt::Pair<F> b, simt::Pair<F> c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
template <class F>
simt::Number<F> __hneg(simt::Number<F> a) {
    return -a;
}
template <class F>
simt::Pair<F> __hneg2(simt::Pair<F> a) {
    return {-a.x, -a.y};
}
template <class F>
simt::Number<F> __habs(simt::Number<F> a) {
    return simt::Number<F>(fabsf(a));
}
template <class F>
bool __hisnan(simt::Number<F> a) {
    return float(a) != float(a);
}
template <class F>
float2 simt_floats(simt::Pair<F> a) {
    return {a.x, a.y};
}
template <class F>
float __low2float(simt::Pair<F> a) {
    return a.x;
}
template <class F>
float __high2float(simt::Pair<F> a) {
    return a.y;
}
