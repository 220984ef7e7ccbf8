"""The limits of error of a forward, by NumPy alone.

A candidate is right if, on every case, each of its Measures is within a limit that comes from the
errors of the same maths in the candidate's dtypes. Code compares by `value <= limit`, so that a NaN
fails. verify/compare.py takes the same measures of every element on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from attnsweep.core.cases import TILE, Case
from attnsweep.core.layouts import DENSE
from attnsweep.core.long_problems import is_long
from attnsweep.core.problem import FULL, Paged, Problem
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.measures import (
    Measures,
    apart,
    by_chance,
    fitted_scale,
    largest,
    measures,
    more_near_zero,
)
from attnsweep.verify.reference import some_rows, tiles_of_rows
from attnsweep.verify.rounded import EXACT, ForwardMaths, log_sum_exp, references

# No limit of a row is below the error of rounding the output alone: half an ulp of 1. For fp32 it
# is that of sums of up to 2048 products in any order, and grows with the root of head_dim beyond:
# PyTorch's paths err by 1e-7 to 3e-6 at 2048, by 7e-6 at 8192, one TF32 product by 3e-4. So it does
# beyond 8192 keys: key by key, rows of 32,768 err by 7e-6, of 131,072 by 1.5e-5.
HALF_ULP = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 5e-6}
# The largest factor that all outputs may be wrong by. Rounding is unbiased: of 1,068 right
# candidates on an H100 none used more than 51 % of it (benchmarks/refusals.py).
SYSTEMATIC = {"fp16": 1e-4, "bf16": 1e-4, "fp32": 3e-6}
# The same where sums are cut, at least: probabilities of 3 bits are not spread evenly between two
# neighbours. More where sums of products have few bits: see limits.
_SYSTEMATIC_CUT = 1e-3
# What sums may lose for each key, as tensor cores cut them towards 0: twice what was measured. At
# 32,768 keys each of cuDNN, SDPA, Triton, FlashAttention-3 and ours lost 3.4e-5, at 8192 0.8e-5.
_CUT_PER_KEY = 2e-9
# Log-sum-exps are float32 sums of float32 exponentials; flash_fwd_wgmma's are off by 2e-5 at most.
_LSE_LIMIT = 1e-4
# Rows over which the errors of the same maths are taken, without limits of gains and with them: the
# largest error of a few rows depends on luck.
_LIMIT_ROWS = (256, 1024)
# Draws of hard inputs, and of fewer keys than a tile: what makes them hard, or those few values, is
# the same for all queries, so that rows of a draw err alike. Limits of two refused right kernels.
_DRAWS = 16
# Errors of gains and scales that limits admit, in halves of a limit and standard errors: 5 of them.
_BY_CHANCE = 2.5
# Keys of a request that stands for those of a paged cache: what rounding costs a row, of its
# length, does not depend on how many it has; and of hard inputs, of which a few have the weight:
# right outputs of 8192 keys used at most 0.50 of limits from 1024 keys, 0.52 of those from 4096.
_MOST_KEYS = 4096
_MOST_HARD_KEYS = 1024
# Over fewer rows, rounding does not average out, and gains have no limit.
_AVERAGES = 512


# Multiples of the largest error in those rows, for scores that are not rounded and that are: the
# whole output has up to a thousand times as many rows. docs/explanation/numerics.md says how much
# of each limit kernels and baselines use.
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
    times = more_near_zero(times, problem.value_dim)
    if dtype == "fp32":
        # Sums of more terms, in any order: NumPy adds in blocks, a kernel may add one by one.
        longest = max(1.0, problem.head_dim / 2048, problem.seqlen_k / 8192)
        half *= math.sqrt(longest)
        times = replace(times, row=2 * times.row, element=2 * times.element, rms=2 * times.rms)
    row = max(times.row * same.row, half)
    element = max(times.element * same.element, 4 * half if dtype == "fp32" else half)
    if not (row < np.inf and element < np.inf):  # anything would be within it
        raise ArithmeticError(f"the rounded maths of {case.label} has no finite error")
    if case.inputs != "normal" or problem.heads * problem.rows_with_keys < _AVERAGES:
        return Measures(row, element, *[np.inf] * 5)
    # A row may hang on one rounded weight. Its error is a gain then, of up to half an ulp, or more
    # where sums are cut: these shrink the more the longer they are, as `same` shows. The recorded
    # run `decode_models` of an H100 refused a right kernel that had such a row, of 3.3e-3, where
    # three times the largest gain of a sample is 3.0e-3.
    off, cut, one_weight = _SYSTEMATIC_CUT, 0.0, row
    if not problem.format.cut_sums:
        off, cut = SYSTEMATIC[dtype], _CUT_PER_KEY * problem.seqlen_k
        one_weight = half / 2 if dtype == "fp32" else half
    row_gain = max(times.row_gain * same.row_gain, one_weight)
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
    """How often storing rounds scores: never in fp32."""
    return 0 if problem.dtype == "fp32" else rounds_scores


@lru_cache(maxsize=256)
def lse_limit(case: Case) -> float:
    """The largest error of a log-sum-exp, as a share of its size, or of 1 if that is larger.

    Where sums are cut, scores have few bits, so that three times what these cost is added.
    """
    if not case.problem.format.cut_sums:
        return _LSE_LIMIT
    few, rows_seen, seed, most = _few_heads(case), 0, 0, 0.0
    # Heads are drawn with other magnitudes and outliers, and the rows of a head err alike.
    draws = _DRAWS if case.problem.seqlen_k <= 2048 else max(4, _draws(case))
    while rows_seen < _LIMIT_ROWS[0] or seed < draws:
        inputs = make_inputs(few, 1000 + seed)
        rows = tiles_of_rows(few.problem, seed, TILE)
        exact = log_sum_exp(inputs, few.problem, rows)
        off = apart(log_sum_exp(inputs, few.problem, rows, in_fp8=_in_fp8(case)), exact)
        size = np.where(np.isfinite(exact), np.abs(exact), 1)
        most = max(most, float((off / np.maximum(1, size)).max()))
        rows_seen, seed = rows_seen + exact.size, seed + 1
    return _LSE_LIMIT + 3 * most


def _in_fp8(case: Case) -> ForwardMaths:
    """How a case in FP8 is computed: scores of hard inputs are far from 0."""
    return ForwardMaths(True, by_term=case.inputs != "normal")


def _few_heads(case: Case) -> Case:
    """The case with four heads at most: heads are alike, so they show the dtype's error.

    Items that have keys of their own are not: there are up to four of these. Few queries leave each
    head of keys its group. Where keys are most of the work, as in a paged cache, there is one item
    of many queries: keys were drawn 64 times for one query.
    """
    problem, group = case.problem, 1
    if isinstance(problem.layout, Paged) or _is_decoding(case):
        # What requests of a paged cache see of far_below depends on the mask, as do its limits.
        own = problem.mask.kind == "window" or case.inputs == "far_below"
        mask = problem.mask if own else FULL
        most = _MOST_KEYS if case.inputs == "normal" else _MOST_HARD_KEYS
        keys = min(problem.seqlen_k, most)
        rows = 2 * TILE
        if not isinstance(problem.layout, Paged):  # as many in a draw as all draws had before
            drawn = min(problem.heads_kv, 4) * (problem.heads // problem.heads_kv)
            rows = max(problem.seqlen_q, _LIMIT_ROWS[0] // drawn)
        problem = replace(problem, batch=1, seqlen_q=rows, seqlen_k=keys, layout=DENSE, mask=mask)
    batch = min(problem.batch, 4) if problem.items_differ else 1
    if problem.seqlen_q < TILE and not (problem.items_differ or problem.format.cut_sums):
        group = problem.heads // problem.heads_kv
    heads = min(problem.heads // group, 4 // batch)
    few = replace(problem, batch=batch, heads=heads * group, heads_kv=heads)
    return replace(case, problem=few)


def _is_decoding(case: Case) -> bool:
    """Whether a dense problem has one query, or few that see many keys, nearly all alike.

    For (8,8/4,1x4096,512) in bf16 keys were drawn 32 times, and 256 times for its case of one key:
    before a candidate was tried, that took 56 s on a card's host.
    """
    problem, kind = case.problem, case.problem.mask.kind
    # Few queries of a causal problem see the keys that far_below has not shifted, which have the
    # weight then; of hard inputs, what a window shows depends on where it lies.
    alike = kind == "full" or (kind == "causal" and case.inputs != "far_below")
    if case.inputs == "normal":
        alike = alike or (kind == "window" and not problem.mask.interval.top_left)
    many = problem.seqlen_q < TILE and problem.seqlen_k >= 8 * TILE
    alike = alike and problem.layout == DENSE and not problem.items_differ
    return alike and not problem.format.cut_sums and (many or problem.seqlen_q == 1)


def _draws(case: Case) -> int:
    """Number of draws of inputs that a case's limits come from."""
    return _DRAWS if case.inputs != "normal" or case.problem.seqlen_k < TILE else 1


