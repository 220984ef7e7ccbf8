"""A package as an attention implementation of transformers, and the masks of its models.

Masks of transformers that are an interval of keys for each query: none is made until one looks.

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
from .intervals import Diagonals, opened
from .table import PackageError

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
        """The mask as an ordinary tensor, made once."""
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
        """The window that a mask function shows; None if that is no interval, or not known."""
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
    """The diagonals of a window. diagonal: of a query's own key."""
    low = None if sides[0] is None else diagonal - sides[0]
    high = None if sides[1] is None else diagonal + sides[1]
    return opened(low, high, seqlen_q, seqlen_k)


def _intervals_and_keys(padding: torch.Tensor) -> list[int]:
    """The most intervals of a row, and the fewest keys."""
    begins = (padding[:, 1:] > padding[:, :-1]).sum(1) + padding[:, 0]
    found: list[int] = torch.stack((begins.max(), padding.sum(1).min())).tolist()
    return found


# What transformers' own function for PyTorch's attention computes, without softcap and sinks.
_OTHERS = ("position_bias", "cache")


def register(name: str, attention: Callable[..., Any], masked: Callable[..., Any]) -> str:
    """Add `attention` to transformers' AttentionInterface under a name, which is returned.

    Masks are those of `sdpa`, most of which are made only if something reads them. masked: the same
    with a boolean mask, or None where no kernel serves the call. Raises PackageError for a name
    that transformers reads otherwise, ImportError without transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    known = AttentionInterface().get(name)
    ours = getattr(getattr(known, "attention", None), "__module__", "") == attention.__module__
    if "flash" in name or "/" in name or "|" in name or name == "eager" or (known and not ours):
        raise PackageError(
            f"{name!r} means something else to transformers; give another name, "
            'like register("tuned")'
        )
    masks = _masks(AttentionMaskInterface()["sdpa"], masking_utils)
    AttentionMaskInterface.register(name, masks)
    theirs = AttentionInterface()["sdpa"]
    AttentionInterface.register(name, _implementation(attention, masked, theirs))
    return name


def _masks(sdpa: Callable[..., Any], masking_utils: Any) -> Callable[..., Any]:
    """Masks for an attention that knows is_causal and intervals. sdpa: transformers' own.

    That one gives compiled code a causal mask where eager code gets none, with PyTorch before 2.14:
    it takes compiling for exporting.
    """
    try:
        recognised = Recognised(masking_utils)
    except AttributeError:  # a version that makes masks in another way
        recognised = None

    def mask(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            if options.get("allow_is_causal_skip"):
                hides = [options.get(name) is not None for name in ("attention_mask", "local_size")]
                seqlen_q, seqlen_k = options.get("q_length"), options.get("kv_length")
                if not any(hides) and seqlen_q is not None and seqlen_q == seqlen_k:
                    return None
        elif recognised is not None and not args:
            found = recognised.lazily(sdpa, options)
            if found is not None:
                return found
        return sdpa(*args, **options)

    return mask


def _biased(bias: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The mask that adds a model's bias to scores, as transformers makes it: T5's, say."""
    if mask is None:
        return bias
    if mask.dtype is torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return bias + mask


def _implementation(
    attention: Callable[..., Any], masked: Callable[..., Any], sdpa: Callable[..., Any]
) -> Callable[..., Any]:
    """An attention function as transformers' models call it. sdpa: transformers' own."""

    def forward(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Any = None,
        **options: Any,
    ) -> tuple[Any, None]:
        asked, changed = is_causal, softcap is not None or s_aux is not None
        found = [name for name in _OTHERS if options.get(name) is not None]
        found += ["output_attentions"] if options.get("output_attentions") else []
        if changed and found:
            raise ValueError(
                f"this model's attention has {'softcap' if softcap else 'sinks'} and "
                f'{found[0]}; use attn_implementation="eager"'
            )
        grouped = bool(query.shape[1] != key.shape[1])  # a tensor while torch.jit.trace looks
        # PyTorch has no fused attention of grouped heads with these: theirs repeats k and v for it.
        unfused = key.shape[-1] > 256 or (grouped and key.shape[-1] != value.shape[-1])
        others = bool(found) or (not changed and (dropout != 0.0 or unfused))
        scores = {"softcap": softcap, "sinks": s_aux} if changed else {}
        if isinstance(attention_mask, LazyMask) and torch.compiler.is_compiling():
            attention_mask = attention_mask.dense  # of code that is compiled for a layer alone
        elif isinstance(attention_mask, LazyMask):
            if not found and dropout == 0.0 and attention_mask.is_as_made:
                out = masked(query, key, value, attention_mask, scaling, **scores)
                if out is not None:
                    return out.transpose(1, 2).contiguous(), None
                others = True
            attention_mask = attention_mask.dense
        if changed and attention_mask is not None:
            how = {"scale": scaling, "enable_gqa": grouped, **scores}
            out = attention(query, key, value, attention_mask, dropout, **how)
            return out.transpose(1, 2).contiguous(), None
        if found == ["position_bias"] and not changed and dropout == 0.0:
            own = getattr(module, "is_causal", True) if is_causal is None else is_causal
            if attention_mask is not None or not own or query.shape[2] == 1:
                mask = _biased(options["position_bias"], attention_mask)
                out = masked(query, key, value, mask, scaling)
                if out is not None:
                    return out.transpose(1, 2).contiguous(), None
        if attention_mask is not None and not others:
            out = masked(query, key, value, attention_mask, scaling)
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        seqlen_q = query.shape[2]
        causal = bool(seqlen_q > 1 and is_causal)  # a lone query sees all keys
        filled = (key, value)
        if causal and key.shape[2] > seqlen_q:  # an empty static cache: later keys are no one's
            filled = key[:, :, :seqlen_q], value[:, :, :seqlen_q]
        if attention_mask is None and unfused and not (found or changed or dropout):
            limits = (None, 0 if causal else None)
            out = masked(query, *filled, None, scaling, limits=limits)
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
        if attention_mask is not None or others:
            given = (module, query, key, value, attention_mask)
            return sdpa(  # type: ignore[no-any-return]
                *given, dropout=dropout, scaling=scaling, is_causal=asked, **options
            )
        how = {"is_causal": causal, "scale": scaling, "enable_gqa": grouped, **scores}
        how |= {"dropout_p": dropout} if changed else {}
        out = attention(query, *filled, **how)
        return out.transpose(1, 2).contiguous(), None

    forward.attention = attention  # type: ignore[attr-defined]
    return forward
