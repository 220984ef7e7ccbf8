"""Hints at a mistake: the variant that an output is right for, or which rows are wrong.

A hint is no verdict. It is taken of the first item of a batch, by NumPy, once something is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from attnsweep.core.cases import TILE
from attnsweep.core.masks import CAUSAL, FULL
from attnsweep.core.problem import Problem
from attnsweep.verify import reference

Values = npt.NDArray[np.float32]
# An output this near to that of a mistake, as a share of a row's length, is the mistake's.
_NEAR = 0.03


def hints(
    made: Values, given: Mapping[str, Values], problem: Problem, limit: float, seed: int = 0
) -> list[str]:
    """Sentences about a wrong output; none if nothing is recognised.

    made: o (1, heads, seqlen_q, value_dim). given: q, k, v. problem: of one item, in fp32, without
    other inputs. limit: of the error of a row.
    """
    rows = reference.sampled_rows(problem, seed)

    def off(o: Values, of: Mapping[str, Values], as_if: Problem) -> npt.NDArray[np.float64]:
        ((exact, _),) = reference.exact_rows(of, as_if, rows)
        length = np.linalg.norm(exact[0], axis=-1)
        least = 0.1 * float(np.median(length)) + 1e-30
        return np.asarray(
            np.linalg.norm(o[0][:, rows] - exact[0], axis=-1) / np.maximum(length, least)
        )

    found = [
        f"it is what {words} gives"
        for words, o, of, as_if in _mistakes(made, given, problem)
        if np.mean(off(o, of, as_if) <= _NEAR) > 0.98
    ]
    return found or _places(~(off(made, given, problem) <= limit), rows, problem)


def _mistakes(
    made: Values, given: Mapping[str, Values], problem: Problem
) -> Iterator[tuple[str, Values, Mapping[str, Values], Problem]]:
    """Common mistakes: words, and the output, inputs and problem that each is right for."""
    q, k, v = (given[name] for name in "qkv")
    usual, scale = problem.head_dim**-0.5, problem.scale
    scales = {"no scale": 1 / scale, "the scale taken twice": scale}
    scales |= {"1 / sqrt(head_dim) as the scale": usual / scale}
    for words, times in {**scales, "exp2 in the place of exp": math.log(2)}.items():
        if not math.isclose(times, 1):  # which is no mistake
            yield words, made, {**given, "q": q * np.float32(times)}, problem
    keys, mask = problem.seqlen_k, problem.mask
    if mask == FULL:
        yield "a causal mask", made, given, replace(problem, mask=CAUSAL)
        if whole := keys // TILE * TILE % keys:
            few = {**given, "k": k[:, :, :whole], "v": v[:, :, :whole]}
            words = f"the first {whole} keys, without the last tile, which is not full,"
            yield words, made, few, replace(problem, seqlen_k=whole)
    else:
        yield "no mask", made, given, replace(problem, mask=FULL)
        if problem.seqlen_q != keys and mask.pattern is None:
            other = replace(mask.interval, top_left=not mask.interval.top_left)
            words = f"a mask aligned {'top-left' if other.top_left else 'bottom-right'}"
            yield words, made, given, replace(problem, mask=other)
        if mask == CAUSAL and keys > 1:
            few = {**given, "k": k[:, :, :-1], "v": v[:, :, :-1]}
            yield "a mask that hides the diagonal", made, few, replace(problem, seqlen_k=keys - 1)
    heads, of_keys = problem.heads, problem.heads_kv
    if 1 < of_keys < heads:
        turns = np.arange(heads) % of_keys
        each = {**given, "k": k[:, turns], "v": v[:, turns]}
        words = "key head h % heads_kv for head h, not h // (heads / heads_kv),"
        yield words, made, each, replace(problem, heads_kv=heads)
    if heads > 1 < problem.seqlen_q:
        shape = (1, problem.seqlen_q, heads, problem.value_dim)
        turned = made.reshape(shape).swapaxes(1, 2)
        yield "memory of (batch, seqlen, heads, head_dim)", turned, given, problem


def _places(
    wrong: npt.NDArray[np.bool_], rows: npt.NDArray[np.int64], problem: Problem
) -> list[str]:
    """Say where errors are, if these have something in common. wrong: (heads, rows looked at)."""
    heads, at = np.flatnonzero(wrong.any(1)), rows[wrong.any(0)]
    found, last = [], problem.seqlen_q // TILE * TILE
    if 0 < len(heads) < problem.heads:
        which = ", ".join(map(str, heads[:8])) + (" and more" if len(heads) > 8 else "")
        found.append(
            f"of the first item only these heads are wrong, in the rows looked at: {which}"
        )
    if 0 < len(at) < len(rows):
        if at.min() >= last > 0:
            found.append(f"only rows from {last} on are wrong: the last tile, which is not full")
        elif len({*(at % TILE)}) == 1 < len(at):
            found.append(f"only row {at[0] % TILE} of each {TILE} is wrong")
        elif len({*(at // TILE)}) == 1 and problem.seqlen_q > TILE:
            begin = at[0] // TILE * TILE
            found.append(f"only rows of {begin} to {begin + TILE - 1} are wrong")
    return found
