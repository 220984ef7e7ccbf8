"""The limits of error of a backward's outputs, by NumPy alone: see limits.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np

from attnsweep.core.cases import TILE, Case
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.verify.backward import (
    EXACT,
    ROUNDED,
    Rows,
    gradients,
    least_lengths,
    make_inputs,
    of_keys,
    rows_of,
)
from attnsweep.verify.measures import Measures, Same, by_chance, largest, measures, more_near_zero
from attnsweep.verify.reference import tiles_of_rows

# Multiples of the errors of the rounded maths, and the least limits: as those of a forward in
# limits.py, but rms, which adds of dQ in bf16 exceed by two.
_TIMES = Measures(row=2, element=3, rms=1.15, row_gain=3, tile_gain=4, gain=1)
_HALF_ULP = {"fp16": 2.0**-11, "bf16": 2.0**-8}
_SYSTEMATIC, _CUT_PER_TERM, _BY_CHANCE = 1e-4, 2e-9, 2.5
# Hard inputs have few rows that cancel almost to nothing, whose errors are the largest by far.
_TIMES_HARD = 3
_AVERAGES, _ROWS, _DRAWS, _DRAWS_HARD = 512, 512, 48, 16
_ALL_ROWS = 6144
"""Rows of all draws, at least. Gains of tiles with few rows vary most: of 14 draws of 150 rows the
largest was a typical one, and the largest of 528 right heads was over its fourfold in two of seven
runs."""
_LONG = 8192  # queries


def _rows(problem: Problem, seed: int) -> Rows:
    """Rows to learn the errors from: all of a few, or some tiles."""
    if problem.seqlen_q <= 2 * _ROWS:
        return np.arange(problem.seqlen_q)
    return tiles_of_rows(problem, seed, _ROWS)


@lru_cache(maxsize=256)
def same_maths(case: Case) -> Same:
    """The largest error of each output when the same maths rounds as a kernel does.

    Of some rows of some draws of inputs.
    """
    return [*each_draw(case)][-1]


def each_draw(case: Case) -> Iterator[Same]:
    """Errors as of `same_maths` after each draw of inputs: none falls, and the last are its own."""
    whole = case.problem
    items = min(whole.batch, 4) if whole.items_differ else 1
    group = 1 + (whole.heads > whole.heads_kv)  # sums over query heads
    few = replace(case, problem=replace(whole, batch=items, heads=group, heads_kv=1))
    problem, found = few.problem, {name: Measures(0, 0) for name in whole.outputs}
    hard = case.inputs != "normal" or whole.seqlen_k < TILE
    # The whole forward of a head of 16,384 takes 6 s.
    draws = 1 + (whole.seqlen_q < _LONG)
    drawn = items * whole.seqlen_q
    draws = _DRAWS_HARD if hard else min(_DRAWS, max(draws, ceil_div(_ALL_ROWS, drawn)))
    for seed in range(draws):
        inputs = make_inputs(few, 1000 + seed, windows=False)
        rows, keys = (_rows(each, seed) for each in (problem, of_keys(problem)))
        least = least_lengths(inputs, problem)
        exact, *outs = gradients(inputs, problem, rows, keys, (EXACT, *ROUNDED))
        for name, out in product(whole.outputs, outs):
            one = measures(out[name], exact[name], whole.dtype, least=least[name])
            rows_there = max(1, rows_of(whole, name))
            gain, _ = by_chance(out[name], exact[name], None, rows_there, least[name])
            found[name] = largest((replace(one, gain=_BY_CHANCE * gain), found[name]))
        yield dict(found)


def limits(case: Case, same: Same) -> dict[str, Measures]:
    """The largest measures of right outputs. same: of `same_maths`."""
    problem, half = case.problem, _HALF_ULP[case.problem.dtype]
    most = max(problem.seqlen_k, problem.heads // problem.heads_kv * problem.seqlen_q)
    made = {}
    for name, of in same.items():
        hard = case.inputs != "normal"
        times = replace(_TIMES, row=_TIMES_HARD, element=2 * _TIMES_HARD) if hard else _TIMES
        times = more_near_zero(times, problem.head_dim)
        row, element = max(times.row * of.row, half), max(times.element * of.element, half)
        if not (row < np.inf and element < np.inf):  # anything would be within it
            raise ArithmeticError(f"the rounded maths of {case.label} has no finite error")
        if hard or rows_of(problem, name) < _AVERAGES:
            made[name] = Measures(row, element, *[np.inf] * 5)
            continue
        gain, cut = max(_SYSTEMATIC, 2 * of.gain), _CUT_PER_TERM * most
        made[name] = Measures(
            row,
            element,
            max(times.rms * of.rms, half / 4),
            max(times.row_gain * of.row_gain, half / 2, gain) + cut,
            max(times.tile_gain * of.tile_gain, half / 8, gain) + cut,
            gain + cut,
            np.inf,
        )
    return made
