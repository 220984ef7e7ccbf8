"""The loop: spec to Space, Config to Cubin, Accuracy, Measurement, Trial, store.

Compiling runs ahead in threads while the worker process checks and times what is ready. Every
candidate and baseline ends as a row, written the moment it is known; nothing here ends the sweep
but the user.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from attnsweep.build.candidate import (
    Build,
    Observer,
    PlannedProblem,
    as_ready,
    builds_of,
    candidate_count,
    compiled_row,
    compiler_for,
    plan,
    plan_facts,
    workspace_limit,
)
from attnsweep.build.nvrtc import Compiler
from attnsweep.choose.finals import Rounds, race_entry
from attnsweep.choose.ranking import OURS, rank, winners
from attnsweep.choose.search import Search, search_of
from attnsweep.choose.skips import Skips
from attnsweep.errors import AttnsweepError, NoGpuError, SpecError, StoreError
from attnsweep.family.chunks import MODES
from attnsweep.family.declare import Kernel
from attnsweep.gpu.worker import Worker, WorkerError, installed_arch
from attnsweep.hardware import ARCHS, Arch, arch_named
from attnsweep.problem import Problem
from attnsweep.replay import replay
from attnsweep.show import tables as report
from attnsweep.spec.load import SweepSpec
from attnsweep.store.code import keep_code, read_code
from attnsweep.store.run import TRIALS, Run, Store, open_run
from attnsweep.trial import Environment, Measurement, Status, Trial

# Raise it when a change of checking or timing makes older rows incomparable: they are then redone.
PROTOCOL = 3
# Candidates asked for ahead of their turn. Between two lots all cores wait for the slowest one.
_LOOKAHEAD = 2048
# The same where time is short: what was asked for is compiled, even if it is not tried any more.
_LOOKAHEAD_IN_TIME = 64
# Candidates that are compiled while the GPU process starts, which takes 1.5 s.
_EARLY = 64
_PROGRESS_S = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a sweep left behind."""

    run: Run
    interrupted: bool

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C; 1 if no candidate of some problem is ok; else 0."""
        if self.interrupted:
            return 130
        trials = [t for t in self.run.trials if t.provider == "attnsweep"]
        problems = {t.problem for t in trials}
        ok = {t.problem for t in trials if t.status in (Status.OK, Status.NOISY)}
        return 0 if problems and ok == problems else 1


def run(
    spec: SweepSpec,
    kernels: Mapping[str, Kernel],
    *,
    results: Path,
    fresh: bool = False,
    limit: int | None = None,
    cache_dir: Path | None = None,
    observer: Observer | None = None,
) -> Outcome:
    """Run a sweep and store it under `results`/<gpu>/<spec name>. Same spec again: resume.

    limit: at most this many candidates per family and problem. Ctrl-C returns an Outcome with
    what is measured so far. Raises NoGpuError, SpaceError, StoreError or ToolchainError.
    """
    observer = observer or Observer()
    if limit is not None:
        cap = min(limit, spec.search.candidates or limit)
        spec = replace(spec, search=spec.search.model_copy(update={"candidates": cap}))
    if spec.device == "replay":
        return Outcome(replay(spec, kernels, results, observer), False)
    with Worker(spec.measure.timeout_s) as worker, ExitStack() as at_end:
        with ThreadPoolExecutor(1) as aside:
            early = aside.submit(_compile_early, spec, kernels, cache_dir, at_end)
            environment = worker.describe(preload="torch" if spec.baselines else None)
        arch = arch_of(spec, environment)
        _check_memory(spec, environment)
        planned: Sequence[PlannedProblem]
        begun = early.result()
        if begun is not None and begun[1].arch == arch:
            planned, compiler = begun
        else:
            planned = plan(spec, kernels, arch)
            compiler = compiler_for(spec, arch, cache_dir)
            at_end.callback(compiler.close)
        observer.planned(candidate_count(planned, spec.search.candidates))
        directory = results / environment.slug / spec.name
        elsewhere = not fresh and _measured_elsewhere(directory, environment)
        if elsewhere:
            observer.note(f"earlier rows were measured with {elsewhere} and are set aside")
        store = at_end.enter_context(Store.open(directory, fresh=fresh or bool(elsewhere)))
        store.describe(spec.resolved(store.directory), environment, plan_facts(planned))
        _retire(store, kernels, observer)
        sweep = _Sweep(spec, worker, compiler, environment, store, observer)
        interrupted = sweep.run(planned)
        sweep.keep_winners(missing=not interrupted)
        return Outcome(store.finish(report.files), interrupted)


def _compile_early(
    spec: SweepSpec, kernels: Mapping[str, Kernel], cache_dir: Path | None, at_end: ExitStack
) -> tuple[Sequence[PlannedProblem], Compiler] | None:
    """The plan, and the first candidates being compiled, for the card that NVML names.

    None if NVML does not tell, the spec is for another card, or the plan fails, as it will again
    in its turn.
    """
    name = installed_arch()
    if name is None or spec.arch not in (None, name):
        return None
    arch = arch_named(name)
    try:
        planned = plan(spec, kernels, arch)
        compiler = compiler_for(spec, arch, cache_dir)
        at_end.callback(compiler.close)
        for space in planned[0].spaces:
            asked = itertools.islice(iter(search_of(spec, space).ask, None), _EARLY)
            for build in builds_of(space, asked, compiler, workspace_limit(spec)):
                build.submit()
    except AttnsweepError:
        return None
    return planned, compiler


def _retire(store: Store, kernels: Mapping[str, Kernel], observer: Observer) -> None:
    """Prune rows of configs that their family cannot have any more, which else would be ranked."""
    modes, retired = {param.name for param in MODES}, 0
    for trial in store.trials:
        if trial.provider != OURS or trial.status is Status.PRUNED or trial.kernel not in kernels:
            continue
        params = {param.name for param in kernels[trial.kernel].params}
        changed = (set(trial.config) - modes) ^ params
        if changed:
            what = f"{trial.kernel} has changed in {', '.join(sorted(changed))} since"
            row = trial.with_(status=Status.PRUNED, detail=what, time_us=None, race={})
            store.append(row)
            retired += 1
    if retired:
        observer.note(f"{retired} earlier rows are of configs that their kernel has no longer")


def arch_of(spec: SweepSpec, environment: Environment) -> Arch:
    """That of this GPU. Raises NoGpuError if the spec is for another one."""
    if spec.arch is not None and spec.arch != environment.arch:
        raise NoGpuError(
            f"the spec is for {spec.arch}, this machine's {environment.gpu} is {environment.arch}",
            hint=f"use a spec for {environment.arch}, or drop `arch:` to take the GPU's",
        )
    return arch_named(environment.arch)


def target_arch(spec: SweepSpec, asked: str | None) -> Arch:
    """The one asked for, the spec's, or that of the recording or the GPU. Raises SpecError."""
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
            "for which architecture? The spec names none, and there is no GPU to ask",
            hint=f"add --arch, one of {', '.join(ARCHS)}",
        ) from error


