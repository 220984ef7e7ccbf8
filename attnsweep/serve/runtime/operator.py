"""The operator: scaled_dot_product_attention's meaning, by a package's kernels where they serve."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnsweep.core.layouts import DENSE
from attnsweep.core.problem import CAUSAL, FULL
from attnsweep.core.scores import Scores

from . import interval_gradients
from .arguments import autocast, never, number, plain, sized, taken_for
from .backward_operator import BackwardOperator
from .call_cache import Seen, transformed
from .changed_scores import composed
from .dispatch import Choice
from .driver import BoundLaunches, Device, DriverError, Unaligned, cuda_driver
from .gradients import (
    Gradient,
    gradients_by_pytorch,
    like,
    of_operator,
    with_gradient,
    with_lse,
)
from .interval_gradients import IntervalGradient, key_ranges, log_sum_exp
from .intervals import Diagonals, by_pytorch, forms, scanned, understood
from .mask_lists import MaskList, MaskLists
from .packed import CuSeqlens
from .planner import Planner, choice_of, requires_grad, why_unserved
from .plans import FORKED, MOST_PLANS, SUBCLASS, TRANSFORMED, UNALIGNED, Explanation, Plan
from .sdpa_patch import pytorchs as _sdpa
from .sdpa_patch import sdpa
from .table import Guard, PackageError, Table
from .torch_ops import OPERATORS, register

# Looked up once: each is asked in every call.
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_modes = torch._C._len_torch_dispatch_stack
_is_deterministic = torch.are_deterministic_algorithms_enabled
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_empty_like, _FLOAT, _TENSOR = torch.empty_like, torch.float32, torch.Tensor
# Elements of q times keys, below which PyTorch gets a call that records gradients before anything
# is looked up: the host takes longer for such a step than the device, and would notice.
_SHORT_WORK = 2.5e9
SHORT = Choice(
    None,
    "short_training",
    "a step with gradients this short takes as long as the host's part of it",
)
_OTHER_DTYPE = Choice(None, "mask", "attn_mask is neither boolean nor of query's dtype")


class Operator:
    """The operators `forward` and `forward_lse` of one table, and the function that calls them.

    namespace: the package's name, also of its logger; unlike any other package's. cuda: the
    driver's binding (default: cuda.bindings.driver). devices: the device types that are served.
    Tests give others.
    """

    def __init__(
        self, table: Table, namespace: str, cuda: Any = None, devices: tuple[str, ...] = ("cuda",)
    ) -> None:
        self.table = table
        self._cuda, self.device_types = cuda, devices
        self._log = logging.getLogger(namespace)
        self._said: set[str] = set()
        self.counts = {SHORT.code: 0, "kernel": 0}  # not a Counter, which takes four times as long
        self.planner = Planner(table, devices)
        self._plans: dict[Any, Plan] = {}
        self._seen = Seen()
        self._find = self._seen.plan
        self._masks = MaskLists(self._capture_of)
        self._devices: dict[int, Device] = {}
        self.backward = BackwardOperator(self)
        self.forked = False
        # Where a table's guards hand short steps over, and not those of a test.
        guards = [gpu.guard for gpu in table.gpus.values()]
        short = guards and min(guard.short_us for guard in guards) >= Guard().short_us
        self.short_work = _SHORT_WORK if short else 0.0
        self._on_cuda = "cuda" in devices
        # Without PyTorch's Python around them, where this build has them.
        self.current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
        self.stream = raw_stream if "cuda" in devices else _no_stream
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)
        # PyTorch has namespaces of its own, such as `quantized`.
        wanted = f"attnsweep_{namespace.replace('.', '_')}"
        own = {name: getattr(self, f"_impl_{name}") for name in OPERATORS}
        ops: Any
        gradients = {
            "forward_lse": of_operator(self, lambda: ops.backward.default),
            "forward_intervals_lse": interval_gradients.of_operator(
                lambda: ops.backward_intervals.default
            ),
        }
        self.library = register(wanted, devices, own, gradients)
        self.namespace: str = self.library.ns
        ops = getattr(torch.ops, self.namespace)
        self._forward, self._forward_lse = ops.forward.default, ops.forward_lse.default
        self._attention = ops.attention.default
        self._attention_masked = ops.attention_masked.default
        self._forward_masked = ops.forward_masked.default
        self._attention_intervals = ops.attention_intervals.default
        self._forward_intervals = ops.forward_intervals.default
        self._forward_intervals_lse = ops.forward_intervals_lse.default

    def _after_fork(self) -> None:
        self.forked = bool(self._devices)
        self._plans.clear()  # so that a call asks again
        self.backward.forget()
        self._seen.clear()
        self._masks.forget()

    # ---- the operators ----
    def _impl_attention(
        self, query: Any, key: Any, value: Any, causal: bool, scale: float
    ) -> torch.Tensor:
        """A compiler's call: PyTorch's own attention where the sizes say already that it is."""
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        gpu = self.planner.gpu(query.device.index or 0)
        if gpu is not None and sized(query, key, value):
            found = [(CAUSAL if causal else FULL, DENSE)]
            choice, _ = choice_of(gpu, query, key, value, found, grad)
            if choice.kernel is None:
                grouped = query.shape[1] != key.shape[1]
                return _sdpa(query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)
        if grad:
            return self._forward_lse(query, key, value, causal, scale)[0]
        return self._forward(query, key, value, causal, scale)

    def _impl_forward(
        self, query: Any, key: Any, value: Any, causal: bool, scale: float
    ) -> torch.Tensor:
        grouped = query.shape[1] != key.shape[1]
        plan = self._plan(query, key, value, causal, scale, grouped, False)
        done = self._served(plan, query, key, value)
        if done is not None:
            return done[0]
        out = _sdpa(query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)
        return like(out, query, value)

    def _impl_forward_lse(
        self, query: Any, key: Any, value: Any, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grouped = query.shape[1] != key.shape[1]
        plan = self._plan(query, key, value, causal, scale, grouped, True)
        done = self._served(plan, query, key, value)
        if done is not None:
            return done[0], done[1]
        return with_lse(query, key, value, causal, scale)

    def _impl_backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
        cudnn: bool,
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of `forward_lse`; cudnn: of the two that PyTorch has, whose it calls."""
        saved = (query, key, value, out, lse)
        made = self.backward.gradients(grad, saved, causal, scale)
        if made is not None:
            return made
        by_own = gradients_by_pytorch(grad, saved, causal, scale, cudnn)
        return tuple(map(like, by_own, saved[:3], saved[:3]))

    def _impl_attention_masked(
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        scale: float,
        softcap: float,
        sinks: Any,
        repeats: bool,
    ) -> torch.Tensor:
        """As `_impl_attention`, with a mask and changed scores.

        repeats: PyTorch's own gets k and v repeated for the query heads, as transformers does it.
        """
        gpu, how = self.planner.gpu(query.device.index or 0), (scale, softcap, sinks, repeats)
        if gpu is not None and sized(query, key, value):
            found = [taken_for(mask, query, key, Scores(softcap, sinks is not None))]
            if choice_of(gpu, query, key, value, found)[0].kernel is None:
                return _masked_by_pytorch(query, key, value, mask, *how)
        return self._forward_masked(query, key, value, mask, *how)

    def _impl_forward_masked(
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        scale: float,
        softcap: float,
        sinks: Any,
        repeats: bool,
    ) -> torch.Tensor:
        """A compiler's call, which may use the mask's memory for other tensors: no list stays."""
        options: Any = {"softcap": softcap, "sinks": sinks, "keep": False}
        done = self.masked(query, key, value, mask, scale=scale, **options)
        if done is not None:
            return done
        out = _masked_by_pytorch(query, key, value, mask, scale, softcap, sinks, repeats)
        return like(out, query, value)

    def _impl_attention_intervals(
        self,
        query: Any,
        key: Any,
        value: Any,
        lengths: Any,
        low: Any,
        high: Any,
        scale: float,
        softcap: float,
        sinks: Any,
    ) -> torch.Tensor:
        """As `_impl_attention_masked`, with a mask of diagonals and lengths, and changed scores."""
        gpu, limits = self.planner.gpu(query.device.index or 0), (low, high)
        known = all(n is None or type(n) is int for n in limits) and sized(query, key, value)
        grad = torch.is_grad_enabled() and requires_grad(query, key, value, lengths, sinks)
        kernel = None
        if gpu is not None and known:
            scores = Scores(softcap, sinks is not None)
            found = forms(limits, query.shape[2], key.shape[2], lengths is not None, scores)
            kernel = choice_of(gpu, query, key, value, found, grad)[0].kernel
        padded = lengths is not None
        if grad and kernel and self.backward.serves_intervals(query, key, value, limits, padded):
            ranges = None if lengths is None else key_ranges(query, key, lengths)
            return self._forward_intervals_lse(query, key, value, ranges, low, high, scale)[0]
        if grad or (gpu is not None and known and kernel is None):
            how = (lengths, 0.0, scale, bool(query.shape[1] != key.shape[1]), softcap, sinks)
            return by_pytorch(limits, query, key, value, *how)
        call = (query, key, value, lengths, low, high, scale, softcap, sinks)
        return self._forward_intervals(*call)

    def _impl_forward_intervals(
        self,
        query: Any,
        key: Any,
        value: Any,
        lengths: Any,
        low: Any,
        high: Any,
        scale: float,
        softcap: float,
        sinks: Any,
    ) -> torch.Tensor:
        """As `_impl_forward_masked`."""
        options: Any = {"limits": (low, high), "softcap": softcap, "sinks": sinks, "keep": False}
        done = self.masked(query, key, value, lengths, scale=scale, **options)
        if done is not None:
            return done
        how = (lengths, 0.0, scale, query.shape[1] != key.shape[1], softcap, sinks)
        return like(by_pytorch((low, high), query, key, value, *how), query, value)

    def _impl_forward_intervals_lse(
        self, query: Any, key: Any, value: Any, ranges: Any, low: Any, high: Any, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A call whose gradients a kernel computes."""
        limits = (low, high)
        plan = self.masked_plan(
            *(query, key, value, ranges, False, scale, True, limits, 0.0, None), lse=True
        )
        done = self.run(plan, query, key, value, ranges, False) if plan.calls else None
        if done is not None:
            return done[0], done[1]
        how = (ranges, 0.0, scale, query.shape[1] != key.shape[1])
        out = like(by_pytorch(limits, query, key, value, *how), query, value)
        return out, log_sum_exp(limits, query, key, ranges, scale)

    def _impl_backward_intervals(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        ranges: torch.Tensor | None,
        low: Any,
        high: Any,
        scale: float,
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of `forward_intervals_lse`."""
        saved = (query, key, value, out, lse)
        made = interval_gradients.gradients(self.backward, grad, saved, ranges, (low, high), scale)
        return tuple(map(like, made, saved[:3], saved[:3]))

    # ---- one call ----
    def ranges(self, plan: Plan, query: Any, key: Any, lengths: Any, keep: bool) -> torch.Tensor:
        """What a backward reads of lengths: made in this stream, now or before."""
        if not keep:
            return key_ranges(query, key, lengths)
        stream = self.stream(plan.index)
        # The backward stands for what is made of lengths, as a plan does for a list of tiles.
        found = self._masks.find((lengths,), self.backward, stream)
        if found is None or found.memory[0].shape[0] != query.shape[0]:
            found = MaskList((), (key_ranges(query, key, lengths),))
            self._masks.keep((lengths,), self.backward, stream, found)
        return found.memory[0]

    def masked(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = True,
        *,
        limits: Diagonals | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        keep: bool = True,
    ) -> torch.Tensor | None:
        """`attention` with a mask, or None, which is counted, if no kernel serves the call.

        mask: boolean, True where a query sees a key, with any strides; or of query's dtype, added
        to the scores, with strides of 8 elements. It broadcasts to (batch, heads, seqlen_q,
        seqlen_k), and no kernel serves is_causal beside it. A query that sees no key has output 0.
        limits: diagonals, between which a query sees keys; mask is then key_lengths, or None; or of
        packed sequences, which mask then is, the keys before and after a query's own.
        softcap, sinks: as `changed_scores.checked` returns them. keep: whether what a scan makes of
        mask is used again while that is unchanged: see mask_lists.
        """
        dtype = getattr(mask, "dtype", None)
        if limits is None and dtype is not torch.bool and dtype is not query.dtype:
            self.fell_back(_OTHER_DTYPE)  # nothing else needs to be asked
            return None
        beside = (is_causal, scale, enable_gqa, limits, softcap, sinks)
        plan = self.masked_plan(query, key, value, mask, *beside)
        if not plan.calls:
            self.fell_back(plan.choice)
            return None
        if plan.lse:
            given = (query, key, value, mask, self, plan, keep)
            with_grad: torch.Tensor = IntervalGradient.apply(*given)
            return with_grad
        done = self.run(plan, query, key, value, mask, keep, sinks)
        return None if done is None else done[0]

    def masked_in_model(
        self, query: Any, key: Any, value: Any, mask: Any, scale: float | None
    ) -> torch.Tensor | None:
        """`masked` as a model of transformers calls it, whose own attention repeats k and v."""
        if not _is_compiling():
            return self.masked(query, key, value, mask, scale=scale)
        given = self.cast(query, key, value)
        if not self._traces_mask(*given, mask, False, 0.0, scale, enable_gqa=True):
            return None
        by = scale if scale is not None else query.shape[3] ** -0.5
        return self._attention_masked(*given, mask, by, 0.0, None, True)

    def masked_plan(
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        limits: Diagonals | None,
        softcap: float,
        sinks: torch.Tensor | None,
        *,
        lse: bool = False,
    ) -> Plan:
        """The plan of a call of `masked`. lse: whether it must have the log-sum-exp.

        It also has it where gradients are recorded and a kernel has them.
        """
        if transformed():
            return TRANSFORMED
        if (
            not plain(query, key, value)
            or _modes()
            or query.is_neg()
            or key.is_neg()
            or value.is_neg()
        ):
            return SUBCLASS
        if type(mask) is not _TENSOR and limits is None:
            return Plan(_OTHER_DTYPE)
        try:
            what = (
                *(query.shape, query.stride(), query.dtype, query.get_device()),
                *(key.shape, key.stride(), key.dtype, key.get_device()),
                *(value.shape, value.stride(), value.dtype, value.get_device()),
                _kind_of(mask),
                *(is_causal, scale, enable_gqa, limits, softcap, sinks is not None),
                grad := _is_grad_enabled() and requires_grad(query, key, value, mask, sinks),
                *(lse, grad and _is_deterministic()),
            )
            plan = self._plans.get(what)
        except (RuntimeError, TypeError):  # no strides, or symbolic ones
            return SUBCLASS
        if plan is None:
            if grad and not softcap and sinks is None and not isinstance(mask, CuSeqlens):
                own = mask is not None
                lse = self.backward.serves_intervals(query, key, value, limits, own)
            how = (False, scale, enable_gqa, lse, mask, is_causal, limits, softcap, sinks)
            plan = self._remembered(what, query, key, value, *how)
        return plan

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        causal: bool = False,
        window: Any = None,
        causal_offset: int | None = None,
        key_lengths: torch.Tensor | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        cache: bool = True,
    ) -> torch.Tensor:
        """torch.nn.functional.scaled_dot_product_attention, by a tuned kernel where one serves.

        query: (batch, heads, seqlen_q, head_dim); key, value: (batch, heads_kv, seqlen_k,
        head_dim), value's may be another; any strides with contiguous head_dim. causal: another
        name of is_causal, which is aligned top-left as PyTorch's. What no kernel serves, or is not
        known to be faster, goes to PyTorch's own attention; `explain` says why. The others are as
        the package's `attention` has them.
        """
        is_causal = is_causal or causal
        if not (window is causal_offset is key_lengths is softcap is sinks is None):
            given = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            limits = (window, causal_offset, key_lengths)
            return self._beyond_sdpa(*given, limits, softcap, sinks, cache)
        if _is_compiling():
            masks = (attn_mask, dropout_p, is_causal)
            return self._traced(query, key, value, *masks, scale, enable_gqa)
        if (
            attn_mask is None
            and type(query) is type(key) is _TENSOR  # others may see that they are asked
            and query.requires_grad
            and _is_grad_enabled()
            and query.is_cuda is self._on_cuda
            and not (query.is_nested or key.is_nested)
            and key.dim() == 4
            and query.numel() * key.shape[2] < self.short_work
        ):
            self.fell_back(SHORT)
            return sdpa(
                query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if scale is not None and type(scale) is not float:
            scale = number(scale)
        if _any_autocast():
            query, key, value = self.cast(query, key, value)
        choice: Choice | None = None
        if attn_mask is not None and dropout_p == 0.0:
            beside = (is_causal, scale, enable_gqa)
            out = self.masked(query, key, value, attn_mask, *beside, keep=cache)
            if out is not None:
                return out
        elif dropout_p != 0.0:
            choice = never(None, dropout_p)
        elif (seen := self._find(query, key, value, is_causal, scale, enable_gqa)) is not None:
            if not seen.calls:
                choice = seen.choice
            elif seen.lse:
                return with_gradient(query, key, value, self, seen)
            else:
                done = self.run(seen, query, key, value)
                if done is not None:
                    return done[0]
        elif not plain(query, key, value):
            choice = SUBCLASS.choice
        else:
            grad = _is_grad_enabled() and (
                query.requires_grad or key.requires_grad or value.requires_grad
            )
            plan = self._plan(query, key, value, is_causal, scale, enable_gqa, grad)
            if not plan.calls:
                choice = plan.choice
                self._seen.add(plan, query, key, value, is_causal, scale, enable_gqa)
            elif _modes() or query.is_neg() or key.is_neg() or value.is_neg():
                # A dispatch mode, or what resolves a negation, must see an operator.
                by = scale if scale is not None else query.shape[3] ** -0.5
                if grad:
                    return self._forward_lse(query, key, value, is_causal, by)[0]
                return self._forward(query, key, value, is_causal, by)
            else:  # nobody looks at operators, so the dispatcher's time is saved
                self._seen.add(plan, query, key, value, is_causal, scale, enable_gqa)
                if grad:
                    with_grad: torch.Tensor = Gradient.apply(query, key, value, self, plan)
                    return with_grad
                done = self.run(plan, query, key, value)
                if done is not None:
                    return done[0]
        if choice is not None:
            self.fell_back(choice)
        return _sdpa(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def _beyond_sdpa(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        given: tuple[Any, Any, Any],
        softcap: Any,
        sinks: Any,
        keep: bool,
    ) -> torch.Tensor:
        """`attention` with arguments that PyTorch's own does not have.

        given: window, causal_offset and key_lengths.
        """
        asked = (attn_mask, is_causal, given, softcap, sinks)
        mask, is_causal, limits, softcap, sinks = understood(query, key, *asked)
        if limits is None and not softcap and sinks is None:
            how: Any = (dropout_p, is_causal, scale, enable_gqa)
            return self.attention(query, key, value, attn_mask, *how, cache=keep)
        query, key, value = self.cast(query, key, value)
        if scale is not None and type(scale) is not float:
            scale = number(scale)
        if _is_compiling():
            how = (dropout_p, scale, enable_gqa, limits, softcap, sinks)
            if self._traces_mask(query, key, value, mask, False, *how):
                by = scale if scale is not None else query.shape[3] ** -0.5
                if limits is None:
                    scores = (by, softcap, sinks)
                    return self._attention_masked(query, key, value, mask, *scores, False)
                how = (*limits, by, softcap, sinks)
                return self._attention_intervals(query, key, value, mask, *how)
        elif choice := never(None, dropout_p):
            self.fell_back(choice)
        else:
            options: Any = {"limits": limits, "softcap": softcap, "sinks": sinks, "keep": keep}
            out = self.masked(query, key, value, mask, False, scale, enable_gqa, **options)
            if out is not None:
                return out
        how = (dropout_p, scale, enable_gqa, softcap, sinks)
        if limits is None:
            return composed(query, key, value, mask, *how)
        return by_pytorch(limits, query, key, value, mask, *how)

    def cast(self, *given: Any) -> tuple[Any, Any, Any]:
        """The tensors as scaled_dot_product_attention gets them under autocast."""
        query, key, value = given
        if all(isinstance(each, torch.Tensor) for each in given):
            kind = query.device.type
            if kind in self.device_types and torch.is_autocast_enabled(kind):
                wanted = torch.get_autocast_dtype(kind)
                if not query.dtype == key.dtype == value.dtype == wanted:
                    query, key, value = map(autocast, given)
        return query, key, value

    def _traced(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        """A call as torch.compile sees it: one operator, which finds its kernel at run time.

        Where the compiler knows all sizes, `_impl_attention` hands over what no kernel serves.
        """
        given = query, key, value = self.cast(query, key, value)
        if attn_mask is not None and self._traces_mask(
            *given, attn_mask, is_causal, dropout_p, scale, enable_gqa
        ):
            by = scale if scale is not None else query.shape[3] ** -0.5
            return self._attention_masked(*given, attn_mask, by, 0.0, None, False)
        if (
            never(attn_mask, dropout_p)
            or not plain(*given)
            or self.planner.unserved(*given, is_causal, scale, enable_gqa)
            or not self.planner.is_known(query.device.index or 0)
        ):
            return _sdpa(
                *(*given, attn_mask, dropout_p, is_causal), scale=scale, enable_gqa=enable_gqa
            )
        by = scale if scale is not None else query.shape[3] ** -0.5
        return self._attention(query, key, value, is_causal, by)

    def _traces_mask(
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        is_causal: bool,
        dropout_p: float,
        scale: float | None,
        enable_gqa: bool,
        limits: Diagonals | None = None,
        softcap: float = 0.0,
        sinks: Any = None,
    ) -> bool:
        """Whether a kernel may serve a compiler's call with a mask."""
        if dropout_p or not plain(query, key, value):
            return False
        if self.planner.unserved(query, key, value, False, scale, enable_gqa):
            return False
        grad = torch.is_grad_enabled() and requires_grad(query, key, value, mask, sinks)
        if limits is not None and self.backward.serves and not softcap and sinks is None:
            grad = False  # `_impl_attention_intervals` knows all sizes
        if why_unserved(mask, query, key, is_causal, limits, softcap, sinks, grad):
            return False
        return self.planner.is_known(query.device.index or 0)

    def explain(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        causal: bool = False,
        window: Any = None,
        causal_offset: int | None = None,
        key_lengths: torch.Tensor | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        cache: bool = True,  # noqa: ARG002
    ) -> Explanation:
        """Which kernel `attention` would call with these arguments, and why; launches nothing."""
        query, key, value = self.cast(query, key, value)
        scale = number(scale)
        is_causal = is_causal or causal
        limits: Diagonals | None = None
        asked = (attn_mask, is_causal, (window, causal_offset, key_lengths), softcap, sinks)
        mask, is_causal, limits, cap, sinks = understood(query, key, *asked)
        choice = never(None, dropout_p)
        if choice is None and not plain(query, key, value):
            choice = SUBCLASS.choice
        if choice is None and (attn_mask is not None or limits is not None):
            given = (mask, is_causal, scale, enable_gqa, limits, cap, sinks)
            plan = self.masked_plan(query, key, value, *given)
            choice = plan.choice
            if plan.lse and limits is not None:
                padded = mask is not None
                own = self.backward.choice(query, key, value, False, limits, padded)
                backward = own.kernel.config if own and own.kernel else None
                return replace(self.explained(choice, query), backward=backward)
        elif choice is None:
            grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
            plan = self._plan(query, key, value, is_causal, scale, enable_gqa, grad)
            choice = plan.choice
            if plan.calls and (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15:
                choice = UNALIGNED
            served = grad and choice.kernel
            own = self.backward.choice(query, key, value, is_causal) if served else None
            backward = own.kernel.config if own and own.kernel else None
            return replace(self.explained(choice, query), backward=backward)
        return self.explained(choice, query)

    def explained(self, choice: Choice, query: Any) -> Explanation:
        """What is said of a choice for a query."""
        gpu = None
        if isinstance(query, torch.Tensor) and query.device.type in self.device_types:
            gpu = self.planner.gpu(query.device.index or 0)
        name = gpu.key.label if gpu is not None else None
        config = choice.kernel.config if choice.kernel is not None else None
        return Explanation(config, choice.code, choice.reason, choice.gain, name)

    def counters(self) -> dict[str, int]:
        """Calls so far by what served them: `kernel`, or the reason for PyTorch's own attention.

        Calls of a replayed CUDA graph are not seen.
        """
        return {code: count for code, count in self.counts.items() if count}

    def fell_back(self, choice: Choice) -> None:
        """Count a call that PyTorch gets, and say why if it is the first of its reason."""
        self.counts[choice.code] = self.counts.get(choice.code, 0) + 1
        if choice.code not in self._said:
            self._said.add(choice.code)
            level = logging.INFO if choice.code in _EXPECTED else logging.WARNING
            self._log.log(level, "scaled_dot_product_attention: %s (said once)", choice.reason)

    # ---- plans ----
    def _plan(
        self,
        query: Any,
        key: Any,
        value: Any,
        causal: bool,
        scale: float | None,
        enable_gqa: bool,
        lse: bool,
    ) -> Plan:
        """The plan of a call, from the cache if its shapes and strides were met before."""
        if transformed():
            return TRANSFORMED
        try:
            what = (
                *(query.shape, query.stride(), query.dtype, query.get_device()),
                *(key.shape, key.stride(), key.dtype, key.get_device()),
                *(value.shape, value.stride(), value.dtype, value.get_device()),
                *(causal, scale, enable_gqa, lse),
            )
            plan = self._plans.get(what)
        except (RuntimeError, TypeError):  # no strides, or symbolic ones
            return SUBCLASS
        if plan is None:
            plan = self._remembered(what, query, key, value, causal, scale, enable_gqa, lse)
        return plan

    def _remembered(self, what: Any, *call: Any) -> Plan:
        """The plan of a call that was not met before, under what tells it from others."""
        if self.forked:
            return FORKED
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
            self._seen.clear()
        plan = self._plans[what] = self.planner.made(*call)
        return plan

    # ---- launching ----
    def _served(
        self, plan: Plan, query: Any, key: Any, value: Any
    ) -> tuple[torch.Tensor, ...] | None:
        """What `run` returns; None, which is counted, if no kernel serves the call."""
        if plan.calls:
            return self.run(plan, query, key, value)
        self.fell_back(plan.choice)
        return None

    def run(
        self,
        plan: Plan,
        query: Any,
        key: Any,
        value: Any,
        mask: Any = None,
        keep: bool = True,
        sinks: Any = None,
    ) -> tuple[torch.Tensor, ...] | None:
        """The output, and the log-sum-exp if the plan has it; None if nothing could be launched.

        mask: of a plan that scans or adds one; keep, sinks: as of `masked`.
        """
        index = plan.index
        if index >= 0 and index != self.current_device():
            with torch.cuda.device(index):
                return self.run(plan, query, key, value, mask, keep, sinks)
        out = _empty_like(query) if plan.out is None else query.new_empty_strided(*plan.out)
        q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if not (q and k and v):  # lazy zeros have no memory
            given = (query.clone(), key.clone(), value.clone(), mask, keep, sinks)
            return self.run(plan, *given)
        made: tuple[torch.Tensor, ...] = (out,)
        addresses: tuple[int, ...] = (q, k, v, out.data_ptr())
        if plan.lse:
            lse = query.new_empty(*plan.rows, dtype=_FLOAT)  # a tuple is slow
            made, addresses = (out, lse), (*addresses, lse.data_ptr())
        if plan.floats:
            spaces = [query.new_empty(count, dtype=_FLOAT) for count in plan.floats]
            addresses += tuple([each.data_ptr() for each in spaces])
        stream = self.stream(index)
        try:
            launches = plan.launches
            if launches is None:
                launches = self.prepared(plan, index)
            if launches is None:  # another thread has tried it in vain since this one asked
                self.fell_back(plan.choice)
                return None
            if plan.scan:
                listed = self._listed(plan, query, key, mask, stream, keep)
                addresses += listed.addresses
            elif plan.biased:
                if mask.data_ptr() & 15:
                    raise Unaligned
                addresses += (mask.data_ptr(),)
            if sinks is not None:
                addresses += (sinks.data_ptr(),)
            launches.issue(addresses, stream)
        except Unaligned:
            self.fell_back(UNALIGNED)
            return None
        except (DriverError, PackageError) as error:
            self.gave_up(plan, error)
            return None
        self.counts["kernel"] += 1
        return made

    def gave_up(self, plan: Plan, error: Exception) -> None:
        """Leave the calls of a plan to PyTorch from now on, and say why."""
        code = "damaged" if isinstance(error, PackageError) else "driver"
        plan.choice = Choice(None, code, str(error), plan.choice.gain)
        plan.calls, plan.launches = {}, None
        self.fell_back(plan.choice)

    def prepared(self, plan: Plan, index: int) -> BoundLaunches | None:
        """The plan's launches, or None if it has no calls any more."""
        calls = plan.calls
        if not calls:
            return None
        if index not in self._devices:
            self._devices[index] = Device(self.table, self._cuda or cuda_driver(), index)
        device = self._devices[index]
        if plan.scan:
            names = (*plan.scan_names, *plan.scan_reads)
            plan.scans = device.launches(plan.scan, plan.stages, plan.tensors, names)
        made = device.launches(calls, plan.stages, plan.tensors, plan.names)
        plan.launches = made
        return made

    def _listed(
        self, plan: Plan, query: Any, key: Any, mask: Any, stream: int, keep: bool
    ) -> MaskList:
        """What a call reads of its mask: made in this stream, now or before. Raises DriverError."""
        masks = mask if isinstance(mask, CuSeqlens) else () if mask is None else (mask,)
        found = self._masks.find(masks, plan, stream) if keep else None
        if found is None and plan.scans is not None:
            read = masks
            if isinstance(mask, CuSeqlens):
                read = tuple([each.to(torch.int32).contiguous() for each in mask])
            elif plan.limits is not None and plan.scan_reads:
                read = (scanned(plan.scan_reads[0], plan.limits, query, key, mask),)
            memory = tuple([query.new_empty(n, dtype=torch.int32) for n in plan.scan_floats])
            addresses = tuple([each.data_ptr() for each in memory])
            plan.scans.issue((*addresses, *[each.data_ptr() for each in read]), stream)
            found = MaskList(addresses, memory)
            if keep:
                self._masks.keep(masks, plan, stream, found)
        if found is None:
            raise DriverError("the scan of a mask is not loaded")
        return found

    def _capture_of(self, stream: int) -> int | None:
        """The number of the CUDA graph that a stream is capturing, 0 if none, None if unknown."""
        if not self._on_cuda or not torch.cuda.is_current_stream_capturing():
            return 0
        try:
            cuda = self._cuda or cuda_driver()
            status, _, number, *_ = cuda.cuStreamGetCaptureInfo(cuda.CUstream(stream))
        except (AttributeError, TypeError, ValueError, DriverError):
            return None
        return None if int(status) else int(number)


# Reasons that say nothing is wrong with the caller's tensors.
_EXPECTED = frozenset(
    {"not_faster", "short_training", "far", "not_tuned", "mask", "dropout", "head_dim"}
)


def _kind_of(mask: Any) -> Any:
    """What plans depend on of a mask, of lengths, or of where sequences begin."""
    if isinstance(mask, CuSeqlens):
        return (mask.sequences, *(type(each) for each in mask), mask.q.device)
    return mask if mask is None else (mask.shape, mask.stride(), mask.dtype, mask.device)


def _masked_by_pytorch(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    scale: float,
    softcap: float,
    sinks: Any,
    repeats: bool,
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    if softcap or sinks is not None:
        return composed(query, key, value, mask, 0.0, scale, grouped, softcap, sinks)
    if grouped and repeats:
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    enable_gqa = grouped and not repeats
    out: torch.Tensor = _sdpa(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)
    return out


def _no_stream(_: int) -> int:
    return 0


def _raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


def open_package(directory: Path, namespace: str) -> Operator:
    """The operator of a package's directory. Raises PackageError."""
    from .table import read_table

    return Operator(read_table(directory), namespace)
