"""The operators in torch.ops: schemas, fake kernels, and their gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .gradients import save_for_backward

_GIVEN = "Tensor query, Tensor key, Tensor value, bool causal, float scale"
_ATTENTION = f"attention({_GIVEN}) -> Tensor"
_FORWARD = f"forward({_GIVEN}) -> Tensor"
_MASKED = (
    "Tensor query, Tensor key, Tensor value, Tensor mask, float scale, float softcap, Tensor? sinks"
)
_INTERVALS = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_lengths, SymInt? low, SymInt? high, "
    "float scale, float softcap, Tensor? sinks"
)
_FORWARD_VARLEN = (
    "forward_varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q,"
    " Tensor cu_seqlens_k, SymInt? left, SymInt? right, float scale, float softcap, Tensor? sinks, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k) -> Tensor"
)
_FORWARD_LSE = f"forward_lse({_GIVEN}) -> (Tensor, Tensor)"
_BACKWARD = (
    "backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    "bool causal, float scale, bool cudnn) -> (Tensor, Tensor, Tensor)"
)
_FORWARD_FP8 = (
    "forward_fp8(Tensor query, Tensor key, Tensor value, Tensor q_scale, Tensor k_scale,"
    " Tensor v_scale, bool causal, float scale) -> Tensor"
)


def register(
    namespace: str,
    devices: Sequence[str],
    attention: Callable[..., torch.Tensor],
    forward: Callable[..., torch.Tensor],
    forward_lse: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    attention_masked: Callable[..., torch.Tensor],
    forward_masked: Callable[..., torch.Tensor],
    attention_intervals: Callable[..., torch.Tensor],
    forward_intervals: Callable[..., torch.Tensor],
    backward: Callable[..., tuple[torch.Tensor, ...]],
    gradient: Callable[..., tuple[Any, ...]],
) -> Any:
    """Define the operators of these names; returns the library, with which they live.

    A package that is imported again gets another namespace: `ns` of the library is the one.
    Those named `attention` are what a compiler sees: they are made of the others, once their sizes
    are known.
    The output has the layout of torch.empty_like(query); the log-sum-exp is float32 (batch, heads,
    seqlen_q), contiguous. devices: types, as `cuda`. gradient: of forward_lse.
    """
    library, tags = _defined(namespace), _tags()
    namespace = library.ns
    library.define(_ATTENTION, tags=tags)
    library.define(_FORWARD, tags=tags)
    library.define(_FORWARD_LSE, tags=tags)
    library.define(_BACKWARD, tags=tags)
    library.define(f"attention_masked({_MASKED}) -> Tensor", tags=tags)
    library.define(f"forward_masked({_MASKED}) -> Tensor", tags=tags)
    library.define(f"attention_intervals({_INTERVALS}) -> Tensor", tags=tags)
    library.define(f"forward_intervals({_INTERVALS}) -> Tensor", tags=tags)
    library.impl("attention", attention, "CompositeImplicitAutograd")
    library.impl("attention_masked", attention_masked, "CompositeImplicitAutograd")
    library.impl("attention_intervals", attention_intervals, "CompositeImplicitAutograd")
    for kind in devices:
        library.impl("forward", forward, kind.upper())
        library.impl("forward_masked", forward_masked, kind.upper())
        library.impl("forward_intervals", forward_intervals, kind.upper())
        library.impl("forward_lse", forward_lse, kind.upper())
        library.impl("backward", backward, kind.upper())
    torch.library.register_fake(f"{namespace}::forward", _fake_forward, lib=library)
    torch.library.register_fake(f"{namespace}::forward_masked", _fake_forward, lib=library)
    torch.library.register_fake(f"{namespace}::forward_intervals", _fake_forward, lib=library)
    torch.library.register_fake(f"{namespace}::forward_lse", _fake_forward_lse, lib=library)
    torch.library.register_fake(f"{namespace}::backward", _fake_backward, lib=library)
    torch.library.register_autograd(
        f"{namespace}::forward_lse", gradient, setup_context=save_for_backward, lib=library
    )
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


def _defined(namespace: str, most: int = 99) -> Any:
    for number in range(1, most + 1):
        name = namespace if number == 1 else f"{namespace}_again{number}"
        try:
            return torch.library.Library(name, "DEF")
        except RuntimeError:  # PyTorch has it, from an earlier import
            if number == most:
                raise
    return None


def _fake_forward(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(query)


def _fake_forward_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    return torch.empty_like(query), lse


def _fake_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
