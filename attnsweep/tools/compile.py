"""Compile every candidate of a spec without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attnsweep.build.candidate import builds_of, compiled_row, workspace_limit
from attnsweep.build.observer import Observer
from attnsweep.build.prune import compiler_for
from attnsweep.choose.queue import as_ready
from attnsweep.errors import NoGpuError, SpecError
from attnsweep.family.declare import Kernel
from attnsweep.gpu.worker import Worker
from attnsweep.hardware import ARCHS, Arch, arch_named
from attnsweep.spec.load import SweepSpec
from attnsweep.spec.plan import candidate_count, plan
from attnsweep.store.run import open_run
from attnsweep.trial import Status, Trial


def compile_all(
    spec: SweepSpec,
    kernels: Mapping[str, Kernel],
    arch: Arch,
    *,
    limit: int | None = None,
    cache_dir: Path | None = None,
    observer: Observer | None = None,
) -> list[Trial]:
    """Compile every candidate of a spec for `arch`, without a GPU. The rows have no times.

    Status is ok, pruned (ptxas warnings, limits, requirements, does not fit an SM) or
    compile_error. The cubins stay in the cache, where a machine with a GPU finds them. Raises
    ToolchainError without NVRTC, or without nvdisasm if the spec has requirements that need it.
    """
    observer = observer or Observer()
    planned = plan(spec, kernels, arch)
    cap = limit or spec.search.candidates
    observer.planned(candidate_count(planned, cap))
    compiler = compiler_for(spec, arch, cache_dir)
    trials = []
    try:
        for item in planned:
            builds = [
                build
                for space in item.spaces
                for build in builds_of(space, space.configs[:cap], compiler, workspace_limit(spec))
            ]
            for build in builds:
                build.submit()
            observer.opening(item.problem, len(builds), 0)
            for done, build in enumerate(as_ready(builds), 1):
                trials.append(compiled_row(build, spec))
                observer.compiled(done, len(builds))
                observer.tried(trials[-1])
    finally:
        compiler.close()
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
    if asked is not None or spec.arch is not None:
        return arch_named(asked or spec.arch or "")
    if spec.recording is not None:
        environment = open_run(spec.recording).environment
        if environment is not None:
            return arch_named(environment.arch)
    try:
        with Worker(timeout_s=60) as worker:
            return arch_named(worker.describe().arch)
    except NoGpuError as error:
        raise SpecError(
            "no architecture: the spec names none, and there is no GPU",
            hint=f"add --arch, one of {', '.join(ARCHS)}",
        ) from error
