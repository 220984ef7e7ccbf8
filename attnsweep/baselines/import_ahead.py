"""Packages of baselines and calls are imported in a thread of the GPU process meanwhile.

Importing PyTorch, Triton and FlashAttention takes seconds, in which candidates compile. The thread
is over before any round is timed, because it would take Python from the thread that gives the GPU
its work.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
from collections.abc import Sequence

from attnsweep.baselines import flash, triton_precompile
from attnsweep.core.callables import CALLABLE
from attnsweep.core.problem import Problem
from attnsweep.core.timings import step
from attnsweep.device.cuda_graph import uncollected
from attnsweep.specs.model import KNOWN_BASELINES

_LOOK_S = 0.05
# An import that takes longer hangs; the first entrant must not be blamed for it.
_LONGEST_S = 90.0
# Modules that a baseline imports besides PyTorch: the first that is installed.
_IMPORTS: dict[str, tuple[str, ...]] = {
    "cudnn": ("cudnn",),
    "cudnn_deterministic": ("cudnn",),
    "triton_flash": ("triton",),
    "flash_attn_2": ("flash_attn",),
    **dict.fromkeys(
        (name for name in KNOWN_BASELINES if name.startswith("flash_attn_3")), flash.FLASH_3
    ),
    "flash_attn_4": ("flash_attn.cute",),
    **dict.fromkeys(("flashinfer", "xqa"), ("flashinfer",)),
}
# What most calls of the user's launch with.
_OF_CALLS = ("triton",)
# What the first call of FlashAttention-3 imports if baselines.loaded has not found a function in
# it.
_OPERATORS = "torch._dynamo"


class ImportAhead:
    """The thread: it imports, then takes up what Triton's process has compiled, if that is there.

    Whatever fails in it fails again, with its reason, when the baseline is prepared.
    """

    def __init__(
        self, triton: triton_precompile.TritonPrecompile, *, longest_s: float = _LONGEST_S
    ) -> None:
        self._triton, self._longest_s = triton, longest_s
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    def begin(self, names: Sequence[str], problem: Problem | None = None) -> None:
        """Start it, for these baselines. problem: the one that will be opened first."""
        self._ending.clear()
        self._thread = threading.Thread(target=self._run, args=(names, problem), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait until all packages are imported, within bounds, but not for Triton's process."""
        if self._thread is not None:
            self._ending.set()
            with step("wait for imports"):
                self._thread.join(self._longest_s)
            self._thread = None

    def _run(self, names: Sequence[str], problem: Problem | None) -> None:
        with uncollected():  # what is imported stays: a sixth of PyTorch's time
            load(names)
        if problem is None or "triton_flash" not in names:
            return
        while not self._ending.is_set():
            if self._triton.done(problem):
                with contextlib.suppress(Exception), step("take up Triton's code"):
                    triton_precompile.compile_triton(problem)
                return
            self._ending.wait(_LOOK_S)


def load(names: Sequence[str]) -> None:
    """Import the packages of these baselines and calls. What fails here fails again later."""
    calls = any(map(CALLABLE.fullmatch, names))
    wanted = [("torch",), *(_IMPORTS.get(name, ()) for name in names), *([_OF_CALLS] * calls)]
    for modules in dict.fromkeys(wanted):
        with contextlib.suppress(BaseException):  # a package may even exit while it is imported
            module = next(filter(flash.importable, modules))
            with step(f"import {module}"):
                package = flash.loaded(module)
            forward = getattr(package, flash.FORWARD_3, None)
            if modules == flash.FLASH_3 and not inspect.isfunction(forward):
                with step(f"import {_OPERATORS}"):
                    importlib.import_module(_OPERATORS)
            if calls and modules == _OF_CALLS:
                with step("start Triton"):
                    _ = package.runtime.driver.active.utils  # which a C compiler makes, once
