"""A package as an attention implementation of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .model_masks import LazyMask, Recognised
from .table import PackageError

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
        changed = softcap is not None or s_aux is not None
        found = [name for name in _OTHERS if options.get(name) is not None]
        found += ["output_attentions"] if options.get("output_attentions") else []
        if changed and found:
            raise ValueError(
                f"this model's attention has {'softcap' if softcap else 'sinks'} and "
                f'{found[0]}; use attn_implementation="eager"'
            )
        grouped = query.shape[1] != key.shape[1]
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
        if attention_mask is not None and not others:
            out = masked(query, key, value, attention_mask, scaling)
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
        if attention_mask is not None or others:
            given = (module, query, key, value, attention_mask)
            return sdpa(  # type: ignore[no-any-return]
                *given, dropout=dropout, scaling=scaling, is_causal=is_causal, **options
            )
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        seqlen_q = query.shape[2]
        causal = bool(seqlen_q > 1 and is_causal)  # a lone query sees all keys
        if causal and key.shape[2] > seqlen_q:  # an empty static cache: later keys are no one's
            key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]
        how = {"is_causal": causal, "scale": scaling, "enable_gqa": grouped, **scores}
        how |= {"dropout_p": dropout} if changed else {}
        out = attention(query, key, value, **how)
        return out.transpose(1, 2).contiguous(), None

    forward.attention = attention  # type: ignore[attr-defined]
    return forward
