"""Records a program from its start: `attnsweep shapes` has its Python import this first."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import secrets
import sys
from os import getpid
from pathlib import Path

from .imported import when_imported
from .log import ERRORS


def begin(folder: Path) -> None:
    """Record this process once it imports PyTorch, and run the sitecustomize of its own."""

    def start() -> None:
        try:
            from .recorder import Recording

            Recording(folder)
        except Exception as error:
            name = f"{getpid()}-{secrets.token_hex(4)}{ERRORS}"
            (folder / name).write_text(f"{type(error).__name__}: {error}\n", encoding="utf-8")

    when_imported("torch", start)
    sys.path[:] = [place for place in sys.path if place != str(folder)]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)
