"""Which kernel of flash_fwd_fp8_wgmma serves an FP8 shape."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from attnsweep.core.problem import SCALE_BLOCK, Problem

from .cost_model import octaves
from .served import FP8, refused_by
from .table import CompiledFp8Kernel, TunedFp8Gpu

BLOCK, HEADS, TENSOR = "e4m3_block", "e4m3", "e4m3_tensor"
"""Dtypes of a Problem: a scale of each SCALE_BLOCK keys, of each key head, of each tensor."""


class Choice(NamedTuple):
    """The kernel that serves a shape. code: a short name of the reason, of few."""

    kernel: CompiledFp8Kernel
    code: str
    reason: str


def choose(gpu: TunedFp8Gpu, problem: Problem) -> Choice | str:
    """The kernel for a shape, or why there is none.

    A tuned shape gets its winner. Any other gets the winner of the nearest shape of its head_dim,
    mask and kind of scales that the family's rules allow to run there, and if there is none, a
    spare kernel. Scales of heads and of tensors are of one kind: their machine code is the same.
    """
    kind = (problem.head_dim, problem.kind, problem.dtype == BLOCK)
    known = [winner for winner in gpu.winners if _kind(winner.kernel) == kind]
    if not known:
        tuned = sorted({_named(*_kind(winner.kernel)) for winner in gpu.winners})
        return f"no FP8 shape with {_named(*kind)} was tuned; the package has {'; '.join(tuned)}"
    near = sorted(
        (
            octaves(problem, winner.problem, gpu.key.sm_count),
            winner.problem.dtype != problem.dtype,
            number,
        )
        for number, winner in enumerate(known)
    )
    for _, _, number in near:
        winner = known[number]
        if replace(winner.problem, dtype=problem.dtype) == problem:
            return Choice(winner.kernel, "tuned", f"this shape was tuned, {winner.time_us:.4g} µs")

    def may_run(kernel: CompiledFp8Kernel) -> bool:
        return refused_by(FP8, kernel.values, problem, gpu.key.sm_count) is None

    for far, _, number in near:
        winner = known[number]
        if may_run(winner.kernel):
            why = (
                f"won {winner.problem.label}, the nearest whose kernel may run ({far:.1f} octaves)"
            )
            return Choice(winner.kernel, "near", why)
    for kernel in gpu.spare:
        if _kind(kernel) == kind and may_run(kernel):
            return Choice(kernel, "spare", "no winner may run here; this kernel was not timed")
    return f"no FP8 kernel of the package may run {problem.label}"


def _kind(kernel: CompiledFp8Kernel) -> tuple[int, str, bool]:
    return (kernel.head_dim, kernel.mask, kernel.scale_block > 0)


def _named(head_dim: int, mask: str, blocks: bool) -> str:
    by = f"each {SCALE_BLOCK} keys" if blocks else "tensors or heads"
    return f"head_dim {head_dim}, {mask}, scales of {by}"
