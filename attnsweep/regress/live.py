"""Old code against new, timed in turns on one GPU: may this change go in?

For each problem, the winner of a recorded baseline (its stored cubins and launches) is timed
against the same config compiled from today's kernels, in one process on one card. The new code must
first be right on every case. Code that did not change passes untimed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnsweep.bench.gpu import Gpu, WorkerError
from attnsweep.bench.worker import Worker
from attnsweep.compile.calls import build_of
from attnsweep.compile.candidate import Build, compiled_candidate, workspace_limit
from attnsweep.compile.cubin import compiler_for
from attnsweep.compile.launches import Candidate, LaunchPlan, Plan
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.callables import Asked
from attnsweep.core.errors import (
    CompileError,
    CompilerLost,
    KernelError,
    NoGpuError,
    SpecError,
    StoreError,
)
from attnsweep.core.files import write_file
from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment, Trial
from attnsweep.device.lock import held
from attnsweep.family.called import CalledFamily
from attnsweep.family.family import Config, Family
from attnsweep.regress.ab_test import RECORD, AbTestResult, Ended, Series, said
from attnsweep.regress.budget import Budget
from attnsweep.regress.sequential_test import FEWEST
from attnsweep.regress.verdicts import Comparison, Finding, Verdict, differences, other_card
from attnsweep.reports.sections import sections_of
from attnsweep.specs.load import SweepSpec
from attnsweep.specs.plan import arch_of, input_seed
from attnsweep.store.code import read_code, read_files, same_code
from attnsweep.store.run import Run

PROVES = (
    "Old and new code took turns in each of two to eight processes on one GPU, so drift affected "
    "both. Processes may differ: if their ratios scatter by 0.5 % (standard deviation) or less, "
    "code that is slower by the threshold passes, and code at most half the threshold slower is "
    "called a regression, in less than 1 % of the problems."
)
DOES_NOT_PROVE = (
    "It covers the baseline's winners with a warm L2. It does not cover other configs, a cold L2 "
    "or the host's cost of a launch; attnsweep run measures those."
)
# Problems that take turns in the same processes until each has had FEWEST; then the next join.
# More would share a start among more, and leave all of them undecided where time is short.
_TOGETHER = 12
# Rounds of a turn take this long at least, as far as there is time: of fewer nothing is known.
_LEAST_ROUNDS_S = 1.0
Tell = Callable[[Finding], None]


@dataclass(frozen=True, slots=True)
class Pair:
    """One problem that can be compared: the winner's row and stored launches, and today's build."""

    problem: Problem
    slower: float
    row: Mapping[str, Any]
    old: LaunchPlan | Build
    """The launches; or a build, which is compiled as today's is."""
    build: Build

    def same(self) -> bool:
        """Whether both run the same code in the same way, once compiled. Raises Ended."""
        if isinstance(self.old, Build):
            self.old_plan()
            return self.old.machine_code() == self.build.machine_code()
        return same_code(self.old, self.build.launches_for(self.problem))

    def old_plan(self) -> Plan:
        """The old code. Raises Ended if it does not compile."""
        try:
            return self.old.launches_for(self.problem) if isinstance(self.old, Build) else self.old
        except CompileError as error:
            what = f"the old code does not compile: {error.what}"
            raise Ended(Verdict.INCONCLUSIVE, what) from error

    def check_compiler(self) -> None:
        """Raises Ended if what compiled the new code was killed, which says nothing of the code."""
        try:
            self.build.cubins()
        except CompilerLost as error:
            raise Ended(Verdict.INCONCLUSIVE, f"the new code: {error.what}") from error
        except CompileError:
            return


