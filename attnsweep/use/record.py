"""Records the attention calls of this process: one line per kind of call, and how often it ran.

This file also runs inside programs whose Python has no attnsweep: `attnsweep shapes` puts a copy
of it, named sitecustomize.py, on the program's PYTHONPATH. It imports the standard library and
PyTorch only.

PyTorch's dispatcher calls one of `OPS` for each attention call, from eager code and from compiled
code alike. A kernel of ours stands before PyTorch's own: it counts, and calls it. Nothing else of
the program goes through Python, and what torch.compile traces is unchanged.

Between two attention calls the rest of a model empties the host's caches, and whatever a call
touches then costs several times what it does in a loop. So a call like the one before, or like the
one that came next the last time, is known by one question to PyTorch; the others are described.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import mmap
import os
import secrets
import sys
import threading
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SLOTS = 1 << 16
"""Most kinds of calls of one process; later kinds are counted together, in the last slot."""
KINDS, COUNTS, ERRORS, TORCH = ".jsonl", ".counts", ".error", "torch"
"""Endings of a process's files, and the file that says that some process imported PyTorch."""
_LARGEST_MASK = 1 << 26  # elements; a larger one is not looked at


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
# Kinds that are known by one question. More are met only by calls whose sizes keep changing.
_MOST_KNOWN = 1024


class Kind:
    """A call as it was made. slot: the place of its count."""

    __slots__ = ("after", "alike", "met", "options", "slot")

    def __init__(self, slot: int) -> None:
        self.slot, self.met = slot, 1
        self.options: tuple[Any, ...] = ()
        """What is not said by q, k and v of a call that `alike` is asked of; empty: do not ask."""
        self.alike: Callable[..., bool] = bool
        self.after: Kind = self
        """The other kind that came next when one last did."""


class Log:
    """The kinds of calls of one process and their counts, in files of a folder.

    A kind is a line of JSON, written when it is first seen. The counts are in a shared mapping, so
    that they outlive the process however it ends. A forked child begins files of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self.lock = threading.Lock()
        self._stem: Path | None = None
        self._slots: dict[str, int] = {}
        self.known: dict[Any, Kind] = {}
        """Each call as it was made: a cache of `slot`."""
        self.last = Kind(-1)
        """The kind of the call before."""
        self.failed = False

    def slot(self, kind: dict[str, Any]) -> int:
        """The place of a kind's count; a new kind is written down."""
        line = json.dumps(kind, sort_keys=True)
        with self.lock:
            if line not in self._slots:
                if self._stem is None:
                    self._open()
                if len(self._slots) == SLOTS - 1:
                    return SLOTS - 1
                self._lines.write(line + "\n")
                self._lines.flush()
                self._slots[line] = len(self._slots)
            return self._slots[line]

    def add(self, slot: int, calls: int = 1) -> None:
        """Count calls of the kind in this slot."""
        with self.lock:
            self.counts[slot] += calls

    def fail(self) -> None:
        """Write down the error that is being handled, and record no more."""
        self.failed = True
        name = f"{os.getpid()}-{secrets.token_hex(4)}{ERRORS}"
        with contextlib.suppress(OSError):  # the program goes on, whatever becomes of this
            (self._folder / name).write_text(traceback.format_exc(limit=-3), encoding="utf-8")

    def _open(self) -> None:
        self._stem = self._folder / f"{os.getpid()}-{secrets.token_hex(4)}"
        with open(f"{self._stem}{COUNTS}", "w+b") as file:
            file.truncate(8 * SLOTS)
            self.counts = memoryview(mmap.mmap(file.fileno(), 8 * SLOTS)).cast("Q")
        self._lines = open(f"{self._stem}{KINDS}", "w", encoding="utf-8")  # noqa: SIM115


