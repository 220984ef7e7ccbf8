"""Sums of FP8 products with the bits that Hopper's tensor cores keep of them.

On an H100 (tests/gpu/test_fp8.py compares): 32 products are aligned to the largest exponent among
their factors' and the sum's before, each is cut towards 0 to 13 bits of fraction below it, and so
is what they add up to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_K = 32  # products that are added at once
_FRACTION = 13
_CUT = np.uint32(0xFFFFFFFF << (23 - _FRACTION) & 0xFFFFFFFF)  # of a float32's bits
_EXPONENT = np.uint32(0xFF << 23)

Float32 = npt.NDArray[np.float32]


def matmul(a: npt.NDArray[Any], b: npt.NDArray[Any], *, by_term: bool) -> npt.NDArray[np.float64]:
    """a (m, k) @ b (k, n) of numbers that e4m3 holds, added as the tensor cores do.

    by_term: cut every product, not just every sum of 32. That costs as much as 100 products, and
    tells where a large sum swallows small terms: scores far from 0, for instance.
    """
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for at in range(0, a.shape[1], _K):
        left, right = a[:, at : at + _K], b[at : at + _K]
        if by_term:
            total = _aligned(total, left.astype(np.float32), right.astype(np.float32))
        else:  # float64, for float32 would round where the tensor core cuts
            total = (total + left.astype(np.float64) @ right.astype(np.float64)).astype(np.float32)
        total = (total.view(np.uint32) & _CUT).view(np.float32)
    return total.astype(np.float64)


def _aligned(total: Float32, a: Float32, b: Float32) -> Float32:
    """total + a @ b of at most 32 products, each cut where the largest ends."""
    of_a, of_b, largest = _power_of_two(a), _power_of_two(b), _power_of_two(total)
    term = np.empty_like(total)  # a new array for each term costs twice the time
    for i in range(a.shape[1]):
        np.multiply(of_a[:, i, None], of_b[i], out=term)
        np.maximum(largest, term, out=largest)
    # Zeros alone: any unit does.
    largest[largest == 0] = 1
    units = np.float32(2.0**_FRACTION) / largest
    summed = np.trunc(total * units)
    for i in range(a.shape[1]):
        np.multiply(a[:, i, None], b[i], out=term)
        np.multiply(term, units, out=term)
        summed += np.trunc(term, out=term)
    added: Float32 = summed / units
    return added


def _power_of_two(x: Float32) -> Float32:
    """The largest power of two that each number holds, or 0 of 0."""
    powers: Float32 = (np.ascontiguousarray(x).view(np.uint32) & _EXPONENT).view(np.float32)
    return powers
