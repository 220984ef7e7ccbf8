"""What was met before: kinds of calls, by one question of PyTorch's, and lists of masks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from .call import PLAIN as _PLAIN
from .pytorch_calls import Steps
from .serving_plan import FORKED, SUBCLASS, TRANSFORMED, Plan

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


class Seen:
    """The kinds of calls that were met before."""

    def __init__(self) -> None:
        # By sizes and options: the plan, whether tensors are alike, and whether gradients must be
        # enabled, or must not be, or None if no tensor has one. Tuples are replaced, never changed.
        self._kinds: dict[Any, tuple[tuple[Plan, Callable[..., bool], bool | None], ...]] = {}

    def clear(self) -> None:
        """Forget them."""
        self._kinds.clear()

    def plan(
        self,
        query: Any,
        key: Any,
        value: Any,
        causal: bool,
        scale: float | None,
        enable_gqa: bool,
        *mask: Any,
    ) -> Plan | None:
        """The plan of a call whose launches need no operator around them, or None if not known.

        None also where a dispatch mode or a transform is active. mask: one, if the call has it.
        """
        # A tracer, or a class of its own, would see that its shape is asked for.
        if _modes() or transformed() or type(query) not in _PLAIN or type(key) not in _PLAIN:
            return None
        if key is value:  # PyTorch knows no tensor again that is given twice
            return None
        try:
            what: Any = (query.shape, key.shape, causal, scale, enable_gqa)
            if mask:
                if type(mask[0]) is not torch.Tensor:
                    return None
                what = (*what, mask[0].shape)
            kinds = self._kinds.get(what, ())
            if value.is_nested:  # to ask about it would end the process: it has no strides
                return None
        except (AttributeError, TypeError, RuntimeError):  # no sizes, or no tensor
            return None
        for kind in kinds:
            plan, alike, grad = kind
            if alike(query, key, value, *mask) and (grad is None or grad is _is_grad_enabled()):
                if kind is not kinds[0]:  # the next call is most likely such a one
                    self._kinds[what] = (kind, *(each for each in kinds if each is not kind))
                return plan
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
        *mask: torch.Tensor,
    ) -> None:
        """Have `plan` find such a call, which was planned: from the second time on.

        Where too many kinds of the same sizes take turns, the calls between two tries grow.
        """
        plan.met += 1
        if plan.met < 2 or query is key or key is value or query is value:
            return
        if plan in (FORKED, SUBCLASS, TRANSFORMED):  # which are no kind's
            return
        sizes_of_mask = (each.shape for each in mask)
        what = (query.shape, key.shape, causal, scale, enable_gqa, *sizes_of_mask)
        kinds = self._kinds.get(what, ())
        tensors = (query, key, value, *mask)
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


Masks = tuple[torch.Tensor, ...]
MOST_LISTS, MOST_BYTES = 64, 2**29
"""A model makes one or two masks in a forward. Past this count or these bytes, the oldest go."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskList:
    """addresses: of what a call reads. memory: keeps it alive."""

    addresses: tuple[int, ...]
    memory: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps alive."""
        return sum(each.untyped_storage().nbytes() for each in self.memory)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    # A weak reference to each, where it was, and how often PyTorch knew that it was written to.
    masks: tuple[tuple[Callable[[], Any], int, int], ...]
    plan: Any  # kept, so that no other has its number
    stream: int
    capture: int
    made: MaskList


class MaskLists:
    """The lists of masks that are alive, by mask and by plan: what a kernel needs of one.

    A mask is met again if the very tensor is alive, at its address, and PyTorch's version counter
    says that nobody has written to it: autograd's own criterion. It misses writes through `.data`,
    DLPack, raw kernels and replays of CUDA graphs that fill a mask from outside: `cache=False` of a
    call is for those. While a CUDA graph is captured, only what the same capture has scanned is met
    again: a replay must scan what it is given then. The list of a mask that follows from sizes
    alone has no tensor to be met by: its plan stands for it.

    capture_of: the number of the CUDA graph that a stream is capturing, 0 if none, None if unknown.
    """

    def __init__(self, capture_of: Callable[[int], int | None]) -> None:
        self._capture_of = capture_of
        self._kept: dict[tuple[int, ...], _Kept] = {}

    def find(self, masks: Masks, plan: Any, stream: int) -> MaskList | None:
        """The list of an unchanged mask that `keep` got in this stream, or None.

        masks: the tensors that say it: a mask, lengths, or where sequences begin. None of them: the
        plan alone says it.
        """
        kept = self._kept.get((*map(id, masks), id(plan)))
        if kept is None or kept.stream != stream or kept.capture != self._capture_of(stream):
            return None
        # In a model every layer asks so; as a generator in `any` it took twice as long.
        for mask, (own, address, version) in zip(masks, kept.masks, strict=True):
            if own() is not mask or mask.data_ptr() != address or mask._version != version:
                return None
        return kept.made

    def keep(self, masks: Masks, plan: Any, stream: int, made: MaskList) -> None:
        """Remember what was made of a mask in a stream, if a change of it would show."""
        capture = self._capture_of(stream)
        inference = any(mask.is_inference() for mask in masks)  # it has no version
        if inference or capture is None:  # or nothing would show
            return
        what = (*map(id, masks), id(plan))

        def gone(_: Any, what: tuple[int, ...] = what) -> None:
            self._kept.pop(what, None)

        room = MOST_BYTES - made.nbytes
        if room < 0:
            return
        while (
            len(self._kept) >= MOST_LISTS
            or sum(each.made.nbytes for each in [*self._kept.values()]) > room
        ):
            self._kept.pop(next(iter(self._kept)), None)
        own = tuple((weakref.ref(m, gone), m.data_ptr(), m._version) for m in masks)
        self._kept[what] = _Kept(own, plan, stream, capture, made)

    def forget(self) -> None:
        """Scan each mask anew from now on."""
        self._kept.clear()
