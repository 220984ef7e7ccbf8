"""Measures of an output's distance from float64, as in verify/device/compare.cu. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from attnsweep.core.cases import TILE
from attnsweep.verify.encoding import Float

# Half an ulp of an output, as a share of it: what rounding to the dtype costs at most.
HALF_ULP_OUT = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24}
# The share by which `tilted` outputs have another scale, to tell a wrong scale from rounding.
TILT = 2.0**-10
# A row of few columns may be near 0 by chance, and errs by much of itself: the largest error of so
# many rows is larger than that of any by this, to the power of 1 / head_dim. With 8 columns, right
# maths took up to 1.75 of twice what a thousand rows had shown, at (32,16/4,133x161,8) bf16.
_NEAR_ZERO, _LEAST_COLUMNS = 1e6, 8


@dataclass(frozen=True, slots=True)
class Measures:
    """An output's distance from float64, or its limits; each compared by `<=`.

    A row's length is its expected norm, or a thousandth of the typical norm if that is more.
    """

    row: float
    """Largest ‖out - expected‖ / length of a row."""
    element: float
    """Largest |out - expected| beyond half an ulp of `expected`, over length / sqrt(columns)."""
    rms: float = 0.0
    """Root of the mean square of the rows' errors: of all measures the surest of a precision."""
    row_gain: float = 0.0
    """Largest |gain| of a row: <out - expected, expected> / length², an error that scales it."""
    tile_gain: float = 0.0
    """|Mean gain| of TILE rows of a head: rounding averages out, a wrong factor does not.

    Of a last tile with fewer rows it counts by sqrt(rows / TILE): a mean of few varies the more.
    Without, the one row of the last tile of (16,16,897,128) causal was over the limit of dk in 256
    right heads."""
    gain: float = 0.0
    """|Mean gain| of all rows."""
    scale: float = 0.0
    """The change of the softmax scale that fits the error best, as a share of the scale."""

    def shares(self, limits: Measures) -> dict[str, float]:
        """Each measure as a share of its limit, those without a limit left out.

        A NaN stays NaN, also of a limit, so that nothing is within it.
        """
        most = {name: getattr(limits, name) for name in _NAMES}
        return {name: getattr(self, name) / most[name] for name in _NAMES if most[name] != math.inf}


_NAMES = tuple(each.name for each in fields(Measures))
Same = Mapping[str, Measures]
"""The errors of the rounded maths, which give the limits, of each output."""


def largest(every: Iterable[Measures]) -> Measures:
    """The largest of each measure."""
    each = [*every]
    return Measures(*(max(getattr(one, name) for one in each) for name in _NAMES))


def more_near_zero(times: Measures, head_dim: int) -> Measures:
    """Multiples of the errors of a sample's rows, where rows of few columns need larger ones."""
    least = _NEAR_ZERO ** (1 / max(head_dim, _LEAST_COLUMNS))
    own = {name: max(getattr(times, name), least) for name in ("row", "element", "row_gain")}
    return replace(times, **own)


def measures(
    out: npt.NDArray[Any],
    expected: Float,
    dtype: str,
    tilted: Float | None = None,
    least: float = 0.0,
) -> Measures:
    """Measures of an output (batch, heads, rows, columns); NaN if any element is NaN.

    tilted: the expected output at the scale (1 + TILT) * scale. least: length of a row at least.
    """
    difference = out.astype(np.float64, copy=False) - expected
    squares = np.einsum("...d,...d->...", expected, expected)
    length = np.maximum(np.sqrt(squares), floor(squares.sum(), seen(squares), least))
    off = np.sqrt(np.einsum("...d,...d->...", difference, difference)) / length
    beyond = np.maximum(np.abs(difference) - HALF_ULP_OUT[dtype] * np.abs(expected), 0).max(-1)
    gains = np.einsum("...d,...d->...", difference, expected) / length**2
    edges = np.arange(0, gains.shape[-1], TILE)
    rows = np.diff(edges, append=gains.shape[-1])
    of_tiles = np.abs(np.add.reduceat(gains, edges, axis=-1)) / np.sqrt(TILE * rows)
    scale = 0.0
    if tilted is not None:
        scale = fitted_scale(difference, tilted - expected)
    return Measures(
        row=float(off.max()),
        element=float((beyond / length).max()) * math.sqrt(expected.shape[-1]),
        rms=float(np.sqrt((off**2).sum() / seen(squares))),
        row_gain=float(np.abs(gains).max()),
        tile_gain=float(of_tiles.max()),
        gain=abs(float(gains.sum() / seen(squares))),
        scale=abs(scale),
    )


def row_error(out: npt.NDArray[Any], expected: npt.NDArray[Any], least: float = 0.0) -> float:
    """Largest ‖out - expected‖ / ‖expected‖ over rows; NaN if any element is NaN.

    A row whose expected norm is under a thousandth of the typical one, or `least`, is divided by
    that.
    """
    squares = np.einsum("...d,...d->...", expected, expected).astype(np.float64)
    difference = out.astype(expected.dtype, copy=False) - expected
    errors = np.sqrt(np.einsum("...d,...d->...", difference, difference))
    shortest = floor(squares.sum(), seen(squares), least)
    return float((errors / np.maximum(np.sqrt(squares), shortest)).max())


def seen(squares: npt.NDArray[Any]) -> int:
    """Number of rows whose expected square is not 0, at least 1. Empty rows are in no mean."""
    return max(1, int(np.count_nonzero(squares)))


def floor(norm: float, rows: int, least: float = 0.0) -> float:
    """The norm below which a row counts as this long: a thousandth of the typical one, or `least`.

    norm: the sum of the squares of all rows, of which so many see a key. Where all rows are 0,
    `least` alone says how long one counts, and without it an error is none of its row's.
    """
    return max(1e-3 * math.sqrt(float(norm) / max(1, rows)), least) or 1.0


def apart(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """|a - b|, which is 0 between two infinities of one sign."""
    off: npt.NDArray[Any] = np.abs(np.subtract(a, b, out=np.zeros(a.shape), where=a != b))
    return off


def fitted_scale(difference: Float, slope: Float) -> float:
    """The change of the softmax scale that fits an error best. slope: tilted - expected."""
    return TILT * float((difference * slope).sum()) / float((slope * slope).sum() or 1.0)


def by_chance(
    out: npt.NDArray[Any], expected: Float, tilted: Float | None, rows: int, least: float = 0.0
) -> tuple[float, float]:
    """Standard errors of `gain` and `scale` over this many rows, if rows err independently."""
    difference = out.astype(np.float64, copy=False) - expected
    squares = np.einsum("...d,...d->...", expected, expected)
    gains = np.einsum("...d,...d->...", difference, expected)
    gains /= np.maximum(squares, floor(squares.sum(), seen(squares), least) ** 2)
    gain = math.sqrt(float((gains**2).sum()) / seen(squares) / rows)
    if tilted is None:
        return gain, 0.0
    slope = tilted - expected
    along = np.einsum("...d,...d->...", difference, slope)
    spread = math.sqrt(float((along * along).sum()) * seen(squares) / rows)
    return gain, TILT * spread / float((slope * slope).sum() or 1.0)
