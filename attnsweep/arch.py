"""Per-architecture limits and peaks. One row an architecture; everything else is derived.

Limits: CUDA C++ Programming Guide, table of technical specifications per compute capability.
Tensor rates: dense fp16/bf16 with fp32 accumulation, FLOP per clock per SM, from the vendor's
peak divided by SMs and boost clock (A100 312 TFLOP/s, L4 121, H100 989, B200 2250). Of TF32 it is
half as much on all of them (A100 156, L4 60, H100 495, B200 1125). fp32 multiply-adds: the same
guide, table of the throughput of arithmetic instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnsweep.errors import SpecError


@dataclass(frozen=True, slots=True)
class Arch:
    """What a block may use and what an SM can do. Sizes in bytes, rates per clock and SM."""

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

    def planned_blocks(self, threads: int, registers: int, smem_bytes: int) -> int:
        """Blocks of an SM to plan for before compiling, at least 1.

        registers: what the declaration reckons that a thread needs to run without spills. What
        the compiled code reaches is analysis.blocks_per_sm, and must not be less.
        """
        # Each quarter of an SM gives registers to whole warps.
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
        Arch("sm_80", (8, 0), 163 * _KB, 164 * _KB, 2048, 32, 2048, fma_per_clock=64),
        Arch("sm_86", (8, 6), 99 * _KB, 100 * _KB, 1536, 16, 1024),
        Arch("sm_89", (8, 9), 99 * _KB, 100 * _KB, 1536, 24, 1024),
        Arch("sm_90a", (9, 0), 227 * _KB, 228 * _KB, 2048, 32, 4096),
        Arch("sm_100a", (10, 0), 227 * _KB, 228 * _KB, 2048, 32, 8192),
        Arch("sm_103a", (10, 3), 227 * _KB, 228 * _KB, 2048, 32, 8192, exp2_per_clock=32),
        Arch("sm_120a", (12, 0), 99 * _KB, 100 * _KB, 1536, 24, 1024),
    )
}


def arch_named(name: str) -> Arch:
    """The row called `name`; `sm_90` is taken as `sm_90a`, since only `a` has every instruction."""
    found = ARCHS.get(name) or ARCHS.get(f"{name}a")
    if found is None:
        raise SpecError(f"unknown architecture {name!r}", hint=f"known: {', '.join(ARCHS)}")
    return found


def arch_of(compute_capability: tuple[int, int]) -> Arch | None:
    """The row for a GPU of that compute capability, or None if attnsweep does not know it."""
    for arch in ARCHS.values():
        if arch.compute_capability == compute_capability:
            return arch
    return None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card as its driver describes it. Enough to bound a problem's time."""

    name: str
    arch: str
    sm_count: int
    clock_hz: float
    memory_bytes: int
    memory_bytes_per_second: float
    l2_bytes: int