@dataclass(frozen=True)
class Sides:
    """Old and new code for the problems of a spec. old, new: as a Comparison has them.

    slower: share by which new code may be slower, for all problems (default: the spec's for each).
    """

    spec: SweepSpec
    old: Path
    new: Path
    slower: float | None = None
    without_gpu = ""
    """What compares them without a GPU, beside --mode compile."""

    def pairs(self, compiler: Compiler, here: Environment | None, /) -> list[Pair | Finding]:
        """For each problem, a pair that is already compiling, or why there is none.

        here: the card.
        """
        raise NotImplementedError

    def covers(self, _compiler: Compiler, /) -> str:
        """A sentence on what is compared; empty of a run's winners."""
        return ""

    def told(self, finding: Finding) -> Finding:
        """The finding in words of who asked: files of an old revision are named by it."""
        return finding

    def budget(self, asked_s: float | None) -> Budget:
        """The time of a whole check, which begins: as asked for, or the spec's."""
        return Budget(self.spec.check.budget_s if asked_s is None else asked_s)

    def comparison(
        self, findings: Sequence[Finding], budget: Budget, here: Environment | None, **said: Any
    ) -> Comparison:
        """The findings with what they rest on. here: as it is now. said: of Comparison."""
        share = self.spec.check.slower if self.slower is None else self.slower
        found = tuple(map(self.told, findings))
        facts = {"slower": share, "findings": found, **self._facts(here), **said}
        times = {"budget_s": budget.total_s, "took_s": budget.spent_s}
        return Comparison(self.old, self.new, **facts, **times)  # type: ignore[arg-type]

    def timed(
        self, findings: Sequence[Finding], budget: Budget, here: Environment, covers: str = ""
    ) -> Comparison:
        """The comparison of times. covers: what is compared."""
        said = f"{covers} with a warm L2, in one process that both sides share."
        proof = {"proves": PROVES, "does_not_prove": said if covers else DOES_NOT_PROVE}
        return self.comparison(findings, budget, here, interval="99.9 % interval", **proof)

    def _facts(self, _here: Environment | None, /) -> dict[str, Any]:
        return {}


def check(
    sides: Sides,
    *,
    budget_s: float | None = None,
    wait: bool = False,
    cache_dir: Path | None = None,
    observer: Observer | None = None,
    tell: Tell | None = None,
) -> Comparison:
    """The verdict on every problem: may the new code take the place of the old?

    budget_s: seconds of the whole check, after which problems that are not decided are inconclusive
    (default: the spec's). wait: for another run that times on the card, which is no part of the
    budget; otherwise BusyError. tell: gets each finding as soon as it is there. Raises NoGpuError,
    SpecError or ToolchainError; any other failure is the verdict of its problem.
    """
    spec, budget, observer = sides.spec, sides.budget(budget_s), observer or Observer()
    refuse_replay(spec)
    with (
        ExitStack() as locks,  # until the worker has stopped
        Worker(spec.measure.timeout_s, cache_dir=cache_dir) as gpu,
    ):
        try:
            here = gpu.describe()
        except NoGpuError as error:
            raise not_compared(error, sides) from error
        with budget.paused():
            locks.enter_context(held(here.uuid, here.gpu, wait=wait, say=observer.note))
        with compiler_for(spec, arch_of(spec, here), cache_dir) as compiler:
            pairs, covers = sides.pairs(compiler, here), sides.covers(compiler)
            findings = Gate(spec, gpu, observer, budget).run(pairs, tell)
    return sides.timed(findings, budget, here, covers)


def refuse_replay(spec: SweepSpec) -> None:
    """Raise SpecError for a spec that measures nothing."""
    if spec.device == "replay":
        raise SpecError(
            "check --against measures, and this spec replays a recording",
            where=str(spec.document.path),
            hint="give a spec with device: cuda; to compare runs: check --recorded OLD NEW",
        )


def not_compared(error: NoGpuError, sides: Sides) -> NoGpuError:
    """The error with what works without a GPU."""
    lines = [error.hint, "without a GPU, --mode compile compares the machine code of both sides"]
    hint = "\n  ".join(filter(None, [*lines, sides.without_gpu]))
    return NoGpuError(f"{error.what}. Nothing was compared.", where=error.where, hint=hint)


# -- what is compared -----------------------------------------------------------------------


