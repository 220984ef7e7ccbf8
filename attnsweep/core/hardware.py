"""Architectures, cards, and lower bounds on the time of a problem.

Each architecture is one row; everything else is derived.

Limits: CUDA C++ Programming Guide, table of technical specifications per compute capability. Tensor
rates: dense fp16/bf16 with fp32 accumulation, FLOP per clock per SM, from the vendor's peak divided
by SMs and boost clock (A100 312 TFLOP/s, L4 121, H100 989, B200 2250). The TF32 rate is half of
that on all of them (A100 156, L4 60, H100 495, B200 1125). fp32 multiply-adds: the same guide,
table of the throughput of arithmetic instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from attnsweep.core.errors import SpecError
from attnsweep.core.problem import Problem


@dataclass(frozen=True, slots=True)
class Arch:
    """Limits of a block and rates of an SM. Sizes in bytes, rates per clock and SM."""

    name: str
    compute_capability: tuple[int, int]
    smem_per_block: int
    smem_per_sm: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    tensor_flops_per_clock: int
    exp2_per_clock: int = 16
    fma_per_clock: int = 128
    registers_per_sm: int = 65536
    smem_reserved_per_block: int = 1024
    max_threads_per_block: int = 1024
    sm_count: int = 0
    """SMs of the card that is planned for; without one, of the largest common card."""

    def planned_blocks(self, threads: int, registers: int, smem_bytes: int) -> int:
        """Blocks per SM to plan for before compiling, at least 1.

        registers: registers that a thread needs to run without spills, as the declaration estimates
        them. The compiled code must reach at least this many blocks, as
        compile.cubin.residency counts them.
        """
        # Each quarter of an SM allots registers to whole warps.
        warps = 4 * (self.registers_per_sm // 4 // (32 * min(registers, 255)))
        return max(
            1,
            min(
                warps * 32 // threads,
                self.smem_per_sm // (smem_bytes + self.smem_reserved_per_block),
                self.max_threads_per_sm // threads,
                self.max_blocks_per_sm,
            ),
        )


_KB = 1024
ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("sm_80", (8, 0), 163 * _KB, 164 * _KB, 2048, 32, 2048, fma_per_clock=64, sm_count=108),
        Arch("sm_86", (8, 6), 99 * _KB, 100 * _KB, 1536, 16, 1024, sm_count=84),
        Arch("sm_89", (8, 9), 99 * _KB, 100 * _KB, 1536, 24, 1024, sm_count=58),
        Arch("sm_90a", (9, 0), 227 * _KB, 228 * _KB, 2048, 32, 4096, sm_count=132),
        Arch("sm_100a", (10, 0), 227 * _KB, 228 * _KB, 2048, 32, 8192, sm_count=148),
        Arch(
            *("sm_103a", (10, 3), 227 * _KB, 228 * _KB, 2048, 32, 8192),
            exp2_per_clock=32,
            sm_count=148,
        ),
        Arch("sm_120a", (12, 0), 99 * _KB, 100 * _KB, 1536, 24, 1024, sm_count=170),
    )
}


def arch_named(name: str) -> Arch:
    """The architecture called `name`; `sm_90` means `sm_90a`, as only `a` has every instruction."""
    found = ARCHS.get(name) or ARCHS.get(f"{name}a")
    if found is None:
        raise SpecError(f"unknown architecture {name!r}", hint=f"known: {', '.join(ARCHS)}")
    return found


def arch_of(compute_capability: tuple[int, int]) -> Arch | None:
    """The architecture of a GPU with that compute capability, or None if attnsweep has none."""
    for arch in ARCHS.values():
        if arch.compute_capability == compute_capability:
            return arch
    return None


class Described(Protocol):
    """A card that says what it is; `CardFacts` and `Environment` both do."""

    @property
    def arch(self) -> str:
        """Name of its architecture."""

    @property
    def sm_count(self) -> int:
        """Streaming multiprocessors."""


def arch_on(card: Described) -> Arch:
    """The architecture of a card, with the card's own number of SMs. Raises SpecError."""
    return replace(arch_named(card.arch), sm_count=card.sm_count)


@dataclass(frozen=True, slots=True)
class CardFacts:
    """One GPU as its driver describes it, with enough to bound a problem's time."""

    name: str
    arch: str
    sm_count: int
    clock_hz: float
    memory_bytes: int
    memory_bytes_per_second: float
    l2_bytes: int


# A tensor core keeps 11 bits of each factor, in TF32 and in fp16. (fp64 tensor cores keep all bits,
# but are no faster than multiply-adds.) An fp32 product with 22 bits takes three tensor-core
# products: high * high, high * low and low * high; fewer give only 11 bits. Each counts at the rate
# of fp16 and bf16, twice that of TF32, because three TF32 products are no lower bound:
# flash_fwd_fp32_wgmma computes the cross products of P V in bf16.
_PARTS = 3


class Chip(Protocol):
    """Facts of a card that a bound needs; `CardFacts` and `Environment` both have them."""

    @property
    def sm_count(self) -> int:
        """Streaming multiprocessors."""

    @property
    def clock_hz(self) -> float:
        """Boost clock of the SMs."""

    @property
    def memory_bytes_per_second(self) -> float:
        """Peak rate of device memory."""


def bounds(problem: Problem, arch: Arch, gpu: Chip) -> dict[str, float]:
    """Microseconds that each unit needs at least: `matrix`, `exp2` and `memory`.

    matrix: both products at the dense fp16/bf16 tensor rate, in FP8 at twice that. An fp32 product
    counts as three such products, or as fp32 multiply-adds at peak, whichever is faster.

    exp2: one per unmasked pair. memory: inputs and o moved once between device memory and the SMs.
    The result leaves out a unit whose rate the card does not report.
    """
    clocks_per_us = gpu.sm_count * gpu.clock_hz / 1e6
    flops_per_clock: float = arch.tensor_flops_per_clock * problem.format.tensor_rate
    if problem.dtype == "fp32":
        flops_per_clock = max(2 * arch.fma_per_clock, flops_per_clock / _PARTS)
    rates = {
        "matrix": (problem.flops, flops_per_clock * clocks_per_us),
        "exp2": (problem.pairs, arch.exp2_per_clock * clocks_per_us),
        "memory": (problem.min_bytes, gpu.memory_bytes_per_second / 1e6),
    }
    return {unit: work / per_us for unit, (work, per_us) in rates.items() if per_us > 0}


def binding(
    limits: Mapping[str, float], problem: Problem, *, l2_bytes: int, l2: str = "warm"
) -> tuple[str, float] | None:
    """The unit that binds and its microseconds, or None if that is not known.

    A warm measurement whose tensors all fit in L2 reads nothing from device memory, so device
    memory cannot bind it.
    """
    in_l2 = l2 == "warm" and problem.min_bytes <= l2_bytes
    open_to_it = {unit: us for unit, us in limits.items() if not (unit == "memory" and in_l2)}
    return max(open_to_it.items(), key=lambda item: item[1], default=None)
