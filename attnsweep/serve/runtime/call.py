"""The one normal form of a call, and what its arguments say before any kernel is looked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from attnsweep.core.layouts import DENSE, Layout
from attnsweep.core.masks import FULL, Mask
from attnsweep.core.problem import Problem
from attnsweep.core.scores import PLAIN as PLAIN_SCORES
from attnsweep.core.scores import Scores

from .dispatch import Choice
from .driver import StridedTensor
from .sdpa_patch import is_traced

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors that have no say in what is computed."""


*QKV, OUT = NAMES = ("q", "k", "v", "o")
"""The tensors of a forward, by the names that launches have for them."""


class CuSeqlens(NamedTuple):
    """Where sequences begin among queries and keys, and where the last ends: cu_seqlens.

    longest: tokens of the longest of queries and of keys, None where that is not known.
    """

    q: torch.Tensor
    k: torch.Tensor
    longest: tuple[int | None, int | None] = (None, None)

    @property
    def sequences(self) -> int:
        """How many there are."""
        return int(self.q.shape[0]) - 1


class Saved(NamedTuple):
    """Tensors of a backward besides query, key and value; lse is float32 and contiguous."""

    out: Any
    grad: Any
    lse: Any


class Scales(NamedTuple):
    """The scales that turn FP8 numbers into values."""

    q: Any
    k: Any
    v: Any


class Call(NamedTuple):
    """A call of attention, by what its arguments mean: all entries make one, and plans run it.

    mask: boolean, True where a query sees a key, with any strides; or of query's dtype, added to
    the scores, with strides of 8 elements. It broadcasts to (batch, heads, seqlen_q, seqlen_k), and
    no kernel serves is_causal beside it. A query that sees no key has output 0. limits: diagonals,
    between which a query sees keys; mask is then key_lengths, or None; or of packed sequences,
    which mask then is, the keys before and after a query's own. softcap, sinks: as
    `changed_scores.checked` returns them. fill: whether a query that a mask leaves no key has
    output 0 also where PyTorch computes it, whose backends differ. keep: whether what is made of
    the mask is used again while that is unchanged: see MaskLists. lse: whether the log-sum-exp is
    an output; None: it is kept if gradients are recorded, which then are those of the call.
    extra: what tells a call of another kind: Saved of a backward, Scales of one in FP8.
    """

    query: Any
    key: Any
    value: Any
    mask: Any = None
    is_causal: bool = False
    scale: Any = None
    enable_gqa: bool = True
    limits: Any = None
    softcap: float = 0.0
    sinks: Any = None
    dropout_p: float = 0.0
    fill: bool = False
    keep: bool = True
    lse: bool | None = None
    extra: Any = None

    @property
    def mask_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that say what the call hides: a mask, lengths, or where sequences begin."""
        return tensors_of(self.mask)

    @property
    def changes_scores(self) -> bool:
        """Whether a cap or sinks change its scores."""
        return bool(self.softcap) or self.sinks is not None


def tensors_of(mask: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a mask, of lengths, or of where sequences begin."""
    return mask[:2] if isinstance(mask, CuSeqlens) else () if mask is None else (mask,)


