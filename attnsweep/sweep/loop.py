"""One problem on one card: every candidate becomes a row, and the best of them are ranked.

Code compiles ahead in threads while the card checks and times the candidates that are ready. Every
row is on disk before the next candidate begins; only the user ends a sweep.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from attnsweep.bench.gpu import Gpu, WorkerError
from attnsweep.choose.baseline_ratio import Base, fastest_baseline
from attnsweep.choose.finals import Finals
from attnsweep.choose.pace import at_pace
from attnsweep.choose.race import Pair, in_order, race
from attnsweep.choose.ranking import judged, ranked, winner_of
from attnsweep.choose.rounds import prepared
from attnsweep.compile.calls import CalledBuild
from attnsweep.compile.candidate import Build, compiled_candidate, workspace_limit
from attnsweep.compile.launches import Candidate
from attnsweep.compile.nvrtc import NOW, Compiler, cores
from attnsweep.core.callables import Asked
from attnsweep.core.errors import AttnsweepError, CompileError, StoreError
from attnsweep.core.long_problems import has_shorter
from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem
from attnsweep.core.trial import THIS_BINARY, Environment, Measurement, Status, Trial, cards_of
from attnsweep.specs.load import SweepSpec
from attnsweep.specs.plan import PlannedProblem
from attnsweep.store.code import keep_code, read_code
from attnsweep.store.store import Writer
from attnsweep.sweep import scout
from attnsweep.sweep.candidates import Candidates, SameCode
from attnsweep.sweep.kept import Kept
from attnsweep.sweep.scout import Scout

# Cores that compile all small cases of a call and leave some to what measures.
_ENOUGH_CORES = 14
_OF_CHAINS = {"rank_by": "warm", "cold": False, "eager": False, "energy": False}
"""How the strict judge measures."""


@dataclass(frozen=True, slots=True)
class Share:
    """Everything that a card needs to sweep problems. environment: its own. seed: of inputs."""

    spec: SweepSpec
    environment: Environment
    compiler: Compiler
    store: Writer
    observer: Observer
    seed: int

    def candidates(self, item: PlannedProblem) -> Candidates:
        """The candidates of a problem, from the first."""
        limit = workspace_limit(self.spec, self.environment.memory_bytes)
        return Candidates(item, self.spec, self.compiler, limit)

    def kept(self) -> Kept:
        """The rows of an earlier run that still hold."""
        return Kept(self.spec, self.environment, self.store)


def begin(item: PlannedProblem, share: Share, turn: int = NOW) -> Candidates:
    """A problem's candidates, the first of which compile unless all is measured.

    Sets aside the rows of a problem that another card has begun and not finished: candidates of one
    problem are compared on one card only. What another card has finished stays.
    """
    if _is_begun_elsewhere(item, share):
        share.store.set_aside(item.problem)
        what = f"set aside the rows of {item.problem.label}"
        share.observer.note(f"{what}: another card began it, and did not finish")
    candidates = share.candidates(item)
    if not share.kept().whole(item.problem, candidates.ask()):
        candidates.submit(turn)
    return candidates


def _is_begun_elsewhere(item: PlannedProblem, share: Share) -> bool:
    """Whether another card has begun a problem and not finished it."""
    rows, card = share.store.rows_of(item.problem), share.environment.uuid
    if card is None or not set(cards_of(rows)) - {card}:
        return False
    if len(cards_of(rows)) > 1:
        return True
    candidates, kept = share.candidates(item), share.kept()
    if has_shorter(item.problem) and scout.measured(candidates, rows, kept):
        return False
    while builds := candidates.ask():
        if not kept.whole(item.problem, builds):
            return True
        held = kept.rows(builds)
        for build in builds:
            candidates.tell(build, held[id(build)])
    return False


def sweep_problem(
    candidates: Candidates, gpu: Gpu, share: Share, then: Problem | None = None
) -> None:
    """Compile, check, race and rank the candidates of one problem on one card.

    candidates: as `begin` gave them. then: what the card probably gets next.
    """
    sweep = _ProblemSweep(candidates, gpu, share)
    candidates.start()
    sweep.choose_entrants()
    sweep.take_kept()
    if candidates.builds and sweep.opened(then):  # otherwise all is measured, or nothing can be
        sweep.finals([pair for pair in sweep.tried() if pair[1].status is Status.OK])
    sweep.keep_winner()  # at once, so that a run that is killed later has it
    endings, label = candidates.endings, candidates.problem.label
    share.store.end_searches(label, endings)
    for kernel, why in endings.items():
        share.observer.note(f"{label}: {kernel}: the search ended: {why}")


class _ProblemSweep:
    def __init__(self, candidates: Candidates, gpu: Gpu, share: Share) -> None:
        self._candidates, self._gpu, self._share = candidates, gpu, share
        self._spec, self._store, self._observer = share.spec, share.store, share.observer
        self._problem = candidates.problem
        self._kept = share.kept()
        self._same_code = SameCode()
        self._timed: dict[tuple[object, ...], Build] = {}
        """The finalists of today, by the keys of their rows."""
        self._any_length: dict[tuple[object, ...], Callable[[], Candidate]] = {}
        """By the keys of finalists that are calls, what waits for small cases of any length."""
        self._measured: dict[tuple[object, ...], Build] = {}
        """Candidates of kept batches."""
        stored = self._store.rows_of(self._problem)
        self._began = time.monotonic() - max((t.tried_s or 0.0 for t in stored), default=0.0)

    def choose_entrants(self) -> None:
        """Leave a long problem the best candidates of a shorter one."""
        candidates, stored = self._candidates, self._store.rows_of(self._problem)
        chooser = Scout(candidates, self._spec, self._gpu, self._kept)
        served = all(space.kernel.serves(chooser.problem) for space in candidates.spaces)
        choose = served and has_shorter(self._problem)
        if choose and (entrants := scout.measured(candidates, stored, self._kept)):
            candidates.only(entrants)
            choose = False
        before = 0 if choose else len(self._kept.rows(candidates.builds))
        self._observer.opening(self._problem, len(candidates.builds), before)
        if choose:
            put, observer = self._store.append, self._observer
            chooser.run(self._share.seed, self._try, stored=stored, put=put, observer=observer)

    def opened(self, then: Problem | None) -> bool:
        """Open the problem; if it does not fit, or its GPU failed, its candidates' rows say so."""
        candidates = self._candidates
        try:
            with prepared("problem", self._gpu, self._observer):
                self._gpu.open(
                    self._problem,
                    replay_us=self._spec.measure.replay_us,
                    seed=self._share.seed,
                    then=then,
                    baselines=(*self._spec.baselines, *self._spec.candidates),
                    rounds_scores=candidates.rounds_scores,
                )
        except WorkerError as error:
            detail = f"cannot open the problem: {error.detail}"
            for build in candidates.builds:
                self._put(build.row(status=error.status, detail=detail))
            return False
        candidates.builds = [*self._measured.values(), *candidates.builds]
        return True

    def take_kept(self) -> None:
        """Take kept batches until one has something to measure; those taken then compile too."""
        candidates = self._candidates
        while candidates.builds and self._kept.whole(self._problem, candidates.builds):
            kept = self._kept.rows(candidates.builds)
            for build in candidates.builds:
                self._measured[build.key] = build
                candidates.tell(build, kept[id(build)])
            if not self._kept.whole(self._problem, candidates.ask()):
                candidates.submit()
        if candidates.builds:
            for build in self._measured.values():
                build.submit()

    def tried(self) -> Sequence[Pair]:
        """Every candidate with its row."""
        candidates, rows = self._candidates, dict[tuple[object, ...], Pair]()
        candidates.submit()  # its turn has come
        while candidates.builds:
            self._same_code.asked(candidates.builds)
            kept = self._kept.rows(candidates.builds)
            for build in candidates.compiled(kept, self._observer.compiled):
                old = kept.get(id(build))
                for of, row in self._rows(build) if old is None else [(build, old)]:
                    rows[row.key] = (of, row)
                self._same_code.add(build, row)
                self._observer.tried(row, kept=old is not None)
                candidates.tell(build, row)
            candidates.ask()
            candidates.submit()
        return [*rows.values()]

    def _rows(self, build: Build) -> list[Pair]:
        """The rows of a candidate, its own last: measured by one of the same code, or tried now."""
        row, candidate = compiled_candidate(build, self._spec)
        row = row.with_(**self._kept.stamp(build))
        if candidate is None:
            rows = [(build, row)]
        elif self._same_code.of(build) is not None:
            rows = self._same_code.replace(build, row)
        else:
            rows = [(build, self._try(candidate, row))]
        tried_s = round(time.monotonic() - self._began, 3)
        rows = [(of, r if r.tried_s is not None else r.with_(tried_s=tried_s)) for of, r in rows]
        for _, row in rows:
            self._store.append(row)
        return rows

    def _try(self, candidate: Candidate, row: Trial) -> Trial:
        """Check a candidate and take its first time."""
        try:
            accuracy, first = self._gpu.trial(candidate)
        except WorkerError as error:
            return row.with_(status=error.status, detail=error.detail, accuracy=error.payload)
        once = Measurement(median=first.time_us, low=first.time_us, high=first.time_us, samples=1)
        return row.with_(
            accuracy=accuracy,
            time_us=once,
            first_us=first.time_us,
            first_mhz=first.sm_mhz,
            stages_us=first.stages_us,
            once_us=first.once_us,
            launch_us=first.launch_us,
        )

    def finals(self, checked: Sequence[Pair]) -> None:
        """Race those that are right, and time the finalists in rounds."""
        gpu, observer = self._gpu, self._observer
        raced = race(checked, self._spec, gpu, put=self._put, observer=observer)
        alone = self._spec.measure.eager and cores() < _ENOUGH_CORES  # as the host's times must be
        if raced and not alone:  # the first probably wins; this takes as long as the rounds
            with suppress(AttnsweepError):  # raised again, when the rounds are stored
                self._compile_any_length(*in_order(raced)[0])
        keep = self._store.append
        measure, seed = self._spec.measure, self._spec.search.seed
        finals = Finals(measure, gpu, seed=seed, put=self._put, keep=keep, observer=observer)
        rows = self._kept.baselines(self._problem)
        strict = [row for row in rows if Asked.of(row.provider).strict]
        for build, trial in finals.run(raced, [row for row in rows if row not in strict]):
            self._timed[trial.key] = build
        self._prove_any_length()
        if strict:
            self._judge_strictly(strict)

    def _prove_any_length(self) -> None:
        """Say whether a call that wins, and those that tie with it, are right on any length.

        Until then they were called where they launch the code of the timed problem alone.
        """
        timed = {key: b for key, b in self._timed.items() if isinstance(b, CalledBuild)}
        if not timed:
            return
        (rows,) = ranked(self._store.rows_of(self._problem), None)
        ranks = [row["rank"] for row in rows if row["winner"]]
        best = [row["trial"] for row in rows if row["rank"] in ranks and row["trial"].key in timed]
        for trial in best:  # all compile at once
            self._compile_any_length(timed[trial.key], trial)
        for trial in (trial for trial in best if trial.key in self._any_length):
            try:
                self._gpu.trial(self._any_length[trial.key]())
                facts = {"covers": "any length"}
            except (WorkerError, CompileError) as error:
                facts = {"other_lengths": str(error)}
            self._store.append(trial.with_(call=trial.call | facts))

    def _compile_any_length(self, build: Build, trial: Trial) -> None:
        """Begin to compile the small cases of a call, unless its candidate has them."""
        if not isinstance(build, CalledBuild) or trial.call.get("covers") != THIS_BINARY:
            return
        if trial.key not in self._any_length:
            self._any_length[trial.key] = build.on_any_length()

    def _judge_strictly(self, asked: Sequence[Trial]) -> None:
        """Time callables in chains, beside baselines whose rows stay those of the finals."""
        gpu, observer, rows = self._gpu, self._observer, dict[str, Trial]()
        others = [row for row in self._kept.baselines(self._problem) if not row.candidate]
        names = [row.provider for row in (*others, *asked)]
        measure = self._spec.measure.model_copy(update=_OF_CHAINS)

        def put(row: Trial) -> None:
            rows[row.provider] = row

        with TemporaryDirectory(prefix="attnsweep-", ignore_cleanup_errors=True) as place:
            how: dict[str, Any] = {"replay_us": measure.replay_us, "baselines": names}
            try:
                with prepared("strict judge", gpu, observer):
                    gpu.open(self._problem, seed=secrets.randbits(32), strict=place, **how)
            except WorkerError as error:
                detail = f"cannot be judged strictly: {error.detail}"
                for row in asked:
                    self._put(row.with_(status=error.status, detail=detail))
                return
            finals = Finals(measure, gpu, seed=0, put=put, keep=put, observer=observer)
            finals.run([], [*others, *asked])
            timed = [*rows.values()]
            statuses = {id(row): judged(row)[0] for row in timed}
            right = [row for row in timed if statuses[id(row)] is Status.OK]
            base = fastest_baseline(timed, statuses, at_pace(right))
            for row in (rows[row.provider] for row in asked):
                self._put(row if row.time_us is None else self._of_chains(row, base))

    def _of_chains(self, row: Trial, base: Base | None) -> Trial:
        """A row of the strict judge as it is stored: its time compares with no other's."""
        assert row.time_us is not None
        try:
            facts: dict[str, Any] = {"trusted_us": self._gpu.trusted_us(row.provider)}
        except WorkerError as error:
            return row.with_(status=error.status, detail=error.detail)
        if base is not None and row.issued is None:
            facts |= {"ratio": base.ratio(row).value, "base": base.trial.provider}
        chain = row.time_us.model_copy(update={"l2": "chain"})
        return row.with_(time_us=chain, warm_us=None, strict=facts)

    def keep_winner(self) -> None:
        """Copy the machine code and the launches of the winner into the run.

        That of a winner timed before is there, unless the process was killed.
        """
        winner = winner_of(self._store.rows_of(self._problem))
        build = None if winner is None else self._timed.get(winner.key)
        if winner is not None and build is None and winner.key in self._measured:
            try:
                read_code(self._store.directory, winner)
            except StoreError:
                build = self._measured[winner.key]
                build.submit()
        if build is not None:
            keep_code(self._store, build)

    def _put(self, row: Trial) -> None:
        self._store.append(row)
        self._observer.tried(row)