class Recording:
    """Counts the attention calls of this process until `stop`. Needs torch.library.get_kernel."""

    def __init__(self, folder: Path) -> None:
        import torch

        if not hasattr(torch.library, "get_kernel"):
            raise RuntimeError(f"needs a newer PyTorch than {torch.__version__}: get_kernel")
        (folder / TORCH).touch()
        self.log = Log(folder)
        self.graphs = Graphs(self.log, torch.cuda.CUDAGraph)
        # What torch.compile asks of a compiled function's arguments: class, dispatch keys, dtype,
        # device, gradient, sizes and strides. Without it every call is described.
        dynamo = getattr(torch._C, "_dynamo", None)
        self._guards = getattr(getattr(dynamo, "guards", None), "TensorGuards", None)
        self._asked: list[Kind] = []
        self._library = torch.library.Library("aten", "IMPL")
        for name, op in OPS.items():
            for key in op.keys:
                self._count(torch, name, op, key)

    def _count(self, torch: Any, name: str, op: _Op, key: str) -> None:
        """Put a kernel that counts before PyTorch's own."""
        # The kernel of an alias key is the one that each of its keys runs.
        backend = "CPU" if key == _ALIAS else key
        try:
            own = torch.library.get_kernel(f"aten::{name}", backend)
        except RuntimeError:
            return  # this build of PyTorch has none
        log, graphs, call, describe = self.log, self.graphs, own.call_boxed, self._describe
        plain, mask_at, rest = torch.Tensor, op.mask, 3 if op.mask is None else op.mask + 1

        def count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                q, k, v, last = args[0], args[1], args[2], log.last
                if type(q) is not plain and _traced(q):  # whose numbers may not be compared
                    log.add(log.slot(traced_kind(name, q, k, v)))
                    return
                if mask_at is None:
                    mask = kwargs.get("attn_mask")
                else:
                    mask = args[mask_at] if len(args) > mask_at else None
                # Without gradients PyTorch tells no tensor that has one from others.
                grad, scale = q.requires_grad, kwargs.get("scale")
                options = (name, mask is None, grad, scale, args[rest:])
                kind = last
                if kind.options != options or not kind.alike(q, k, v):
                    kind = last.after
                    if kind.options != options or not kind.alike(q, k, v):
                        kind = describe(torch, op, args, kwargs, mask, options)
                    if kind is not last:
                        last.after, log.last = kind, kind
                if graphs.capturing is None:
                    with log.lock:
                        log.counts[kind.slot] += 1
                else:
                    graphs.add(kind.slot, q.device.type == "cuda")
            except Exception:
                log.fail()

        def counted_with(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if not log.failed:
                count(args, kwargs)
            return call(keys, *args, **kwargs)

        # A set of keys costs more to make than all else here, and no kernel of PyTorch's reads it.
        only = _set_of(torch, name, key, backend)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if not log.failed:
                count(args, kwargs)
            return call(only, *args, **kwargs)

        with warnings.catch_warnings():  # PyTorch warns that its own kernel is overridden
            warnings.simplefilter("ignore")
            if only is None:
                self._library.impl(name, counted_with, key, with_keyset=True, allow_override=True)
            else:
                self._library.impl(name, counted, key, allow_override=True)

    def _describe(
        self, torch: Any, op: _Op, args: Any, kwargs: Any, mask: Any, options: tuple[Any, ...]
    ) -> Kind:
        """The kind of a call that no question told."""
        q, k, v, n, name = args[0], args[1], args[2], len(args), options[0]
        dropout = n > op.dropout and args[op.dropout] > 0
        causal = n > op.causal and args[op.causal]
        seen = (
            *(name, q.shape, k.shape, v.shape, q.stride(), k.stride(), q.dtype),
            *(q.device.type, mask is not None, dropout, causal),
            *(q.requires_grad, kwargs.get("scale")),
        )
        kind = self.log.known.get(seen)
        if kind is None:
            quiet = self.graphs.capturing is not None  # a graph's capture may not wait for values
            slot = self.log.slot(kind_of(torch, seen, (q, k, v), mask, kwargs, quiet))
            kind = self.log.known[seen] = Kind(slot)
        else:
            kind.met += 1
            # Calls that are told apart by more than their kind, and take turns, are asked seldom.
            if not kind.met & (kind.met - 1):
                self._ask(torch, kind, (q, k, v), options)
        return kind

    def _ask(self, torch: Any, kind: Kind, qkv: tuple[Any, ...], options: tuple[Any, ...]) -> None:
        """Have later calls like this one known by one question, if PyTorch can answer it."""
        if self._guards is None or any(isinstance(each, torch.Tensor) for each in options[-1]):
            return
        sizes, strides = [list(t.shape) for t in qkv], [list(t.stride()) for t in qkv]
        try:
            guards = self._guards(*qkv, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        except (TypeError, RuntimeError):  # of a tensor that is given twice, for one
            return
        if len(self._asked) >= _MOST_KNOWN:
            for each in self._asked:
                each.options = ()
            self._asked.clear()
        kind.alike = guards.check  # first: other threads may be asking
        kind.options = options
        self._asked.append(kind)

    def stop(self) -> None:
        """Give PyTorch its own kernels back."""
        self._library._destroy()
        self.graphs.stop()


class Graphs:
    """Calls in CUDA graphs: those of a capture do not run, and each replay runs them all."""

    def __init__(self, log: Log, graph_class: Any) -> None:
        self._log, self._class = log, graph_class
        self._of: weakref.WeakKeyDictionary[Any, Counter[int]] = weakref.WeakKeyDictionary()
        self.capturing: Counter[int] | None = None
        """Slots of the capture that is under way."""
        names = ("capture_begin", "capture_end", "replay")
        self._own = {name: getattr(graph_class, name) for name in names}
        self._inherited = [name for name in names if name not in vars(graph_class)]
        graphs, own = self, self._own

        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            done = own["capture_begin"](graph, *args, **kwargs)
            graphs.capturing = graphs._of[graph] = Counter()
            return done

        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            graphs.capturing = None
            return own["capture_end"](graph, *args, **kwargs)

        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            for slot, calls in graphs._of.get(graph, {}).items():
                log.add(slot, calls)
            return own["replay"](graph, *args, **kwargs)

        for function in (capture_begin, capture_end, replay):
            setattr(graph_class, function.__name__, function)

    def add(self, slot: int, on_gpu: bool) -> None:
        """Count a call: now, or with each replay if it is being captured."""
        captured = self.capturing
        if captured is not None and on_gpu and _stream_captures():
            captured[slot] += 1
        else:
            self._log.add(slot)

    def stop(self) -> None:
        """Give the class its own methods back."""
        for name, own in self._own.items():
            if name in self._inherited:
                delattr(self._class, name)
            else:
                setattr(self._class, name, own)


def _set_of(torch: Any, name: str, key: str, backend: str) -> Any:
    """A set of dispatch keys for PyTorch's own kernel; None if a kernel of Python was there."""
    try:
        if torch.library._impls.isdisjoint((f"aten/{name}/{key}", f"aten/{name}/{backend}")):
            return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, backend))
    except (AttributeError, TypeError):  # another PyTorch: make the set for each call
        pass
    return None


