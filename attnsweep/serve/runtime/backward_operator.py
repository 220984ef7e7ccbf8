"""Gradients of an attention call, by the backward kernels of a package where they serve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from attnsweep.core.errors import ProblemError
from attnsweep.core.ops import BACKWARD
from attnsweep.core.problem import CAUSAL, FULL

from . import families
from .call import Call, CuSeqlens, Saved, laid_out, plain, problem_of, sized
from .call_cache import transformed
from .dispatch import Choice, choose, exactly
from .driver import DriverError, Unaligned, unmapped
from .families import WGMMA_BACKWARD
from .gradients import Gradient, call_of, like
from .intervals import Diagonals, dense, forms, scanned
from .launcher import Launcher
from .mask_lists import MaskList
from .planner import NO_CODE, Planner, choice_of, unmappable
from .pytorch_calls import by_pytorch
from .serving_plan import MOST_PLANS, ServingPlan
from .table import PackageError

_ORDERED = Choice(None, "deterministic", "deterministic algorithms are asked for")
_NO_INTERVAL = Choice(None, "mask", "no kernel has gradients of these diagonals")
_OTHER_HEAD_DIM = Choice(None, "head_dim", "v has another head_dim than q")
_NAMES = ("q", "k", "v", "o", "do", "lse", "dq", "dk", "dv")
_STRIDED = {*_NAMES} & {
    name for stage in WGMMA_BACKWARD.kernel.stages.values() for name in stage.strided
}
_empty_like, _modes = torch.empty_like, torch._C._len_torch_dispatch_stack
_is_deterministic = torch.are_deterministic_algorithms_enabled


@dataclass(slots=True, eq=False, kw_only=True)
class BackwardPlan(ServingPlan):
    """The plan of a backward: see Saved."""

    def run(self, call: Call) -> tuple[torch.Tensor, ...] | None:
        """dq, dk and dv; None if nothing could be launched."""
        launcher, index = self.launcher, self.index
        if index >= 0 and index != launcher.current_device():
            with torch.cuda.device(index):
                return self.run(call)
        query, key, value, ranges = call[:4]
        out, grad, lse = call.extra
        try:
            spaces = [query.new_empty(count, dtype=torch.float32) for count in self.floats]
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
            launches = self.launches or launcher.bound(self)
            if launches is None:
                return None
            launches.issue(addresses, launcher.stream(index))
        except Unaligned:
            return None
        except (DriverError, PackageError) as error:
            launcher.gave_up(self, error)
            return None
        return made


class BackwardOperator:
    """The gradients of a package's calls. serves: whether the table has any kernel for them."""

    def __init__(self, planner: Planner, launcher: Launcher) -> None:
        self._planner, self._launcher = planner, launcher
        planner.backward, planner.kinds[Saved] = self, self._planned
        gpus = launcher.table.gpus.values()
        self.serves = any(w.problem.op == BACKWARD for gpu in gpus for w in gpu.winners)

    def gradients(self, call: Call) -> tuple[torch.Tensor, ...] | None:
        """dq, dk and dv of a backward, laid out as q, k and v; None if no kernel serves it.

        Its gradient of the output has any strides, its mask is the keys of each item, int32
        (batch, 2), or None. Where gradients are recorded of these, or a dispatch mode or a
        transform must see an operator, PyTorch's own serves.
        """
        seen = torch.is_grad_enabled() or _modes() or transformed()
        if not self.serves or seen or not plain(*call[:3]):
            return None
        grad = call.extra.grad.resolve_neg()
        try:
            fits = grad.data_ptr() and not grad.data_ptr() & 15 and unmapped(laid_out(grad)) is None
        except RuntimeError:  # a batch of them, which has no memory of its own
            return None
        if not fits:
            grad = grad.clone(memory_format=torch.contiguous_format)
        if grad is not call.extra.grad:
            call = call._replace(extra=call.extra._replace(grad=grad))
        plan = self._planner.looked_up(call)
        made: tuple[torch.Tensor, ...] | None = plan.run(call) if plan.calls else None
        self._launcher.count("kernel_backward" if made is not None else "pytorch_backward")
        return made

    def traced(self, call: Call, cudnn: bool) -> bool:
        """Whether a compiler's call goes to the operator `backward`: where a kernel may serve it.

        If the compiler knows all sizes, the table says whether one does. cudnn: whether PyTorch
        would call cuDNN's, which the operator does too.
        """
        if torch.is_grad_enabled():
            return False
        if cudnn or not self.serves:
            return cudnn
        gpu = self._planner.gpu(call.query.device.index or 0)
        if gpu is None or not sized(*call[:3]):
            return gpu is not None
        return self._choice(gpu, call)[0].kernel is not None

    def choice(self, call: Call) -> Choice | None:
        """The backward of a call, a kernel's or PyTorch's; None if the table has no kernel."""
        gpu = self._planner.gpu(call.query.device.index or 0) if self.serves else None
        return None if gpu is None else self._choice(gpu, call)[0]

    def serves_intervals(self, call: Call) -> bool:
        """Whether a kernel has the gradients of a call with a window, an offset or lengths."""
        if call.limits is None or not self.serves or call.changes_scores:
            return False
        if isinstance(call.mask, CuSeqlens):
            return False
        if self._planner.unserved(*call[:3], False, None, True):
            return False
        found = self.choice(call)
        return found is not None and found.kernel is not None

    def _choice(self, gpu: Any, call: Call) -> tuple[Choice, Any]:
        query, key, limits = call.query, call.key, call.limits
        form: tuple[Any, ...] = (CAUSAL if call.is_causal else FULL,)
        if limits is not None:
            form, *_ = forms(limits, query.shape[2], key.shape[2], call.mask is not None)
            if form[0].as_tensor:
                return _NO_INTERVAL, None
        try:
            forward = problem_of(*call[:3], *form)
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

    def recorded(self, call: Call, plan: Any) -> torch.Tensor:
        """The output of a call by a plan that has the log-sum-exp; gradients are recorded."""
        query, key, value, *_ = call
        if plan.limits is None:
            out: torch.Tensor = Gradient.apply(query, key, value, plan, self)
        else:
            out = IntervalGradient.apply(query, key, value, call.mask, call.keep, plan, self)
        return out

    def ranges(
        self, plan: ServingPlan, query: Any, key: Any, lengths: Any, keep: bool
    ) -> torch.Tensor:
        """The key ranges that a backward reads, made in this stream, now or before."""
        if not keep:
            return key_ranges(query, key, lengths)
        masks, stream = self._launcher.masks, self._launcher.stream(plan.index)
        # This stands for what is made of lengths, as a plan does for a list of tiles; and the
        # number of keys, beyond which no range reaches, where a list has its addresses.
        found, keys = masks.find((lengths,), self, stream), (key.shape[2],)
        if found is None or found.addresses != keys:
            found = MaskList(keys, (key_ranges(query, key, lengths),))
            masks.keep((lengths,), self, stream, found)
        return found.memory[0]

    def _planned(self, call: Call) -> ServingPlan:
        """The plan of a backward."""
        query, key, value, ranges, causal, scale, *_ = call
        out, grad, _ = call.extra
        unserved = self._planner.unserved(query, key, value, causal, scale, True)
        if unserved is not None:
            return self._planner.without_kernel(unserved)
        gpu = self._planner.gpu(query.device.index or 0)
        if gpu is None or not out.dtype == grad.dtype == query.dtype:
            why = "this GPU was not tuned, or dtypes differ"
            return self._planner.without_kernel(Choice(None, "gpu", why))
        like_inputs = [_empty_like(each, device="meta") for each in (query, key, value)]
        names = [name for name in _NAMES if name != "lse"]
        each = zip(names, (query, key, value, out, grad, *like_inputs), strict=True)
        tensors = {name: laid_out(tensor) for name, tensor in each}
        if fault := unmappable(tensors):
            return self._planner.without_kernel(fault)
        choice, problem = self._choice(gpu, call)
        if choice.kernel is None:
            return self._planner.without_kernel(choice)
        config, stages = choice.kernel.values, choice.kernel.stages
        own = {name: tensors[name].strides for name in _STRIDED}
        how: Any = {"lse": True, "strides": own, "raw_scale": True}
        calls = families.launches(WGMMA_BACKWARD, config, problem, scale, **how)
        if not calls.keys() <= stages.keys():
            return self._planner.without_kernel(NO_CODE)
        spaces = families.workspaces(WGMMA_BACKWARD, config, problem)
        return BackwardPlan(
            choice=choice,
            launcher=self._launcher,
            calls=calls,
            stages=stages,
            tensors=tensors,
            index=query.get_device(),
            floats=tuple(spaces.values()),
            names=(*_NAMES, *spaces, *(("key_range",) if ranges is not None else ())),
        )


