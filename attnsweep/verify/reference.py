"""The float64 reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from attnsweep.core import boolean_masks
from attnsweep.core.cases import TILE, Case
from attnsweep.core.problem import Problem, ceil_div
from attnsweep.core.threads import one_blas_thread, parallel
from attnsweep.verify.encoding import Float, Tensor, from_bits, values_of
from attnsweep.verify.paging import gathered

# FLOPs of NumPy's reference of one case. On the device every row is judged; these rows prove the
# device's reference: all of (1,8,512,64), 15 of (4,16,4096,128), others in each run.
_REFERENCE_FLOPS = 2e9
# Rows that are computed at once, scores of 32,768 keys then take 32 MB; and of more keys, so that
# 16 cores have a block each.
_BLOCK_ROWS, _BLOCK_ROWS_OF_LONG = 128, 64


def hidden_keys(problem: Problem, rows: npt.NDArray[np.int64], item: int) -> npt.NDArray[np.bool_]:
    """(rows, seqlen_k): the keys that these query rows of an item of the batch do not see."""
    if problem.mask.pattern is not None:
        return ~boolean_masks.seen(problem, rows, item)
    low, high = problem.diagonals
    first, end, beside = boolean_masks.keys_of_rows(problem, rows, item)
    keys = np.arange(problem.seqlen_k)
    after = keys - rows[:, None] - beside
    hidden: npt.NDArray[np.bool_] = (after < low) | (after > high) | (keys < first) | (keys >= end)
    return hidden


def rows_with_keys(problem: Problem) -> npt.NDArray[np.bool_]:
    """(batch, seqlen_q): the query rows that see a key."""
    rows, items = np.arange(problem.seqlen_q), range(problem.batch)
    if problem.mask.pattern is not None:
        return np.stack([~hidden_keys(problem, rows, item).all(axis=1) for item in items])
    low, high = problem.diagonals

    def of_item(item: int) -> npt.NDArray[np.bool_]:
        first, end, beside = boolean_masks.keys_of_rows(problem, rows, item)
        own = rows[:, None] + beside
        some: npt.NDArray[np.bool_] = np.maximum(own + low, first) <= np.minimum(
            own + high, end - 1
        )
        return some[:, 0]

    return np.stack([of_item(item) for item in items])


def finished(
    scores: npt.NDArray[Any],
    inputs: Mapping[str, Tensor],
    problem: Problem,
    rows: npt.NDArray[np.int64],
    batch: int,
    head: int,
) -> npt.NDArray[Any]:
    """Scaled scores (rows, seqlen_k) of a query head as the problem's `scores` change them.

    A bias is added in float32, as PyTorch does: of scores beside -1e9 nothing is left, and a sum of
    two of the least finite numbers is minus infinity, which hides the key.
    """
    how, kind = problem.scores, scores.dtype.type
    if how.softcap:
        cap = kind(how.softcap)
        scores = cap * np.tanh(scores / cap)
    if how.bias is not None:
        item, own = batch * ("item" in how.bias), head * ("head" in how.bias)
        bits = inputs["bias"][item, own][rows, : problem.seqlen_k]
        with np.errstate(over="ignore"):
            scores = (scores + from_bits(bits, problem.dtype).astype(kind)).astype(np.float32)
        scores = scores.astype(kind)
    return scores


def sink_of(inputs: Mapping[str, Tensor], problem: Problem, head: int) -> float:
    """The score that a query head has beside its keys'; minus infinity is none."""
    given: Any = inputs["sinks"] if problem.scores.sinks else {head: -np.inf}
    return float(given[head])


