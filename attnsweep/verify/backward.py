"""A backward by NumPy: its inputs, and its gradients in float64 and rounded.

A row of dK or dV is of a key, and has all queries of its heads. Since the log-sum-exp is an input,
it follows from that key alone: so some rows of dQ, and some of dK and dV, cost as little as some
rows of a forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from attnsweep.core.cases import Case
from attnsweep.core.layouts import DENSE
from attnsweep.core.masks import FULL
from attnsweep.core.ops import FORWARD
from attnsweep.core.problem import Problem
from attnsweep.core.threads import one_blas_thread, parallel
from attnsweep.verify import inputs as verify_inputs
from attnsweep.verify.encoding import Float, Tensor, round_to, to_bits, values_of
from attnsweep.verify.reference import exact_rows, hidden_keys, sampled_rows

Rows = npt.NDArray[np.int64]
Gradients = dict[str, Float]
"""dq (batch, heads, rows, head_dim); dk, dv (batch, heads_kv, keys, head_dim)."""
_BLOCK_ROWS = 256


def forward_of(problem: Problem) -> Problem:
    """The forward of the same tensors."""
    return replace(problem, op=FORWARD)


def make_inputs(case: Case, seed: int, *, windows: bool | None = None) -> dict[str, Tensor]:
    """The inputs of a forward, its o and lse, by the float64 reference, and dO: see inputs.py."""
    problem, forward = case.problem, forward_of(case.problem)
    given = verify_inputs.make_inputs(replace(case, problem=forward), seed, windows=windows)
    rng, shape = np.random.default_rng((seed, 7)), problem.shape_of("do")
    do = rng.standard_normal(shape, dtype=np.float32)
    if case.inputs == "exact":
        do = rng.integers(-1, 2, shape).astype(np.float32)
    ((o, lse),) = exact_rows(given, forward, np.arange(problem.seqlen_q))
    with np.errstate(over="ignore"):
        stored = to_bits(o, problem.dtype)
    of_o = {"o": stored, "lse": lse.astype(np.float32), "do": to_bits(do, problem.dtype)}
    return {**given, **of_o}


def of_keys(problem: Problem) -> Problem:
    """The problem with as many queries as keys, by which keys are sampled as queries are."""
    rows, keys = problem.seqlen_k, problem.seqlen_q
    return replace(problem, seqlen_q=rows, seqlen_k=keys, mask=FULL, layout=DENSE)


def sampled(problem: Problem, seed: int, flops: float | None = None) -> tuple[Rows, Rows]:
    """Queries and keys whose gradients NumPy computes in every head: see sampled_rows."""
    most = {} if flops is None else {"flops": flops}
    return sampled_rows(problem, seed, **most), sampled_rows(of_keys(problem), seed + 1, **most)


def rows_of(problem: Problem, output: str) -> int:
    """Number of rows of an output that can be other than 0: of queries and keys with a pair."""
    if output == "dq":
        return problem.heads * problem.rows_with_keys
    low, high = problem.diagonals
    last = problem.seqlen_q - 1 + high
    seen = (min(end, last + 1) - max(first, low) for first, end in problem.key_ranges)
    return problem.heads_kv * sum(max(0, count) for count in seen)


# Rows of dQ and dK count at least as this share of what one key of weight 1 would make of typical
# inputs: dP - delta may cancel to nothing, as where a query sees one key, and leaves noise of fp32
# sums, of about 1e-6 of dP.
_LEAST = 4e-3


def least_lengths(inputs: Mapping[str, Tensor], problem: Problem) -> dict[str, float]:
    """The least norm by which a row's error of each output is divided."""

    def typical(name: str) -> float:
        heads = product(range(problem.batch), range(problem.shape_of(name)[1]))
        rows = [values_of(inputs, problem, name, *at) for at in heads]
        if name in "kv":  # padding may have any size
            ranges = np.repeat(problem.key_ranges, problem.heads_kv, axis=0)
            rows = [each[first:end] for each, (first, end) in zip(rows, ranges, strict=True)]
        squares = [np.square(each).sum(axis=1) for each in rows]
        count = max(1, sum(map(len, squares)))
        return math.sqrt(sum(float(each.sum(dtype=np.float64)) for each in squares) / count)

    dp = typical("do") * typical("v") / math.sqrt(problem.head_dim)
    # Weights of a query add up to 1, and those of a key to more where there are few keys.
    queries = problem.heads // problem.heads_kv * problem.seqlen_q
    of_one = {
        "dq": typical("k"),
        "dk": typical("q") * max(1.0, math.sqrt(queries) / problem.seqlen_k),
    }
    return {n: _LEAST * problem.scale * dp * size for n, size in of_one.items()} | {"dv": 0.0}


