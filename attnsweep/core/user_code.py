"""Python of the user's: how it is found, imported, and called on the inputs of a problem.

It runs in processes that may die of it: that of the GPU, called ones, and those that trace.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from attnsweep.core.callables import Asked
from attnsweep.core.errors import Unavailable, in_short, remedy
from attnsweep.core.problem import Problem

CANNOT_IMPORT = "cannot import"
"""How the reason begins if a callable is not there: that is no verdict about it."""


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
    with suppress(ImportError, LookupError, ValueError, OSError), _from_here():
        if not file.endswith(".py"):
            first, *rest = file.split(".")
            spec = _spec_of(first, None)
            if rest:
                places = getattr(spec, "submodule_search_locations", None) or ()
                spec = _spec_of(file, [os.path.join(at, *rest[:-1]) for at in places])
            file = getattr(spec, "origin", None) or ""
        return Path(file).read_bytes()
    return None


def _spec_of(module: str, places: Sequence[str] | None) -> Any:
    """Where a module is by the first finder that knows; some, of packages long ago, find none."""
    finders = [each for each in sys.meta_path if hasattr(each, "find_spec")]
    return next(filter(None, (each.find_spec(module, places) for each in finders)), None)


def imported(name: str) -> tuple[Any, Callable[..., Any]]:
    """The module and the function. Raises Unavailable."""
    path, _, attribute = name.rpartition(":")
    try:
        with _from_here():
            module = _of_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
        function: Callable[..., Any] | None = getattr(module, attribute, None)
    except BaseException as error:  # a module may raise anything while it is imported
        why = f"{CANNOT_IMPORT} {name}: {type(error).__name__}: {error}{remedy(error)}"
        raise Unavailable(why) from error
    # A kernel of Triton's is called with a grid, by the function that is asked for.
    if not callable(function) or type(function).__module__.startswith("triton."):
        what = f"is no callable but {type(function).__name__}"
        why = f"{attribute} {'is not in it' if function is None else what}"
        raise Unavailable(f"{CANNOT_IMPORT} {name}: {why}{_functions_of(module)}")
    return module, function


def _functions_of(module: ModuleType) -> str:
    """Which functions a module defines: one of them may be meant."""
    known = {name: own for name, own in vars(module).items() if inspect.isfunction(own)}
    own = [name for name, each in known.items() if each.__module__ == module.__name__]
    return f"; its functions are {', '.join(own)}" if own else ""


def _of_file(path: Path) -> ModuleType:
    """The module of a file, which finds other files of its directory."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or not path.is_file():
        where = "" if path.is_absolute() else f" in {os.getcwd()}, where calls are looked for"
        raise FileNotFoundError(f"{path} is not there{where}")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # it may import them when it is called, too
    sys.modules[path.stem] = module  # where decorators of kernels look for their source
    # Bytecode that Python keeps is stale if a file of the same length was edited within a second.
    code = compile(path.read_bytes(), str(spec.origin), "exec", dont_inherit=True)
    exec(code, vars(module))
    return module


def user_modules() -> dict[str, str]:
    """Modules of the user's that are imported, and their files: none of an installed package."""
    paths = sysconfig.get_paths()
    places = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    places.append(str(Path(__file__).parents[1]))
    installed = tuple(place + os.sep for place in places)
    found = {}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or file.startswith(installed):
            continue
        path = Path(file)
        if {"site-packages", "dist-packages"} & {*path.parts}:
            continue  # of another environment, which this one sees
        within = ((path.relative_to(place).as_posix(), place) for place in path.parents)
        if not any(part in _installed_in(place) for part, place in within):
            found[name] = file
    return found


@cache
def _installed_in(folder: Path) -> frozenset[str]:
    """Files of packages that are installed in a folder, as by `pip install --target`.

    TileLang and CuTe DSL import files of theirs from folders deep below that one.
    """
    found = set()
    for record in folder.glob("*.dist-info/RECORD"):
        how: Any = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
        with suppress(OSError, csv.Error), open(record, **how) as file:
            found |= {row[0] for row in csv.reader(file) if row}
    return frozenset(found)


def beside(module: Any, function: Any, name: str) -> Any:
    """The attribute of this name of a function, else of its module, else None."""
    return getattr(function, name, None) or getattr(module, name, None)


def takes(function: Callable[..., Any], name: str, *, named: bool = False) -> bool:
    """Whether a function has a parameter, or, unless it must be `named`, takes any keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function of C has no signature
        return False
    return any(
        (p.name == name and p.kind is not p.POSITIONAL_ONLY)
        or (p.kind is p.VAR_KEYWORD and not named)
        for p in parameters
    )


def split(
    function: Callable[..., Any], config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config's keywords of the function, and what is left for the autotuner that it launches.

    None leaves a keyword out.
    """
    own = {name: value for name, value in config.items() if takes(function, name)}
    left = {name: value for name, value in config.items() if name not in own}
    return {name: value for name, value in own.items() if value is not None}, left


