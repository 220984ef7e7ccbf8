"""Gradients of a kernel's output: by the backward that PyTorch itself would have called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from .call import PLAIN, Call, Saved, output_of
from .pytorch_calls import CUDNN, aligned, nan_prone, settled
from .sdpa_patch import sdpa

_choice = torch._fused_sdp_choice
SETTINGS = [
    getattr(torch._C, f"_get_{name}", object)
    for name in (
        *("cudnn_sdp_enabled", "flash_sdp_enabled", "mem_efficient_sdp_enabled"),
        *("math_sdp_enabled", "overrideable_sdp_enabled", "sdp_priority_order"),
        *("deterministic_algorithms", "deterministic_algorithms_warn_only"),
    )
]
"""All that PyTorch's choice depends on but a call's plan. Without one of them it is asked each
time."""


How = tuple[bool, float, torch.Tensor]
"""causal, scale, and the seed of no dropout."""
# Rows of a tile of PyTorch's efficient backward.
_EFFICIENT_ROWS = 32
# The widest heads of PyTorch's flash attention and cuDNN's.
_FLASH_HEAD_DIM = 256


def is_efficient(query: torch.Tensor) -> bool:
    """Whether PyTorch's efficient attention is all that it has for gradients of such heads."""
    return bool(query.shape[3] > _FLASH_HEAD_DIM)


def with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the log-sum-exp of `forward_lse`, by what PyTorch itself would call.

    That is cuDNN, flash, or the efficient one: what no backward of cuDNN can take is not computed
    by it.
    """
    if _takes_cudnn(query, key, value, causal, scale):
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        how = (None, True, 0.0, causal, False)
        out, lse, *_ = cudnn(*map(aligned, (query, key, value)), *how, scale=scale)
        return like(out, query, value), lse.squeeze(-1).contiguous()
    given = [aligned(_with_contiguous_head_dim(each)) for each in (query, key, value)]
    if is_efficient(query):
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        q, *keys = given
        k, v = (_for_queries(each, query) for each in keys)
        out, lse, *_ = efficient(q, k, v, None, True, 0.0, causal, scale=scale)
        return like(out, query, value), lse[..., : query.shape[2]].contiguous()
    given = _of_one_head_dim(*given)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = flash(*given, 0.0, causal, False, scale=scale)
    return like(out[..., : value.shape[3]], query, value), lse.contiguous()


def like(out: torch.Tensor, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The output in the layout that the fake kernel promises: see `output_of`."""
    promised = output_of(query, value)
    return out if out.stride() == promised.stride() else promised.copy_(out)