def _measured_elsewhere(directory: Path, now: Environment) -> str | None:
    """The GPU, driver and CUDA of an earlier run in `directory`, if they are not today's."""
    if not (directory / TRIALS).is_file() or not (directory / TRIALS).stat().st_size:
        return None
    try:
        before = open_run(directory).environment
    except StoreError:
        return None  # nothing in it to set aside
    if before is None or (before.gpu, before.driver, before.cuda) == (
        now.gpu,
        now.driver,
        now.cuda,
    ):
        return None
    return f"{before.gpu}, driver {before.driver}, CUDA {before.cuda}"


def _check_memory(spec: SweepSpec, environment: Environment) -> None:
    for entry in spec.problems:
        if entry.problem.min_bytes > 0.9 * environment.memory_bytes:
            raise NoGpuError(
                f"{entry.problem.label}: q, k, v and o need {entry.problem.min_bytes / 2**30:.1f} "
                f"GiB, {environment.gpu} has {environment.memory_bytes / 2**30:.1f}",
                hint="make the problem smaller in the spec",
            )


class _Sweep:
    """One run on one GPU."""

    def __init__(
        self,
        spec: SweepSpec,
        worker: Worker,
        compiler: Compiler,
        environment: Environment,
        store: Store,
        observer: Observer,
    ) -> None:
        self._spec, self._worker, self._compiler = spec, worker, compiler
        self._environment, self._store, self._observer = environment, store, observer
        self._deadline = math.inf
        self._skips = Skips(finalists=spec.measure.finalists, entry=race_entry(spec))
        self._finalist_builds: dict[tuple[object, ...], Build] = {}
        self._measured_builds: dict[tuple[object, ...], Build] = {}

    def run(self, planned: Sequence[PlannedProblem]) -> bool:
        """All problems in turn. Returns whether the user interrupted."""
        try:
            searches = [
                (item, [search_of(self._spec, space) for space in item.spaces]) for item in planned
            ]
            queues = [self._builds(item, asked) for item, asked in searches]
            for (item, asked), builds in zip(searches, queues, strict=True):
                self._problem(item, asked, builds)
        except KeyboardInterrupt:
            self._compiler.close()
            return True
        return False

    def keep_winners(self, problem: Problem | None = None, *, missing: bool = False) -> None:
        """Copy the machine code and the launches of each winner timed just now into the run.

        problem: of this one only. missing: of winners timed before too, where a process that was
        killed has left none.
        """
        trials = [t for t in self._store.trials if problem in (None, t.problem)]
        for trial in winners(rank(trials, self._environment)):
            build = self._finalist_builds.pop(trial.key, None)
            if missing and build is None and trial.key in self._measured_builds:
                try:
                    read_code(self._store.directory, trial)
                except StoreError:
                    build = self._measured_builds[trial.key]
                    build.submit()
            if build is not None:
                keep_code(self._store, build)

    def _builds(
        self, item: PlannedProblem, searches: Sequence[Search], *, begun: bool = False
    ) -> list[Build]:
        """Ask for the problem's candidates, up to the lookahead, and start to compile them.

        Not if all is measured already, unless the problem is begun: the finalists are then of all.
        """
        builds: list[Build] = []
        if time.monotonic() > self._deadline:
            return builds
        ahead = _LOOKAHEAD if self._spec.search.budget_s is None else _LOOKAHEAD_IN_TIME
        for space, search in zip(item.spaces, searches, strict=True):
            asked = itertools.islice(iter(search.ask, None), ahead)
            limit = workspace_limit(self._spec, self._environment.memory_bytes)
            builds += builds_of(space, asked, self._compiler, limit)
        if begun or len(self._kept(builds)) < len(builds) or not self._measured(item, builds):
            for build in builds:
                build.submit()
        return builds

    # -- one problem ------------------------------------------------------------------------

    def _problem(
        self, item: PlannedProblem, searches: Sequence[Search], builds: list[Build]
    ) -> None:
        self._deadline = time.monotonic() + (self._spec.search.budget_s or math.inf)
        kept = self._kept(builds)
        self._observer.opening(item.problem, len(builds), len(kept))
        done: list[Build] = []  # all measured, in this run's terms too
        while builds and len(kept) == len(builds) and self._measured(item, builds):
            done += builds
            for build in builds:
                measured = kept[build.row(status=Status.OK).key]
                self._measured_builds[measured.key] = build
                self._tell(item, searches, build, measured)
            builds = self._builds(item, searches)
            kept = self._kept(builds)
        if not builds:
            return
        for build in done:
            build.submit()
        settings = self._spec
        try:
            self._worker.open(
                item.problem, replay_us=settings.measure.replay_us, seed=settings.search.seed
            )
        except WorkerError as error:
            self._unopened(builds, error)
            return
        rows: dict[tuple[object, ...], tuple[Build, Trial]] = {}
        seen: dict[tuple[object, ...], Build] = {}
        told = {id(build) for build in done}
        builds = done + builds
        asked_before: dict[int, int] = {}
        look_at = 0.0
        while builds:
            for build in builds:
                asked_before[id(build)] = len(asked_before)
            kept = self._kept(builds)
            for build in self._in_time(builds, kept, rows):
                if time.monotonic() >= look_at:  # of 582 builds it takes 0.5 ms
                    self._observer.compiled(sum(b.ready for b in builds), len(builds))
                    look_at = time.monotonic() + _PROGRESS_S
                trial = kept.get(build.row(status=Status.OK).key)
                if trial is None:
                    twin = seen.get(build.machine_code()) if build.compiled else None
                    if twin is not None and asked_before[id(build)] < asked_before[id(twin)]:
                        # Which of two equals is compiled first is chance, and must not name one.
                        _, measured = rows[twin.row(status=Status.OK).key]
                        trial = self._inherit(build, measured)
                        seen[build.machine_code()] = build
                        # What the search was told of the twin it is told again after a resume.
                        left = self._same_code(twin, build).with_(first_us=measured.first_us)
                        self._store.append(left)
                        rows[left.key] = (twin, left)
                    else:
                        trial = self._try(build, twin)
                    self._store.append(trial)
                if trial.status in (Status.OK, Status.NOISY):
                    seen.setdefault(build.machine_code(), build)
                rows[trial.key] = (build, trial)
                self._skips.learn(build, trial)
                self._observer.tried(trial)
                if id(build) not in told:
                    self._tell(item, searches, build, trial)
            self._observer.compiled(len(builds), len(builds))
            # What the strategies ask for after that.
            builds = self._builds(item, searches, begun=True)
        self._final(item, [(b, t) for b, t in rows.values() if t.status is Status.OK])

    def _in_time(
        self,
        builds: Sequence[Build],
        kept: Mapping[tuple[object, ...], Trial],
        rows: Mapping[tuple[object, ...], object],
    ) -> Iterator[Build]:
        """Builds as they are compiled; once time is up, if there is a row, only those measured.

        The others get no row, as if they had not been asked for: a later run tries them.
        """
        met: set[int] = set()
        for build in as_ready(builds):
            if rows and time.monotonic() > self._deadline:
                break
            met.add(id(build))
            yield build
        left = [build for build in builds if id(build) not in met]
        yield from as_ready([b for b in left if b.row(status=Status.OK).key in kept])

    def _tell(
        self, item: PlannedProblem, searches: Sequence[Search], build: Build, trial: Trial
    ) -> None:
        for space, search in zip(item.spaces, searches, strict=True):
            if space.kernel is build.kernel:
                search.tell(trial)

    def _unopened(self, builds: Sequence[Build], error: WorkerError) -> None:
        """The inputs of a problem do not fit, or the GPU failed: each candidate's row says so."""
        for build in builds:
            detail = f"the problem could not be opened: {error.detail}"
            row = build.row(status=error.status, detail=detail)
            self._store.append(row)
            self._observer.tried(row)

    def _compiled(self, build: Build) -> Trial:
        return compiled_row(build, self._spec).with_(fingerprint=self._fingerprint(build))

    def _same_code(self, build: Build, as_: Build) -> Trial:
        """The row of a candidate whose machine code another one stands for."""
        same = f"same machine code as {as_.kernel.name} {as_.config.label}"
        return self._compiled(build).with_(status=Status.PRUNED, detail=same)

    def _inherit(self, build: Build, measured: Trial) -> Trial:
        """The row of a candidate whose machine code was measured under another name."""
        facts = ("status", "detail", "accuracy", "time_us", "first_us", "stages_us", "launch_us")
        return self._compiled(build).with_(**{name: getattr(measured, name) for name in facts})

    def _try(self, build: Build, twin: Build | None) -> Trial:
        """Compile, prune, check and first time of one candidate: always a row."""
        row = self._compiled(build)
        if row.status is not Status.OK:
            return row
        if twin is not None:
            return self._same_code(build, twin)
        skip = self._skips.verdict(build) if self._spec.search.skip_by_bound else None
        if skip is not None:
            return row.with_(status=Status.PRUNED, detail=skip.detail, at_least_us=skip.at_least_us)
        try:
            accuracy, first = self._worker.call("trial", build.candidate())
        except WorkerError as error:
            return row.with_(status=error.status, detail=error.detail, accuracy=error.payload)
        once = Measurement(median=first.time_us, low=first.time_us, high=first.time_us, samples=1)
        return row.with_(
            accuracy=accuracy,
            time_us=once,
            first_us=first.time_us,
            stages_us=first.stages_us,
            launch_us=first.launch_us,
        )

    def _final(self, item: PlannedProblem, checked: Sequence[tuple[Build, Trial]]) -> None:
        """Time the best candidates and all baselines in interleaved rounds; rewrite their rows."""
        rounds = Rounds(self._spec, self._worker, self._store, self._observer)
        peers = [self._baseline_row(name, item.problem) for name in self._spec.baselines]
        for build, trial in rounds.run(checked, peers):
            self._finalist_builds[trial.key] = build
        self.keep_winners(item.problem)  # a run that is killed later has them

    # -- resume -----------------------------------------------------------------------------

    def _kept(self, builds: Sequence[Build]) -> dict[tuple[object, ...], Trial]:
        """Stored rows of these candidates that still hold: same code, problem, GPU and driver.

        One skipped by bound holds while it is still excluded by what rows that hold tell.
        """
        stored = {trial.key: trial for trial in self._store.trials}
        kept, skipped = {}, []
        for build in builds:
            trial = stored.get(build.row(status=Status.OK).key)
            if trial is not None and trial.fingerprint == self._fingerprint(build):
                kept[trial.key] = trial
                self._skips.learn(build, trial)
                skipped += [build] if trial.at_least_us is not None else []
        for build in skipped:
            asked = self._spec.search.skip_by_bound
            if not asked or self._skips.verdict(build, skipped_before=True) is None:
                del kept[build.row(status=Status.OK).key]
        return kept

    def _measured(self, item: PlannedProblem, builds: Sequence[Build]) -> bool:
        """Whether the rounds of this problem, baselines included, are in the store."""
        stored = {trial.key: trial for trial in self._store.trials}
        for name in self._spec.baselines:
            row = self._baseline_row(name, item.problem)
            old = stored.get(row.key)
            if old is None or old.fingerprint != row.fingerprint:
                return False
        timed = [t.time_us for t in self._kept(builds).values() if t.status is Status.OK]
        return not timed or any(time.rounds for time in timed if time)

    def _fingerprint(self, build: Build) -> str:
        issued = [] if build.schedule.whole else [repr(build.schedule)]
        if self._spec.require:
            issued.append(repr(sorted(self._spec.require.items())))
        return self._digest(build.problem, build.keys, sorted(build.launches.items()), *issued)

    def _baseline_row(self, name: str, problem: Problem) -> Trial:
        packages = sorted(self._environment.packages.items())
        return Trial(
            kernel=name,
            provider=name,
            config={},
            problem=problem,
            status=Status.SKIPPED,
            fingerprint=self._digest(problem, name, packages),
        )

    def _digest(self, *parts: object) -> str:
        """What a row depends on beside `parts`: protocol, settings, GPU and driver."""
        environment = self._environment
        settings = self._spec.measure
        card = (environment.gpu, environment.driver, environment.cuda)
        how = (settings.rank_by, settings.rounds, settings.replay_us, settings.cold, settings.eager)
        return hashlib.sha256(repr((PROTOCOL, card, how, parts)).encode()).hexdigest()[:32]
