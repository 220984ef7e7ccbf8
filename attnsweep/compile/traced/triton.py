"""Triton's part of a trace: launches are compiled for a card that is not there, and taken down."""

from __future__ import annotations

import io
import itertools
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
import triton.compiler.compiler
import triton.runtime.cache
from torch._subclasses.fake_tensor import FakeTensor
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.cache import FileCacheManager
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from attnsweep.compile.traced import others
from attnsweep.core.hardware import Arch
from attnsweep.family.called import USUAL, Tuning

NO_GRID = (0, 0, 0)
"""The grid of a launch that none is known of before it runs."""
_CACHES = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR")


class AskedTooMuch(Exception):
    """A call that does what no trace can follow, or that no config can be given to."""


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


def values_of(config: triton.Config) -> dict[str, Any]:
    """A config's parameters, and the options that are not Triton's usual ones in every config."""
    return {**config.kwargs, **{name: getattr(config, name) for name in USUAL}}


def widened(configs: Sequence[triton.Config]) -> list[triton.Config]:
    """Every combination of the values that configs have and of their neighbours.

    Those of a power of two above 1 are its half and its double, if no product's side falls below 16
    by that, and of stages one less and more. Options that no config names stay as they are.
    """
    every = [*map(values_of, configs)]
    values: dict[str, list[Any]] = {}
    for name in every[0]:
        seen = dict.fromkeys(each[name] for each in every)
        if name not in USUAL or [*seen] != [USUAL[name]]:
            near = dict.fromkeys(v for one in seen for v in _neighbours(name, one))
            seen = dict.fromkeys(sorted(seen | near)) if near else seen
        values[name] = [*seen]
    return [
        _like(configs, dict(zip(values, combination, strict=True)))
        for combination in itertools.product(*values.values())
    ]


