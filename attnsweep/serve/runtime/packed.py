"""Packed sequences: `attention_varlen`, its arguments, and what PyTorch computes of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .call import DTYPES, Call, dropped, number, records_gradients
from .changed_scores import checked, composed
from .dispatch import Choice
from .gradients import like
from .intervals import sides
from .pytorch_calls import attend, flash_varlen
from .serving_plan import Explanation
from .torch_ops import define

Window = tuple[int | None, int | None]
"""(left, right): the keys before and after a query's own; None: all on that side."""


class CuSeqlens(NamedTuple):
    """Where sequences begin among queries and keys, and where the last ends: cu_seqlens."""

    q: torch.Tensor
    k: torch.Tensor

    @property
    def sequences(self) -> int:
        """How many there are."""
        return int(self.q.shape[0]) - 1


def as_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Any, Any, Any]:
    """(tokens, heads, head_dim) as the one item of a batch, (1, heads, tokens, head_dim)."""
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    return q, k, v


def understood(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: CuSeqlens,
    causal: bool,
    window: Any,
) -> Window:
    """What queries see of their own sequence. Raises TypeError or ValueError."""
    for name, each in zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=True):
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"{name} is {type(each).__name__}, not a tensor on {query.device}")
        if each.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} is {each.dtype}, not torch.int32 or torch.int64")
        if each.device != query.device:
            raise ValueError(f"{name} is on {each.device}, and query on {query.device}")
        if each.dim() != 1 or each.shape[0] < 2:
            raise ValueError(
                f"{name} is {tuple(each.shape)}: it has one number for each sequence, where it "
                "begins, and where the last one ends"
            )
    if cu_seqlens.q.shape != cu_seqlens.k.shape:
        sizes = f"{cu_seqlens.q.shape[0]} and {cu_seqlens.k.shape[0]}"
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k have {sizes} numbers, not as many")
    if not query.dim() == key.dim() == value.dim() == 3:
        sizes = ", ".join(str(tuple(each.shape)) for each in (query, key, value))
        raise ValueError(f"packed tensors are (tokens, heads, head_dim), not {sizes}")
    left, right = sides(window)
    return left, 0 if causal else right


