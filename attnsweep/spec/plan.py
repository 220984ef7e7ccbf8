"""The spaces of a spec on an architecture: for each problem those of its families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnsweep.errors import SpaceError
from attnsweep.family.declare import Kernel
from attnsweep.family.space import Space
from attnsweep.hardware import Arch
from attnsweep.problem import Problem
from attnsweep.spec.load import SweepSpec


@dataclass(frozen=True, slots=True)
class PlannedProblem:
    """A problem, the space of each family that can run it, and why the others cannot."""

    problem: Problem
    spaces: tuple[Space, ...]
    refused: Mapping[str, str]


def plan(spec: SweepSpec, kernels: Mapping[str, Kernel], arch: Arch) -> tuple[PlannedProblem, ...]:
    """Every space of the spec on `arch`. Raises SpaceError if a problem has no candidate."""
    planned = []
    for entry in spec.problems:
        spaces, refused = [], {}
        for name in entry.kernels:
            reason = kernels[name].refusal(entry.problem, arch)
            if reason is not None:
                refused[name] = reason
                continue
            spaces.append(Space.build(kernels[name], entry.problem, arch, spec.kernels[name]))
        if not any(space.configs for space in spaces):
            raise SpaceError(
                f"no candidate is left for {entry.problem.label} on {arch.name}",
                hint="\n  ".join([*(f"{n}: {r}" for n, r in refused.items()), *_removals(spaces)]),
            )
        planned.append(PlannedProblem(entry.problem, tuple(spaces), refused))
    return tuple(planned)


def candidate_counts(planned: Sequence[PlannedProblem], cap: int | None) -> list[int]:
    """Number of candidates of each problem of a plan, at most `cap` of each family."""
    return [sum(len(space.configs[:cap]) for space in item.spaces) for item in planned]


def plan_facts(planned: Sequence[PlannedProblem], cap: int | None = None) -> list[dict[str, Any]]:
    """Per family and problem: counts of configs, candidates and removals, or why it cannot run."""
    return [
        {
            "problem": item.problem.label,
            "kernel": space.kernel.name,
            "configs": space.total,
            "candidates": len(space.configs[:cap]),
            "removed": space.removed,
        }
        for item in planned
        for space in item.spaces
    ] + [
        {"problem": item.problem.label, "kernel": name, "candidates": 0, "refused": reason}
        for item in planned
        for name, reason in item.refused.items()
    ]


def _removals(spaces: Sequence[Space]) -> Iterator[str]:
    for space in spaces:
        removed = ", ".join(f"{name} removed {n}" for name, n in space.removed.items() if n)
        removed += f" ({space.excess_text})" if space.excess else ""
        yield f"{space.kernel.name}: all {space.total} configs are ruled out: {removed}"
