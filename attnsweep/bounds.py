"""How fast a chip allows a problem to be: the time each of its units needs at its peak rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from attnsweep.arch import Arch
from attnsweep.problem import Problem


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

    matrix: both products at the dense fp16/bf16 tensor rate; fp32 has none, so it is left out.
    exp2: one per unmasked pair. memory: q, k, v, o moved once between device memory and the SMs.
    A unit whose rate the card does not tell is left out too.
    """
    clocks_per_us = gpu.sm_count * gpu.clock_hz / 1e6
    rates = {
        "matrix": (problem.flops, arch.tensor_flops_per_clock * clocks_per_us),
        "exp2": (problem.pairs, arch.exp2_per_clock * clocks_per_us),
        "memory": (problem.min_bytes, gpu.memory_bytes_per_second / 1e6),
    }
    if problem.dtype == "fp32":
        del rates["matrix"]
    return {unit: work / per_us for unit, (work, per_us) in rates.items() if per_us > 0}


def binding(
    limits: Mapping[str, float], problem: Problem, *, l2_bytes: int, l2: str = "warm"
) -> tuple[str, float] | None:
    """The unit that binds and its microseconds, or None if that is not known.

    Device memory cannot bind a warm measurement whose tensors all fit in the L2: nothing need be
    read from it. Without a matrix rate (fp32) only memory is worth calling a bound, since the
    products would take far longer than exp2 does.
    """
    in_l2 = l2 == "warm" and problem.min_bytes <= l2_bytes
    open_to_it = {unit: us for unit, us in limits.items() if not (unit == "memory" and in_l2)}
    if "matrix" not in open_to_it:
        open_to_it.pop("exp2", None)
    return max(open_to_it.items(), key=lambda item: item[1], default=None)
