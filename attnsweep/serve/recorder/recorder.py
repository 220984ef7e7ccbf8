"""Counts the attention calls of this process, and says what each kind of call is."""

from __future__ import annotations

import sys
import warnings
from contextlib import ExitStack, suppress
from pkgutil import resolve_name
from typing import Any

import torch

from .log import COMPILED, EVERY_CALL, TORCH, Log

NAME, PLACE = "scaled_dot_product_attention", "torch.nn.functional"
# Operators of attention: the place of dropout_p, which is_causal follows, and the dispatch key of
# the kernel that is counted. The mask is the fourth argument, or named.
OPS = {
    "_scaled_dot_product_flash_attention": (3, "CUDA"),
    "_scaled_dot_product_efficient_attention": (5, "CUDA"),
    "_scaled_dot_product_cudnn_attention": (5, "CUDA"),
    "_scaled_dot_product_flash_attention_for_cpu": (3, "CPU"),
    # Made of plain operations, for every device; a compiler takes it apart while it traces.
    "_scaled_dot_product_attention_math": (4, "CompositeImplicitAutograd"),
}
_LARGEST_MASK = 1 << 26  # elements; a larger one is not looked at
# Looked up once, without PyTorch's Python around them: each is asked in every call.
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
_is_compiling, _is_tracing = torch.compiler.is_compiling, torch._C._is_tracing
_is_grad_enabled, _has_torch_function = torch.is_grad_enabled, torch.overrides.has_torch_function
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Recording:
    """Counts the attention calls of this process until `stop`.

    An object in the place of PyTorch's function counts what Python calls by its name. With
    `every_call`, kernels in PyTorch's dispatcher count, which see calls from compiled code and C++
    too, cost more, and need torch.library.get_kernel.
    """

    def __init__(self, log: Log, every_call: bool = False) -> None:
        self.log = log
        self._undo = ExitStack()
        self.stop = self._undo.close
        log.note(TORCH)
        if every_call:
            self.count_every_call()
            return
        own = getattr(sys.modules[PLACE], NAME)
        ours = RecordingAttention(self, own)
        # To TorchScript, which knows functions by their ids, it is PyTorch's own.
        torch.jit._builtins._register_builtin(ours, f"aten::{NAME}")
        _replace(own, ours)
        self._undo.callback(_replace, ours, own)
        self._undo.callback(setattr, ours, "recording", None)  # wherever else it is held

    def count_every_call(self) -> None:
        """Leave all calls to kernels of ours in PyTorch's dispatcher, from now on."""
        if not hasattr(torch.library, "get_kernel"):
            raise RuntimeError(f"needs a newer PyTorch than {torch.__version__}: get_kernel")
        self.stop()
        self.log.note(EVERY_CALL)
        library = torch.library.Library("aten", "IMPL")
        self._undo.callback(library._destroy)
        with warnings.catch_warnings():  # PyTorch warns that its own kernel is overridden
            warnings.simplefilter("ignore")
            for name, (dropout, key) in OPS.items():
                with suppress(RuntimeError):  # this build of PyTorch has none
                    # The kernel of an alias key is the one that each of its keys runs.
                    own = torch.library.get_kernel(f"aten::{name}", key if key == "CUDA" else "CPU")
                    kernel = self._counted(name, dropout, own.call_boxed)
                    library.impl(name, kernel, key, with_keyset=True, allow_override=True)

    def _counted(self, name: str, dropout: int, own: Any) -> Any:
        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            out = own(keys, *args, **kwargs)
            mask = kwargs.pop("attn_mask", None) if dropout == 3 else (*args, None)[3]
            given: Any = (name, *args[:3], mask, *args[dropout : dropout + 2])
            self.count(*given, **kwargs)
            return out

        return kernel

    def count(
        self,
        op: str,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> None:
        """Count a call, which has run."""
        log, q, k, v = self.log, query, key, value
        if log.failed:
            return
        try:
            if type(q) not in _PLAIN or q.is_nested:
                log.add(log.slot(_other_kind(q, k, v)))
                return
            cuda, dtype = q.is_cuda, q.dtype
            device = "cuda" if cuda else q.device.type
            cast = op == NAME and _any_autocast() and device in ("cuda", "cpu")
            if cast and torch.is_autocast_enabled(device) and dtype != torch.float64:
                dtype = torch.get_autocast_dtype(device)
            scale = options.get("scale")
            grad = _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
            seen = (
                *(op, q.shape, k.shape, v.shape, (q.stride(), k.stride()), device, dtype),
                None if (m := attn_mask) is None else (m.shape, m.stride(), m.dtype),
                *(bool(is_causal), bool(dropout_p > 0)),
                *(grad, None if scale is None else float(scale)),
                cuda and _is_capturing(),
            )
            slot = log.known.get(seen)
            if slot is None:
                slot = log.known[seen] = log.slot(_kind(seen, k, attn_mask))
            log.add(slot)
        except Exception:
            log.fail()


class RecordingAttention:
    """Replaces PyTorch's function while it records; a program takes it for that function.

    No function of Python's, which a class would make a method. It equals PyTorch's, so that tables
    for `__torch_function__` have both. A copy is what stands in the place.
    """

    def __init__(self, recording: Recording, own: Any) -> None:
        self.recording: Recording | None = recording
        self.own, self.__doc__ = own, own.__doc__
        self.__name__, self.__module__ = NAME, PLACE
        self.gives_way = recording.count_every_call  # to a package that takes this place
        self._note_compiled = lambda: recording.log.note(COMPILED)
        # Dynamo calls it while it traces, and leaves it out of the code.
        self._note_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's attention. Code that is compiled has PyTorch's own function in it."""
        if _is_compiling():
            self._note_compiled()  # type: ignore[no-untyped-call]
            mask: Any = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            if type(mask).__name__ == "CausalBias":  # which knows a call by what stands here
                return mask._dispatch(*args, **kwargs)
        elif self.recording is not None and not _is_tracing():
            given = (*args, *kwargs.values())
            # Nested tensors know a call by PyTorch's own function, others by what stands here.
            if _has_torch_function(given) and not given[0].is_nested:
                return torch.overrides.handle_torch_function(self, given, *args, **kwargs)
            out = self.own(*args, **kwargs)
            self.recording.count(NAME, *args, **kwargs)
            return out
        return self.own(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RecordingAttention)
            or other is torch._C._nn.scaled_dot_product_attention
        )

    def __hash__(self) -> int:
        return hash(torch._C._nn.scaled_dot_product_attention)

    def __reduce__(self) -> Any:
        return resolve_name, (f"{PLACE}:{NAME}",)


def _replace(old: Any, new: Any) -> None:
    """Put a function in the place of another wherever modules have it, by whatever name."""
    for path, module in list(sys.modules.items()):
        if path == PLACE or not path.startswith("torch."):
            for name, each in list(getattr(module, "__dict__", {}).items()):
                if each is old:
                    setattr(module, name, new)


def _other_kind(q: Any, k: Any, v: Any) -> dict[str, Any]:
    """The facts of a call on tensors of a class of their own, whose sizes say not what runs."""
    sizes = {name: [None] * t.dim() for name, t in (("q", q), ("k", k), ("v", v))}
    kind = {**sizes, "dtype": str(q.dtype).removeprefix("torch."), "device": q.device.type}
    # Those of a compiler hold no values, and nothing runs.
    traced = type(q).__name__ in ("FakeTensor", "FunctionalTensor")
    what = "nested" if q.is_nested else "traced" if traced else "class"
    return kind | {what: type(q).__name__}


def _kind(seen: tuple[Any, ...], k: Any, mask: Any) -> dict[str, Any]:
    """The facts of a call, as plain data. Shapes are (batch, heads, seqlen, head_dim)."""
    op, q, _, v, strides, device, dtype, _, causal, dropout, grad, scale, captured = seen
    kind = {"op": op, "q": q, "k": k.shape, "v": v, "strides": strides, "device": device}
    kind |= {"dtype": str(dtype).removeprefix("torch."), "causal": causal}
    kind |= {"dropout": dropout, "grad": grad, "scale": scale, "captured": captured}
    # A capture of a graph and a transform may not wait for values; some devices have none.
    quiet = captured or device == "meta" or torch._C._functorch.peek_interpreter_stack() is not None
    if mask is not None:
        kind["mask"] = "unknown" if quiet else _mask_kind(mask, q[-2], k.shape[-2])
        if k.dim() == 4 and (mask.dtype == torch.bool or (op != NAME and _was_boolean(kind, mask))):
            kind |= _facts_of(mask, kind["mask"], q[-2], k.shape[-2])
        elif k.dim() == 4 and mask.dtype == dtype:
            kind["bias"] = _own(mask)
    if k.dim() == 4 and not quiet:
        kind["repeats"] = _repeats(k)
    return kind


def _mask_kind(mask: Any, rows: int, keys: int) -> str:
    """`full` if it masks nothing, `causal` if it is the causal mask, aligned bottom-right."""
    if mask.numel() > _LARGEST_MASK:
        return "unknown"
    sees = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((sees | (mask <= -1e4)).all()):
        return "bias"
    if bool(sees.all()):
        return "full"
    lower = torch.ones(rows, keys, dtype=torch.bool, device=mask.device).tril(keys - rows)
    return "causal" if bool((sees == lower).all()) else "mask"


def _was_boolean(kind: dict[str, Any], mask: Any) -> bool:
    """Whether PyTorch may have made a float mask of a boolean one, as its operators get it."""
    looked_at = kind["mask"] not in ("unknown", "bias")
    return looked_at and bool(((mask == 0) | (mask == -torch.inf)).all())


def _own(mask: Any) -> list[str]:
    """Whether each item of the batch, and each head, has a mask of its own."""
    whole = mask[(None,) * (4 - mask.dim())]
    sizes = zip(("item", "head"), whole.shape, whole.stride(), strict=False)
    return [name for name, n, step in sizes if n > 1 and step]


def _facts_of(mask: Any, kind: str, rows: int, keys: int) -> dict[str, Any]:
    """A boolean mask as facts of a problem whose mask hides no more.

    They are whether items and heads have their own, and, if it was looked at, the narrowest window
    that holds all pairs which any of them lets see each other. Padding bounds no window: a side is
    one where more than one query sees as far as it.
    """
    facts: dict[str, Any] = {"boolean": _own(mask)}
    if kind == "unknown":
        return facts
    whole = mask[(None,) * (4 - mask.dim())]
    sees = whole if whole.dtype == torch.bool else whole == 0
    seen = sees.flatten(0, 1).any(0).expand(rows, keys)
    with_keys = seen.any(-1).nonzero().flatten()
    if not len(with_keys):
        return facts
    seen = seen[with_keys].byte()
    first = seen.argmax(-1) - with_keys
    last = keys - 1 - seen.flip(-1).argmax(-1) - with_keys
    low, high = first.min(), last.max()
    facts["top_left"] = int(high) < keys - rows
    diagonal = 0 if facts["top_left"] else keys - rows
    left = max(0, diagonal - int(low)) if int((first == low).sum()) > 1 else None
    right = max(0, int(high) - diagonal) if int((last == high).sum()) > 1 else None
    return facts | {"window": [left, right]}


def _repeats(k: Any) -> int:
    """How often each key head stands in k; 1 if they all differ. A few rows are compared."""
    few, heads = k.detach()[:, :, :: max(1, k.shape[2] // 4)], k.shape[1]
    if not k.numel() or bool((few == few.reshape(-1)[0]).all()):
        return 1  # all the same, as before any training
    for times in (n for n in range(heads, 1, -1) if heads % n == 0):
        groups = few.unflatten(1, (-1, times))
        if bool((groups == groups[:, :, :1]).all()):
            return times
    return 1
