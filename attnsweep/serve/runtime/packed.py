"""Packed sequences: `attention_varlen` and its arguments."""

from __future__ import annotations

from typing import Any

import torch

from .call import Call, CuSeqlens, number, records_gradients
from .changed_scores import checked
from .dispatch import Explanation
from .gradients import like
from .intervals import check_integers, sides
from .pytorch_calls import by_pytorch
from .torch_ops import define

Window = tuple[int | None, int | None]
"""(left, right): the keys before and after a query's own; None: all on that side."""


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
    """The diagonals of each sequence's own queries. Raises TypeError or ValueError."""
    for name, each in zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens[:2], strict=True):
        check_integers(name, each, query)
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


_is_compiling = torch.compiler.is_compiling


class VarlenOperator:
    """`attention` and `explain` of packed sequences, by an operator."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        where = (operator.library, operator.device_types)
        self._forward = define(*where, "forward_varlen", self._impl_forward)

    def attention(self, *given: Any, dropout_p: float, cache: bool, **options: Any) -> torch.Tensor:
        """`attention_varlen` of a package. options: as of `_call`."""
        call = self._call(*given, dropout_p=dropout_p, keep=cache, **options)
        if _is_compiling():
            if dropout_p == 0.0 and self._traces(call):
                query, key, value = self._operator.cast(*given[:3])
                by = call.scale if call.scale is not None else query.shape[2] ** -0.5
                how: Any = (*call.mask[:2], *call.limits, by, call.softcap, call.sinks)
                compiled: torch.Tensor = self._forward(query, key, value, *how, *call.mask.longest)
                return compiled
            return _rows(by_pytorch(call))
        return _rows(self._operator.answer(call))

    def explain(self, *given: Any, **options: Any) -> Explanation:
        """Which kernel `attention` would call with these arguments, and why; launches nothing."""
        said: Explanation = self._operator.explained(self._call(*given, **options))
        return said

    def _call(
        self,
        query: Any,
        key: Any,
        value: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        *longest: Any,
        causal: bool,
        window: Any,
        scale: Any,
        softcap: Any,
        sinks: Any,
        dropout_p: float,
        keep: bool = True,
    ) -> Call:
        """The call that these arguments mean. Raises TypeError or ValueError."""
        query, key, value = self._operator.cast(query, key, value)
        mask = CuSeqlens(cu_seqlens_q, cu_seqlens_k, longest or (None, None))
        sides = understood(query, key, value, mask, causal, window)
        cap, of_heads = checked(softcap, sinks, query.transpose(0, 1)[None], None, False)
        how: Any = (mask, False, number(scale), True, sides, cap, of_heads, dropout_p)
        return Call(*as_one(query, key, value), *how)._replace(keep=keep)

    def _traces(self, call: Call) -> bool:
        """Whether a kernel may serve a compiler's call."""
        query, key, value, *_ = call
        planner = self._operator.planner
        if records_gradients(call):
            return False
        if planner.unserved(query, key, value, False, call.scale, True):
            return False
        return bool(planner.is_known(query.device.index or 0))

    def _impl_forward(
        self, query: Any, key: Any, value: Any, of_q: Any, of_k: Any, *rest: Any
    ) -> torch.Tensor:
        """A compiler's call, which may use the memory of cu_seqlens for others: no list stays."""
        left, right, scale, softcap, sinks, *longest = rest
        mask = CuSeqlens(of_q, of_k, tuple(longest))
        how: Any = (mask, False, scale, True, (left, right), softcap, sinks)
        call = Call(*as_one(query, key, value), *how)._replace(keep=False)
        return like(_rows(self._operator.answer(call)), query, value)


def _rows(out: torch.Tensor) -> torch.Tensor:
    """The one item of a batch as (tokens, heads, head_dim)."""
    return out.squeeze(0).transpose(0, 1)
