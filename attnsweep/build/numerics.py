"""The float64 reference, and the limits of error, by NumPy alone.

A candidate is right if, on every case, each of its Measures is within a limit that comes from the
errors of the same maths in the candidate's dtypes. Code compares by `value <= limit`, so that a NaN
fails. gpu/judge.py takes the same measures of every element on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from attnsweep.build import fp8_sums
from attnsweep.build.inputs import Case as Case
from attnsweep.build.inputs import Inputs as Inputs
from attnsweep.build.inputs import draw as draw
from attnsweep.build.inputs import make_inputs as make_inputs
from attnsweep.build.inputs import short_turns as short_turns
from attnsweep.build.inputs import small_cases as small_cases
from attnsweep.build.inputs import some_rows, tiles_of_rows
from attnsweep.build.length import is_long
from attnsweep.build.measures import HALF_ULP_OUT as HALF_ULP_OUT
from attnsweep.build.measures import TILE as TILE
from attnsweep.build.measures import TILT as TILT
from attnsweep.build.measures import Measures as Measures
from attnsweep.build.measures import by_chance as by_chance
from attnsweep.build.measures import fitted_scale as fitted_scale
from attnsweep.build.measures import measures as measures
from attnsweep.build.measures import row_error as row_error
from attnsweep.build.storage import E4M3_MAX, values_of
from attnsweep.build.storage import INFINITY_BITS as INFINITY_BITS
from attnsweep.build.storage import Bits as Bits
from attnsweep.build.storage import Float as Float
from attnsweep.build.storage import Tensor as Tensor
from attnsweep.build.storage import from_bits as from_bits
from attnsweep.build.storage import round_to as round_to
from attnsweep.build.storage import to_bits as to_bits
from attnsweep.build.threads import one_blas_thread, parallel
from attnsweep.problem import Problem

# No limit of a row is below the error of rounding the output alone: half an ulp of 1. For fp32 it
# is that of sums of up to 2048 products in any order, and grows with the root of head_dim beyond:
# PyTorch's paths err by 1e-7 to 3e-6 at 2048, by 7e-6 at 8192, one TF32 product by 3e-4.
HALF_ULP = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 5e-6}
# The largest factor that all outputs may be wrong by. Rounding is unbiased: of 1,068 right
# candidates on an H100 none used more than 51 % of it (benchmarks/refusals.py).
SYSTEMATIC = {"fp16": 1e-4, "bf16": 1e-4, "fp32": 3e-6}
# The same in FP8, at least: probabilities of 3 bits are not spread evenly between two neighbours.
# More where sums of products have few bits: see limits.
_SYSTEMATIC_FP8 = 1e-3
# What sums may lose for each key, as tensor cores cut them towards 0: twice what was measured. At
# 32,768 keys each of cuDNN, SDPA, Triton, FlashAttention-3 and ours lost 3.4e-5, at 8192 0.8e-5.
_CUT_PER_KEY = 2e-9
# A kernel multiplies probabilities by this before it rounds them to e4m3, so that more are normal.
_P_SCALE = 256.0
# The same where the largest is not known, so that there is room for it.
_P_SCALE_FROM_FIRST = 8.0
# Log-sum-exps are float32 sums of float32 exponentials; flash_fwd_wgmma's are off by 2e-5 at most.
_LSE_LIMIT = 1e-4
# FLOPs of NumPy's reference of one case. On the device every row is judged; these rows prove the
# device's reference: all of (1,8,512,64), 15 of (4,16,4096,128), others in each run.
_REFERENCE_FLOPS = 2e9
# Exponents up to this: e^9 is 8103, and sums of such probabilities fit fp16.
_MOST = 9.0
# Rows over which the errors of the same maths are taken, without limits of gains and with them: the
# largest error of a few rows depends on luck.
_LIMIT_ROWS = (256, 1024)
# Rows that are computed at once, scores of 32,768 keys then take 32 MB; and of more keys, so that
# 16 cores have a block each.
_BLOCK_ROWS, _BLOCK_ROWS_OF_LONG = 128, 64
# Draws of hard inputs, and of fewer keys than a tile: what makes them hard, or those few values, is
# the same for all queries, so that rows of a draw err alike. Limits of two refused right kernels.
_DRAWS = 16
# Errors of gains and scales that limits admit, in halves of a limit and standard errors: 5 of them.
_BY_CHANCE = 2.5
# Over fewer rows, rounding does not average out, and gains have no limit.
_AVERAGES = 512


def sampled_rows(
    problem: Problem, seed: int, flops: float = _REFERENCE_FLOPS
) -> npt.NDArray[np.int64]:
    """Query rows that NumPy's reference computes in every head: all of them if that is cheap.

    Otherwise the first, the last, both sides of tile edges, and random ones by `seed`. There are
    at least 8 random rows of each head, and more if all of them cost at most `flops`.
    """
    per_row = 4 * problem.batch * problem.heads * problem.seqlen_k * problem.head_dim
    count = max(8, int(flops / per_row))
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
    is done in fp32, because a kernel's sums are no more exact than their terms. In FP8, sums of
    products keep the bits that Hopper's tensor cores keep, and `rounds_scores` has no effect."""
    rounds_scores: int = 0
    """Round scores as well: once if they are stored, twice if they are stored before and after
    scaling, as plain PyTorch does."""
    from_first: bool = False
    """Exponents refer to the first key's score instead of the largest, within what fp16 or E4M3 can
    hold, as a kernel may that looks for no maximum: the largest probability is then rounded too,
    and in E4M3 more of the small ones are lost."""
    tilted: bool = False
    """The softmax scale is 1 + TILT times as large."""
    by_term: bool = False
    """In FP8, cut each product as the tensor cores do, not each sum of 32 alone. See fp8_sums."""
    in_log2: bool = False
    """Scores are rounded as exponents of 2, not of e: 10 is exact in fp16, 10 log2(e) is not."""


