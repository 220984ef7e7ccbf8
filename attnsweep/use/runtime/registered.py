"""The operators in torch.ops: schemas, fake kernels, and the gradient by PyTorch's own backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_FORWARD = "forward(Tensor query, Tensor key, Tensor value, bool causal, float scale) -> Tensor"
_FORWARD_LSE = (
    "forward_lse(Tensor query, Tensor key, Tensor value, bool causal, float scale)"
    " -> (Tensor, Tensor)"
)
_FORWARD_FP8 = (
    "forward_fp8(Tensor query, Tensor key, Tensor value, Tensor q_scale, Tensor k_scale,"
    " Tensor v_scale, bool causal, float scale) -> Tensor"
)


def register(
    namespace: str,
    devices: Sequence[str],
    forward: Callable[..., torch.Tensor],
    forward_lse: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> Any:
    """Define `forward` and `forward_lse`; returns the library, with which they live.

    A package that is imported again gets another namespace: `ns` of the library is the one.
    The output has the layout of torch.empty_like(query); the log-sum-exp is float32 (batch, heads,
    seqlen_q), contiguous. devices: types, as `cuda`.
    """
    library, tags = _defined(namespace), _tags()
    namespace = library.ns
    library.define(_FORWARD, tags=tags)
    library.define(_FORWARD_LSE, tags=tags)
    for kind in devices:
        library.impl("forward", forward, kind.upper())
        library.impl("forward_lse", forward_lse, kind.upper())
    torch.library.register_fake(f"{namespace}::forward", _fake_forward, lib=library)
    torch.library.register_fake(f"{namespace}::forward_lse", _fake_forward_lse, lib=library)
    torch.library.register_autograd(
        f"{namespace}::forward_lse", _backward, setup_context=_save_for_backward, lib=library
    )
    return library


def register_fp8(
    library: Any, devices: Sequence[str], forward: Callable[..., torch.Tensor], fake: Any
) -> Any:
    """Define `forward_fp8` in a library, and return it. It has no gradient.

    fake: what a compiler calls in its place, with tensors that hold nothing.
    """
    library.define(_FORWARD_FP8, tags=_tags())
    for kind in devices:
        library.impl("forward_fp8", forward, kind.upper())
    torch.library.register_fake(f"{library.ns}::forward_fp8", fake, lib=library)
    return getattr(torch.ops, library.ns).forward_fp8.default


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


def _with_contiguous_head_dim(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as PyTorch's flash attention takes it: a copy only if it must be."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def flash_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `forward_lse` returns, by PyTorch's own flash attention."""
    given = map(_with_contiguous_head_dim, (query, key, value))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = flash(*given, 0.0, causal, False, scale=scale)
    return like(out, query), lse.contiguous()


def like(out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The output in the layout that the fake kernel promises: that of torch.empty_like(query)."""
    promised = torch.empty_like(query)
    return out if out.stride() == promised.stride() else promised.copy_(out)


def _fake_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> torch.Tensor:
    return torch.empty_like(query)


def _fake_forward_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    return torch.empty_like(query), lse


_choice = torch._fused_sdp_choice
_CUDNN = 3  # torch.nn.attention.SDPBackend.CUDNN_ATTENTION, whose import takes a second
# All that PyTorch's choice depends on but a call's plan. Without one of them it is asked each time.
_SETTINGS = [
    getattr(torch._C, f"_get_{name}", object)
    for name in (
        *("cudnn_sdp_enabled", "flash_sdp_enabled", "mem_efficient_sdp_enabled"),
        *("math_sdp_enabled", "overrideable_sdp_enabled", "sdp_priority_order"),
        *("deterministic_algorithms", "deterministic_algorithms_warn_only"),
    )
]


def _asked(plan: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    """The backward of the backend that PyTorch would call, with its arguments."""
    how = {"scale": plan.scale, "enable_gqa": plan.grouped}
    chosen = _choice(query, key, value, None, 0.0, plan.causal, **how)
    return _cudnn_gradients if chosen == _CUDNN else _flash_gradients, plan.causal, plan.scale


class Gradient(torch.autograd.Function):  # type: ignore[misc]
    """`forward_lse` and its gradient, for calls that no compiler or dispatch mode looks at.

    An operator's own autograd goes through more Python than this.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        run: Callable[..., Any],
        plan: Any,
    ) -> torch.Tensor:
        """run: computes the output and the log-sum-exp by a plan, given first, or returns None."""
        settings = [setting() for setting in _SETTINGS]
        backward = plan.backward
        if backward is None or backward[0] != settings:
            backward = plan.backward = (settings, *_asked(plan, query, key, value))
        ctx.by = backward  # one attribute: each takes time
        made = run(plan, query, key, value)
        out, lse = made or flash_with_lse(query, key, value, plan.causal, plan.scale)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """PyTorch's own backward: cuDNN's where it would have called cuDNN, or else flash's."""
        _, gradients, causal, scale = ctx.by
        return (*gradients(grads[0], ctx.saved_tensors, causal, scale), None, None)


# `apply` where no transform of torch.func is active, of which its Python asks at each call.
with_gradient: Any = getattr(super(torch.autograd.Function, Gradient), "apply", Gradient.apply)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    query, key, value, ctx.causal, ctx.scale = inputs
    out, lse = output
    ctx.save_for_backward(query, key, value, out, lse)
    ctx.mark_non_differentiable(lse)


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    return (*_flash_gradients(grad, ctx.saved_tensors, ctx.causal, ctx.scale), None, None)


def _flash_gradients(
    grad: torch.Tensor, saved: tuple[torch.Tensor, ...], causal: bool, scale: float
) -> tuple[Any, ...]:
    """PyTorch's own flash backward, from our output and log-sum-exp. No dropout, so no seed."""
    *inputs, out, lse = saved
    query, key, value = map(_with_contiguous_head_dim, inputs)
    none = grad.new_empty((), dtype=torch.int64)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    grads: tuple[Any, ...] = backward(
        *(grad, query, key, value, out, lse, None, None, query.shape[2], key.shape[2]),
        *(0.0, causal, none, none),
        scale=scale,
    )
    return grads


def _cudnn_gradients(
    grad: torch.Tensor, saved: tuple[torch.Tensor, ...], causal: bool, scale: float
) -> tuple[Any, ...]:
    """The same by cuDNN, which takes the log-sum-exp as (batch, heads, seqlen_q, 1)."""
    query, key, value, out, lse = saved
    none = grad.new_empty((), dtype=torch.int64)
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    grads: tuple[Any, ...] = backward(
        *(grad, query, key, value, out, lse.unsqueeze(-1), none, none, None, None, None),
        *(query.shape[2], key.shape[2], 0.0, causal),
        scale=scale,
    )
    return grads
