"""Count how often `attnsweep check` is wrong: kernels against themselves, and slowed ones.

Usage: python benchmarks/gate.py [FILE.json] [--kernels 10] [--pairs 20] [--seconds 540]
       [--runs DIR ...]. It needs a GPU, and about 9 minutes of it.
       python benchmarks/gate.py FILE.json --pool ONE.json OTHER.json ... counts together what
       several series gave, which may be of other hosts; it needs no GPU.

The kernels are winners of recorded runs, compiled anew. They are compared as `check` compares code
that changed: in turns, in two processes, and in up to eight while these do not decide. Each side
has its own copy of the machine code, so that the two lie apart in memory as two versions do.

Starting a process takes seconds, and timing a kernel in it a fraction of one. So every process
times every kernel, with itself and slowed, one after the other; a comparison that needs another
process goes on in the next one, and one that has ended is followed by the next. No process serves
two comparisons of the same kernel and slowdown.

A slowed kernel is the kernel and then a launch that waits for some clock cycles; the other side
has the same launch with no cycles to wait for. The cycles are corrected in processes of their own.
The real slowdown (`ratio`) and how much processes differ follow from all that timed it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import queue
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from gate_counts import console, pooled, show, summary, write
from setting import recorded

from attnsweep import (
    Arch,
    Candidate,
    CompiledStage,
    Compiler,
    Environment,
    Launch,
    LaunchPlan,
    Verdict,
    Worker,
    WorkerError,
    arch_named,
    compare_candidates,
    families,
    open_run,
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
# Processes in which the cycles of a slowdown are corrected, and rounds of each correction.
CALIBRATION_PROCESSES, CALIBRATION_ROUNDS = 3, 60
# The cycles are corrected until the slowdown is the share, or at most so much above it: a kernel
# slower by a little less than 2 % is shown to be so, and rightly passes.
CORRECTIONS, MOST_ABOVE = 4, 0.001


@dataclass(frozen=True)
class Case:
    """One kernel on one problem, compiled, with two copies of its code."""

    label: str
    old: Candidate
    new: Candidate


class Comparison:
    """One comparison as `check` makes it, which pauses when it asks for another process."""

    def __init__(self, old: Candidate, new: Candidate, seed: str) -> None:
        self._sides, self._seed = (old, new), seed
        self._offered: queue.Queue[Worker | None] = queue.Queue()
        self._paused: queue.Queue[bool] = queue.Queue()
        self._thread: threading.Thread | None = None
        self.outcome: Any = None
        self.failure: str | None = None

    def go_on_in(self, worker: Worker) -> bool:
        """Time both in this process, which has their problem open; whether that ended it."""
        self._offered.put(worker)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self._paused.get()

    def abandon(self) -> None:
        """End it without a verdict: no process is left for it."""
        if self._thread is not None:
            self._offered.put(None)
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(_Abandoned):
            try:
                old, new = self._sides
                self.outcome = compare_candidates(old, new, self._another(), self._next, slower=SLOWER, seed=self._seed)
            except WorkerError as error:
                self.failure = str(error)
            self._paused.put(True)

    def _next(self) -> Worker:
        self._paused.put(False)
        return self._another()

    def _another(self) -> Worker:
        worker = self._offered.get()
        if worker is None:
            raise _Abandoned
        return worker


class _Abandoned(Exception):
    """The time is up."""


@dataclass
class Series:
    """The comparisons of one kernel at one slowdown, one after the other."""

    case: Case
    share: float
    old: Candidate
    new: Candidate
    facts: dict[str, Any] = field(default_factory=dict)
    ended: list[Comparison] = field(default_factory=list)
    running: Comparison | None = None

    def go_on_in(self, worker: Worker) -> None:
        """Take the rounds of one process."""
        if self.running is None:
            one, other = self.old, self.new
            # Without a slowdown sides change, so that an advantage of being first shows as noise.
            if not self.share and len(self.ended) % 2:
                one, other = other, one
            seed = f"{self.case.label} {self.share} {len(self.ended)}"
            self.running = Comparison(one, other, seed)
        if self.running.go_on_in(worker):
            self.ended.append(self.running)
            self.running = None

    def close(self) -> None:
        """Give up the comparison that is under way."""
        if self.running is not None:
            self.running.abandon()

    def row(self) -> dict[str, Any]:
        """The counts, and the ratio of each process."""
        outcomes = [one.outcome for one in self.ended if one.outcome is not None]
        ratios = [
            process.interval.median for outcome in outcomes for process in outcome.each if process.interval is not None
        ]
        verdicts = Counter(outcome.verdict.value for outcome in outcomes)
        seconds = [outcome.shown.spent_s for outcome in outcomes]
        return {
            "case": self.case.label,
            "share": self.share,
            **self.facts,
            "comparisons": len(outcomes),
            "verdicts": dict(verdicts),
            "detected": verdicts[Verdict.REGRESSION.value],
            "failed": [one.failure for one in self.ended if one.failure is not None],
            "unfinished": int(self.running is not None),
            "processes": [outcome.processes for outcome in outcomes],
            "seconds_median": round(median(seconds), 3) if seconds else None,
            "seconds_most": round(max(seconds), 3) if seconds else None,
            "ratio": round(fmean(ratios), 5) if ratios else None,
            "process_sd": round(stdev(ratios), 5) if len(ratios) > 1 else None,
            "ratios": [round(ratio, 5) for ratio in ratios],
        }


def cases(runs: Sequence[Path], arch: Arch, place: Path, count: int) -> list[Case]:
    """Winners of the runs that this GPU can launch: the first of each run, then the next ones."""
    kernels = families()
    of_run = []
    for directory in runs:
        won = [t for t in winners(open_run(directory)) if t.kernel in kernels]
        won = [t for t in won if t.time_us is not None and t.time_us.median <= LONGEST_US]
        of_run.append([t for t in won if kernels[t.kernel].refusal(t.problem, arch) is None])
    chosen = [t for turn in itertools.zip_longest(*of_run) for t in turn if t is not None]
    found = []
    for build in rebuild(chosen[: 2 * count], kernels, arch=arch):
        candidate = build.candidate()
        if candidate.timed.streams == 1 and not candidate.timed.eager and len(found) < count:
            old = replace(candidate, timed=copied(candidate.timed, place / str(len(found))))
            found.append(Case(f"{build.kernel.name} {build.problem.label}", old, candidate))
    return found


def copied(launches: LaunchPlan, place: Path) -> LaunchPlan:
    """The same code in other files, so that it is loaded to other addresses."""
    place.mkdir()
    stages = []
    for number, stage in enumerate(launches.stages):  # their files may all have one name
        path = place / f"{number}.cubin"
        shutil.copyfile(stage.cubin, path)
        stages.append(replace(stage, cubin=str(path)))
    return replace(launches, stages=tuple(stages))


def slowed(candidate: Candidate, cubin: str, cycles: int) -> Candidate:
    """The candidate and then a launch that waits for `cycles` clock cycles."""
    burn = CompiledStage("burn", cubin, Launch("burn", (1, 1, 1), 32, (cycles,)))
    return replace(candidate, timed=replace(candidate.timed, stages=(*candidate.timed.stages, burn)))


def ratios(worker: Worker, old: Candidate, new: Candidate, rounds: int) -> list[float]:
    """New time over old in each of `rounds` rounds, whatever they show."""
    for name, candidate in (("old", old), ("new", new)):
        worker.forget(name)
        worker.add(name, candidate, cold=False)
    out = []
    for number in range(rounds + 2):
        order = ("old", "new") if number % 2 else ("new", "old")
        if number < 2:
            for name in order:
                worker.replay(name, "warm")
            continue
        turn = dict(zip(order, worker.pair(*order), strict=True))
        out.append(turn["new"] / turn["old"])
    return out


@dataclass
class Calibration:
    """The cycles that slow one case by a share, by what several processes measured."""

    case: Case
    cubin: str
    share: float
    clock_hz: float
    cycles: int = 0
    time_us: float = 0.0
    measured: list[float] = field(default_factory=list)

    @property
    def sides(self) -> tuple[Candidate, Candidate]:
        """The kernel that waits for no cycles, and the one that waits for `cycles`."""
        new = slowed(self.case.new, self.cubin, max(self.cycles, 0))
        return slowed(self.case.old, self.cubin, 0), new

    def correct_in(self, worker: Worker) -> None:
        """Correct the cycles in this process: the first alone, later ones by the mean of all.

        A process adds an offset to the ratio, which a single one would take for the slowdown.
        """
        if not self.measured:
            self._guess(worker)
            return
        self.measured.append(median(ratios(worker, *self.sides, CALIBRATION_ROUNDS)) - 1)

    def finish(self) -> None:
        """Correct the cycles by the mean of what processes measured with them."""
        self._add(self.share + MOST_ABOVE / 2 - fmean(self.measured))

    def _guess(self, worker: Worker) -> None:
        old, _ = self.sides
        worker.forget("old")
        worker.add("old", old, cold=False)
        self.time_us = median(worker.replay("old", "warm") for _ in range(10))
        # A short wait is over before the kernel first reads the clock, so more than the share.
        self.cycles = 50
        self._add(self.share)
        for _ in range(CORRECTIONS):
            measured = median(ratios(worker, *self.sides, CALIBRATION_ROUNDS)) - 1
            if self.share <= measured <= self.share + MOST_ABOVE:
                break
            self._add(self.share + MOST_ABOVE / 2 - measured)
        self.measured = [median(ratios(worker, *self.sides, CALIBRATION_ROUNDS)) - 1]

    def _add(self, share: float) -> None:
        self.cycles += round(share * self.time_us * self.clock_hz / 1e6)


@contextlib.contextmanager
def process(opened_s: list[float]) -> Iterator[Worker]:
    """A new process; appends the seconds until it answers."""
    begin = time.monotonic()
    with Worker(timeout_s=60) as worker:
        worker.describe()
        opened_s.append(time.monotonic() - begin)
        yield worker


def opened(worker: Worker, case: Case) -> Worker:
    """The process with the case's problem open."""
    worker.open(case.new.timed.problem, replay_us=1000, seed=0)
    return worker