def _with_contiguous_head_dim(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as PyTorch's flash attention takes it: a copy only if it must be."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _of_one_head_dim(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with zeros after their rows, which change no product: flash has one head_dim."""
    widest = max(each.shape[3] for each in tensors)
    return [
        each if each.shape[3] == widest else pad(each, (0, widest - each.shape[3]))
        for each in tensors
    ]


# ---- which backward ----
def _takes_cudnn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> bool:
    """Whether PyTorch would call cuDNN. A compiler's tensors count with the sizes it began with."""
    how = {"scale": scale, "enable_gqa": bool(query.shape[1] != key.shape[1])}
    given = (query, key, value)
    if all(type(each) in PLAIN for each in given):
        return bool(_choice(*given, None, 0.0, causal, **how) == CUDNN)
    return _becomes(given, is_causal=causal, **how) == "_scaled_dot_product_cudnn_attention"


class _OperatorNames(TorchDispatchMode):  # type: ignore[misc]
    """Keeps the names of operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().partition("::")[2])
        return func(*args, **(kwargs or {}))


def _becomes(given: tuple[torch.Tensor, ...], **how: Any) -> str:
    """Name of the operator that PyTorch's attention becomes in compiled code.

    `_choice` knows no tensors of a compiler, which would also take the question into its graph.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    kinds = [
        ([*map(_first, each.shape)], [*map(_first, each.stride())], each.dtype, each.device)
        for each in given
    ]

    def ask() -> str:
        with FakeTensorMode():
            made = [
                torch.empty_strided(size, stride, dtype=dtype, device=device, requires_grad=True)
                for size, stride, dtype, device in kinds
            ]
            with _OperatorNames() as called:
                sdpa(*made, **how)
        return next((name for name in called.names if name.startswith("_scaled_dot")), "")

    # In a thread of its own, where no compiler is at work and autograd is switched on.
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(ask).result()


def _first(number: Any) -> int:
    """A number as it was when a compiler first met it."""
    return number if isinstance(number, int) else int(number.node.hint)


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
        plan: Any,
        backward: Any,
    ) -> torch.Tensor:
        """plan: has the output and the log-sum-exp. backward: a BackwardOperator."""
        settings = [setting() for setting in SETTINGS]
        by = plan.by_pytorch
        if by is None or by[0] != settings:
            by_cudnn = _takes_cudnn(query, key, value, plan.causal, plan.scale)
            gradients = _gradients_of(query, by_cudnn)
            by = plan.by_pytorch = (settings, gradients, plan.causal, plan.scale)
        ctx.by, ctx.own = by, backward
        made = plan.launched(query, key, value)
        out, lse = made or with_lse(query, key, value, plan.causal, plan.scale)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Gradients by a kernel, otherwise by the backward that PyTorch would have called."""
        _, gradients, causal, scale = ctx.by
        if ctx.own.serves:
            made = ctx.own.gradients(call_of(grads[0], ctx.saved_tensors, None, causal, scale))
            if made is not None:
                return *made, None, None
        seed = _no_seed(grads[0].device)
        dq, dk, dv = gradients(grads[0], ctx.saved_tensors, (causal, scale, seed))
        return dq, dk, dv, None, None


def call_of(
    grad: torch.Tensor, saved: Any, ranges: Any, causal: bool, scale: float, limits: Any = None
) -> Call:
    """The backward of a call. grad: of the output. saved: query, key, value, the output and lse.

    ranges: int32 (batch, 2), the keys of each item, or None. limits: of these, by diagonals.
    """
    query, key, value, out, lse = saved
    how: Any = (ranges, causal, scale, True, limits)
    return Call(query, key, value, *how)._replace(extra=Saved(out, grad, lse))


# `apply` where no transform of torch.func is active, of which its Python asks at each call.
with_gradient: Any = getattr(super(torch.autograd.Function, Gradient), "apply", Gradient.apply)


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Keep what the operator's `backward` needs, and whether cuDNN computes it."""
    query, key, value, ctx.causal, ctx.scale = inputs
    out, lse = output
    ctx.by_cudnn = _takes_cudnn(query, key, value, ctx.causal, ctx.scale)
    ctx.save_for_backward(query, key, value, out, lse)
    ctx.mark_non_differentiable(lse)


def of_operator(operator: Any, op: Any) -> Callable[..., tuple[Any, ...]]:
    """The gradient of an operator's `forward_lse`, which a compiler traces.

    op: its operator `backward`, which the graph gets where a kernel may serve, and before cuDNN's,
    which needs strides that a compiler does not know; otherwise PyTorch's own.
    """

    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        saved, how = ctx.saved_tensors, (ctx.causal, ctx.scale, ctx.by_cudnn)
        query, key, value, *_ = saved
        if operator.backward.traced(Call(query, key, value, None, ctx.causal), ctx.by_cudnn):
            return (*op(grad, *saved, *how), None, None)
        return (*gradients_by_pytorch(grad, saved, *how), None, None)

    return backward


