"""A GPU for verify/device/compare.cu: its kernels compiled by g++, on buffers of this process.

`Device` stands for device.cuda.CudaSession and `HostBuffer` for its Buffer, so that the code which
launches these kernels runs unchanged. What is launched has ended when the launch returns; nothing
here can show a missing wait between streams.
"""

from __future__ import annotations

import ctypes
import functools
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from attnsweep.bench import entries, problem, timer
from attnsweep.compile.nvrtc import source_closure
from attnsweep.device.buffers import GUARD_BYTES, POISON
from attnsweep.verify import calls as calls_module
from attnsweep.verify import compare as judge_module
from attnsweep.verify import device_case as fixture_module
from attnsweep.verify import verifier as proof_module
from attnsweep.verify.compare import Comparer

from .harness import FLAGS, HERE, SimtError, Simulator, compile_as_one, compile_cpp, translate

OWN = HERE / "device"
KERNEL = re.compile(r"__global__ void __launch_bounds__\(256(?:, 2)?\)\s+(\w+)\(")
STAGE_FLAGS = ("-O2", "-ftrivial-auto-var-init=pattern", "-fno-strict-aliasing", "-w")
DTYPES = ("fp16", "bf16", "fp32")
# A launch takes milliseconds, and each example some.
few_examples = functools.partial(settings, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
small = few_examples(max_examples=settings.default.max_examples // 3)
LETTERS = {"f4": "f", "f8": "d", "i4": "i", "u4": "u", "i8": "l", "u8": "l"}


class HostBuffer:
    """gpu.device.Buffer in this process's memory."""

    def __init__(self, nbytes: int, *, guard: int = 0xA5, inside: Any = None) -> None:
        self.nbytes, self.guard_byte = nbytes, guard
        room = nbytes + 2 * GUARD_BYTES
        # As memory is that somebody used before.
        self.all = np.full(room, 0x5A, np.uint8) if inside is None else inside[:room]
        self.main = self.all[GUARD_BYTES : GUARD_BYTES + nbytes]
        self.all[:GUARD_BYTES] = self.all[GUARD_BYTES + nbytes :] = guard
        self.pointer = int(self.all.ctypes.data) + GUARD_BYTES

    @property
    def guards(self) -> tuple[int, int]:
        return self.pointer - GUARD_BYTES, self.pointer + self.nbytes

    def poison(self) -> None:
        self.all[:] = self.guard_byte
        self.main[:] = POISON

    def fill(self, byte: int) -> None:
        self.main[:] = byte

    def upload(self, bits: np.ndarray[Any, Any]) -> None:
        assert bits.flags.c_contiguous
        assert bits.nbytes == self.nbytes
        self.main[:] = bits.view(np.uint8).ravel()

    def download(self, out: np.ndarray[Any, Any], stream: object = None) -> None:
        assert out.flags.c_contiguous
        out.view(np.uint8).ravel()[:] = self.main[: out.nbytes]

    def copy_from(self, other: HostBuffer, stream: object = None) -> None:
        self.main[:] = other.main

    @functools.cached_property
    def _turned(self) -> HostBuffer:
        return HostBuffer(self.nbytes, guard=self.guard_byte)

    def turned(self) -> HostBuffer:
        return self._turned

    def turn(self, shape: Sequence[int], *, back: bool) -> None:
        batch, heads, rows, columns = shape
        kind = f"u{self.nbytes // int(np.prod(shape))}"
        there = self._turned.of(kind).reshape(batch, rows, heads, columns).swapaxes(1, 2)
        here = self.of(kind).reshape(shape)
        (here if back else there)[:] = there if back else here
        to, of = (self, self._turned) if back else (self._turned, self)
        for guard in (slice(GUARD_BYTES), slice(GUARD_BYTES + self.nbytes, None)):
            to.all[guard] = of.all[guard]

    def of(self, dtype: Any) -> np.ndarray[Any, Any]:
        """Its bytes as an array, which is no copy."""
        return self.main.view(dtype)


def uploaded(array: np.ndarray[Any, Any]) -> HostBuffer:
    """A buffer that holds an array."""
    buffer = HostBuffer(array.nbytes)
    buffer.upload(np.ascontiguousarray(array))
    return buffer


def sign_of(dtype: str) -> np.unsignedinteger[Any]:
    """The sign bit of an element."""
    return np.uint32(0x80000000) if dtype == "fp32" else np.uint16(0x8000)


class Device:
    """A session whose kernels run on the CPU; `schedule` as in runtime.hpp."""

    stream = nullcontext()
    free_bytes = 1 << 40

    def __init__(self, simulator: Simulator, schedule: int = 0) -> None:
        self._simulator, self.schedule = simulator, schedule
        self.gpu = SimpleNamespace(arch="sm_90a", sm_count=2)
        self.launched: list[str] = []
        """Names of the kernels that ran."""

    def judge(self, dtype: str) -> Comparer:
        """A judge whose kernels run here, with buffers as those of `take_place`."""
        return Comparer(cast(Any, self), dtype)

    def library(self, dtype: str) -> str:
        """The judge's kernels, compiled for the host."""
        source, (define, _) = judge_module.judge_source(dtype, 1)
        return str(_stage(self._simulator, source, define))  # all parts

    def take_place(self, monkeypatch: pytest.MonkeyPatch, buffer: type = HostBuffer) -> None:
        """Let verify/compare.py and what uses it have host buffers, and the library for a cubin.

        buffer: of a bench and its cases.
        """

        monkeypatch.setattr(judge_module, "judge_cubin", lambda arch, dtype, part, cache_dir: self.library(dtype))
        own = (judge_module, calls_module, proof_module)
        for module in (fixture_module, entries, problem, timer, *own):
            monkeypatch.setattr(module, "Buffer", HostBuffer if module in own else buffer)

    def kernel(self, path: str, name: str, smem_bytes: int = 0) -> Callable[..., None]:
        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared_mem: int = 0) -> None:
            assert shared_mem <= max(smem_bytes, 48 * 1024), "more than the function was allowed"
            runtime = _runtime(self._simulator)
            self.launched.append(name)
            _launch(runtime, path, name, grid, block, args, shared_mem, self.schedule)

        return launch

    def streams(self, count: int) -> list[Any]:
        assert count == 1
        return [self.stream]

    def marks(self, count: int) -> list[None]:
        return [None] * count

    def pinned(self, shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
        return np.zeros(tuple(shape), dtype)

    def capture(self, issue: Callable[[], None]) -> Callable[[], None]:
        return issue

    def time_us(self, work: Callable[[], None], then: Callable[[], None] | None = None) -> float:
        work()
        if then is not None:
            then()
        return 100.0

    def record(self) -> float:
        return 0.0

    def elapsed_us(self, begin: float, end: float) -> float:
        return end - begin

    def wait(self, event: float) -> None:
        """What was launched before it has ended."""

    def synchronize(self) -> None:
        """A launch has ended when it returns."""

    settle = synchronize


def _launch(
    runtime: ctypes.CDLL,
    path: str,
    name: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: tuple[Any, ...],
    smem_bytes: int,
    schedule: int,
) -> None:
    library = _library(path)
    wanted = getattr(library, f"simt_letters_{name}")
    wanted.restype = ctypes.c_char_p
    # A pointer is passed as an integer of 8 bytes.
    given = "".join("s" if arg.dtype.kind == "V" else LETTERS[arg.dtype.str[1:]] for arg in args)
    taken = wanted().decode().replace("p", "l")
    assert given == taken, f"{name} takes ({taken}) and is given ({given})"
    values = [np.asarray(arg) for arg in args]
    pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
    sizes = (ctypes.c_uint * 3)(*grid)
    assert block[1:] == (1, 1)
    with tempfile.TemporaryFile() as report:
        failed = runtime.simt_launch(
            ctypes.cast(getattr(library, f"simt_{name}"), ctypes.c_void_p),
            *(name.encode(), pointers, ctypes.c_uint(len(values)), sizes),
            *(ctypes.c_uint(block[0]), ctypes.c_size_t(smem_bytes)),
            *(ctypes.c_uint(schedule), ctypes.c_int(report.fileno())),
        )
        if failed:
            report.seek(0)
            raise SimtError(f"{name}: {report.read().decode()}")


@functools.cache
def _library(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)


@functools.cache
def _runtime(simulator: Simulator) -> ctypes.CDLL:
    sources = [HERE / name for name in ("threads.cpp", "copies.cpp", "reads.cpp", "wgmma.cpp")]
    sources.append(OWN / "launch.cpp")
    flags = [*FLAGS, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-D_exit=simt_exit"]
    made = simulator.kept_file(("device", flags), lambda to: compile_as_one(sources, to, flags), ".so")
    return ctypes.CDLL(str(made.result()), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _stage(simulator: Simulator, source: Path, define: str) -> Path:
    _runtime(simulator)  # whose names the library uses
    closure = source_closure(source).items()
    texts = {name: translate(text.decode(), name) for name, text in closure}
    names = KERNEL.findall(texts[source.name])
    wrapper = f'#include "device/float64.hpp"\n#include "{source.name}"\n'
    for name in names:
        wrapper += (
            f'extern "C" void simt_{name}(void* const* args) {{ simt::invoke(&{name}, args); }}\n'
            f'extern "C" const char* simt_letters_{name}() {{ return simt::letters(&{name}); }}\n'
        )

    def build(to: Path) -> None:
        for name, text in texts.items():
            (to.parent / name).parent.mkdir(parents=True, exist_ok=True)
            (to.parent / name).write_text(text)
        (to.parent / "wrapper.cpp").write_text(wrapper)
        flags = [*FLAGS, *STAGE_FLAGS, "-shared", "-fPIC", f"-D{define}=1", "-I", str(HERE)]
        compile_cpp([*flags, "-I", str(to.parent), str(to.parent / "wrapper.cpp"), "-o", str(to)])

    return simulator.kept_file((wrapper, texts, define, STAGE_FLAGS), build, ".so").result()
