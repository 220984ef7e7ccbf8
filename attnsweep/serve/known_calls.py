"""Kinds of calls that a kernel served before, so that their arguments are not understood again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

# Kinds of calls that are looked through, the newest first: one for each kind of layer of a model.
_MOST = 16
# What torch.compile asks whether it may take its code again: it compares all facts of many tensors
# in one call. In Python that took a third of a call's time.
_Guard = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)

_T = TypeVar("_T")


class KnownCalls(Generic[_T]):
    """A cache of facts about calls, by numbers and tensors that differ at most in addresses.

    kinds: the newest first; a tuple, which threads may replace.
    """

    def __init__(self) -> None:
        self.kinds: tuple[tuple[tuple[Any, ...], Callable[..., bool], _T], ...] = ()

    def find(self, kind: tuple[Any, ...], tensors: tuple[Any, ...]) -> _T | None:
        """The entry for calls with these numbers and tensors of such sizes and strides, or None."""
        q, k, v = tensors[:3]
        try:
            if q.is_nested or k.is_nested or v.is_nested:
                return None  # they have no strides: to compare them would end the process
        except AttributeError:  # no tensor, as what is alike is none
            return None
        for known, are_alike, what in self.kinds:
            if known == kind and are_alike(*tensors):
                return what
        return None

    def add(self, kind: tuple[Any, ...], tensors: tuple[torch.Tensor, ...], what: _T) -> None:
        """Note what is known of such calls, if nothing is."""
        if _Guard is None or self.find(kind, tensors) is not None:
            return
        guard = _Guard(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        # Callers may write to a list that they gave: a window's, say.
        self.kinds = ((copy.deepcopy(kind), guard.check, what), *self.kinds[: _MOST - 1])
