"""Candidates on their way from a spec's spaces to compiled stages; needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from queue import SimpleQueue

from attnsweep.compile.cubin import check_arguments, resources, why_not, with_instructions
from attnsweep.compile.launches import Candidate, CompiledStage, LaunchPlan, Plan
from attnsweep.compile.nvrtc import NOW, Compiler, Cubin
from attnsweep.core import cases as verify_cases
from attnsweep.core.errors import CompileError, CompilerLost, KernelError, compiler_errors
from attnsweep.core.files import shipped
from attnsweep.core.hardware import Arch
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Status, Trial, key_of
from attnsweep.family.family import Config, Family, Launch, Schedule
from attnsweep.specs import require
from attnsweep.specs.load import SweepSpec

# Most characters of a compiler's log in a row.
LOG_LENGTH = 4000
# The key of the empty kernel among a build's futures; no stage can have this name.
_EMPTY = ""
# The template without a body, whose launches show what launching costs.
_EMPTY_SOURCE = "common/empty.cu"
# Most bytes of workspace on short turns, beside those of the timed problem.
_TURNS_BYTES = 2**28


@dataclass
class Build:
    """One candidate on its way from Config to Candidate."""

    kernel: Family
    config: Config
    problem: Problem
    compiler: Compiler
    workspace_limit: int | None = None
    """Bytes above which a call is cut into chunks."""
    variant: Mapping[str, str] = field(default_factory=dict)
    futures: dict[str, Future[Cubin]] = field(default_factory=dict, init=False)
    schedule: Schedule = field(init=False)
    launches: Mapping[str, Launch] = field(init=False)
    """Stage name to its launch of one chunk: of the whole call, if the call is not cut."""
    keys: tuple[str, ...] = field(init=False)
    """Content addresses of what is compiled."""

    def __post_init__(self) -> None:
        """Nothing is compiled yet."""
        self.schedule = self.kernel.schedule(self.config, self.problem, self.workspace_limit)
        self.launches = self.kernel.launches(self.config, self.schedule.widest, self.arch)
        self.keys = self._keys()

    def _keys(self) -> tuple[str, ...]:
        source = self.kernel.source
        return tuple(self.compiler.key(source, defines) for _, defines in self._defines())

    def _defines(self) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Name of each stage, and the macros that it is compiled with."""
        for name, launch in self.launches.items():
            stage = self.kernel.stages[name]
            yield name, stage.defines(self.config, self.schedule.widest, launch)

    @property
    def arch(self) -> Arch:
        """What it is compiled for."""
        return self.compiler.arch

    @property
    def key(self) -> tuple[object, ...]:
        """The key of its row: see Trial.key."""
        return key_of(self.problem, OURS, self.kernel.name, self.config)

    def submit(self, turn: int = NOW) -> None:
        """Start to compile every stage. turn: see Compiler.submit."""
        for name, defines in self._defines():
            self.futures[name] = self.compiler.submit(self.kernel.source, defines, turn)
        self.futures[_EMPTY] = self.compiler.submit(shipped("kernels") / _EMPTY_SOURCE, {}, turn)

    @property
    def launched(self) -> Mapping[str, Launch]:
        """Stage name to its launch of one chunk, once all are compiled."""
        return self.launches

    @property
    def facts(self) -> dict[str, object]:
        """Further fields of its row."""
        return {}

    @property
    def read_later(self) -> str:
        """Digest of files that its keys lack; empty for a template."""
        return ""

    @property
    def files(self) -> Mapping[str, bytes]:
        """The user's files of a call, from the directory that has all; none of a template."""
        return {}

    @property
    def ready(self) -> bool:
        """Whether the compilation of every stage has ended, in success or failure."""
        return all(future.done() for future in self.futures.values())

    @property
    def compiled(self) -> bool:
        """Whether every stage is compiled, and none failed."""
        return self.ready and not any(f.exception() for f in self.futures.values())

    def cubins(self) -> dict[str, Cubin]:
        """Stage name to Cubin. Raises the CompileError of the first stage that failed."""
        return {name: self.futures[name].result() for name in self.launches}

    def row(self, **facts: object) -> Trial:
        """The candidate's row."""
        return Trial.model_validate(
            {
                "kernel": self.kernel.name,
                "provider": OURS,
                "config": dict(self.config),
                "problem": self.problem,
                "variant": dict(self.variant),
                **facts,
            }
        )

    def launches_for(self, problem: Problem) -> Plan:
        """A call of the config on `problem`: the timed one, or a smaller one to check.

        Raises CompileError.
        """
        return self._launches_for(problem)

    def _launches_for(self, problem: Problem) -> LaunchPlan:
        """The compiled stages launched on `problem`: the timed one, or a smaller one to check.

        Raises CompileError if a launch's arguments do not match the parameters of its template.
        """
        schedule = self.kernel.schedule(self.config, problem, self.workspace_limit)
        cubins = self.cubins()
        stages: list[CompiledStage] = []
        begun = set()
        chains = False
        for piece in schedule.pieces:
            launches = self.kernel.launches(self.config, piece.problem, self.arch)
            for name, launch in launches.items():
                check_arguments(name, cubins[name], launch)
                # A call has ordinary dependencies on the call before it, as a baseline's call has.
                # On several streams, the first launch waits for an event anyway. What runs once
                # is no part of a call.
                first = (piece.stream, launch.once) not in begun
                chains = chains or (not stages and launch.programmatic and schedule.streams == 1)
                begun.add((piece.stream, launch.once))
                launch = replace(
                    launch,
                    defines={},
                    programmatic=launch.programmatic and not first,
                    # The compiled problem determines the layout in shared memory.
                    smem_bytes=max(launch.smem_bytes, self.launches[name].smem_bytes),
                )
                path = str(cubins[name].path)
                stages.append(CompiledStage(name, path, launch, piece.stream, piece.offsets))
        return LaunchPlan(
            problem,
            tuple(stages),
            schedule.workspaces,
            schedule.streams,
            schedule.eager,
            chains=chains and not schedule.eager,
            lse=schedule.whole and bool(self.kernel.lse and self.config[self.kernel.lse]),
            turned=self.kernel.turned,
        )

    def candidate(self) -> Candidate:
        """All that the worker needs to run it. Every stage must be compiled."""
        return self._candidate

    @cached_property  # a finalist is sent again, and making one takes milliseconds
    def _candidate(self) -> Candidate:
        cases, serves = verify_cases.small_cases(self.problem), self.kernel.serves
        if own := bool(self.kernel.supports):
            cases = verify_cases.served_cases(cases, self.problem, serves)
        timed = self._launches_for(self.problem)
        return Candidate(
            self.kernel.name,
            dict(self.config),
            timed,
            tuple(self._launches_for(case.problem) for case in cases),
            self.kernel.rounds_scores,
            self._emptied(timed),
            self.kernel.is_deterministic(self.config),
            self._turns(),
            cases if own else None,
        )

    def _turns(self) -> LaunchPlan | None:
        """The stages on many short turns, or None where one launch of each cannot take them."""
        case = verify_cases.short_turns(self.problem, self.arch.sm_count)
        if case is not None and self.kernel.supports:
            served = verify_cases.served_cases([case], self.problem, self.kernel.serves)
            case = next(iter(served), None)
        if case is None:
            return None
        problem = case.problem
        try:
            schedule = self.kernel.schedule(self.config, problem, self.workspace_limit)
            if len(schedule.pieces) > 1 or sum(schedule.workspaces.values()) > _TURNS_BYTES:
                return None
            if self.kernel.excess(self.config, problem, self.arch) is not None:
                return None
            return self._launches_for(problem)
        except KernelError:  # the declaration refuses the shape, as it may
            return None

    def _emptied(self, launches: LaunchPlan) -> LaunchPlan:
        """The same launches with an empty kernel: they show what launching costs."""
        cubin = str(self.futures[_EMPTY].result().path)

        def emptied(stage: CompiledStage) -> CompiledStage:
            launch = replace(stage.launch, function="empty", args=())
            return replace(stage, cubin=cubin, launch=launch, offsets={})

        stages = tuple(map(emptied, launches.stages))
        return replace(launches, stages=stages, workspaces={}, turned=False)

    def machine_code(self) -> tuple[object, ...]:
        """A key that two candidates share if their machine code and launches are the same."""
        cubins = self.cubins()
        code = tuple(
            (
                *(cubins[name].digest, launch.grid, launch.threads, launch.smem_bytes, launch.args),
                *(launch.programmatic, launch.carveout),
            )
            for name, launch in self.launches.items()
        )
        return code if self.schedule.whole else (*code, repr(self.schedule))


