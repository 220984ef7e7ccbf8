"""Count how often `attnsweep check` is wrong: kernels against themselves, and slowed ones.

It needs a GPU, and about 9 minutes of it.

The kernels are winners of recorded runs, compiled anew. They are compared as `check` compares code
that changed: in turns, in two processes, and in up to eight while these do not decide. Each side
has its own copy of the machine code, so that the two lie apart in memory as two versions do.
Starting a process takes seconds, and timing a kernel in it a fraction of one. So a process serves
one comparison of every kernel and slowdown, one after the other, and none of them twice.

A slowed kernel is the kernel and then a launch that waits for some clock cycles; the other side
has the same launch with no cycles to wait for. The cycles are corrected in processes of their own.
The real slowdown (`ratio`) follows from all processes that timed it.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from setting import console, described, options, rebuild, recorded, write

import attnsweep
from attnsweep.bench.gpu import WorkerError
from attnsweep.bench.worker import Worker
from attnsweep.compile.launches import Candidate, CompiledStage
from attnsweep.compile.nvrtc import Compiler
from attnsweep.core.hardware import arch_named
from attnsweep.core.trial import Environment
from attnsweep.regress.ab_test import Ended, compare
from attnsweep.regress.verdicts import Verdict

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))
from proportions import proportion_interval

SOURCE = Path(__file__).with_name("burn.cu")
RUNS = (
    *("flash_short", "batched", "three_kernel_tuned", "wide_head", "ladder"),
    *("wmma_pipeline", "mma_h200", "flash_dims"),
)
SLOWER = 0.02
KERNELS = 10
# Slowdowns, and the number of kernels that are slowed by each.
SHARES = {0.0: KERNELS, 0.02: KERNELS, 0.05: 3}
# Calls no longer than this: a process's rounds take 0.1 to 0.3 s.
LONGEST_US = 150.0
# CORRECTIONS processes correct the cycles, each by ROUNDS rounds, to a slowdown that is larger than
# the share by ABOVE: a kernel slower by a little less than 2 % is shown to be so, and rightly passes.
CORRECTIONS, ROUNDS, ABOVE = 4, 60, 0.0005


@dataclass
class Series:
    """The comparisons of one kernel at one slowdown. cycles: that the new side waits for."""

    label: str
    share: float
    old: Candidate
    new: Candidate
    cubin: str
    cycles: int = 50  # a shorter wait is over before the kernel first reads the clock
    ended: list[Any] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def sides(self) -> tuple[Candidate, Candidate]:
        """What is compared; without a slowdown sides change, so that being first shows as noise."""
        if self.share:
            return self._and_wait(self.old, 0), self._and_wait(self.new, max(self.cycles, 0))
        both = self.old, self.new
        return both[::-1] if len(self.ended) % 2 else both

    def _and_wait(self, candidate: Candidate, cycles: int) -> Candidate:
        """The candidate and then a launch that waits for `cycles` clock cycles."""
        burn = CompiledStage("burn", self.cubin, attnsweep.Launch("burn", (1, 1, 1), 32, (cycles,)))
        timed = replace(candidate.timed, stages=(*candidate.timed.stages, burn))
        return replace(candidate, timed=timed)

    def opened(self, worker: Worker) -> Worker:
        """A process that has opened the kernel's problem."""
        worker.open(self.new.timed.problem, replay_us=1000, seed=0)
        return worker

    def correct_in(self, worker: Worker, clock_hz: float, number: int) -> None:
        """Correct the cycles by what a process measures with them; it adds an offset of its own.

        number: of the process; later ones weigh less, so that offsets cancel.
        """
        self.opened(worker)
        for name, candidate in zip(("old", "new"), self.sides, strict=True):
            worker.forget(name)
            worker.add(name, candidate, cold=False)
        time_us = median(worker.replay("old", "warm") for _ in range(10))
        ratios = []
        for turn in range(ROUNDS):
            order = ("old", "new") if turn % 2 else ("new", "old")
            times = dict(zip(order, worker.pair(*order), strict=True))
            ratios.append(times["new"] / times["old"])
        missing = self.share + ABOVE - (median(ratios) - 1)
        self.cycles += round(missing / max(1, number) * time_us * clock_hz / 1e6)

    def compare(self, processes: Iterator[Worker]) -> None:
        """One comparison, in as many of the processes as it needs."""
        seed = f"{self.label} {self.share} {len(self.ended)}"

        def another() -> Worker:
            return self.opened(next(processes))

        try:
            how = {"slower": SLOWER, "budget_s": 60.0, "seed": seed}
            found = compare(another(), another, *self.sides, **how)
            self.ended.append(found)
        except (Ended, WorkerError) as error:
            self.failed.append(str(error.__cause__ or error))

    def row(self) -> dict[str, Any]:
        """The counts, and the mean ratio of all processes."""
        ratios = [one.interval.median for each in self.ended for one in each.each if one.interval]
        return {
            "case": self.label,
            "share": self.share,
            "comparisons": len(self.ended),
            "verdicts": dict(Counter(each.verdict.value for each in self.ended)),
            "failed": self.failed,
            "processes": [each.processes for each in self.ended],
            "seconds_most": max((round(each.shown.spent_s, 3) for each in self.ended), default=0.0),
            "ratio": round(fmean(ratios), 5) if ratios else None,
        }


