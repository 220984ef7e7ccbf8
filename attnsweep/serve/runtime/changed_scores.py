"""Scores that are changed before the softmax, by a cap or by sinks: what a call may say of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import dropout

from .call import number

_MOST_SCORES = 2**27
"""Scores of a step of `composed`, in float32: 512 MiB."""
_TO_FLOAT32 = "dtype" in torch.ops.aten.bmm.overloads()  # since PyTorch 2.8


def checked(
    softcap: Any, sinks: Any, query: torch.Tensor, attn_mask: Any, is_causal: bool
) -> tuple[float, torch.Tensor | None]:
    """The cap, 0 if there is none, and sinks, float32. Raises TypeError or ValueError."""
    if softcap is sinks is None:
        return 0.0, None
    if query.dim() != 4:
        raise ValueError(f"with softcap or sinks, query has 4 dimensions, not {query.dim()}")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal are given: hide later keys in attn_mask")
    if attn_mask is not None and not (
        attn_mask.dtype is torch.bool or attn_mask.is_floating_point()
    ):
        raise TypeError(
            f"attn_mask is {attn_mask.dtype}: beside softcap or sinks, a mask is "
            "boolean or floating point"
        )
    cap = 0.0 if softcap is None else number(softcap)
    if not isinstance(cap, int | float) or not math.isfinite(cap) or cap < 0:
        raise ValueError(f"softcap is {softcap!r}, not a number above 0")
    if sinks is None:
        return float(cap), None
    if not isinstance(sinks, torch.Tensor) or not sinks.is_floating_point():
        what = getattr(sinks, "dtype", type(sinks).__name__)
        raise TypeError(f"sinks is {what}, not a tensor of floating point numbers")
    if sinks.device != query.device:
        raise ValueError(f"sinks is on {sinks.device}, and query on {query.device}")
    if sinks.shape != query.shape[1:2]:
        sizes = f"{tuple(sinks.shape)}, and query {tuple(query.shape)}"
        raise ValueError(f"sinks is {sizes}: it has one number for each head of query")
    return float(cap), sinks.float().contiguous()


def composed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """That attention by PyTorch's operators, with scores in float32, and with gradients.

    mask: boolean, or added to scores; it broadcasts to (batch, heads, seqlen_q, seqlen_k). A query
    that sees no key has output 0. Raises ValueError for shapes that do not agree.
    """
    batch, heads, rows, head_dim = query.shape
    heads_kv, seqlen_k = key.shape[1:3]
    if heads != heads_kv and not (enable_gqa and heads_kv and heads % heads_kv == 0):
        why = "do not divide them" if enable_gqa else "are fewer: pass enable_gqa=True"
        raise ValueError(f"query has {heads} heads, and the {heads_kv} of key {why}")
    group = heads // heads_kv if heads_kv else 1
    by = head_dim**-0.5 if scale is None else scale
    if math.frexp(by)[0] == 0.5:  # exact in any dtype, and a pass less over all scores
        query, by = query * by, 1.0
    part = max(1, _MOST_SCORES // max(1, batch * heads * seqlen_k))
    empty: torch.Tensor | None = None
    if mask is not None:
        hidden = ~mask if mask.dtype is torch.bool else mask == -math.inf
        if sinks is None:  # a softmax of nothing is no number, and neither are its gradients
            empty = hidden.all(-1, keepdim=True)
            hidden = hidden & ~empty
        added = None if mask.dtype is torch.bool else mask.masked_fill(mask == -math.inf, 0)

    def of_rows(at: int) -> torch.Tensor:
        end = min(rows, at + part)

        def own(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[..., at:end, :] if tensor.shape[-2] > 1 else tensor

        # Query heads of a key head are its rows: nothing is repeated.
        grouped = query[:, :, at:end].reshape(batch, heads_kv, group * (end - at), head_dim)
        products: torch.Tensor = _Products.apply(grouped, key)
        scores = products.view(batch, heads, end - at, seqlen_k)
        scores = scores if by == 1.0 else scores * by
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores if added is None else scores + own(added)
            scores = scores.masked_fill(own(hidden), -math.inf)
        if sinks is not None:
            sink = sinks[:, None, None].expand(batch, heads, end - at, 1)
            scores = torch.cat((scores, sink), 3)
        weights = dropout(torch.softmax(scores, 3)[..., :seqlen_k], dropout_p).to(value.dtype)
        out = weights.reshape(batch, heads_kv, group * (end - at), seqlen_k) @ value
        out = out.view(batch, heads, end - at, value.shape[3])
        return out if empty is None else out.masked_fill(own(empty), 0)

    with torch.autocast(query.device.type, enabled=False):
        parts = [of_rows(at) for at in range(0, rows, part)]
    return torch.cat(parts, 2) if len(parts) != 1 else parts[0]


class _Products(torch.autograd.Function):  # type: ignore[misc]
    """Each row of a with each of b, in float32.

    bf16 would round a score of 50 by 0.1. A product of float32 would take 10 times as long.
    """

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a: (batch, heads, rows, columns); b: the same, with other rows."""
        ctx.save_for_backward(a, b)
        if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16) and _TO_FLOAT32:
            of_heads = (a.flatten(0, 1), b.flatten(0, 1).mT)
            made = torch.bmm(*of_heads, out_dtype=torch.float32)
            return made.view(*a.shape[:3], b.shape[2])
        return a.float() @ b.float().mT

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """In the inputs' dtype, as of any product of them."""
        a, b = ctx.saved_tensors
        grad = grads[0].to(a.dtype)
        return grad @ b, grad.mT @ a
