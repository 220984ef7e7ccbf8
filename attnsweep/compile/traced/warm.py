"""What a process that traces imports before it forks, and what of PyTorch it is spared.

What makes tensors without memory imports torch._dynamo and SymPy, which take as long as all else of
PyTorch, and hardly uses them. They are executed when more of them is asked for than stands in for
them here: a PyTorch whose tensors ask for more is slower by that, and no worse.
"""

from __future__ import annotations

import importlib
import importlib._bootstrap
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import reduce
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from operator import and_, eq, or_
from types import ModuleType
from typing import Any


def digest() -> None:
    """Have Triton read its own files, half a gigabyte, which keys of its cache have.

    It needs no PyTorch and hardly Python: another thread may import PyTorch meanwhile.
    """
    import triton.compiler.compiler
    import triton.runtime.cache

    for module in (triton.runtime.cache, triton.compiler.compiler):  # since 3.4, and before
        getattr(module, "triton_key", int)()


def import_all() -> None:
    """Import what tensors without memory, and Triton's compiler, import for the first call."""
    from attnsweep.compile.traced import fake

    if os.environ.get("TRITON_INTERPRET") != "1":  # there calls run, those of torch.compile too
        _path[:] = sys.path
        sys.meta_path.insert(0, _Executed)
        for name in _SPARED:
            with suppress(ImportError):  # another PyTorch has no such module
                _leave(name)
    fake.warm_up()
    for name in ("triton.compiler.code_generator", "triton.experimental.gluon.language"):
        with suppress(Exception):  # which a compilation raises again, with all that it says
            importlib.import_module(name)


class _Later(ModuleType):
    """A module that is executed when it is first asked for what it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        if name == "__path__" and _inside(self) is None:
            raise AttributeError(name)
        _execute(self)
        if isinstance(self, _Later):  # this thread executes it
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} yet")
        return getattr(self, name)


class _Executing(_Later):
    """A module that is being executed: other threads wait for what it does not have yet."""


class _Class:
    """Stands for a class of a module, of which no value is before that is executed."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self._module, self._name = module, name

    def _own(self) -> Any:
        _execute(self._module)
        return getattr(self._module, self._name)

    def _is(self, asked: Callable[[Any, Any], bool], value: Any) -> bool:
        return not isinstance(self._module, _Later) and asked(value, self._own())

    def __instancecheck__(self, value: Any) -> bool:
        return self._is(isinstance, value)

    def __subclasscheck__(self, other: Any) -> bool:
        return self._is(issubclass, other)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._own(),)

    def __call__(self, *args: Any, **how: Any) -> Any:
        return self._own()(*args, **how)

    def __or__(self, other: Any) -> Any:
        return self._own() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._own()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)


class _Executed:
    """Finds modules that are there: a package that is executed for one of its own imports it."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG004
        """What the import system asks with the path of the package, which executes that."""
        if target is not None:  # to be executed anew
            _execute(target)
        module = sys.modules.get(name)
        if module is None or target is not None:
            return None
        return ModuleSpec(name, _As(module), origin=getattr(module.__spec__, "origin", None))


class _As(Loader):
    """Loads a module that is there."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002
        """The module as it is."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it was."""
        module.__spec__ = self._spec


def _inside(module: ModuleType) -> list[str] | None:
    """The `__path__` of a package; None of a module."""
    assert module.__spec__ is not None
    return module.__spec__.submodule_search_locations


def _execute(module: ModuleType) -> None:
    """Execute a module if it was left for later."""
    if not isinstance(module, _Later):
        return
    with importlib._bootstrap._ModuleLockManager(module.__name__):  # type: ignore[attr-defined]
        if type(module) is not _Later:  # by another thread, or this one executes it
            return
        assert module.__spec__ is not None
        assert module.__spec__.loader is not None
        module.__class__ = _Executing
        if (inside := _inside(module)) is not None:
            module.__path__ = inside
        for name in _SPARED[module.__name__](module):
            vars(module).pop(name, None)
        path, sys.path = sys.path, _path
        try:
            module.__spec__.loader.exec_module(module)
        except BaseException:
            module.__class__ = _Later
            raise
        finally:
            if path is not _path:  # or it was another thread that has put theirs aside
                sys.path = path
        module.__class__ = ModuleType  # type: ignore[assignment]
        if module.__name__ == _DYNAMO:
            after_dynamo()


