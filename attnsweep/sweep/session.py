"""A sweep from its spec to its stored run, on 1 to N cards."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Protocol

from attnsweep.bench.worker import Worker
from attnsweep.choose.energy import refuse_without_counter
from attnsweep.choose.search import search_of
from attnsweep.compile.advice import spilling, unused_parameters
from attnsweep.compile.calls import builds_of, tracers_of, with_calls
from attnsweep.compile.candidate import Build, workspace_limit
from attnsweep.compile.cubin import compiler_for
from attnsweep.compile.nvrtc import LATER, NOW, Compiler
from attnsweep.core.errors import AttnsweepError, CardLostError, SpecError
from attnsweep.core.hardware import Arch
from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Environment, Status, cards_of
from attnsweep.device.cards import installed_arch
from attnsweep.device.lock import held
from attnsweep.reports import tables
from attnsweep.reports.sections import sections_of
from attnsweep.reports.text import sentence
from attnsweep.specs.load import SweepSpec
from attnsweep.specs.plan import (
    PlannedProblem,
    Shard,
    arch_of,
    candidate_counts,
    input_seed,
    plan,
    plan_facts,
    refuse_too_large,
    run_name,
)
from attnsweep.store.run import Run
from attnsweep.store.store import Store
from attnsweep.sweep.kept import measured_elsewhere, of_these_cards, retire
from attnsweep.sweep.loop import Share, begin, sweep_problem
from attnsweep.sweep.replay import replay
from attnsweep.verify.compare import PARTS, judge_source

# Candidates to compile while the GPU process starts, which takes 1.5 s.
_EARLY = 64


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """The result of a sweep."""

    run: Run
    interrupted: bool
    unmeasured: tuple[str, ...] = ()
    """Labels of problems that no card has measured to the end."""
    no_card: bool = False
    """Whether that is because every card was lost."""

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    @property
    def sentences(self) -> list[str]:
        """The fastest kernel of each problem, and by how much it is faster."""
        return [sentence(section) for section in sections_of(self.run)]

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C; 3 if all cards were lost; 1 if a problem has no result; otherwise 0."""
        if self.interrupted or self.no_card:
            return 130 if self.interrupted else 3
        if self.unmeasured:
            return 1
        trials = [t for t in self.run.trials if t.provider == OURS]
        problems = {t.problem for t in trials}
        ok = {t.problem for t in trials if t.status in (Status.OK, Status.NOISY)}
        return 0 if problems and ok == problems else 1


class Cards(Protocol):
    """The cards of a sweep: one of this process, or several behind lines of JSON."""

    @property
    def several(self) -> bool:
        """Whether there may be more than one."""

    @property
    def firsts(self) -> Sequence[Problem]:
        """The problems that cards will probably open first, guessed before the plan."""

    def opened(self, session: SweepSession) -> AbstractContextManager[None]:
        """Start their processes while the context lasts."""

    def describe(self) -> Environment:
        """The environment of the first card that is ready. Raises NoGpuError."""

    def hold(self, environment: Environment) -> None:
        """Lock the card, unless that is done. Raises BusyError."""

    def sweep(self, session: SweepSession) -> bool:
        """Sweep every problem; returns whether a card is left. Ctrl-C is raised."""


