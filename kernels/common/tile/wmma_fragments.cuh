// The fragments of common/ptx/wmma.cuh, of the problem's elements.
#pragma once
#include "common/element.cuh"
#include "common/ptx/wmma.cuh"

using FragmentA = WmmaA<IS_BF16>;
template <bool Transposed>
using FragmentB = WmmaB<IS_BF16, Transposed>;
