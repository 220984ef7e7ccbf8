"""Gradients of calls with a window, an offset or key lengths: by kernels, or by PyTorch again."""

from __future__ import annotations

from typing import Any

import torch

from .intervals import Diagonals, by_pytorch, dense, scanned


class IntervalGradient(torch.autograd.Function):  # type: ignore[misc]
    """A call of `Operator.masked` whose plan has the log-sum-exp, and its gradient.

    What the backward reads of lengths is made in the forward: they may change after it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: torch.Tensor | None,
        operator: Any,
        plan: Any,
        keep: bool,
    ) -> torch.Tensor:
        """keep: as of `masked`."""
        made = operator.run(plan, query, key, value, lengths, keep)
        ranges = None
        if lengths is not None:
            ranges = operator.ranges(plan, query, key, lengths, keep)
        ctx.own, ctx.limits, ctx.scale = operator.backward, plan.limits, plan.scale
        if made is None:
            grouped = query.shape[1] != key.shape[1]
            how = (plan.limits, query, key, value, ranges, 0.0, plan.scale, grouped)
            made = (by_pytorch(*how), None)
        ctx.save_for_backward(query, key, value, *made, ranges)
        return made[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """By a kernel, or else by PyTorch's attention, computed again."""
        *saved, ranges = ctx.saved_tensors
        made = gradients(ctx.own, grads[0], saved, ranges, ctx.limits, ctx.scale)
        return *made, None, None, None, None


def gradients(
    backward: Any,
    grad: torch.Tensor,
    saved: Any,
    ranges: torch.Tensor | None,
    limits: Diagonals,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv. backward: a BackwardOperator. saved: as of it, but lse may be None.

    ranges: int32 (batch, 2), the keys of each item, or None. limits: of these, by diagonals.
    """
    query, key, value, _, lse = saved
    if lse is not None:
        made = backward.gradients(grad, tuple(saved), False, scale, limits, ranges)
        if made is not None:
            by_kernel: tuple[torch.Tensor, ...] = made
            return by_kernel
    again = torch.is_grad_enabled()  # gradients of gradients are wanted
    with torch.enable_grad():
        given = [
            each if again and each.requires_grad else each.detach().requires_grad_()
            for each in (query, key, value)
        ]
        grouped = query.shape[1] != key.shape[1]
        q, k, v = given
        out = by_pytorch(limits, q, k, v, ranges, 0.0, scale, grouped)
    found = torch.autograd.grad(out, given, grad, create_graph=again)
    return tuple(found)


def log_sum_exp(
    limits: Diagonals,
    query: torch.Tensor,
    key: torch.Tensor,
    ranges: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """That of a forward which no kernel could be launched for, an item of the batch at a time."""
    made = query.new_empty(query.shape[:3], dtype=torch.float32)
    group = query.shape[1] // key.shape[1]
    for item in range(query.shape[0]):
        own = slice(item, item + 1)
        q, k = query[own].float(), key[own].float().repeat_interleave(group, 1)
        mask = dense(limits, q, k, None if ranges is None else ranges[own])
        scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
        made[own] = scores.logsumexp(-1)
    return made


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """What the gradient of the operator `forward_intervals_lse` needs."""
    query, key, value, ranges, low, high, ctx.scale = inputs
    ctx.limits = (low, high)
    out, lse = output
    ctx.save_for_backward(query, key, value, out, lse, ranges)
    ctx.mark_non_differentiable(lse)


def of_operator(op: Any) -> Any:
    """The gradient of `forward_intervals_lse`, which a compiler traces. op: its own operator."""

    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        made = op()(grad, *ctx.saved_tensors, *ctx.limits, ctx.scale)
        return *made, None, None, None, None

    return backward


def key_ranges(query: torch.Tensor, key: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """int32 (batch, 2): what kernels read of lengths."""
    return scanned("key_range", (None, None), query, key, lengths)
