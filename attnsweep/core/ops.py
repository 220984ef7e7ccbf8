"""Ops: what a call computes. Its tensors, in the order of a call, and its FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnsweep.core.formats import DTYPE_BYTES as DTYPE_BYTES

if TYPE_CHECKING:
    from attnsweep.core.problem import Problem

_ITEM_BYTES = DTYPE_BYTES | {"int32": 4, "bool": 1}
ORDERS = ("bhsd", "bshd")
"""Where a kernel has tensors of heads: (batch, heads, seqlen, head_dim), or seqlen before heads."""
_OF_HEADS = (*"qkvo", "do", "dq", "dk", "dv")


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output of a call, contiguous."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An operation, forward or backward: its inputs, outputs and FLOPs on a problem."""

    name: str
    inputs: Callable[[Problem], tuple[Tensor, ...]]
    outputs: Callable[[Problem], tuple[Tensor, ...]]
    flops: Callable[[Problem], int]
    small_cases: tuple[tuple[int, int, int, int, str, int], ...]
    """Heads, key heads, queries, keys, kind of inputs and batch of the cases that it must get right
    beside the problem."""
    optional: Callable[[Problem], tuple[Tensor, ...]] = lambda _: ()
    """Outputs that a callable may return beside the others."""
    faults: Callable[[Problem], Iterator[tuple[str, str]]] = lambda _: iter(())
    """What a problem of it cannot be, and what to write in its place."""
    judged_on_hard: bool = True
    """Whether our own candidates are judged on the problem's hard case too."""
    sampled: bool = True
    """Whether some rows stand for all of a long problem; otherwise none that is long is proved."""

    def written(self, p: Problem) -> tuple[Tensor, ...]:
        """The outputs, and what a callable may return beside."""
        return (*self.outputs(p), *self.optional(p))

    def __repr__(self) -> str:
        return self.name.upper()

    def __reduce__(self) -> tuple[Callable[[str], Op], tuple[str]]:
        return _named, (self.name,)


def of_heads(p: Problem) -> dict[str, tuple[int, ...]]:
    """The tensors of a call that a family may have in another of ORDERS, and their shapes."""
    tensors = (*p.op.inputs(p), *p.op.outputs(p))
    return {each.name: each.shape for each in tensors if each.name in _OF_HEADS}


def _named(name: str) -> Op:
    return OPS[name]


def _queries(p: Problem) -> tuple[int, ...]:
    return (p.batch, p.heads, p.seqlen_q, p.head_dim)


def _keys(p: Problem) -> tuple[int, ...]:
    return (p.batch, p.heads_kv, p.seqlen_k, p.head_dim)


def _forward_inputs(p: Problem) -> tuple[Tensor, ...]:
    stored = p.layout.cache_dtype or p.dtype
    columns = {"k": p.head_dim} | ({} if p.value_in_key else {"v": p.value_dim})
    given = (
        Tensor("q", _queries(p), p.dtype),
        *(Tensor(name, p.layout.of_keys(p, own), stored) for name, own in columns.items()),
    )
    return given + _scales(p) + _mask(p) + _ranges(p) + _of_scores(p)


def _mask(p: Problem) -> tuple[Tensor, ...]:
    """The mask as a tensor, True where a query sees a key, if a call gets it so."""
    if not p.mask.as_tensor:
        return ()
    items, heads = p.batch if p.mask.of_item else 1, p.heads if p.mask.of_head else 1
    return (Tensor("mask", (items, heads, p.seqlen_q, p.seqlen_k), "bool"),)