def _stream_captures() -> bool:
    import torch

    return bool(torch.cuda.is_current_stream_capturing())


# -- what a call is -------------------------------------------------------------------------


def kind_of(
    torch: Any, seen: tuple[Any, ...], qkv: Any, mask: Any, kwargs: Any, quiet: bool
) -> dict[str, Any]:
    """The facts of a call, as plain data. quiet: do not read values of tensors.

    Shapes are (batch, heads, seqlen, head_dim). A head_dim that PyTorch padded to a multiple of 8
    is taken back from the scale.
    """
    q, k, v = qkv
    name, device, dropout, causal, grad, scale = seen[0], seen[7], *seen[9:]
    quiet = quiet or device == "meta"  # which holds no values
    kind: dict[str, Any] = {
        "op": name,
        "q": [int(size) for size in q.shape],
        "k": [int(size) for size in k.shape],
        "v": [int(size) for size in v.shape],
        "dtype": str(q.dtype).removeprefix("torch."),
        "device": device,
        "causal": bool(causal),
        "dropout": bool(dropout),
        "grad": bool(grad),
    }
    head_dim = kind["q"][-1]
    if scale is not None and scale > 0:
        own = round(scale**-2)
        if abs(own * scale**2 - 1) > 1e-6:
            kind["scale"] = True
        elif name.endswith("flash_attention") and head_dim - 8 < own < head_dim:
            kind["padded_from"] = own
        elif own != head_dim:
            kind["scale"] = True
    if q.dim() == 4:
        kind["layout"] = [layout_of(q.shape, q.stride()), layout_of(k.shape, k.stride())]
    if mask is not None:
        kind["mask"] = "unknown" if quiet else _mask_kind(torch, mask, q.shape[-2], k.shape[-2])
    if q.dim() == 4 and not quiet:
        repeats = _repeats(torch, k)
        if repeats > 1:
            kind["repeats"] = repeats
    return kind


