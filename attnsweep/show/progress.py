"""Progress of a sweep: bars on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from attnsweep.build.observer import Observer
from attnsweep.problem import Problem
from attnsweep.show import terminal
from attnsweep.show.terminal import counted
from attnsweep.trial import OURS, Status, Trial

# Without a terminal, print a line at most this often: a CI log shows progress but stays short.
_PLAIN_INTERVAL_S = 10.0


@contextmanager
def watch(console: Console) -> Iterator[Observer]:
    """An observer that draws on `console`: bars on a terminal, a line now and then elsewhere.

    With --quiet it draws nothing, with --verbose also a line for each candidate.
    """
    if terminal.talk is terminal.Talk.QUIET:
        yield Observer()
        return
    if not console.is_terminal:
        yield _Plain(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[best]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bars(progress)


class _Best(Observer):
    """Keeps the best time of the open problem, and the number of rows by status."""

    def __init__(self) -> None:
        self.problem: Problem | None = None
        self.best: Trial | None = None
        self.counts: Counter[Status] = Counter()

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:  # noqa: ARG002
        self.problem, self.best = problem, None
        self.counts.clear()

    def tried(self, trial: Trial) -> None:
        self.counts[trial.status] += 1
        if terminal.talk is terminal.Talk.VERBOSE:
            self.note(_row(trial))
        if trial.provider != "attnsweep" or trial.time_us is None or trial.status is not Status.OK:
            return
        if self.best is None or trial.time_us.median <= _median(self.best):
            self.best = trial

    @property
    def summary(self) -> str:
        best = f"best {_median(self.best):.2f} µs {self.best.kernel}" if self.best else ""
        bad = sum(self.counts[s] for s in (Status.WRONG, Status.LAUNCH_ERROR, Status.TIMEOUT))
        failed = f"{bad + self.counts[Status.COMPILE_ERROR]} failed" if bad else ""
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

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._whole = progress.add_task("sweep", total=None, best="")
        self._tasks: dict[str, TaskID] = {}
        self._checked: set[tuple[object, ...]] = set()

    def planned(self, candidates: int) -> None:
        self._progress.update(self._whole, total=candidates)

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        super().opening(problem, candidates, kept)
        for task in self._tasks.values():
            self._progress.remove_task(task)
        self._tasks = {
            name: self._progress.add_task(f"  {name}", total=candidates, best="")
            for name in ("compile", "check")
        }
        resumed = f" [dim]({kept} kept)[/]" if kept else ""
        self._progress.console.print(
            f"[bold]{problem.label}[/]: {counted(candidates, 'candidate')}{resumed}"
        )

    def compiled(self, done: int, total: int) -> None:
        self._progress.update(self._tasks["compile"], completed=done, total=total)

    def tried(self, trial: Trial) -> None:
        super().tried(trial)
        if trial.provider == "attnsweep" and trial.key not in self._checked:
            self._checked.add(trial.key)
            self._progress.advance(self._tasks["check"])
            self._progress.advance(self._whole)
        self._progress.update(self._whole, best=escape(self.summary))

    def racing(self, alive: int, entrants: int) -> None:
        if "race" not in self._tasks:
            self._tasks["race"] = self._progress.add_task("  race", total=entrants, best="")
        self._progress.update(self._tasks["race"], completed=entrants - alive)

    def timing(self, done: int, total: int) -> None:
        if "time" not in self._tasks:
            self._tasks["time"] = self._progress.add_task("  time", total=total, best="")
        self._progress.update(self._tasks["time"], completed=done)

    def note(self, text: str) -> None:
        self._progress.console.print(escape(text))


class _Plain(_Best):
    """For logs: each problem as it begins, then at most a line every ten seconds."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._last = time.monotonic()

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        super().opening(problem, candidates, kept)
        resumed = f", {kept} kept" if kept else ""
        self._console.print(
            f"{problem.label}: {counted(candidates, 'candidate')}{resumed}", soft_wrap=True
        )

    def compiled(self, done: int, total: int) -> None:
        self._say(f"compile, check {done}/{total}")

    def racing(self, alive: int, entrants: int) -> None:
        self._say(f"race {alive} of {entrants} left")

    def timing(self, done: int, total: int) -> None:
        self._say(f"time in rounds {done}/{total}")

    def note(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)

    def _say(self, text: str) -> None:
        if time.monotonic() - self._last >= _PLAIN_INTERVAL_S:
            self._last = time.monotonic()
            self._console.print(f"  {text}  {escape(self.summary)}".rstrip(), soft_wrap=True)