def exponentials(
    scores: npt.NDArray[Any], sink: float = -np.inf
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """exp(score - largest) of rows of scores, in their place; the largest; and the rows' sums.

    The largest is 0 of an empty row, whose exponentials are 0. sink: counts in the sums too.
    """
    largest = np.maximum(scores.max(axis=1, keepdims=True), scores.dtype.type(sink))
    largest[np.isneginf(largest)] = 0
    scores -= largest
    p = np.exp(scores, out=scores)
    return p, largest, p.sum(axis=1, keepdims=True) + np.exp(sink - largest)


def divisors(sums: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The sums by which to divide rows; 1 of an empty row."""
    return np.where(sums > 0, sums, 1)


def log_sums(sums: npt.NDArray[Any], largest: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Log-sum-exps of rows, of what `exponentials` returns."""
    with np.errstate(divide="ignore"):
        log_sums: npt.NDArray[Any] = (largest + np.log(sums))[:, 0]
    return log_sums


def sampled_rows(
    problem: Problem, seed: int, flops: float = _REFERENCE_FLOPS
) -> npt.NDArray[np.int64]:
    """Query rows that NumPy's reference computes in every head: all of them if that is cheap.

    Otherwise the first, the last, both sides of tile edges, and random ones by `seed`. There are
    at least 8 random rows of each head, and more if all of them cost at most `flops`.
    """
    per_row = 2 * problem.batch * problem.heads * problem.seqlen_k * sum(problem.head_dims)
    count = max(8, int(flops / per_row))
    if count >= problem.seqlen_q:
        return np.arange(problem.seqlen_q)
    edges = [edge + side for edge in (16, 64, 128, 192, 256) for side in (-1, 0)]
    fixed = {0, problem.seqlen_q - 1, *(row for row in edges if row < problem.seqlen_q)}
    rng = np.random.default_rng(seed)
    some = rng.choice(problem.seqlen_q, size=count, replace=False)
    return np.array(sorted(fixed | set(some.tolist())))


def exact_rows(
    inputs: Mapping[str, Tensor],
    problem: Problem,
    rows: npt.NDArray[np.int64],
    signs: Sequence[int] = (1,),
) -> list[tuple[Float, Float]]:
    """`reference` and `log_sum_exp` of the rows, with k and v times each of the signs.

    Few rows cost less than to convert k and v, which happens once here.
    """
    inputs, problem = gathered(inputs, problem)
    group = problem.heads // problem.heads_kv
    shape = (problem.batch, problem.heads, len(rows))
    sides = [(np.empty((*shape, problem.value_dim)), np.empty(shape)) for _ in signs]
    with_bias = problem.scores.bias is not None

    def one(batch: int, head_kv: int) -> None:
        # Only the keys that the item has: in a batch with one long request, the others have few.
        first, end = (0, problem.seqlen_k) if with_bias else problem.key_ranges[batch]
        keys = slice(min(first, problem.seqlen_k - 1), max(end, first + 1))
        k, v = (
            values_of(inputs, problem, name, batch, head_kv, keys).astype(np.float64)
            for name in "kv"
        )
        for head in range(head_kv * group, (head_kv + 1) * group):
            for begin in range(0, len(rows), _BLOCK_ROWS):
                block = slice(begin, begin + _BLOCK_ROWS)
                some = rows[block]
                q = values_of(inputs, problem, "q", batch, head, some).astype(np.float64)
                scores = q @ k.T * problem.scale
                hidden = hidden_keys(problem, some, batch)[:, keys]
                for sign, (out, lse) in zip(signs, sides, strict=True):
                    signed = finished(scores * sign, inputs, problem, some, batch, head)
                    signed[hidden] = -np.inf
                    p, largest, sums = exponentials(signed, sink_of(inputs, problem, head))
                    out[batch, head, block] = p @ v / divisors(sums) * sign
                    lse[batch, head, block] = log_sums(sums, largest)

    heads = list(product(range(problem.batch), range(problem.heads_kv)))
    with one_blas_thread():
        small = problem.min_bytes < 2**20
        list((map if small else parallel)(one, *zip(*heads, strict=True)))
    return sides


def tiles_of_rows(problem: Problem, seed: int, most: int) -> npt.NDArray[np.int64]:
    """At most `most` rows of a head in whole tiles: the first, the last, and random ones.

    Only rows that see a key, if there are any: the others have no error.
    """
    there = np.arange(problem.seqlen_q)
    if problem.has_empty_rows and (seen := rows_with_keys(problem).any(axis=0)).any():
        there = there[seen]
    tiles = ceil_div(len(there), TILE)
    wanted = max(1, min(tiles, most // TILE))
    rng = np.random.default_rng(seed)
    some = rng.choice(tiles, size=wanted, replace=False).tolist()
    chosen = sorted({0, tiles - 1, *some} if wanted > 2 else {0, *some})
    rows = np.concatenate([np.arange(TILE * tile, TILE * tile + TILE) for tile in chosen])
    rows_there: npt.NDArray[np.int64] = there[rows[rows < len(there)]]
    return rows_there


def some_rows(case: Case, seed: int, most: int) -> npt.NDArray[np.int64]:
    """Rows to learn a dtype's error from: tiles, and of hard inputs a quarter of their rows.

    Those of one draw are alike, so that more draws tell more than more rows. The first rows stay,
    because they see few keys if the problem is causal; of a mask that is drawn, those that see
    the fewest are there, whose rounding averages least.
    """
    rows = tiles_of_rows(case.problem, seed, most)
    if case.problem.mask.pattern is not None:
        rows = np.unique(np.concatenate([rows, boolean_masks.fewest(case.problem, TILE)]))
    if case.inputs == "normal" or case.problem.format.cut_sums:
        return rows
    return np.unique(np.concatenate([rows[:8], rows[seed % 5 :: 5]]))
