"""The operator: scaled_dot_product_attention's meaning, by a package's kernels where they serve."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from inspect import signature
from typing import Any

import torch

from .backward_operator import BackwardOperator, IntervalGradient, key_ranges
from .call import (
    Call,
    autocast,
    bias_copied,
    dropped,
    number,
    plain,
    records_gradients,
)
from .call_cache import MaskList, MaskLists, Seen, ShortSteps, transformed
from .changed_scores import checked
from .compiled_calls import Traced
from .dispatch import Choice
from .driver import BoundLaunches, Device, DriverError, Unaligned, cuda_driver
from .gradients import Gradient, like, with_gradient
from .intervals import by_pytorch, scanned, understood
from .packed import CuSeqlens
from .planner import Planner
from .pytorch_calls import attend
from .serving_plan import FORKED, MOST_PLANS, SUBCLASS, TRANSFORMED, UNALIGNED, Explanation, Plan
from .table import Guard, PackageError, Table
from .transformers_hook import LazyMask

# Looked up once: each is asked in every call.
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_modes = torch._C._len_torch_dispatch_stack
_capturing = getattr(  # without PyTorch's Python around it, where this build has it
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
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
SHORT_SCAN = Choice(
    None, "short_scan", "to scan a mask that is not kept takes the host longer than the call"
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
        self._masks = MaskLists(self.capture_of)
        self._devices: dict[int, Device] = {}
        self.backward = BackwardOperator(self)
        self.forked = False
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
        # Without PyTorch's Python around them, where this build has them.
        self.current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
        self.stream = raw_stream if "cuda" in devices else lambda _: 0
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)
        # PyTorch has namespaces of its own, such as `quantized`; and it keeps compiled code on
        # disk by the names in it, so that these say by which table it was decided.
        wanted = f"attnsweep_{namespace.replace('.', '_')}_{table.digest[:8]}"
        self.traced = Traced(self, wanted, devices)
        self.library = self.traced.library
        self.namespace: str = self.library.ns

    def _after_fork(self) -> None:
        self.forked = bool(self._devices)
        self._plans.clear()  # so that a call asks again
        self.backward.forget()
        self._seen.clear()
        self._masks.forget()

    # ---- one call ----
    def ranges(self, plan: Plan, query: Any, key: Any, lengths: Any, keep: bool) -> torch.Tensor:
        """What a backward reads of lengths: made in this stream, now or before."""
        if not keep:
            return key_ranges(query, key, lengths)
        stream = self.stream(plan.index)
        # The backward stands for what is made of lengths, as a plan does for a list of tiles; and
        # the number of keys, beyond which no range reaches, where a list has its addresses.
        found, keys = self._masks.find((lengths,), self.backward, stream), (key.shape[2],)
        if found is None or found.addresses != keys:
            found = MaskList(keys, (key_ranges(query, key, lengths),))
            self._masks.keep((lengths,), self.backward, stream, found)
        return found.memory[0]

    def masked(self, call: Call, keep: bool = True) -> torch.Tensor | None:
        """A call with a mask or limits, or None, which is counted, if no kernel serves it.

        keep: whether what a scan makes of its mask is used again while that is unchanged: see
        MaskLists.
        """
        query, key, value, mask, *_ = call
        dtype = getattr(mask, "dtype", None)
        if call.limits is None and dtype is not torch.bool and dtype is not query.dtype:
            self.fell_back(_OTHER_DTYPE)  # nothing else needs to be asked
            return None
        plan = self.masked_plan(call)
        if not plan.calls:
            self.fell_back(plan.choice)
            return None
        plain_scores = call.limits is None and not call.softcap and call.sinks is None
        if not plan.lse and plain_scores and not records_gradients(call):
            how = (call.is_causal, call.scale, call.enable_gqa, mask)
            self._seen.add(plan, query, key, value, *how)
        if self._is_for_once(plan, mask, keep):
            return None
        if plan.lse:
            given = (query, key, value, mask, self, plan, keep)
            with_grad: torch.Tensor = IntervalGradient.apply(*given)
            return with_grad
        done = self.run(plan, query, key, value, mask, keep, call.sinks)
        return None if done is None else done[0]

    def by_mask(
        self, query: Any, key: Any, value: Any, mask: Any, how: Any, keep: bool
    ) -> torch.Tensor | None:
        """`masked`, of a mask alone; what was met before is found by one question.

        how: is_causal, scale and enable_gqa.
        """
        seen = self._find(query, key, value, *how, mask)
        if seen is None or not seen.calls:
            return self.masked(Call(query, key, value, mask, *how), keep)
        if self._is_for_once(seen, mask, keep):
            return None
        done = self.run(seen, query, key, value, mask, keep)
        return None if done is None else done[0]

    def _is_for_once(self, plan: Plan, mask: Any, keep: bool) -> bool:
        """Whether what a call makes of its mask is for it alone, and takes longer than it gains."""
        if not plan.short_scan or not self._is_scanned_alone(mask, keep):
            return False
        self.fell_back(SHORT_SCAN)
        return True

    def _is_scanned_alone(self, mask: Any, keep: bool) -> bool:
        """Whether a scan is of one call: nothing of it is kept, and no graph replays it."""
        return (not keep or mask.is_inference()) and not (self._on_cuda and _capturing())

    def masked_in_model(
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        scale: float | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """`masked` as a model of transformers calls it, whose own attention repeats k and v.

        softcap, sinks: beside a LazyMask alone.
        """
        if isinstance(mask, LazyMask):
            sizes = (query.shape[0], 1, query.shape[2], key.shape[2])
            if mask.shape != sizes or mask.device != query.device:
                return None
            cap, sinks = checked(softcap, sinks, query, None, False)
            how: Any = (False, scale, True, mask.limits, cap, sinks)
            lazily = Call(*self.cast(query, key, value), mask.lengths, *how)
            done = self.masked(lazily)
            changed = cap or sinks is not None
            return by_pytorch(lazily) if done is None and changed else done
        if not _is_compiling():
            return self.by_mask(query, key, value, mask, (False, scale, True), True)
        call = Call(*self.cast(query, key, value), mask, scale=scale)
        out: torch.Tensor | None = self.traced.masked(call, repeats=True)
        return out

    def masked_plan(self, call: Call, *, lse: bool = False) -> Plan:
        """The plan of a call of `masked`. lse: whether it must have the log-sum-exp.

        It also has it where gradients are recorded and a kernel has them.
        """
        query, key, value, mask, is_causal, scale, enable_gqa, limits, softcap, sinks, *_ = call
        if transformed():
            return TRANSFORMED
        if not _alone(query, key, value):
            return SUBCLASS
        if type(mask) is not _TENSOR and limits is None:
            return Plan(_OTHER_DTYPE)
        grad = records_gradients(call)
        try:
            what = (
                *(query.shape, query.stride(), query.dtype, query.get_device()),
                *(key.shape, key.stride(), key.dtype, key.get_device()),
                *(value.shape, value.stride(), value.dtype, value.get_device()),
                _kind_of(mask),
                *(is_causal, scale, enable_gqa, limits, softcap, sinks is not None),
                *(grad, lse, grad and _is_deterministic()),
            )
            plan = self._plans.get(what)
        except (RuntimeError, TypeError):  # no strides, or symbolic ones
            return SUBCLASS
        if plan is None:
            if grad and not softcap and sinks is None and not isinstance(mask, CuSeqlens):
                own = mask is not None
                lse = self.backward.serves_intervals(query, key, value, limits, own)
            plan = self._remembered(what, call, lse)
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
            return self._beyond_sdpa(given, limits, softcap, sinks, cache)
        if (
            not _is_compiling()
            and attn_mask is None
            and type(query) is type(key) is _TENSOR  # others may see that they are asked
            and query.requires_grad
            and _is_grad_enabled()
            and query.is_cuda is self._on_cuda
            and not (query.is_nested or key.is_nested)
            and key.dim() == 4
            and query.numel() * key.shape[2] < self.short_work
        ):
            return self.short(query, key, value, dropout_p, is_causal, scale, enable_gqa)
        how = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return self.eager(query, key, value, *how, cache=cache, fill=True)

    def short(
        self,
        query: Any,
        key: Any,
        value: Any,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        code: Any = None,
        at: int = 0,
    ) -> torch.Tensor:
        """A short step with gradients, which PyTorch gets. code, at: the place that makes it."""
        self.fell_back(SHORT)
        find = self.short_steps
        steps = find.find(code, at, query, key, value, is_causal)
        steps = steps or find.add(code, at, query, key, value, is_causal)
        how: Any = (None, dropout_p, is_causal)
        given = (query, key, value, *how)
        return attend(*given, scale=scale, enable_gqa=enable_gqa, steps=steps)

    def eager(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        *,
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
            how = (dropout_p, is_causal)
            own = (query, key, value, attn_mask, *how)
            return attend(*own, scale=scale, enable_gqa=enable_gqa, fill=fill)
        if scale is not None and type(scale) is not float:
            scale = number(scale)
        if _any_autocast():
            query, key, value = self.cast(query, key, value)
        choice: Choice | None = None
        if attn_mask is not None and dropout_p == 0.0:
            how = (is_causal, scale, enable_gqa)
            out = self.by_mask(query, key, value, attn_mask, how, cache)
            if out is not None:
                return out
        elif dropout_p != 0.0:
            choice = dropped(dropout_p)
        elif (seen := self._find(query, key, value, is_causal, scale, enable_gqa)) is not None:
            if not seen.calls:
                choice = seen.choice
            elif seen.lse:
                return with_gradient(query, key, value, self, seen)
            else:
                done = self.run(seen, query, key, value)
                if done is not None:
                    return done[0]
        elif not _alone(query, key, value):
            choice = SUBCLASS.choice
        else:
            grad = _is_grad_enabled() and (
                query.requires_grad or key.requires_grad or value.requires_grad
            )
            plan = self.plan(query, key, value, is_causal, scale, enable_gqa, grad)
            if not plan.calls:
                choice = plan.choice
                self._seen.add(plan, query, key, value, is_causal, scale, enable_gqa)
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
            if choice.code == SHORT.code and len(self.shorts) < MOST_PLANS:
                self.shorts.add((query.shape, key.shape, is_causal))
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        return attend(*given, scale=scale, enable_gqa=enable_gqa, fill=fill)

    def _beyond_sdpa(
        self, given: tuple[Any, ...], limits: Any, softcap: Any, sinks: Any, keep: bool
    ) -> torch.Tensor:
        """`attention` with arguments that PyTorch's own does not have, which follow those it has.

        limits: window, causal_offset and key_lengths.
        """
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = given
        asked = (attn_mask, is_causal, limits, softcap, sinks)
        mask, is_causal, limits, softcap, sinks = understood(query, key, *asked)
        if limits is None and not softcap and sinks is None:
            how: Any = (dropout_p, is_causal, scale, enable_gqa)
            return self.attention(query, key, value, attn_mask, *how, cache=keep)
        query, key, value = self.cast(query, key, value)
        if scale is not None and type(scale) is not float:
            scale = number(scale)
        how = (False, scale, enable_gqa, limits, softcap, sinks, dropout_p)
        call = Call(query, key, value, mask, *how)
        out: torch.Tensor | None = None
        if _is_compiling():
            out = self.traced.masked(call)
        elif choice := dropped(dropout_p):
            self.fell_back(choice)
        else:
            out = self.masked(call, keep)
        return out if out is not None else by_pytorch(call)

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

    def explain(self, *args: Any, **options: Any) -> Explanation:
        """Which kernel `attention` would call with these arguments, and why; launches nothing."""
        call = signature(self.attention).bind(*args, **options)
        call.apply_defaults()
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = call.args
        causal, *limits, softcap, sinks, keep = call.kwargs.values()
        query, key, value = self.cast(query, key, value)
        scale = number(scale)
        asked = (attn_mask, is_causal or causal, tuple(limits), softcap, sinks)
        mask, is_causal, diagonals, cap, sinks = understood(query, key, *asked)
        choice = dropped(dropout_p)
        if choice is None and not _alone(query, key, value):
            choice = SUBCLASS.choice
        if choice is not None:
            return self.explained(choice, query)
        if attn_mask is not None or diagonals is not None:
            given = (mask, is_causal, scale, enable_gqa, diagonals, cap, sinks)
            plan = self.masked_plan(Call(query, key, value, *given))
            short = plan.short_scan and self._is_scanned_alone(mask, keep)
            choice, is_causal = SHORT_SCAN if short else plan.choice, False
        else:
            grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
            plan = self.plan(query, key, value, is_causal, scale, enable_gqa, grad)
            choice = plan.choice
        tensors = (query, key, value, *((mask,) if plan.biased and not plan.copied else ()))
        if plan.calls and any(each.data_ptr() & 15 for each in tensors):
            choice = UNALIGNED
        own = None
        if plan.lse and choice.kernel:
            own = self.backward.choice(query, key, value, is_causal, diagonals, mask is not None)
        backward = own.kernel.config if own and own.kernel else None
        return replace(self.explained(choice, query), backward=backward)

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
    def plan(self, query: Any, key: Any, value: Any, *how: Any) -> Plan:
        """The plan of a call, from the cache if its shapes and strides were met before.

        how: causal, scale, enable_gqa, and whether it has the log-sum-exp.
        """
        if transformed():
            return TRANSFORMED
        try:
            what = (
                *(query.shape, query.stride(), query.dtype, query.get_device()),
                *(key.shape, key.stride(), key.dtype, key.get_device()),
                *(value.shape, value.stride(), value.dtype, value.get_device()),
                *how,
            )
            plan = self._plans.get(what)
        except (RuntimeError, TypeError):  # no strides, or symbolic ones
            return SUBCLASS
        if plan is None:
            *options, lse = how
            plan = self._remembered(what, Call(query, key, value, None, *options), lse)
        return plan

    def _remembered(self, what: Any, call: Call, lse: bool) -> Plan:
        """The plan of a call that was not met before, under what tells it from others."""
        if self.forked:
            return FORKED
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
            self._seen.clear()
        plan = self._plans[what] = self.planner.made(call, lse)
        return plan

    # ---- launching ----
    def served(
        self, query: Any, key: Any, value: Any, causal: bool, scale: float, lse: bool
    ) -> tuple[torch.Tensor, ...] | None:
        """What `run` returns; None, which is counted, if no kernel serves the call."""
        grouped = query.shape[1] != key.shape[1]
        plan = self.plan(query, key, value, causal, scale, grouped, lse)
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
        if plan.of_rows is not None:
            done = self.run(plan.of_rows, query.contiguous(), key, value, mask, keep, sinks)
            return None if done is None else (like(done[0], query, value), *done[1:])
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
                masks = mask if isinstance(mask, CuSeqlens) else () if mask is None else (mask,)
                listed = self._masks.find(masks, plan, stream) if keep else None
                if listed is None:
                    listed = self._listed(plan, query, key, masks, stream, keep)
                addresses += listed.addresses
            elif plan.copied:
                listed = self._masks.find((mask,), plan, stream) if keep else None
                if listed is None:
                    copy = bias_copied(mask)
                    listed = MaskList((copy.data_ptr(),), (copy,))
                    if keep:
                        self._masks.keep((mask,), plan, stream, listed)
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
        self, plan: Plan, query: Any, key: Any, masks: Any, stream: int, keep: bool
    ) -> MaskList:
        """What a call reads of its mask, made in this stream now. Raises DriverError."""
        if plan.scans is None:
            raise DriverError("the scan of a mask is not loaded")
        read = masks
        if isinstance(masks, CuSeqlens):
            read = tuple([each.to(torch.int32).contiguous() for each in masks])
        elif plan.limits is not None and plan.scan_reads:
            read = (scanned(plan.scan_reads[0], plan.limits, query, key, *(masks or (None,))),)
        # One piece: on an H100's host each costs 2 us, a tenth of what a new mask does.
        *places, words = plan.scan_places
        memory = query.new_empty(words, dtype=torch.int32)
        begin = memory.data_ptr()
        addresses = tuple([begin + 4 * place for place in places])
        plan.scans.issue((*addresses, *[each.data_ptr() for each in read]), stream)
        made = MaskList(addresses, (memory,))
        if keep:
            self._masks.keep(masks, plan, stream, made)
        return made

    def capture_of(self, stream: int) -> int | None:
        """The number of the CUDA graph that a stream is capturing, 0 if none, None if unknown."""
        if not self._on_cuda or not _capturing():
            return 0
        try:
            cuda = self._cuda or cuda_driver()
            status, _, number, *_ = cuda.cuStreamGetCaptureInfo(cuda.CUstream(stream))
        except (AttributeError, TypeError, ValueError, DriverError):
            return None
        return None if int(status) else int(number)


# Reasons that say nothing is wrong with the caller's tensors.
_EXPECTED = frozenset(
    {
        *("not_faster", "short_training", "short_scan", "far", "not_tuned", "mask", "dropout"),
        "head_dim",
    }
)


def _alone(query: Any, key: Any, value: Any) -> bool:
    """Whether nothing else has a say in a call: no class, no dispatch mode and no negation.

    Modes that count FLOPs and policies of selective checkpoints know PyTorch's operators alone.
    """
    return plain(query, key, value) and not (
        _modes() or query.is_neg() or key.is_neg() or value.is_neg()
    )


def _kind_of(mask: Any) -> Any:
    """What plans depend on of a mask, of lengths, or of where sequences begin."""
    if isinstance(mask, CuSeqlens):
        return (mask.sequences, *(type(each) for each in mask), mask.q.device)
    return mask if mask is None else (mask.shape, mask.stride(), mask.dtype, mask.device)


def _raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)
