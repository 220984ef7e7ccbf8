// The twin of CUDA's cuda_fp16.h, of what kernels usually take from it.
#pragma once
#include "halves.hpp"

using __half = simt::Number<simt::Half>;
using __half2 = simt::Pair<simt::Half>;
using half = __half;
using half2 = __half2;

inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline float __half2float(__half x) { return x; }
inline __half __int2half_rn(int x) { return __half(x); }
inline int __half2int_rn(__half x) { return static_cast<int>(nearbyintf(x)); }
inline __half __ushort_as_half(unsigned short x) { return simt_cast<__half>(x); }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __float22half2_rn(float2 x) { return {__half(x.x), __half(x.y)}; }
inline float2 __half22float2(__half2 x) { return simt_floats(x); }
inline __half __low2half(__half2 x) { return x.x; }
inline __half __high2half(__half2 x) { return x.y; }
inline __half2 __low2half2(__half2 x) { return {x.x, x.x}; }
inline __half2 __high2half2(__half2 x) { return {x.y, x.y}; }
inline __half2 __lows2half2(__half2 x, __half2 y) { return {x.x, y.x}; }
inline __half2 __highs2half2(__half2 x, __half2 y) { return {x.y, y.y}; }
