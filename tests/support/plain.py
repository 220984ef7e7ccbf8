"""Plain attention by its definition, in float64: what references are compared with."""

from typing import Any

import numpy as np

from attnsweep.core import boolean_masks
from attnsweep.core.problem import Problem
from attnsweep.verify.encoding import from_bits


def dense(problem: Problem, item: int = 0) -> Any:
    """(seqlen_q, seqlen_k): which keys the queries of an item of the batch see."""
    if problem.mask.pattern is not None:
        tensor = boolean_masks.tensor(problem)
        return tensor[item % len(tensor), 0]
    (low, high), (first, end) = problem.diagonals, problem.key_ranges[item]
    keys = np.arange(problem.seqlen_k)
    after = keys - np.arange(problem.seqlen_q)[:, None]
    return (low <= after) & (after <= high) & (first <= keys) & (keys < end)


def attention(inputs: Any, problem: Problem) -> tuple[Any, Any]:
    """Output and log-sum-exp of inputs without scales; 0 and minus infinity where no key is seen."""
    q, k, v = (from_bits(inputs[name], problem.dtype).astype(np.float64) for name in "qkv")
    group, how = problem.heads // problem.heads_kv, problem.scores
    scores = q @ k.repeat(group, 1).swapaxes(2, 3) * problem.scale
    if how.softcap:
        scores = how.softcap * np.tanh(scores / how.softcap)
    if how.bias is not None:
        bias = from_bits(inputs["bias"], problem.dtype)[..., : problem.seqlen_k]
        assert np.isneginf(bias).any()
        with np.errstate(over="ignore"):
            scores = (scores + bias).astype(np.float32).astype(np.float64)  # as PyTorch adds it
    seen = np.stack([dense(problem, item) for item in range(problem.batch)])[:, None]
    largest = scores.max(-1, keepdims=True, where=seen, initial=-1e300)
    largest = np.where(seen.any(-1, keepdims=True), largest, 0)
    e = np.where(seen, np.exp(np.where(seen, scores, largest) - largest), 0)
    total = e.sum(-1, keepdims=True)
    if how.sinks:
        total = total + np.exp(inputs["sinks"].astype(float)[:, None, None] - largest)
    out = e @ v.repeat(group, 1) / np.where(total, total, 1)
    with np.errstate(divide="ignore"):
        return out, (largest + np.log(total))[..., 0]
