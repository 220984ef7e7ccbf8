"""A card of the strict judge on the CPU: memory of the host crosses processes, and so does a clock.

The called process has this in the place of bench.caller_process.Card. Device time is what calls of
kernels.launch say, in memory that both processes have, so that it is the same on a busy machine.
"""

from __future__ import annotations

import os
import secrets
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from attacks import kernels
from attacks.card import FACTS, Buffer, fakes_of
from attnsweep.baselines.prepare import BoundBaseline

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
NO_CHAIN = "ATTNSWEEP_ATTACKS_HAVE_NO_CHAIN"
"""In the environment: all calls of a chain have the inputs as they were made."""


class HostShared:
    """device.shared.CudaIpc with a file's memory; behind it lies the clock, in microseconds."""

    def __init__(self, place: str = "") -> None:
        self.clock = self.last = np.zeros(1)
        self._place = place

    def made(self, nbytes: int) -> tuple[Any, str]:
        name = os.path.join(self._place, f"shared {secrets.token_hex(8)}")
        with open(name, "wb") as file:
            file.truncate(nbytes + 8)
        memory = self.opened(name, nbytes)
        self.clock = self.clock if self.clock.base is not None else self.last
        return memory, name

    def opened(self, handle: str, nbytes: int) -> Any:
        whole = np.memmap(handle, np.uint8, "r+").view(np.ndarray)
        self.last = whole[nbytes:].view(np.float64)
        return whole[:nbytes]

    def buffer(self, memory: Any, at: int, nbytes: int, guard: int) -> Buffer:
        return Buffer(nbytes, guard=guard, inside=memory[at:])


def mixed(x: Any) -> Any:
    with np.errstate(over="ignore"):
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def numbered(words: Any) -> Any:
    return np.arange(len(words), dtype=np.uint64) * GOLDEN


class Kernels:
    """What the called process needs of compare.cu, for bf16."""

    def regions(self, every: Any) -> Any:
        return every

    def chain(self, regions: Any, contents: Buffer, digests: Buffer, call: int) -> None:
        if NO_CHAIN in os.environ:
            return
        every, of = contents.of(np.uint64), digests.of(np.uint64)
        before = every[call - 1] if call else np.uint64(0)
        if call:
            with np.errstate(over="ignore"):
                every[call] = mixed(before ^ mixed(of[call - 1] + GOLDEN)) or 1
        for buffer, signs, slot in regions:
            own, words = mixed(np.uint64(slot + 1)), buffer.of(np.uint32)
            for content in (before, every[call]):
                if content:
                    drawn = mixed(content ^ own ^ numbered(words[::2])).view(np.uint32)  # two of each
                    may = 0x000F000F | (0x80008000 if signs == 1 else 0)
                    words ^= drawn[: len(words)] & np.uint32(may)

    def digest_parts(self, buffer: Buffer, sums: Buffer, first: int, parts: int) -> None:
        words = buffer.of(np.uint32)
        of_words = mixed(words.astype(np.uint64) << np.uint64(32) ^ numbered(words))
        sums.of(np.uint64)[first] += of_words.sum(dtype=np.uint64)


class Session:
    gpu = FACTS
    stream = nullcontext()
    stream.ptr = 0
    free_bytes = 1 << 40

    def __init__(self, transport: HostShared) -> None:
        self._transport = transport

    def time_us(self, work: Any) -> float:
        before = self._transport.clock[0]
        work()
        return float(self._transport.clock[0] - before) + 5.0

    def capture(self, issue: Any) -> Any:
        return issue

    def synchronize(self) -> None:
        """What is enqueued has ended."""

    settle = synchronize


class Card:
    """See bench.caller_process.Card."""

    def __init__(self) -> None:
        self.transport = HostShared()
        self.session = Session(self.transport)
        capturing: list[Any] = []
        for name, fake in fakes_of(capturing).items():
            setattr(torch.cuda, name, fake)

        def graph_of(self: Any, issue: Any) -> Any:
            """Replays call Python anew, which lets a callable do more than a graph does."""
            capturing.append(None)
            try:
                made = issue()
            finally:
                capturing.pop()
            return issue, made

        BoundBaseline.graph_of = graph_of

    def comparer(self, dtype: str, cache_dir: object) -> Kernels:
        kernels.MEMORY.clear()
        kernels.WORK_US = self.transport.clock = self.transport.last
        return Kernels()

    def buffer(self, nbytes: int) -> Buffer:
        return Buffer(nbytes)
