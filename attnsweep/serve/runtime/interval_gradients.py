"""Gradients of calls with a window, an offset or key lengths: by kernels, or by PyTorch again."""

from __future__ import annotations

from typing import Any

import torch

from attnsweep.core.ops import BACKWARD

from .arguments import Call, sized
from .gradients import like
from .intervals import Diagonals, by_pytorch, dense, forms, scanned
from .planner import choice_of
from .plans import MOST_PLANS


class IntervalGradients:
    """The operators `forward_intervals_lse` and `backward_intervals` of compiled code.

    operator: whose kernels serve.
    """

    def __init__(self, operator: Any) -> None:
        self._operator, self._planner = operator, operator.planner
        self._known: dict[Any, bool] = {}

    def may_serve(self, query: Any, key: Any, value: Any, limits: Any, padded: bool) -> bool:
        """Whether kernels may serve a call with gradients, by all that a compiler knows of it.

        Of sizes that vary the first answer is at run time, for which a winner must have the others.
        """
        if all(n is None or type(n) is int for n in limits) and sized(query, key, value):
            given = (query, key, value, limits, padded)
            return self._serves(*given) and self._operator.backward.serves_intervals(*given)
        gpu, sizes = self._planner.gpu(query.device.index or 0), (*query.shape, *key.shape[1:3])
        return any(
            each.op == BACKWARD
            and (each.layout.kind == "padded") == padded
            and (padded or each.kind != "full")
            and all(type(n) is not int or n == m for n, m in zip(sizes, _sizes(each), strict=True))
            for each in (winner.problem for winner in (gpu.winners if gpu else ()))
        )

    def _serves(self, query: Any, key: Any, value: Any, limits: Diagonals, padded: bool) -> bool:
        """Whether kernels are for a call with gradients: the same before its forward and after it.

        So it asks for nothing but sizes, and for no setting that may change between the two.
        """
        what = (query.shape, key.shape, value.shape, query.dtype, query.device, limits, padded)
        found = self._known.get(what)
        if found is None:
            gpu = self._planner.gpu(query.device.index or 0)
            own = self._operator.backward.choice(query, key, value, False, limits, padded)
            found = own is not None and (own.kernel is not None or own.code == "deterministic")
            if found:
                of = forms(limits, query.shape[2], key.shape[2], padded)
                found = choice_of(gpu, query, key, value, of, True)[0].kernel is not None
            if len(self._known) >= MOST_PLANS:
                self._known.clear()
            self._known[what] = found
        return found

    def forward_lse(
        self, query: Any, key: Any, value: Any, ranges: Any, low: Any, high: Any, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A call whose gradients a kernel may compute. Where none does, nobody reads the lse."""
        limits, operator = (low, high), self._operator
        call = _call(query, key, value, ranges, limits, scale)
        plan = operator.masked_plan(call, lse=True)
        done = operator.run(plan, query, key, value, ranges, False) if plan.calls else None
        if done is not None:
            return done[0], done[1]
        out = by_pytorch(call)
        if self._serves(query, key, value, limits, ranges is not None):
            lse = log_sum_exp(limits, query, key, ranges, scale)
        else:
            lse = query.new_zeros(query.shape[:3], dtype=torch.float32)
        return like(out, query, value), lse

    def backward(self, grad: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
        """The gradients of `forward_lse`."""
        query, key, value, out, lse, ranges, low, high, scale = given
        serves = self._serves(query, key, value, (low, high), ranges is not None)
        saved = (query, key, value, out, lse if serves else None)
        made = gradients(self._operator.backward, grad, saved, ranges, (low, high), scale)
        return tuple(map(like, made, saved[:3], saved[:3]))


def _sizes(problem: Any) -> tuple[int, ...]:
    of_q = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim)
    return *of_q, problem.heads_kv, problem.seqlen_k


def _call(query: Any, key: Any, value: Any, ranges: Any, limits: Diagonals, scale: float) -> Call:
    grouped = bool(query.shape[1] != key.shape[1])
    return Call(query, key, value, ranges, False, scale, grouped, limits)


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
            call = _call(query, key, value, ranges, plan.limits, plan.scale)
            made = (by_pytorch(call), None)
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
        q, k, v = given = [
            each if again and each.requires_grad else each.detach().requires_grad_()
            for each in (query, key, value)
        ]
        out = by_pytorch(_call(q, k, v, ranges, limits, scale))
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
        made = op(grad, *ctx.saved_tensors, *ctx.limits, ctx.scale)
        return *made, None, None, None, None

    return backward


def key_ranges(query: torch.Tensor, key: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """int32 (batch, 2): what kernels read of lengths."""
    return scanned("key_range", (None, None), query, key, lengths)