def run(
    spec: SweepSpec,
    cards: Cards | None = None,
    *,
    results: Path,
    fresh: bool = False,
    limit: int | None = None,
    shard: Shard | None = None,
    cache_dir: Path | None = None,
    wait: bool = False,
    observer: Observer | None = None,
) -> SweepOutcome:
    """Run a sweep and store it under `results`/<gpu>/<spec name>. Same spec again: resume.

    cards: default: the first visible one, in this process. limit: at most this many candidates per
    family and problem. shard: sweep this part of the problems alone, and store it under
    `results`/<gpu>/<spec name>-<part>. wait: for another run that times on a card; otherwise
    BusyError. Ctrl-C, and cards that are lost, return an outcome with the rows measured so far.
    Raises NoGpuError, SpaceError, SpecError, StoreError or ToolchainError.
    """
    observer = observer or Observer()
    if limit is not None:
        cap = min(limit, spec.search.candidates or limit)
        spec = replace(spec, search=spec.search.model_copy(update={"candidates": cap}))
    if spec.device == "replay":
        if cards is not None:
            what = "--gpus needs GPUs, and this spec replays a recording"
            raise SpecError(what, where=str(spec.document.path))
        return SweepOutcome(replay(spec, results, observer, shard), False)
    session = SweepSession(spec, observer, shard, cache_dir, wait)
    return session.run(cards or ThisCard(), results, fresh)


class SweepSession:
    """What all cards of a sweep share: the plan, the compiler and the store."""

    def __init__(
        self,
        spec: SweepSpec,
        observer: Observer,
        shard: Shard | None,
        cache_dir: Path | None,
        wait: bool,
    ) -> None:
        self.spec, self.observer = spec, observer
        self.shard, self.cache_dir, self.wait = shard, cache_dir, wait
        self.seed = input_seed(spec)
        """The seed of all inputs: one, since a card computes ahead for its next problem."""
        self._uuids: set[str | None] = set()
        self._finished: set[Problem] = set()

    def run(self, cards: Cards, results: Path, fresh: bool) -> SweepOutcome:
        """Sweep on these cards. See `run`."""
        spec, note = self.spec, self.observer.note
        with cards.opened(self), ExitStack() as at_end:
            self._begin(cards, at_end)
            spec = self.spec
            cards.hold(self.environment)
            self.observer.planned(candidate_counts(self.planned, spec.search.candidates))
            spaces = (space for item in self.planned for space in item.spaces)
            for warning in unused_parameters(spaces, self.compiler.arch):
                note(warning)
            directory = results / self.environment.slug / run_name(spec, self.shard)
            of_any = {"uuid": None} if cards.several else {}
            here = self.environment.model_copy(update=of_any)
            elsewhere = not fresh and measured_elsewhere(directory, here)
            if elsewhere:
                note(f"set aside earlier rows, measured with {elsewhere}")
            opened = Store.open(directory, fresh=fresh or bool(elsewhere))
            self.store = at_end.enter_context(opened)
            self.describe(cards_of(self.store.trials), plan_facts(self.planned))
            retire(self.store, spec.families, self.observer)
            interrupted, left = False, True
            try:
                left = cards.sweep(self)
            except KeyboardInterrupt:
                interrupted = True
            self.compiler.close()
            if spills := spilling(self.store.trials, spec):
                note(spills)
            problems = [item.problem for item in self.planned]
            unmeasured = tuple(p.label for p in problems if p not in self._finished)
            run = self.store.finish(tables.files)
            return SweepOutcome(run, interrupted, unmeasured, not left)

    def _begin(self, cards: Cards, at_end: ExitStack) -> None:
        """Describe the card and plan the sweep on it. at_end: closes the compiler."""
        spec, shard = self.spec, self.shard

        def plan_for(arch: Arch) -> None:
            self.compiler = compiler_for(spec, arch, self.cache_dir)
            at_end.callback(self.compiler.close)
            for op, dtype in {(entry.problem.op, entry.problem.dtype) for entry in spec.problems}:
                for part in PARTS[op.name]:  # the GPU process needs them first
                    self.compiler.submit(*judge_source(dtype, part))
            self.spec = with_calls(spec, tracers_of(self.compiler))
            whole = plan(self.spec, arch)
            self.planned = whole if shard is None else shard.take(whole)

        # What reports need takes 0.4 s after the last round otherwise, on an H200 host.
        threading.Thread(target=_import_pandas, daemon=True).start()
        with ThreadPoolExecutor(1) as aside:
            described, begun = aside.submit(cards.describe), None
            # In this thread, where a rule that never returns meets its time limit, or Ctrl-C.
            early = installed_arch()
            if early is not None and spec.arch in (None, early.name):
                with suppress(AttnsweepError):  # raised again below, unless there is no such card
                    plan_for(early)
                    begun = early
                    _compile_early(self.spec, self.planned, self.compiler, cards.firsts)
        self.environment = described.result()
        arch = arch_of(spec, self.environment)
        refuse_too_large((entry.problem for entry in spec.problems), self.environment)
        refuse_without_counter(self.environment, spec.measure.rank_by)
        if begun != arch:
            plan_for(arch)

    @property
    def share(self) -> Share:
        """The session as a card of this process uses it."""
        return Share(
            self.spec, self.environment, self.compiler, self.store, self.observer, self.seed
        )

    def describe(
        self, uuids: Iterable[str | None], facts: Sequence[Mapping[str, object]] | None = None
    ) -> None:
        """Write the run's spec, environment and plan. uuids: of more cards. facts: the plan."""
        if facts is None and {*uuids} <= self._uuids:
            return
        self._uuids.update(uuids)
        where = of_these_cards(self.environment, self._uuids)
        self.store.describe(self.spec.resolved(self.store.directory), where, facts)

    def finished(self, problem: Problem) -> None:
        """A card has swept a problem to its end."""
        self._finished.add(problem)
        rows = self.store.rows_of(problem)
        if len(self._finished) < len(self.planned) and rows:
            self.observer.ranked(rows, self.environment)