class IntervalGradients:
    """The operators `forward_intervals_lse` and `backward_intervals` of compiled code.

    backward: whose kernels serve.
    """

    def __init__(self, planner: Planner, backward: BackwardOperator) -> None:
        self._planner, self._backward = planner, backward
        self._known: dict[Any, bool] = {}

    def may_serve(self, call: Call) -> bool:
        """Whether kernels may serve a call with gradients, by all that a compiler knows of it.

        Of sizes that vary the first answer is at run time, for which a winner must have the others.
        """
        query, key, value, limits = call.query, call.key, call.value, call.limits or (None, None)
        if all(n is None or type(n) is int for n in limits) and sized(query, key, value):
            return self._serves(call) and self._backward.serves_intervals(call)
        gpu, sizes = self._planner.gpu(query.device.index or 0), (*query.shape, *key.shape[1:3])
        padded = call.mask is not None
        return any(
            each.op == BACKWARD
            and (each.layout.kind == "padded") == padded
            and (padded or each.kind != "full")
            and all(type(n) is not int or n == m for n, m in zip(sizes, _sizes(each), strict=True))
            for each in (winner.problem for winner in (gpu.winners if gpu else ()))
        )

    def _serves(self, call: Call) -> bool:
        """Whether kernels are for a call with gradients: the same before its forward and after it.

        So it asks for nothing but sizes, and for no setting that may change between the two.
        """
        query, key, value, ranges = call[:4]
        sizes, padded = (query.shape, key.shape, value.shape), ranges is not None
        what = (*sizes, query.dtype, query.device, call.limits, padded)
        found = self._known.get(what)
        if found is None:
            gpu: Any = self._planner.gpu(query.device.index or 0)
            own = self._backward.choice(call)
            found = own is not None and (own.kernel is not None or own.code == "deterministic")
            if found:
                found = choice_of(gpu, call, True)[0].kernel is not None
            if len(self._known) >= MOST_PLANS:
                self._known.clear()
            self._known[what] = found
        return found

    def forward_lse(
        self, query: Any, key: Any, value: Any, ranges: Any, low: Any, high: Any, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A call whose gradients a kernel may compute. Where none does, nobody reads the lse."""
        call = _call(query, key, value, ranges, (low, high), scale)
        wanted = call._replace(keep=False, lse=True)
        plan = self._planner.looked_up(wanted)
        done = plan.run(wanted) if plan.calls else None
        if done is not None:
            return done[0], done[1]
        lse = log_sum_exp(call) if self._serves(call) else None
        if lse is None:
            lse = query.new_zeros(query.shape[:3], dtype=torch.float32)
        return like(by_pytorch(call), query, value), lse

    def backward(self, grad: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
        """The gradients of `forward_lse`."""
        *saved, ranges, low, high, scale = given
        call = call_of(grad, saved, ranges, False, scale, (low, high))
        if not self._serves(call):
            call = call._replace(extra=call.extra._replace(lse=None))
        made = gradients(self._backward, call)
        return tuple(map(like, made, call[:3], call[:3]))


def _sizes(problem: Any) -> tuple[int, ...]:
    of_q = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim)
    return *of_q, problem.heads_kv, problem.seqlen_k


def _call(query: Any, key: Any, value: Any, ranges: Any, limits: Diagonals, scale: float) -> Call:
    grouped = bool(query.shape[1] != key.shape[1])
    return Call(query, key, value, ranges, False, scale, grouped, limits)


class IntervalGradient(torch.autograd.Function):  # type: ignore[misc]
    """A call with diagonals or lengths whose plan has the log-sum-exp, and its gradient.

    What the backward reads of lengths is made in the forward: they may change after it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: torch.Tensor | None,
        keep: bool,
        plan: Any,
        backward: Any,
    ) -> torch.Tensor:
        """plan: has the output and the log-sum-exp. backward: a BackwardOperator."""
        made = plan.launched(query, key, value, lengths, keep)
        ranges = None
        if lengths is not None:
            ranges = backward.ranges(plan, query, key, lengths, keep)
        ctx.own, ctx.limits, ctx.scale = backward, plan.limits, plan.scale
        if made is None:
            again = _call(query, key, value, ranges, plan.limits, plan.scale)
            made = (by_pytorch(again), None)
        ctx.save_for_backward(query, key, value, *made, ranges)
        return made[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Gradients by a kernel, otherwise by PyTorch's attention, computed again."""
        *saved, ranges = ctx.saved_tensors
        call = call_of(grads[0], saved, ranges, False, ctx.scale, ctx.limits)
        return *gradients(ctx.own, call), None, None, None, None


def gradients(backward: BackwardOperator, call: Call) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv of a backward with diagonals or lengths, whose log-sum-exp may be None."""
    if call.extra.lse is not None:
        made = backward.gradients(call)
        if made is not None:
            return made
    again = torch.is_grad_enabled()  # gradients of gradients are wanted
    query, key, value, ranges, _, scale, _, limits, *_ = call
    with torch.enable_grad():
        q, k, v = given = [
            each if again and each.requires_grad else each.detach().requires_grad_()
            for each in (query, key, value)
        ]
        out = by_pytorch(_call(q, k, v, ranges, limits, scale))
    found = torch.autograd.grad(out, given, call.extra.grad, create_graph=again)
    return tuple(found)


def log_sum_exp(call: Call) -> torch.Tensor:
    """That of a forward which no kernel could be launched for, an item of the batch at a time."""
    query, key, _, ranges, _, scale, _, limits, *_ = call
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
