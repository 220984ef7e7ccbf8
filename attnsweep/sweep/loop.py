"""The sweep: every candidate of a spec becomes a row, and the best of them are ranked.

Compiling runs ahead in threads while the GPU process checks and times the candidates that are
ready. Every row is on disk before the next candidate begins; only the user ends a sweep.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from attnsweep.bench.gpu import Gpu, WorkerError
from attnsweep.choose.columns import held_to
from attnsweep.choose.finals import Finals
from attnsweep.choose.lower_bound import Skips
from attnsweep.choose.race import Pair, race, race_entry
from attnsweep.choose.ranking import rank, winners
from attnsweep.choose.rounds import prepared
from attnsweep.compile.candidate import Build, compiled_candidate, workspace_limit
from attnsweep.compile.launches import Candidate
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.errors import StoreError
from attnsweep.core.length import has_shorter
from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment, Measurement, Status, Trial
from attnsweep.specs.load import SweepSpec
from attnsweep.specs.plan import PlannedProblem, input_seed
from attnsweep.store.code import keep_code, read_code
from attnsweep.store.store import Writer
from attnsweep.sweep.candidates import Queue, Twins
from attnsweep.sweep.kept import Kept, begin_anew_if_begun_elsewhere
from attnsweep.sweep.scout import Scout


class Sweep:
    """One run on one GPU."""

    def __init__(
        self,
        spec: SweepSpec,
        gpu: Gpu,
        environment: Environment,
        store: Writer,
        observer: Observer,
        seed: int | None = None,
    ) -> None:
        """seed: of the inputs (default: the spec's, or one drawn now)."""
        self._spec, self._gpu, self._environment = spec, gpu, environment
        self._store, self._observer = store, observer
        self._skips = Skips(finalists=spec.measure.finalists, entry=race_entry(spec))
        self._kept = Kept(spec, environment, store, self._skips)
        self._input_seed = input_seed(spec) if seed is None else seed
        self._finalists: dict[tuple[object, ...], Build] = {}
        self._measured: dict[tuple[object, ...], Build] = {}
        self._begun = time.monotonic()
        self.finished: set[Problem] = set()

    def run(
        self,
        planned: Sequence[PlannedProblem],
        compiler: Compiler,
        then: Problem | None = None,
    ) -> bool:
        """Run all problems in turn. Returns whether the user interrupted.

        then: the problem that this card will probably get after them.
        """
        limit = workspace_limit(self._spec, self._environment.memory_bytes)
        try:
            for item in planned:
                self._begin_anew(item, compiler, limit)
            queues = [Queue(item, self._spec, compiler, limit) for item in planned]
            for queue in queues:  # the first candidates of all problems compile at once
                if not self._kept.whole(queue.problem, queue.ask()):
                    queue.submit()
            after = [*(queue.problem for queue in queues[1:]), then]
            for queue, following in zip(queues, after, strict=True):
                self._problem(queue, following)
                self.finished.add(queue.problem)
                if following is not None:
                    rows = [t for t in self._store.trials if t.problem == queue.problem]
                    self._observer.ranked(rows, self._environment)
                self._store.end_searches(queue.problem.label, queue.endings)
                for kernel, why in queue.endings.items():
                    self._observer.note(f"{kernel}: the search ended: {why}")
        except KeyboardInterrupt:
            compiler.close()
            return True
        return False

    def _begin_anew(self, item: PlannedProblem, compiler: Compiler, limit: int | None) -> None:
        spec, here = self._spec, self._environment
        if begin_anew_if_begun_elsewhere(item, spec, here, self._store, compiler, limit):
            what = f"set aside the rows of {item.problem.label}"
            self._observer.note(f"{what}: another card began it, and did not finish")

    def _problem(self, queue: Queue, then: Problem | None) -> None:
        queue.start()
        stored = [t for t in self._store.trials if t.problem == queue.problem]
        self._begun = time.monotonic() - max((t.tried_s or 0.0 for t in stored), default=0.0)
        scout = Scout(queue, self._spec, self._gpu, self._kept.stamp)
        choose = has_shorter(queue.problem) and not scout.done(stored, self._kept)
        before = 0 if choose else len(self._rows_of(queue))
        self._observer.opening(queue.problem, len(queue.builds), before)
        if choose:
            put, observer = self._store.append, self._observer
            scout.run(self._input_seed, self._try, stored=stored, put=put, observer=observer)
        done = self._take_kept(queue)
        if not queue.builds:
            return  # every candidate and every round is measured
        try:
            with prepared("problem", self._gpu, self._observer):
                self._gpu.open(
                    queue.problem,
                    replay_us=self._spec.measure.replay_us,
                    seed=self._input_seed,
                    then=then,
                    baselines=self._spec.baselines,
                    rounds_scores=queue.rounds_scores,
                )
        except WorkerError as error:
            self._unopened(queue.builds, error)
            return
        told = {id(build) for build in done}
        queue.builds = done + queue.builds
        rows: dict[tuple[object, ...], Pair] = {}
        twins = Twins()
        while queue.builds:
            twins.asked(queue.builds)
            kept = self._rows_of(queue)
            for build in queue.compiled(kept, self._observer.compiled):
                for of, row in self._rows(build, kept.get(id(build)), twins):
                    rows[row.key] = (of, row)
                twins.add(build, row)
                self._skips.learn(build, row)
                self._observer.tried(row, kept=id(build) in kept)
                if id(build) not in told:
                    queue.tell(build, row)
            queue.ask()
            queue.submit()
        checked = [(b, t) for b, t in rows.values() if t.status is Status.OK]
        self._finals(checked, self._kept.baselines(queue.problem))
        self.keep_winners(queue.problem)  # so that a run that is killed later has them

    def _finals(self, checked: Sequence[Pair], baselines: Sequence[Trial]) -> None:
        raced = race(checked, self._spec, self._gpu, put=self._put, observer=self._observer)
        keep, observer = self._store.append, self._observer
        finals = Finals(self._spec, self._gpu, put=self._put, keep=keep, observer=observer)
        for build, trial in finals.run(raced, baselines):
            self._finalists[trial.key] = build

    # -- one candidate ----------------------------------------------------------------------

    def _rows(self, build: Build, kept: Trial | None, twins: Twins) -> list[Pair]:
        """The rows of a candidate, its own last: kept, measured by a twin, or tried now."""
        if kept is not None:
            return [(build, kept)]
        row, candidate = compiled_candidate(build, self._spec)
        row = row.with_(**self._kept.stamp(build))
        if candidate is None:
            rows = [(build, row)]
        elif twins.of(build) is not None:
            rows = twins.replace(build, row)
        else:
            rows = [(build, self._try(build, candidate, row))]
        tried_s = round(time.monotonic() - self._begun, 3)
        rows = [(of, r if r.tried_s is not None else r.with_(tried_s=tried_s)) for of, r in rows]
        for _, row in rows:
            self._store.append(row)
        return rows

    def _try(self, build: Build, candidate: Candidate, row: Trial) -> Trial:
        """Check a candidate and take its first time, unless its stages already show it slow."""
        skip = self._skips.verdict(build) if self._spec.search.skip_by_bound else None
        if skip is not None:
            return row.with_(status=Status.PRUNED, detail=skip.detail, at_least_us=skip.at_least_us)
        try:
            accuracy, first = self._gpu.trial(candidate)
        except WorkerError as error:
            return row.with_(status=error.status, detail=error.detail, accuracy=error.payload)
        once = Measurement(median=first.time_us, low=first.time_us, high=first.time_us, samples=1)
        row = row.with_(
            accuracy=accuracy,
            time_us=once,
            first_us=first.time_us,
            first_mhz=first.sm_mhz,
            stages_us=first.stages_us,
            launch_us=first.launch_us,
        )
        return held_to(row, self._spec.measure.max_error)

    # -- what an earlier run left ---------------------------------------------------------------

    def _rows_of(self, queue: Queue) -> dict[int, Trial]:
        return self._kept.rows(queue.builds)

    def _take_kept(self, queue: Queue) -> list[Build]:
        """Take kept batches until one has something to measure; returns the builds of those taken.

        If something is left to measure, these builds are submitted too.
        """
        done: list[Build] = []
        while queue.builds and self._kept.whole(queue.problem, queue.builds):
            done += queue.builds
            kept = self._rows_of(queue)
            for build in queue.builds:
                self._measured[build.key] = build
                queue.tell(build, kept[id(build)])
            if not self._kept.whole(queue.problem, queue.ask()):
                queue.submit()
        if queue.builds:
            for build in done:
                build.submit()
        return done

    def keep_winners(self, problem: Problem | None = None, *, missing: bool = False) -> None:
        """Copy the machine code and the launches of each winner timed just now into the run.

        problem: only this problem's winner. missing: also copy winners timed before whose code is
        missing, because the process was killed.
        """
        trials = [t for t in self._store.trials if problem in (None, t.problem)]
        for trial in winners(rank(trials, self._environment)):
            build = self._finalists.pop(trial.key, None)
            if missing and build is None and trial.key in self._measured:
                try:
                    read_code(self._store.directory, trial)
                except StoreError:
                    build = self._measured[trial.key]
                    build.submit()
            if build is not None:
                keep_code(self._store, build)

    # -- rows -------------------------------------------------------------------------------

    def _put(self, row: Trial) -> None:
        self._store.append(row)
        self._observer.tried(row)

    def _unopened(self, builds: Sequence[Build], error: WorkerError) -> None:
        """Write rows for a problem that does not fit, or whose GPU failed."""
        detail = f"cannot open the problem: {error.detail}"
        for build in builds:
            self._put(build.row(status=error.status, detail=detail))
