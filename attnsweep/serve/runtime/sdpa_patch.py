"""Whether torch.nn.functional.scaled_dot_product_attention is PyTorch's own or a package's."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch

from .table import PackageError

NAME = "scaled_dot_product_attention"
_PLACE = "torch.nn.functional"
sdpa = torch._C._nn.scaled_dot_product_attention
"""PyTorch's own attention, also while a package stands in its place."""
_KNOWN = hasattr(torch.compiler, "_is_exporting_flag")
exports: Any = torch.compiler if _KNOWN else SimpleNamespace(_is_exporting_flag=False)
"""Its _is_exporting_flag says whether a program is exported: that holds PyTorch's operator, so that
it needs no package. The compiler of PyTorch 2.11 takes is_exporting() as true wherever it reads it,
and each name on the way to an answer is one thing more that is asked before each call."""


def is_traced(tensor: Any) -> bool:
    """Whether this only stands for a tensor while a compiler traces an operator.

    Earlier PyTorch says is_compiling in what the compiler reads itself, and not there.
    """
    return type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")


class PatchedAttention:
    """Replaces PyTorch's function; a program takes it for that function.

    It is no function of Python's, which a class would make a method. It equals PyTorch's own, so
    that tables which programs make for `__torch_function__` have both; and whoever unpickles it
    gets what stands in the place there.
    """

    __slots__ = ()
    __name__ = NAME  # which functools.wraps and torch.overrides read

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) or other is sdpa

    def __hash__(self) -> int:
        return hash(sdpa)

    def __reduce__(self) -> Any:
        return resolve_name, (f"{_PLACE}:{NAME}",)

    def __copy__(self) -> PatchedAttention:
        return self

    def __deepcopy__(self, _: object) -> PatchedAttention:
        return self


class Switched:
    """Returned by `enable` and `disable`: the end of a `with` statement undoes the call."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def __enter__(self) -> None:
        """Nothing: the call itself has switched."""

    def __exit__(self, *error: object) -> None:
        """Undo the call, once, unless a later one has already."""
        undo, self._undo = self._undo, lambda: None
        undo()


class Routing:
    """Puts `routed` in the place of PyTorch's attention, for the whole process, and takes it out.

    routed: what it is replaced with; asks `on`, since a module may have kept it. Each `enable` that
    is not undone keeps it in place; `disable` takes it out however many there are. short_work:
    below it `routed` hands over a call that records gradients; 0 while it is not in place.
    """

    def __init__(self, routed: Callable[..., Any], short_work: float = 0.0) -> None:
        self.on = False
        self.short_work, self._short_work = 0.0, short_work
        self._routed = routed
        self._lock = threading.Lock()
        self._enabled = 0
        self._since = object()  # of the last `disable`

    def enable(self) -> Switched:
        """Put the package in the place of PyTorch's function.

        Raises PackageError if something else already stands there.
        """
        with self._lock:
            self._put()
            self._enabled += 1
            since = self._since
        return Switched(lambda: self._undo_enable(since))

    def disable(self) -> Switched:
        """Undo every `enable` of the package."""
        with self._lock:
            before = self._enabled, self._since
            self._since = since = object()
            self._take_out()
        return Switched(lambda: self._undo_disable(since, *before))

    def _undo_enable(self, since: object) -> None:
        with self._lock:
            if self._since is since and self._enabled:
                self._enabled -= 1
                if not self._enabled:
                    self._take_out()

    def _undo_disable(self, since: object, enabled: int, before: object) -> None:
        with self._lock:
            if self._since is since and enabled:
                self._put()
                self._enabled, self._since = self._enabled + enabled, before

    def _put(self) -> None:
        found = getattr(sys.modules[_PLACE], NAME)
        if hasattr(found, "gives_way"):  # as what counts calls for `attnsweep shapes` does
            found.gives_way()
            found = getattr(sys.modules[_PLACE], NAME)
        if found is not self._routed:
            # A package that was imported anew takes the place of what it was before.
            if found is not sdpa and _named(found) != _named(self._routed):
                raise PackageError(
                    f"{_PLACE}.{NAME} is already replaced, by {_named(found)}; disable that first, "
                    "or export the runs of both as one package"
                )
            # A list that PyTorch makes once: it would miss its own function from now on, and
            # compiled code then asks no class about it, also after `disable`.
            torch.overrides.get_overridable_functions()
            # In TorchScript, which cannot look into it, it is PyTorch's own by another name.
            torch.jit._builtins._register_builtin(self._routed, f"aten::{NAME}")
            for module in (*_holders(sdpa), *_holders(found)):
                setattr(module, NAME, self._routed)
        self.on, self.short_work = True, self._short_work

    def _take_out(self) -> None:
        self.on, self.short_work, self._enabled = False, 0.0, 0
        for module in _holders(self._routed):
            setattr(module, NAME, sdpa)


_F = TypeVar("_F", bound=Callable[..., Any])


def asked_once(function: _F) -> _F:
    """torch.compiler.assume_constant_result, without the 1.2 s that importing a compiler takes."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@asked_once
def flash_allowed() -> bool:
    """Whether torch.nn.attention.sdpa_kernel leaves flash attention; a compiler asks once."""
    return bool(torch._C._get_flash_sdp_enabled())


def _named(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '?')}.{name}"


def _holders(function: Callable[..., Any]) -> Iterator[ModuleType]:
    """Modules that have the function under its own name: imported so, or torch.nn.functional."""
    for path, module in list(sys.modules.items()):
        if path.startswith("torch.") and path != _PLACE:
            continue
        if isinstance(module, ModuleType) and vars(module).get(NAME) is function:
            yield module
