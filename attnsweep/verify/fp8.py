"""Attention in FP8, as tensor cores compute it. NumPy only.

Sums of FP8 products keep the bits that Hopper's tensor cores keep. On an H100
(tests/gpu/test_fp8.py compares) 32 products are aligned to the largest exponent among their
factors' and the sum's before, each is cut towards 0 to 13 bits of fraction below it, and so is what
they add up to.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnsweep.core.problem import Problem
from attnsweep.verify.encoding import E4M3_MAX, round_to
from attnsweep.verify.reference import divisors, exponentials

if TYPE_CHECKING:
    from attnsweep.verify.rounded import ForwardMaths

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


# A kernel multiplies probabilities by this before it rounds them to e4m3, so that more are normal.
_P_SCALE = 256.0
# The same where the largest is not known, so that there is room for it.
_P_SCALE_FROM_FIRST = 8.0


def attend(
    scores: npt.NDArray[Any], v: npt.NDArray[Any], problem: Problem, maths: ForwardMaths
) -> npt.NDArray[np.float32]:
    """Rows of one head as FP8 tensor cores compute them, without a second level of sums."""
    p, largest, sums = exponentials(scores.copy())
    scale = _P_SCALE
    if maths.from_first:
        scale = _P_SCALE_FROM_FIRST
        first = np.maximum(largest - math.log(E4M3_MAX / scale), scores[:, :1])
        p = np.exp(scores - first)
        sums = p.sum(axis=1, keepdims=True)
    rounded = round_to(p * scale, "e4m3") / scale
    summed = matmul(rounded, v, by_term=maths.by_term)
    return round_to(summed / divisors(sums), problem.out_dtype)
