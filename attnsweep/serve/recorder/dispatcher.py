"""Kernels of ours before PyTorch's own, in its dispatcher: they count each call, and pass it on.

The dispatcher calls one of `OPS` for each attention call, from eager code, compiled code and C++
alike. Nothing else of the program goes through Python, and what torch.compile traces is unchanged.
In a model such a kernel costs 26 to 65 us a call, where the host is the slower one
(results/h200/recorder_before.json): most of it is PyTorch's way to a kernel in Python and back.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from .graphs import Graphs
from .kinds import kind_of, nested_kind, traced, traced_kind
from .log import Log


class _Op(NamedTuple):
    """Where the arguments are. keys: the dispatch keys of the kernels that are counted."""

    keys: tuple[str, ...]
    mask: int | None
    dropout: int
    causal: int


OPS = {
    "_scaled_dot_product_flash_attention": _Op(("CUDA",), None, 3, 4),
    "_scaled_dot_product_efficient_attention": _Op(("CUDA",), 3, 5, 6),
    "_scaled_dot_product_cudnn_attention": _Op(("CUDA",), 3, 5, 6),
    "_scaled_dot_product_flash_attention_for_cpu": _Op(("CPU",), None, 3, 4),
    # Made of plain operations, for every device; a compiler takes it apart while it traces.
    "_scaled_dot_product_attention_math": _Op(("CompositeImplicitAutograd",), 3, 4, 5),
}
_ALIAS = "CompositeImplicitAutograd"


class Caller(threading.local):
    """What is known of the call that a thread is making."""

    slots: list[int] | None = None
    """Where the slots of this call are wanted; None: nobody watches it."""


class Dispatcher:
    """Counts attention calls while its kernels are in. Needs torch.library.get_kernel.

    is_counted: whether the call of this thread was counted before it came here. on_other: told,
    before it is counted, of a call that neither was counted nor is watched.
    """

    def __init__(
        self,
        log: Log,
        graphs: Graphs,
        is_counted: Callable[[], bool],
        on_other: Callable[[], None],
    ) -> None:
        self._log, self._graphs = log, graphs
        self._is_counted, self._on_other = is_counted, on_other
        self.caller = Caller()
        self._library: Any = None
        self._kernels = [
            kernel for name, op in OPS.items() for key in op.keys if (kernel := self._of(name, key))
        ]

    def put(self) -> None:
        """Put the kernels in."""
        import torch

        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # PyTorch warns that its own kernel is overridden
            warnings.simplefilter("ignore")
            for name, key, function, keys in self._kernels:
                self._library.impl(name, function, key, with_keyset=keys, allow_override=True)

    def take_out(self) -> None:
        """Give PyTorch its own kernels back."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _of(self, name: str, key: str) -> tuple[str, str, Callable[..., Any], bool] | None:
        """An operator, a key, the kernel that counts there, and whether it takes a set of keys."""
        import torch

        # The kernel of an alias key is the one that each of its keys runs.
        backend = "CPU" if key == _ALIAS else key
        try:
            call = torch.library.get_kernel(f"aten::{name}", backend).call_boxed
        except RuntimeError:
            return None  # this build of PyTorch has none
        count = self._count
        # A set of keys costs more to make than all else here, and no kernel of PyTorch's reads it.
        only = _set_of(torch, name, key, backend)

        def counted_with(keys: Any, *args: Any, **kwargs: Any) -> Any:
            count(torch, name, args, kwargs)
            return call(keys, *args, **kwargs)

        def counted(*args: Any, **kwargs: Any) -> Any:
            count(torch, name, args, kwargs)
            return call(only, *args, **kwargs)

        return name, key, counted_with if only is None else counted, only is None

    def _count(self, torch: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        log, caller = self._log, self.caller
        if log.failed:
            return
        try:
            if caller.slots is None:
                if self._is_counted():
                    return
                self._on_other()
            q, k, v = args[:3]
            if traced(q):  # whose numbers may not be compared
                log.add(log.slot(traced_kind(name, q, k, v)))
                return
            if q.is_nested:
                slot = log.slot(nested_kind(name, q, k, v))
            else:
                slot = self._slot(torch, name, args, kwargs)
            self._graphs.add(slot, q.device.type == "cuda")
            if caller.slots is not None:
                caller.slots.append(slot)
        except Exception:
            log.fail()

    def _slot(self, torch: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The slot of a call."""
        op, n = OPS[name], len(args)
        q, k, v = args[:3]
        if op.mask is None:
            mask = kwargs.get("attn_mask")
        else:
            mask = args[op.mask] if n > op.mask else None
        dropout = n > op.dropout and args[op.dropout] > 0
        causal = n > op.causal and args[op.causal]
        seen = (
            *(name, q.shape, k.shape, v.shape, q.stride(), k.stride(), q.dtype),
            *(q.device.type, mask is not None, dropout, causal),
            *(q.requires_grad, kwargs.get("scale")),
        )
        slot = self._log.known.get(seen)
        if slot is None:
            quiet = self._graphs.capturing is not None  # a graph's capture may not wait for values
            slot = self._log.slot(kind_of(torch, seen, (q, k, v), mask, kwargs, quiet))
            self._log.known[seen] = slot
        return slot


def _set_of(torch: Any, name: str, key: str, backend: str) -> Any:
    """A set of dispatch keys for PyTorch's own kernel; None if a kernel of Python was there."""
    try:
        if torch.library._impls.isdisjoint((f"aten/{name}/{key}", f"aten/{name}/{backend}")):
            return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, backend))
    except (AttributeError, TypeError):  # another PyTorch: make the set for each call
        pass
    return None
