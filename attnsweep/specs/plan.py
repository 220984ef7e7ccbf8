"""The spaces of a spec on an architecture: for each problem those of its families."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnsweep.core.errors import NoGpuError, SpaceError, SpecError
from attnsweep.core.hardware import Arch, arch_on
from attnsweep.core.long_problems import is_long
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment
from attnsweep.family.space import Space
from attnsweep.specs.load import ProblemEntry, SweepSpec


@dataclass(frozen=True, slots=True)
class PlannedProblem:
    """A problem, the space of each family that can run it, and why the others cannot."""

    problem: Problem
    spaces: tuple[Space, ...]
    refused: Mapping[str, str]


def plan(spec: SweepSpec, arch: Arch) -> tuple[PlannedProblem, ...]:
    """Every space of the spec on `arch`. Raises SpaceError if a problem has no candidate."""
    planned = []
    for entry in spec.problems:
        spaces, refused = [], {}
        for name in entry.kernels:
            kernel = spec.families[spec.family_of(name)]
            reason = kernel.refusal(entry.problem, arch)
            op = entry.problem.op
            if reason is None and is_long(entry.problem) and not op.sampled:
                reason = f"a {op.name} of 2e13 FLOPs or more cannot be proved"
            if reason is not None:
                refused[kernel.name] = reason
                continue
            try:
                spaces.append(Space.build(kernel, entry.problem, arch, spec.kernels[name]))
            except SpaceError as error:  # too many combinations
                where = spec.document.where(spec.document.keys.get(("kernels", name)))
                raise SpaceError(error.what, where=where, hint=error.hint) from error
        if not any(space.configs for space in spaces):
            where, why = _blamed(spec, entry, arch)
            reasons = [f"{n}: {r}" for n, r in refused.items()]
            raise SpaceError(
                f"no candidate is left for {entry.problem.label} on {arch.name}",
                where=where,
                hint="\n  ".join([*why, *reasons, *_removals(spaces)]),
            )
        planned.append(PlannedProblem(entry.problem, tuple(spaces), refused))
    return tuple(planned)


def _blamed(spec: SweepSpec, entry: ProblemEntry, arch: Arch) -> tuple[str, list[str]]:
    """The place of the values without which some would be left, and how many; or of the entry."""
    document = spec.document
    for name in entry.kernels:
        selection, family = spec.kernels[name], spec.families[spec.family_of(name)]
        if family.refusal(entry.problem, arch):
            continue
        for parameter in selection.values:
            others = {n: v for n, v in selection.values.items() if n != parameter}
            space = Space.build(family, entry.problem, arch, replace(selection, values=others))
            if space.configs:
                place = document.where(document.at("kernels", name, parameter))
                left = f"{len(space.configs)} candidate{'s' * (len(space.configs) != 1)}"
                return place, [f"with the family's own values of {parameter}, {left}"]
    return document.where(entry.mark), []


def refuse_too_large(problems: Iterable[Problem], card: Environment) -> None:
    """Raise NoGpuError if the tensors of a problem do not fit the memory of this card."""
    for problem in problems:
        if problem.tensor_bytes > 0.9 * card.memory_bytes:
            raise NoGpuError(
                f"{problem.label}: its tensors need {problem.tensor_bytes / 2**30:.1f} GiB, "
                f"{card.gpu} has {card.memory_bytes / 2**30:.1f}",
                hint="make the problem smaller",
            )


def candidate_counts(planned: Sequence[PlannedProblem], cap: int | None) -> list[int]:
    """Number of candidates of each problem of a plan, at most `cap` of each family."""
    return [sum(len(space.configs[:cap]) for space in item.spaces) for item in planned]


def cost(item: PlannedProblem) -> float:
    """An estimate of the time that a problem takes, without a unit.

    A candidate costs one, and one more for every 5e11 FLOPs, which take a Hopper GPU about a
    millisecond.
    """
    return sum(len(space.configs) for space in item.spaces) * (1 + item.problem.flops / 5e11)


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `number` of `of` equal parts of a spec's problems, counted from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`2/4`. Raises SpecError."""
        found = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text)
        number, of = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= of:
            hint = "write i/n with 1 <= i <= n: --shard 2/4 is the second of four parts"
            raise SpecError(f"not a part: {text!r}", where="--shard", hint=hint)
        return cls(number, of)

    def __str__(self) -> str:
        return f"{self.number}of{self.of}"

    def take(self, planned: Sequence[PlannedProblem]) -> tuple[PlannedProblem, ...]:
        """This part of a plan, in the spec's order; every problem is in exactly one part.

        Problems go to the part with the least cost so far, the costliest first. Raises
        SpecError if nothing is left for this part.
        """
        if self.number > len(planned):
            problems = f"{len(planned)} problem{'s' * (len(planned) != 1)}"
            raise SpecError(
                f"part {self.number} of {self.of} is empty: the spec has {problems}",
                where="--shard",
                hint=f"split it into at most {len(planned)} part{'s' * (len(planned) != 1)}",
            )
        costs = [cost(item) for item in planned]
        load, mine = [0.0] * self.of, []
        for index in sorted(range(len(planned)), key=lambda index: (-costs[index], index)):
            part = min(range(self.of), key=lambda part: (load[part], part))
            load[part] += costs[index]
            mine += [index] if part == self.number - 1 else []
        return tuple(planned[index] for index in sorted(mine))


def run_name(spec: SweepSpec, shard: Shard | None) -> str:
    """The directory of a run: the spec's name, and which part of it was swept."""
    return spec.name if shard is None else f"{spec.name}-{shard}"


def plan_facts(planned: Sequence[PlannedProblem], cap: int | None = None) -> list[dict[str, Any]]:
    """Per family and problem: counts of configs, candidates and removals, or why it cannot run."""
    return [
        {
            "problem": item.problem.label,
            "kernel": space.kernel.name,
            "configs": space.total,
            "candidates": len(space.configs[:cap]),
            "removed": {rule: n for rule, n in space.removed.items() if n},
        }
        | ({"serves": space.kernel.served_text} if space.kernel.served_text else {})
        for item in planned
        for space in item.spaces
    ] + [
        {"problem": item.problem.label, "kernel": name, "candidates": 0, "refused": reason}
        for item in planned
        for name, reason in item.refused.items()
    ]


def _removals(spaces: Sequence[Space]) -> Iterator[str]:
    """For each space a line of what removed its configs, and the sentence of each such rule."""
    for space in spaces:
        removed = ", ".join(f"{name} removed {n}" for name, n in space.removed.items() if n)
        removed += f" ({space.excess_text})" if space.excess else ""
        whole = f"all {space.total} configs are" if space.total > 1 else "its only config is"
        yield f"{space.kernel.name}: {whole} ruled out: {removed}"
        for name, (sentence, _) in space.kernel.rules.items():
            if space.removed.get(name):
                yield f"  {name}: {sentence}"


def arch_of(spec: SweepSpec, environment: Environment) -> Arch:
    """The architecture of this GPU. Raises NoGpuError if the spec is for another one."""
    if spec.arch is not None and spec.arch != environment.arch:
        raise NoGpuError(
            f"the spec is for {spec.arch}, this machine's {environment.gpu} is {environment.arch}",
            hint=f"use a spec for {environment.arch}, or drop `arch:` to use this GPU's",
        )
    return arch_on(environment)


def input_seed(spec: SweepSpec) -> int:
    """The spec's seed of the inputs, or one drawn now."""
    asked = spec.measure.input_seed
    return secrets.randbelow(2**32) if asked is None else asked
