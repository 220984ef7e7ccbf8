"""`check --against` on several cards: each verifies its share of the problems.

Old and new code of one problem are timed in turns on one card, as on a machine with one; which card
that is does not matter, as long as it is of the baseline's kind.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnsweep.compile.cubin import compiler_for
from attnsweep.core.errors import NoGpuError
from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Environment
from attnsweep.device.cards import InstalledCard
from attnsweep.regress.budget import Budget
from attnsweep.regress.live import Tell, asked_of, comparison, not_compared, refuse_replay
from attnsweep.regress.verdicts import Comparison, Finding, Verdict
from attnsweep.specs.load import SweepSpec
from attnsweep.specs.plan import arch_of
from attnsweep.store.run import SPEC, Run
from attnsweep.sweep import messages
from attnsweep.sweep.assign import Assignment, Task
from attnsweep.sweep.cards import (
    Engine,
    all_held,
    hello_of,
    longest_silence_s,
    opening_of,
    refusal_of,
)
from attnsweep.sweep.messages import PROGRESS, Message, progress

# Two processes take less for most problems. With a smaller share none would be decided.
_LEAST_SHARE_S = 15.0


def check(
    spec: SweepSpec,
    baseline: Run,
    cards: Sequence[InstalledCard],
    *,
    slower: float | None = None,
    budget_s: float | None = None,
    other_driver: bool = False,
    wait: bool = False,
    cache_dir: Path | None = None,
    observer: Observer | None = None,
    silence_s: float | None = None,
    tell: Tell | None = None,
) -> Comparison:
    """The verdict on every problem, as `live.check` gives it, with a child process for each card.

    silence_s: see `Fleet`; the other arguments and errors: see `live.check`. A
    problem gets an equal share of the time that all cards have left when its card begins it. One
    that no card could check is inconclusive.
    """
    budget = Budget(spec.check.budget_s if budget_s is None else budget_s)
    observer = observer or Observer()
    refuse_replay(spec)
    with ExitStack() as locks, ExitStack() as at_end:
        with budget.paused():
            locks.enter_context(all_held(cards, wait, observer))
        hello = hello_of(spec, cache_dir) | {"preload": []}
        silence_s = silence_s or longest_silence_s(spec) + budget.total_s
        engine = Engine(cards, messages.start_child, hello, silence_s=silence_s, note=observer.note)
        at_end.enter_context(engine)
        try:
            here = engine.first()
        except NoGpuError as error:
            raise not_compared(error) from error
        compiler = compiler_for(spec, arch_of(spec, here), cache_dir)
        at_end.callback(compiler.close)
        place = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="attnsweep-")))
        (place / SPEC).write_text(spec.resolved(place), encoding="utf-8")
        options = {"slower": slower, "other_driver": other_driver}
        job = _Checks(spec, baseline, here, place / SPEC, options, budget, tell)
        job.on = {c: observer.on(c.number, c.hashed or c.uuid) for c in cards}
        observer.planned([1] * len(job.problems), finals=False)
        began = time.monotonic()
        engine.run(job.assignment, job, compiler)
        observer.note(f"took {time.monotonic() - began:.0f} s on {len(cards)} cards")
    return comparison(spec, baseline, here, job.findings, slower, budget)


class _Checks:
    """What the children are told to check, and what they found."""

    def __init__(
        self,
        spec: SweepSpec,
        baseline: Run,
        here: Environment,
        written: Path,
        options: Mapping[str, Any],
        budget: Budget,
        tell: Tell | None,
    ) -> None:
        """written: where the spec lies."""
        self.problems: list[Problem] = asked_of(spec, baseline)
        self._spec, self._baseline = spec, baseline
        self._here, self._written, self._options = here, written, options
        self._budget, self._tell = budget, tell
        self.assignment = Assignment([1 + problem.flops / 5e11 for problem in self.problems])
        self.on: dict[InstalledCard, Observer] = {}
        self._found: dict[int, Finding] = {}

    @property
    def findings(self) -> list[Finding]:
        """The finding for each problem, in order."""
        why = "no card could check it; run the same command again"
        return [
            self._found.get(number) or Finding(problem.label, Verdict.INCONCLUSIVE, why)
            for number, problem in enumerate(self.problems)
        ]

    def label(self, number: int) -> str:
        """See Job, as for the other methods."""
        return self.problems[number].label

    def refusal(self, here: Environment) -> str | None:
        """Other kinds of cards are left out."""
        return refusal_of(here, self._here)

    def joined(self, card: InstalledCard, here: Environment) -> Collection[int]:  # noqa: ARG002
        """Nothing is kept of an earlier check."""
        return ()

    def opening(self) -> Message:
        """The spec, and every family that a winner of the baseline may be of."""
        used = {*self._spec.used, *(trial.kernel for trial in self._baseline.trials)}
        names = [name for name in self._spec.families if name in used]
        return opening_of(self._written, self._spec.families, names)

    def task(self, task: Task, then: int | None) -> Message:  # noqa: ARG002
        """The problem with its rows of the baseline."""
        problem = self.problems[task.number]
        rows = [row for row in self._baseline.trials if row.problem == problem]
        known = self._baseline.environment
        return {
            "do": "check",
            "problem": problem.facts,
            "last": task.last,
            "baseline": str(self._baseline.directory.absolute()),
            "rows": [row.model_dump(mode="json") for row in rows],
            "environment": None if known is None else known.model_dump(mode="json"),
            "budget_s": self._budget.total_s,
            "left_s": self._share_s(),
            **self._options,
        }

    def _share_s(self) -> float:
        """Seconds for the problem that a card begins now."""
        left_s, waiting = self._budget.left_s, len(self.assignment.pending)
        share = min(1.0, len(self.assignment.workers) / (waiting + 1))
        return min(left_s, max(left_s * share, _LEAST_SHARE_S))

    def heard(self, card: InstalledCard, number: int, message: Message) -> None:
        """Progress."""
        on = self.on[card]
        match message["say"]:
            case "opening":
                on.opening(self.problems[number], message["candidates"], message["kept"])
            case say if say in PROGRESS:
                progress(on, message)
            case other:
                raise ValueError(f"unknown message {other!r}")

    def lost(self, card: InstalledCard) -> None:
        """Its problem is another card's now."""
        self.on[card].resting(done=False)

    def finished(self, card: InstalledCard, number: int, message: Message) -> None:
        """A finding, as `Finding.to_json` wrote it."""
        told = dict(message["finding"])
        low, high = told.pop("interval") or (None, None)
        drift = told.pop("drift")
        finding = Finding(
            told.pop("problem"), Verdict(told.pop("verdict")), told.pop("why"), **told
        )
        drifted = None if drift is None else (drift[0], drift[1])
        self._found[number] = replace(finding, low=low, high=high, drift=drifted)
        self.on[card].resting(done=True)
        if self._tell is not None:
            self._tell(self._found[number])
