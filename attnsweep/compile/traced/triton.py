"""Triton's part of a trace: launches are compiled for a card that is not there, and taken down."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.cache import FileCacheManager
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from attnsweep.core.hardware import Arch

# What a launch takes beside the kernel's own parameters; Triton makes options of them.
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_USUAL = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None}


class AskedTooMuch(Exception):
    """A call that does what no trace can follow, or that no config can be given to."""


class Found(Exception):
    """Ends a call once its autotuner is known."""


@dataclass
class Launched:
    """One launch of a call, compiled."""

    function: str
    grid: tuple[int, int, int]
    threads: int
    smem_bytes: int
    args: tuple[str, ...]
    hash: str
    cubin: bytes = field(repr=False)
    log: str = field(repr=False)
    """ptxas's."""


@dataclass
class Tuned:
    """An autotuner that a call launches: its configs as they stand, and those it keeps here."""

    name: str
    configs: list[dict[str, Any]]
    kept: list[dict[str, Any]]


def values_of(config: triton.Config) -> dict[str, Any]:
    """A config's parameters, and the options that are not Triton's usual ones in every config."""
    return {**config.kwargs, **{name: getattr(config, name) for name in OPTIONS}}


class Recorder:
    """Launches of one call.

    tuned: a config for its autotuner; None: only that one is sought. known: hashes of kernels that
    are compiled; whatever launches another one ends then, before that is compiled.
    """

    def __init__(
        self, tuned: Mapping[str, Any] | None, known: Collection[str] | None = None
    ) -> None:
        self._tuned, self._known = tuned, known
        self.cannot = False
        """Whether the call does what no trace can follow."""
        self.launches: list[Launched] = []
        self.met: list[Tuned] = []
        self._tuner: Any = None

    @contextmanager
    def recording(self, arch: Arch) -> Iterator[None]:
        """Have every launch and autotuner of the call inside come here."""
        run, tune = JITFunction.run, Autotuner.run

        def launch(jit: Any, *args: Any, grid: Any, warmup: bool, **how: Any) -> Any:
            return self._launch(run, jit, args, grid, how)

        def autotune(tuner: Any, *args: Any, **how: Any) -> Any:
            return self._autotune(tune, tuner, args, how)

        def pointer(tensor: FakeTensor) -> int:
            return 4096 + int(tensor.storage_offset()) * int(tensor.element_size()) % 16

        before = triton.runtime.driver._active
        triton.runtime.driver.set_active(driver_of(arch))
        with ExitStack() as stack:
            stack.callback(triton.runtime.driver.set_active, before)
            stack.enter_context(mock.patch.object(JITFunction, "run", launch))
            stack.enter_context(mock.patch.object(GridExecutor, "__call__", return_value=None))
            stack.enter_context(mock.patch.object(Autotuner, "run", autotune))
            stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", pointer))
            yield

    def _launch(self, run: Any, jit: Any, args: Sequence[Any], grid: Any, how: Any) -> Any:
        if self._tuned is None:
            return None
        said = io.StringIO()
        with redirect_stdout(said), ExitStack() as stack:
            if self._known is not None:
                stack.enter_context(mock.patch.object(JITFunction, "_do_compile", _other))
            kernel = run(jit, *args, grid=grid, warmup=True, **how)
        if kernel is None:
            raise AskedTooMuch(f"a hook of Triton's kept {jit.fn.__name__} from being compiled")
        facts = kernel.metadata
        bound = {p.name: p.default for p in jit.params if p.has_default}
        bound |= dict(zip(jit.arg_names, args, strict=False))
        bound |= {name: how[name] for name in jit.arg_names if name in how}
        sizes = grid(bound) if callable(grid) else grid
        sizes = (*map(int, sizes), 1, 1)[:3]
        clusters = getattr(facts, "num_ctas", 1) or 1
        own = [bound[p.name] for p in jit.params if not p.is_constexpr and p.name in bound]
        self.launches.append(
            Launched(
                function=facts.name,
                grid=(sizes[0] * clusters, sizes[1], sizes[2]),
                threads=32 * facts.num_warps,
                smem_bytes=facts.shared,
                args=tuple(map(_argument, own)),
                hash=kernel.hash,
                cubin=kernel.asm["cubin"],
                log=said.getvalue(),
            )
        )
        return kernel

    def _autotune(self, run: Any, tuner: Any, args: Sequence[Any], how: Any) -> Any:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        every = list(tuner.configs)
        if self._tuned is None:
            kept = tuner.prune_configs(how)
            name = tuner.base_fn.__name__
            self.met.append(Tuned(name, [*map(values_of, every)], [*map(values_of, kept)]))
            raise Found
        if self._tuner not in (None, tuner):
            names = f"{self._tuner.base_fn.__name__} and {tuner.base_fn.__name__}"
            raise AskedTooMuch(f"it launches two autotuners, {names}: it can have one")
        self._tuner = tuner
        tuner.configs = [self._config(every)]
        try:
            return run(tuner, *args, **how)
        finally:
            tuner.configs = every

    def _config(self, every: Sequence[triton.Config]) -> triton.Config:
        """The config that was asked for: one of the autotuner's, or another with its pre_hook."""
        assert self._tuned is not None
        asked = dict(self._tuned)
        if not asked:
            return every[0]
        for config in every:
            if values_of(config) == {**_USUAL, **asked}:
                return config
        options = {name: asked.pop(name) for name in OPTIONS if name in asked}
        first = every[0]
        if missing := [name for name in asked if name not in first.kwargs]:
            raise AskedTooMuch(f"neither the function nor its autotuner has {', '.join(missing)}")
        hooks = {config.pre_hook for config in every}
        if len(hooks) > 1:
            raise AskedTooMuch(
                "its configs have several pre_hooks: a new one cannot have one of them"
            )
        of = {name: getattr(first, name) for name in OPTIONS} | options
        return triton.Config({**first.kwargs, **asked}, **of, pre_hook=first.pre_hook)


