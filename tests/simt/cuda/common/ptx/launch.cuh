// The twin of kernels/common/ptx/launch.cuh.
#pragma once

namespace attn {

inline void grid_wait() { simt::grid_wait(); }
inline void grid_launch_dependents() {}
template <int Registers>
void registers_increase(SIMT_HERE) {
    simt::warpgroup_uniform("setmaxnreg.inc", Registers, SIMT_AT);
}
template <int Registers>
void registers_decrease(SIMT_HERE) {
    simt::warpgroup_uniform("setmaxnreg.dec", Registers, SIMT_AT);
}

}  // namespace attn
