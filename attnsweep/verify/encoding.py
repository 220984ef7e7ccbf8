"""How numbers are stored: fp16, bf16, fp32, and e4m3 with scales. NumPy only, exact to the bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attnsweep.core import boolean_masks
from attnsweep.core.errors import ProblemError
from attnsweep.core.formats import FORMATS
from attnsweep.core.problem import SCALE_BLOCK, Problem
from attnsweep.core.threads import parallel

Float = npt.NDArray[np.float64]
Bits = npt.NDArray[Any]

E4M3_MAX = 448.0
"""The largest number of e4m3, 0x7E. 0x7F is a NaN, and there is no infinity."""
# Storage of +infinity; a larger magnitude is a NaN.
INFINITY_BITS = {"fp16": 0x7C00, "bf16": 0x7F80, "fp32": 0x7F800000}
_SMALLEST_NORMAL = 2.0**-6


@dataclass(frozen=True, slots=True)
class Windows:
    """q, k or v whose heads are windows into the same random values, `step` elements apart.

    With every head drawn and copied for itself, `tune` proved for 65 s of 104 at
    (4,32,131072,128). No two heads have an equal row at the same place, and pairs of keys and
    values differ too, as `step` of each tensor is another.
    """

    pool: Bits
    """(pool elements,)"""
    shape: tuple[int, int, int, int]
    step: int

    @property
    def nbytes(self) -> int:
        """Bytes of all heads, as if each had its own values."""
        return math.prod(self.shape) * self.pool.itemsize

    @property
    def begins(self) -> list[int]:
        """The byte of the pool at which each head begins, of all batches."""
        heads = range(self.shape[0] * self.shape[1])
        return [head * self.step * self.pool.itemsize for head in heads]

    def __getitem__(self, at: tuple[int, int]) -> Bits:
        """The (seqlen, head_dim) of a batch and a head."""
        begin = (at[0] * self.shape[1] + at[1]) * self.step
        size = math.prod(self.shape[2:])
        return self.pool[begin : begin + size].reshape(self.shape[2:])


Tensor = Bits | Windows
# Values that are rounded at a time, in threads: their temporaries stay in the cache.
_PART = 2**18


def round_to(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """`values` rounded to nearest even in `dtype`, as float32."""
    single = np.ascontiguousarray(values, np.float32)
    if dtype == "fp16":
        return single.astype(np.float16).astype(np.float32)
    return single if dtype == "fp32" else from_bits(to_bits(single, dtype), dtype)


def to_bits(values: npt.NDArray[Any], dtype: str) -> Bits:
    """The storage of `values` in `dtype`: uint16, uint32 for fp32, or uint8 for e4m3.

    What e4m3 cannot hold becomes its largest number, as cuda_fp8.h's conversion has it.
    """
    single = np.ascontiguousarray(values, np.float32)
    if dtype == "fp32":
        return single.view(np.uint32)
    if single.size <= _PART:
        return _rounded(single, dtype)
    flat = single.reshape(-1)
    made = np.empty(flat.size, _rounded(flat[:1], dtype).dtype)

    errors = np.geterr()  # NumPy keeps them for each thread

    def one(begin: int) -> None:
        with np.errstate(**errors):
            made[begin : begin + _PART] = _rounded(flat[begin : begin + _PART], dtype)

    parallel(one, range(0, flat.size, _PART))
    return made.reshape(single.shape)


def _rounded(single: npt.NDArray[np.float32], dtype: str) -> Bits:
    """The storage of few values, none of which are in fp32."""
    bits = single.view(np.uint32)
    if FORMATS[dtype].storage == "E4M3":
        # Rounding to so few bits asks of the lower half of a float32 only whether it is 0, so that
        # one look-up does for ten passes over the numbers.
        more = (bits & np.uint32(0xFFFF)) != 0
        coded: Bits = _CODES[bits >> np.uint32(15) & ~np.uint32(1) | more]
        return coded
    if dtype == "fp16":
        return single.astype(np.float16).view(np.uint16)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding would carry a NaN's payload into the sign, so NaNs are written as such.
    return np.where(np.isnan(single), np.uint32(0x7FC0), rounded).astype(np.uint16)


def from_bits(bits: Bits, dtype: str) -> npt.NDArray[np.float32]:
    """Decode numbers from the bits of a dtype, the inverse of to_bits."""
    if FORMATS[dtype].storage == "E4M3":
        values: npt.NDArray[np.float32] = _E4M3[bits]
        return values
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float32)
    if dtype == "fp32":
        return bits.view(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _e4m3_codes() -> Bits:
    """The code of each upper half of a float32, first with a lower half of 0, then of more.

    Rounded to nearest even in 3 bits of mantissa, or to a multiple of 2^-9 below 2^-6.
    """
    upper = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    bits = np.stack([upper, upper | np.uint32(1)], axis=-1).ravel()
    single = bits.view(np.float32)
    magnitude = np.fmin(np.abs(single), np.float32(E4M3_MAX))
    cut = magnitude.view(np.uint32)
    odd = (cut >> np.uint32(20)) & np.uint32(1)
    normal = ((cut + np.uint32(0x7FFFF) + odd) >> np.uint32(20)) - np.uint32((127 - 7) << 3)
    # Next to 2^14, a float32 ends at 2^-9: the sum is rounded there, and its last bits are a count.
    small = (magnitude + np.float32(2.0**14)).view(np.uint32) & np.uint32(0xF)
    code = np.where(magnitude < _SMALLEST_NORMAL, small, normal)
    code = np.where(np.isnan(single), np.uint32(0x7F), code)
    coded: Bits = (code | bits >> np.uint32(24) & np.uint32(0x80)).astype(np.uint8)
    return coded


def _e4m3_values() -> npt.NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.ldexp(np.where(exponent, 8 + mantissa, mantissa), np.maximum(exponent, 1) - 10)
    values = np.where(codes & 0x80, -magnitude, magnitude)
    return np.where(codes & 0x7F == 0x7F, np.nan, values).astype(np.float32)


_E4M3, _CODES = _e4m3_values(), _e4m3_codes()


def mask_of(problem: Problem) -> dict[str, Bits]:
    """The inputs that say which keys queries see, if there are any."""
    made: dict[str, Bits] = (
        {"mask": boolean_masks.tensor(problem)} if problem.mask.as_tensor else {}
    )
    values = problem.layout.values(problem.batch, problem.seqlen_q, problem.seqlen_k)
    return made | {name: np.array(value, np.int32) for name, value in values.items()}


# -- scales ---------------------------------------------------------------------------------


def stored(
    values: Mapping[str, npt.NDArray[np.float32]], problem: Problem, cache_dtype: str | None = None
) -> dict[str, Bits]:
    """Encode q, k and v of a problem in its dtype, with their scales in FP8.

    cache_dtype: that of k and v, if not the problem's.
    """
    with_scale = [name for name in "qkv" if f"{name}_scale" in problem.scales]
    scales = {name: _scale(values[name], name, problem) for name in with_scale}

    def bits(name: str) -> Bits:
        if name not in scales:
            return to_bits(values[name], problem.dtype)
        unscaled = values[name] / _spread(scales[name], name, problem)
        return to_bits(unscaled, cache_dtype or problem.dtype)

    each = parallel if problem.min_bytes > 2**20 else map
    made = dict(zip(values, each(bits, values), strict=True))
    return made | {f"{name}_scale": scale for name, scale in scales.items()}


def _scale(values: npt.NDArray[np.float32], name: str, problem: Problem) -> npt.NDArray[np.float32]:
    """The scales with which the largest value of each part becomes the largest of e4m3."""
    batch, heads_kv = problem.batch, problem.heads_kv
    rows = np.abs(values).max(axis=-1).reshape(batch, heads_kv, -1)
    shape = problem.shape_of(f"{name}_scale")
    if len(shape) == 3:
        largest = np.maximum.reduceat(rows, np.arange(0, rows.shape[-1], SCALE_BLOCK), axis=-1)
    elif problem.format.equal_scales:
        largest = np.full(shape, rows.max())
    else:
        largest = rows.max(axis=-1)
    scale = (largest / np.float32(E4M3_MAX)).astype(np.float32)
    return np.where(scale > 0, scale, np.float32(1))


def _spread(scale: npt.NDArray[Any], name: str, problem: Problem) -> npt.NDArray[Any]:
    """Scales as an array that broadcasts with (batch, heads, seqlen, head_dim)."""
    if scale.ndim == 3:
        return scale.repeat(SCALE_BLOCK, axis=-1)[:, :, : problem.seqlen_k, None]
    if name == "q":
        scale = scale.repeat(problem.heads // problem.heads_kv, axis=1)
    return scale[:, :, None, None]


def _of_each(scales: tuple[str, ...]) -> str:
    """`of q, of k and of v`."""
    *first, last = (f"of {name[0]}" for name in scales)
    return f"{', '.join(first)} and {last}"


def check_scales(inputs: Mapping[str, Tensor], problem: Problem) -> None:
    """Raise ProblemError if scales are missing, of another shape, or not finite and above 0."""
    for name in problem.scales:
        if name not in inputs:
            raise ProblemError(
                f"{name} is missing: {problem.dtype} has a scale {_of_each(problem.scales)}",
                hint=f"give {name} as float32, {problem.shape_of(name)}",
            )
        scale: Any = inputs[name]
        if scale.shape != problem.shape_of(name) or scale.dtype != np.float32:
            raise ProblemError(
                f"{name} is {scale.dtype} {scale.shape}, and {problem.label} takes float32 "
                f"{problem.shape_of(name)}"
            )
        wrong = ~(np.isfinite(scale) & (scale > 0))
        if wrong.any():
            place = tuple(map(int, np.argwhere(wrong)[0]))
            raise ProblemError(
                f"{name}{list(place)} is {scale[place]}: a scale is finite and above 0",
                hint="a part of zeros has scale 1",
            )


def values_of(
    inputs: Mapping[str, Tensor],
    problem: Problem,
    name: str,
    batch: int,
    head: int,
    rows: npt.NDArray[np.int64] | slice | None = None,
) -> npt.NDArray[Any]:
    """The exact values of a head of q, k or v, (rows, head_dim): float32, float64 with a scale.

    rows: only these. head: of q a query head, of k and v a key head. NaN of k and v is 0: keys
    that no query sees may hold it.
    """
    if name == "v" and problem.value_in_key:
        return values_of(inputs, problem, "k", batch, head, rows)[:, : problem.value_dim]
    bits = inputs[name][batch, head]
    values = from_bits(bits if rows is None else bits[rows], problem.dtype)
    if f"{name}_scale" not in problem.scales:
        return (
            values if name == "q" else np.nan_to_num(values, nan=0, posinf=np.inf, neginf=-np.inf)
        )
    head_kv = head // (problem.heads // problem.heads_kv) if name == "q" else head
    scale: Any = inputs[f"{name}_scale"][batch, head_kv].astype(np.float64)
    if scale.ndim:
        scale = scale.repeat(SCALE_BLOCK)[: problem.seqlen_k, None]
        scale = scale if rows is None else scale[rows]
    exact: Float = values * scale
    return exact
