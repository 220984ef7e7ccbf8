"""Progress of a sweep: bars on a terminal, a line now and then in a log, JSON for programs.

JSON: one object a line on standard error, each with `event` and `elapsed_s`. docs/how-to/watch.md
lists the fields. Lines that do not begin with `{` are messages for people.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from attnsweep.choose.pace import time_of
from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Environment, Status, Trial
from attnsweep.reports import terminal
from attnsweep.reports.eta import Eta
from attnsweep.reports.terminal import ProgressForm, counted

PLAIN_INTERVAL_S = 10.0
"""Without a terminal, print a line at most this often: a CI log shows progress but stays short."""
JSON_INTERVAL_S = 1.0
"""The same of --json."""
# `prepared` names no step that took less.
_SHORT_S = 0.05


@contextmanager
def watch(
    console: Console, form: ProgressForm = ProgressForm.AUTO, cards: int = 1
) -> Iterator[Observer]:
    """An observer that draws on `console`: bars on a terminal, a line now and then elsewhere.

    With --quiet it draws nothing, with --verbose also a line for each candidate. cards: of several,
    each has a bar or lines of its own, or its number in the events.
    """
    eta = Eta(cards)
    match form:
        case ProgressForm.JSON:
            events = _JsonLines(console, eta)
            try:
                yield events
            finally:
                events.write("end")
        case _ if terminal.talk is terminal.Talk.QUIET:
            yield Observer()
        case ProgressForm.AUTO if console.is_terminal:
            columns = (
                *(TextColumn("{task.description}"), BarColumn(bar_width=24)),
                *(MofNCompleteColumn(), TimeElapsedColumn(), _Said(eta)),
            )
            with Progress(*columns, console=console, transient=True) as progress:
                yield _Bars(progress, eta)
        case _:
            yield _PlainLines(console, eta)


class _Said(ProgressColumn):
    """The time left on the bar of the whole sweep, then the `said` of each bar."""

    def __init__(self, eta: Eta) -> None:
        super().__init__()
        self._eta = eta

    def render(self, task: Task) -> Text:
        left = self._eta.left if task.fields.get("whole") else None
        said = Text("" if left is None else str(left), style="progress.remaining")
        said.append("  " if left and task.fields["said"] else "")
        return said.append(task.fields["said"], style="none")


class _Watched(Observer):
    """A sweep on one card: its open problem and phase, the best time, rows by status, time left.

    A form overrides `begin`, `show` and `checked`, and what it prints in its own way.
    """

    def __init__(self, console: Console, eta: Eta, card: int = 0) -> None:
        self.console, self.eta, self.card = console, eta, card
        eta.joined(card)
        self.problem: Problem | None = None
        self.best: Trial | None = None
        self.counts: Counter[Status] = Counter()
        self.shorter = ""
        """Label of the shorter problem that candidates are tried on, if they are."""
        self.ready = self.total = 0
        """Candidates that have compiled, and all."""
        self.done: set[object] = set()
        """Candidates that have a row on the problem that they are tried on now."""
        self._seen: set[object] = set()
        """Candidates of the open problem that have a row on it, or on a shorter one."""

    # -- what a form shows ------------------------------------------------------------------

    def begin(self, candidates: int) -> None:
        """Begin another problem with this many candidates."""

    def show(self, phase: str, done: int, total: int, baseline: str = "") -> None:
        """The phase is this far: `search`, `race`, `baselines` or `finals`."""

    def checked(self, *, first: bool) -> None:
        """One candidate more is in `done`. first: it had no row on a shorter problem."""

    def note(self, text: str) -> None:
        self.console.print(escape(text), soft_wrap=not self.console.is_terminal)

    # -- what happens -----------------------------------------------------------------------

    def planned(self, candidates: Sequence[int], *, finals: bool = True) -> None:
        self.eta.planned(candidates, finals=finals)

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        self.problem, self.best = problem, None
        self.counts.clear()
        self._seen.clear()
        self.eta.opening(self.card, measures=kept < candidates)
        self._try_on("", candidates)

    def trying_on(self, label: str, candidates: int) -> None:
        self._try_on("" if self.problem and label == self.problem.label else label, candidates)

    def _try_on(self, shorter: str, candidates: int) -> None:
        self.shorter, self.ready, self.total = shorter, 0, candidates
        self.done.clear()
        self.begin(candidates)

    def compiled(self, done: int, total: int) -> None:
        self.ready, self.total = done, max(total, self.total)
        self.show("search", len(self.done), self.total)

    def tried(self, trial: Trial, *, kept: bool = False) -> None:
        self.counts[trial.status] += 1
        if terminal.talk is terminal.Talk.VERBOSE:
            self.note(_row(trial))
        if trial.provider != OURS:
            return
        self.eta.tried(trial.key, kept=kept)
        timed = trial.time_us is not None and trial.status is Status.OK
        if timed and (self.best is None or time_of(trial) <= time_of(self.best)):
            self.best = trial
        if trial.key not in self.done:
            first = trial.key not in self._seen
            self.done.add(trial.key)
            self._seen.add(trial.key)
            self.checked(first=first)

    def racing(self, alive: int, entrants: int) -> None:
        self.show("race", entrants - alive, entrants)

    def preparing(self, baseline: str, done: int, total: int) -> None:
        self.show("baselines", done, total, baseline)

    def prepared(self, what: str, took_s: float, steps_s: Mapping[str, float]) -> None:
        if terminal.talk is terminal.Talk.VERBOSE:
            parts = ", ".join(f"{name} {s:.1f} s" for name, s in steps_s.items() if s >= _SHORT_S)
            self.note(f"  prepared {what} in {took_s:.1f} s" + (f" ({parts})" if parts else ""))

    def timing(self, done: int, total: int) -> None:
        self.show("finals", done, total)

    def ranked(self, trials: Sequence[Trial], environment: Environment) -> None:
        from attnsweep.reports import tables

        for line, style in tables.first_rows(trials, environment, self.console.width - 2):
            text = Text(f"  {line}" if line else "", style=style)
            self.console.print(text, no_wrap=True, overflow="ellipsis", crop=True)

    def resting(self, *, done: bool) -> None:
        self.eta.resting(self.card, done=done)

    # -- in words ---------------------------------------------------------------------------

    @property
    def failed(self) -> int:
        """Number of candidates that did not compile, failed or gave wrong results."""
        bad = (Status.WRONG, Status.LAUNCH_ERROR, Status.TIMEOUT, Status.COMPILE_ERROR)
        return sum(self.counts[status] for status in bad)

    @property
    def summary(self) -> str:
        """`best 7.50 µs flash  1 failed`, without what is unknown."""
        best = f"best {time_of(self.best):.2f} µs {self.best.kernel}" if self.best else ""
        failed = f"{self.failed} failed" if self.failed else ""
        return "  ".join(filter(None, (best, failed)))


def _row(trial: Trial) -> str:
    """A candidate and what became of it."""
    name = trial.kernel if trial.provider == OURS else trial.provider
    config = " ".join(f"{key}={value}" for key, value in trial.config.items())
    time_us = f"{trial.time_us.median:.2f} µs" if trial.time_us else ""
    why = (trial.detail or "").partition("\n")[0]
    words = (f"  {name}", config, trial.status.value, time_us, why)
    return "  ".join(word for word in words if word)


class _Bars(_Watched):
    """The whole sweep with its ETA, then a bar of what its card does, or each of several cards.

    whole: the bar of the sweep, if there is one. name: of one of several cards.
    """

    def __init__(
        self, progress: Progress, eta: Eta, whole: TaskID | None = None, card: int = 0
    ) -> None:
        super().__init__(progress.console, eta, card)
        self.progress, self._several = progress, whole is not None
        self._name = f"  card {card}" if self._several else " "
        if whole is None:
            whole = progress.add_task("sweep", total=None, said="", whole=True)
        self._whole, said = whole, "starting" if self._several else ""
        self._bar = progress.add_task(self._name, total=None, said=said, visible=self._several)

    def on(self, card: int, name: str) -> Observer:  # noqa: ARG002
        return _Bars(self.progress, self.eta, self._whole, card)

    def planned(self, candidates: Sequence[int], *, finals: bool = True) -> None:
        super().planned(candidates, finals=finals)
        said = f"sweep of {counted(len(candidates), 'problem')}"
        self.progress.update(self._whole, total=sum(candidates), description=said)

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        super().opening(problem, candidates, kept)
        if not self._several:
            resumed = f" [dim]({kept} kept)[/]" if kept else ""
            of = f": {counted(candidates, 'candidate')}{resumed}" if candidates else ""
            self.console.print(f"[bold]{problem.label}[/]{of}")

    def begin(self, candidates: int) -> None:
        self.show("search", 0, candidates)

    def checked(self, *, first: bool) -> None:
        self.progress.update(self._bar, said=self.summary)
        self.progress.advance(self._bar)
        if first:
            self.progress.advance(self._whole)

    def show(self, phase: str, done: int, total: int, baseline: str = "") -> None:
        on = f" on {self.shorter}" if self.shorter else ""
        texts = {"baselines": f"baselines: {baseline}", "finals": "time"}
        texts["search"] = f"check{on}, {self.ready} compiled"
        label = f"[bold]{self.problem.label}[/]" if self._several and self.problem else ""
        said = (self._name, label, texts.get(phase, phase))
        self.progress.update(self._bar, completed=done, total=total, said=self.summary)
        self.progress.update(self._bar, description=" ".join(filter(None, said)), visible=True)

    def exporting(self, done: int, total: int) -> None:
        self.progress.update(self._whole, description="compile", completed=done, total=total)

    def resting(self, *, done: bool) -> None:
        super().resting(done=done)
        self.progress.update(self._bar, description=self._name, completed=0, total=1, said="waits")


class _PlainLines(_Watched):
    """For logs: each problem as it begins, then at most a line every ten seconds.

    before: what each line begins with: which of several cards it is about.
    """

    def __init__(self, console: Console, eta: Eta, card: int = 0, before: str = "") -> None:
        super().__init__(console, eta, card)
        self._before = before
        self._last = time.monotonic()

    def on(self, card: int, name: str) -> Observer:  # noqa: ARG002
        return _PlainLines(self.console, self.eta, card, f"card {card}: ")

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        super().opening(problem, candidates, kept)
        resumed = f", {kept} kept" if kept else ""
        of = f": {counted(candidates, 'candidate')}{resumed}" if candidates else ""
        self.console.print(f"{self._before}{problem.label}{of}", soft_wrap=True)

    def exporting(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == 0 or now - self._last >= PLAIN_INTERVAL_S:
            self._last = now
            of = f"{done} of " if done else ""
            self.console.print(f"compile {of}{counted(total, 'kernel')}", soft_wrap=True)

    def show(self, phase: str, done: int, total: int, baseline: str = "") -> None:
        if time.monotonic() - self._last < PLAIN_INTERVAL_S:
            return
        self._last = time.monotonic()
        on = f" on {self.shorter}" if self.shorter else ""
        text = {
            "search": f"compiled {self.ready}, checked {done} of {total}{on}",
            "race": f"race {total - done} of {total} left",
            "baselines": f"prepare {baseline}, baseline {done + 1} of {total}",
            "finals": f"time in rounds {done}/{total}",
        }[phase]
        parts = (text, str(self.eta.left or ""), escape(self.summary))
        said = "  ".join(filter(None, parts))
        self.console.print(f"  {self._before}{said}", soft_wrap=True)


class _JsonLines(_Watched):
    """For programs: an object a line. facts: that each line of one of several cards has."""

    def __init__(
        self, console: Console, eta: Eta, card: int = 0, facts: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(console, eta, card)
        self._facts = facts or {}
        self._begun = time.monotonic()
        self._last = -JSON_INTERVAL_S
        self._phase = ""

    def on(self, card: int, name: str) -> Observer:
        made = _JsonLines(self.console, self.eta, card, {"gpu": card, "uuid": name})
        made._begun = self._begun
        return made

    def planned(self, candidates: Sequence[int], *, finals: bool = True) -> None:
        super().planned(candidates, finals=finals)
        self.write("planned", problems=len(candidates), candidates=sum(candidates))

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        super().opening(problem, candidates, kept)
        self.write("problem", problem=problem.label, candidates=candidates, kept=kept)

    def trying_on(self, label: str, candidates: int) -> None:
        super().trying_on(label, candidates)
        self.write("trying_on", problem=label, candidates=candidates)

    def begin(self, candidates: int) -> None:  # noqa: ARG002
        self._phase = ""

    def checked(self, *, first: bool) -> None:  # noqa: ARG002
        self.show("search", len(self.done), self.total)

    def prepared(self, what: str, took_s: float, steps_s: Mapping[str, float]) -> None:
        steps_s = {name: round(spent_s, 3) for name, spent_s in steps_s.items()}
        label = self.problem.label if self.problem else None
        self.write("prepared", problem=label, what=what, took_s=round(took_s, 3), steps_s=steps_s)

    def ranked(self, trials: Sequence[Trial], environment: Environment) -> None:
        from attnsweep.reports import tables

        rows = tables.ranked_rows(trials, environment)
        self.write("ranked", problem=trials[0].problem.label, rows=rows)

    def note(self, text: str) -> None:
        self.write("note", text=text)

    def exporting(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done in (0, total) or now - self._last >= JSON_INTERVAL_S:
            self._last = now
            self.write("progress", phase="compile", done=done, total=total)

    def show(self, phase: str, done: int, total: int, baseline: str = "") -> None:
        """One line a second, and one for each baseline, which may take long, and where a phase
        begins and where all of it is done.
        """
        now = time.monotonic()
        soon = phase == self._phase and done < total and now - self._last < JSON_INTERVAL_S
        if soon and not baseline:
            return
        self._phase, self._last = phase, now
        left, best = self.eta.left, self.best
        self.write(
            "progress",
            problem=self.problem.label if self.problem else None,
            phase=phase,
            done=done,
            total=total,
            compiled=self.ready,
            failed=self.failed,
            best_us=time_of(best) if best else None,
            best_kernel=best.kernel if best else None,
            best_config=dict(best.config) if best else None,
            left_s=None if left is None else round(left.seconds, 1),
            **({"on": self.shorter} if self.shorter else {}),
            **({"baseline": baseline} if baseline else {}),
        )

    def write(self, event: str, **facts: Any) -> None:
        """Write an event as a line of JSON."""
        elapsed_s = round(time.monotonic() - self._begun, 3)
        line = json.dumps({"event": event, "elapsed_s": elapsed_s, **self._facts, **facts})
        self.console.file.write(f"{line}\n")
        self.console.file.flush()
