"""Candidates: from a spec's spaces to compiled stages, as far as no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from attnsweep.build import numerics, sass
from attnsweep.build.cubin import check_arguments, compiler_warnings, resources
from attnsweep.build.launches import Candidate, CompiledStage, Launches
from attnsweep.build.nvrtc import Compiler, Cubin
from attnsweep.errors import CompileError, KernelError, SpaceError
from attnsweep.family.chunks import Schedule, schedule_of
from attnsweep.family.declare import Config, Kernel, Launch
from attnsweep.family.space import Space
from attnsweep.files import shipped
from attnsweep.hardware import Arch
from attnsweep.problem import Problem
from attnsweep.spec import require as policy
from attnsweep.spec.load import SweepSpec
from attnsweep.trial import Resources, Status, Trial

# The key of the empty kernel among a build's futures; no stage can be called so.
_EMPTY = ""


def empty_kernel() -> Path:
    """The template without a body, whose launches show what launching costs."""
    return shipped("kernels") / "common" / "empty.cu"


class Observer:
    """What a sweep tells whoever watches. Every method may be overridden; none needs to be."""

    def planned(self, candidates: int) -> None:
        """How many candidates there are in all, before anything is compiled."""

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        """A problem begins; `kept` of its candidates are done already."""

    def compiled(self, done: int, total: int) -> None:
        """Candidates of the open problem whose code is ready."""

    def tried(self, trial: Trial) -> None:
        """A candidate became a row."""

    def racing(self, alive: int, entrants: int) -> None:
        """A round of the race is over."""

    def timing(self, done: int, total: int) -> None:
        """Rounds of the finalists."""

    def note(self, text: str) -> None:
        """Something worth a line."""


@dataclass(frozen=True, slots=True)
class PlannedProblem:
    """A problem, the space of each family that can run it, and why the others cannot."""

    problem: Problem
    spaces: tuple[Space, ...]
    refused: Mapping[str, str]


def plan(spec: SweepSpec, kernels: Mapping[str, Kernel], arch: Arch) -> tuple[PlannedProblem, ...]:
    """Every space of the spec on `arch`. Raises SpaceError if a problem is left with none."""
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


def candidate_count(planned: Sequence[PlannedProblem], cap: int | None) -> int:
    """Candidates of a plan, at most `cap` of each family and problem."""
    spaces = (space for item in planned for space in item.spaces)
    return sum(len(space.configs[:cap]) for space in spaces)


def plan_facts(planned: Sequence[PlannedProblem], cap: int | None = None) -> list[dict[str, Any]]:
    """Of each family and problem: configs, candidates, what rules removed, or why it cannot run."""
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
        yield f"{space.kernel.name}: all {space.total} configs are ruled out: {removed}"


@dataclass
class Build:
    """One candidate on its way from Config to Candidate."""

    kernel: Kernel
    config: Config
    problem: Problem
    arch: Arch
    schedule: Schedule
    launches: Mapping[str, Launch]
    """Of one chunk, and so, unless the config or its workspace asks for several, of a call."""
    keys: tuple[str, ...]
    compiler: Compiler
    workspace_limit: int | None
    variant: Mapping[str, str]
    futures: dict[str, Future[Cubin]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        kernel: Kernel,
        config: Config,
        problem: Problem,
        compiler: Compiler,
        *,
        workspace_limit: int | None = None,
        variant: Mapping[str, str] | None = None,
    ) -> Build:
        """The stages of a config and their content addresses; nothing is compiled yet.

        workspace_limit: bytes above which a call is cut into chunks.
        """
        schedule = schedule_of(kernel, config, problem, workspace_limit)
        launches = kernel.launches(config, schedule.widest, compiler.arch)
        keys = tuple(
            compiler.key(
                kernel.source, kernel.stages[name].defines(config, schedule.widest, launch)
            )
            for name, launch in launches.items()
        )
        return cls(
            kernel,
            config,
            problem,
            compiler.arch,
            schedule,
            launches,
            keys,
            compiler,
            workspace_limit,
            variant or {},
        )

    def submit(self) -> None:
        """Begin to compile every stage."""
        for name, launch in self.launches.items():
            defines = self.kernel.stages[name].defines(self.config, self.schedule.widest, launch)
            self.futures[name] = self.compiler.submit(self.kernel.source, defines)
        self.futures[_EMPTY] = self.compiler.submit(empty_kernel(), {})

    @property
    def ready(self) -> bool:
        """Whether every stage is compiled, or failed to."""
        return all(future.done() for future in self.futures.values())

    @property
    def compiled(self) -> bool:
        """Whether every stage is compiled, none failed."""
        return self.ready and not any(f.exception() for f in self.futures.values())

    def cubins(self) -> dict[str, Cubin]:
        """Stage name to Cubin. Raises CompileError of the first stage that failed."""
        return {name: self.futures[name].result() for name in self.launches}

    def row(self, **facts: object) -> Trial:
        """The candidate's row."""
        return Trial.model_validate(
            {
                "kernel": self.kernel.name,
                "provider": "attnsweep",
                "config": dict(self.config),
                "problem": self.problem,
                "variant": dict(self.variant),
                **facts,
            }
        )

    def launches_for(self, problem: Problem) -> Launches:
        """The compiled stages launched on `problem`: the timed one, or a smaller one to check.

        Raises CompileError if a launch does not pass the arguments that its template takes.
        """
        schedule = schedule_of(self.kernel, self.config, problem, self.workspace_limit)
        cubins = self.cubins()
        stages = []
        begun = set()
        for piece in schedule.pieces:
            launches = self.kernel.launches(self.config, piece.problem, self.arch)
            for name, launch in launches.items():
                check_arguments(name, cubins[name], launch)
                # The first launch of a stream waits for an event, not for a launch.
                forked = schedule.streams > 1 and piece.stream not in begun
                begun.add(piece.stream)
                launch = replace(
                    launch,
                    defines={},
                    programmatic=launch.programmatic and not forked,
                    # The code's layout is that of the problem it was compiled for.
                    smem_bytes=max(launch.smem_bytes, self.launches[name].smem_bytes),
                )
                path = str(cubins[name].path)
                stages.append(CompiledStage(name, path, launch, piece.stream, piece.offsets))
        return Launches(
            problem, tuple(stages), schedule.workspaces, schedule.streams, schedule.eager
        )

    def candidate(self) -> Candidate:
        """What the worker needs. Every stage must be compiled."""
        cases = numerics.small_cases(self.problem)
        timed = self.launches_for(self.problem)
        return Candidate(
            self.kernel.name,
            dict(self.config),
            timed,
            tuple(self.launches_for(case.problem) for case in cases),
            self.kernel.rounds_scores,
            self._emptied(timed),
            self.kernel.deterministic,
        )

    def _emptied(self, launches: Launches) -> Launches:
        """The same launches of a kernel that does nothing: what they cost by themselves."""
        cubin = str(self.futures[_EMPTY].result().path)

        def emptied(stage: CompiledStage) -> CompiledStage:
            launch = replace(stage.launch, function="empty", args=())
            return replace(stage, cubin=cubin, launch=launch, offsets={})

        return replace(launches, stages=tuple(map(emptied, launches.stages)), workspaces={})

    def machine_code(self) -> tuple[object, ...]:
        """Equal for two candidates that run the same code in the same way."""
        cubins = self.cubins()
        code = tuple(
            (
                *(cubins[name].digest, launch.grid, launch.threads, launch.smem_bytes, launch.args),
                *(launch.programmatic, launch.carveout),
            )
            for name, launch in self.launches.items()
        )
        return code if self.schedule.whole else (*code, repr(self.schedule))


