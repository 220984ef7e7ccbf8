"""Chooses the kernel for a shape in FP8, where PyTorch has no attention."""

from __future__ import annotations

from dataclasses import replace

from attnsweep.core.problem import SCALE_BLOCK, Problem

from .cost_model import octaves
from .dispatch import Choice
from .families import FP8, kind_of_code, refused_by
from .table import CompiledKernel, TunedFp8Gpu


def choose_fp8(gpu: TunedFp8Gpu, problem: Problem) -> Choice:
    """The kernel for a shape, or why there is none.

    A tuned shape gets its winner. Any other gets the winner of the nearest shape of its head_dim,
    mask and kind of scales that the family's rules allow to run there, and if there is none, a
    spare kernel. Scales of heads and of tensors are of one kind: their machine code is the same.
    """
    code = kind_of_code(problem)
    known = [winner for winner in gpu.winners if winner.kernel.kind == code]
    if not known:
        tuned = "; ".join(sorted({_named(*winner.kernel.kind) for winner in gpu.winners}))
        why = f"no FP8 shape with {_named(*code)} was tuned; the package has {tuned}"
        return Choice(None, "not_tuned", why)
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

    def may_run(kernel: CompiledKernel) -> bool:
        return refused_by(FP8, kernel.values, problem, gpu.key.sm_count) is None

    for far, _, number in near:
        label, kernel = known[number].problem.label, known[number].kernel
        if may_run(kernel):
            why = f"won {label}, the nearest whose kernel may run ({far:.1f} octaves)"
            return Choice(kernel, "near", why)
    for kernel in gpu.spare:
        if kernel.kind == code and may_run(kernel):
            return Choice(kernel, "spare", "no winner may run here; this kernel was not timed")
    return Choice(None, "far", f"no FP8 kernel of the package may run {problem.label}")


def _named(head_dim: int, dtype: str, mask: str) -> str:
    by = f"each {SCALE_BLOCK} keys" if dtype == "e4m3_block" else "tensors or heads"
    return f"head_dim {head_dim}, {mask}, scales of {by}"