def built(
    name: str, factory: Callable[..., Any], problem: Problem, values: Mapping[str, Any]
) -> Callable[..., Any]:
    """The callable that a factory returns for a problem and a config. Raises Unavailable.

    A value of None leaves its keyword out.
    """
    if without := [one for one in ("problem", *values) if not takes(factory, one)]:
        raise Unavailable(f"{name} is a factory and has no parameter {', '.join(without)}")
    given = {one: value for one, value in values.items() if value is not None}
    with watched(name):
        made = factory(problem=problem, **given)
    if not callable(made):
        what = type(made).__name__
        raise Unavailable(f"{name} is a factory and returned no callable but {what}")
    return made  # type: ignore[no-any-return]


_SCALES = ("scale", "sm_scale", "softmax_scale")


def facts_asked_for(function: Callable[..., Any], problem: Problem) -> dict[str, Any]:
    """Facts of a problem that a function without `problem` has parameters for, by their names."""
    facts: dict[str, Any] = dict.fromkeys(("causal", "is_causal"), problem.causal)
    facts |= dict.fromkeys(_SCALES, problem.scale)
    return {name: fact for name, fact in facts.items() if takes(function, name, named=True)}


@contextmanager
def watched(what: str) -> Iterator[None]:
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


def type_of(torch: Any, dtype: str) -> Any:
    """PyTorch's type of such numbers."""
    types = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    types |= {"bool": "bool", "int32": "int32"}
    return getattr(torch, types.get(dtype, "float8_e4m3fn"))


class BoundFunction:
    """Calls a callable on a problem's inputs, and returns its outputs as (batch, heads, …)."""

    def __init__(
        self,
        torch: Any,
        problem: Problem,
        name: str,
        function: Callable[..., Any],
        *,
        values: Mapping[str, Any] | None = None,
        tensors: tuple[type, ...] | None = None,
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        """values: more keywords of each call. tensors: classes of an output whose layout is turned
        (default: torch.Tensor). memory: for `out` and `lse`, if the function takes these; default:
        made for each call."""
        self._torch, self._problem, self._name, self._function = torch, problem, name, function
        self._turned, self._tensors = Asked.of(name).layout == "bshd", tensors
        self._memory = {} if self._turned else dict(memory or {})
        self._options: dict[str, Any] = dict(values or {})
        if takes(function, "problem"):
            self._options["problem"] = problem
        else:
            self._options |= facts_asked_for(function, problem)
        forward = problem.op.name == "forward"
        self._into = [one for one in ("out", "lse") if forward and takes(function, one, named=True)]

    def __call__(self, *inputs: Any) -> Any:
        """The outputs of a call on a problem's inputs. Raises Unavailable with what it raised."""
        given = dict(zip(self._problem.values, inputs, strict=True))
        scales = {one: given.pop(one) for one in self._problem.scales}
        own = [self._turn(one) for one in given.values()]
        into = {one: self._empty(one, inputs[0].device) for one in self._into}
        with watched(self._name):
            made = self._function(*own, **self._options, **scales, **into)
        if into:
            made = self._written(made, into)
        return tuple(map(self._turn, made)) if type(made) is tuple else self._turn(made)

    def _turn(self, tensor: Any) -> Any:
        """(batch, heads, …) as (batch, seqlen, heads, …), or back, if that is asked for."""
        if self._turned and self._is_tensor(tensor) and tensor.dim() == 4:
            return tensor.transpose(1, 2)
        return tensor

    def _is_tensor(self, made: Any) -> bool:
        return type(made) in (self._tensors or (self._torch.Tensor,))

    def _empty(self, name: str, device: Any) -> Any:
        """Memory for an output."""
        torch, problem = self._torch, self._problem
        if name in self._memory:
            return self._memory[name]
        if name == "lse":
            return torch.empty(problem.shape_of(name), dtype=torch.float32, device=device)
        batch, heads, rows, columns = problem.shape_of(*problem.outputs)
        sizes = (batch, rows, heads, columns) if self._turned else (batch, heads, rows, columns)
        return torch.empty(sizes, dtype=type_of(torch, problem.out_dtype), device=device)

    def _written(self, made: Any, into: Mapping[str, Any]) -> Any:
        """The outputs of a call that got tensors to write to, some of which it may return too."""
        # A kernel of TileLang that allocates no output returns an empty list.
        several = made if isinstance(made, (tuple, list)) else (made,)
        of_call = dict(zip(("out", "lse"), several, strict=False))
        for name, given in into.items():
            if of_call.setdefault(name, given) is None:
                of_call[name] = given
            if of_call[name] is not given:
                raise Unavailable(f"{self._name} has a parameter {name}, and returned another one")
        return tuple(of_call.values()) if "lse" in of_call else of_call["out"]
