"""Inputs, the float64 reference, and the limits of error. NumPy only: testable anywhere.

A candidate is right if, on every case, each of its Measures is within a limit that comes from the
errors of the same maths in the candidate's dtypes. Code compares by `value <= limit`, so that a NaN
fails. gpu/judge.py takes the same measures of every element on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from attnsweep.build.threads import one_blas_thread, parallel
from attnsweep.problem import Problem, ceil_div

Float = npt.NDArray[np.float64]
Bits = npt.NDArray[Any]
Inputs = Literal[
    "normal", "large_scores", "equal_keys", "far_below", "far_above", "tiny_ends", "one_hot", "wide"
]

# No limit of a row is below the error of rounding the output alone: half an ulp of 1. For fp32 it
# is that of sums of up to 2048 products in any order, and grows with the root of head_dim beyond:
# PyTorch's paths err by 1e-7 to 3e-6 at 2048, by 7e-6 at 8192, one TF32 product by 3e-4.
HALF_ULP = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 5e-6}
# Half an ulp of an output, as a share of it: what rounding to the dtype costs at most.
HALF_ULP_OUT = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 2.0**-24}
# The largest factor that all outputs may be wrong by. Rounding is unbiased: of 1,068 right
# candidates on an H100 none used more than 51 % of it (benchmarks/refusals.py).
SYSTEMATIC = {"fp16": 1e-4, "bf16": 1e-4, "fp32": 3e-6}
# The share by which `tilted` outputs have another scale, to tell a wrong scale from rounding.
TILT = 2.0**-10
# Storage of +infinity; a larger magnitude is a NaN.
INFINITY_BITS = {"fp16": 0x7C00, "bf16": 0x7F80, "fp32": 0x7F800000}
# FLOPs of NumPy's reference of one case. On the device every row is judged; these rows prove the
# device's reference: all of (1,8,512,64), 15 of (4,16,4096,128), others in each run.
_REFERENCE_FLOPS = 2e9
# exp overflows float32 at 88 and underflows to 0 at -104: scores of this size are beyond both.
_FAR = 200.0
# Exponents up to this: e^9 is 8103, and sums of such probabilities fit fp16.
_MOST = 9.0
# Rows of a tile: common/judge.cu takes gains of this many rows together.
TILE = 64
# Rows over which the errors of the same maths are taken, without limits of gains and with them: the
# largest error of a few rows depends on luck.
_LIMIT_ROWS = (256, 1024)
# Rows that are computed at once: scores of 32,768 keys then take 32 MB.
_BLOCK_ROWS = 128
# Over fewer rows, rounding does not average out, and gains have no limit.
_AVERAGES = 512


@dataclass(frozen=True, slots=True)
class Case:
    """One shape with one kind of input that a candidate must get right."""

    problem: Problem
    inputs: Inputs = "normal"

    @property
    def label(self) -> str:
        """`(1,16,1024,64) fp16 full, normal`."""
        return f"{self.problem.label}, {self.inputs}"


def small_cases(problem: Problem) -> tuple[Case, ...]:
    """Small, odd and hard cases with the compile-time facts of `problem`, none with more keys.

    Tails in both directions, one query, one key, grouped heads, seqlen_q != seqlen_k; and every
    kind of hard input that make_inputs has.
    """

    def case(
        heads: int, heads_kv: int, seqlen_q: int, seqlen_k: int, inputs: Inputs, batch: int = 1
    ) -> Case:
        seqlen_k = min(seqlen_k, problem.seqlen_k)
        seqlen_q = min(seqlen_q, seqlen_k) if problem.causal else seqlen_q
        shape = replace(
            problem,
            batch=batch,
            heads=heads,
            heads_kv=heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
        )
        return Case(shape, inputs)

    return (
        case(1, 1, 1, 1, "normal"),
        case(2, 1, 1, 17, "normal"),
        case(4, 2, 97, 161, "normal", batch=2),
        case(3, 1, 129, 129, "large_scores"),
        case(1, 1, 65, 200, "equal_keys"),
        case(1, 1, 130, 255, "far_below"),
        case(2, 1, 70, 200, "far_above"),
        case(1, 1, 67, 640, "tiny_ends"),
        case(2, 2, 65, 131, "one_hot"),
        case(1, 1, 64, 321, "wide"),
    )


def round_to(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """`values` rounded to nearest even in `dtype`, as float32."""
    single = np.ascontiguousarray(values, np.float32)
    if dtype == "fp16":
        return single.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        return from_bits(to_bits(single, dtype), dtype)
    return single


def to_bits(values: npt.NDArray[Any], dtype: str) -> Bits:
    """The storage of `values` in `dtype`: uint16, or uint32 for fp32."""
    single = np.ascontiguousarray(values, np.float32)
    if dtype == "fp16":
        return single.astype(np.float16).view(np.uint16)
    bits = single.view(np.uint32)
    if dtype == "fp32":
        return bits
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding would carry a NaN's payload into the sign, so NaNs are written as such.
    return np.where(np.isnan(single), np.uint32(0x7FC0), rounded).astype(np.uint16)


def from_bits(bits: Bits, dtype: str) -> npt.NDArray[np.float32]:
    """Inverse of to_bits."""
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float32)
    if dtype == "fp32":
        return bits.view(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def make_inputs(case: Case, seed: int) -> dict[str, Bits]:
    """q, k, v of the case in storage form; the same seed gives the same inputs.

    normal: independent normal values. large_scores: a softmax that is nearly one-hot. equal_keys:
    a uniform softmax. far_below, far_above: normal scores shifted beyond what exp can take.
    tiny_ends: the first and the last keys are far below those between, so that whichever tile comes
    first has no weight. one_hot: every query selects one key. wide: values whose sums over the keys
    overflow fp16 (and which fp16 cannot hold at all, if the dtype is wider).
    """
    problem = case.problem
    rng_q, rng_k, rng_v = np.random.default_rng(seed).spawn(3)
    sized = problem.min_bytes > 2**20

    def one(name: str, rng: np.random.Generator) -> npt.NDArray[np.float32]:
        return rng.standard_normal(problem.shape_of(name), dtype=np.float32)

    made = (parallel if sized else map)(one, "qkv", (rng_q, rng_k, rng_v))
    q, k, v = made
    if case.inputs == "large_scores":
        q *= 8
    elif case.inputs == "equal_keys":
        k[:] = k[:, :, :1]
    elif case.inputs in ("far_below", "far_above", "tiny_ends"):
        # Every product is near ±each², so scores are near ±_FAR, and spread by about one.
        each = np.float32(np.sqrt(_FAR / np.sqrt(problem.head_dim)))
        sign = 1 if case.inputs == "far_above" else -1
        shift = np.full((problem.seqlen_k, 1), sign * each, np.float32)
        if case.inputs == "tiny_ends":
            end = min(256, 2 * problem.seqlen_k // 5)
            shift[end : problem.seqlen_k - end] = 0
        q, k = q * np.float32(0.5 / each) + each, k * np.float32(0.5) + shift
    elif case.inputs == "one_hot":
        # The longest of some keys: beside a short one others matter, and what rounding their scores
        # costs is then as rare as it is large. A causal row sees no key after the last.
        shape, keys = (problem.seqlen_q, 32), problem.seqlen_k
        last = np.arange(problem.seqlen_q) + max(0, keys - problem.seqlen_q)
        drawn = rng_q.integers(0, np.minimum(last, keys - 1)[:, None] + 1, shape)
        heads = np.repeat(k, problem.heads // problem.heads_kv, axis=1)
        longest = np.square(heads).sum(-1)[:, :, drawn].argmax(-1)[..., None]
        chosen = np.take_along_axis(np.broadcast_to(drawn, (*q.shape[:3], 32)), longest, -1)
        q = np.float32(max(8, 256 / problem.head_dim)) * np.take_along_axis(heads, chosen, 2)
    elif case.inputs == "wide":
        scale = 2.0**12 if problem.dtype == "fp16" else 2.0**18
        v = (1 + v * np.float32(0.25)) * np.float32(scale)
    bits = (parallel if sized else map)(lambda x: to_bits(x, problem.dtype), (q, k, v))
    return dict(zip("qkv", bits, strict=True))


def sampled_rows(problem: Problem, seed: int) -> npt.NDArray[np.int64]:
    """Query rows that NumPy's reference computes in every head: all of them if that is cheap.

    Otherwise the first, the last, both sides of tile edges, and random ones by `seed`.
    """
    per_row = 4 * problem.batch * problem.heads * problem.seqlen_k * problem.head_dim
    count = max(8, int(_REFERENCE_FLOPS / per_row))
    if count >= problem.seqlen_q:
        return np.arange(problem.seqlen_q)
    edges = [edge + side for edge in (16, 64, 128, 192, 256) for side in (-1, 0)]
    fixed = {0, problem.seqlen_q - 1, *(row for row in edges if row < problem.seqlen_q)}
    rng = np.random.default_rng(seed)
    some = rng.choice(problem.seqlen_q, size=count, replace=False)
    return np.array(sorted(fixed | set(some.tolist())))


@dataclass(frozen=True, slots=True)
class Maths:
    """How attention rows are computed: in float64, or rounded as a kernel rounds."""

    rounding: bool = False
    """Round probabilities and output to the problem's dtype; its error sets the limit. For fp32 all
    is done in fp32, because a kernel's sums are no more exact than their terms."""
    rounds_scores: int = 0
    """Round scores as well: once if they are stored, twice if they are stored before and after
    scaling, as plain PyTorch does."""
    from_first: bool = False
    """Exponents refer to the first key's score instead of the largest, within what fp16 can hold,
    as a kernel may that looks for no maximum: the largest probability is then rounded too."""