def as_ready(builds: Sequence[Build]) -> Iterator[Build]:
    """The builds in order of completion."""
    # Not by looking at all of them again for each one: at 582 builds that took 1.4 ms.
    news: SimpleQueue[Build] = SimpleQueue()
    for build in builds:
        for future in build.futures.values():
            future.add_done_callback(partial(_tell, news, build))
        if not build.futures:
            news.put(build)
    left = {id(build) for build in builds}
    while left:
        build = news.get()
        if id(build) in left and build.ready:
            left.remove(id(build))
            yield build


def _tell(news: SimpleQueue[Build], build: Build, _: Future[Cubin]) -> None:
    news.put(build)


def compiled_row(build: Build, spec: SweepSpec) -> Trial:
    """The row of a candidate as far as its compiled code decides: ok means worth running."""
    try:
        cubins = build.cubins()
        used = resources(
            [(name, cubins[name], launch) for name, launch in build.launches.items()], build.arch
        )
    except CompileError as error:
        return _uncompiled(build, error)
    if policy.needs_sass(spec.require):
        used = with_instructions(used, build)
    reason = _prune(build, cubins, used, spec)
    if reason is not None:
        return build.row(status=Status.PRUNED, detail=reason, resources=used)
    try:
        build.candidate()  # the declaration is asked about every shape to be checked
    except CompileError as error:
        return _uncompiled(build, error)
    except KernelError as error:
        return build.row(status=Status.LAUNCH_ERROR, detail=error.render(), resources=used)
    return build.row(status=Status.OK, resources=used, schedule=build.schedule.facts)