def _traced(q: Any) -> bool:
    """Whether a compiler traces the call, with tensors that hold no values: it does not run."""
    return type(q).__name__ in ("FakeTensor", "FunctionalTensor")


def traced_kind(name: str, q: Any, k: Any, v: Any) -> dict[str, Any]:
    """The facts of a call that a compiler takes apart. A size that varies is None."""
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape}
    sizes = {
        of: [size if isinstance(size, int) else None for size in shape]
        for of, shape in shapes.items()
    }
    kind = {"op": name, **sizes, "dtype": str(q.dtype).removeprefix("torch.")}
    return kind | {"device": q.device.type, "traced": True}


def layout_of(shape: Any, stride: Any) -> str:
    """How a (batch, heads, seqlen, head_dim) tensor lies in memory.

    bhsd or bshd if it is whole in that order; `packed` if it is a part of rows of (seqlen, …), as
    a slice of one q, k, v tensor is; otherwise `strided`.
    """
    _, heads, seqlen, head_dim = shape

    def lies(order: tuple[int, ...], row: int | None = None) -> bool:
        step = 1
        for axis in reversed(order):
            if shape[axis] != 1 and stride[axis] != step:
                return False
            step *= shape[axis]
            if row is not None and axis == 1:
                step = row
        return True

    if lies((0, 1, 2, 3)):
        return "bhsd"
    if lies((0, 2, 1, 3)):
        return "bshd"
    if seqlen > 1 and stride[2] > heads * head_dim and lies((0, 2, 1, 3), stride[2]):
        return "packed"
    return "strided"


def _mask_kind(torch: Any, mask: Any, rows: int, keys: int) -> str:
    """`full` if it masks nothing, `causal` if it is the causal mask, aligned bottom-right."""
    if mask.numel() > _LARGEST_MASK:
        return "unknown"
    with torch.no_grad():
        sees = mask if mask.dtype == torch.bool else mask == 0
        if mask.dtype != torch.bool and not bool((sees | (mask <= -1e4)).all()):
            return "bias"
        if bool(sees.all()):
            return "full"
        lower = torch.ones(rows, keys, dtype=torch.bool, device=mask.device).tril(keys - rows)
        return "causal" if bool((sees == lower).all()) else "mask"


def _repeats(torch: Any, k: Any) -> int:
    """How often each key head stands in k; 1 if they all differ. A few rows are compared."""
    heads, seqlen = k.shape[1], k.shape[2]
    if heads < 2 or not k.numel():
        return 1
    with torch.no_grad():
        few = k.detach()[:, :, :: max(1, seqlen // 4)]
        if bool((few == few.reshape(-1)[0]).all()):
            return 1  # all the same, as before any training
        for times in range(heads, 1, -1):
            if heads % times == 0:
                groups = few.unflatten(1, (heads // times, times))
                if bool((groups == groups[:, :, :1]).all()):
                    return times
    return 1


# -- as sitecustomize -----------------------------------------------------------------------


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls a function once PyTorch has been imported."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._act()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _begin(folder: Path) -> None:
    """Record this process once it imports PyTorch, and run the sitecustomize of its own."""

    def start() -> None:
        try:
            Recording(folder)
        except Exception as error:
            name = f"{os.getpid()}-{secrets.token_hex(4)}{ERRORS}"
            (folder / name).write_text(f"{type(error).__name__}: {error}\n", encoding="utf-8")

    sys.meta_path.insert(0, _WhenImported(start))
    sys.path[:] = [place for place in sys.path if place != str(folder)]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    _begin(Path(__file__).parent)
