// The twin of kernels/common/ptx/flags.cuh. Its blocks run in the order of their numbers.
#pragma once

extern "C" __attribute__((weak)) const bool simt_in_order = true;

namespace attn {

inline void flag_arrive(unsigned* flag, SIMT_HERE) { simt::flag_arrive(flag, SIMT_AT); }
inline void flag_wait(const unsigned* flag, unsigned least, SIMT_HERE) {
    simt::flag_wait(flag, least, SIMT_AT);
}

}  // namespace attn
