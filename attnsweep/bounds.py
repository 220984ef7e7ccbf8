"""How fast a chip allows a problem to be: the time each of its units needs at its peak rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from attnsweep.arch import Arch
from attnsweep.problem import Problem

# Tensor cores keep 11 bits of a factor, in TF32 and in fp16 (fp64 ones keep all, but are no faster
# than multiply-adds). Three of their products (high * high, high * low, low * high) give 22 bits
# of one of fp32, fewer only 11. Each is counted at the rate of fp16 and bf16, twice that of TF32:
# three of TF32 can be beaten, as flash_fwd_fp32_wgmma has the cross products of P V in bf16.
_PARTS = 3


class Chip(Protocol):
    """What a bound needs to know of a card; `Gpu` and `Environment` both have it."""

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

    matrix: both products at the dense fp16/bf16 tensor rate; of fp32 three such products for one,
    or fp32 multiply-adds at peak, whichever is faster.
    exp2: one per unmasked pair. memory: q, k, v, o moved once between device memory and the SMs.
    A unit whose rate the card does not tell is left out too.
    """
    clocks_per_us = gpu.sm_count * gpu.clock_hz / 1e6
    flops_per_clock: float = arch.tensor_flops_per_clock
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

    Device memory cannot bind a warm measurement whose tensors all fit in the L2: nothing need be
    read from it.
    """
    in_l2 = l2 == "warm" and problem.min_bytes <= l2_bytes
    open_to_it = {unit: us for unit, us in limits.items() if not (unit == "memory" and in_l2)}
    return max(open_to_it.items(), key=lambda item: item[1], default=None)