def _uncompiled(build: Build, error: CompileError) -> Trial:
    detail = f"{error.what}\n{error.log[:4000]}"
    return build.row(status=Status.COMPILE_ERROR, detail=detail)


def with_instructions(used: Resources, build: Build) -> Resources:
    """The same, each stage also with its instructions by kind. Raises ToolchainError."""
    cubins = build.cubins()
    stages = {
        name: stage | sass.counts(cubins[name])[build.launches[name].function]
        for name, stage in used.stages.items()
    }
    return used.model_copy(update={"stages": stages})


def compiler_for(spec: SweepSpec, arch: Arch, cache_dir: Path | None = None) -> Compiler:
    """A Compiler that also disassembles, in its threads, if the spec's `require` needs that.

    Raises ToolchainError before anything is compiled if a tool is missing.
    """
    if not policy.needs_sass(spec.require):
        return Compiler(arch, cache_dir)
    sass.nvdisasm()
    return Compiler(arch, cache_dir, after=sass.counts)


def _prune(
    build: Build,
    cubins: Mapping[str, Cubin],
    used: Resources,
    spec: SweepSpec,
) -> str | None:
    """Why a compiled candidate is not worth running, or None."""
    for cubin in cubins.values():
        for warning in compiler_warnings(cubin.log):
            return f"ptxas {warning}"
    limits = spec.limits
    if limits.spill_bytes is not None and used.spill_bytes > limits.spill_bytes:
        return f"spills {used.spill_bytes} bytes, the spec allows {limits.spill_bytes}"
    for name, stage in used.stages.items():
        if stage["blocks_per_sm"] < 1:
            return f"stage {name} does not fit an SM"
    broken = policy.broken(spec.require, used.stages)
    if broken is not None:
        return broken
    workspace, allowed = sum(build.schedule.workspaces.values()), build.workspace_limit
    if allowed is not None and workspace > allowed:
        return f"needs {workspace / 2**30:.1f} GiB of workspace, {allowed / 2**30:.1f} allowed"
    return None


def workspace_limit(spec: SweepSpec, memory_bytes: int | None = None) -> int | None:
    """Bytes of workspace that a candidate may use: the spec's limit, or a share of the memory."""
    if spec.limits.workspace_bytes is None and memory_bytes is not None:
        # Finalists keep theirs side by side, and inputs have copies for cold times.
        return memory_bytes // 4
    return spec.limits.workspace_bytes


def builds_of(
    space: Space,
    configs: Iterable[Config],
    compiler: Compiler,
    workspace_limit: int | None,
) -> list[Build]:
    """The builds of some of a space's configs."""
    return [
        Build.of(
            space.kernel,
            config,
            space.problem,
            compiler,
            workspace_limit=workspace_limit,
            variant=space.variants.get(config),
        )
        for config in configs
    ]


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
    ToolchainError without NVRTC, or without nvdisasm if the spec requires what only it tells.
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
