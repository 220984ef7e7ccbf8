"""Kinds of calls that were met before, found by one question of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from .call import PLAIN as _PLAIN
from .call import Call
from .pytorch_calls import Steps, watched
from .sdpa_patch import sdpa
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


def _told(call: Call) -> tuple[Any, ...]:
    """The arguments of `MetCalls.find` after query, key and value."""
    mask, others = call.mask, call.mask_tensors
    if len(others) == 2 and others[0] is others[1]:  # see `find`
        others = others[:1]
    if call.sinks is not None:
        others = (*others, call.sinks)
    kind: Any = call.is_causal if call.lse is None else (call.is_causal, call.lse)
    if call.limits is not None or call.changes_scores:
        kind = (*call[4:9], call.lse, type(mask), len(others), call.sinks is not None)
    return (kind, call.scale, call.enable_gqa, *others)


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

    def find(
        self, query: Any, key: Any, value: Any, kind: Any, scale: Any, grouped: bool, *others: Any
    ) -> ServingPlan | None:
        """The plan of a call whose launches need no operator around them, or None if not known.

        None also where a dispatch mode or a transform is active. kind: is_causal, if PyTorch's own
        arguments say all of it, with whether the log-sum-exp is wanted if an operator says that;
        otherwise all options. others: a mask and the like.
        """
        # A tracer, or a class of its own, would see that its shape is asked for.
        if _modes() or transformed() or type(query) not in _PLAIN or type(key) not in _PLAIN:
            return None
        if key is value:  # PyTorch knows no tensor again that is given twice
            return None
        try:
            what: Any = (query.shape, key.shape, kind, scale, grouped)
            if others:
                for each in others:
                    if type(each) is not torch.Tensor:
                        return None
                what = (*what, others[0].shape)
            kinds = self._kinds.get(what, ())
            if value.is_nested:  # to ask about it would end the process: it has no strides
                return None
        except (AttributeError, TypeError, RuntimeError):  # no sizes, or no tensor
            return None
        for known in kinds:
            plan, alike, grad = known
            if alike(query, key, value, *others) and (grad is None or grad is _is_grad_enabled()):
                if known is not kinds[0]:  # the next call is most likely such a one
                    self._kinds[what] = (known, *(each for each in kinds if each is not known))
                return plan
        return None

    def of(self, call: Call) -> ServingPlan | None:
        """The plan that `find` has for a call."""
        return self.find(call.query, call.key, call.value, *_told(call))

    def add(self, plan: ServingPlan, call: Call) -> None:
        """Remember the plan of a call for `find`, from the second such call on.

        Where too many kinds of the same sizes take turns, the calls between two tries grow.
        """
        query, key, value, *_ = call
        plan.met += 1
        if plan.met < 2 or query is key or key is value or query is value:
            return
        kind, scale, grouped, *others = _told(call)
        what = (query.shape, key.shape, kind, scale, grouped, *[t.shape for t in others[:1]])
        kinds, tensors = self._kinds.get(what, ()), (query, key, value, *others)
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


_Settled = tuple[Callable[..., bool], bool, Any, "type | None"]


class ShortSteps:
    """Kinds of short steps that PyTorch gets, by the place in a program that makes them.

    A place is a code object and the number of an instruction in it.
    settled: by `number`, the kinds whose gradients were alike so often that nobody watches them:
    whether tensors are alike in all but addresses, whether it is causal, the code object, and what
    the class of the output's grad_fn must be, or None: see Steps.asked.
    """

    def __init__(self) -> None:
        self.settled: dict[int, tuple[_Settled, ...]] = {}
        self._kinds: dict[Any, tuple[tuple[Callable[..., bool], bool, Steps, Any], ...]] = {}

    @staticmethod
    def number(code: Any, at: int) -> int:
        """A place in a program as one number, which a dict finds sooner than a pair."""
        return (id(code) << 24) + at

    def output(
        self,
        place: int,
        query: Any,
        key: Any,
        value: Any,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor | None:
        """PyTorch's output for a settled step, as it is given; None for any other.

        An enabled package has the same without a frame of Python in between.
        """
        for alike, causal, _, backend in self._of(place):
            if (
                causal is is_causal
                and alike(query, key, value)
                and not (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15
            ):
                masks = (None, -0.0 if dropout_p == 0.0 else dropout_p, is_causal)
                out = sdpa(query, key, value, *masks, scale=scale, enable_gqa=enable_gqa)
                known = backend is None or type(out.grad_fn) is backend
                return out if known else watched(out, query, key, value)
        return None

    def find(
        self, code: Any, at: int, query: Any, key: Any, value: Any, causal: bool
    ) -> Steps | None:
        """The entry for such steps: alike in all but addresses."""
        place = self.number(code, at)
        for alike, is_causal, steps, _ in self._kinds.get(place, ()):
            if is_causal is causal and alike(query, key, value):
                if not steps.left and not any(alike is each for each, *_ in self._of(place)):
                    one = alike, causal, code, steps.asked
                    self.settled[place] = (one, *self._of(place)[:3])
                return steps
        return None

    def _of(self, place: int) -> tuple[_Settled, ...]:
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
