"""`check --against` on several cards: each verifies its share of the problems.

Old and new code of one problem are timed in turns on one card, as on a machine with one; which card
that is does not matter, as long as it is of the baseline's kind.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from attnsweep.compile.cubin import compiler_for
from attnsweep.core.errors import NoGpuError
from attnsweep.core.observer import Observer
from attnsweep.core.trial import Environment
from attnsweep.device.cards import InstalledCard
from attnsweep.regress.budget import Budget
from attnsweep.regress.live import Tell, Winners, not_compared, refuse_replay
from attnsweep.regress.verdicts import Comparison, Finding, Verdict
from attnsweep.specs.plan import arch_of
from attnsweep.store.rows import rows_of
from attnsweep.store.run import SPEC
from attnsweep.sweep import messages
from attnsweep.sweep.assign import Assignment, Task
from attnsweep.sweep.cards import Engine, Job, all_held, hello_of, longest_silence_s, opening_of
from attnsweep.sweep.messages import Message

# Two processes take less for most problems. With a smaller share none would be decided.
_LEAST_SHARE_S = 15.0


def check(
    sides: Winners,
    cards: Sequence[InstalledCard],
    *,
    budget_s: float | None = None,
    wait: bool = False,
    cache_dir: Path | None = None,
    observer: Observer | None = None,
    silence_s: float | None = None,
    tell: Tell | None = None,
) -> Comparison:
    """The verdict on every problem, as `live.check` gives it, with a child process for each card.

    silence_s: see `Fleet`; the other arguments and errors: see `live.check`. A problem gets an
    equal share of the time that all cards have left when its card begins it. One that no card could
    check is inconclusive.
    """
    spec, budget, observer = sides.spec, sides.budget(budget_s), observer or Observer()
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
            raise not_compared(error, sides) from error
        compiler = at_end.enter_context(compiler_for(spec, arch_of(spec, here), cache_dir))
        place = Path(at_end.enter_context(tempfile.TemporaryDirectory(prefix="attnsweep-")))
        (place / SPEC).write_text(spec.resolved(place), encoding="utf-8")
        job = Checks(sides, here, place / SPEC, budget, observer, tell)
        for card in cards:
            job.meet(card, card.hashed)
        observer.planned([1] * len(job.problems), finals=False)
        began = time.monotonic()
        engine.run(job.assignment, job, compiler)
        observer.note(f"took {time.monotonic() - began:.0f} s on {len(cards)} cards")
    return sides.timed(job.findings, budget, here)


class Checks(Job):
    """The problems of a check, and the finding of each."""

    def __init__(
        self,
        sides: Winners,
        here: Environment,
        written: Path,
        budget: Budget,
        observer: Observer,
        tell: Tell | None,
    ) -> None:
        """written: where the spec lies."""
        super().__init__(sides.problems, here, observer)
        self._sides, self._written, self._budget, self._tell = sides, written, budget, tell
        self.assignment = Assignment([1 + problem.flops / 5e11 for problem in self.problems])
        self._found: dict[int, Finding] = {}

    @property
    def findings(self) -> list[Finding]:
        """The finding for each problem, in order."""
        why = "no card could check it; run the same command again"
        return [
            self._found.get(number) or Finding(problem.label, Verdict.INCONCLUSIVE, why)
            for number, problem in enumerate(self.problems)
        ]

    def opening(self) -> Message:
        """The spec, and every family that a winner of the baseline may be of."""
        spec = self._sides.spec
        used = {*spec.used, *(trial.kernel for trial in self._sides.baseline.trials)}
        names = [name for name in spec.families if name in used]
        return opening_of(self._written, spec.families, names)

    def task(self, task: Task, then: int | None) -> Message:  # noqa: ARG002
        """The problem with its rows of the baseline."""
        problem = self.problems[task.number]
        baseline = self._sides.baseline
        rows, known = rows_of(baseline.trials, problem), baseline.environment
        return {
            "do": "check",
            "problem": problem.facts,
            "last": task.last,
            "baseline": str(baseline.directory.absolute()),
            "rows": [row.model_dump(mode="json") for row in rows],
            "environment": None if known is None else known.model_dump(mode="json"),
            "budget_s": self._budget.total_s,
            "left_s": self._share_s(),
            "slower": self._sides.slower,
            "other_driver": self._sides.other_driver,
        }

    def _share_s(self) -> float:
        """Seconds for the problem that a card begins now."""
        left_s, waiting = self._budget.left_s, len(self.assignment.pending)
        share = min(1.0, len(self.assignment.workers) / (waiting + 1))
        return min(left_s, max(left_s * share, _LEAST_SHARE_S))

    def finished(self, card: InstalledCard, number: int, message: Message) -> None:
        """A finding, as `Finding.to_json` wrote it."""
        self._found[number] = Finding.from_json(message["finding"])
        super().finished(card, number, message)
        if self._tell is not None:
            self._tell(self._found[number])
