"""Guarded device memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from attnsweep.core.errors import NoGpuError
from attnsweep.core.files import install_command

# A tile of 128 rows of head_dim 256 that is written past the end lands within this.
GUARD_BYTES = 128 * 1024
_GUARD = 0xA5
# 0xFFFF is a NaN in fp16 and bf16, 0xFFFFFFFF in fp32: one byte poisons every dtype.
POISON = 0xFF


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise NoGpuError(
            f"CuPy is missing or broken ({str(error).strip().splitlines()[0]})",
            hint=f"{install_command('cuda13')} (driver 580 or newer), or [cuda12] (525)",
        ) from error
    return cupy


class Buffer:
    """Device memory between two guard regions.

    Outputs and workspaces have guards of a known pattern, which reveal a stray write; inputs have
    guards of NaN, which reveal a stray read.
    """

    def __init__(self, nbytes: int, *, guard: int = _GUARD, inside: Any = None) -> None:
        """inside: a pointer to memory that has room for it and its guards; else it is allocated."""
        cupy = _cupy()
        self.nbytes = nbytes
        self.guard_byte = guard
        self._turned: Buffer | None = None
        self._all = cupy.cuda.alloc(nbytes + 2 * GUARD_BYTES) if inside is None else inside
        self._main = self._all + GUARD_BYTES
        self.pointer = int(self._main.ptr)
        self._all.memset(guard, GUARD_BYTES)
        (self._main + nbytes).memset(guard, GUARD_BYTES)

    def poison(self) -> None:
        """Fill with NaN, and renew the guards."""
        self._all.memset_async(self.guard_byte, GUARD_BYTES)
        self._main.memset_async(POISON, self.nbytes)
        (self._main + self.nbytes).memset_async(self.guard_byte, GUARD_BYTES)

    def fill(self, byte: int) -> None:
        """Give every byte this value, without the guards."""
        self._main.memset_async(byte, self.nbytes)

    @property
    def guards(self) -> tuple[int, int]:
        """Pointers to the guard regions, of GUARD_BYTES each."""
        return int(self._all.ptr), self.pointer + self.nbytes

    def upload(self, bits: np.ndarray[Any, Any]) -> None:
        """Copy a contiguous host array of `nbytes` to the buffer."""
        self._main.copy_from_host(bits.ctypes.data, self.nbytes)

    def upload_parts(self, pool: np.ndarray[Any, Any], begins: Sequence[int]) -> None:
        """Fill the buffer with equal parts of a host array, each from its first byte there."""
        there, size = Buffer(pool.nbytes), self.nbytes // len(begins)
        there.upload(pool)
        for number, begin in enumerate(begins):
            to = self._main + number * size
            to.copy_from_device(there._main + begin, size)

    def download(self, out: np.ndarray[Any, Any], stream: Any = None) -> None:
        """Copy the first bytes to a contiguous host array; pinned memory is ten times as fast.

        stream: copies after its work, and must be waited for; without one, it copies at once.
        """
        if stream is None:
            self._main.copy_to_host(out.ctypes.data, out.nbytes)
        else:
            self._main.copy_to_host_async(out.ctypes.data, out.nbytes, stream)

    def copy_from(self, other: Buffer, stream: Any = None) -> None:
        """Copy another buffer of the same size to this one, on the device, or enqueue that."""
        if stream is None:
            self._main.copy_from_device(other._main, self.nbytes)
        else:
            self._main.copy_from_device_async(other._main, self.nbytes, stream)

    def turned(self) -> Buffer:
        """A buffer for the same tensor with its heads behind its rows, which `turn` fills."""
        if self._turned is None:
            self._turned = Buffer(self.nbytes, guard=self.guard_byte)
        return self._turned

    def turn(self, shape: Sequence[int], *, back: bool) -> None:
        """Enqueue a copy of a tensor (batch, heads, rows, columns) to `turned`, or back from there.

        Its guards come with it: what is found around this buffer was written around that one.
        """
        other, (batch, heads, rows, columns) = self.turned(), shape
        kind = f"u{self.nbytes // math.prod(shape)}"
        there = other.view((batch, rows, heads, columns), kind).transpose(0, 2, 1, 3)
        here = self.view(shape, kind)
        to, of = (here, there) if back else (there, here)
        to[...] = of
        to_all, of_all = (self._all, other._all) if back else (other._all, self._all)
        for guard in (0, GUARD_BYTES + self.nbytes):
            (to_all + guard).copy_from_device_async(of_all + guard, GUARD_BYTES)

    def view(self, shape: Sequence[int], dtype: Any) -> Any:
        """A CuPy array over the buffer."""
        return _cupy().ndarray(tuple(shape), dtype, self._main)
