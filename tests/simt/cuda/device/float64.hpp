// What verify/device/compare.cu needs beside simt.hpp: float64. Templates get none of it, so that a
// double slipped into one does not compile.
#pragma once
#include "../simt.hpp"

extern "C" {
double exp(double) noexcept, log(double) noexcept, sqrt(double) noexcept, fabs(double) noexcept;
double fma(double, double, double) noexcept, fmax(double, double) noexcept, tanh(double) noexcept;
}
inline double __hiloint2double(int high, int low) {
    return simt_cast<double>(static_cast<uint64_t>(static_cast<unsigned>(high)) << 32 |
                             static_cast<unsigned>(low));
}

namespace simt {
// A parameter: p pointer, s struct, f or d floating, u or i integer of 4 bytes, l of 8.
template <class T>
constexpr char letter_of() {
    if (std::is_pointer_v<T>) return 'p';
    if (std::is_class_v<T>) return 's';
    if (std::is_floating_point_v<T>) return sizeof(T) == 8 ? 'd' : 'f';
    return sizeof(T) == 8 ? 'l' : std::is_unsigned_v<T> ? 'u' : 'i';
}
template <class... P>
const char* letters(void (*)(P...)) {
    static const char all[] = {letter_of<std::remove_cv_t<P>>()..., 0};
    return all;
}
}  // namespace simt