def measure(
    found: Sequence[Case], cubin: str, environment: Environment, pairs: int, until: float
) -> tuple[list[Series], list[float]]:
    """All series, timed in twice as many processes as pairs, or as many as the time allows."""
    opened_s: list[float] = []
    wanted = [
        Calibration(case, cubin, share, environment.clock_hz)
        for share, count in SHARES.items()
        for case in found[:count]
    ]
    for _ in range(CALIBRATION_PROCESSES):
        with process(opened_s) as worker:
            for case in found:
                opened(worker, case)
                for one in wanted:
                    if one.case is case:
                        one.correct_in(worker)
    series = [Series(case, 0.0, case.old, case.new) for case in found]
    for one in wanted:
        one.finish()
        facts = {"cycles": max(one.cycles, 0), "time_us": round(one.time_us, 3)}
        series.append(Series(one.case, one.share, *one.sides, facts))
    try:
        for number in range(2 * pairs):
            if time.monotonic() > until:
                break
            with process(opened_s) as worker:
                for case in found:
                    opened(worker, case)
                    for each in series:
                        if each.case is case:
                            each.go_on_in(worker)
            left_s = until - time.monotonic()
            console.print(f"process {number + 1} of {2 * pairs}, {left_s:.0f} s left")
    finally:
        for each in series:
            each.close()
    return series, opened_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the file if one is named."""
    parser = argparse.ArgumentParser(description="How often `attnsweep check` is wrong.")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--kernels", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=20, help="half the number of processes")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--runs", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--pool", type=Path, nargs="+", metavar="FILE.json")
    asked = parser.parse_args(arguments)
    if asked.pool:
        facts = pooled(asked.pool)
        show(facts)
        write(asked.file, facts)
        return
    begin = time.monotonic()
    runs = asked.runs or [recorded(name) for name in RUNS]
    with Worker(timeout_s=60) as worker:
        here = worker.describe()
    arch = arch_named(here.arch)
    compiler = Compiler(arch)
    facts = {"environment": here.model_dump(mode="json"), "slower": SLOWER}
    try:
        cubin = str(compiler.compile(SOURCE, {}).path)
        with tempfile.TemporaryDirectory() as place:
            found = cases(runs, arch, Path(place), asked.kernels)
            until = begin + asked.seconds
            series, opened_s = measure(found, cubin, here, asked.pairs, until)
            rows = [one.row() for one in series]
            counted_in = len(opened_s) - CALIBRATION_PROCESSES
            longest_s = round(max(opened_s), 2) if opened_s else None
            facts |= summary(rows, counted_in, longest_s)
            facts["seconds"] = round(time.monotonic() - begin, 1)
            show(facts)
            write(asked.file, facts)
    finally:
        compiler.close()


if __name__ == "__main__":
    main()
