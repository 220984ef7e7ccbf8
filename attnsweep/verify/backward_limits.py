"""The limits of error of a backward's outputs, by NumPy alone: see limits.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from itertools import product

import numpy as np

from attnsweep.core.cases import TILE, Case
from attnsweep.verify.backward import EXACT, ROUNDED, gradients, of_keys, rows_of
from attnsweep.verify.inputs import make_inputs
from attnsweep.verify.measures import Measures, by_chance, measures
from attnsweep.verify.reference import some_rows

# Multiples of the errors of the rounded maths, and the least limits: as those of a forward in
# limits.py, but rms, which adds of dQ in bf16 exceed by two.
_TIMES = Measures(row=2, element=3, rms=1.15, row_gain=3, tile_gain=4, gain=1)
_HALF_ULP = {"fp16": 2.0**-11, "bf16": 2.0**-8}
_SYSTEMATIC, _CUT_PER_TERM, _BY_CHANCE = 1e-4, 2e-9, 2.5
_AVERAGES, _ROWS, _DRAWS = 512, 512, 8
Same = Mapping[str, Measures]
"""The errors of the rounded maths, of each output."""


@lru_cache(maxsize=256)
def same_maths(case: Case) -> Same:
    """The largest errors of the rounded maths in some rows of some draws, of each output."""
    whole = case.problem
    few = replace(case, problem=replace(whole, batch=1, heads=1, heads_kv=1))
    if whole.heads > whole.heads_kv:  # sums over query heads
        few = replace(case, problem=replace(whole, batch=1, heads=2, heads_kv=1))
    problem, found = few.problem, {name: Measures(0, 0) for name in whole.outputs}
    for seed in range(_DRAWS if case.inputs != "normal" or whole.seqlen_k < TILE else 2):
        inputs = make_inputs(few, 1000 + seed, windows=False)
        rows = some_rows(few, seed, _ROWS)
        keys = some_rows(replace(few, problem=of_keys(problem)), seed, _ROWS)
        exact, *outs = gradients(inputs, problem, rows, keys, (EXACT, *ROUNDED))
        for name, out in product(whole.outputs, outs):
            one = measures(out[name], exact[name], whole.dtype)
            gain, _ = by_chance(out[name], exact[name], None, max(1, rows_of(whole, name)))
            one = replace(one, gain=_BY_CHANCE * gain)
            pairs = ((getattr(one, f.name), getattr(found[name], f.name)) for f in fields(one))
            found[name] = Measures(*map(max, pairs))
    return found


def limits(case: Case, same: Same) -> dict[str, Measures]:
    """The largest measures of right outputs. same: of `same_maths`."""
    problem, half = case.problem, _HALF_ULP[case.problem.dtype]
    most = max(problem.seqlen_k, problem.heads // problem.heads_kv * problem.seqlen_q)
    made = {}
    for name, of in same.items():
        row, element = max(_TIMES.row * of.row, half), max(_TIMES.element * of.element, half)
        if not (row < np.inf and element < np.inf):  # anything would be within it
            raise ArithmeticError(f"the rounded maths of {case.label} has no finite error")
        if case.inputs != "normal" or rows_of(problem, name) < _AVERAGES:
            made[name] = Measures(row, element, *[np.inf] * 5)
            continue
        gain, cut = max(_SYSTEMATIC, 2 * of.gain), _CUT_PER_TERM * most
        made[name] = Measures(
            row,
            element,
            max(_TIMES.rms * of.rms, half / 4),
            max(_TIMES.row_gain * of.row_gain, half / 2, gain) + cut,
            max(_TIMES.tile_gain * of.tile_gain, half / 8, gain) + cut,
            gain + cut,
            np.inf,
        )
    return made
