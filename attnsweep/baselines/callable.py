"""Python callables, `module:function` or `file.py:function`, and our own attention in bf16."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attnsweep.baselines.backend import Builder, Unavailable, Way
from attnsweep.core.callables import Asked
from attnsweep.core.errors import in_short
from attnsweep.core.problem import Problem

if TYPE_CHECKING:
    from attnsweep.device.cuda import CudaSession


@contextmanager
def _from_here() -> Iterator[None]:
    """Modules of the working directory are found too, as `python -m` finds them."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def source_digest(name: str) -> str | None:
    """SHA-256 of the file that defines a callable; None if it is not found.

    Rows of a changed file are measured again. What that file imports is not in the digest.
    """
    source = source_of(name)
    return None if source is None else hashlib.sha256(source).hexdigest()


def source_of(name: str) -> bytes | None:
    """The file that defines a callable; None if it is not found.

    Nothing is imported, not even a package that it is in: this process may be none of its own.
    """
    importlib.invalidate_caches()
    file, _, _ = Asked.of(name).call.rpartition(":")
    with suppress(ImportError, AttributeError, LookupError, ValueError, OSError), _from_here():
        if not file.endswith(".py"):
            parts, places = file.split("."), None
            for end, part in enumerate(parts, 1):
                of_package = (".".join(parts[:end]), places)
                every = (finder.find_spec(*of_package) for finder in sys.meta_path)
                spec, without_init = None, False
                with suppress(KeyError):  # without __init__, in a package that is not imported
                    without_init = True
                    spec = next(filter(None, every), None)
                    without_init = spec is not None and spec.origin is None
                file, inside = getattr(spec, "origin", None) or "", None
                if without_init:
                    inside = [os.path.join(at, part) for at in places or sys.path]
                elif spec is not None:
                    inside = spec.submodule_search_locations
                places = inside or ()
        return Path(file).read_bytes()
    return None


DOES_NOT = "does not support it"
"""In the reason if a callable says so of a problem."""
CANNOT_IMPORT = "cannot import"
"""How the reason begins if a callable is not there: that is no verdict about it."""


def ways_of(name: str) -> Builder:
    """Call `module:function` as f(q, k, v, problem=problem), or f(q, k, v) if it takes no problem.

    q, k, v: CUDA tensors (batch, heads, seqlen, head_dim) of the problem's dtype, contiguous; k and
    v with its heads_kv, and v with head_dim_v if the problem has one; or views of these as
    (batch, seqlen, heads, head_dim), if asked for. It returns o as such a tensor, with v's columns,
    or (o, lse), or writes to the tensors that its parameters `out` and `lse` get. lse: natural
    log-sum-exps of (batch, heads, seqlen) in float32. In FP8, q_scale, k_scale and v_scale are
    keywords. For a backward problem it is called with q, k, v, o, lse, do and returns (dq, dk, dv).

    Beside the function, its module, or the function itself, may have `supports(problem)`, which
    returns True or a reason, and `prepare(problem)`, which may compile and tune. Neither is timed.
    """
    asked = Asked.of(name)

    def build(torch: Any, problem: Problem, session: CudaSession) -> list[Way]:
        module, function = _imported(asked.call)
        with _watched(f"{name}: supports or prepare"):
            supports = _beside(module, function, "supports")
            answer = supports(problem) if supports else True
            if answer is True and (prepare := _beside(module, function, "prepare")):
                prepare(problem)
        if answer is not True:
            raise Unavailable(f"{name} {DOES_NOT}: {str(answer)[:300]}")
        return [Way(_Call(torch, problem, name, function))]

    return build


def says_what_it_supports(name: str) -> bool:
    """Whether a callable has `supports`. Raises Unavailable."""
    return _beside(*_imported(Asked.of(name).call), "supports") is not None


def _beside(module: Any, function: Any, name: str) -> Any:
    return getattr(function, name, None) or getattr(module, name, None)


