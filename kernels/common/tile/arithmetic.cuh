// Whole numbers of tiles, and what stands between logarithms of base 2 and e.
#pragma once

constexpr float LN2 = 0.6931471805599453f;  // LOG2E is in common/element.cuh

// Units that x needs. Unit is a template parameter: NVRTC makes other code of it as an argument.
template <int Unit>
__device__ __forceinline__ constexpr int ceil_div(int x) {
    return (x + Unit - 1) / Unit;
}
__device__ __forceinline__ int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }
