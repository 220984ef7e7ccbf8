"""Before the first problem: the card, the plan, and the first candidates already compiling."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from attnsweep.choose.energy import refuse_without_counter
from attnsweep.choose.search import search_of
from attnsweep.compile.candidate import Build, builds_of, workspace_limit
from attnsweep.compile.cubin import compiler_for
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.errors import AttnsweepError
from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment
from attnsweep.device.cards import installed_arch
from attnsweep.family.family import Kernel
from attnsweep.specs.load import SweepSpec
from attnsweep.specs.plan import PlannedProblem, Shard, arch_of, plan, refuse_too_large
from attnsweep.verify.compare import judge_source

# Candidates to compile while the GPU process starts, which takes 1.5 s.
_EARLY = 64
Planned = tuple[Sequence[PlannedProblem], Compiler]


class Describes(Protocol):
    """The part of a Gpu that says what it is."""

    def describe(
        self, *, preload: Sequence[str] = (), first: tuple[Problem, int] | None = None
    ) -> Environment:
        """See Gpu."""


def start(
    spec: SweepSpec,
    kernels: Mapping[str, Kernel],
    gpu: Describes,
    cache_dir: Path | None,
    at_end: ExitStack,
    seed: int | None = None,
    *,
    shard: Shard | None = None,
    firsts: Sequence[Problem] = (),
) -> tuple[Environment, Sequence[PlannedProblem], Compiler]:
    """Describe the GPU and plan the sweep on it.

    at_end: closes the compiler. seed: of the inputs with which this GPU opens the first problem.
    shard: plan this part of the problems alone. firsts: the problems whose candidates are needed
    first (default: the first one).

    Raises NoGpuError, SpaceError, SpecError or ToolchainError.
    """
    with ThreadPoolExecutor(1) as aside:
        first = None
        if seed is not None and shard is None:  # only the plan says which problems a part has
            first = spec.problems[0].problem, seed
        described = aside.submit(gpu.describe, preload=spec.baselines, first=first)
        # In this thread, where a rule that never returns meets its time limit, or Ctrl-C.
        begun = _compile_early(spec, kernels, cache_dir, at_end, shard, firsts)
    environment = described.result()
    arch = arch_of(spec, environment)
    refuse_too_large((entry.problem for entry in spec.problems), environment)
    refuse_without_counter(environment, spec.measure.rank_by)
    if begun is None or begun[1].arch != arch:
        begun = _planned(spec, kernels, arch, cache_dir, at_end, shard)
    return environment, *begun


def _planned(
    spec: SweepSpec,
    kernels: Mapping[str, Kernel],
    arch: Arch,
    cache_dir: Path | None,
    at_end: ExitStack,
    shard: Shard | None,
) -> Planned:
    planned = plan(spec, kernels, arch)
    planned = planned if shard is None else shard.take(planned)
    compiler = compiler_for(spec, arch, cache_dir)
    at_end.callback(compiler.close)
    return planned, compiler


def _compile_early(
    spec: SweepSpec,
    kernels: Mapping[str, Kernel],
    cache_dir: Path | None,
    at_end: ExitStack,
    shard: Shard | None,
    firsts: Sequence[Problem],
) -> Planned | None:
    """The plan for the card that NVML reports, with the first candidates compiling.

    None if NVML reports no card, the spec is for another card, or the plan fails; the main path
    then fails again and reports it.
    """
    arch = installed_arch()
    if arch is None or spec.arch not in (None, arch.name):
        return None
    try:
        planned, compiler = _planned(spec, kernels, arch, cache_dir, at_end, shard)
        for dtype in {entry.problem.dtype for entry in spec.problems}:
            compiler.submit(*judge_source(dtype))  # the GPU process needs it first
        asked = []
        for item in [item for item in planned if item.problem in firsts] or planned[:1]:
            for space in item.spaces:
                configs = itertools.islice(iter(search_of(spec, space).ask, None), _EARLY)
                asked.append(builds_of(space, configs, compiler, workspace_limit(spec)))
        for build in in_turns(asked):
            build.submit()
    except AttnsweepError:
        return None
    return planned, compiler


def in_turns(groups: Iterable[Iterable[Build]]) -> Iterator[Build]:
    """The first of every group, then the second of every group, and so on."""
    for builds in itertools.zip_longest(*groups):
        yield from filter(None, builds)