def by_pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: CuSeqlens,
    longest: tuple[int | None, int | None],
    window: Window,
    dropout_p: float,
    scale: float | None,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Packed attention by PyTorch's flash attention, or else with a mask of all pairs of tokens.

    query, key, value: (tokens, heads, head_dim). longest: tokens of the longest sequence of query
    and of key; None: at most all.
    """
    head_dim, plain = query.shape[2], not softcap and sinks is None
    flash = query.is_cuda and query.dtype in DTYPES and head_dim % 8 == 0 and head_dim <= 256
    if plain and flash and key.shape == value.shape and query.shape[0] and key.shape[0]:
        most = [n or each.shape[0] for n, each in zip(longest, (query, key), strict=True)]
        begins = CuSeqlens(*(each.to(torch.int32).contiguous() for each in cu_seqlens))
        return flash_varlen(query, key, value, begins, most, window, dropout_p, scale)
    one = as_one(query, key, value)
    mask = dense(query.shape[0], key.shape[0], cu_seqlens, window)
    if plain:
        how: Any = (mask, dropout_p, False)
        made = attend(*one, *how, scale=scale, enable_gqa=True, fill=True)
    else:
        made = composed(*one, mask, dropout_p, scale, True, softcap, sinks)
    return made.squeeze(0).transpose(0, 1).contiguous()


def dense(tokens_q: int, tokens_k: int, cu_seqlens: CuSeqlens, window: Window) -> torch.Tensor:
    """The boolean mask that says the same: (tokens_q, tokens_k)."""
    (of_q, of_k), (left, right) = cu_seqlens, window
    rows, keys = (torch.arange(n, device=of_q.device) for n in (tokens_q, tokens_k))
    own = torch.searchsorted(of_q[1:].contiguous(), rows, right=True, out_int32=True)
    inside = (own < cu_seqlens.sequences) & (rows >= of_q[0])
    own = own.clamp(max=cu_seqlens.sequences - 1).long()
    first, end = of_k[own][:, None], of_k[own + 1][:, None]
    mask = (keys >= first) & (keys < end) & inside[:, None]
    after = keys - (rows + of_k[own + 1] - of_q[own + 1])[:, None]  # of a query's own key
    mask = mask if left is None else mask & (after >= -left)
    return mask if right is None else mask & (after <= right)


_is_compiling = torch.compiler.is_compiling


class VarlenOperator:
    """`attention` and `explain` of packed sequences over the plans of an operator."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        where = (operator.library, operator.device_types)
        self._forward = define(*where, "forward_varlen", self._impl_forward)

    def attention(self, *given: Any, dropout_p: float, cache: bool, **options: Any) -> torch.Tensor:
        """As the package's `attention_varlen` has it. options: as of `_understood`."""
        query, key, value = self._operator.cast(*given[:3])
        cu_seqlens, longest = CuSeqlens(*given[3:5]), given[5:]
        window, scale, *changes = self._understood(query, key, value, cu_seqlens, **options)
        if _is_compiling():
            if dropout_p == 0.0 and self._traces(query, key, value, scale, changes[1]):
                by = scale if scale is not None else query.shape[2] ** -0.5
                how: Any = (*cu_seqlens, *window, by, *changes, *longest)
                compiled: torch.Tensor = self._forward(query, key, value, *how)
                return compiled
        elif choice := dropped(dropout_p):
            self._operator.fell_back(choice)
        else:
            how = (cu_seqlens, window, scale, *changes, cache)
            out = self._served(query, key, value, *how)
            if out is not None:
                return out
        how = (cu_seqlens, longest, window, dropout_p, scale, *changes)
        return by_pytorch(query, key, value, *how)

    def explain(self, *given: Any, dropout_p: float, **options: Any) -> Explanation:
        """Which kernel `attention` would call with these arguments, and why; launches nothing."""
        query, key, value = self._operator.cast(*given[:3])
        cu_seqlens = CuSeqlens(*given[3:])
        window, scale, *changes = self._understood(query, key, value, cu_seqlens, **options)
        choice: Choice | None = dropped(dropout_p)
        if choice is None:
            how: Any = (cu_seqlens, False, scale, True, window, *changes)
            choice = self._operator.masked_plan(Call(*as_one(query, key, value), *how)).choice
        said: Explanation = self._operator.explained(choice, query)
        return said

    @staticmethod
    def _understood(
        query: Any,
        key: Any,
        value: Any,
        cu_seqlens: CuSeqlens,
        *,
        causal: bool,
        window: Any,
        scale: Any,
        softcap: Any,
        sinks: Any,
    ) -> tuple[Window, float | None, float, torch.Tensor | None]:
        """Window, scale, softcap and sinks. Raises TypeError or ValueError."""
        sides = understood(query, key, value, cu_seqlens, causal, window)
        cap, of_heads = checked(softcap, sinks, query.transpose(0, 1)[None], None, False)
        return sides, scale if scale is None else number(scale), cap, of_heads

    def _traces(self, query: Any, key: Any, value: Any, scale: Any, sinks: Any) -> bool:
        """Whether a kernel may serve a compiler's call."""
        given, planner = as_one(query, key, value), self._operator.planner
        if records_gradients(Call(*given, sinks=sinks)):
            return False
        if planner.unserved(*given, False, scale, True):
            return False
        return bool(planner.is_known(query.device.index or 0))

    def _served(self, query: Any, key: Any, value: Any, *how: Any) -> torch.Tensor | None:
        cu_seqlens, window, scale, *changes, keep = how
        call = Call(*as_one(query, key, value), cu_seqlens, False, scale, True, window, *changes)
        out = self._operator.masked(call, keep)
        return None if out is None else out.squeeze(0).transpose(0, 1)

    def _impl_forward(
        self, query: Any, key: Any, value: Any, of_q: Any, of_k: Any, *rest: Any
    ) -> torch.Tensor:
        """A compiler's call, which may use the memory of cu_seqlens for others: no list stays."""
        left, right, scale, softcap, sinks, *longest = rest
        cu_seqlens, changes = CuSeqlens(of_q, of_k), (softcap, sinks)
        how: Any = (cu_seqlens, (left, right), scale, *changes, False)
        out = self._served(query, key, value, *how)
        if out is None:
            how = (cu_seqlens, tuple(longest), (left, right), 0.0, scale, *changes)
            out = by_pytorch(query, key, value, *how)
        return like(out, query, value)