@dataclass(frozen=True, slots=True)
class BackwardMaths:
    """How gradients are computed: in float64, or rounded as a kernel rounds.

    rounding: scores, P and dP in fp32; P, dS and outputs rounded to the problem's dtype. from_p: dS
    is made of the rounded P.
    """

    rounding: bool = False
    from_p: bool = False


EXACT = BackwardMaths()
ROUNDED = (BackwardMaths(rounding=True), BackwardMaths(rounding=True, from_p=True))


def gradients(
    inputs: Mapping[str, Tensor],
    problem: Problem,
    rows: Rows,
    keys: Rows,
    maths: Sequence[BackwardMaths] = (EXACT,),
) -> list[Gradients]:
    """dQ of these queries, dK and dV of these keys, of every head, by each of the maths."""
    group, dim, dtype = problem.heads // problem.heads_kv, problem.head_dim, problem.dtype
    of_q = (problem.batch, problem.heads, len(rows), dim)
    of_k = (problem.batch, problem.heads_kv, len(keys), dim)
    made = [{"dq": np.empty(of_q), "dk": np.zeros(of_k), "dv": np.zeros(of_k)} for _ in maths]
    given: Any = inputs
    all_keys, all_rows = np.arange(problem.seqlen_k), np.arange(problem.seqlen_q)

    def one(batch: int, head_kv: int) -> None:
        k, v = (values_of(inputs, problem, name, batch, head_kv) for name in "kv")
        for head in range(head_kv * group, (head_kv + 1) * group):
            of_head(batch, head, k, v)

    def of_head(batch: int, head: int, k: npt.NDArray[Any], v: npt.NDArray[Any]) -> None:
        q, o, do = (values_of(inputs, problem, name, batch, head) for name in ("q", "o", "do"))
        lse = given["lse"][batch, head]

        def parts(of: Rows, seen: Rows, how: BackwardMaths) -> tuple[npt.NDArray[Any], ...]:
            hidden = hidden_keys(problem, of, batch)[:, seen]
            own = q[of], k[seen], v[seen], o[of], do[of], lse[of]
            return _p_and_ds(own, hidden, problem, how)

        for how, to in zip(maths, made, strict=True):
            kind: Any = np.float32 if how.rounding else np.float64
            scale = kind(problem.scale)
            for begin in range(0, len(rows), _BLOCK_ROWS):
                _, ds = parts(rows[begin : begin + _BLOCK_ROWS], all_keys, how)
                found = ds @ k.astype(kind) * scale
                to["dq"][batch, head, begin : begin + _BLOCK_ROWS] = found
            for begin in range(0, problem.seqlen_q, _BLOCK_ROWS):
                some = all_rows[begin : begin + _BLOCK_ROWS]
                p, ds = parts(some, keys, how)
                to["dv"][batch, head // group] += p.T @ do[some].astype(kind)
                to["dk"][batch, head // group] += ds.T @ q[some].astype(kind) * scale

    heads = list(product(range(problem.batch), range(problem.heads_kv)))
    with one_blas_thread():
        small = problem.min_bytes < 2**20
        list((map if small else parallel)(one, *zip(*heads, strict=True)))
    for how, to in zip(maths, made, strict=True):
        if how.rounding:
            to |= {name: round_to(values, dtype).astype(np.float64) for name, values in to.items()}
    return made


def _p_and_ds(
    own: tuple[npt.NDArray[Any], ...],
    hidden: npt.NDArray[np.bool_],
    problem: Problem,
    how: BackwardMaths,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """P and dS = P * (dO V^T - sum(dO * O)) of some queries and keys of a head."""
    kind: Any = np.float32 if how.rounding else np.float64
    q, k, v, o, do, lse = (x.astype(kind) for x in own)
    scores = q @ k.T * kind(problem.scale)
    scores[hidden] = -np.inf
    # A query that sees no key has no weights, whatever is subtracted.
    p = np.exp(scores - np.where(np.isneginf(lse), 0, lse)[:, None])
    dp = do @ v.T - (do * o).sum(axis=1, keepdims=True)
    if not how.rounding:
        return p, p * dp
    rounded = round_to(p, problem.dtype)
    return rounded, round_to((rounded if how.from_p else p) * dp, problem.dtype)
