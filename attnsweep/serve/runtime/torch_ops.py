"""The operators in torch.ops: schemas, fake kernels, and their gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .call import output_of

_QKV = "Tensor query, Tensor key, Tensor value"
_SAVED = f"Tensor grad, {_QKV}, Tensor out, Tensor lse"
_LIMITS = "Tensor? key_range, SymInt? low, SymInt? high, float scale"
_GIVEN = f"({_QKV}, bool causal, float scale)"
_MASKED = (
    f"({_QKV}, Tensor? mask, bool diagonals, SymInt? low, SymInt? high, float scale, "
    "float softcap, Tensor? sinks, bool repeats, bool fill)"
)
OPERATORS = {
    "attention": f"{_GIVEN} -> Tensor",
    "attention_sdpa": (
        f"({_QKV}, Tensor? attn_mask, float dropout_p, bool is_causal, float? scale, "
        "bool enable_gqa, bool fill=False) -> Tensor"
    ),
    "attention_masked": f"{_MASKED} -> Tensor",
    "forward": f"{_GIVEN} -> Tensor",
    "forward_lse": f"{_GIVEN} -> (Tensor, Tensor)",
    "forward_masked": f"{_MASKED} -> Tensor",
    "forward_intervals_lse": f"({_QKV}, {_LIMITS}) -> (Tensor, Tensor)",
    "backward": f"({_SAVED}, bool causal, float scale, bool cudnn) -> (Tensor, Tensor, Tensor)",
    "backward_intervals": f"({_SAVED}, {_LIMITS}) -> (Tensor, Tensor, Tensor)",
}
"""The operators and their schemas.

Those whose names begin with `attention` are what a compiler sees: they are made of the others, once
their sizes are known. mask: where diagonals are given, low and high, key_lengths or None. The
output has the layout of torch.empty_like(query), with rows as long as value's; the log-sum-exp is
float32 (batch, heads, seqlen_q), contiguous.
"""
_OTHERS = {
    "forward_varlen": (
        f"({_QKV}, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt? left, SymInt? right, "
        "float scale, float softcap, Tensor? sinks, SymInt? max_seqlen_q, SymInt? max_seqlen_k)"
        " -> Tensor"
    ),
    "forward_fp8": (
        f"({_QKV}, Tensor q_scale, Tensor k_scale, Tensor v_scale, bool causal, float scale)"
        " -> Tensor"
    ),
}


def define(
    library: Any, devices: Sequence[str], name: str, forward: Callable[..., Any], fake: Any = None
) -> Any:
    """Define an operator in a library, with which it lives, and return it.

    devices: types, as `cuda`. forward: what it computes. fake: what a compiler calls in its place,
    with tensors that hold nothing (default: by its name).
    """
    library.define(name + (OPERATORS | _OTHERS)[name], tags=_tags())
    if name.startswith("attention"):
        library.impl(name, forward, "CompositeImplicitAutograd")
        if name == "attention_sdpa":  # `torch.vmap` would call it for one item after the other
            library.impl(name, forward, "FuncTorchBatched")
    else:
        for kind in devices:
            library.impl(name, forward, kind.upper())
        fake = fake or _FAKES.get(name, _fake_forward)
        torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, library.ns), name).default


def differentiate(library: Any, name: str, saves: Any, gradient: Any) -> None:
    """Give an operator a gradient. saves: keeps what this needs."""
    how: Any = {"setup_context": saves, "lib": library}
    torch.library.register_autograd(f"{library.ns}::{name}", gradient, **how)


def _tags() -> tuple[torch.Tag, ...]:
    """Tags that make compiled code give the operators the strides that eager code gives them."""
    names = ("needs_exact_strides", "needs_fixed_stride_order")
    strides = [getattr(torch.Tag, name) for name in names if hasattr(torch.Tag, name)]
    return torch.Tag.pt2_compliant_tag, *strides[:1]


_MOST_IMPORTS = 99


def library_of(namespace: str) -> Any:
    """Make a library of PyTorch operators, in a namespace of its own for each import: its `ns`."""
    for number in range(1, _MOST_IMPORTS + 1):
        name = namespace if number == 1 else f"{namespace}_again{number}"
        try:
            return torch.library.Library(name, "DEF")
        except RuntimeError:  # PyTorch has it, from an earlier import
            if number == _MOST_IMPORTS:
                raise
    return None


def _fake_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> torch.Tensor:
    return output_of(query, value)


def _fake_forward_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    return output_of(query, value), lse


def _fake_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_FAKES = {
    **dict.fromkeys(("forward_lse", "forward_intervals_lse"), _fake_forward_lse),
    **dict.fromkeys(("backward", "backward_intervals"), _fake_backward),
}
