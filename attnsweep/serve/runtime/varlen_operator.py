"""Attention of packed cu_seqlens, by the kernels of a package where they serve."""

from __future__ import annotations

from typing import Any

import torch

from .arguments import Call, never, number, records_gradients
from .changed_scores import checked
from .dispatch import Choice
from .gradients import like
from .operator import Operator
from .packed import CuSeqlens, Window, as_one, by_pytorch, understood
from .plans import Explanation
from .torch_ops import define

_is_compiling = torch.compiler.is_compiling


class VarlenOperator:
    """`attention` and `explain` of packed sequences over the plans of an operator."""

    def __init__(self, operator: Operator) -> None:
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
        elif choice := never(None, dropout_p):
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
        choice: Choice | None = never(None, dropout_p)
        if choice is None:
            how: Any = (cu_seqlens, False, scale, True, window, *changes)
            choice = self._operator.masked_plan(Call(*as_one(query, key, value), *how)).choice
        return self._operator.explained(choice, query)

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
        return planner.is_known(query.device.index or 0)

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