def cases(runs: Sequence[Path], arch: Any, place: Path) -> Iterator[tuple[str, Candidate, Candidate]]:
    """Winners of the runs that this GPU can launch: the first of each run, then the next ones."""
    kernels = attnsweep.families()

    def wanted(t: Any) -> bool:
        short = t.time_us is not None and t.time_us.median <= LONGEST_US
        return short and t.kernel in kernels and kernels[t.kernel].refusal(t.problem, arch) is None

    of_run = [[*filter(wanted, attnsweep.winners(attnsweep.open_run(run)))] for run in runs]
    chosen = [t for turn in itertools.zip_longest(*of_run) for t in turn if t is not None][: 2 * KERNELS]
    builds = ((build, build.candidate()) for build in rebuild(chosen, kernels, arch))
    alone = (each for each in builds if each[1].timed.streams == 1 and not each[1].timed.eager)
    for number, (build, new) in enumerate(itertools.islice(alone, KERNELS)):
        stages = []
        for stage in new.timed.stages:  # the same code in other files is loaded to other addresses
            copy = shutil.copyfile(stage.cubin, place / f"{number}.{len(stages)}.cubin")
            stages.append(replace(stage, cubin=str(copy)))
        old = replace(new, timed=replace(new.timed, stages=tuple(stages)))
        yield f"{build.kernel.name} {build.problem.label}", old, new


def compare_all(series: Sequence[Series], process: Callable[[], Worker]) -> None:
    """One comparison of each, in processes that all of them share."""
    with contextlib.ExitStack() as stack:
        started: list[Worker] = []

        def processes() -> Iterator[Worker]:
            for which in itertools.count():
                if which == len(started):
                    started.append(stack.enter_context(process()))
                yield started[which]

        for each in series:
            each.compare(processes())


def measure(series: Sequence[Series], clock_hz: float, comparisons: int, until: float, card: Any) -> tuple[int, float]:
    """Compare all kernels as often as asked for, or as the time allows.

    card: makes a process. Returns the number of processes, and the seconds of the slowest to start.
    """
    opened_s: list[float] = []

    def process() -> Worker:
        begin = time.monotonic()
        worker = card(timeout_s=60)
        worker.describe()
        opened_s.append(time.monotonic() - begin)
        return worker

    for number in range(CORRECTIONS):
        with process() as worker:
            for each in series:
                if each.share:
                    each.correct_in(worker, clock_hz, number)
    for number in range(comparisons):
        if time.monotonic() > until:
            break
        compare_all(series, process)
        console.print(f"comparison {number + 1} of {comparisons} of each")
    return len(opened_s) - CORRECTIONS, round(max(opened_s), 2)


def counted(rows: Sequence[dict[str, Any]], verdict: Verdict) -> tuple[int, list[float]]:
    """How often a verdict came out, and 95 % bounds of its share."""
    count = sum(row["verdicts"].get(verdict.value, 0) for row in rows)
    trials = sum(row["comparisons"] for row in rows)
    return count, [round(p, 5) for p in proportion_interval(count, trials)]


def totals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The counts of all kernels at one slowdown."""
    detected, bounds = counted(rows, Verdict.REGRESSION)
    return {
        "comparisons": sum(row["comparisons"] for row in rows),
        "detected": detected,
        "detected_bounds": bounds,
        "passed": dict(zip(("count", "bounds"), counted(rows, Verdict.PASS), strict=True)),
        "seconds_most": max(row["seconds_most"] for row in rows),
    }


def count(
    here: Environment,
    runs: Sequence[Path],
    comparisons: int,
    until: float,
    card: Any = Worker,
    compiler: Any = Compiler,
) -> dict[str, Any]:
    """All figures. card, compiler: make the GPU's processes, and what compiles the launch that waits."""
    arch = arch_named(here.arch)
    with contextlib.closing(compiler(arch)) as compiling, tempfile.TemporaryDirectory() as place:
        cubin = str(compiling.compile(SOURCE, {}).path)
        found = list(cases(runs, arch, Path(place)))
        series = [Series(label, share, old, new, cubin)
                  for share, count in SHARES.items() for label, old, new in found[:count]]  # fmt: skip
        processes, opened_s = measure(series, here.clock_hz, comparisons, until, card)
    of = {share: [one.row() for one in series if one.share == share] for share in SHARES}
    itself = of.pop(0.0)
    alarms, bounds = counted(itself, Verdict.REGRESSION)
    return {
        "slower": SLOWER,
        "processes": processes,
        "itself": {
            "comparisons": sum(row["comparisons"] for row in itself),
            "false_alarms": alarms,
            "false_alarms_bounds": bounds,
            "cases": itself,
        },
        "slowed": {
            "totals": {f"{100 * share:g} %": totals(rows) for share, rows in of.items()},
            "opening_a_second_process_s": opened_s,
            "cases": [row for rows in of.values() for row in rows],
        },
    }


def main() -> None:
    """Measure, print, and write the file if one is named."""
    parser = options(__doc__)
    parser.add_argument("--comparisons", type=int, default=20, help="of each kernel and slowdown")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--runs", type=Path, nargs="+", metavar="DIR", default=[recorded(name) for name in RUNS])
    asked = parser.parse_args()
    until, here = time.monotonic() + asked.seconds, described()
    facts = count(here, asked.runs, asked.comparisons, until)
    console.print_json(data=facts)
    write(asked.file, here, facts)


if __name__ == "__main__":
    main()
