"""What the commands show beside the ranked tables: progress, plans, families, compile results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

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
from rich.table import Table

from attnsweep.arch import Arch
from attnsweep.candidates import Observer, PlannedProblem
from attnsweep.kernel import BLOCK_LIMITS, Kernel
from attnsweep.problem import Problem
from attnsweep.trial import Status, Trial

# Without a terminal a line at most this often, so that a CI log shows life but stays short.
_PLAIN_INTERVAL_S = 10.0
escaped = escape


# -- progress -------------------------------------------------------------------------------


@contextmanager
def watch(console: Console) -> Iterator[Observer]:
    """An observer that draws on `console`: bars on a terminal, a line now and then elsewhere."""
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
    """Keeps the best time of the open problem, and how many rows ended how."""

    def __init__(self) -> None:
        self.problem: Problem | None = None
        self.best: Trial | None = None
        self.counts: Counter[Status] = Counter()

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:  # noqa: ARG002
        self.problem, self.best = problem, None
        self.counts.clear()

    def tried(self, trial: Trial) -> None:
        self.counts[trial.status] += 1
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
        self._progress.console.print(f"[bold]{problem.label}[/]: {candidates} candidates{resumed}")

    def compiled(self, done: int, total: int) -> None:
        self._progress.update(self._tasks["compile"], completed=done, total=total)

    def tried(self, trial: Trial) -> None:
        super().tried(trial)
        if trial.provider == "attnsweep" and trial.key not in self._checked:
            self._checked.add(trial.key)
            self._progress.advance(self._tasks["check"])
            self._progress.advance(self._whole)
        self._progress.update(self._whole, best=escape(self.summary))

    def timing(self, done: int, total: int) -> None:
        if "time" not in self._tasks:
            self._tasks["time"] = self._progress.add_task("  time", total=total, best="")
        self._progress.update(self._tasks["time"], completed=done)

    def note(self, text: str) -> None:
        self._progress.console.print(escape(text))


class _Plain(_Best):
    """For logs: each problem as it begins, then a line every ten seconds."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._last = time.monotonic()

    def opening(self, problem: Problem, candidates: int, kept: int) -> None:
        super().opening(problem, candidates, kept)
        resumed = f", {kept} kept" if kept else ""
        self._console.print(f"{problem.label}: {candidates} candidates{resumed}", highlight=False)

    def compiled(self, done: int, total: int) -> None:
        self._say(f"compile, check {done}/{total}")

    def timing(self, done: int, total: int) -> None:
        self._say(f"time in rounds {done}/{total}")

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def _say(self, text: str) -> None:
        if time.monotonic() - self._last >= _PLAIN_INTERVAL_S:
            self._last = time.monotonic()
            self._console.print(f"  {text}  {escape(self.summary)}".rstrip(), highlight=False)


# -- run --dry-run --------------------------------------------------------------------------


