"""Plans: which kernel serves a call, by its shapes, strides and options, and how it is launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from attnsweep.core.errors import ProblemError
from attnsweep.core.layouts import Packed
from attnsweep.core.masks import Interval
from attnsweep.core.ops import FORWARD
from attnsweep.core.problem import CAUSAL, FULL, Problem
from attnsweep.core.scores import Scores

from . import families
from .call import (
    DTYPES,
    NAMES,
    OUT,
    PLAIN,
    QKV,
    Call,
    CuSeqlens,
    bias_copied,
    bias_of,
    laid_out,
    mask_strides,
    output_of,
    plain,
    plain_mask,
    problem_of,
    records_gradients,
    taken_for,
)
from .call_cache import MetCalls, transformed
from .dispatch import Choice, choose
from .driver import StridedTensor, rows_of_group, unmapped
from .gradients import is_efficient
from .intervals import forms
from .launcher import Launcher
from .sdpa_patch import asked_once
from .serving_plan import FORKED, MOST_PLANS, SUBCLASS, TRANSFORMED, ForwardPlan, ServingPlan
from .table import GpuKey, TunedGpu, known

APART = Choice(
    None,
    "layout",
    "the queries of grouped heads are not equally far apart in memory, as they are in "
    "query.contiguous(), and to copy them takes longer than the kernel gains",
)
NO_CODE = Choice(None, "no_code", "the kernel has no code of a stage")
_OTHER_DTYPE = Choice(None, "mask", "attn_mask is neither boolean nor of query's dtype")
# What copies of a few queries and of their output take together, and what must be gained besides.
COPIES_US, COPIES_MARGIN = 6.0, 0.05
# Inputs of a scan, in the order in which a call has them.
_SCANNED = ("mask", "key_range", "cu_seqlens_q", "cu_seqlens_k")
_TENSOR, _modes = torch.Tensor, torch._C._len_torch_dispatch_stack
_is_deterministic = torch.are_deterministic_algorithms_enabled
_NUMBERS = (int, float, torch.SymFloat)
# A kernel gets it as a 32-bit number, times the logarithm of e; gradients also get its inverse,
# times log-sum-exps.
_LEAST_SCALE, _MOST_SCALE = 1e-30, 1e38
# The softcaps that kernels take: with others, float32 does not hold what they compute on the way.
_CAPS = (1e-3, 1e6)


class Planner:
    """Finds or makes the plans of a package's calls, of all kinds.

    kinds: what makes the plan of a call, by the class of its `extra`. gpus: what the table has for
    each device that was asked about, by its index. backward: the BackwardOperator.
    """

    backward: Any = None

    def __init__(self, launcher: Launcher) -> None:
        self._launcher, self._table = launcher, launcher.table
        self.gpus: dict[int, TunedGpu | None] = {}
        self.kinds: dict[type, Callable[[Call], ServingPlan]] = {type(None): self._forward}
        self._plans: dict[Any, ServingPlan] = {}
        self._met = MetCalls()
        self.find = self._met.find
        self._head_dims = frozenset(
            winner.problem.head_dims
            for gpu in self._table.gpus.values()
            for winner in gpu.winners
            if winner.problem.op == FORWARD
        )

    def forget(self) -> None:
        """Have each call planned anew."""
        self._plans.clear()
        self._met.clear()

    def plan(self, call: Call) -> ServingPlan:
        """The plan of a call: one lookup if such a call was met before."""
        found = self._met.of(call)
        if found is not None:
            return found
        dtype = getattr(call.mask, "dtype", None)
        if (
            call.mask is not None
            and call.limits is None
            and dtype is not torch.bool
            and dtype is not call.query.dtype
        ):
            return self.without_kernel(_OTHER_DTYPE)  # nothing else needs to be asked
        return self.looked_up(call)

    def looked_up(self, call: Call) -> ServingPlan:
        """The plan by shapes, strides and options, made if it is not there."""
        query, key, value, mask, causal, scale, grouped, limits, softcap, sinks, *_ = call
        masked = mask is not None or limits is not None
        extra, grad = call.extra, False
        if extra is None:
            if transformed():
                return self.without_kernel(TRANSFORMED)
            if not _alone(query, key, value):
                return self.without_kernel(SUBCLASS)
            if masked and type(mask) is not _TENSOR and limits is None:
                return self.without_kernel(_OTHER_DTYPE)
            grad = records_gradients(call) if call.lse is None or masked else False
        try:
            what = (
                *(query.shape, query.stride(), query.dtype, query.get_device()),
                *(key.shape, key.stride(), key.dtype, key.get_device()),
                *(value.shape, value.stride(), value.dtype, value.get_device()),
                *(_kind_of(mask), causal, scale, grouped, limits, softcap, sinks is not None),
                *(grad, call.lse, (grad or extra is not None) and _is_deterministic()),
                *[(each.shape, each.stride(), each.dtype, each.device) for each in extra or ()],
                type(extra),
            )
            plan = self._plans.get(what)
        except (RuntimeError, TypeError):  # no strides, or symbolic ones
            return self.without_kernel(SUBCLASS)
        if plan is None:
            if self._launcher.forked:
                return self.without_kernel(FORKED)
            made = self.kinds[type(extra)](call)
            if len(self._plans) >= MOST_PLANS:
                self.forget()
            plan = self._plans[what] = made
        # Beside a mask, gradients depend on settings too, and what is PyTorch's on more of it.
        if extra is None and (not masked or (plan.calls and not grad)):
            self._met.add(plan, call)
        return plan

    def without_kernel(self, choice: Choice) -> ServingPlan:
        """A plan that hands its calls to PyTorch."""
        return ServingPlan(choice=choice, launcher=self._launcher)

    def unserved(
        self,
        query: Any,
        key: Any,
        value: Any,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> Choice | None:
        """Why no kernel serves tensors of this kind, by what a compiler knows too; or None."""
        if query.device.type not in self._launcher.device_types:
            return Choice(None, "device", f"tensors are on {query.device.type}")
        if not query.device == key.device == value.device:
            return Choice(None, "device", "tensors are on several devices")
        if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
            return Choice(None, "dtype", f"{query.dtype}, {key.dtype}, {value.dtype}")
        if not query.dim() == key.dim() == value.dim() == 4:
            return Choice(None, "rank", "tensors are not (batch, heads, seqlen, head_dim)")
        head_dim, of_value = int(query.shape[3]), int(value.shape[3])  # a compiler's has no hash
        if (head_dim, of_value) not in self._head_dims:
            named = f"{head_dim}" if head_dim == of_value else f"{head_dim}, {of_value} of value,"
            return Choice(None, "head_dim", f"head_dim {named} was not tuned")
        batch, heads, heads_kv = query.shape[0], query.shape[1], key.shape[1]
        if not (
            key.shape[:3] == value.shape[:3]
            and key.shape[0] == batch
            and key.shape[3] == head_dim
            and (heads == heads_kv or (enable_gqa and heads_kv > 0 and heads % heads_kv == 0))
        ):
            return Choice(None, "shapes", "shapes do not agree, or need broadcasting")
        if is_causal and query.shape[2] != key.shape[2]:
            return Choice(None, "causal_alignment", "is_causal with seqlen_q != seqlen_k")
        known = scale is None or isinstance(scale, _NUMBERS)
        if not known or (scale is not None and not _LEAST_SCALE < scale < _MOST_SCALE):
            said = f"scale is {scale}, not between {_LEAST_SCALE} and {_MOST_SCALE}"
            return Choice(None, "scale", said)
        return None

    @asked_once
    def is_known(self, index: int) -> bool:
        """Whether a device's kind is in the table: for a compiler, which need not look into it."""
        return self.gpu(index) is not None

    def gpu(self, index: int) -> TunedGpu | None:
        """The table's entries for a device, by its index."""
        if index not in self.gpus:
            key = GpuKey.of(torch.cuda.get_device_properties(index))
            self.gpus[index] = known(self._table.gpus, key)
        return self.gpus[index]

    def _forward(self, call: Call) -> ServingPlan:
        """The plan of a forward."""
        query, key, value, mask, is_causal, scale, enable_gqa, limits, *_ = call
        masked = mask is not None or limits is not None
        grad = records_gradients(call)
        lse = call.lse
        if lse is None:
            lse = grad and (not masked or self.backward.serves_intervals(call))
        causal = is_causal and not masked
        unserved = self.unserved(query, key, value, causal, scale, enable_gqa)
        if unserved is None and masked:  # with lse a kernel has the gradients
            unserved = why_unserved(call, not lse and grad)
        if unserved is not None:
            return self.without_kernel(unserved)
        gpu = self.gpu(query.device.index or 0)
        if gpu is None:
            tuned = "; ".join(key.label for key in self._table.gpus) or "none"
            why = f"this GPU was not tuned; the package knows {tuned}. To tune it: attnsweep run"
            said = f"{why} SPEC, then attnsweep export"
            return self.without_kernel(Choice(None, "gpu", said))
        out, copied = output_of(query, value, "meta"), False
        each = zip(NAMES, (query, key, value, out), strict=True)
        tensors = {name: laid_out(tensor) for name, tensor in each}
        if unserved := unmappable(tensors):
            return self.without_kernel(unserved)
        if isinstance(mask, torch.Tensor) and mask.is_floating_point():
            tensors["bias"] = bias_of(mask, query, key)
            copied = unmapped(tensors["bias"]) is not None
            if copied:
                tensors["bias"] = bias_of(bias_copied(mask.to("meta")), query, key)
            fault = unmapped(tensors["bias"])
            if fault is not None:
                said = f"attn_mask {fault[1]}"
                return self.without_kernel(Choice(None, "mask", said))
        choice, problem = choice_of(gpu, call, lse)
        if choice.kernel is None or problem is None:
            return self.without_kernel(choice)
        plan = self._launched(call, lse, out, choice, problem, tensors)
        if plan.choice is APART:
            return self._of_rows(call._replace(lse=lse), choice)
        if not isinstance(plan, ForwardPlan):
            return plan
        plan.copied = copied
        # With lengths, PyTorch's own attention needs a mask first, which takes longer to make than
        # a scan of the lengths does.
        given = limits is None and isinstance(mask, torch.Tensor)
        scans = given and plan.scan_reads and not plan.grouped
        plan.short_scan = bool(scans and 0 < choice.sdpa_us < gpu.guard.scan_us)
        # PyTorch reads rows at any address nearly as fast, but not what is no row: (16,16,512,64)
        # took it 1723 us with keys 16 elements apart, and 86 with a contiguous copy.
        plan.short_scan |= copied and mask.stride(-1) == 1
        return plan

    def _of_rows(self, call: Call, choice: Choice) -> ServingPlan:
        """The plan of a call whose query is copied first, and its output afterwards."""
        ours = choice.sdpa_us / choice.gain if choice.gain else 0.0
        if choice.sdpa_us < (ours + COPIES_US) * (1 + COPIES_MARGIN):
            return self.without_kernel(replace(APART, gain=choice.gain))
        own = self._forward(call._replace(query=call.query.contiguous()))
        return replace(own, of_rows=own) if isinstance(own, ForwardPlan) else own

    def _launched(
        self, call: Call, lse: bool, out: torch.Tensor, choice: Any, problem: Problem, tensors: Any
    ) -> ServingPlan:
        """The plan of a call that a kernel serves, or why it cannot. out: like the output."""
        mask, limits, scale, kernel = call.mask, call.limits, call.scale, choice.kernel
        biased = "bias" in tensors
        by = scale if scale is not None else problem.scale
        if kernel.values.PACK_GQA:
            for name in (QKV[0], OUT):
                view = rows_of_group(tensors[name], problem.heads // problem.heads_kv)
                if view is None:
                    return self.without_kernel(APART)
                tensors[name] = view
        layout = tensors[OUT].strides
        steps: tuple[int, ...] = ()
        if mask is not None and not biased and limits is None:
            steps = mask_strides(mask, call.query, call.key)
        elif problem.mask.as_tensor:  # as `scanned` makes it
            steps = (problem.seqlen_q * problem.seqlen_k, 0, problem.seqlen_k, 1)
        if max(steps, default=0) >= 2**31:
            said = "the mask spans 2^31 elements or more"
            return self.without_kernel(Choice(None, "too_large", said))
        if steps and not problem.mask.of_item:  # one for all
            steps = (0, *steps[1:])
        options: Any = {"lse": lse, "strides": {OUT: layout}, "mask_strides": steps}
        options |= {"bias_rows": tensors["bias"].sizes[2]} if biased else {}
        made = families.launches(kernel.declaration, kernel.values, problem, by, **options)
        spaces = families.workspaces(kernel.declaration, kernel.values, problem)
        if not made.keys() <= kernel.stages.keys():
            return self.without_kernel(NO_CODE)
        calls = {name: launch for name, launch in made.items() if not launch.once}
        once = (launch.args for launch in made.values() if launch.once)
        shared = {arg for args in once for arg in args if isinstance(arg, str)}  # of a mask's scan
        listed = [name for name in spaces if name in shared]
        own = [name for name in spaces if name not in shared]
        names = (*NAMES, *(["lse"] if lse else []), *own, *listed)
        ranges = any("key_range" in launch.args for launch in calls.values())
        names += ("key_range",) * ranges
        names += ("bias",) * biased + ("sinks",) * (call.sinks is not None)
        rows = (problem.batch, problem.heads, problem.seqlen_q)
        return ForwardPlan(
            choice=choice,
            launcher=self._launcher,
            backward=self.backward,
            calls=calls,
            stages=kernel.stages,
            tensors=tensors,
            index=call.query.get_device(),
            lse=lse,
            floats=tuple(spaces[name] for name in own),
            names=names,
            causal=bool(call.is_causal and mask is None and limits is None),
            scale=by,
            grouped=problem.heads != problem.heads_kv,
            rows=rows,
            scan={name: launch for name, launch in made.items() if launch.once},
            scan_names=tuple(listed),
            scan_places=tuple(accumulate((_apart(spaces[n]) for n in listed), initial=0)),
            scan_reads=tuple(name for name in _SCANNED if name in shared),
            limits=limits,
            ranges=ranges,
            biased=biased,
            out=None if out.shape == call.query.shape else (tuple(out.shape), out.stride()),
        )


def _alone(query: Any, key: Any, value: Any) -> bool:
    """Whether nothing else has a say in a call: no class, no dispatch mode and no negation.

    Modes that count FLOPs and policies of selective checkpoints know PyTorch's operators alone.
    """
    return plain(query, key, value) and not (
        _modes() or query.is_neg() or key.is_neg() or value.is_neg()
    )


def _kind_of(mask: Any) -> Any:
    """The part of a plan's key that describes a mask, lengths or sequences."""
    if isinstance(mask, CuSeqlens):
        return (mask.sequences, type(mask.q), type(mask.k), mask.q.device)
    return mask if mask is None else (mask.shape, mask.stride(), mask.dtype, mask.device)


def _apart(words: int) -> int:
    """Words of 4 bytes up to where the next tensor begins, in memory that both share."""
    return -(-words // 64) * 64


def unmappable(tensors: Mapping[str, StridedTensor]) -> Choice | None:
    """Why no tensor map can describe one of these, or None."""
    faults = ((name, unmapped(tensor)) for name, tensor in tensors.items())
    return next((Choice(None, of[0], f"{name} {of[1]}") for name, of in faults if of), None)


def why_unserved(call: Call, gradients: bool) -> Choice | None:
    """Why no kernel serves a call with a mask or limits, or None.

    Its tensors have four dimensions. gradients: whether it records them.
    """
    mask, packed = call.mask, isinstance(call.mask, CuSeqlens)
    if gradients and (call.softcap or call.sinks is not None):
        return Choice(None, "scores", "softcap or sinks are given, and gradients are recorded")
    low, high = _CAPS
    if call.softcap and not low <= call.softcap <= high:
        return Choice(None, "scores", f"softcap is {call.softcap:g}, beyond {low:g} to {high:g}")
    if packed or call.limits is not None:
        code, given = "mask", "window, causal_offset or key_lengths"
        code, given = ("packed", "packed sequences") if packed else (code, given)
        if gradients:
            return Choice(None, code, f"{given} are given, and gradients are recorded")
        if not all(type(each) in PLAIN for each in call.mask_tensors):
            said = "cu_seqlens are no plain tensors" if packed else "key_lengths is no plain tensor"
            return Choice(None, "subclass", said)
        return None
    what, query = None, call.query
    whole = (*query.shape[:3], call.key.shape[2])
    if not plain_mask(mask) or mask.is_nested or mask.layout is not torch.strided:
        what = "attn_mask is no plain tensor"
    elif mask.dtype not in (torch.bool, query.dtype):
        what = f"attn_mask is {mask.dtype}, neither torch.bool nor {query.dtype}"
    elif mask.device != query.device:
        return Choice(None, "device", "attn_mask is on another device")
    elif call.is_causal:
        what = "attn_mask and is_causal are given"
    elif gradients:
        what = "attn_mask is given, and gradients are recorded"
    elif not 2 <= mask.dim() <= 4 or any(
        own not in (1, size) for own, size in zip((*mask.shape,)[::-1], whole[::-1], strict=False)
    ):
        what = f"attn_mask is {tuple(mask.shape)}, and scores are {whole}"
    return None if what is None else Choice(None, "mask", what)


def forms_of(call: Call) -> list[tuple[Any, ...]]:
    """(mask, layout, scores) forms of a call with these arguments.

    The device alone knows how long packed sequences are: they count as equally long.
    """
    mask, limits, query, key = call.mask, call.limits, call.query, call.key
    if mask is None and limits is None:
        return [(CAUSAL if call.is_causal else FULL,)]
    scores = Scores(call.softcap, call.sinks is not None)
    if isinstance(mask, CuSeqlens):
        return [(Interval(*(limits or (None, None))), Packed(mask.sequences, 100), scores)]
    if limits is not None:
        return [*forms(limits, query.shape[2], key.shape[2], mask is not None, scores)]
    return [taken_for(mask, query, key, scores)]


def choice_of(gpu: TunedGpu, call: Call, gradients: bool = False) -> tuple[Choice, Problem | None]:
    """The choice for a call that `Planner.unserved` lets pass, and its problem if any.

    Of all that it may be taken for, the first that a kernel serves is.
    """
    found: list[tuple[Choice, Problem | None]] = []
    for form in forms_of(call):
        try:
            problem = problem_of(call.query, call.key, call.value, *form)
        except ProblemError as error:
            return Choice(None, "far", error.what), None
        choice = choose(gpu, problem, gradients=gradients)
        if gradients and choice.kernel is not None:
            if not families.has_lse(problem.variant):
                why = "the kernel has no code that a gradient needs"
                choice = Choice(None, "no_lse", why, choice.gain)
            elif call.lse is None and is_efficient(call.query) and _is_deterministic():
                why = "PyTorch's gradients of wide heads may be in no fixed order"
                choice = Choice(None, "deterministic", why, choice.gain)
        found.append((choice, problem))
        if found[-1][0].kernel is not None:
            return found[-1]
    return found[0]
