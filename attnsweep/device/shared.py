"""Guarded buffers in one block of memory that another process opens too.

The block has nothing else in it: whoever opens it sees no other memory of the process that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnsweep.core.problem import ceil_div
from attnsweep.device.buffers import GUARD_BYTES, Buffer, _cupy

Span = tuple[str, int, int]
"""A buffer's name, its bytes, and the byte of its guards."""
# The driver exports whole pages of this size.
_PAGE = 2 << 20
_ALIGNED = 256


class CudaIpc:
    """Memory of a card that crosses processes, by CUDA's handles for other ones."""

    def made(self, nbytes: int) -> tuple[Any, str]:
        """New memory, and what another process opens it by.

        Not of CuPy's pool, whose blocks are parts of larger ones.
        """
        cupy = _cupy()
        memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)
        return memory, cupy.cuda.runtime.ipcGetMemHandle(memory.ptr).hex()

    def opened(self, handle: str, nbytes: int) -> Any:
        """Memory that another process made."""
        cupy = _cupy()
        pointer = cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(handle))
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pointer, nbytes, self), 0)

    def buffer(self, memory: Any, at: int, nbytes: int, guard: int) -> Buffer:
        """A buffer, which begins with its first guard `at` bytes from the memory's first."""
        return Buffer(nbytes, guard=guard, inside=memory + at)


class Arena:
    """Buffers by name, each between guards, in memory of this process or of another."""

    def __init__(self, transport: CudaIpc, spans: Sequence[Span], handle: str = "") -> None:
        """handle: of an arena of the same spans that another process made; else it is made."""
        places, total = [], 0
        for _, nbytes, _ in spans:
            places.append(total)
            total += ceil_div(nbytes + 2 * GUARD_BYTES, _ALIGNED) * _ALIGNED
        total = ceil_div(total, _PAGE) * _PAGE
        if handle:
            self.handle, memory = handle, transport.opened(handle, total)
        else:
            memory, self.handle = transport.made(total)
        self.buffers = {
            name: transport.buffer(memory, at, nbytes, guard)
            for (name, nbytes, guard), at in zip(spans, places, strict=True)
        }

    def __getitem__(self, name: str) -> Buffer:
        return self.buffers[name]
