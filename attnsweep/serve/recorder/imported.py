"""What is done once a module has been imported."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any


def when_imported(name: str, act: Callable[[], object]) -> Callable[[], None]:
    """Call a function once this module has been imported, or now; returns what prevents that."""
    if name in sys.modules:
        act()
        return lambda: None
    finder = _Finder(name, act)
    sys.meta_path.insert(0, finder)
    return finder.leave


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self._name, self._act = name, act
        self._left = False

    def leave(self) -> None:
        self._left = True
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if not self._left:
                self._act()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