def _other(*_: Any, **__: Any) -> Any:
    raise AskedTooMuch("it launches other code")


class _Modules(FileCacheManager):  # type: ignore[misc]
    """Has what launches kernels beside all configs' folders, whatever kernels a config compiled to.

    Triton 3.6 compiles a C module a signature: 0.33 of the 0.36 s that a candidate took on an H200.
    """

    def _make_path(self, filename: str) -> str:
        if not filename.endswith(".so"):
            return str(super()._make_path(filename))
        place = os.path.join(os.environ["TRITON_CACHE_DIR"], "../../../modules", self.key)
        os.makedirs(place, exist_ok=True)
        return os.path.join(place, filename)


class Watch(Recorder):
    """Gives the autotuner of calls on a card its config, and takes down what they launch.

    cache: Triton's folder of what the trace has compiled. launched: where hashes of kernels go.
    """

    def __init__(self, tuned: Mapping[str, Any], cache: str, launched: set[str]) -> None:
        super().__init__(tuned)
        self._cache, self._hashes = cache, launched

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A call inside; mock.patch would take the host fifty times as long."""
        run, tune, before = JITFunction.run, Autotuner.run, os.environ.get("TRITON_CACHE_DIR")

        def launch(jit: Any, *args: Any, **how: Any) -> Any:
            kernel = run(jit, *args, **how)
            self._hashes.add(str(getattr(kernel, "hash", "none")))
            return kernel

        def autotune(tuner: Any, *args: Any, **how: Any) -> Any:
            return self._autotune(tune, tuner, args, how)

        manager, triton.knobs.cache.manager_class = triton.knobs.cache.manager_class, _Modules
        JITFunction.run, Autotuner.run = launch, autotune
        os.environ["TRITON_CACHE_DIR"] = self._cache
        try:
            yield
        finally:
            JITFunction.run, Autotuner.run = run, tune
            triton.knobs.cache.manager_class = manager
            os.environ.pop("TRITON_CACHE_DIR")
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before


def _argument(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} at {value.data_ptr() % 16}"
    return repr(value)[:200]


def driver_of(arch: Arch, device: str = "cuda") -> Any:
    """Triton's driver of such a card, as far as compiling asks it. device: where tensors lie."""
    major, minor = arch.compute_capability
    facts = {
        "max_shared_mem": arch.smem_per_block,
        "max_num_regs": arch.registers_per_sm,
        "multiprocessor_count": arch.sm_count,
        "warpSize": 32,
    }

    def no_timing(*_: Any, **__: Any) -> Any:
        raise AskedTooMuch("it times kernels while it is called")

    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        get_current_device=lambda: 0,
        set_current_device=lambda device: None,  # noqa: ARG005
        get_current_stream=lambda device=None: 0,  # noqa: ARG005
        get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: torch.device(device, 0),
        get_benchmarker=no_timing,
        get_empty_cache_for_benchmark=no_timing,
        clear_cache=no_timing,
        utils=SimpleNamespace(get_device_properties=lambda device: facts),  # noqa: ARG005
    )
