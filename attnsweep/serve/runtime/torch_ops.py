"""The operators in torch.ops: schemas, fake kernels, and their gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import interval_gradients
from .arguments import output_of
from .gradients import save_for_backward

_GIVEN = "Tensor query, Tensor key, Tensor value, bool causal, float scale"
_MASKED = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, bool diagonals, SymInt? low, "
    "SymInt? high, float scale, float softcap, Tensor? sinks, bool repeats"
)
_BACKWARD = (
    "Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, bool causal, "
    "float scale, bool cudnn"
)
_GIVEN_INTERVALS = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_range, SymInt? low, SymInt? high, "
    "float scale"
)
_BACKWARD_INTERVALS = (
    "Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    "Tensor? key_range, SymInt? low, SymInt? high, float scale"
)
OPERATORS = {
    "attention": f"({_GIVEN}) -> Tensor",
    "attention_masked": f"({_MASKED}) -> Tensor",
    "forward": f"({_GIVEN}) -> Tensor",
    "forward_lse": f"({_GIVEN}) -> (Tensor, Tensor)",
    "forward_masked": f"({_MASKED}) -> Tensor",
    "forward_intervals_lse": f"({_GIVEN_INTERVALS}) -> (Tensor, Tensor)",
    "backward": f"({_BACKWARD}) -> (Tensor, Tensor, Tensor)",
    "backward_intervals": f"({_BACKWARD_INTERVALS}) -> (Tensor, Tensor, Tensor)",
}
"""The operators and their schemas.

Those named `attention` are what a compiler sees: they are made of the others, once their sizes are
known. mask: where diagonals are given, low and high, key_lengths or None. The output has the layout
of torch.empty_like(query), with rows as long as value's; the log-sum-exp is float32 (batch, heads,
seqlen_q), contiguous.
"""
_FORWARD_VARLEN = (
    "forward_varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q,"
    " Tensor cu_seqlens_k, SymInt? left, SymInt? right, float scale, float softcap, Tensor? sinks, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k) -> Tensor"
)
_FORWARD_FP8 = (
    "forward_fp8(Tensor query, Tensor key, Tensor value, Tensor q_scale, Tensor k_scale,"
    " Tensor v_scale, bool causal, float scale) -> Tensor"
)


_SAVED = {
    "forward_lse": save_for_backward,
    "forward_intervals_lse": interval_gradients.save_for_backward,
}


def register(
    namespace: str,
    devices: Sequence[str],
    own: Mapping[str, Callable[..., Any]],
    gradients: Mapping[str, Callable[..., tuple[Any, ...]]],
) -> Any:
    """Define OPERATORS; returns the library, with which they live.

    A package that is imported again gets another namespace: `ns` of the library is the one.
    devices: types, as `cuda`. own: what each operator computes. gradients: of those that
    have one.
    """
    library, tags = _defined(namespace), _tags()
    fakes: dict[str, Any] = dict.fromkeys(_SAVED, _fake_forward_lse)
    fakes |= dict.fromkeys(("backward", "backward_intervals"), _fake_backward)
    for name, schema in OPERATORS.items():
        library.define(name + schema, tags=tags)
        if name.startswith("attention"):
            library.impl(name, own[name], "CompositeImplicitAutograd")
            continue
        for kind in devices:
            library.impl(name, own[name], kind.upper())
        fake = fakes.get(name, _fake_forward)
        torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    for name, gradient in gradients.items():
        saved: Any = {"setup_context": _SAVED[name], "lib": library}
        torch.library.register_autograd(f"{library.ns}::{name}", gradient, **saved)
    return library


def register_varlen(library: Any, devices: Sequence[str], forward: Callable[..., Any]) -> Any:
    """Define `forward_varlen` in a library, and return it. It has no gradient."""
    return _registered(library, devices, "forward_varlen", _FORWARD_VARLEN, forward, _fake_forward)


def register_fp8(
    library: Any, devices: Sequence[str], forward: Callable[..., torch.Tensor], fake: Any
) -> Any:
    """Define `forward_fp8` in a library, and return it. It has no gradient.

    fake: what a compiler calls in its place, with tensors that hold nothing.
    """
    return _registered(library, devices, "forward_fp8", _FORWARD_FP8, forward, fake)


def _registered(
    library: Any, devices: Sequence[str], name: str, schema: str, forward: Any, fake: Any
) -> Any:
    library.define(schema, tags=_tags())
    for kind in devices:
        library.impl(name, forward, kind.upper())
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, library.ns), name).default


def _tags() -> tuple[torch.Tag, ...]:
    """Tags that make compiled code give the operators the strides that eager code gives them."""
    tags = [torch.Tag.pt2_compliant_tag]
    for name in ("needs_exact_strides", "needs_fixed_stride_order"):
        if hasattr(torch.Tag, name):
            tags.append(getattr(torch.Tag, name))
            break
    return tuple(tags)


_MOST_IMPORTS = 99


def _defined(namespace: str) -> Any:
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