def _kept(baseline: Run, winner: Trial, compiler: Compiler) -> LaunchPlan | Build:
    """The old code: its launches, or, of a call, its build from the files that the run kept."""
    try:
        plan = read_code(baseline.directory, winner)
        if isinstance(plan, LaunchPlan):
            return plan
        texts = read_files(baseline.directory, winner)
    except StoreError as error:
        hint = f"; {error.hint}" if error.hint else ""
        raise Ended(Verdict.INCONCLUSIVE, f"{error.where}: {error.what}{hint}") from error
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:16]
    place = compiler.cache_dir / "sources" / digest
    for file, text in texts.items():
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        write_file(place / file, text.encode())
    named = Asked.of(plan.call)
    at, _, function = named.call.rpartition(":")
    path = Path(at if at.endswith(".py") else f"{at.replace('.', '/')}.py")
    own = next((file for file in texts if Path(file).name == path.name), None)
    if own is None:
        raise Ended(Verdict.INCONCLUSIVE, f"the run's files have no {path.name}; {RECORD}")
    call = str(replace(named, call=f"{place / own}:{function}"))
    family = CalledFamily(winner.kernel, call, (), call=call)
    old = build_of(family, Config(winner.config), winner.problem, compiler)
    old.submit()
    return old


def _today(
    winner: Trial, kernels: Mapping[str, Family], compiler: Compiler, limit: int | None
) -> Build:
    """The build of the winner's config from today's kernel. Raises Ended if that is impossible."""
    kernel = kernels.get(winner.kernel)
    if kernel is None:
        what = f"the baseline's winner, kernel {winner.kernel!r}, no longer exists"
        raise Ended(Verdict.INCONCLUSIVE, f"{what}; give its directory with --kernels, or {RECORD}")
    changed = kernel.changed_since(winner.config)
    if changed is not None:
        raise Ended(Verdict.INCONCLUSIVE, f"{changed}; {RECORD}")
    config = kernel.of_today(winner.config)
    try:
        refusal = kernel.refusal(winner.problem, compiler.arch)
        rule = None if refusal else kernel.refused_by(config, winner.problem, compiler.arch)
        if refusal is not None or rule is not None:
            why = refusal or f"the rule {rule} refuses {config.label}"
            raise Ended(Verdict.INCONCLUSIVE, f"{kernel.name} cannot run it now: {why}; {RECORD}")
        return build_of(kernel, config, winner.problem, compiler, workspace_limit=limit)
    except KernelError as error:
        where = f"{error.where}: " if error.where else ""
        raise Ended(Verdict.WRONG, f"{where}{error.what}") from error


@dataclass(frozen=True)
class Winners(Sides):
    """The winners of a recorded run, and the same configs of today's kernels.

    other_driver: also compare with a baseline measured with another driver.
    """

    baseline: Run = field(kw_only=True)
    other_driver: bool = field(default=False, kw_only=True)
    without_gpu = "and attnsweep check --recorded OLD NEW compares two runs"

    @classmethod
    def of(cls, spec: SweepSpec, baseline: Run, slower: float | None = None, **how: Any) -> Winners:
        """Those of a run, compared by a spec."""
        return cls(spec, baseline.directory, spec.document.path, slower, baseline=baseline, **how)

    @property
    def problems(self) -> list[Problem]:
        """The spec's problems, then those that only the baseline has a verdict on."""
        asked = [entry.problem for entry in self.spec.problems]
        return list(dict.fromkeys([*asked, *(trial.problem for trial in self.baseline.trials)]))

    def _facts(self, here: Environment | None) -> dict[str, Any]:
        differ = tuple(differences(self.baseline.environment, here))
        return {"differences": differ, "damage": tuple(self.baseline.warnings)}

    def _elsewhere(self, here: Environment) -> str | None:
        """Why times of the baseline's code here would be of another card or driver, or None."""
        old = self.baseline.environment
        elsewhere = other_card(old, here)
        if elsewhere is None and not self.other_driver and old and old.driver != here.driver:
            elsewhere = (
                f"the baseline used driver {old.driver}, this machine has {here.driver}; add "
                "--other-driver to time its code with this one"
            )
        return elsewhere

    def pairs(
        self,
        compiler: Compiler,
        here: Environment | None,
        problems: Sequence[Problem] | None = None,
    ) -> list[Pair | Finding]:
        """See Sides. problems: those alone."""
        assert here is not None
        spec, elsewhere = self.spec, self._elsewhere(here)
        before = {s.problem: s.winner for s in sections_of(self.baseline)}
        own = {entry.problem: entry.slower for entry in spec.problems}
        limit = workspace_limit(spec, here.memory_bytes)
        found: list[Pair | Finding] = []
        for problem in self.problems if problems is None else problems:
            row = before.get(problem)
            try:
                if problem not in own:
                    raise Ended(Verdict.INCONCLUSIVE, f"only the baseline has it; {RECORD}")
                if elsewhere is not None:
                    raise Ended(Verdict.INCONCLUSIVE, f"{elsewhere}; {RECORD}")
                if problem not in before:
                    raise Ended(Verdict.INCONCLUSIVE, f"the baseline lacks this problem; {RECORD}")
                if row is None:
                    raise Ended(Verdict.INCONCLUSIVE, "no candidate is ok in the baseline")
                old = _kept(self.baseline, row["trial"], compiler)
                build = _today(row["trial"], spec.families, compiler, limit)
                build.submit()
                share = self.slower
                if share is None:
                    share = own[problem] or spec.check.slower
                found.append(Pair(problem, share, row, old, build))
            except Ended as ended:
                found.append(Finding(problem.label, ended.verdict, ended.why, shown_row(row)))
        return found


