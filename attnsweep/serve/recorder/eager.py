"""An object of ours in the place of scaled_dot_product_attention: it counts eager calls.

In a model it costs a fraction of the dispatcher's kernels. So those are in only while they are
needed: at first they count and describe each call. Once calls come through this object alone,
all of known kinds, they are taken out, until a call of an unknown kind comes. Where a call may
come by another way (compiled code, TorchScript, C++), this object gives way to them for good.

A call is of a known kind if it answers PyTorch's own question about the arguments of compiled
code: class, dispatch keys, dtype, device, gradient, sizes and strides of q, k and v.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from .dispatcher import OPS, Dispatcher
from .graphs import Graphs
from .imported import when_imported
from .log import Log
from .place import NAME, InPlace, is_held, pytorchs, replace, stood

CALM = 32
"""Calls of known kinds in a row before the kernels are taken out; twice as many each next time."""
# Kinds that are known by one question. More are met only by calls whose sizes keep changing.
_MOST_KNOWN = 1024


class Kind:
    """Calls that are known. slot: the place of their count, which is calls[0]."""

    __slots__ = ("after", "alike", "calls", "options", "slot")

    def __init__(
        self, slot: int, calls: Any, options: dict[str, Any] | None, alike: Callable[..., bool]
    ) -> None:
        self.slot, self.calls, self.alike = slot, calls, alike
        self.options = options
        """What a call names beside q, k and v; None: no call is of this kind."""
        self.after = self
        """The other kind that came next when one last did."""


# No kind: nothing is ever known to be of it, or follows it.
_NONE = Kind(-1, None, None, bool)


class Eager:
    """Counts eager calls, and says when the dispatcher's kernels must be in.

    They alone count where something else stands in the place of PyTorch's function, or where
    something was compiled with it before, or holds it where it cannot be replaced.
    """

    def __init__(self, log: Log, graphs: Graphs) -> None:
        import torch

        self._log, self._graphs = log, graphs
        # A recording around this one counts by its kernels alone, which ours then call.
        getattr(getattr(torch.nn.functional, NAME), "gives_way", bool)()
        self.dispatcher = Dispatcher(log, graphs, self._is_counted, self.give_way)
        self.gone = True
        """Whether it has given way."""
        self.watches = True
        """Whether the kernels are in."""
        self._undo: list[Callable[[], None]] = []
        self._counted: set[int] = set()
        """Threads that are in a call which was counted already."""
        self._remember: Callable[[Kind | None], None] = lambda _: None
        self._begin()
        os.register_at_fork(after_in_child=self._begin)
        dynamo = getattr(torch._C, "_dynamo", None)
        self._guards: Any = getattr(getattr(dynamo, "guards", None), "TensorGuards", None)
        self.dispatcher.put()
        if self._guards is not None and self._alone(torch):
            self._put(torch)

    def _begin(self) -> None:
        # A forked child has this thread alone, and its log has no slots yet.
        self._lock = threading.RLock()
        self._counted.clear()
        self._watched_now = 0
        """Watched calls that have not returned; log.lock guards it."""
        self._forget()
        self._met: set[int] = set()
        """Slots of calls that were described."""
        self._calm, self._wanted = 0, CALM

    def _forget(self) -> None:
        self._remember(None)
        self._kinds: dict[Any, list[tuple[Any, Kind]]] = {}
        """Known kinds and their other arguments, by sizes."""
        self._known = 0

    def stop(self) -> None:
        """Give PyTorch its own function and kernels back."""
        self.give_way()
        self.dispatcher.take_out()

    # -- in the place of PyTorch's function ---------------------------------------------------

    def _alone(self, torch: Any) -> bool:
        """Whether PyTorch's own function is in its place, uncompiled, and no mode sees it."""
        if getattr(torch.nn.functional, NAME) is not pytorchs():
            return False
        if any(map(_says_something, torch.overrides._get_current_function_mode_stack())):
            return False
        frames = sys.modules.get("torch._dynamo.convert_frame")
        if frames is not None and getattr(frames, "FRAME_COUNTER", True):
            return False
        return not is_held(torch)

    def _put(self, torch: Any) -> None:
        """Take the place of PyTorch's function, and watch other ways to attention."""
        own = pytorchs()
        ours = self._function(own)
        # PyTorch's compiler of TorchScript knows functions by their ids, which are given anew.
        torch.jit._builtins._register_builtin(ours, f"aten::{NAME}")
        weakref.finalize(ours, torch.jit._builtins._builtin_table.pop, id(ours), None)
        replace(own, ours)
        self._undo.append(lambda: replace(ours, own))
        for owner, name in (
            (torch, "_transformer_encoder_layer_fwd"),  # fast paths of layers, in C++
            (torch, "_native_multi_head_attention"),
            (torch._C, "import_ir_module"),  # of torch.jit.load
            (torch._C, "import_ir_module_from_buffer"),
            (torch.jit._builtins, "_find_builtin"),  # which TorchScript's compiler asks
        ):
            self._watch(owner, name)
        self._watch(torch.overrides, "_push_mode", _says_something)
        for name in (NAME, *OPS):
            packet = getattr(torch.ops.aten, name, None)
            if packet is not None:
                for way in (packet, *(getattr(packet, each) for each in packet.overloads())):
                    self._watch_calls(way)
        callback = "torch._dynamo.callback"  # whose handler torch.compile tells that it begins
        self._undo.append(
            when_imported(
                callback,
                lambda: self._watch(sys.modules[callback].callback_handler, "run_start_callbacks"),
            )
        )
        self.gone = False

    def _watch(
        self, owner: Any, name: str, if_: Callable[..., object] = lambda *_, **__: True
    ) -> None:
        """Give way when this function is called, with arguments of which that is true."""
        own, give_way = getattr(owner, name, None), self.give_way

        def through(*args: Any, **kwargs: Any) -> Any:
            if if_(*args, **kwargs):
                give_way()
            return own(*args, **kwargs)  # type: ignore[misc]

        def undo() -> None:
            if getattr(owner, name, None) is through:  # not what others put there since
                setattr(owner, name, own)

        if own is not None:
            setattr(owner, name, through)
            self._undo.append(undo)

    def _watch_calls(self, way: Any) -> None:
        """Give way when this object is called. It keeps its attributes and its hash."""
        own, give_way = type(way), self.give_way

        def call(this: Any, /, *args: Any, **kwargs: Any) -> Any:
            give_way()
            return own.__call__(this, *args, **kwargs)

        way.__class__ = type(own.__name__, (own,), {"__call__": call, "__slots__": ()})
        self._undo.append(lambda: setattr(way, "__class__", own))

    def give_way(self) -> None:
        """Leave all calls to the dispatcher's kernels, from now on."""
        if self.gone:
            return
        with self._lock:
            if self.gone:
                return
            self.gone = True
            self._watch_all()
            for undo in reversed(self._undo):
                undo()
            self._undo.clear()
            self._forget()

    # -- a call -------------------------------------------------------------------------------

    def _function(self, own: Any) -> InPlace:
        """What stands in the place of PyTorch's function."""
        graphs, slow, find = self._graphs, self._slow, self._find
        thread, enter, leave = threading.get_ident, self._counted.add, self._counted.discard
        # Between bytecodes that call no function no other thread runs, where there is a GIL.
        gil = getattr(sys, "_is_gil_enabled", lambda: True)()
        # The kind of the call before; None: the kernels are in.
        last: Kind | None = None

        def remember(kind: Kind | None) -> None:
            nonlocal last
            last = kind

        # In a model each of these lines costs several times what it does in a loop, since the model
        # has emptied the caches of the host; so they look up as little as they can, and take no
        # lock.
        def scaled_dot_product_attention(_: Any, /, *args: Any, **kwargs: Any) -> Any:
            nonlocal last
            kind = before = last
            if kind is None or before is None or not gil:
                return slow(own, args, kwargs)
            try:
                q, k, v = args
                # A nested tensor has no strides, and PyTorch's question would end the process.
                if q.is_nested or k.is_nested or v.is_nested:
                    kind = _NONE
                elif kind.options != kwargs or not kind.alike(q, k, v):
                    kind = before.after
                    if kind.options != kwargs or not kind.alike(q, k, v):
                        kind = find(args, kwargs)
                    if kind is not _NONE and last is not None:
                        before.after = last = kind
            except Exception:  # other arguments
                kind = find(args, kwargs)
            if kind is _NONE or graphs.capturing is not None:
                return slow(own, args, kwargs)
            me = thread()
            try:
                enter(me)
                kind.calls[0] += 1
                return own(*args, **kwargs)
            finally:
                leave(me)

        self._remember = remember
        call = scaled_dot_product_attention
        names = {"__call__": call, "__doc__": own.__doc__, "__module__": own.__module__}
        names |= {"__slots__": (), "gives_way": staticmethod(self.give_way)}
        ours: InPlace = type(NAME, (InPlace,), names)()
        cells = [each for each in call.__closure__ or () if each.cell_contents is own]
        stood.append((weakref.ref(ours), cells[0]))
        return ours

    def _slow(self, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of an unknown kind, or while a graph is captured, or while the kernels are in."""
        if self.gone:
            return own(*args, **kwargs)
        kind = self._find(args, kwargs)
        if kind is _NONE or self.watches:
            return self._watched(own, kind, args, kwargs)
        me = threading.get_ident()
        try:
            self._counted.add(me)
            self._graphs.add(kind.slot, args[0].device.type == "cuda")
            return own(*args, **kwargs)
        finally:
            self._counted.discard(me)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
        """The known kind of a call, or _NONE."""
        try:
            q, k, v = args[:3]
            if q.is_nested or k.is_nested or v.is_nested:
                return _NONE
            others = _others(args, kwargs)
            for theirs, kind in self._kinds.get((q.shape, k.shape), ()):
                if kind.slot >= 0 and theirs == others and kind.alike(q, k, v):
                    return kind
        except Exception:  # arguments that PyTorch is to refuse
            pass
        return _NONE

    def _watched(self, own: Any, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that the dispatcher's kernels count."""
        if kind is _NONE and self._strange(args, kwargs):
            self.give_way()
        with self._lock:
            self._watch_all()
            with self._log.lock:
                self._watched_now += 1
        caller = self.dispatcher.caller
        slots: list[int] = []
        before = caller.slots
        try:
            caller.slots = slots
            out = own(*args, **kwargs)
        finally:
            caller.slots = before
            with self._log.lock:
                self._watched_now -= 1
        try:
            self._learn(kind, slots, args, kwargs)
        except Exception:
            self._log.fail()
        return out

    def _is_counted(self) -> bool:
        return threading.get_ident() in self._counted

    def _strange(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether classes, modes or transforms have a say in what this call computes.

        Some of PyTorch's own know the call by the function that stands in PyTorch's place.
        """
        import torch
        from torch.autograd import forward_ad

        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        plain = torch.Tensor, torch.nn.Parameter
        if any(type(each) not in plain or each.is_nested for each in tensors):
            return True
        if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._is_tracing():
            return True
        return bool(forward_ad._current_level >= 0)

    def _watch_all(self) -> None:
        """Put the kernels in, unless they are."""
        with self._lock:
            self._remember(None)
            if not self.watches:
                self.dispatcher.put()
                self.watches = True
                self._calm = 0

    def _learn(
        self, kind: Kind, slots: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Know later calls like this one, which the kernels counted in these slots."""
        with self._lock:
            if self.gone:
                return
            if len(slots) != 1:  # not one call of the dispatcher's
                self.give_way()
            elif kind is _NONE:
                self._calm = 0
                if slots[0] in self._met:
                    self._know(slots[0], args, kwargs)
                self._met.add(slots[0])
            elif kind.slot != slots[0]:  # PyTorch chose another operator
                self._calm, kind.slot, kind.options = 0, -1, None
            else:
                self._calm += 1
                if self._calm >= self._wanted:
                    self._watch_no_more(kind)

    def _watch_no_more(self, last: Kind) -> None:
        """Take the kernels out, if no call is under way, which may be in one of them."""
        with self._log.lock:  # no watched call begins meanwhile
            if not self._watched_now and not self._counted:
                self.dispatcher.take_out()
                self.watches = False
                self._remember(last)
                self._wanted = min(2 * self._wanted, 32 * CALM)

    def _know(self, slot: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have calls like this one known by PyTorch's question, if it can be asked."""
        import torch

        qkv = args[:3]
        if len(qkv) < 3:
            return
        q, k = qkv[:2]
        causal = kwargs.get("is_causal") or (len(args) > 5 and args[5])
        if causal and q.shape[-2] != k.shape[-2]:
            return  # what it means depends on the operator that PyTorch chooses
        sizes, strides = [list(t.shape) for t in qkv], [list(t.stride()) for t in qkv]
        try:
            others = _others(args, kwargs)
            guards = self._guards(*qkv, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        except (TypeError, RuntimeError):  # of a tensor that is given twice, for one
            return
        alike, device = guards.check, q.device.type
        # Dispatch keys tell of autocast, but not its dtype; and where it converts tensors, or
        # PyTorch pads them, the mode says whether those that the operator gets have a gradient.
        cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        if cast or (q.requires_grad and q.shape[-1] % 8):

            def state() -> Any:
                return torch.is_grad_enabled(), cast and torch.get_autocast_dtype(device)

            known = state()

            def alike(q: Any, k: Any, v: Any) -> bool:
                return bool(state() == known and guards.check(q, k, v))

        if self._known >= _MOST_KNOWN:
            self._forget()
        self._known += 1
        # A mask, a tensor, cannot be compared; nor is what comes behind q, k and v by position.
        options = None if others != kwargs else kwargs
        kind = Kind(slot, self._log.counts[slot : slot + 1], options, alike)
        self._kinds.setdefault((q.shape, k.shape), []).append((others, kind))


def _others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
    """The arguments of a call but q, k and v; of a mask its class.

    Raises TypeError if another one is a tensor, whose value may change.
    """
    import torch

    others = dict(enumerate(args[3:])) | kwargs
    for name, each in others.items():
        if isinstance(each, torch.Tensor):
            if name not in (0, "attn_mask"):
                raise TypeError(name)
            others[name] = type(each)
    return others


def _says_something(mode: object) -> bool:
    """Whether a function mode may do more with a call of attention than to pass it on."""
    return type(mode).__name__ != "DeviceContext"  # which torch.set_default_device enters