def records_gradients(call: Call) -> bool:
    """Whether a call records gradients."""
    mask, sinks = call.mask, call.sinks
    return torch.is_grad_enabled() and (
        call.query.requires_grad
        or call.key.requires_grad
        or call.value.requires_grad
        or (isinstance(mask, torch.Tensor) and mask.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    )


def plain(query: Any, key: Any, value: Any) -> bool:
    """Whether no argument is of a class that has a say in what is computed."""
    return type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN


def plain_mask(mask: Any) -> bool:
    """Whether a mask is a plain tensor, or stands for one while a compiler traces."""
    return type(mask) in PLAIN or is_traced(mask)


def dropped(dropout_p: float) -> Choice | None:
    """Why no kernel serves a call, whatever its tensors are."""
    return Choice(None, "dropout", f"dropout_p is {dropout_p}") if dropout_p != 0.0 else None


def taken_for(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, scores: Scores = PLAIN_SCORES
) -> tuple[Mask, Layout, Scores]:
    """Mask, layout and scores of the problem of a call whose mask `planner.why_unserved` lets pass.

    What a mask hides is known on the device alone, so it counts as if it hid nothing: others take
    less time. A float mask is a bias. One query's counts as each item's own, as shapes of few
    queries are tuned with. scores: what else changes them.
    """
    items, heads, *_ = mask_strides(mask, query, key)
    if query.shape[2] == 1 and mask.dtype is torch.bool:
        items = 1
    own = tuple(name for name, step in (("item", items), ("head", heads)) if step > 0)
    if mask.dtype is torch.bool:
        return FULL.as_boolean(own), DENSE, scores
    return FULL, DENSE, replace(scores, bias=own)


def bias_of(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> StridedTensor:
    """A float mask for a tensor map: of one element in a dimension where it has one for all.

    A row of keys that is no row in memory has a stride that `unmapped` refuses.
    """
    whole = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    found = mask.expand(whole).stride()
    sizes = [n if step else 1 for n, step in zip(whole[:3], found[:3], strict=True)]
    return StridedTensor((*sizes, whole[3]), (*found[:3], found[3] if whole[3] > 1 else 1))


def bias_copied(mask: torch.Tensor) -> torch.Tensor:
    """A copy of a float mask that `bias_of` takes: rows in memory, at multiples of 16 bytes.

    What is one for all items, heads or queries stays so.
    """
    pairs = zip(mask.shape[:-1], mask.stride()[:-1], strict=True)
    own = mask[tuple(slice(1) if n > 1 and step == 0 else slice(None) for n, step in pairs)]
    keys, step = own.shape[-1], 16 // own.element_size()
    made = own.new_empty((*own.shape[:-1], -(-keys // step) * step))[..., :keys]
    return made.copy_(own).expand(mask.shape)


def mask_strides(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> tuple[int, int, int, int]:
    """Elements of a mask from item to item, head to head, query to query and key to key.

    0 where it has one for all.
    """
    whole = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    found = mask.expand(whole).stride()
    sized = [step if size > 1 else 0 for size, step in zip(whole[:2], found[:2], strict=True)]
    return sized[0], sized[1], found[2], found[3]


def number(scale: Any) -> Any:
    """A scale as PyTorch reads it: of NumPy's types and tensors of one element their value.

    What is no number stays as it is; PyTorch's own attention says so.
    """
    tensor = isinstance(scale, torch.Tensor) and (scale.dim() or scale.requires_grad)
    return scale if tensor or not hasattr(scale, "__float__") else float(scale)


def sized(*tensors: Any) -> bool:
    """Whether a compiler knows all their sizes."""
    return all(type(n) is int for each in tensors for n in each.shape)


def problem_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    layout: Layout = DENSE,
    scores: Scores = PLAIN_SCORES,
) -> Problem:
    """The problem of a call that `Planner.unserved` lets pass.

    Raises ProblemError if no card could hold it.
    """
    batch, heads, seqlen_q, head_dim = query.shape
    sizes = (batch, heads, key.shape[1], seqlen_q, key.shape[2], head_dim)
    dtype: Any = DTYPES[query.dtype]
    return Problem(*sizes, dtype, mask, layout, scores, head_dim_v=value.shape[3])


def output_of(query: torch.Tensor, value: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Memory of an output: that of torch.empty_like(query), but with rows as long as value's.

    device: default: query's.
    """
    columns = value.shape[-1]
    if query.shape[-1] == columns:
        return torch.empty_like(query, device=device)
    rows = torch.empty_like(query.narrow(-1, 0, 1), device=device)
    strides = [columns * stride for stride in rows.stride()[:-1]]
    how: Any = {"dtype": rows.dtype, "device": rows.device}
    return torch.empty_strided((*query.shape[:-1], columns), (*strides, 1), **how)


def laid_out(tensor: torch.Tensor) -> StridedTensor:
    """A tensor's sizes and strides, as a tensor map needs them."""
    return StridedTensor(tuple(tensor.shape), strides(tensor))


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides in elements; 0 for dimensions of size 1, whose strides are arbitrary."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(stride if size > 1 else 0 for size, stride in pairs)


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as scaled_dot_product_attention would get it under autocast."""
    kind = tensor.device.type
    if tensor.is_floating_point() and tensor.dtype is not torch.float64:
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor
