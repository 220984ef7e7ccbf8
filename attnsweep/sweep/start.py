"""Before the first problem: the card, the plan, and the first candidates already compiling."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

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
from attnsweep.specs.load import SweepSpec
from attnsweep.specs.plan import PlannedProblem, Shard, arch_of, plan, refuse_too_large
from attnsweep.verify.compare import judge_source

# Candidates to compile while the GPU process starts, which takes 1.5 s.
_EARLY = 64
Planned = tuple[Sequence[PlannedProblem], Compiler]


def start(
    spec: SweepSpec,
    describe: Callable[[], Environment],
    at_end: ExitStack,
    cache_dir: Path | None,
    shard: Shard | None,
    firsts: Sequence[Problem],
) -> tuple[Environment, Sequence[PlannedProblem], Compiler]:
    """Describe the GPU and plan the sweep on it.

    at_end: closes the compiler. shard: plan this part of the problems alone. firsts: the problems
    whose candidates are needed first (default: the first one). Raises NoGpuError, SpaceError,
    SpecError or ToolchainError.
    """

    def planned(arch: Arch) -> Planned:
        whole = plan(spec, arch)
        compiler = compiler_for(spec, arch, cache_dir)
        at_end.callback(compiler.close)
        return whole if shard is None else shard.take(whole), compiler

    with ThreadPoolExecutor(1) as aside:
        described = aside.submit(describe)
        # In this thread, where a rule that never returns meets its time limit, or Ctrl-C.
        early = installed_arch()
        begun = None
        if early is not None and spec.arch in (None, early.name):
            with suppress(AttnsweepError):  # below it is raised again, unless there is no such card
                begun = planned(early)
                _compile_early(spec, *begun, firsts)
    environment = described.result()
    arch = arch_of(spec, environment)
    refuse_too_large((entry.problem for entry in spec.problems), environment)
    refuse_without_counter(environment, spec.measure.rank_by)
    if begun is None or begun[1].arch != arch:
        begun = planned(arch)
    return environment, *begun


def _compile_early(
    spec: SweepSpec,
    planned: Sequence[PlannedProblem],
    compiler: Compiler,
    firsts: Sequence[Problem],
) -> None:
    """Begin to compile the first candidates, while the card starts."""
    for dtype in {entry.problem.dtype for entry in spec.problems}:
        compiler.submit(*judge_source(dtype))  # the GPU process needs it first
    asked = []
    for item in [item for item in planned if item.problem in firsts] or planned[:1]:
        for space in item.spaces:
            configs = itertools.islice(iter(search_of(spec, space).ask, None), _EARLY)
            asked.append(builds_of(space, configs, compiler, workspace_limit(spec)))
    for build in in_turns(asked):
        build.submit()


def in_turns(groups: Iterable[Iterable[Build]]) -> Iterator[Build]:
    """The first of every group, then the second of every group, and so on."""
    for builds in itertools.zip_longest(*groups):
        yield from filter(None, builds)