def gradients_by_pytorch(
    grad: torch.Tensor, saved: tuple[torch.Tensor, ...], causal: bool, scale: float, cudnn: bool
) -> tuple[Any, ...]:
    """dq, dk and dv by PyTorch's own backward; cudnn: whether it would call cuDNN's."""
    seed = grad.new_empty((), dtype=torch.int64)
    gradients = _gradients_of(saved[0], cudnn)
    return gradients(grad, saved, (causal, scale, seed))


@functools.cache
def _no_seed(device: torch.device) -> torch.Tensor:
    """The seed of no dropout, one for all calls."""
    return torch.empty((), dtype=torch.int64, device=device)


def _gradients_of(query: torch.Tensor, cudnn: bool) -> Callable[..., tuple[Any, ...]]:
    """The backward that PyTorch would call. cudnn: whether it is cuDNN's."""
    if cudnn:
        return _cudnn_gradients
    return _efficient_gradients if is_efficient(query) else _flash_gradients


def _flash_gradients(
    grad: torch.Tensor, saved: tuple[torch.Tensor, ...], how: How
) -> tuple[Any, ...]:
    """PyTorch's own flash backward, from our output and log-sum-exp."""
    (*inputs, out, lse), (causal, scale, seed) = saved, how
    given = (*(aligned(_with_contiguous_head_dim(each)) for each in (grad, *inputs)), out)
    alike = inputs[0].shape[3] == inputs[2].shape[3]
    grad, query, key, value, out = given if alike else _of_one_head_dim(*given)
    lengths = (query.shape[2], key.shape[2])
    grads: tuple[Any, ...] = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        *(grad, query, key, value, out, lse, None, None, *lengths, 0.0, causal, seed, seed),
        scale=scale,
    )
    if alike:
        return grads
    return tuple(each[..., : of.shape[3]] for each, of in zip(grads, inputs, strict=True))


def _efficient_gradients(
    grad: torch.Tensor, saved: tuple[torch.Tensor, ...], how: How
) -> tuple[Any, ...]:
    """PyTorch's own efficient backward, from our output and log-sum-exp.

    It reads the log-sum-exps of whole tiles of rows, has as many key heads as query heads, and
    takes the output's rows for those of its own forward, which has the heads of a row together.
    """
    (*inputs, out, lse), (causal, scale, seed) = saved, how
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    grad, query, *keys = (aligned(_with_contiguous_head_dim(each)) for each in (grad, *inputs))
    key, value = (_for_queries(each, query) for each in keys)
    lse = pad(lse, (0, -lse.shape[2] % _EFFICIENT_ROWS), value=torch.inf)
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    rest = (seed, seed, 0.0, [True, True, True, False], causal)
    dq, dk, dv, _ = backward(grad, query, key, value, None, out, lse, *rest, scale=scale)
    heads = keys[0].shape[1]
    if heads != query.shape[1]:
        dk, dv = (each.unflatten(1, (heads, -1)).sum(2) for each in (dk, dv))
    return dq, dk, dv


def _for_queries(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values, repeated for the query heads that share them."""
    group = query.shape[1] // tensor.shape[1]
    return tensor if group == 1 else tensor.repeat_interleave(group, 1)


def _cudnn_gradients(
    grad: torch.Tensor, saved: tuple[torch.Tensor, ...], how: How
) -> tuple[Any, ...]:
    """Gradients by cuDNN, which takes the log-sum-exp as (batch, heads, seqlen_q, 1)."""
    (*given, out, lse), (causal, scale, seed) = saved, how
    if nan_prone(given[1], causal):
        return _flash_gradients(grad, saved, how)
    query, key, value = map(aligned, given)
    if query is not given[0]:
        out = out.contiguous()  # as cuDNN's own would be
    lengths = (query.shape[2], key.shape[2])
    lse = lse.unsqueeze(-1)
    grad = settled(grad, out)  # -0.0 of dropout finds the plans of these layouts alone
    grads: tuple[Any, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        *(grad, query, key, value, out, lse, seed, seed, None, None, None, *lengths, -0.0, causal),
        scale=scale,
    )
    return grads
