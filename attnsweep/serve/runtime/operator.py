"""The operator: scaled_dot_product_attention's meaning, by a package's kernels where they serve."""

from __future__ import annotations

import os
import sys
from inspect import signature
from typing import Any

import torch

from .backward_operator import BackwardOperator
from .call import Call, autocast, dropped, number
from .call_cache import ShortSteps, transformed
from .changed_scores import checked
from .compiled_calls import CompiledCalls
from .dispatch import Choice, Explanation
from .gradients import with_gradient
from .intervals import understood
from .launcher import Launcher
from .planner import Planner
from .pytorch_calls import attend, by_pytorch, watched
from .sdpa_patch import sdpa
from .serving_plan import MOST_PLANS
from .table import Guard, Table
from .transformers_hook import LazyMask

# Looked up once: each is asked in every call.
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_TENSOR, _frame = torch.Tensor, sys._getframe
PASSING_ON: set[Any] = set()
"""Code of functions that pass a call on to `Operator.attention`: their caller is its place."""
# Elements of q times keys, below which PyTorch gets a call that records gradients before anything
# is looked up: the host takes longer for such a step than the device, and would notice.
_SHORT_WORK = 2.5e9
SHORT = Choice(
    None,
    "short_training",
    "a step with gradients this short takes as long as the host's part of it",
)


