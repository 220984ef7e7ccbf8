"""Kinds of calls that were met lately, which PyTorch tells from others by one question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from .plans import Plan

# What torch.compile asks of a compiled function's arguments: class, dispatch keys, dtype, device,
# requires_grad, sizes and strides. Without it every call is planned by its shapes and strides.
_Guards = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
_is_grad_enabled, _modes = torch.is_grad_enabled, torch._C._len_torch_dispatch_stack
_is_tracing = torch._C._is_tracing
_transform = torch._C._functorch.peek_interpreter_stack
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
# Kinds that are told from others: a model's layers have few, and each costs a question.
_MOST = 4


def transformed() -> bool:
    """Whether torch.func, torch.jit.trace or forward derivatives have a say in what is computed."""
    return forward_ad._current_level >= 0 or _transform() is not None or _is_tracing()


@dataclass(slots=True, eq=False)
class _Kind:
    """Calls of one plan. check: whether tensors are alike. grad: whether gradients must be enabled,
    or must not be; None if no tensor has one."""

    plan: Plan
    check: Callable[..., bool]
    causal: bool
    scale: float | None
    enable_gqa: bool
    grad: bool | None


class Seen:
    """The kinds of calls that were met lately."""

    def __init__(self) -> None:
        self._kinds: tuple[_Kind, ...] = ()  # never changed, but replaced: threads share it

    def clear(self) -> None:
        """Forget them."""
        self._kinds = ()

    def plan(
        self, query: Any, key: Any, value: Any, causal: bool, scale: float | None, enable_gqa: bool
    ) -> Plan | None:
        """The plan of a call that may be launched as it is, or None if that is not known.

        None also where a dispatch mode or a transform is active.
        """
        for kind in self._kinds:
            if (
                kind.causal is causal
                and kind.enable_gqa is enable_gqa
                and (kind.scale is scale or (type(scale) is float and kind.scale == scale))
                and kind.check(query, key, value)
                and (kind.grad is None or kind.grad is _is_grad_enabled())
            ):
                if _modes() or transformed() or not kind.plan.calls:
                    return None
                return kind.plan
        return None

    def add(
        self,
        plan: Plan,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> None:
        """Have `plan` find a call that was launched, the second time or so that it is met.

        Then the tenth, say, of kinds that take turns is not asked for in vain at each call: the
        times between two tries grow.
        """
        plan.met += 1
        if _Guards is None or plan.met < 2 or plan.met & (plan.met - 1):
            return
        if not (
            type(causal) is type(enable_gqa) is bool and (scale is None or type(scale) is float)
        ):
            return
        tensors = (query, key, value)
        if len({*map(id, tensors)}) < 3 or any(map(_wrapped, tensors)):
            return  # PyTorch does not know a tensor that is given twice again
        sizes = [list(each.shape) for each in tensors]
        strides = [list(each.stride()) for each in tensors]
        try:
            check = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        except (TypeError, RuntimeError):
            return
        grad = _is_grad_enabled() if any(each.requires_grad for each in tensors) else None
        kind = _Kind(plan, check, causal, scale, enable_gqa, grad)
        self._kinds = (kind, *self._kinds[: _MOST - 1])