def _import_pandas() -> None:
    with suppress(BaseException):  # which is raised again where reports need it
        import_module("pandas")


def _compile_early(
    spec: SweepSpec,
    planned: Sequence[PlannedProblem],
    compiler: Compiler,
    firsts: Sequence[Problem],
) -> None:
    """Begin to compile the first candidates, while the card starts."""
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


class ThisCard:
    """The first visible card, swept by this process."""

    several = False
    firsts: Sequence[Problem] = ()

    @contextmanager
    def opened(self, session: SweepSession) -> Iterator[None]:
        """See `Cards`."""
        spec = session.spec
        self._wait, self._note, self._preload = session.wait, session.observer.note, spec.imported
        # Only the plan says which problems a part has.
        self._first = None if session.shard else (spec.problems[0].problem, session.seed)
        with (
            ExitStack() as self._locks,  # until the worker has stopped
            Worker(spec.measure.timeout_s, cache_dir=session.cache_dir) as self._gpu,
        ):
            yield

    def describe(self) -> Environment:
        """See `Cards`."""
        return self._gpu.describe(preload=self._preload, first=self._first)

    def hold(self, environment: Environment) -> None:
        """See `Cards`."""
        lock = held(environment.uuid, environment.gpu, wait=self._wait, say=self._note)
        self._locks.enter_context(lock)

    def sweep(self, session: SweepSession) -> bool:
        """See `Cards`."""
        s, share, began = session, session.share, time.monotonic()
        try:
            # The first candidates of later problems compile where a thread has nothing else to do.
            begun = deque(
                begin(item, share, LATER if number else NOW)
                for number, item in enumerate(s.planned)
            )
            while begun:
                candidates = begun.popleft()  # whose memory is free when the next begins
                sweep_problem(candidates, self._gpu, share, begun[0].problem if begun else None)
                s.finished(candidates.problem)
        except CardLostError as error:
            if not s.store.trials:
                raise
            self._note(error.what)
            return False
        finally:
            if proof_s := self._gpu.proof_s:
                self._note(_said_of_proof(time.monotonic() - began, proof_s))
        return True


def _said_of_proof(took_s: float, proof_s: Mapping[str, float]) -> str:
    most = sorted(proof_s.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{name} {spent_s:.1f}" for name, spent_s in most if spent_s >= 0.05)
    in_all = sum(proof_s.values())
    return f"took {took_s:.0f} s; {in_all:.1f} s of them proved outputs right ({parts})"