def _neighbours(name: str, value: Any) -> list[int]:
    if type(value) is not int or value < 1 or name in ("num_ctas", "maxnreg"):
        return []
    if name == "num_stages":
        return [value + step for step in (-1, 1) if value + step > 0]
    if value == 1 or value & (value - 1):
        return [] if name != "num_warps" else [2]
    most = 32 if name == "num_warps" else 1 << 30
    return [each for each in (value // 2, 2 * value) if each <= most and not (each < 16 <= value)]


def _like(configs: Sequence[triton.Config], values: Mapping[str, Any]) -> triton.Config:
    """A config with these values in place of the first one's, and with the pre_hook of all."""
    first, values = configs[0], dict(values)
    if len({config.pre_hook for config in configs}) > 1:
        what = "its configs have several pre_hooks: a new one cannot have one of them"
        raise AskedTooMuch(what)
    options = {name: getattr(first, name) for name in USUAL}
    options |= {name: values.pop(name) for name in USUAL if name in values}
    return triton.Config({**first.kwargs, **values}, **options, pre_hook=first.pre_hook)


class Recorder:
    """Launches of one call.

    tuned: a config for its autotuners; None: only those are sought, with `widen` as with configs
    beside their own. known: hashes of kernels that
    are compiled; whatever launches another one ends then, before that is compiled.
    """

    def __init__(
        self,
        tuned: Mapping[str, Any] | None,
        known: Collection[str] | None = None,
        *,
        widen: bool = False,
    ) -> None:
        self._tuned, self._known, self._widen = tuned, known, widen
        self.cannot = False
        """Whether the call does what no trace can follow."""
        self._arch: Any = None
        self.of_one_shape = False
        """Whether what a call launches is compiled for its shape alone."""
        self.launches: list[Launched] = []
        self._logs: dict[str, str] = {}
        self.met: list[Tuning] = []
        self._tuners: dict[str, Any] = {}
        self._taken: set[str] = set()

    @contextmanager
    def recording(self, arch: Arch) -> Iterator[None]:
        """Context in which this recorder gets every Triton launch and autotuner run."""
        run, self._arch = JITFunction.run, arch

        def launch(jit: Any, *args: Any, grid: Any, warmup: bool, **how: Any) -> Any:
            return self._launch(run, jit, args, grid, how)

        def pointer(tensor: FakeTensor) -> int:
            return 4096 + int(tensor.storage_offset()) * int(tensor.element_size()) % 16

        with on_card(arch), ExitStack() as stack:
            stack.enter_context(mock.patch.object(JITFunction, "run", launch))
            stack.enter_context(mock.patch.object(GridExecutor, "__call__", return_value=None))
            stack.enter_context(mock.patch.object(Autotuner, "run", self.autotuner()))
            stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", pointer))
            stack.enter_context(others.calls(self._called))
            yield

    def _called(self, make: Any, compiled: Any, args: tuple[Any, ...]) -> Any:  # noqa: ARG002
        """A launch of another compiler's, which knows no grid."""
        self.of_one_shape = True
        if self._tuned is not None:
            own, cubins = others.identity(compiled), others.cubins_of(compiled)
            if not own or not cubins:
                self.cannot = True
                raise AskedTooMuch(f"no machine code is kept of {type(compiled).__name__}")
            if self._known is not None and own not in self._known:
                _other()
            plain = (bool, int, float, str, torch.Tensor)  # others are said with their addresses
            said = tuple(_argument(one) for one in args if isinstance(one, plain))
            for cubin in cubins:
                for name, threads, log in others.entries(cubin, self._arch):
                    facts = (name, NO_GRID, threads, 0, said, own, cubin, log)
                    self.launches.append(Launched(*facts))
        return others.outputs_of(compiled)

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
                log=self._logs.setdefault(kernel.hash, said.getvalue()),
            )
        )
        return kernel

    def autotuner(self) -> Any:
        """What stands for Autotuner.run meanwhile."""
        run = Autotuner.run
        return lambda tuner, *args, **how: self._autotune(run, tuner, args, how)

    def _autotune(self, run: Any, tuner: Any, args: Sequence[Any], how: Any) -> Any:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        every, own = list(tuner.configs), tuner.base_fn.__name__
        known = [name for name, met in self._tuners.items() if met is tuner]
        others = sum(name.rpartition("_")[0] == own or name == own for name in self._tuners)
        name = known[0] if known else f"{own}_{others + 1}" if others else own
        self._tuners[name] = tuner
        if self._tuned is not None:
            tuner.configs = [self._config(name, every)]
        else:
            tuner.configs = widened(every) if self._widen else every
            kept = tuner.prune_configs(how)
            if not known:
                self.met.append(
                    Tuning(name, *([*map(values_of, c)] for c in (tuner.configs, kept)))
                )
            tuner.configs = kept[:1]
        try:
            return run(tuner, *args, **how)
        finally:
            tuner.configs = every

    def _config(self, name: str, every: Sequence[triton.Config]) -> triton.Config:
        """The config that was asked for: one of the autotuner's, or another with its pre_hook."""
        assert self._tuned is not None
        asked = {}
        for full, value in self._tuned.items():
            of, _, short = full.rpartition(".")
            if of == name or (not of and (short in USUAL or short in every[0].kwargs)):
                asked[short] = value
                self._taken.add(full)
        for config in every:
            if not asked or values_of(config) == {**USUAL, **asked}:
                return config
        return _like(every, asked)

    def check(self) -> None:
        """After a call, raise AskedTooMuch if no autotuner in it took a config's parameter."""
        if left := [name for name in self._tuned or () if name not in self._taken]:
            told = f"neither the function nor its autotuner has {', '.join(left)}"
            every = [config for tuner in self._tuners.values() for config in tuner.configs]
            there = sorted({name for config in every for name in config.kwargs})
            raise AskedTooMuch(f"{told}; the autotuner has {', '.join(there)}" if there else told)

    def tunings(self) -> list[Tuning]:
        """The autotuners that were met, with names of values that only one of them has."""
        names = Counter(name for met in self.met for name in met.configs[0])

        def own(met: Tuning, values: dict[str, Any]) -> dict[str, Any]:
            return {n if names[n] == 1 else f"{met.name}.{n}": v for n, v in values.items()}

        return [
            Tuning(met.name, *([own(met, each) for each in of] for of in (met.configs, met.kept)))
            for met in self.met
        ]


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
        run, tune = JITFunction.run, Autotuner.run
        before = {name: os.environ[name] for name in _CACHES if name in os.environ}

        def launch(jit: Any, *args: Any, **how: Any) -> Any:
            kernel = run(jit, *args, **how)
            self._hashes.add(str(getattr(kernel, "hash", "none")))
            return kernel

        def called(make: Any, compiled: Any, args: tuple[Any, ...]) -> Any:
            self._hashes.add(others.identity(compiled))
            return make()

        manager, triton.knobs.cache.manager_class = triton.knobs.cache.manager_class, _Modules
        JITFunction.run, Autotuner.run = launch, self.autotuner()
        os.environ |= dict.fromkeys(_CACHES, self._cache)
        try:
            with others.calls(called):
                yield
        finally:
            JITFunction.run, Autotuner.run = run, tune
            triton.knobs.cache.manager_class = manager
            for name in _CACHES:
                os.environ.pop(name, None)
            os.environ |= before


def _argument(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} at {value.data_ptr() % 16}"
    return repr(value)[:200]


@contextmanager
def on_card(arch: Arch, device: str = "cuda") -> Iterator[None]:
    """Triton as it is on such a card, as far as compiling asks. device: where tensors lie."""
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_driver_of(arch, device))
    try:
        yield
    finally:
        triton.runtime.driver.set_active(before)


def _driver_of(arch: Arch, device: str) -> Any:
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
