"""Count how often `attnsweep check` is wrong: kernels against themselves, and slowed ones.

Usage: python benchmarks/gate.py [FILE.json] [--kernels 10] [--comparisons 20] [--seconds 540]
       [--runs DIR ...]. It needs a GPU, and about 9 minutes of it.

The kernels are winners of recorded runs, compiled anew. They are compared as `check` compares code
that changed: in turns, in two processes, and in up to eight while these do not decide. Each side
has its own copy of the machine code, so that the two lie apart in memory as two versions do.

Starting a process takes seconds, and timing a kernel in it a fraction of one. So a process serves
one comparison of every kernel and slowdown, one after the other, and none of them twice.

A slowed kernel is the kernel and then a launch that waits for some clock cycles; the other side
has the same launch with no cycles to wait for. The cycles are corrected in processes of their own.
The real slowdown (`ratio`) and how much processes differ follow from all that timed it.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from setting import console, described, options, recorded, write

from attnsweep import (
    Arch,
    Candidate,
    CompiledStage,
    Compiler,
    Launch,
    LaunchPlan,
    Verdict,
    Worker,
    WorkerError,
    arch_named,
    compare_candidates,
    families,
    open_run,
    proportion_interval,
    rebuild,
    winners,
)

SOURCE = Path(__file__).with_name("burn.cu")
RUNS = (
    *("flash_short", "batched", "three_kernel_tuned", "wide_head", "ladder"),
    *("wmma_pipeline", "mma_h200", "flash_dims"),
)
SLOWER = 0.02
# Slowdowns, and the number of kernels that are slowed by each.
SHARES = {0.02: 100, 0.05: 3}
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
    time_us: float = 0.0
    ended: list[Any] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def sides(self) -> tuple[Candidate, Candidate]:
        """What is compared; without a slowdown sides change, so that being first shows as noise."""
        if self.share:
            return slowed(self.old, self.cubin, 0), slowed(self.new, self.cubin, max(self.cycles, 0))
        both = self.old, self.new
        return both[::-1] if len(self.ended) % 2 else both

    def correct_in(self, worker: Worker, clock_hz: float, number: int) -> None:
        """Correct the cycles by what a process measures with them; it adds an offset of its own.

        number: of the process; later ones weigh less, so that offsets cancel.
        """
        ratios = []
        for name, candidate in zip(("old", "new"), self.sides, strict=True):
            worker.forget(name)
            worker.add(name, candidate, cold=False)
        self.time_us = median(worker.replay("old", "warm") for _ in range(10))
        for turn_number in range(ROUNDS):
            order = ("old", "new") if turn_number % 2 else ("new", "old")
            turn = dict(zip(order, worker.pair(*order), strict=True))
            ratios.append(turn["new"] / turn["old"])
        missing = self.share + ABOVE - (median(ratios) - 1)
        self.cycles += round(missing / max(1, number) * self.time_us * clock_hz / 1e6)

    def compare(self, processes: Iterator[Worker]) -> None:
        """One comparison, in as many of the processes as it needs."""
        seed = f"{self.label} {self.share} {len(self.ended)}"

        def another() -> Worker:
            worker = next(processes)
            worker.open(self.new.timed.problem, replay_us=1000, seed=0)
            return worker

        try:
            self.ended.append(compare_candidates(*self.sides, another(), another, slower=SLOWER, seed=seed))
        except WorkerError as error:
            self.failed.append(str(error))

    def row(self) -> dict[str, Any]:
        """The counts, and the ratio of each process."""
        ratios = [one.interval.median for each in self.ended for one in each.each if one.interval is not None]
        verdicts = Counter(each.verdict.value for each in self.ended)
        seconds = [each.shown.spent_s for each in self.ended]
        waits = {"cycles": max(self.cycles, 0), "time_us": round(self.time_us, 3)} if self.share else {}
        return {
            "case": self.label,
            "share": self.share,
            **waits,
            "comparisons": len(self.ended),
            "verdicts": dict(verdicts),
            "detected": verdicts[Verdict.REGRESSION.value],
            "failed": self.failed,
            "processes": [each.processes for each in self.ended],
            "seconds_most": round(max(seconds), 3) if seconds else None,
            "ratio": round(fmean(ratios), 5) if ratios else None,
            "process_sd": round(stdev(ratios), 5) if len(ratios) > 1 else None,
            "ratios": [round(ratio, 5) for ratio in ratios],
        }


def cases(runs: Sequence[Path], arch: Arch, place: Path, count: int) -> Iterator[tuple[str, Candidate, Candidate]]:
    """Winners of the runs that this GPU can launch: the first of each run, then the next ones."""
    kernels, of_run = families(), []
    for directory in runs:
        won = [t for t in winners(open_run(directory)) if t.kernel in kernels]
        won = [t for t in won if t.time_us is not None and t.time_us.median <= LONGEST_US]
        of_run.append([t for t in won if kernels[t.kernel].refusal(t.problem, arch) is None])
    chosen = [t for turn in itertools.zip_longest(*of_run) for t in turn if t is not None]
    builds = ((build, build.candidate()) for build in rebuild(chosen[: 2 * count], kernels, arch=arch))
    alone = (each for each in builds if each[1].timed.streams == 1 and not each[1].timed.eager)
    for number, (build, new) in enumerate(itertools.islice(alone, count)):
        old = replace(new, timed=copied(new.timed, place / str(number)))
        yield f"{build.kernel.name} {build.problem.label}", old, new


def copied(launches: LaunchPlan, place: Path) -> LaunchPlan:
    """The same code in other files, so that it is loaded to other addresses."""
    place.mkdir()
    stages = []
    for number, stage in enumerate(launches.stages):  # their files may all have one name
        path = shutil.copyfile(stage.cubin, place / f"{number}.cubin")
        stages.append(replace(stage, cubin=str(path)))
    return replace(launches, stages=tuple(stages))


def slowed(candidate: Candidate, cubin: str, cycles: int) -> Candidate:
    """The candidate and then a launch that waits for `cycles` clock cycles."""
    burn = CompiledStage("burn", cubin, Launch("burn", (1, 1, 1), 32, (cycles,)))
    return replace(candidate, timed=replace(candidate.timed, stages=(*candidate.timed.stages, burn)))


def measure(series: Sequence[Series], clock_hz: float, comparisons: int, until: float) -> tuple[int, float]:
    """Compare all kernels as often as asked for, or as the time allows.

    Returns the number of processes, and the seconds of the slowest to start.
    """
    opened_s = [0.0]

    def process() -> Worker:
        begin = time.monotonic()
        worker = Worker(timeout_s=60)
        worker.describe()
        opened_s.append(time.monotonic() - begin)
        return worker

    waiting = [each for each in series if each.share]
    for number in range(CORRECTIONS if waiting else 0):
        with process() as worker:
            for each in waiting:
                worker.open(each.new.timed.problem, replay_us=1000, seed=0)
                each.correct_in(worker, clock_hz, number)
    corrected = len(opened_s)
    for number in range(comparisons):
        if time.monotonic() > until:
            break
        with contextlib.ExitStack() as stack:
            started: list[Worker] = []

            def processes(stack: contextlib.ExitStack = stack, started: list[Worker] = started) -> Iterator[Worker]:
                for which in itertools.count():
                    if which == len(started):
                        started.append(stack.enter_context(process()))
                    yield started[which]

            for each in series:
                each.compare(processes())
        left_s = until - time.monotonic()
        console.print(f"comparison {number + 1} of {comparisons} of each, {left_s:.0f} s left")
    return len(opened_s) - corrected, round(max(opened_s), 2)


def bounds(count: int, trials: int) -> list[float]:
    """95 % bounds of a share."""
    return [round(p, 5) for p in proportion_interval(count, trials)]


def summary(rows: Sequence[dict[str, Any]], processes: int, opened_s: float) -> dict[str, Any]:
    """All figures: false alarms and misses with bounds, detections, and each series."""
    itself = [row for row in rows if not row["share"]]
    spread = [row["process_sd"] for row in rows if row["process_sd"] is not None]

    def counted(rows: Sequence[dict[str, Any]], verdict: Verdict) -> dict[str, Any]:
        count = sum(row["verdicts"].get(verdict.value, 0) for row in rows)
        return {"count": count, "bounds": bounds(count, sum(row["comparisons"] for row in rows))}

    totals = {}
    for share in sorted({row["share"] for row in rows} - {0.0}):
        of = [row for row in rows if row["share"] == share]
        detected = counted(of, Verdict.REGRESSION)
        totals[f"{100 * share:g} %"] = {
            "comparisons": sum(row["comparisons"] for row in of),
            "detected": detected["count"],
            "detected_bounds": detected["bounds"],
            "passed": counted(of, Verdict.PASS),
            "inconclusive": counted(of, Verdict.INCONCLUSIVE),
            "seconds_most": max((row["seconds_most"] or 0.0 for row in of), default=None),
        }
    alarms = counted(itself, Verdict.REGRESSION)
    return {
        "processes": processes,
        # Standard deviation of a process's ratio, of all kernels and slowdowns together.
        "process_sd": round(fmean(sd**2 for sd in spread) ** 0.5, 5) if spread else None,
        "itself": {
            "comparisons": sum(row["comparisons"] for row in itself),
            "false_alarms": alarms["count"],
            "false_alarms_bounds": alarms["bounds"],
            "false_improvements": counted(itself, Verdict.IMPROVEMENT)["count"],
            "inconclusive": counted(itself, Verdict.INCONCLUSIVE),
            "cases": itself,
        },
        "slowed": {
            "totals": totals,
            "opening_a_second_process_s": opened_s,
            "cases": [row for row in rows if row["share"]],
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the file if one is named."""
    parser = options(__doc__)
    parser.add_argument("--kernels", type=int, default=10)
    parser.add_argument("--comparisons", type=int, default=20, help="of each kernel and slowdown")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--runs", type=Path, nargs="+", metavar="DIR")
    asked = parser.parse_args(arguments)
    begin, here = time.monotonic(), described()
    arch = arch_named(here.arch)
    compiler = Compiler(arch)
    with contextlib.closing(compiler), tempfile.TemporaryDirectory() as place:
        cubin = str(compiler.compile(SOURCE, {}).path)
        runs = asked.runs or [recorded(name) for name in RUNS]
        found = list(cases(runs, arch, Path(place), asked.kernels))
        series = [Series(label, 0.0, old, new, cubin) for label, old, new in found]
        series += [Series(label, share, old, new, cubin)
                   for share, count in SHARES.items() for label, old, new in found[:count]]  # fmt: skip
        counted_in, longest_s = measure(series, here.clock_hz, asked.comparisons, begin + asked.seconds)
    facts = {"slower": SLOWER, **summary([one.row() for one in series], counted_in, longest_s)}
    facts["seconds"] = round(time.monotonic() - begin, 1)
    for row in [*facts["itself"]["cases"], *facts["slowed"]["cases"]]:
        console.print(f"{100 * row['share']:g} % {row['case']}: {row['verdicts']}, ratio {row['ratio']}")
    itself = facts["itself"]
    low, high = itself["false_alarms_bounds"]
    said = f"{itself['false_alarms']} of {itself['comparisons']} ({100 * low:.1f} to {100 * high:.1f} %)"
    console.print(f"{itself['comparisons']} comparisons of a kernel with itself: {said} false alarms")
    for share, of in facts["slowed"]["totals"].items():
        low, high = of["detected_bounds"]
        said = f"{of['detected']} of {of['comparisons']} ({100 * low:.1f} to {100 * high:.1f} %)"
        console.print(f"slower by {share}: detected {said}, passed {of['passed']['count']}")
    write(asked.file, here, facts)


if __name__ == "__main__":
    main()