EXACT = Maths()


def reference(
    inputs: dict[str, Bits], problem: Problem, rows: npt.NDArray[np.int64], maths: Maths = EXACT
) -> Float:
    """The attention rows (batch, heads, len(rows), head_dim) in float64."""
    return references(inputs, problem, rows, [maths])[0]


def references(
    inputs: dict[str, Bits],
    problem: Problem,
    rows: npt.NDArray[np.int64],
    maths: Sequence[Maths],
) -> list[Float]:
    """The rows by each of several maths, which share their scores and exponentials."""
    group = problem.heads // problem.heads_kv
    shape = (problem.batch, problem.heads, len(rows), problem.head_dim)
    outs = [np.empty(shape) for _ in maths]

    def one(batch: int, head: int, begin: int) -> None:
        some = rows[begin : begin + _BLOCK_ROWS]
        q, k, v = (
            from_bits(bits, problem.dtype)
            for bits in (
                inputs["q"][batch, head, some],
                inputs["k"][batch, head // group],
                inputs["v"][batch, head // group],
            )
        )
        for out, rounded in zip(outs, _attend(q, k, v, some, problem, maths), strict=True):
            out[batch, head, begin : begin + _BLOCK_ROWS] = rounded

    blocks = range(0, len(rows), _BLOCK_ROWS)
    every = product(range(problem.batch), range(problem.heads), blocks)
    # A thread a block, or none for small ones.
    with one_blas_thread():
        list((map if outs[0].size < 2**16 else parallel)(one, *zip(*every, strict=True)))
    return outs


def _attend(
    q: npt.NDArray[np.float32],
    k: npt.NDArray[np.float32],
    v: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
    problem: Problem,
    maths: Sequence[Maths],
) -> Iterator[npt.NDArray[Any]]:
    """Some rows of one head (rows, head_dim), by each of the maths."""
    dtype, hidden = problem.dtype, None
    if problem.causal:
        last_key = rows + problem.seqlen_k - problem.seqlen_q
        hidden = np.arange(problem.seqlen_k) > last_key[:, None]

    @cache
    def raw_scores(kind: Any) -> npt.NDArray[Any]:
        scores: npt.NDArray[Any] = q.astype(kind) @ k.astype(kind).T
        return scores

    @cache
    def exponentials(kind: Any, rounds_scores: int) -> tuple[npt.NDArray[Any], ...]:
        """exp(score - largest), and by what to multiply it to refer to the first key."""
        scores = raw_scores(kind)
        if rounds_scores > 1:
            scores = round_to(scores, dtype).astype(kind)
        scores = scores * kind(problem.scale)
        if rounds_scores:
            scores = round_to(scores, dtype).astype(kind)
        if hidden is not None:
            scores[hidden] = -np.inf
        largest = scores.max(axis=1, keepdims=True)
        first = np.maximum(largest - _MOST, scores[:, :1])
        scores -= largest
        return np.exp(scores, out=scores), np.exp(largest - first)

    for one in maths:
        kind: Any = np.float32 if one.rounding and dtype == "fp32" else np.float64
        p, to_first = exponentials(kind, one.rounds_scores if one.rounding else 0)
        if one.from_first:
            p = p * to_first
        total = p.sum(axis=1, keepdims=True)
        if not one.rounding:
            yield p @ v.astype(kind) / total
        # Rounded factors have few bits: float32 adds their products as well as float64 here.
        elif one.rounds_scores:
            yield round_to(round_to(p / total, dtype) @ v, dtype)
        else:
            yield round_to(round_to(p, dtype) @ v / total, dtype)


def log_sum_exp(
    inputs: dict[str, Bits], problem: Problem, rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """ln(sum(exp(score))) of the rows over the keys that each sees, (batch, heads, len(rows)).

    In float64; scores are scaled. What a kernel that writes the log-sum-exp must have written.
    """
    group = problem.heads // problem.heads_kv
    last_key = rows + problem.seqlen_k - problem.seqlen_q if problem.causal else None
    out = np.empty((problem.batch, problem.heads, len(rows)))

    def one(batch: int, head: int) -> None:
        queries, keys = (
            from_bits(bits, problem.dtype).astype(np.float64)
            for bits in (inputs["q"][batch, head, rows], inputs["k"][batch, head // group])
        )
        scores = queries @ keys.T * problem.scale
        if last_key is not None:
            scores[np.arange(problem.seqlen_k) > last_key[:, None]] = -np.inf
        largest = scores.max(axis=1)
        out[batch, head] = largest + np.log(np.exp(scores - largest[:, None]).sum(axis=1))

    heads = np.indices((problem.batch, problem.heads)).reshape(2, -1).tolist()
    with one_blas_thread():
        list((map if out.size * problem.seqlen_k < 2**20 else parallel)(one, *heads))
    return out


@dataclass(frozen=True, slots=True)
class Measures:
    """How far an output is from float64, or how far it may be; each compared by `<=`.

    A row's length is its expected norm, or a thousandth of the typical norm if that is more.
    """

    row: float
    """Largest ‖out - expected‖ / length of a row."""
    element: float
    """Largest |out - expected| beyond half an ulp of `expected`, over length / sqrt(head_dim)."""
    rms: float = 0.0
    """Root of the mean square of the rows' errors: of all measures the surest of a precision."""
    row_gain: float = 0.0
    """Largest |gain| of a row: <out - expected, expected> / length², an error that scales it."""
    tile_gain: float = 0.0
    """|Mean gain| of TILE rows of a head: rounding averages out, a wrong factor does not."""
    gain: float = 0.0
    """|Mean gain| of all rows."""
    scale: float = 0.0
    """The change of the softmax scale that fits the error best, as a share of the scale."""

    def shares(self, limits: Measures) -> dict[str, float]:
        """Each measure as a share of its limit, those without a limit left out.

        A NaN stays NaN, also of a limit, so that nothing is within it.
        """
        pairs = {f.name: (getattr(self, f.name), getattr(limits, f.name)) for f in fields(self)}
        return {name: value / limit for name, (value, limit) in pairs.items() if limit != np.inf}


# Multiples of the largest error in those rows, for scores that are not rounded and that are: the
# whole output has up to a thousand times as many rows. benchmarks/accuracy.py prints how much of
# each limit kernels and peers use.
_TIMES = (
    Measures(row=2, element=3, rms=1.3, row_gain=3, tile_gain=4, gain=1, scale=2),
    Measures(row=3, element=3, rms=1.3, row_gain=5, tile_gain=4, gain=2, scale=4),
)


def measures(
    out: npt.NDArray[Any],
    expected: Float,
    dtype: str,
    tilted: Float | None = None,
) -> Measures:
    """Measures of an output (batch, heads, rows, head_dim); NaN if any element is NaN.

    tilted: the expected output at the scale (1 + TILT) * scale.
    """
    difference = out.astype(np.float64, copy=False) - expected
    squares = np.einsum("...d,...d->...", expected, expected)
    length = np.maximum(np.sqrt(squares), 1e-3 * float(np.sqrt(np.mean(squares))))
    off = np.sqrt(np.einsum("...d,...d->...", difference, difference)) / length
    beyond = np.maximum(np.abs(difference) - HALF_ULP_OUT[dtype] * np.abs(expected), 0).max(-1)
    gains = np.einsum("...d,...d->...", difference, expected) / length**2
    edges = np.arange(0, gains.shape[-1], TILE)
    rows = np.diff(edges, append=gains.shape[-1])
    scale = 0.0
    if tilted is not None:
        slope = tilted - expected
        scale = TILT * float((difference * slope).sum()) / float((slope * slope).sum() or 1.0)
    return Measures(
        row=float(off.max()),
        element=float((beyond / length).max()) * math.sqrt(expected.shape[-1]),
        rms=float(np.sqrt(np.mean(off**2))),
        row_gain=float(np.abs(gains).max()),
        tile_gain=float((np.abs(np.add.reduceat(gains, edges, axis=-1)) / rows).max()),
        gain=abs(float(gains.mean())),
        scale=abs(scale),
    )


def row_error(out: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """Largest ‖out - expected‖ / ‖expected‖ over rows; NaN if any element is NaN.

    A row whose expected norm is under a thousandth of the typical one is divided by that. The
    computation is in the dtype of `expected`.
    """
    norms = np.sqrt(np.einsum("...d,...d->...", expected, expected))
    floor = 1e-3 * float(np.sqrt(np.mean(norms.astype(np.float64) ** 2)))
    difference = out.astype(expected.dtype, copy=False) - expected
    errors = np.sqrt(np.einsum("...d,...d->...", difference, difference))
    return float((errors / np.maximum(norms, floor)).max())


def limits(case: Case, rounds_scores: int) -> Measures:
    """The largest measures of a right output, from the same maths in the candidate's dtypes.

    Each is a multiple of the largest in a sample of rows; the whole output has many more rows, so
    its largest is larger. No limit is below what rounding the output costs (HALF_ULP). Gains and
    scale are limited for normal inputs of many rows alone, where rounding averages out: equal
    probabilities, for instance, are all rounded alike.
    """
    problem, dtype = case.problem, case.problem.dtype
    rounded = 0 if dtype == "fp32" else rounds_scores  # storing fp32 scores does not round them
    same, times, half = same_maths(case, rounded), _TIMES[rounds_scores > 0], HALF_ULP[dtype]
    if dtype == "fp32":
        # Sums of more terms, in any order: NumPy adds in blocks, a kernel may add one by one.
        half *= max(1.0, math.sqrt(problem.head_dim / 2048))
        times = replace(times, row=2 * times.row, element=2 * times.element, rms=2 * times.rms)
    row = max(times.row * same.row, half)
    element = max(times.element * same.element, 4 * half if dtype == "fp32" else half)
    if not (row < np.inf and element < np.inf):  # anything would be within it
        raise ArithmeticError(f"the rounded maths of {case.label} has no finite error")
    if case.inputs != "normal" or problem.batch * problem.heads * problem.seqlen_q < _AVERAGES:
        return Measures(row, element, *[np.inf] * 5)
    return Measures(
        row,
        element,
        max(times.rms * same.rms, half if dtype == "fp32" else half / 4),
        max(times.row_gain * same.row_gain, half / 2),
        max(times.tile_gain * same.tile_gain, half / 8),
        times.gain * SYSTEMATIC[dtype],
        times.scale * SYSTEMATIC[dtype],
    )


FOUND: dict[tuple[Case, int], Measures] = {}  # by same_maths, here or in a process beside


def same_maths(case: Case, rounds_scores: int) -> Measures:
    """Largest measures of the rounded maths with scores rounded 0, 1 or 2 times."""
    key = case, rounds_scores
    return FOUND[key] if key in FOUND else FOUND.setdefault(key, _same_maths(*key))


def _same_maths(case: Case, rounds_scores: int) -> Measures:
    # Heads are alike, so four of them show the dtype's error: 7.5 s less at (4,16,4096,128).
    heads = min(case.problem.heads, 4)
    problem = replace(case.problem, batch=1, heads=heads, heads_kv=heads)
    case = replace(case, problem=problem)
    found: list[Measures] = []
    rows_seen, seed = 0, 0
    wanted = _LIMIT_ROWS[case.inputs == "normal" and problem.seqlen_q >= TILE]
    ways = (EXACT, Maths(True, rounds_scores), Maths(True, rounds_scores, from_first=True))
    while rows_seen < wanted:
        inputs = make_inputs(case, 1000 + seed)
        rows = _tiles_of_rows(problem, seed, wanted // heads)
        exact, largest, first = references(inputs, problem, rows, ways)
        found.append(measures(largest, exact, problem.dtype))
        # Another reference hardly adds to the error of a row, but makes its parts alike.
        found.append(replace(measures(first, exact, problem.dtype), row=0.0))
        rows_seen += heads * len(rows)
        seed += 1
    return Measures(*(max(getattr(one, f.name) for one in found) for f in fields(Measures)))


def _tiles_of_rows(problem: Problem, seed: int, most: int) -> npt.NDArray[np.int64]:
    """At most `most` rows of a head in whole tiles: the first, the last, and random ones."""
    tiles = ceil_div(problem.seqlen_q, TILE)
    wanted = max(1, min(tiles, most // TILE))
    rng = np.random.default_rng(seed)
    some = rng.choice(tiles, size=wanted, replace=False).tolist()
    chosen = sorted({0, tiles - 1, *some} if wanted > 2 else {0, *some})
    rows = np.concatenate([np.arange(TILE * tile, TILE * tile + TILE) for tile in chosen])
    return rows[rows < problem.seqlen_q]