class Operator:
    """The operators `forward` and `forward_lse` of one table, and the functions that call them.

    Each makes a Call, which `answer` or `served` takes. namespace: the package's name, also of its
    logger; unlike any other package's. cuda: the driver's binding (default: cuda.bindings.driver).
    devices: the device types that are served. Tests give others.
    """

    def __init__(
        self, table: Table, namespace: str, cuda: Any = None, devices: tuple[str, ...] = ("cuda",)
    ) -> None:
        self.table, self.device_types = table, devices
        self.launcher = Launcher(table, namespace, cuda, devices)
        self.counts = self.launcher.counts
        self.counts[SHORT.code] = 0
        self.planner = Planner(self.launcher)
        self._find = self.planner.find
        self.backward = BackwardOperator(self.planner, self.launcher)
        # Where a table's guards hand short steps over, and not those of a test.
        guards = [gpu.guard for gpu in table.gpus.values()]
        short = guards and min(guard.short_us for guard in guards) >= Guard().short_us
        self.short_work = _SHORT_WORK if short else 0.0
        # Sizes of query and key, and whether it is causal, of longer calls that were SHORT: what
        # finds their plans reaches over so much memory that a step, which has used the caches for
        # other things, is 11 to 26 us longer on the host of an H100.
        self.shorts: set[Any] = set()
        self.short_steps = ShortSteps()
        self._on_cuda = "cuda" in devices
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)
        # PyTorch has namespaces of its own, such as `quantized`; and it keeps compiled code on
        # disk by the names in it, so that these say by which table it was decided.
        wanted = f"attnsweep_{namespace.replace('.', '_')}_{table.digest[:8]}"
        self.traced = CompiledCalls(self, wanted, devices)
        self.library = self.traced.library
        self.namespace: str = self.library.ns

    def _after_fork(self) -> None:
        self.launcher.after_fork()
        self.planner.forget()  # so that a call asks again

    # ---- one call ----
    def served(self, call: Call) -> Any:
        """The outputs of a call by a kernel; None, which is counted, if none serves it."""
        return self.planner.plan(call).run(call)

    def served_soon(
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        causal: bool,
        scale: Any,
        grouped: bool,
        keep: bool = True,
        lse: bool | None = None,
    ) -> Any:
        """`served` of a call with a mask or `lse`: if it was met before, without a Call."""
        masks = () if mask is None else (mask,)
        kind = causal if lse is None else (causal, lse)
        plan = self._find(query, key, value, kind, scale, grouped, *masks)
        if plan is not None:
            return plan.launched(query, key, value, mask, keep)
        call = Call(query, key, value, mask, causal, scale, grouped, keep=keep, lse=lse)
        return self.served(call)

    def answer(self, call: Call) -> torch.Tensor:
        """The output of a call, by a kernel or by PyTorch."""
        if choice := dropped(call.dropout_p):
            self.launcher.fell_back(choice)
        elif (done := self.served(call)) is not None:
            own: torch.Tensor = done[0]
            return own
        return by_pytorch(call)

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
        is_causal = True if causal else is_causal  # PyTorch refuses what is no bool
        if not (window is causal_offset is key_lengths is softcap is sinks is None):
            given = (*self.cast(query, key, value), attn_mask, dropout_p, is_causal, scale)
            limits = (window, causal_offset, key_lengths)
            call = understood(*given, enable_gqa, limits, softcap, sinks, cache)
            if call.limits is not None or call.changes_scores:
                if not _is_compiling():
                    return self.answer(call)
                out: torch.Tensor | None = self.traced.masked(call)
                return by_pytorch(call) if out is None else out
            is_causal = call.is_causal
        if (
            not _is_compiling()
            and attn_mask is None
            and type(query) is type(key) is type(value) is _TENSOR  # others may see it
            and query.requires_grad
            and _is_grad_enabled()
            and query.is_cuda is self._on_cuda
            and not (query.is_nested or key.is_nested or value.is_nested)
            and key.dim() == 4
            and query.numel() * key.shape[2] < self.short_work
        ):
            frame = _frame(1)
            while frame.f_code in PASSING_ON and frame.f_back is not None:
                frame = frame.f_back
            place = (frame.f_code, frame.f_lasti)
            return self.short(query, key, value, dropout_p, is_causal, scale, enable_gqa, *place)
        return self.sdpa(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, cache, True
        )

    def short(
        self,
        query: Any,
        key: Any,
        value: Any,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        code: Any,
        at: int,
    ) -> torch.Tensor:
        """A short step with gradients, which PyTorch gets. code, at: the place that makes it."""
        self.launcher.fell_back(SHORT)
        find = self.short_steps
        options = (dropout_p, is_causal, scale, enable_gqa)
        out = find.output(find.number(code, at), query, key, value, *options)
        if out is not None:
            return out
        steps = find.find(code, at, query, key, value, is_causal)
        if steps is None:
            steps = find.add(code, at, query, key, value, is_causal)
        elif (
            steps.backend is not None  # `attend` watched one that is alike
            and not (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15
            and not transformed()
        ):
            masks = (None, -0.0 if dropout_p == 0.0 else dropout_p, is_causal)
            out = sdpa(query, key, value, *masks, scale=scale, enable_gqa=enable_gqa)
            return watched(out, query, key, value, steps)
        how: Any = (None, dropout_p, is_causal)
        given = (query, key, value, *how)
        return attend(*given, scale=scale, enable_gqa=enable_gqa, steps=steps)

    def sdpa(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        cache: bool = True,
        fill: bool = False,
    ) -> torch.Tensor:
        """`attention` with the arguments of PyTorch's own, of a call that is not short.

        fill: whether a query that a mask leaves no key has output 0 where PyTorch computes it too.
        """
        if _is_compiling():  # also one that gave up on the callers, and takes up this frame
            masks = (attn_mask, dropout_p, is_causal)
            return self.traced.call(query, key, value, *masks, scale, enable_gqa, fill)
        if type(is_causal) is not bool or type(enable_gqa) is not bool:  # 1 would find True's plan
            own = (query, key, value, attn_mask, dropout_p, is_causal)
            return attend(*own, scale=scale, enable_gqa=enable_gqa, fill=fill)
        if scale is not None and type(scale) is not float:
            scale = number(scale)
        if _any_autocast():
            query, key, value = self.cast(query, key, value)
        if choice := dropped(dropout_p):
            self.launcher.fell_back(choice)
        else:  # what was met before needs no Call
            if attn_mask is None:
                plan = self._find(query, key, value, is_causal, scale, enable_gqa)
            else:
                plan = self._find(query, key, value, is_causal, scale, enable_gqa, attn_mask)
            if plan is None:
                call = Call(query, key, value, attn_mask, is_causal, scale, enable_gqa, keep=cache)
                plan = self.planner.plan(call)
                done = plan.run(call)
            elif plan.lse and plan.calls:
                return with_gradient(query, key, value, plan, self.backward)
            else:
                done = plan.launched(query, key, value, attn_mask, cache)
            if done is not None:
                return done[0]
            is_short = plan.choice.code == SHORT.code and attn_mask is None
            if is_short and len(self.shorts) < MOST_PLANS:
                self.shorts.add((query.shape, key.shape, is_causal))
        masks = (attn_mask, dropout_p, is_causal)
        return attend(query, key, value, *masks, scale=scale, enable_gqa=enable_gqa, fill=fill)

    def in_model(
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        scale: float | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        limits: Any = None,
    ) -> torch.Tensor | None:
        """A call with a mask as a model of transformers makes it, or None if no kernel serves it.

        Its own attention repeats k and v then. softcap, sinks: beside a LazyMask alone. limits: in
        the place of a mask, as a Call has them.
        """
        if limits is not None:
            call = Call(*self.cast(query, key, value), None, False, scale, True, limits)
            if _is_compiling():
                traced: torch.Tensor | None = self.traced.masked(call, repeats=True)
                return traced
        elif isinstance(mask, LazyMask):
            sizes = (query.shape[0], 1, query.shape[2], key.shape[2])
            if mask.shape != sizes or mask.device != query.device:
                return None
            cap, sinks = checked(softcap, sinks, query, None, False)
            how: Any = (mask.lengths, False, scale, True, mask.limits, cap, sinks)
            call = Call(*self.cast(query, key, value), *how)
            if call.changes_scores:
                return self.answer(call)
        elif _is_compiling():
            call = Call(*self.cast(query, key, value), mask, scale=scale)
            compiled: torch.Tensor | None = self.traced.masked(call, repeats=True)
            return compiled
        else:
            done = self.served_soon(query, key, value, mask, False, scale, True)
            return None if done is None else done[0]
        done = self.served(call)
        return None if done is None else done[0]

    def cast(self, *given: Any) -> tuple[Any, Any, Any]:
        """Cast query, key and value as autocast does for scaled_dot_product_attention."""
        query, key, value = given
        if all(isinstance(each, torch.Tensor) for each in given):
            kind = query.device.type
            if kind in self.device_types and torch.is_autocast_enabled(kind):
                wanted = torch.get_autocast_dtype(kind)
                if not query.dtype == key.dtype == value.dtype == wanted:
                    query, key, value = map(autocast, given)
        return query, key, value

    def explain(self, *args: Any, **options: Any) -> Explanation:
        """Which kernel `attention` would call with these arguments, and why; launches nothing."""
        bound = signature(self.attention).bind(*args, **options)
        bound.apply_defaults()
        *tensors, attn_mask, dropout_p, is_causal, scale, enable_gqa = bound.args
        causal, *limits, softcap, sinks, keep = bound.kwargs.values()
        how: Any = (attn_mask, dropout_p, is_causal or causal, scale, enable_gqa)
        given = (*self.cast(*tensors), *how, tuple(limits), softcap, sinks, keep)
        return self.explained(understood(*given))

    def explained(self, call: Call) -> Explanation:
        """Which kernel a call would get, and why; launches nothing."""
        query, backward, name = call.query, None, None
        choice = dropped(call.dropout_p)
        if choice is None:
            plan: Any = self.planner.looked_up(call)
            choice = (plan.refused(call) if plan.calls else None) or plan.choice
            if plan.lse and choice.kernel:
                own = self.backward.choice(call)
                backward = own.kernel.config if own and own.kernel else None
        if isinstance(query, torch.Tensor) and query.device.type in self.device_types:
            gpu = self.planner.gpu(query.device.index or 0)
            name = gpu.key.label if gpu is not None else None
        config = choice.kernel.config if choice.kernel is not None else None
        return Explanation(config, choice.code, choice.reason, choice.gain, name, backward)

    def counters(self) -> dict[str, int]:
        """Calls so far by what served them: `kernel`, or the reason for PyTorch's own attention.

        Calls of a replayed CUDA graph are not seen.
        """
        return {code: count for code, count in self.counts.items() if count}
