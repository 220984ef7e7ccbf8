"""Masks of transformers that are an interval of keys for each query: none is made until one looks.

A mask is dense where transformers alone can say what it hides: packed sequences, chunks, images,
masks of a caller's own, padding between keys that are seen, and offsets that the device alone
knows, as of static caches in compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .call_cache import transformed
from .intervals import Diagonals

Sides = tuple[int | None, int | None]
"""Keys before and after a query's own that it sees, None: all."""


class LazyMask(torch.Tensor):  # type: ignore[misc]
    """A boolean mask, (batch, 1, seqlen_q, seqlen_k), that is made when an operator reads it.

    limits: its diagonals. lengths: int32, (batch, 2), the first key of each item and the one after
    the last, or None. Both hold while `is_as_made`. make: the dense mask.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    limits: Diagonals
    lengths: torch.Tensor | None
    is_as_made: bool
    _made: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        device: Any,
        limits: Diagonals,
        lengths: torch.Tensor | None,
        make: Callable[[], torch.Tensor],
    ) -> LazyMask:
        """See the class."""
        made: Any = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        made.limits, made.lengths, made.is_as_made = limits, lengths, True
        made._make, made._made = make, None
        return made  # type: ignore[no-any-return]

    @property
    def dense(self) -> torch.Tensor:
        """The same as an ordinary tensor, made once."""
        made = self._made
        if made is None:
            made = self._made = self._make()
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """What a compiler takes for it, where a part of a model is compiled."""
        return ["dense"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        """A mask of which nothing but the ordinary tensor is known."""
        dense = inner["dense"]
        return LazyMask(tuple(dense.shape), dense.device, (None, None), None, lambda: dense)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Any operator: on the dense mask, which it may change."""

        def plain(each: Any) -> Any:
            if not isinstance(each, LazyMask):
                return each
            each.is_as_made = False
            return each.dense

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def _of_dense(name: str) -> Callable[..., Any]:
    def method(self: LazyMask, *args: Any, **options: Any) -> Any:
        self.is_as_made = False
        return getattr(self.dense, name)(*args, **options)

    return method


# What is no operator: PyTorch refuses it for tensors without memory of their own, or has none.
for _name in ("data_ptr", "numpy", "share_memory_", "tolist", "__deepcopy__", "__reduce_ex__"):
    setattr(LazyMask, _name, _of_dense(_name))


class Recognised:
    """Knows which functions of masking_utils, a module of transformers, say an interval.

    Raises AttributeError for a version that has others.
    """

    def __init__(self, masking_utils: Any) -> None:
        self._causal = masking_utils.causal_mask_function
        self._all = masking_utils.bidirectional_mask_function
        self._and = masking_utils.and_masks(self._causal).__code__
        self._left = masking_utils.sliding_window_overlay(1).__code__
        self._both = masking_utils.sliding_window_bidirectional_overlay(1).__code__
        self._is_tracing = masking_utils.is_tracing

    def sides(self, function: Any) -> Sides | None:
        """What a mask function lets a query see; None if that is no interval, or not known."""
        if function is self._causal:
            return None, 0
        if function is self._all:
            return None, None
        code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
        if cells is None or len(cells) != 1:
            return None
        held = cells[0].cell_contents
        if code is self._and and isinstance(held, tuple):
            parts = [self.sides(each) for each in held]
            if not parts or None in parts:
                return None
            lefts, rights = zip(*(each for each in parts if each is not None), strict=True)
            return _least(lefts), _least(rights)
        if type(held) is not int or held < 1:
            return None
        return (
            (held - 1, None) if code is self._left else (held, held) if code is self._both else None
        )

    def lazily(self, sdpa: Callable[..., Any], options: dict[str, Any]) -> LazyMask | None:
        """The mask that sdpa, transformers' own function, makes of these options, if it may be so.

        Waits for the device once if there is padding to look at, as sdpa does.
        """
        sizes: list[Any] = [options.get(name) for name in ("batch_size", "q_length", "kv_length")]
        offsets: list[Any] = [options.get(name, 0) for name in ("q_offset", "kv_offset")]
        sides = self.sides(options.get("mask_function"))
        allowed = (
            "allow_is_causal_skip" if sides and sides[1] == 0 else "allow_is_bidirectional_skip"
        )
        if (
            sides is None
            or options.get("use_vmap")
            or not options.get(allowed)  # else the mask becomes a part of another
            or any(type(size) is not int for size in (*sizes, *offsets))
            or sizes[1] < 2  # short enough
            or transformed()
            or self._is_tracing(padding := options.get("attention_mask"))
        ):
            return None
        (batch, seqlen_q, seqlen_k), diagonal = sizes, offsets[0] - offsets[1]
        limits = _open(sides, diagonal, seqlen_q, seqlen_k)
        lengths, least = None, seqlen_k
        if padding is not None:
            if type(padding) is not torch.Tensor or padding.is_meta or padding.dim() != 2:
                return None
            padding = padding[:, offsets[1] : offsets[1] + seqlen_k]  # keys beyond it are not seen
            if padding.shape[0] != batch or padding.dtype is not torch.bool:
                return None
            most, least = _intervals_and_keys(padding)
            if most > 1:
                return None
            if least < seqlen_k:
                first = padding.int().argmax(1)
                lengths = torch.stack((first, first + padding.sum(1)), 1).to(torch.int32)
        if limits == (None, 0) and diagonal == 0 and least >= seqlen_q:
            return None  # and sdpa's is none: is_causal says it, and later keys are cut off
        if limits == (None, None) and lengths is None:
            return None
        own = options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        shape, device = (batch, 1, seqlen_q, seqlen_k), torch.device(options.get("device", "cpu"))
        return LazyMask(shape, device, limits, lengths, lambda: sdpa(**own))


def _least(sides: tuple[int | None, ...]) -> int | None:
    return min((side for side in sides if side is not None), default=None)


def _open(sides: Sides, diagonal: int, seqlen_q: int, seqlen_k: int) -> Diagonals:
    """The diagonals, open where nothing is hidden. diagonal: of a query's own key."""
    low = None if sides[0] is None else diagonal - sides[0]
    high = None if sides[1] is None else diagonal + sides[1]
    low = None if low is None or low <= 1 - seqlen_q else low
    return low, None if high is None or high >= seqlen_k - 1 else high


def _intervals_and_keys(padding: torch.Tensor) -> list[int]:
    """The most intervals of a row, and the fewest keys."""
    begins = (padding[:, 1:] > padding[:, :-1]).sum(1) + padding[:, 0]
    found: list[int] = torch.stack((begins.max(), padding.sum(1).min())).tolist()
    return found
