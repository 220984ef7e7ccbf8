"""Acts on a program from its start, since its Python imports this first.

`attnsweep shapes` records its calls, `attnsweep exec` enables a package of kernels.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from .log import Log

SERVED = ".served"
"""Ending of the file in which a process leaves how many calls went where."""


def begin(folder: Path, every_call: bool) -> None:
    """Record this process once it imports PyTorch."""

    def record(log: Log) -> None:
        from .recorder import Recording

        Recording(log, every_call)

    _begin(folder, record)


def enable(folder: Path, name: str) -> None:
    """Enable this package of kernels once the process imports PyTorch, and count its calls."""

    def switch_on(log: Log) -> None:
        package = importlib.import_module(name)
        package.enable()
        counters = getattr(package, "attention_counters", None) or package.counters
        log.leave(SERVED, '{"kernel": 0}')  # a process that ends by os._exit leaves no more
        atexit.register(lambda: log.leave(SERVED, json.dumps(counters())))

    _begin(folder, switch_on)


def _begin(folder: Path, act: Callable[[Log], None]) -> None:
    """Act once PyTorch is imported, and run the sitecustomize of the program's own."""
    sys.meta_path.insert(0, _AfterPyTorch(folder, act))
    sys.path[:] = [place for place in sys.path if place != str(folder)]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


class _AfterPyTorch:
    """Acts right after PyTorch was imported, before any module holds its names."""

    def __init__(self, folder: Path, act: Callable[[Log], None]) -> None:
        self._folder, self._act = folder, act

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
            self._act(log)
        except Exception:
            log.fail()