def planned(items: Sequence[PlannedProblem], limit: int | None) -> list[Any]:
    """Per problem and family: how many configs, how many candidates, what each rule removed."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("problem", "kernel"):
        table.add_column(column, no_wrap=column == "kernel")
    for column in ("configs", "candidates"):
        table.add_column(column, justify="right")
    table.add_column("removed by")
    total = 0
    for item in items:
        for space in item.spaces:
            removed = ", ".join(f"{rule} {n}" for rule, n in space.removed.items() if n)
            kept = min(len(space.configs), limit or len(space.configs))
            total += kept
            name = space.kernel.name
            table.add_row(item.problem.label, name, str(space.total), str(kept), removed or "-")
        for name, reason in item.refused.items():
            table.add_row(item.problem.label, name, "-", "0", f"[dim]{escape(reason)}[/]")
    lines: list[Any] = [table, f"{total} candidates; nothing was compiled"]
    for space in {space.kernel.name: space for item in items for space in item.spaces}.values():
        for rule, (description, _) in space.kernel.rules.items():
            lines.append(f"[dim]{space.kernel.name}.{rule}: {escape(description)}[/]")
    return lines


def planned_json(items: Sequence[PlannedProblem], limit: int | None) -> list[dict[str, Any]]:
    """The same as data."""
    return [
        {
            "problem": item.problem.label,
            "kernel": space.kernel.name,
            "configs": space.total,
            "candidates": min(len(space.configs), limit or len(space.configs)),
            "removed": space.removed,
        }
        for item in items
        for space in item.spaces
    ] + [
        {"problem": item.problem.label, "kernel": name, "candidates": 0, "refused": reason}
        for item in items
        for name, reason in item.refused.items()
    ]


# -- list -----------------------------------------------------------------------------------


def families(kernels: Mapping[str, Kernel], baselines: Iterable[str]) -> list[Any]:
    """Every family with its parameters and rules, then the baselines."""
    out: list[Any] = []
    for kernel in kernels.values():
        sizes = ", ".join(map(str, kernel.head_dims))
        out.append(f"[bold]{kernel.name}[/]  {escape(kernel.summary)}")
        out.append(
            f"  {kernel.min_arch}+ · {', '.join(kernel.dtypes)} · head_dim {sizes} · "
            f"stages {', '.join(kernel.stages)}"
        )
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        for param in kernel.params:
            values = ", ".join(map(str, param.values))
            table.add_row(f"  {param.name}", values, f"[dim]{escape(param.help)}[/]")
        for rule, (description, _) in kernel.rules.items():
            table.add_row(f"  [cyan]{rule}[/]", "rule", f"[dim]{escape(description)}[/]")
        out += [table, ""]
    out.append(f"[bold]baselines[/]  {', '.join(baselines)}")
    out.append(
        f"[dim]{BLOCK_LIMITS}: every family also keeps to the threads, shared memory and grid "
        "that the architecture can launch[/]"
    )
    return out


def families_json(kernels: Mapping[str, Kernel], baselines: Iterable[str]) -> dict[str, Any]:
    """The same as data."""
    return {
        "kernels": [
            {
                "name": kernel.name,
                "summary": kernel.summary,
                "source": str(kernel.source),
                "min_arch": kernel.min_arch,
                "dtypes": kernel.dtypes,
                "head_dims": kernel.head_dims,
                "stages": list(kernel.stages),
                "params": [
                    {"name": p.name, "values": p.values, "help": p.help} for p in kernel.params
                ],
                "rules": {name: description for name, (description, _) in kernel.rules.items()},
            }
            for kernel in kernels.values()
        ],
        "baselines": list(baselines),
    }


# -- compile --------------------------------------------------------------------------------


def compiled(trials: Sequence[Trial], arch: Arch, every: bool) -> list[Any]:
    """Resources per family and stage (or per candidate), and what did not make it."""
    out: list[Any] = [_each(trials)] if every else _by_stage(trials)
    counts = Counter(trial.status.value for trial in trials)
    out.append(
        f"{len(trials)} candidates for {arch.name}: "
        + ", ".join(f"{n} {status}" for status, n in counts.most_common())
        + "; nothing was timed"
    )
    reasons = Counter(
        (trial.kernel, trial.status.value, (trial.detail or "").splitlines()[0])
        for trial in trials
        if trial.status is not Status.OK
    )
    for (kernel, status, reason), n in reasons.most_common(12):
        out.append(f"  {n} × {kernel} {status}: {escape(reason)}")
    return out


def _range(values: Sequence[float], form: str = "{:.0f}") -> str:
    low, high = (form.format(edge) for edge in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"


def _by_stage(trials: Sequence[Trial]) -> list[Any]:
    """A heading and a table per problem: the range of each resource over a stage's candidates."""
    groups: dict[str, dict[tuple[str, str], list[dict[str, float]]]] = {}
    for trial in trials:
        for stage, facts in (trial.resources.stages if trial.resources else {}).items():
            rows = groups.setdefault(trial.problem.label, {})
            rows.setdefault((trial.kernel, stage), []).append(facts)
    out: list[Any] = []
    for problem, stages in groups.items():
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("kernel", no_wrap=True, min_width=18)
        table.add_column("stage", min_width=8)
        for column in ("candidates", "registers", "spill B", "smem B", "blocks/SM", "occupancy"):
            table.add_column(column, justify="right", no_wrap=True, min_width=9)
        for (kernel, stage), rows_ in stages.items():
            table.add_row(
                kernel,
                stage,
                str(len(rows_)),
                *(
                    _range([row[name] for row in rows_])
                    for name in ("registers", "spill_bytes", "smem_bytes", "blocks_per_sm")
                ),
                _range([100 * row["occupancy"] for row in rows_]) + " %",
            )
        out += [f"[bold]{problem}[/]", table]
    return out


def _each(trials: Sequence[Trial]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("problem", "kernel", "config", "status"):
        table.add_column(column)
    for column in ("registers", "spill B", "smem B", "occupancy"):
        table.add_column(column, justify="right", no_wrap=True)
    for trial in trials:
        used = trial.resources
        facts = ["-"] * 4
        if used is not None:
            facts = [str(used.registers), str(used.spill_bytes), str(used.smem_bytes)]
            facts.append(f"{100 * used.occupancy:.0f} %")
        config = " ".join(f"{name}={value}" for name, value in trial.config.items())
        table.add_row(trial.problem.label, trial.kernel, config, trial.status.value, *facts)
    return table