@lru_cache(maxsize=256)
def same_maths(case: Case, rounds_scores: int) -> Measures:
    """Largest measures of the rounded maths with scores rounded 0, 1 or 2 times."""
    return [*each_draw(case, rounded_scores(case.problem, rounds_scores))][-1]


def each_draw(case: Case, rounds_scores: int) -> Iterator[Measures]:
    """What `same_maths` finds after each draw of inputs: running maxima, the last its result."""
    in_all = max(1, case.problem.heads * case.problem.rows_with_keys)
    windows = is_long(case.problem)
    case = _few_heads(case)  # 7.5 s less at (4,16,4096,128)
    rounds_scores = rounded_scores(case.problem, rounds_scores)
    problem, heads = case.problem, case.problem.batch * case.problem.heads
    cut_sums = problem.format.cut_sums
    found: list[Measures] = []
    rows_seen, seed = 0, 0
    wanted = _LIMIT_ROWS[case.inputs == "normal" and problem.seqlen_q >= TILE]
    hard = case.inputs != "normal"
    rounded = _in_fp8(case) if cut_sums else ForwardMaths(True, rounds_scores)
    ways = [EXACT, rounded, replace(rounded, from_first=True)]
    if hard and rounds_scores:
        ways.append(replace(rounded, in_log2=True))
    # `scale` is measured of small cases, and not as what rounding costs.
    tilts = cut_sums or (in_all <= _LIMIT_ROWS[1] and not rounds_scores)
    if case.inputs == "normal" and tilts:
        ways.append(replace(EXACT, tilted=True))
    while rows_seen < wanted or seed < _draws(case):
        inputs = make_inputs(case, 1000 + seed, windows=windows)
        rows = some_rows(case, seed, wanted // heads)
        exact, *outs = references(inputs, problem, rows, ways)
        tilted = outs.pop() if ways[-1].tilted else None
        for out in outs:
            one = measures(out, exact, problem.out_dtype, tilted)
            gain, scale = (_BY_CHANCE * off for off in by_chance(out, exact, tilted, in_all))
            if cut_sums:  # they shrink: that is no chance
                gain, scale = max(one.gain, gain), max(one.scale, scale)
            # It counts only where few weights do that the largest is rounded too.
            row = one.row if hard or cut_sums or out is outs[0] else 0.0
            found.append(replace(one, row=row, gain=gain, scale=scale))
        found = [largest(found)]
        yield found[0]
        rows_seen += heads * len(rows)
        seed += 1


@lru_cache(maxsize=16)
def scale_of_rounding(case: Case, seed: int, rounds_scores: int) -> float:
    """The change of the softmax scale that fits what rounding the scores of these inputs costs.

    In bf16 it has a standard error of 2e-4, half the limit, but is the same for all right kernels.
    """
    rounds_scores = rounded_scores(case.problem, rounds_scores)
    if case.problem.format.cut_sums or not rounds_scores:
        return 0.0
    ways = [EXACT, replace(EXACT, tilted=True), ForwardMaths(True, rounds_scores)]
    rows = np.arange(case.problem.seqlen_q)
    exact, tilted, out = references(make_inputs(case, seed), case.problem, rows, ways)
    return fitted_scale(out - exact, tilted - exact)
