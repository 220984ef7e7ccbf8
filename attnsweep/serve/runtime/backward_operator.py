"""Gradients of an attention call, by the backward kernels of a package where they serve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnsweep.core.errors import ProblemError
from attnsweep.core.ops import BACKWARD
from attnsweep.core.problem import CAUSAL, FULL

from . import families
from .call import Call, laid_out, plain, problem_of, sized
from .call_cache import transformed
from .dispatch import Choice, choose, exactly
from .driver import DriverError, Unaligned, unmapped
from .families import WGMMA_BACKWARD
from .gradients import like
from .intervals import Diagonals, by_pytorch, dense, forms, scanned
from .planner import Planner, choice_of, unmappable
from .serving_plan import FORKED, MOST_PLANS, Plan
from .table import PackageError

Saved = tuple[torch.Tensor, ...]
"""query, key, value, out and the log-sum-exp of a forward, float32 and contiguous."""
_ORDERED = Choice(None, "deterministic", "deterministic algorithms are asked for")
_NO_INTERVAL = Choice(None, "mask", "no kernel has gradients of these diagonals")
_OTHER_HEAD_DIM = Choice(None, "head_dim", "v has another head_dim than q")
_NAMES = ("q", "k", "v", "o", "do", "lse", "dq", "dk", "dv")
_empty_like, _modes = torch.empty_like, torch._C._len_torch_dispatch_stack
_is_deterministic = torch.are_deterministic_algorithms_enabled


class BackwardOperator:
    """The gradients of an operator's calls. serves: whether the table has any kernel for them.

    operator: whose devices, streams and counts these are.
    """

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self._planner: Planner = operator.planner
        self._plans: dict[Any, Plan] = {}
        gpus = operator.table.gpus.values()
        self.serves = any(w.problem.op == BACKWARD for gpu in gpus for w in gpu.winners)

    def forget(self) -> None:
        """Have each call planned anew."""
        self._plans.clear()

    def gradients(
        self,
        grad: torch.Tensor,
        saved: Saved,
        causal: bool,
        scale: float,
        limits: Diagonals | None = None,
        ranges: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...] | None:
        """dq, dk and dv in the layouts of q, k and v; None if no kernel serves the call.

        grad: of the output, with any strides. limits, ranges: diagonals, between which queries see
        keys, of those of each item, int32 (batch, 2). Where gradients are recorded of these, or a
        dispatch mode or a transform must see an operator, PyTorch's own serves.
        """
        query, key, value, *_ = saved
        seen = torch.is_grad_enabled() or _modes() or transformed()
        if not self.serves or seen or not plain(query, key, value):
            return None
        grad = grad.resolve_neg()
        try:
            fits = grad.data_ptr() and not grad.data_ptr() & 15 and unmapped(laid_out(grad)) is None
        except RuntimeError:  # a batch of them, which has no memory of its own
            return None
        if not fits:
            grad = grad.clone(memory_format=torch.contiguous_format)
        plan = self._plan(grad, saved, causal, scale, limits, ranges is not None)
        made = self._run(plan, grad, saved, ranges) if plan.calls else None
        kind = "kernel_backward" if made is not None else "pytorch_backward"
        self._operator.counts[kind] = self._operator.counts.get(kind, 0) + 1
        return made

    def traced(self, saved: Saved, causal: bool, cudnn: bool) -> bool:
        """Whether a compiler's call goes to the operator `backward`: where a kernel may serve it.

        If the compiler knows all sizes, the table says whether one does. cudnn: whether PyTorch
        would call cuDNN's, which the operator does too.
        """
        query, key, value, *_ = saved
        if torch.is_grad_enabled():
            return False
        if cudnn or not self.serves:
            return cudnn
        gpu = self._planner.gpu(query.device.index or 0)
        if gpu is None or not sized(*saved[:3]):
            return gpu is not None
        return self._choice(gpu, query, key, value, causal)[0].kernel is not None

    def choice(self, query: Any, key: Any, value: Any, *how: Any) -> Choice | None:
        """What serves the gradients of a call; None if the table has no kernel for any.

        how: whether it is causal; then diagonals, and whether it has lengths, if it has these.
        """
        gpu = self._planner.gpu(query.device.index or 0) if self.serves else None
        return None if gpu is None else self._choice(gpu, query, key, value, *how)[0]

    def serves_intervals(
        self, query: Any, key: Any, value: Any, limits: Diagonals | None, padded: bool
    ) -> bool:
        """Whether a kernel has the gradients of a call with a window, an offset or lengths."""
        if limits is None or not self.serves:
            return False
        if self._planner.unserved(query, key, value, False, None, True):
            return False
        found = self.choice(query, key, value, False, limits, padded)
        return found is not None and found.kernel is not None

    def _choice(
        self,
        gpu: Any,
        query: Any,
        key: Any,
        value: Any,
        causal: bool,
        limits: Diagonals | None = None,
        padded: bool = False,
    ) -> tuple[Choice, Any]:
        form: tuple[Any, ...] = (CAUSAL if causal else FULL,)
        if limits is not None:
            form, *_ = forms(limits, query.shape[2], key.shape[2], padded)
            if form[0].as_tensor:
                return _NO_INTERVAL, None
        try:
            forward = problem_of(query, key, value, *form)
        except ProblemError as error:
            return Choice(None, "far", error.what), None
        if forward.head_dim_v:
            return _OTHER_HEAD_DIM, None
        problem = replace(forward, op=BACKWARD)
        choice = choose(gpu, problem) if limits is None else exactly(gpu, problem)
        kernel, is_deterministic = choice.kernel, WGMMA_BACKWARD.kernel.is_deterministic
        if kernel is not None and _is_deterministic() and not is_deterministic(kernel.values):
            choice = _ORDERED
        return choice, problem

    def _plan(self, grad: torch.Tensor, saved: Saved, *how: Any) -> Plan:
        """how: causal, scale, diagonals or None, and whether there are lengths."""
        tensors = (*saved[:4], grad)
        what = (
            *((each.shape, each.stride(), each.dtype, each.get_device()) for each in tensors),
            *(*how, _is_deterministic()),
        )
        plan = self._plans.get(what)
        if plan is None:
            if self._operator.forked:
                return FORKED
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[what] = self._made(tensors, *how)
        return plan

    def _made(
        self, given: Saved, causal: bool, scale: float, limits: Diagonals | None, padded: bool
    ) -> Plan:
        query, key, value, out, grad = given
        unserved = self._planner.unserved(query, key, value, causal, scale, True)
        if unserved is not None:
            return Plan(unserved)
        gpu = self._planner.gpu(query.device.index or 0)
        if gpu is None or not out.dtype == grad.dtype == query.dtype:
            return Plan(Choice(None, "gpu", "this GPU was not tuned, or dtypes differ"))
        like_inputs = [_empty_like(each, device="meta") for each in (query, key, value)]
        names = [name for name in _NAMES if name != "lse"]
        each = zip(names, (*given, *like_inputs), strict=True)
        tensors = {name: laid_out(tensor) for name, tensor in each}
        if fault := unmappable(tensors):
            return Plan(fault)
        choice, problem = self._choice(gpu, query, key, value, causal, limits, padded)
        if choice.kernel is None:
            return Plan(choice)
        config, stages = choice.kernel.values, choice.kernel.stages
        own = {name: tensors[name].strides for name in ("o", "do", "dq")}
        calls = families.launches(WGMMA_BACKWARD, config, problem, scale, lse=True, strides=own)
        if not calls.keys() <= stages.keys():
            return Plan(Choice(None, "no_code", "the kernel has no code of a stage"))
        spaces = families.workspaces(WGMMA_BACKWARD, config, problem)
        return Plan(
            choice,
            calls,
            stages,
            tensors,
            query.get_device(),
            floats=tuple(spaces.values()),
            names=(*_NAMES, *spaces, *(("key_range",) if padded else ())),
        )

    def _run(
        self, plan: Plan, grad: torch.Tensor, saved: Saved, ranges: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...] | None:
        operator, index = self._operator, plan.index
        if index >= 0 and index != operator.current_device():
            with torch.cuda.device(index):
                return self._run(plan, grad, saved, ranges)
        query, key, value, out, lse = saved
        try:
            spaces = _spaces(query, plan.floats)
        except torch.OutOfMemoryError:  # PyTorch's own may do with less
            return None
        made = (_empty_like(query), _empty_like(key), _empty_like(value))
        tensors = (query, key, value, out, grad, lse, *made, *spaces)
        addresses = tuple([each.data_ptr() for each in tensors])
        if ranges is not None:
            addresses += (ranges.data_ptr(),)
        if addresses[3] & 15:
            return None
        try:
            launches = plan.launches or operator.prepared(plan, index)
            if launches is None:
                return None
            launches.issue(addresses, operator.stream(index))
        except Unaligned:
            return None
        except (DriverError, PackageError) as error:
            operator.gave_up(plan, error)
            return None
        return made


def _spaces(query: torch.Tensor, floats: tuple[int, ...]) -> list[torch.Tensor]:
    return [query.new_empty(count, dtype=torch.float32) for count in floats]


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
