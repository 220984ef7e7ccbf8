"""Launches of TileLang's and of CuTe DSL's in a trace, and what of them is known on a card.

Neither can be told to compile alone, as Triton can: a call of what they compiled is taken down and
not made. What they compile is of one shape, and names no grid and no dynamic shared memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from attnsweep.compile import elf
from attnsweep.core.hardware import Arch


def ready(arch: str, folder: str) -> None:
    """Before a file is imported: CuTe DSL compiles for this architecture, and keeps its cubins.

    It reads its variables once. So they name a descriptor, which each process that is forked then
    has lead to a folder of its own: see `keep_in`.
    """
    global _descriptor
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    _descriptor = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 100)
    os.close(opened)
    place = f"/proc/self/fd/{_descriptor}"
    variables = {"KEEP_CUBIN": "1", "DUMP_DIR": place, "ARCH": arch}
    os.environ |= {f"CUTE_DSL_{name}": value for name, value in variables.items()}


_descriptor = -1


def keep_in(folder: str) -> None:
    """Let CuTe DSL write its cubins to this folder from now on, in this process."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.dup2(opened, _descriptor, inheritable=False)
    os.close(opened)


@contextmanager
def calls(called: Callable[[Any, Any, tuple[Any, ...]], Any]) -> Iterator[None]:
    """Context in which `called` replaces each call of compiled code.

    It gets the function that would make it, the compiled code, and its arguments.
    """
    owners = [(owner, owner.__call__) for owner in _compiled_classes()]
    for owner, own in owners:

        def call(compiled: Any, *args: Any, _own: Any = own, **how: Any) -> Any:
            return called(lambda: _own(compiled, *args, **how), compiled, args)

        owner.__call__ = call
    try:
        yield
    finally:
        for owner, own in owners:
            owner.__call__ = own


def _compiled_classes() -> list[Any]:
    """What these compilers make, of those that are imported: classes that have a way to call it."""
    found = []
    if module := sys.modules.get("tilelang.jit.kernel"):
        found.append(module.JITKernel)
    if module := sys.modules.get("cutlass.base_dsl.jit_executor"):
        found.append(module.JitCompiledFunction)
    for owner in found:  # grows meanwhile
        found += [each for each in owner.__subclasses__() if each not in found]
    return [owner for owner in found if "__call__" in vars(owner)]


UNKNOWN = ""
"""Identity of code that nothing is kept of: CuTe DSL was imported before `ready`."""


def identity(compiled: Any) -> str:
    """A key of compiled code, equal for equal code in any process."""
    key = getattr(compiled, "_tilelang_cache_key", None)
    if key is not None:
        return f"tilelang {key}"
    cubin = getattr(compiled, "__cubin__", None)
    return f"cute {hashlib.sha256(cubin).hexdigest()}" if isinstance(cubin, bytes) else UNKNOWN


def cubins_of(compiled: Any) -> list[bytes]:
    """The cubins of compiled code; empty if they are not known."""
    cubin = getattr(compiled, "__cubin__", None)
    if isinstance(cubin, bytes):
        return [cubin]
    if (place := getattr(compiled, "_tilelang_cache_path", None)) is None:
        return []
    program = (Path(place) / "executable.so").read_bytes()
    cache = Path(os.environ["TILELANG_CACHE_DIR"])
    every = [path.read_bytes() for path in sorted(cache.rglob("*.cubin"))]
    return [cubin for cubin in every if cubin in program]


def outputs_of(compiled: Any) -> Any:
    """Make the empty tensors that a call returns: those that TileLang's `out_idx` names."""
    import torch

    adapter: Any = getattr(compiled, "adapter", None)
    every = [] if adapter is None else [adapter.params[at] for at in adapter.result_idx or ()]
    made = [
        torch.empty([*map(int, each.shape)], dtype=each.torch_dtype(), device="cuda")
        for each in every
    ]
    return made[0] if len(made) == 1 else made or None


def entries(cubin: bytes, arch: Arch) -> list[tuple[str, int, str]]:
    """Name and threads of a block of each function of a cubin, and its facts as ptxas -v logs them.

    ptxas counts what it spills; a cubin has the bytes of the stack alone, which stand for it.
    """
    # Since sm_90 a section of shared memory has what the driver reserves, too.
    reserved = arch.smem_reserved_per_block if arch.compute_capability >= (9, 0) else 0
    file, found = ELFFile(io.BytesIO(cubin)), []
    stacks = elf.of_functions(file, elf.STACK)
    for name, registers in elf.of_functions(file, elf.REGISTERS).items():
        if file.get_section_by_name(f".text.{name}") is None:
            continue
        shared = file.get_section_by_name(f".nv.shared.{name}")
        smem = max(0, shared["sh_size"] - reserved) if shared is not None else 0
        own = {kind: payload for kind, _, payload in elf.attributes(file, f".nv.info.{name}")}
        sizes = own.get(elf.THREADS) or own.get(elf.MOST_THREADS)
        threads = math.prod(memoryview(sizes).cast("I")) if sizes else 1024
        log = (
            f"ptxas info    : Compiling entry function '{name}'\n"
            f"    {stacks.get(name, 0)} bytes spill stores, 0 bytes spill loads\n"
            f"ptxas info    : Used {registers} registers, {smem} bytes smem\n"
        )
        found.append((name, threads, log))
    return found
