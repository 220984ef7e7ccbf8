"""Records a program from its start: `attnsweep shapes` has its Python import this first."""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from .log import Log


def begin(folder: Path, every_call: bool) -> None:
    """Record this process once it imports PyTorch, and run the sitecustomize of its own."""
    sys.meta_path.insert(0, _AfterPyTorch(folder, every_call))
    sys.path[:] = [place for place in sys.path if place != str(folder)]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


class _AfterPyTorch:
    """Starts the recording right after PyTorch was imported, before any module holds its names."""

    def __init__(self, folder: Path, every_call: bool) -> None:
        self._folder, self._every_call = folder, every_call

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            own = functools.partial(self._execute, spec.loader.exec_module)
            spec.loader.exec_module = own  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Any, module: Any) -> None:
        execute(module)
        log = Log(self._folder)
        try:
            from .recorder import Recording

            Recording(log, self._every_call)
        except Exception:
            log.fail()