def after_dynamo() -> None:
    """What is called when torch._dynamo was executed: another, while there is no card."""


def _leave(name: str) -> None:
    """Leave a module for later, if it is there and was not executed."""
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None:
        return
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        if name == _DYNAMO:  # its settings are a file of their own
            vars(module)["config"] = importlib.import_module(f"{name}.config")
    except ImportError:
        del sys.modules[name]
        raise
    vars(module).pop("__path__", None)  # or what is imported from a package would not execute it
    vars(module).update(_SPARED[name](module))
    module.__class__ = _Later
    package, _, own = name.rpartition(".")
    if package:
        setattr(sys.modules[package], own, module)


def used() -> list[str]:
    """The modules left for later that this process has executed."""
    return [name for name in _SPARED if not isinstance(sys.modules.get(name, _NONE), _Later)]


def use(names: Iterable[str]) -> None:
    """Execute modules that a fork has used, which the next ones are spared."""
    for name in names:
        with suppress(Exception):
            _execute(importlib.import_module(name))


def _disable(fn: Any = None, *_: Any, **__: Any) -> Any:
    """What keeps torch.compile out of a function."""
    return fn if fn is not None else _disable


def _of_sizes(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Functions of sizes, which may be symbols: what they return for numbers."""
    return {
        name: _standing_in(module, name, of_numbers)
        for names, of_numbers in _OF_NUMBERS.items()
        for name in names.split()
    }


def _standing_in(
    module: ModuleType, name: str, of_numbers: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    def called(*args: Any, **how: Any) -> Any:
        if of_numbers is not None and not how and all(map(_is_number, args)):
            return of_numbers(*args)
        _execute(module)
        return getattr(module, name)(*args, **how)

    return called


def _is_number(value: Any) -> bool:
    """Whether it is a number, or a shape of numbers."""
    return type(value) in (bool, int) or (isinstance(value, tuple) and all(map(_is_number, value)))


_OF_NUMBERS: dict[str, Callable[..., Any] | None] = {
    "guard_or_false guard_or_true guard_size_oblivious statically_known_true": bool,
    "sym_and": lambda *each: reduce(and_, each),
    "sym_or": lambda *each: reduce(or_, each),
    "sym_eq": eq,
    "is_nested_int": lambda size: False,  # noqa: ARG005
    "has_hint has_guarding_hint": lambda size: True,  # noqa: ARG005
    "expect_true guard_int size_hint guarding_hint_or_throw": lambda value, *_: value,
    # Every operation imports these, and calls them for symbols alone.
    "compute_unbacked_bindings free_unbacked_symbols": None,
}

_path: list[str] = []
"""Where modules are found that the spared ones import: a profile.py beside the user's file is none,
which torch._dynamo would execute by way of cProfile."""
_DYNAMO, _NONE = "torch._dynamo", _Later("none")
_SPARED: dict[str, Callable[[ModuleType], dict[str, Any]]] = {
    # Operations ask whether a value is one of these, which none is before they are executed.
    "sympy": lambda module: {"Basic": _Class(module, "Basic")},
    "torch.distributed.tensor": lambda module: {"DTensor": _Class(module, "DTensor")},
    "torch.fx.experimental.symbolic_shapes": _of_sizes,
    "torch.utils._sympy.functions": lambda module: {"Max": _Class(module, "Max")},
    _DYNAMO: lambda _: {"disable": _disable},
}
"""What stands in for each module."""
