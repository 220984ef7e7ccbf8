"""Attention as a candidate rounds it: the same maths in the candidate's dtype. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from attnsweep.core.problem import Problem
from attnsweep.core.threads import one_blas_thread, parallel
from attnsweep.verify import fp8
from attnsweep.verify.encoding import Float, Tensor, round_to, values_of
from attnsweep.verify.measures import TILT
from attnsweep.verify.paging import gathered
from attnsweep.verify.reference import (
    _BLOCK_ROWS,
    _BLOCK_ROWS_OF_LONG,
    divisors,
    exponentials,
    finished,
    hidden_keys,
    log_sums,
    sink_of,
)

# Exponents up to this: e^9 is 8103, and sums of such probabilities fit fp16.
_MOST = 9.0


@dataclass(frozen=True, slots=True)
class ForwardMaths:
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


EXACT = ForwardMaths()


def reference(
    inputs: Mapping[str, Tensor],
    problem: Problem,
    rows: npt.NDArray[np.int64],
    maths: ForwardMaths = EXACT,
) -> Float:
    """The attention rows (batch, heads, len(rows), columns of o) in float64."""
    return references(inputs, problem, rows, [maths])[0]


def references(
    inputs: Mapping[str, Tensor],
    problem: Problem,
    rows: npt.NDArray[np.int64],
    maths: Sequence[ForwardMaths],
) -> list[Float]:
    """The rows by each of several maths, which share their scores and exponentials."""
    inputs, problem = gathered(inputs, problem)
    group = problem.heads // problem.heads_kv
    shape = (problem.batch, problem.heads, len(rows), problem.value_dim)
    outs = [np.empty(shape) for _ in maths]

    size = _BLOCK_ROWS if problem.seqlen_k <= 2**15 else _BLOCK_ROWS_OF_LONG

    def one(batch: int, head: int, begin: int) -> None:
        some = rows[begin : begin + size]
        q = values_of(inputs, problem, "q", batch, head, some)
        k, v = (values_of(inputs, problem, name, batch, head // group) for name in "kv")
        hidden = None if problem.kind == "full" else hidden_keys(problem, some, batch)
        of_head = (inputs, problem, some, batch, head)
        sink = sink_of(inputs, problem, head)
        rounds = _attend(q, k, v, hidden, problem, maths, lambda s: finished(s, *of_head), sink)
        for out, rounded in zip(outs, rounds, strict=True):
            out[batch, head, begin : begin + size] = rounded

    blocks = range(0, len(rows), size)
    every = product(range(problem.batch), range(problem.heads), blocks)
    # A thread a block, or none for small ones.
    with one_blas_thread():
        list((map if outs[0].size < 2**16 else parallel)(one, *zip(*every, strict=True)))
    return outs


def _attend(
    q: npt.NDArray[Any],
    k: npt.NDArray[Any],
    v: npt.NDArray[Any],
    hidden: npt.NDArray[np.bool_] | None,
    problem: Problem,
    maths: Sequence[ForwardMaths],
    finish: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
    sink: float,
) -> Iterator[npt.NDArray[Any]]:
    """Some rows of one head (rows, columns of o), by each of the maths. hidden: keys not to see.

    finish: makes of scaled scores those of the softmax. sink: one more score of each row.
    """
    dtype = problem.dtype

    @cache
    def raw_scores(kind: Any) -> npt.NDArray[Any]:
        scores: npt.NDArray[Any] = q.astype(kind) @ k.astype(kind).T
        if hidden is not None:  # before they are rounded: those of padding may overflow
            scores[hidden] = -np.inf
        return scores

    @cache
    def from_largest(
        kind: Any, rounds_scores: int, tilt: float, unit: float
    ) -> tuple[npt.NDArray[Any], ...]:
        """exp(score - largest), their sums, and by what to multiply to refer to the first key."""
        scores = raw_scores(kind)
        if rounds_scores > 1:
            scores = round_to(scores, dtype).astype(kind)
        scores = scores * kind(problem.scale * (1 + tilt) / unit)
        if rounds_scores:
            scores = round_to(scores, dtype).astype(kind)
        if unit != 1:
            scores *= kind(unit)
        scores = finish(scores)
        if hidden is not None:  # tanh has made them finite
            scores[hidden] = -np.inf
        of_first = scores[:, :1].copy()
        p, largest, sums = exponentials(scores, sink)
        return p, sums, np.exp(largest - np.maximum(largest - _MOST, of_first))

    @cache
    def fp8_scores(by_term: bool) -> npt.NDArray[Any]:
        scores = fp8.matmul(q, k.T, by_term=by_term) * problem.scale
        if hidden is not None:
            scores[hidden] = -np.inf
        return scores

    for one in maths:
        if one.rounding and problem.format.cut_sums:
            yield fp8.attend(fp8_scores(one.by_term), v, problem, one)
            continue
        kind: Any = np.float32 if one.rounding and dtype == "fp32" else np.float64
        tilt = TILT if one.tilted else 0.0
        unit = math.log(2) if one.in_log2 else 1.0
        rounds = one.rounds_scores if one.rounding else 0
        p, sums, to_first = from_largest(kind, rounds, tilt, unit)
        if one.from_first:
            p, sums = p * to_first, sums * to_first
        total = divisors(sums)
        if not one.rounding:
            yield p @ v.astype(kind) / total
        # Rounded factors have few bits: float32 adds their products as well as float64 here.
        elif one.rounds_scores:
            yield round_to(round_to(p / total, dtype) @ v, dtype)
        else:
            yield round_to(round_to(p, dtype) @ v / total, dtype)


def log_sum_exp(
    inputs: Mapping[str, Tensor],
    problem: Problem,
    rows: npt.NDArray[np.int64],
    *,
    in_fp8: ForwardMaths | None = None,
) -> npt.NDArray[np.float64]:
    """ln(sum(exp(score))) of the rows over the keys that each sees, (batch, heads, len(rows)).

    In float64; scores are scaled. What a kernel that writes the log-sum-exp must have written.
    in_fp8: of scores as Hopper's FP8 products add them, by this maths.
    """
    inputs, problem = gathered(inputs, problem)
    group = problem.heads // problem.heads_kv
    out = np.empty((problem.batch, problem.heads, len(rows)))

    def one(batch: int, head: int) -> None:
        queries = values_of(inputs, problem, "q", batch, head, rows).astype(np.float64)
        keys = values_of(inputs, problem, "k", batch, head // group).astype(np.float64)
        product = (
            fp8.matmul(queries, keys.T, by_term=in_fp8.by_term) if in_fp8 else queries @ keys.T
        )
        scores = finished(product * problem.scale, inputs, problem, rows, batch, head)
        scores[hidden_keys(problem, rows, batch)] = -np.inf
        _, largest, sums = exponentials(scores, sink_of(inputs, problem, head))
        out[batch, head] = log_sums(sums, largest)

    heads = np.indices((problem.batch, problem.heads)).reshape(2, -1).tolist()
    with one_blas_thread():
        list((map if out.size * problem.seqlen_k < 2**20 else parallel)(one, *heads))
    return out