def compiled_row(build: Build, spec: SweepSpec) -> Trial:
    """The candidate's row after compiling; status ok means that it is worth running."""
    return compiled_candidate(build, spec)[0]


def compiled_candidate(build: Build, spec: SweepSpec) -> tuple[Trial, Candidate | None]:
    """The row of `compiled_row`, and the candidate itself if that row is ok."""
    try:
        cubins = build.cubins()
        stages = [(name, cubins[name], launch) for name, launch in build.launched.items()]
        used = resources(stages, build.arch) if stages else None
    except CompileError as error:
        return _uncompiled(build, error), None
    if used is not None and require.needs_sass(spec.require):
        used = with_instructions(used, cubins, build.launched)
    reason = used and why_not(
        cubins,
        used,
        spec,
        workspace_bytes=sum(build.schedule.workspaces.values()),
        allowed_bytes=build.workspace_limit,
        as_written=not build.kernel.call,
    )
    if reason:
        return build.row(status=Status.PRUNED, detail=reason, resources=used), None
    try:
        candidate = build.candidate()  # asks for the launches of each checked shape
    except CompileError as error:
        return _uncompiled(build, error), None
    except KernelError as error:
        row = build.row(status=Status.LAUNCH_ERROR, detail=error.render(), resources=used)
        return row, None
    return build.row(
        status=Status.OK, resources=used, schedule=build.schedule.facts, **build.facts
    ), candidate


