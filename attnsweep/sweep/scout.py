"""The entrants of a long problem: the best candidates of a shorter one of its kind.

A call of 131,072 keys takes 0.2 s and more, and a candidate ten of them and more. What is slow on
an eighth of the keys is slow on all, so that only the best are tried on the problem itself. Each
other candidate becomes a row that says how it did on the shorter one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from attnsweep.bench.gpu import Gpu, WorkerError
from attnsweep.choose.finals import finalists_of
from attnsweep.choose.race import Pair, first_of, in_order, race
from attnsweep.choose.rounds import prepared
from attnsweep.compile.calls import builds_of
from attnsweep.compile.candidate import Build, compiled_candidate
from attnsweep.compile.launches import Candidate
from attnsweep.core.long_problems import shorter, slower_on
from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Status, Trial
from attnsweep.family.family import Config
from attnsweep.specs.load import SweepSpec
from attnsweep.specs.plan import PlannedProblem
from attnsweep.sweep.candidates import Candidates
from attnsweep.sweep.kept import Kept

# Entrants at most, and at least; between, as many as are tried in this time, of three calls each.
_MOST, _LEAST = 5, 2
_TRIED_US, _CALLS = 6e6, 3
# Seconds of the search, unless the spec gives it less; how many of the best race for each place.
_SEARCH_S, _RACERS = 7, 3
# What only calls show: a row that says it of the long problem itself is not replaced.
_SHOWN_THERE = (Status.WRONG, Status.LAUNCH_ERROR, Status.TIMEOUT)


class Scout:
    """Chooses the candidates of a long problem by trials on a shorter one."""

    def __init__(self, candidates: Candidates, spec: SweepSpec, gpu: Gpu, kept: Kept) -> None:
        """candidates: of the long problem. kept: what of an earlier run still holds."""
        self._candidates, self._spec, self._gpu, self._kept = candidates, spec, gpu, kept
        self.problem = shorter(candidates.problem)
        """The shorter problem."""

    def run(
        self,
        seed: int,
        attempt: Callable[[Candidate, Trial], Trial],
        *,
        stored: Sequence[Trial],
        put: Callable[[Trial], None],
        observer: Observer,
    ) -> None:
        """Try the candidates on the shorter problem, and leave the candidates the best.

        attempt: checks a candidate and takes its first time. put: stores the rows of the others.
        stored: the rows of the long problem that an earlier run left.
        """
        candidates = self._candidates
        observer.note(
            f"{candidates.problem.label}: its entrants are chosen on {self.problem.label}"
        )
        observer.trying_on(self.problem.label, len(candidates.builds))
        spaces = tuple(replace(space, problem=self.problem) for space in candidates.spaces)
        item = PlannedProblem(self.problem, spaces, {})
        budget = {"budget_s": min(_SEARCH_S, self._spec.search.budget_s or _SEARCH_S)}
        limited = replace(self._spec, search=self._spec.search.model_copy(update=budget))
        search = Candidates(item, limited, candidates.compiler, candidates.limit)
        try:
            with prepared("shorter problem", self._gpu, observer):
                self._gpu.open(
                    self.problem,
                    replay_us=self._spec.measure.replay_us,
                    seed=seed,
                    then=candidates.problem,
                    baselines=(),
                    rounds_scores=candidates.rounds_scores,
                )
        except WorkerError as error:
            observer.note(f"{self.problem.label} cannot be opened: {error.detail}")
            observer.trying_on(candidates.problem.label, len(candidates.builds))
            return
        tried: list[Pair] = []
        search.start()
        while search.ask():
            search.submit()
            for build in search.compiled((), observer.compiled):
                row, candidate = compiled_candidate(build, self._spec)
                row = row if candidate is None else attempt(candidate, row)
                tried.append((build, row))
                search.tell(build, row)
                observer.tried(row.with_(problem=candidates.problem, time_us=None))
        entrants = self._entrants([pair for pair in tried if pair[1].status is Status.OK], observer)
        chosen = {row.key for _, row in entrants}
        best_us = min((first_of(row) for _, row in entrants), default=0.0)
        failed = self._failed(stored)
        for build, row in tried:
            told = self._told(build, row, best_us)
            if row.key not in chosen and told.key not in failed:
                put(told)
        candidates.only([(row.kernel, build.config) for build, row in entrants])
        candidates.submit()
        observer.trying_on(candidates.problem.label, len(entrants))

    def _failed(self, stored: Sequence[Trial]) -> set[tuple[object, ...]]:
        """The candidates that failed on the long problem itself in an earlier run, and still do."""
        bad = [t for t in stored if t.provider == OURS and t.status in _SHOWN_THERE]
        builds = _builds_of(self._candidates, self._candidates.problem, bad)
        now = {build.key: self._kept.fingerprint(build) for build in builds}
        return {t.key for t in bad if t.fingerprint == now.get(t.key)}

    def _entrants(self, checked: Sequence[Pair], observer: Observer) -> list[Pair]:
        """The best of those that are right, by a race on the shorter problem."""
        if not checked:
            return []
        longer = self._candidates.problem.flops / self.problem.flops
        call_us = longer * min(first_of(row) for _, row in checked)
        count = max(_LEAST, min(_MOST, int(_TRIED_US / (_CALLS * call_us))))
        count = min(count, self._spec.measure.finalists)  # no race of long calls follows
        measure = self._spec.measure.model_copy(update={"finalists": count})
        spec = replace(self._spec, measure=measure)
        checked = in_order(checked)[: _RACERS * count]
        raced = race(checked, spec, self._gpu, put=lambda _: None, observer=observer)
        return finalists_of(raced, count)[:count]

    def _told(self, build: Build, row: Trial, best_us: float) -> Trial:
        """The row of the long problem of a candidate that is not tried on it.

        It depends on the shorter problem, and has that one's fingerprint: should another choice
        make the candidate an entrant, it is measured.
        """
        (longer,) = _builds_of(self._candidates, self._candidates.problem, [row])
        status, detail = row.status, row.detail
        if status is Status.OK:
            status = Status.PRUNED
            detail = slower_on(self.problem.label, first_of(row), best_us)
        elif status in _SHOWN_THERE:
            detail = f"on {self.problem.label}: {row.detail}"
        facts = {"status": status, "detail": detail, "resources": row.resources}
        return longer.row(**facts).with_(accuracy=row.accuracy, **self._kept.stamp(build))


def measured(
    candidates: Candidates, stored: Sequence[Trial], kept: Kept
) -> list[tuple[str, Config]]:
    """The entrants of a run that has measured all of a long problem, if that still holds.

    stored: the problem's rows. Their rounds must hold, and so must the choice of the entrants.
    """
    ours = [t for t in stored if t.provider == OURS]
    timed = [t for t in ours if t.time_us and t.time_us.rounds]
    builds = _builds_of(candidates, candidates.problem, timed)
    if not timed or len(builds) < len(timed) or not kept.whole(candidates.problem, builds):
        return []
    if {space.kernel.name for space in candidates.spaces} - {t.kernel for t in ours}:
        return []  # a family that was not tried
    now: dict[tuple[object, ...], set[object]] = {}
    for problem in (candidates.problem, shorter(candidates.problem)):
        for build in _builds_of(candidates, problem, ours):
            key = (candidates.problem, *build.key[1:])
            now.setdefault(key, set()).add(kept.fingerprint(build))
    if any(t.fingerprint not in now[t.key] for t in ours if t.key in now):
        return []
    return [(t.kernel, Config(t.config)) for t in timed]


def _builds_of(candidates: Candidates, problem: Problem, rows: Sequence[Trial]) -> list[Build]:
    """A build on a problem for each row whose config the candidates's spaces have."""
    found: list[Build] = []
    for space in candidates.spaces:
        there = set(space.configs)
        configs = [Config(t.config) for t in rows if t.kernel == space.kernel.name]
        configs = [config for config in configs if config in there]
        on = replace(space, problem=problem)
        found += builds_of(on, configs, candidates.compiler, candidates.limit)
    return found
