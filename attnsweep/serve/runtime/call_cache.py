"""Kinds of calls that were met before, found by one question of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from .call import PLAIN as _PLAIN
from .call import Call, CuSeqlens
from .pytorch_calls import Steps
from .serving_plan import ServingPlan

_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
TensorGuards = getattr(_guards, "TensorGuards", None)
"""What torch.compile asks of a compiled function's arguments: class, dispatch keys, dtype, device,
requires_grad, sizes and strides. Without it every call is planned by its shapes and strides."""
_is_grad_enabled, _modes = torch.is_grad_enabled, torch._C._len_torch_dispatch_stack
_is_tracing = torch._C._is_tracing
_transform = torch._C._functorch.peek_interpreter_stack
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
MOST_ALIKE = 4
"""Kinds of calls of the same sizes that are told from each other: by strides and gradients, say."""
MOST_SIZES = 1024
"""Sizes that are remembered. More are met only by calls whose sizes keep changing."""


def transformed() -> bool:
    """Whether torch.func, torch.jit.trace or forward derivatives have a say in what is computed."""
    return forward_ad._current_level >= 0 or _transform() is not None or _is_tracing()


def _alike(tensors: tuple[Any, ...]) -> Callable[..., bool] | None:
    """Whether others are like these in all but addresses; None if PyTorch cannot be asked."""
    if TensorGuards is None:
        return None
    sizes = [list(each.shape) for each in tensors]
    strides = [list(each.stride()) for each in tensors]
    try:
        guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except (TypeError, RuntimeError):
        return None
    check: Callable[..., bool] = guards.check
    return check


def others(call: Call) -> tuple[Any, tuple[Any, ...]] | None:
    """What tells a call with a mask, limits or changed scores from others, and its tensors.

    None if one beside query, key and value is of a class of its own.
    """
    query, key, value, mask, _, _, _, _, _, sinks, *_ = call
    tensors = () if mask is None else (mask.q, mask.k) if type(mask) is CuSeqlens else (mask,)
    shape = tensors[0].shape if tensors else None
    tensors = tensors if sinks is None else (*tensors, sinks)
    for each in tensors:
        if type(each) is not torch.Tensor:
            return None
    own = (call.lse, shape, type(mask), sinks is not None)
    return (query.shape, key.shape, *call[4:9], *own), (query, key, value, *tensors)


class MetCalls:
    """The kinds of calls that were met before, and their plans."""

    def __init__(self) -> None:
        # By sizes and options: the plan, whether tensors are alike, and whether gradients must be
        # enabled, or must not be, or None if no tensor has one. Tuples are replaced, never changed.
        self._kinds: dict[
            Any, tuple[tuple[ServingPlan, Callable[..., bool], bool | None], ...]
        ] = {}

    def clear(self) -> None:
        """Forget them."""
        self._kinds.clear()

    def find(self, call: Call) -> ServingPlan | None:
        """The plan of a call whose launches need no operator around them, or None if not known.

        None also where a dispatch mode or a transform is active.
        """
        query, key, value, mask, causal, scale, grouped, limits, _, _, _, _, _, lse, _ = call
        # A tracer, or a class of its own, would see that its shape is asked for.
        if (
            _modes()
            or forward_ad._current_level >= 0  # as `transformed`, without its frame
            or _transform() is not None
            or _is_tracing()
            or type(query) not in _PLAIN
            or type(key) not in _PLAIN
            or key is value  # PyTorch knows no tensor again that is given twice
        ):
            return None
        try:
            if mask is None and limits is None:
                what: Any = (query.shape, key.shape, causal, scale, grouped, lse)
                given: Any = (query, key, value)
            else:
                more = others(call)
                if more is None:
                    return None
                what, given = more
            kinds = self._kinds.get(what, ())
            if value.is_nested:  # to ask about it would end the process: it has no strides
                return None
        except (AttributeError, TypeError, RuntimeError):  # no sizes, or no tensor
            return None
        for kind in kinds:
            plan, alike, grad = kind
            if alike(*given) and (grad is None or grad is _is_grad_enabled()):
                if kind is not kinds[0]:  # the next call is most likely such a one
                    self._kinds[what] = (kind, *(each for each in kinds if each is not kind))
                return plan
        return None

    def add(self, plan: ServingPlan, call: Call) -> None:
        """Have `find` find such a call, which was planned: from the second time on.

        Where too many kinds of the same sizes take turns, the calls between two tries grow.
        """
        query, key, value, mask, causal, scale, grouped, limits, *_ = call
        plan.met += 1
        if plan.met < 2 or query is key or key is value or query is value:
            return
        found: Any = (
            (query.shape, key.shape, causal, scale, grouped, call.lse),
            (query, key, value),
        )
        if mask is not None or limits is not None:
            found = others(call)
        if found is None:
            return
        what, tensors = found
        kinds = self._kinds.get(what, ())
        seldom = len(kinds) >= MOST_ALIKE and plan.met & (plan.met - 1)
        if seldom or any(map(_wrapped, tensors)):
            return
        alike = _alike(tensors)
        if alike is None:
            return
        grad = _is_grad_enabled() if any(each.requires_grad for each in tensors) else None
        if len(self._kinds) >= MOST_SIZES:
            self._kinds.clear()
        self._kinds[what] = ((plan, alike, grad), *kinds[: MOST_ALIKE - 1])


class ShortSteps:
    """Kinds of short steps that PyTorch gets, by the place in a program that makes them.

    A place is a code object and the number of an instruction in it; None: any of the others.
    settled: by `number`, the kinds whose gradients were alike so often that nobody watches them:
    whether tensors are alike in all but addresses, whether it is causal, and the code object.
    """

    def __init__(self) -> None:
        self.settled: dict[int, tuple[tuple[Callable[..., bool], bool, Any], ...]] = {}
        self._kinds: dict[Any, tuple[tuple[Callable[..., bool], bool, Steps, Any], ...]] = {}

    @staticmethod
    def number(code: Any, at: int) -> int:
        """The number of a place: one number is looked up sooner than two."""
        return (id(code) << 24) + at

    def find(
        self, code: Any, at: int, query: Any, key: Any, value: Any, causal: bool
    ) -> Steps | None:
        """What is known of such steps: alike in all but addresses."""
        place = self.number(code, at)
        for alike, is_causal, steps, _ in self._kinds.get(place, ()):
            if is_causal is causal and alike(query, key, value):
                if not steps.left and not any(alike is each for each, *_ in self._of(place)):
                    self.settled[place] = ((alike, causal, code), *self._of(place)[:3])
                return steps
        return None

    def _of(self, place: int) -> tuple[tuple[Callable[..., bool], bool, Any], ...]:
        return self.settled.get(place, ())

    def add(
        self, code: Any, at: int, query: Any, key: Any, value: Any, causal: bool
    ) -> Steps | None:
        """Begin to count steps; None if they cannot be told from others. Keeps the code alive."""
        if query is key or key is value or query is value:
            return None
        tensors = (query, key, value)
        if not all(type(each) in _PLAIN for each in tensors) or any(map(_wrapped, tensors)):
            return None
        alike = _alike(tensors)
        if alike is None:
            return None
        if len(self._kinds) >= MOST_SIZES:
            self._kinds.clear()
            self.settled.clear()
        what, steps = self.number(code, at), Steps()
        kinds = self._kinds.get(what, ())
        self._kinds[what] = ((alike, causal, steps, code), *kinds[: MOST_ALIKE - 1])
        return steps
