"""Inputs, the float64 reference, and the error limit. NumPy only: readable, testable anywhere.

A candidate is right if, on every case, each output row is within `limit` of float64, where limit is
twice the error that the same maths makes in the candidate's dtypes. Code compares by
`err <= limit`, so that a NaN fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from attnsweep.problem import Problem, ceil_div

Float = npt.NDArray[np.float64]
Bits = npt.NDArray[Any]
Inputs = Literal["normal", "large_scores", "equal_keys", "negative_scores"]

# No limit is below the error of rounding the output alone: half an ulp of 1. For fp32 it is the
# error of sums of 8192 products, where PyTorch errs by 1e-7 to 3e-6 and one TF32 product by 3e-4.
HALF_ULP = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 5e-6}
# Storage of +infinity; a larger magnitude is a NaN.
INFINITY_BITS = {"fp16": 0x7C00, "bf16": 0x7F80, "fp32": 0x7F800000}
# FLOPs of the reference of one case: all rows of (1,16,1024,64), 150 of (4,16,4096,128).
_REFERENCE_FLOPS = 2e10
# Fewest and most rows over which the error of the same maths is taken. The largest error of a few
# rows depends on luck, and that of many rows grows with their number, so a big case gets many.
_LIMIT_ROWS = (256, 1024)


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

    Tails in both directions, one query, one key, grouped heads, seqlen_q != seqlen_k; large scores
    (softmax nearly one-hot), all keys equal (softmax uniform), every score far below zero.
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
        case(1, 1, 130, 255, "negative_scores"),
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
    """q, k, v of the case in storage form; the same seed gives the same inputs."""

    def one(name: str, rng: np.random.Generator) -> Bits:
        values = rng.standard_normal(case.problem.shape_of(name), dtype=np.float32)
        if case.inputs == "large_scores" and name == "q":
            values *= 8
        elif case.inputs == "equal_keys" and name == "k":
            values[:] = values[:, :, :1]
        elif case.inputs == "negative_scores" and name in "qk":
            # Products are near -1, so scores are near -sqrt(head_dim), below an initial max of 0.
            values = values * 0.25 + (1 if name == "q" else -1)
        return to_bits(values, case.problem.dtype)

    generators = np.random.default_rng(seed).spawn(3)
    large = case.problem.min_bytes > 2**20
    made = (_parallel if large else map)(one, "qkv", generators)
    return dict(zip("qkv", made, strict=True))


def _parallel(function: Callable[..., Any], *arguments: Iterable[Any]) -> list[Any]:
    """Call it in threads, as NumPy releases the GIL: 3 s less for (4,16,4096,128) on 16 cores."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, *arguments))


def sampled_rows(problem: Problem, seed: int) -> npt.NDArray[np.int64]:
    """Query rows that the reference computes in every head: all of them if that is cheap.

    Otherwise the first, the last, both sides of tile edges, and random ones.
    """
    per_row = 4 * problem.batch * problem.heads * problem.seqlen_k * problem.head_dim
    count = max(16, int(_REFERENCE_FLOPS / per_row))
    if count >= problem.seqlen_q:
        return np.arange(problem.seqlen_q)
    edges = [edge + side for edge in (16, 64, 128, 192, 256) for side in (-1, 0)]
    fixed = {0, problem.seqlen_q - 1, *(row for row in edges if row < problem.seqlen_q)}
    rng = np.random.default_rng(seed)
    some = rng.choice(problem.seqlen_q, size=count, replace=False)
    return np.array(sorted(fixed | set(some.tolist())))


