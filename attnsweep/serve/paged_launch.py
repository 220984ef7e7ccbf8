"""Launches of kernels for calls on a paged cache: compiled when first met, and bound to a card.

Their workspaces are kept, by stream.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from attnsweep.compile.nvrtc import Compiler, Cubin
from attnsweep.core.hardware import Arch, arch_named
from attnsweep.core.problem import Problem
from attnsweep.family.discover import discover
from attnsweep.family.family import Config, Family, Launch
from attnsweep.serve.runtime.driver import BoundLaunches, Device, StridedTensor, cuda_driver
from attnsweep.serve.runtime.launcher import is_capturing

# Graphs whose workspaces are kept: one is in use until its capture ends.
_MOST_CAPTURES = 8
_devices: dict[int, Device] = {}
_lock = threading.Lock()


class Kernel(NamedTuple):
    """A launch, and what to compile for it."""

    launch: Launch
    source: Path
    defines: Mapping[str, str]

    def ending(self, numbers: tuple[Any, ...], **facts: Any) -> Kernel:
        """The kernel whose last arguments are these."""
        args = (*self.launch.args[: -len(numbers)], *numbers)
        return self._replace(launch=replace(self.launch, args=args, **facts))


@functools.cache
def families() -> Mapping[str, Family]:
    """The declarations, which take 0.1 s to load."""
    return discover()


def kernels_of(family: Family, config: Config, problem: Problem, arch: Arch) -> dict[str, Kernel]:
    """The kernels of a config by stage."""
    return {
        stage: Kernel(launch, family.source, family.stages[stage].defines(config, problem, launch))
        for stage, launch in family.launches(config, problem, arch).items()
    }


@functools.cache
def _compiler(arch: str) -> Compiler:
    return Compiler(arch_named(arch))


_cubins: dict[tuple[Any, ...], Cubin] = {}


def _cubin(arch: str, source: Path, defines: tuple[tuple[str, str], ...]) -> Cubin:
    """A kernel's machine code, compiled now or before: the key of one takes 1 ms to find."""
    key = arch, source, defines
    found = _cubins.get(key)
    if found is None or not found.path.exists():
        found = _cubins[key] = _compiler(arch).compile(source, dict(defines))
    return found


@functools.cache
def arch_of(index: int) -> Arch:
    """The architecture of a device. Raises an AttnsweepError for one that nothing is known of."""
    facts = torch.cuda.get_device_properties(index)
    name = f"sm_{facts.major}{facts.minor}"
    known = arch_named(f"{name}a" if facts.major >= 9 else name)
    return replace(known, sm_count=facts.multi_processor_count)


@functools.cache
def name_of(index: int) -> str:
    """The card's name without its maker."""
    return str(torch.cuda.get_device_name(index)).removeprefix("NVIDIA ")


class _Cubins:
    """Machine code by its path, as a Device asks for it."""

    def code(self, code: Any) -> bytes:
        return Path(code.file).read_bytes()


def bound(
    kernels: Sequence[Kernel],
    index: int,
    names: Sequence[str],
    tensors: Mapping[str, StridedTensor] | None = None,
) -> BoundLaunches:
    """Launches on a device, compiled now or before.

    names: of the buffers, in the order in which addresses are given. tensors: sizes and strides of
    those that have tensor maps.
    """
    arch = arch_of(index).name
    launches: dict[str, Launch] = {}
    codes: dict[str, Any] = {}
    for number, kernel in enumerate(kernels):
        cubin, launch = _cubin(arch, kernel.source, tuple(kernel.defines.items())), kernel.launch
        codes[str(number)] = SimpleNamespace(
            file=str(cubin.path), sha256=cubin.digest, function=launch.function
        )
        # The first may not begin early: what runs before it is not ours.
        launches[str(number)] = replace(launch, programmatic=launch.programmatic and number > 0)
    with _lock:
        if index not in _devices:
            _devices[index] = Device(_Cubins(), cuda_driver(), index)  # type: ignore[arg-type]
    return _devices[index].launches(launches, codes, tensors or {}, names)


def maker(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """Makes contiguous tensors of a shape on a device, which is the current one.

    By what compiled code allocates with, where PyTorch has it: half of what empty_like takes.
    """
    own = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if own is None:
        return functools.partial(torch.empty, shape, dtype=dtype, device=device)
    strides = torch.empty(shape, device="meta").stride()
    return functools.partial(own, tuple(shape), strides, dtype)


class Kept:
    """The workspaces of one kind of call, which are made once for each stream.

    names: in the order of their addresses; those without a size are at 0.
    """

    def __init__(self, names: Sequence[str], sizes: Mapping[str, int]) -> None:
        self._names, self._sizes = names, sizes
        self._none = (0,) * len(names)
        # Addresses on a stream, and what keeps them.
        self._found: dict[int, tuple[tuple[int, ...], Any]] = {}

    def at(self, index: int, stream: int) -> tuple[int, ...]:
        """The addresses of a call's workspaces on a stream of a device."""
        if not self._sizes:
            return self._none
        capturing = is_capturing()
        found = None if capturing else self._found.get(stream)
        if found is None:
            with _lock:  # of two threads, one would have what the other replaced, which is free
                spaces = dict(_workspaces(self._sizes, index, stream))
            made = tuple(spaces[name].data_ptr() if name in spaces else 0 for name in self._names)
            found = made, spaces
            if not capturing:
                self._found[stream] = found
        return found[0]


# Memory of the calls of one stream, or of one capture: counters begin at 0, and end there.
_spaces: dict[tuple[int, int, int], dict[str, torch.Tensor]] = {}


def _workspaces(sizes: Mapping[str, int], index: int, stream: int) -> dict[str, torch.Tensor]:
    """Each workspace of a stream, at least as large as asked for."""
    capture = 0
    if is_capturing():
        driver = cuda_driver()
        capture = int(driver.cuStreamGetCaptureInfo(driver.CUstream(stream))[2])
    key = (index, stream, capture)
    found = _spaces.get(key)
    if found is None:
        captures = [each for each in _spaces if each[2]]
        for old in captures[: max(0, len(captures) - _MOST_CAPTURES + 1)]:
            del _spaces[old]
        found = _spaces[key] = {}
    for name, size in sizes.items():
        if name not in found or found[name].numel() < size:
            # A graph fills what begins at 0 in each replay: partial results need not.
            made = torch.empty if name.startswith("partial") else torch.zeros
            found[name] = made(size, dtype=torch.uint8, device=f"cuda:{index}")
    return found
