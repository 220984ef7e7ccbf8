"""Progress of a sweep: bars on a terminal, a line now and then in a log, JSON for programs.

JSON: one object a line on standard error, each with `event` and `elapsed_s`. docs/how-to/watch.md
lists the fields. Lines that do not begin with `{` are messages for people.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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

from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Environment, Status, Trial
from attnsweep.reports import terminal
from attnsweep.reports.eta import Eta
from attnsweep.reports.terminal import Form, counted

# Without a terminal, print a line at most this often: a CI log shows progress but stays short.
_PLAIN_INTERVAL_S = 10.0
_JSON_INTERVAL_S = 1.0
# Steps that take less are not worth a word.
_SHORT_S = 0.05


@contextmanager
def watch(console: Console, form: Form = Form.AUTO) -> Iterator[Observer]:
    """An observer that draws on `console`: bars on a terminal, a line now and then elsewhere.

    With --quiet it draws nothing, with --verbose also a line for each candidate.
    """
    eta = Eta()
    last = (_LeftColumn(eta), TextColumn("{task.fields[best]}"))
    with drawn(
        console,
        form,
        lines=lambda: _JsonLines(console),
        plain=lambda: _PlainLines(console),
        last=last,
        bars=lambda progress: _Bars(progress, eta),
    ) as observer:
        yield observer


@contextmanager
def drawn(
    console: Console,
    form: Form,
    *,
    lines: Callable[[], _JsonLines],
    plain: Callable[[], Observer],
    last: Sequence[ProgressColumn],
    bars: Callable[[Progress], Observer],
) -> Iterator[Observer]:
    """The observer of the form that is asked for, or that suits the console. last: columns."""
    if form is Form.JSON:
        events = lines()
        try:
            yield events
        finally:
            events.end()
        return
    if terminal.talk is terminal.Talk.QUIET:
        yield Observer()
        return
    if form is Form.PLAIN or not console.is_terminal:
        yield plain()
        return
    with Progress(*_columns(), *last, console=console, transient=True) as progress:
        yield bars(progress)


@contextmanager
def counting(
    console: Console, what: str, noun: str, form: Form = Form.AUTO
) -> Iterator[Callable[[int, int], None]]:
    """Takes how many are done, of how many: a bar on a terminal, a line now and then elsewhere."""
    if form is Form.JSON:
        events = _JsonLines(console)
        try:
            yield partial(events.count, what)
        finally:
            events.end()
    elif terminal.talk is terminal.Talk.QUIET:
        yield lambda _done, _total: None
    elif form is Form.PLAIN or not console.is_terminal:
        yield _PlainCount(console, what, noun)
    else:
        with Progress(*_columns(), console=console, transient=True) as progress:
            task = progress.add_task(what, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)


class _PlainCount:
    """For logs: how many there are, then at most a line every ten seconds."""

    def __init__(self, console: Console, what: str, noun: str) -> None:
        self._console, self._what, self._noun = console, what, noun
        self._last = -_PLAIN_INTERVAL_S

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done and now - self._last < _PLAIN_INTERVAL_S:
            return
        self._last = now
        of = f"{done} of {counted(total, self._noun)}" if done else counted(total, self._noun)
        self._console.print(f"{self._what} {of}", soft_wrap=True)


def _columns() -> tuple[ProgressColumn, ...]:
    return (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )


class _LeftColumn(ProgressColumn):
    """The time left of the whole run, on its own bar only."""

    def __init__(self, eta: Eta) -> None:
        super().__init__()
        self._eta = eta

    def render(self, task: Task) -> Text:
        left = self._eta.left if task.fields.get("whole") else None
        return Text("" if left is None else str(left), style="progress.remaining")


class _Best(Observer):
    """Keeps the best time of the open problem, the number of rows by status, and the time left."""

    def __init__(self, eta: Eta | None = None) -> None:
        self.problem: Problem | None = None
        self.best: Trial | None = None
        self.counts: Counter[Status] = Counter()
        self.shorter = ""
        """Label of the shorter problem that candidates are tried on, if they are."""
        self.eta = eta or Eta()

    def planned(self, candidates: Sequence[int], *, finals: bool = True) -> None:
        self.eta.planned(candidates, finals=finals)

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:  # noqa: ARG002
        self.problem, self.best, self.shorter = problem, None, ""
        self.counts.clear()
        self.eta.opening()

    def trying_on(self, label: str, candidates: int) -> None:  # noqa: ARG002
        self.shorter = "" if self.problem and label == self.problem.label else label

    def compiled(self, done: int, total: int) -> None:  # noqa: ARG002
        self.eta.compiled(done)

    def tried(self, trial: Trial, *, kept: bool = False) -> None:
        if trial.provider == OURS:
            self.eta.tried(trial.key, kept=kept)
        self.counts[trial.status] += 1
        if terminal.talk is terminal.Talk.VERBOSE:
            self.note(_row(trial))
        if trial.provider != OURS or trial.time_us is None or trial.status is not Status.OK:
            return
        if self.best is None or trial.time_us.median <= _median(self.best):
            self.best = trial

    def ranked(self, trials: Sequence[Trial], environment: Environment) -> None:
        from attnsweep.reports import tables

        lines = tables.first_rows(trials, environment, self.width)
        self.lines([Text(f"  {line}" if line else "", style=style) for line, style in lines])

    width = 120
    """Columns of a table that is printed while the sweep goes on."""

    def lines(self, texts: Sequence[Text]) -> None:
        """Print lines above the bars."""

    def racing(self, alive: int, entrants: int) -> None:  # noqa: ARG002
        self.eta.finals()

    def preparing(self, baseline: str, done: int, total: int) -> None:  # noqa: ARG002
        self.eta.finals()

    def prepared(self, what: str, took_s: float, steps_s: Mapping[str, float]) -> None:
        if terminal.talk is terminal.Talk.VERBOSE:
            parts = ", ".join(f"{name} {s:.1f} s" for name, s in steps_s.items() if s >= _SHORT_S)
            self.note(f"  prepared {what} in {took_s:.1f} s" + (f" ({parts})" if parts else ""))

    def timing(self, done: int, total: int) -> None:  # noqa: ARG002
        self.eta.finals()

    @property
    def failed(self) -> int:
        """Number of candidates that did not compile, failed or gave wrong results."""
        bad = (Status.WRONG, Status.LAUNCH_ERROR, Status.TIMEOUT, Status.COMPILE_ERROR)
        return sum(self.counts[status] for status in bad)

    @property
    def left(self) -> str:
        """`about 5 min left`, or nothing while it is unknown."""
        left = self.eta.left
        return "" if left is None else str(left)

    @property
    def summary(self) -> str:
        best = f"best {_median(self.best):.2f} µs {self.best.kernel}" if self.best else ""
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


def _median(trial: Trial) -> float:
    return trial.time_us.median if trial.time_us else float("inf")


class _Bars(_Best):
    """The whole sweep with its ETA, then a bar each for compiling, checking and timing."""

    def __init__(self, progress: Progress, eta: Eta) -> None:
        super().__init__(eta)
        self._progress = progress
        self._whole = progress.add_task("sweep", total=None, best="", whole=True)
        self._tasks: dict[str, TaskID] = {}
        self._checked: set[tuple[object, ...]] = set()
        self._tried: set[tuple[object, ...]] = set()
        """Candidates of the check bar: those tried on a shorter problem are tried again."""
        self.width = progress.console.width - 2

    def lines(self, texts: Sequence[Text]) -> None:
        for text in texts:
            self._progress.console.print(text, no_wrap=True, overflow="ellipsis", crop=True)

    def planned(self, candidates: Sequence[int], *, finals: bool = True) -> None:
        super().planned(candidates, finals=finals)
        self._progress.update(self._whole, total=sum(candidates))

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        super().opening(problem, candidates, kept)
        self._begin(candidates)
        resumed = f" [dim]({kept} kept)[/]" if kept else ""
        self._progress.console.print(
            f"[bold]{problem.label}[/]: {counted(candidates, 'candidate')}{resumed}"
        )

    def trying_on(self, label: str, candidates: int) -> None:
        super().trying_on(label, candidates)
        self._begin(candidates)

    def _begin(self, candidates: int) -> None:
        for task in self._tasks.values():
            self._progress.remove_task(task)
        on = f" on {self.shorter}" if self.shorter else ""
        self._tasks = {
            name: self._progress.add_task(f"  {name}{on}", total=candidates, best="")
            for name in ("compile", "check")
        }
        self._tried.clear()

    def compiled(self, done: int, total: int) -> None:
        super().compiled(done, total)
        self._progress.update(self._tasks["compile"], completed=done, total=total)
        self._progress.update(self._tasks["check"], total=total)

    def tried(self, trial: Trial, *, kept: bool = False) -> None:
        super().tried(trial, kept=kept)
        if trial.provider == OURS and trial.key not in self._tried:
            self._tried.add(trial.key)
            self._progress.advance(self._tasks["check"])
        if trial.provider == OURS and trial.key not in self._checked:
            self._checked.add(trial.key)
            self._progress.advance(self._whole)
        self._progress.update(self._whole, best=escape(self.summary))

    def racing(self, alive: int, entrants: int) -> None:
        super().racing(alive, entrants)
        if "race" not in self._tasks:
            self._tasks["race"] = self._progress.add_task("  race", total=entrants, best="")
        self._progress.update(self._tasks["race"], completed=entrants - alive)

    def preparing(self, baseline: str, done: int, total: int) -> None:
        super().preparing(baseline, done, total)
        if "baselines" not in self._tasks:
            self._tasks["baselines"] = self._progress.add_task("  baselines", total=total, best="")
        self._progress.update(self._tasks["baselines"], completed=done, best=baseline)

    def prepared(self, what: str, took_s: float, steps_s: Mapping[str, float]) -> None:
        super().prepared(what, took_s, steps_s)
        if "baselines" in self._tasks:
            self._progress.update(self._tasks["baselines"], advance=1, best="")

    def timing(self, done: int, total: int) -> None:
        super().timing(done, total)
        if "time" not in self._tasks:
            self._tasks["time"] = self._progress.add_task("  time", total=total, best="")
        self._progress.update(self._tasks["time"], completed=done)

    def note(self, text: str) -> None:
        self._progress.console.print(escape(text))


class _PlainLines(_Best):
    """For logs: each problem as it begins, then at most a line every ten seconds."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self._last = time.monotonic()
        self._earlier = 0
        """Rows of candidates on a shorter problem, which no row of this one is."""
        self.width = console.width - 2

    before = ""
    """What each line begins with: which of several cards it is about."""

    def lines(self, texts: Sequence[Text]) -> None:
        for text in texts:
            self.console.print(text, no_wrap=True, overflow="ellipsis", crop=True)

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        super().opening(problem, candidates, kept)
        self._earlier = 0
        resumed = f", {kept} kept" if kept else ""
        self.console.print(
            f"{self.before}{problem.label}: {counted(candidates, 'candidate')}{resumed}",
            soft_wrap=True,
        )

    def trying_on(self, label: str, candidates: int) -> None:
        super().trying_on(label, candidates)
        self._earlier = sum(self.counts.values())

    def compiled(self, done: int, total: int) -> None:
        super().compiled(done, total)
        checked = min(total, sum(self.counts.values()) - self._earlier)
        on = f" on {self.shorter}" if self.shorter else ""
        self._say(f"compiled {done}, checked {checked} of {total}{on}")

    def racing(self, alive: int, entrants: int) -> None:
        super().racing(alive, entrants)
        self._say(f"race {alive} of {entrants} left")

    def preparing(self, baseline: str, done: int, total: int) -> None:
        super().preparing(baseline, done, total)
        self._say(f"prepare {baseline}, baseline {done + 1} of {total}")

    def timing(self, done: int, total: int) -> None:
        super().timing(done, total)
        self._say(f"time in rounds {done}/{total}")

    def note(self, text: str) -> None:
        self.console.print(escape(text), soft_wrap=True)

    def _say(self, text: str) -> None:
        if time.monotonic() - self._last >= _PLAIN_INTERVAL_S:
            self._last = time.monotonic()
            parts = (text, self.left, escape(self.summary))
            said = "  ".join(filter(None, parts))
            self.console.print(f"  {self.before}{said}", soft_wrap=True)


