"""Compile every candidate of a spec without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attnsweep.compile.advice import spilling, unused_parameters
from attnsweep.compile.calls import builds_of, tracers_of, with_calls
from attnsweep.compile.candidate import Build, as_ready, compiled_row, workspace_limit
from attnsweep.compile.cubin import compiler_for
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.errors import NoGpuError, SpecError
from attnsweep.core.hardware import ARCHS, Arch, arch_named, arch_on
from attnsweep.core.observer import Observer
from attnsweep.core.trial import Status, Trial
from attnsweep.device.cards import installed_arch
from attnsweep.specs.load import SweepSpec
from attnsweep.specs.plan import candidate_counts, plan
from attnsweep.store.run import open_run
from attnsweep.tools.target import described


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while compiling. done: candidates of `total` whose machine code is in the cache."""

    def __init__(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        super().__init__()


def compile_all(
    spec: SweepSpec,
    arch: Arch,
    *,
    limit: int | None = None,
    cache_dir: Path | None = None,
    observer: Observer | None = None,
) -> list[Trial]:
    """Compile every candidate of a spec for `arch`, without a GPU: rows in order, without times.

    Status is ok, pruned (ptxas warnings, limits, requirements, does not fit an SM) or
    compile_error. The cubins stay in the cache, where a machine with a GPU finds them. Raises
    ToolchainError without NVRTC, or without nvdisasm if the spec has requirements that need it, and
    Interrupted for Ctrl-C.
    """
    observer = observer or Observer()
    with compiler_for(spec, arch, cache_dir) as compiler:
        return _compiled(with_calls(spec, tracers_of(compiler)), compiler, limit, observer)


def _compiled(
    spec: SweepSpec, compiler: Compiler, limit: int | None, observer: Observer
) -> list[Trial]:
    arch = compiler.arch
    planned = plan(spec, arch)
    cap = limit or spec.search.candidates
    counts = candidate_counts(planned, cap)
    observer.planned(counts, finals=False)
    for warning in unused_parameters((s for item in planned for s in item.spaces), arch):
        observer.note(warning)
    trials: list[Trial] = []
    asked: list[Build] = []
    try:
        for item in planned:
            builds = [
                build
                for space in item.spaces
                for build in builds_of(space, space.configs[:cap], compiler, workspace_limit(spec))
            ]
            asked += builds
            for build in builds:
                build.submit()
            observer.opening(item.problem, len(builds), 0)
            rows: dict[int, Trial] = {}
            for done, build in enumerate(as_ready(builds), 1):
                row = rows[id(build)] = compiled_row(build, spec)
                observer.compiled(done, len(builds))
                observer.tried(row)
            trials += [rows[id(build)] for build in builds]
    except KeyboardInterrupt:
        raise Interrupted(sum(build.compiled for build in asked), sum(counts)) from None
    spills = spilling(trials, spec)
    if spills is not None:
        observer.note(spills)
    return trials


def without_candidates(trials: Sequence[Trial]) -> list[str]:
    """Problems that the rows leave no candidate for: every one was pruned, or does not compile."""
    left: dict[str, bool] = {}
    for trial in trials:
        label = trial.problem.label
        left[label] = left.get(label, False) or trial.status is Status.OK
    return [label for label, any_left in left.items() if not any_left]


def target_arch(spec: SweepSpec, asked: str | None) -> Arch:
    """The architecture asked for, the spec's, the recording's, or the GPU's. Raises SpecError."""
    if asked is not None:
        return arch_named(asked)
    if spec.arch is not None:  # with the SMs of the card here, as a run would have them
        here = installed_arch()
        return here if here is not None and here.name == spec.arch else arch_named(spec.arch)
    if spec.recording is not None:
        environment = open_run(spec.recording).environment
        if environment is not None:
            return arch_on(environment)
    try:
        return arch_on(described())
    except NoGpuError as error:
        raise SpecError(
            "no architecture: the spec names none, and there is no GPU",
            hint=f"add --arch, one of {', '.join(ARCHS)}",
        ) from error