class _Call:
    """Calls a callable on a problem's inputs, and returns its outputs as (batch, heads, …)."""

    def __init__(
        self, torch: Any, problem: Problem, name: str, function: Callable[..., Any]
    ) -> None:
        self._torch, self._problem, self._name, self._function = torch, problem, name, function
        self._turned = Asked.of(name).layout == "bshd"
        self._options = {"problem": problem} if _takes(function, "problem") else {}
        forward = problem.op.name == "forward"
        self._into = [
            one for one in ("out", "lse") if forward and _takes(function, one, named=True)
        ]

    def __call__(self, *inputs: Any) -> Any:
        given = dict(zip(self._problem.values, inputs, strict=True))
        scales = {one: given.pop(one) for one in self._problem.scales}
        own = [self._turn(one) for one in given.values()]
        into = {one: self._empty(one, inputs[0].device) for one in self._into}
        with _watched(self._name):
            made = self._function(*own, **self._options, **scales, **into)
        if into:
            made = self._written(made, into)
        return tuple(map(self._turn, made)) if type(made) is tuple else self._turn(made)

    def _turn(self, tensor: Any) -> Any:
        """(batch, heads, …) as (batch, seqlen, heads, …), or back, if that is asked for."""
        if self._turned and type(tensor) is self._torch.Tensor and tensor.dim() == 4:
            return tensor.transpose(1, 2)
        return tensor

    def _empty(self, name: str, device: Any) -> Any:
        """Memory for an output."""
        torch, problem = self._torch, self._problem
        if name == "lse":
            return torch.empty(problem.shape_of(name), dtype=torch.float32, device=device)
        types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        batch, heads, rows, columns = problem.shape_of(*problem.outputs)
        sizes = (batch, rows, heads, columns) if self._turned else (batch, heads, rows, columns)
        return torch.empty(sizes, dtype=types[problem.out_dtype], device=device)

    def _written(self, made: Any, into: Mapping[str, Any]) -> Any:
        """The outputs of a call that got tensors to write to, some of which it may return too."""
        of_call = dict(zip(("out", "lse"), made if type(made) is tuple else (made,), strict=False))
        for name, given in into.items():
            if of_call.setdefault(name, given) is None:
                of_call[name] = given
            if of_call[name] is not given:
                raise Unavailable(f"{self._name} has a parameter {name}, and returned another one")
        return tuple(of_call.values()) if "lse" in of_call else of_call["out"]


@contextmanager
def _watched(what: str) -> Iterator[None]:
    """Make what a callable raises a reason; a process that it forks ends here."""
    own = os.getpid()
    try:
        yield
    except Unavailable:
        raise
    except BaseException as error:  # KeyboardInterrupt too: Ctrl-C is another process's
        raise Unavailable(f"{what} raised {in_short(error)}") from error
    finally:
        if os.getpid() != own:
            os._exit(0)


def _imported(name: str) -> tuple[Any, Callable[..., Any]]:
    """The module and the function. Raises Unavailable."""
    path, _, attribute = name.rpartition(":")
    try:
        with _from_here():
            module = _of_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
        function: Callable[..., Any] = getattr(module, attribute)
    except BaseException as error:  # a module may raise anything while it is imported
        why = f"{CANNOT_IMPORT} {name}: {type(error).__name__}: {error}"
        raise Unavailable(why) from error
    what = type(function).__name__
    if not callable(function):
        raise Unavailable(f"{CANNOT_IMPORT} {name}: it is no callable but {what}")
    return module, function


def _of_file(path: Path) -> ModuleType:
    """The module of a file, which finds other files of its directory."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # it may import them when it is called, too
    sys.modules[path.stem] = module  # where decorators of kernels look for their source
    spec.loader.exec_module(module)
    return module


_FLAGS = (
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cudnn.allow_tf32",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
)


def flags_of(torch: Any) -> dict[str, Any]:
    """Settings of PyTorch that would change what others compute, by their names."""
    found = {name: operator.attrgetter(name)(torch) for name in _FLAGS}
    return found | {
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "grad mode": torch.is_grad_enabled(),
    }


def restore_flags(torch: Any, before: Mapping[str, Any]) -> list[str]:
    """Set PyTorch as it was before; returns the names of what had changed."""
    changed = [name for name, value in flags_of(torch).items() if value != before[name]]
    if not changed:
        return []
    for name in set(changed) & set(_FLAGS):
        owner, _, flag = name.rpartition(".")
        setattr(operator.attrgetter(owner)(torch), flag, before[name])
    torch.set_default_dtype(before["default dtype"])
    torch.use_deterministic_algorithms(before["deterministic algorithms"])
    torch.set_grad_enabled(before["grad mode"])
    return changed


def breach(torch: Any, made: Any, shape: Sequence[int], like: Any, inputs: Sequence[Any]) -> str:
    """What is wrong with an output of a callable beside its values; empty if nothing is.

    shape: the output's. like: a tensor of its dtype and device. inputs: those of the call.
    """
    if type(made) is not torch.Tensor:
        return f"returned {type(made).__name__} in place of a torch.Tensor"
    if tuple(made.shape) != tuple(shape):
        return f"returned the shape {tuple(made.shape)}, not {tuple(shape)}"
    if (made.dtype, made.device) != (like.dtype, like.device):
        of_like = f"{like.dtype} on {like.device}"
        return f"returned {made.dtype} on {made.device}, not {of_like}"
    if made.layout != torch.strided:
        return f"returned a tensor of layout {made.layout}"
    if memory_of(made) in {memory_of(given) for given in inputs}:
        return "returned memory of an input"
    return ""


def memory_of(tensor: Any) -> object:
    """Where a tensor's memory begins; of anything else, itself."""
    with suppress(Exception):  # a layout without storage, or no tensor
        return int(tensor.untyped_storage().data_ptr())
    return id(tensor)


def _takes(function: Callable[..., Any], name: str, *, named: bool = False) -> bool:
    """Whether a function has a parameter, or, unless it must be `named`, takes any keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function of C has no signature
        return False
    return any(p.name == name or (p.kind is p.VAR_KEYWORD and not named) for p in parameters)