class _JsonLines(_Best):
    """For programs: an object a line."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.begun = time.monotonic()
        self._last = -_JSON_INTERVAL_S
        self._phase = ""
        self._compiled = self._done = self._of = 0

    def planned(self, candidates: Sequence[int], *, finals: bool = True) -> None:
        super().planned(candidates, finals=finals)
        self.write("planned", problems=len(candidates), candidates=sum(candidates))

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        super().opening(problem, candidates, kept)
        self._phase, self._compiled, self._done, self._of = "", 0, 0, candidates
        self._tried: set[object] = set()
        self.write("problem", problem=problem.label, candidates=candidates, kept=kept)

    def trying_on(self, label: str, candidates: int) -> None:
        super().trying_on(label, candidates)
        self._phase, self._compiled, self._done, self._of = "", 0, 0, candidates
        self._tried.clear()
        self.write("trying_on", problem=label, candidates=candidates)

    def compiled(self, done: int, total: int) -> None:
        super().compiled(done, total)
        self._compiled, self._of = done, max(total, self._of)
        self._tell("search", self._done, self._of)

    def tried(self, trial: Trial, *, kept: bool = False) -> None:
        super().tried(trial, kept=kept)
        if trial.provider == OURS and trial.key not in self._tried:
            self._tried.add(trial.key)
            self._done += 1
            self._tell("search", self._done, self._of)

    def racing(self, alive: int, entrants: int) -> None:
        super().racing(alive, entrants)
        self._tell("race", entrants - alive, entrants)

    def preparing(self, baseline: str, done: int, total: int) -> None:
        super().preparing(baseline, done, total)
        self._phase = ""  # a line for each: one may take long
        self._tell("baselines", done, total, baseline=baseline)

    def prepared(self, what: str, took_s: float, steps_s: Mapping[str, float]) -> None:
        steps_s = {name: round(spent_s, 3) for name, spent_s in steps_s.items()}
        label = self.problem.label if self.problem else None
        self.write("prepared", problem=label, what=what, took_s=round(took_s, 3), steps_s=steps_s)

    def timing(self, done: int, total: int) -> None:
        super().timing(done, total)
        self._tell("finals", done, total)

    def ranked(self, trials: Sequence[Trial], environment: Environment) -> None:
        from attnsweep.reports import tables

        rows = tables.ranked_rows(trials, environment)
        self.write("ranked", problem=trials[0].problem.label, rows=rows)

    def note(self, text: str) -> None:
        self.write("note", text=text)

    def count(self, phase: str, done: int, total: int) -> None:
        """Show how many of `total` are done, where there are neither problems nor times."""
        now = time.monotonic()
        if done in (0, total) or now - self._last >= _JSON_INTERVAL_S:
            self._last = now
            self.write("progress", phase=phase, done=done, total=total)

    def end(self) -> None:
        """Nothing more will be told."""
        self.write("end")

    def _tell(self, phase: str, done: int, total: int, **more: str) -> None:
        """One line a second, and one where a phase begins and where all of it is done."""
        now = time.monotonic()
        if phase == self._phase and done < total and now - self._last < _JSON_INTERVAL_S:
            return
        self._phase, self._last = phase, now
        left, best = self.eta.left, self.best
        self.write(
            "progress",
            problem=self.problem.label if self.problem else None,
            phase=phase,
            done=done,
            total=total,
            compiled=self._compiled,
            failed=self.failed,
            best_us=_median(best) if best else None,
            best_kernel=best.kernel if best else None,
            best_config=dict(best.config) if best else None,
            left_s=None if left is None else round(left.seconds, 1),
            **({"on": self.shorter} if self.shorter else {}),
            **more,
        )

    def write(self, event: str, **facts: Any) -> None:
        """One line."""
        elapsed_s = round(time.monotonic() - self.begun, 3)
        line = json.dumps({"event": event, "elapsed_s": elapsed_s, **facts})
        self.console.file.write(f"{line}\n")
        self.console.file.flush()