EXACT = Maths()


def reference(
    inputs: Mapping[str, Tensor],
    problem: Problem,
    rows: npt.NDArray[np.int64],
    maths: Maths = EXACT,
) -> Float:
    """The attention rows (batch, heads, len(rows), head_dim) in float64."""
    return references(inputs, problem, rows, [maths])[0]


def references(
    inputs: Mapping[str, Tensor],
    problem: Problem,
    rows: npt.NDArray[np.int64],
    maths: Sequence[Maths],
) -> list[Float]:
    """The rows by each of several maths, which share their scores and exponentials."""
    group = problem.heads // problem.heads_kv
    shape = (problem.batch, problem.heads, len(rows), problem.head_dim)
    outs = [np.empty(shape) for _ in maths]

    size = _BLOCK_ROWS if problem.seqlen_k <= 2**15 else _BLOCK_ROWS_OF_LONG

    def one(batch: int, head: int, begin: int) -> None:
        some = rows[begin : begin + size]
        q = values_of(inputs, problem, "q", batch, head, some)
        k, v = (values_of(inputs, problem, name, batch, head // group) for name in "kv")
        for out, rounded in zip(outs, _attend(q, k, v, some, problem, maths), strict=True):
            out[batch, head, begin : begin + size] = rounded

    blocks = range(0, len(rows), size)
    every = product(range(problem.batch), range(problem.heads), blocks)
    # A thread a block, or none for small ones.
    with one_blas_thread():
        list((map if outs[0].size < 2**16 else parallel)(one, *zip(*every, strict=True)))
    return outs


def exact_rows(
    inputs: Mapping[str, Tensor],
    problem: Problem,
    rows: npt.NDArray[np.int64],
    signs: Sequence[int] = (1,),
) -> list[tuple[Float, Float]]:
    """`reference` and `log_sum_exp` of the rows, with k and v times each of the signs.

    Few rows cost less than to convert k and v, which happens once here.
    """
    group = problem.heads // problem.heads_kv
    shape = (problem.batch, problem.heads, len(rows))
    sides = [(np.empty((*shape, problem.head_dim)), np.empty(shape)) for _ in signs]

    def one(batch: int, head_kv: int) -> None:
        k, v = (
            values_of(inputs, problem, name, batch, head_kv).astype(np.float64) for name in "kv"
        )
        for head in range(head_kv * group, (head_kv + 1) * group):
            for begin in range(0, len(rows), _BLOCK_ROWS):
                block = slice(begin, begin + _BLOCK_ROWS)
                some = rows[block]
                q = values_of(inputs, problem, "q", batch, head, some).astype(np.float64)
                scores = q @ k.T * problem.scale
                for sign, (out, lse) in zip(signs, sides, strict=True):
                    signed = scores * sign
                    if problem.causal:
                        last = some[:, None] + problem.seqlen_k - problem.seqlen_q
                        signed[np.arange(problem.seqlen_k) > last] = -np.inf
                    largest = signed.max(axis=1, keepdims=True)
                    p = np.exp(signed - largest)
                    total = p.sum(axis=1, keepdims=True)
                    out[batch, head, block] = p @ v / total * sign
                    lse[batch, head, block] = (largest + np.log(total))[:, 0]

    heads = list(product(range(problem.batch), range(problem.heads_kv)))
    with one_blas_thread():
        small = problem.min_bytes < 2**20
        list((map if small else parallel)(one, *zip(*heads, strict=True)))
    return sides


def _attend(
    q: npt.NDArray[Any],
    k: npt.NDArray[Any],
    v: npt.NDArray[Any],
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
    def exponentials(
        kind: Any, rounds_scores: int, tilt: float, unit: float
    ) -> tuple[npt.NDArray[Any], ...]:
        """exp(score - largest), and by what to multiply it to refer to the first key."""
        scores = raw_scores(kind)
        if rounds_scores > 1:
            scores = round_to(scores, dtype).astype(kind)
        scores = scores * kind(problem.scale * (1 + tilt) / unit)
        if rounds_scores:
            scores = round_to(scores, dtype).astype(kind)
        if unit != 1:
            scores *= kind(unit)
        if hidden is not None:
            scores[hidden] = -np.inf
        largest = scores.max(axis=1, keepdims=True)
        first = np.maximum(largest - _MOST, scores[:, :1])
        scores -= largest
        return np.exp(scores, out=scores), np.exp(largest - first)

    @cache
    def fp8_scores(by_term: bool) -> npt.NDArray[Any]:
        scores = fp8_sums.matmul(q, k.T, by_term=by_term) * problem.scale
        if hidden is not None:
            scores[hidden] = -np.inf
        return scores

    for one in maths:
        if one.rounding and problem.scaled:
            yield _attend_in_fp8(fp8_scores(one.by_term), v, problem, one)
            continue
        kind: Any = np.float32 if one.rounding and dtype == "fp32" else np.float64
        tilt = TILT if one.tilted else 0.0
        unit = math.log(2) if one.in_log2 else 1.0
        p, to_first = exponentials(kind, one.rounds_scores if one.rounding else 0, tilt, unit)
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


def _attend_in_fp8(
    scores: npt.NDArray[Any], v: npt.NDArray[Any], problem: Problem, maths: Maths
) -> npt.NDArray[np.float32]:
    """Rows of one head as FP8 tensor cores compute them, without a second level of sums."""
    reference, scale = scores.max(axis=1, keepdims=True), _P_SCALE
    if maths.from_first:
        scale = _P_SCALE_FROM_FIRST
        reference = np.maximum(reference - math.log(E4M3_MAX / scale), scores[:, :1])
    p = np.exp(scores - reference)
    rounded = round_to(p * scale, "e4m3") / scale
    summed = fp8_sums.matmul(rounded, v, by_term=maths.by_term)
    return round_to(summed / p.sum(axis=1, keepdims=True), problem.out_dtype)


def log_sum_exp(
    inputs: Mapping[str, Tensor],
    problem: Problem,
    rows: npt.NDArray[np.int64],
    *,
    in_fp8: Maths | None = None,
) -> npt.NDArray[np.float64]:
    """ln(sum(exp(score))) of the rows over the keys that each sees, (batch, heads, len(rows)).

    In float64; scores are scaled. What a kernel that writes the log-sum-exp must have written.
    in_fp8: of scores as Hopper's FP8 products add them, by this maths.
    """
    group = problem.heads // problem.heads_kv
    last_key = rows + problem.seqlen_k - problem.seqlen_q if problem.causal else None
    out = np.empty((problem.batch, problem.heads, len(rows)))

    def one(batch: int, head: int) -> None:
        queries = values_of(inputs, problem, "q", batch, head, rows).astype(np.float64)
        keys = values_of(inputs, problem, "k", batch, head // group).astype(np.float64)
        product = (
            fp8_sums.matmul(queries, keys.T, by_term=in_fp8.by_term) if in_fp8 else queries @ keys.T
        )
        scores = product * problem.scale
        if last_key is not None:
            scores[np.arange(problem.seqlen_k) > last_key[:, None]] = -np.inf
        largest = scores.max(axis=1)
        out[batch, head] = largest + np.log(np.exp(scores - largest[:, None]).sum(axis=1))

    heads = np.indices((problem.batch, problem.heads)).reshape(2, -1).tolist()
    with one_blas_thread():
        list((map if out.size * problem.seqlen_k < 2**20 else parallel)(one, *heads))
    return out


# Multiples of the largest error in those rows, for scores that are not rounded and that are: the
# whole output has up to a thousand times as many rows. benchmarks/accuracy.py prints how much of
# each limit kernels and peers use.
_TIMES = (
    Measures(row=2, element=3, rms=1.3, row_gain=3, tile_gain=4, gain=1, scale=2),
    Measures(row=3, element=3, rms=1.3, row_gain=5, tile_gain=4, gain=2, scale=4),
)


def limits(case: Case, rounds_scores: int, same: Measures | None = None) -> Measures:
    """The largest measures of a right output, from the same maths in the candidate's dtypes.

    Each is a multiple of the largest in a sample of rows, as the whole output has many more rows.
    No limit is below what rounding the output costs (HALF_ULP). Gains and scale are limited for
    normal inputs of many rows alone: equal probabilities, for instance, are all rounded alike.

    same: one of `each_draw` in place of `same_maths`, for limits that are no larger.
    """
    problem, dtype = case.problem, case.problem.out_dtype
    same = same or same_maths(case, rounds_scores)
    times, half = _TIMES[rounds_scores > 0], HALF_ULP[dtype]
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
    # In FP8 sums are cut towards 0, and shrink the more the longer they are: `same` shows it.
    off = _SYSTEMATIC_FP8 if problem.scaled else SYSTEMATIC[dtype]
    cut = 0.0 if problem.scaled else _CUT_PER_KEY * problem.seqlen_k
    # A row in FP8 may hang on one rounded weight: then its error is a gain.
    row_gain = max(times.row_gain * same.row_gain, row if problem.scaled else half / 2)
    # What all outputs may be wrong by, each of their rows and tiles may be: 64 rows that products
    # of TF32 had cut alike, by 1.1e-6 with 516 columns, were refused on an H200 at 0.9e-6.
    gain = max(times.gain * off, 2 * same.gain)
    return Measures(
        row,
        element,
        max(times.rms * same.rms, half if dtype == "fp32" else half / 4),
        max(row_gain, gain) + cut,
        max(times.tile_gain * same.tile_gain, half / 8, gain) + cut,
        gain + cut,
        max(times.scale * off, 2 * same.scale),
    )


def rounded_scores(problem: Problem, rounds_scores: int) -> int:
    """How often scores are rounded that are stored so often: storing fp32 does not round them."""
    return 0 if problem.dtype == "fp32" else rounds_scores


FOUND: dict[tuple[Case, int], Measures] = {}  # by same_maths, here or in a process beside


@lru_cache(maxsize=256)
def lse_limit(case: Case) -> float:
    """The largest error of a log-sum-exp, as a share of its size, or of 1 if that is larger.

    In FP8 scores have the few bits of their sums, so that three times what these cost is added.
    """
    if not case.problem.scaled:
        return _LSE_LIMIT
    few, rows_seen, seed, most = _few_heads(case), 0, 0, 0.0
    # Heads are drawn with other magnitudes and outliers, and the rows of a head err alike.
    draws = _DRAWS if case.problem.seqlen_k <= 2048 else max(4, _draws(case))
    while rows_seen < _LIMIT_ROWS[0] or seed < draws:
        inputs = make_inputs(few, 1000 + seed)
        rows = tiles_of_rows(few.problem, seed, TILE)
        exact = log_sum_exp(inputs, few.problem, rows)
        off = np.abs(log_sum_exp(inputs, few.problem, rows, in_fp8=_in_fp8(case)) - exact)
        most = max(most, float((off / np.maximum(1, np.abs(exact))).max()))
        rows_seen, seed = rows_seen + exact.size, seed + 1
    return _LSE_LIMIT + 3 * most


def _in_fp8(case: Case) -> Maths:
    """How a case in FP8 is computed: scores of hard inputs are far from 0."""
    return Maths(True, by_term=case.inputs != "normal")


def _few_heads(case: Case) -> Case:
    """The case with four heads at most: heads are alike, so they show the dtype's error."""
    heads = min(case.problem.heads, 4)
    return replace(case, problem=replace(case.problem, batch=1, heads=heads, heads_kv=heads))


def _draws(case: Case) -> int:
    """How many draws of a case show what its inputs cost at most."""
    return _DRAWS if case.inputs != "normal" or case.problem.seqlen_k < TILE else 1


def same_maths(case: Case, rounds_scores: int) -> Measures:
    """Largest measures of the rounded maths with scores rounded 0, 1 or 2 times."""
    key = case, rounded_scores(case.problem, rounds_scores)
    return FOUND[key] if key in FOUND else FOUND.setdefault(key, [*each_draw(*key)][-1])


def each_draw(case: Case, rounds_scores: int) -> Iterator[Measures]:
    """Measures of `same_maths` after each draw of inputs: none falls, and the last are its own."""
    in_all = case.problem.batch * case.problem.heads * case.problem.seqlen_q
    windows = is_long(case.problem)
    case = _few_heads(case)  # 7.5 s less at (4,16,4096,128)
    rounds_scores = rounded_scores(case.problem, rounds_scores)
    problem, heads = case.problem, case.problem.heads
    found: list[Measures] = []
    rows_seen, seed = 0, 0
    wanted = _LIMIT_ROWS[case.inputs == "normal" and problem.seqlen_q >= TILE]
    hard = case.inputs != "normal"
    rounded = _in_fp8(case) if problem.scaled else Maths(True, rounds_scores)
    ways = [EXACT, rounded, replace(rounded, from_first=True)]
    if hard and rounds_scores:
        ways.append(replace(rounded, in_log2=True))
    if case.inputs == "normal" and _takes_scale(problem, in_all, rounds_scores):
        ways.append(replace(EXACT, tilted=True))
    while rows_seen < wanted or seed < _draws(case):
        inputs = make_inputs(case, 1000 + seed, windows=windows)
        rows = some_rows(case, seed, wanted // heads)
        exact, *outs = references(inputs, problem, rows, ways)
        tilted = outs.pop() if ways[-1].tilted else None
        for out in outs:
            one = measures(out, exact, problem.out_dtype, tilted)
            gain, scale = (_BY_CHANCE * off for off in by_chance(out, exact, tilted, in_all))
            if problem.scaled:  # cut sums shrink: that is no chance
                gain, scale = max(one.gain, gain), max(one.scale, scale)
            # It counts only where few weights do that the largest is rounded too.
            row = one.row if hard or problem.scaled or out is outs[0] else 0.0
            found.append(replace(one, row=row, gain=gain, scale=scale))
        found = [Measures(*(max(getattr(x, f.name) for x in found) for f in fields(Measures)))]
        yield found[0]
        rows_seen += heads * len(rows)
        seed += 1


def _takes_scale(problem: Problem, rows: int, rounds_scores: int) -> bool:
    """Whether `scale` is measured, which it is of small cases, and not as what rounding costs."""
    return problem.scaled or (rows <= _LIMIT_ROWS[1] and not rounds_scores)


@lru_cache(maxsize=16)
def scale_of_rounding(case: Case, seed: int, rounds_scores: int) -> float:
    """The change of the softmax scale that fits what rounding the scores of these inputs costs.

    In bf16 it has a standard error of 2e-4, half the limit, but is the same for all right kernels.
    """
    rounds_scores = rounded_scores(case.problem, rounds_scores)
    if case.problem.scaled or not rounds_scores:
        return 0.0
    ways = [EXACT, replace(EXACT, tilted=True), Maths(True, rounds_scores)]
    rows = np.arange(case.problem.seqlen_q)
    exact, tilted, out = references(make_inputs(case, seed), case.problem, rows, ways)
    return fitted_scale(out - exact, tilted - exact)