def _scales(p: Problem) -> tuple[Tensor, ...]:
    keys, each = p.format.scale_block, (p.batch, p.heads_kv)
    shapes = (each, *[(*each, -(-p.seqlen_k // keys)) if keys else each] * 2)
    scales = [*zip(p.format.scales, shapes, strict=False)]
    scales += [(name, each) for name in p.layout.scales]
    return tuple(Tensor(name, shape, "fp32") for name, shape in scales)


def _ranges(p: Problem) -> tuple[Tensor, ...]:
    """Inputs that give the keys of each item, or the sequences of one: see Problem."""
    shapes = p.layout.shapes(p.batch, p.seqlen_k)
    return tuple(Tensor(name, shape, "int32") for name, shape in shapes.items())


def _of_scores(p: Problem) -> tuple[Tensor, ...]:
    """Inputs that change scores: see Scores. Rows of a bias begin at multiples of 8 elements."""
    made: list[Tensor] = []
    if (own := p.scores.bias) is not None:
        items, heads = p.batch if "item" in own else 1, p.heads if "head" in own else 1
        shape = (items, heads, p.seqlen_q, -(-p.seqlen_k // 8) * 8)
        made.append(Tensor("bias", shape, p.dtype))
    if p.scores.sinks:
        made.append(Tensor("sinks", (p.heads,), "fp32"))
    return tuple(made)


def _forward_outputs(p: Problem) -> tuple[Tensor, ...]:
    return (Tensor("o", (*_queries(p)[:3], p.value_dim), p.out_dtype),)


def _forward_flops(p: Problem) -> int:
    return 2 * p.pairs * sum(p.head_dims)  # of Q K^T, and of P V


def _log_sum_exp(p: Problem) -> tuple[Tensor, ...]:
    return (Tensor("lse", (p.batch, p.heads, p.seqlen_q), "fp32"),)


FORWARD = Op(
    "forward",
    _forward_inputs,
    _forward_outputs,
    _forward_flops,
    small_cases=(
        (1, 1, 1, 1, "normal", 1),
        (2, 1, 1, 17, "normal", 1),
        (4, 2, 97, 161, "normal", 2),
        (3, 1, 129, 129, "large_scores", 1),
        (1, 1, 65, 200, "equal_keys", 1),
        (1, 1, 130, 255, "far_below", 1),
        (2, 1, 70, 70, "far_above", 1),
        (1, 1, 67, 640, "tiny_ends", 1),
        (2, 2, 65, 131, "one_hot", 1),
        (1, 1, 64, 321, "wide", 1),
        (1, 1, 66, 513, "sink", 1),
    ),
    optional=_log_sum_exp,
)
"""O = softmax(scale Q K^T) V."""


def _backward_inputs(p: Problem) -> tuple[Tensor, ...]:
    (o,) = _forward_outputs(p)
    return (*_forward_inputs(p), o, *_log_sum_exp(p), replace(o, name="do"))


def _backward_outputs(p: Problem) -> tuple[Tensor, ...]:
    shapes = {"dq": _queries(p), "dk": _keys(p), "dv": _keys(p)}
    return tuple(Tensor(name, shape, p.dtype) for name, shape in shapes.items())


def _backward_flops(p: Problem) -> int:
    return 10 * p.pairs * p.head_dim  # of S, dP, dV, dQ and dK: scores are not kept


def _backward_faults(p: Problem) -> Iterator[tuple[str, str]]:
    others = [p.mask.label] * p.mask.as_tensor + [p.layout.kind] * (
        p.layout.kind in ("packed", "paged")
    )
    others += [*p.scores.kinds, *["head_dim_v"] * bool(p.head_dim_v)]
    others += ["value_in_key"] * p.value_in_key
    others += [p.dtype] * (DTYPE_BYTES[p.dtype] != 2)
    hint = "a backward is of fp16 or bf16: full, causal, with a window, or padded"
    yield from ((f"a backward has no {other}", hint) for other in others)


BACKWARD = Op(
    "backward",
    _backward_inputs,
    _backward_outputs,
    _backward_flops,
    small_cases=(  # none whose gradients cancel to nothing: only the noise would be judged
        (1, 1, 1, 1, "normal", 1),
        (2, 1, 1, 63, "normal", 1),
        (4, 2, 127, 192, "normal", 2),
        (2, 1, 192, 64, "exact", 1),
        (1, 1, 65, 704, "normal", 1),
        (3, 1, 129, 129, "large_scores", 1),
        (1, 1, 130, 255, "far_below", 1),
        (2, 1, 70, 70, "far_above", 1),
        (1, 1, 63, 192, "equal_keys", 1),
        (1, 1, 67, 640, "tiny_ends", 1),
        (1, 1, 64, 321, "wide", 1),
        (1, 1, 66, 513, "sink", 1),
    ),
    faults=_backward_faults,
    judged_on_hard=False,
    sampled=False,  # NumPy computes the whole forward of a backward
)
"""The gradients of Q, K and V, of dO that O has, from O and the log-sum-exp of a forward.

P = exp(scale Q K^T - lse), dV = P^T dO, dS = P * (dO V^T - sum(dO * O)) with a sum for
each row, dQ = scale dS K, dK = scale dS^T Q. dK and dV of a key head are sums
over its query heads. O and lse are given as a forward rounds them, lse natural and in float32.
"""
OPS = {op.name: op for op in (FORWARD, BACKWARD)}