def reference(
    inputs: dict[str, Bits],
    problem: Problem,
    rows: npt.NDArray[np.int64],
    *,
    rounding: bool = False,
    rounds_scores: int = 0,
) -> Float:
    """The attention rows (batch, heads, len(rows), head_dim) in float64.

    rounding: do the maths as a kernel does: round probabilities and output to the problem's dtype,
    and scores rounds_scores times: once if they are stored, twice if they are stored before and
    after scaling, as plain PyTorch does. The error of this sets the limit. For fp32 all of it is
    done in fp32, because a kernel's sums are no more exact than their terms.
    """
    kind: Any = np.float32 if rounding and problem.dtype == "fp32" else np.float64
    group = problem.heads // problem.heads_kv
    last_key = rows + problem.seqlen_k - problem.seqlen_q if problem.causal else None
    out = np.empty((problem.batch, problem.heads, len(rows), problem.head_dim))

    def one(batch: int, head: int) -> None:
        queries, keys, values = (
            from_bits(bits, problem.dtype).astype(kind)
            for bits in (
                inputs["q"][batch, head, rows],
                inputs["k"][batch, head // group],
                inputs["v"][batch, head // group],
            )
        )
        scores = queries @ keys.T
        if rounding and rounds_scores > 1:
            scores = round_to(scores, problem.dtype).astype(kind)
        scores *= problem.scale
        if rounding and rounds_scores:
            scores = round_to(scores, problem.dtype).astype(kind)
        if last_key is not None:
            scores[np.arange(problem.seqlen_k) > last_key[:, None]] = -np.inf
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        total = p.sum(axis=1, keepdims=True)
        if not rounding:
            out[batch, head] = p @ values / total
        elif rounds_scores:
            out[batch, head] = round_to(p / total, problem.dtype) @ values
        else:
            out[batch, head] = round_to(p, problem.dtype) @ values / total

    heads = np.indices((problem.batch, problem.heads)).reshape(2, -1).tolist()
    if out.size < 2**16:  # threads would cost more than they save
        for batch, head in zip(*heads, strict=True):
            one(batch, head)
    else:
        _parallel(one, *heads)
    return round_to(out, problem.dtype).astype(np.float64) if rounding else out


def row_error(out: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """Largest ‖out - expected‖ / ‖expected‖ over rows; NaN if any element is NaN.

    A row whose expected norm is under a thousandth of the typical one is divided by that thousandth
    instead. The computation is in the dtype of `expected`.
    """
    norms = np.sqrt(np.einsum("...d,...d->...", expected, expected))
    floor = 1e-3 * float(np.sqrt(np.mean(norms.astype(np.float64) ** 2)))
    difference = out.astype(expected.dtype, copy=False) - expected
    errors = np.sqrt(np.einsum("...d,...d->...", difference, difference))
    return float((errors / np.maximum(norms, floor)).max())


def error_limit(case: Case, rounds_scores: int) -> float:
    """Twice the error of the same maths in the candidate's dtypes, and at least HALF_ULP."""
    return max(2 * _same_maths_error(case)[rounds_scores], HALF_ULP[case.problem.dtype])


@lru_cache(maxsize=256)
def _same_maths_error(case: Case) -> tuple[float, float, float]:
    """Error of the rounded maths with scores rounded 0, 1 and 2 times."""
    checked = case.problem.batch * case.problem.heads * len(sampled_rows(case.problem, 0))
    wanted = min(max(checked, _LIMIT_ROWS[0]), _LIMIT_ROWS[1])
    # Heads are alike, so four of them show the dtype's error: 7.5 s less at (4,16,4096,128).
    heads = min(case.problem.heads, 4)
    problem = replace(case.problem, batch=1, heads=heads, heads_kv=heads)
    case = replace(case, problem=problem)
    worst = [0.0, 0.0, 0.0]
    rows_seen, seed = 0, 0
    while rows_seen < wanted:
        rows = sampled_rows(problem, seed)
        if len(rows) * heads > wanted:
            rows = rows[:: ceil_div(len(rows) * heads, wanted)]
        inputs = make_inputs(case, 1000 + seed)
        exact = reference(inputs, problem, rows)
        for times in range(1 if case.problem.dtype == "fp32" else 3):
            rounded = reference(inputs, problem, rows, rounding=True, rounds_scores=times)
            worst[times] = max(worst[times], row_error(rounded, exact))
        rows_seen += heads * len(rows)
        seed += 1
    if case.problem.dtype == "fp32":  # storing fp32 scores does not round them
        worst = worst[:1] * 3
    return worst[0], worst[1], worst[2]