def _uncompiled(build: Build, error: CompileError) -> Trial:
    detail = f"{error.what}\n{shortened(error.log)}"
    # A resumed run tries it again: see Kept.rows.
    lost = {"compiler_lost": True} if isinstance(error, CompilerLost) else {}
    return build.row(status=Status.COMPILE_ERROR, detail=detail, conditions=lost)


def shortened(log: str) -> str:
    """The log if a row can hold it; otherwise as many whole errors as fit, and how many do not."""
    errors = compiler_errors(log)
    if len(log) <= LOG_LENGTH or not errors:
        return log[:LOG_LENGTH]
    kept: list[str] = []
    length = 0
    for text in errors:
        length += len(text) + 2
        if kept and length > LOG_LENGTH:
            break
        kept.append(text)
    rest = len(errors) - len(kept)
    return "\n\n".join([*kept, *([f"and {rest} more errors"] if rest else [])])


def workspace_limit(spec: SweepSpec, memory_bytes: int | None = None) -> int | None:
    """Bytes of workspace that a candidate may use: the spec's limit, or a quarter of the memory."""
    if spec.limits.workspace_bytes is None and memory_bytes is not None:
        # All finalists hold theirs at the same time, and inputs have copies for cold times.
        return memory_bytes // 4
    return spec.limits.workspace_bytes


def as_ready(builds: Sequence[Build]) -> Iterator[Build]:
    """The builds in order of completion."""
    # Checking all builds again for each one took 1.4 ms at 582 builds.
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