# -- the comparison -------------------------------------------------------------------------


class Late(Ended):
    """A comparison that the time budget cut off."""


@dataclass(slots=True)
class _Work:
    """A problem that is not decided. own: its threshold, if that is not the spec's.

    series: once the new code is right, and other code. overhead_s: what its last turn took beside
    its rounds, which another turn will take too. took_s: its turns so far.
    """

    number: int
    pair: Pair
    own: float | None
    trial: Trial | None = None
    series: Series | None = None
    overhead_s: float = 0.0
    took_s: float = 0.0

    @property
    def processes(self) -> int:
        """In how many processes it was timed."""
        return 0 if self.series is None else len(self.series.each)


class Gate:
    """The problems on one GPU, in turns, as long as there is time.

    A turn of a problem is its rounds in one process. The problems that are not decided have a turn
    each in one process, then each in the next.
    """

    def __init__(self, spec: SweepSpec, gpu: Gpu, observer: Observer, budget: Budget) -> None:
        self._spec, self._gpu = spec, gpu
        self._observer, self._budget = observer, budget

    def run(self, pairs: Sequence[Pair | Finding], tell: Tell | None = None) -> list[Finding]:
        """The finding for each of these pairs, in order. tell: see `check`."""
        found: dict[int, Finding] = {}

        def decide(number: int, finding: Finding) -> None:
            found[number] = finding
            if tell is not None:
                tell(finding)

        left: list[_Work] = []
        for number, pair in enumerate(pairs):
            if isinstance(pair, Finding):
                decide(number, pair)
            else:
                own = None if pair.slower == self._spec.check.slower else pair.slower
                left.append(_Work(number, pair, own))
        fresh = True  # the process that described the GPU has timed nothing
        while left:
            young = [work for work in left if work.processes < FEWEST]
            together = young[:_TOGETHER] or [*left]
            waiting = [*together]
            for work in together:
                if self._budget.left_s <= work.overhead_s:
                    continue
                if not fresh:
                    self._gpu.stop()
                    fresh = True
                turns = sum(max(w in waiting, FEWEST - w.processes) for w in left)
                waiting.remove(work)
                begin_s = self._budget.spent_s
                finding = self._turn(work, turns)
                work.took_s += self._budget.spent_s - begin_s
                if finding is not None:
                    left.remove(work)
                    decide(work.number, replace(finding, took_s=work.took_s))
            if len(waiting) == len(together):
                break
            fresh = False
        for work in left:
            decide(work.number, replace(self._unfinished(work), took_s=work.took_s))
        return [found[number] for number in range(len(pairs))]

    def _turn(self, work: _Work, turns: int) -> Finding | None:
        """One more turn of a problem, of `turns` to come; the finding, if that decides."""
        label, row = work.pair.problem.label, shown_row(work.pair.row)
        try:
            if work.series is None:
                self._observer.opening(work.pair.problem, 1, 0)
                candidate = self._compiled(work)
                opened_s = self._open(work.pair.problem)
                self._prove(candidate)
                if work.pair.same():
                    why = "same machine code and launches: right, not timed"
                    return Finding(label, Verdict.PASS, why, row, row, slower=work.own)
                work.series = self._series(work, candidate)
            else:
                opened_s = self._open(work.pair.problem)
            begin_s, left_s = self._budget.spent_s, self._budget.left_s
            if not left_s:
                return None
            rounds_s = min(left_s, max(left_s / turns, _LEAST_ROUNDS_S))  # an equal share
            work.series.take(self._gpu, rounds_s, self._watch)
            taken_s = self._budget.spent_s - begin_s
            work.overhead_s = opened_s + taken_s - work.series.each[-1].spent_s
            if not work.series.over:
                return None
            work.series.confirm(self._gpu)
            return _finding(work, work.series.outcome())
        except Ended as ended:
            late = isinstance(ended, Late)
            return Finding(label, ended.verdict, ended.why, row, slower=work.own, budget_ended=late)

    def _unfinished(self, work: _Work) -> Finding:
        """The finding for a problem that is not decided when the time is up."""
        label, up = work.pair.problem.label, f"when {self._budget} ended: raise --budget-s"
        if work.series is not None and work.processes:
            finding = _finding(work, work.series.outcome(f"{up}, or use a quieter machine"))
            return replace(finding, budget_ended=True)
        why = f"{'not begun' if work.series is None else 'right, but not timed'} {up}"
        row = shown_row(work.pair.row)
        return Finding(label, Verdict.INCONCLUSIVE, why, row, slower=work.own, budget_ended=True)

    def _compiled(self, work: _Work) -> Candidate:
        """Today's candidate, once it is compiled. Raises Ended if it cannot be."""
        if wait_for(work.pair.build.futures.values(), self._budget.left_s).not_done:
            raise Late(Verdict.INCONCLUSIVE, f"still compiling when {self._budget} ended")
        work.pair.check_compiler()
        work.trial, candidate = compiled_candidate(work.pair.build, self._spec)
        self._observer.compiled(1, 1)
        if candidate is None:
            raise Ended(Verdict.WRONG, said(work.trial.status, work.trial.detail))
        return candidate

    def _open(self, problem: Problem) -> float:
        """Open a problem, in a new process if there is none; returns how long that took."""
        settings, begin_s = self._spec, self._budget.spent_s
        try:
            self._gpu.open(problem, replay_us=settings.measure.replay_us, seed=input_seed(settings))
        except WorkerError as error:
            what = f"cannot open the problem: {error.detail}"
            raise Ended(Verdict.INCONCLUSIVE, what) from error
        return self._budget.spent_s - begin_s

    def _prove(self, candidate: Candidate) -> None:
        """Check the new code on every case. Raises Ended if it is wrong."""
        try:
            self._gpu.trial(candidate)
        except WorkerError as error:
            raise Ended(Verdict.WRONG, said(error.status, error.detail)) from error

    def _series(self, work: _Work, new: Candidate) -> Series:
        """The pairs of old and new code that will be timed."""
        old = replace(new, timed=work.pair.old_plan(), checks=(), empty=None, turns=None)
        seed = f"{self._spec.search.seed} {work.pair.problem.label}"
        return Series(old, new, slower=work.pair.slower, seed=seed)

    def _watch(self, spent_s: float) -> None:  # noqa: ARG002
        total_s = int(self._budget.total_s)
        self._observer.timing(min(int(self._budget.spent_s), total_s), total_s)


def _finding(work: _Work, found: AbTestResult) -> Finding:
    pair, turns = work.pair, found.shown
    interval = turns.interval
    rounds = interval.rounds if interval else None
    used = None if work.trial is None else work.trial.resources
    old = (shown_row(pair.row) or {}) | {"time_us": turns.old_us, "rounds": rounds}
    new = old | {"time_us": turns.new_us}
    if used is not None:
        new |= {"registers": used.registers, "smem_bytes": used.smem_bytes}
    finding = Finding(pair.problem.label, found.verdict, found.why, old, new, slower=work.own)
    if interval is None:
        return finding
    median, low, high = interval.median, interval.low, interval.high
    return replace(finding, ratio=median, low=low, high=high, rounds=rounds)


def shown_row(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The columns of the baseline's row for the report, without its recorded time."""
    if row is None:
        return None
    kept = {name: row[name] for name in ("kernel", "config", "registers", "smem_bytes")}
    return kept | {"time_us": None, "spread_us": None, "rounds": None}
