"""Count how often `attnsweep check` is wrong: kernels against themselves, and slowed ones.

Usage: python benchmarks/gate.py [FILE.json] [--comparisons 1000] [--seconds 240]
       [--detect-seconds 60] [--runs DIR ...]. It needs a GPU.

The kernels are winners of recorded runs, compiled anew. They are compared as `check` compares code
that changed: in rounds in which both sides take turns, and in a second process if the first says
slower. Each side has its own copy of the machine code, so that the two lie apart in memory as two
versions do; every kernel has two new processes.

A slowed kernel is the kernel and then a launch that waits for some clock cycles; the other side
has the same launch with no cycles to wait for. The real slowdown is the median ratio of many
rounds, and corrects the cycles.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from attnsweep import (
    Arch,
    Candidate,
    CompiledStage,
    Compiler,
    Environment,
    Launch,
    Launches,
    Verdict,
    Worker,
    arch_named,
    compare_candidates,
    families,
    open_run,
    ratio_interval,
    rebuild,
    winners,
)

console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)
ROOT = Path(__file__).parent.parent
SOURCE = Path(__file__).with_name("burn.cu")
RUNS = (
    *("batched_h100", "flash_dims_h200", "flash_short_h200", "h200", "ladder"),
    *("three_kernel_h200", "wide_head"),
)
SLOWER = 0.02
SHARES = (0.02, 0.05)
# Winners taken from each run, with calls no longer than this: a comparison takes 0.1 to 0.2 s.
PER_RUN = 2
LONGEST_US = 250.0
# Kernels on which slowdowns are detected: spread over those that are compared.
DETECTED_ON = 3
# Rounds in which a slowdown is measured before its cycles are corrected, and after.
CALIBRATION_ROUNDS, VERIFICATION_ROUNDS = 100, 300
# The cycles are corrected until the slowdown is the share, or at most so much above it: a kernel
# slower by a little less than 2 % is shown to be so, and rightly passes.
CORRECTIONS, MOST_ABOVE = 5, 0.0006


@dataclass(frozen=True)
class Case:
    """One kernel on one problem, compiled, with two copies of its code."""

    label: str
    old: Candidate
    new: Candidate


class Processes:
    """Two processes with the same problem open; the second starts when it is asked for."""

    def __init__(self, case: Case, stack: contextlib.ExitStack) -> None:
        self._case, self._stack = case, stack
        self.first = self._open()
        self._second: Worker | None = None
        self.opened_s: list[float] = []

    def _open(self) -> Worker:
        worker = self._stack.enter_context(Worker(timeout_s=60))
        worker.open(self._case.new.timed.problem, replay_us=1000, seed=0)
        return worker

    def second(self) -> Worker:
        """The other process."""
        if self._second is None:
            begin = time.monotonic()
            self._second = self._open()
            self.opened_s.append(time.monotonic() - begin)
        return self._second

    def compare(self, old: Candidate, new: Candidate, seed: str) -> Any:
        """Compare as `check` does."""
        return compare_candidates(old, new, self.first, self.second, slower=SLOWER, seed=seed)


def cases(runs: Sequence[Path], arch: Arch, place: Path) -> Iterator[Case]:
    """Winners of the runs that this GPU can launch."""
    kernels = families()
    chosen = []
    for directory in runs:
        won = [t for t in winners(open_run(directory)) if t.kernel in kernels]
        won = [t for t in won if t.time_us is not None and t.time_us.median <= LONGEST_US]
        won = [t for t in won if kernels[t.kernel].refusal(t.problem, arch) is None]
        chosen += won[:: max(1, len(won) - 1)][:PER_RUN]
    for number, build in enumerate(rebuild(chosen, kernels, arch=arch)):
        candidate = build.candidate()
        old = replace(candidate, timed=copied(candidate.timed, place / str(number)))
        yield Case(f"{build.kernel.name} {build.problem.label}", old, candidate)


def copied(launches: Launches, place: Path) -> Launches:
    """The same code in other files, so that it is loaded to other addresses."""
    place.mkdir()
    stages = []
    for number, stage in enumerate(launches.stages):  # their files may all have one name
        path = place / f"{number}.cubin"
        shutil.copyfile(stage.cubin, path)
        stages.append(replace(stage, cubin=str(path)))
    return replace(launches, stages=tuple(stages))


def compare_with_itself(found: Sequence[Case], count: int, seconds: float) -> dict[str, Any]:
    """Make `count` comparisons, spread over the cases, or as many as `seconds` allow."""
    begin, rows = time.monotonic(), []
    total: Counter[str] = Counter()
    for number, case in enumerate(found):
        share = (count - total.total()) // (len(found) - number)
        until = begin + seconds * (number + 1) / len(found)
        with contextlib.ExitStack() as stack:
            processes = Processes(case, stack)
            took: list[float] = []
            shown: list[float] = []
            verdicts, again = Counter[str](), 0
            while verdicts.total() < share and (not took or time.monotonic() < until):
                start = time.monotonic()
                # Sides change, so that an advantage of being first shows as noise.
                one, other = case.old, case.new
                if verdicts.total() % 2:
                    one, other = other, one
                outcome = processes.compare(one, other, f"{case.label} {verdicts.total()}")
                took.append(time.monotonic() - start)
                verdicts[outcome.verdict.value] += 1
                again += outcome.processes - 1
                if outcome.shown.interval is not None:
                    shown.append(outcome.shown.interval.median)
        total += verdicts
        row = {
            "case": case.label,
            "verdicts": dict(verdicts),
            "slower_in_one_process": again,
            "seconds_each": round(median(took), 3),
            "ratio": [round(min(shown), 4), round(max(shown), 4)] if shown else None,
        }
        rows.append(row)
        console.print(f"itself  {case.label:52} {dict(verdicts)} {row['seconds_each']} s each")
    return {
        "comparisons": total.total(),
        "false_alarms": total[Verdict.REGRESSION.value],
        "false_improvements": total[Verdict.IMPROVEMENT.value],
        "inconclusive": total[Verdict.INCONCLUSIVE.value],
        "seconds": round(time.monotonic() - begin, 1),
        "cases": rows,
    }


def slowed(candidate: Candidate, cubin: str, cycles: int) -> Candidate:
    """The candidate and then a launch that waits for `cycles` clock cycles."""
    burn = CompiledStage("burn", cubin, Launch("burn", (1, 1, 1), 32, (cycles,)))
    return replace(
        candidate, timed=replace(candidate.timed, stages=(*candidate.timed.stages, burn))
    )


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


def calibrated(
    worker: Worker, case: Case, cubin: str, share: float, clock_hz: float
) -> tuple[Candidate, Candidate, dict[str, Any]]:
    """Both sides, and what the slowed one really takes more."""
    old = slowed(case.old, cubin, 0)
    worker.forget("old")
    worker.add("old", old, cold=False)
    time_us = median(worker.replay("old", "warm") for _ in range(10))
    # A short wait is over before the kernel first reads the clock, so the first guess adds some.
    cycles = round(share * time_us * clock_hz / 1e6) + 50
    for _ in range(CORRECTIONS):
        new = slowed(case.new, cubin, cycles)
        measured = median(ratios(worker, old, new, CALIBRATION_ROUNDS)) - 1
        if share <= measured <= share + MOST_ABOVE:
            break
        cycles += round((share + MOST_ABOVE / 2 - measured) * time_us * clock_hz / 1e6)
    new = slowed(case.new, cubin, max(cycles, 0))
    rounds = ratios(worker, old, new, VERIFICATION_ROUNDS)
    facts = {
        "cycles": max(cycles, 0),
        "time_us": round(time_us, 3),
        "measured_slowdown": round(median(rounds) - 1, 5),
        "interval": [round(r - 1, 5) for r in ratio_interval(rounds, [1.0] * len(rounds))],
        "rounds": len(rounds),
    }
    return old, new, facts


def detect(
    found: Sequence[Case], cubin: str, environment: Environment, seconds: float
) -> dict[str, Any]:
    """Compare known slowdowns, each as often as the time allows."""
    plain = [case for case in found if case.new.timed.streams == 1 and not case.new.timed.eager]
    plain = plain[:: max(1, len(plain) // DETECTED_ON)][:DETECTED_ON]
    rows: list[dict[str, Any]] = []
    opened_s: list[float] = []
    each_s = seconds / max(1, len(plain) * len(SHARES))
    for case in plain:
        with contextlib.ExitStack() as stack:
            processes = Processes(case, stack)
            processes.second()
            opened_s += processes.opened_s
            for share in SHARES:
                old, new, facts = calibrated(
                    processes.first, case, cubin, share, environment.clock_hz
                )
                took: list[float] = []
                verdicts = Counter[str]()
                until = time.monotonic() + each_s
                while not took or time.monotonic() < until:
                    start = time.monotonic()
                    seed = f"{case.label} {share} {len(took)}"
                    verdicts[processes.compare(old, new, seed).verdict.value] += 1
                    took.append(time.monotonic() - start)
                row = {
                    "case": case.label,
                    "share": share,
                    **facts,
                    "comparisons": len(took),
                    "detected": verdicts[Verdict.REGRESSION.value],
                    "verdicts": dict(verdicts),
                    "seconds_median": round(median(took), 3),
                    "seconds_most": round(max(took), 3),
                }
                rows.append(row)
                console.print(
                    f"slowed  {case.label:52} by {100 * share:g} % "
                    f"(measured {100 * row['measured_slowdown']:.2f} %): detected "
                    f"{row['detected']} of {row['comparisons']}, {row['seconds_median']} s each"
                )
    totals = {}
    for share in SHARES:
        of = [row for row in rows if row["share"] == share]
        totals[f"{100 * share:g} %"] = {
            "comparisons": sum(row["comparisons"] for row in of),
            "detected": sum(row["detected"] for row in of),
            "seconds_most": max((row["seconds_most"] for row in of), default=None),
        }
    # `check` opens the second process only when needed, so a detection takes this on top.
    process_s = round(max(opened_s), 2) if opened_s else None
    return {"totals": totals, "opening_a_second_process_s": process_s, "cases": rows}


def write(file: Path | None, facts: dict[str, Any]) -> None:
    """Write the figures so far if a file is named."""
    if file is not None:
        text = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
        file.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the file if one is named."""
    parser = argparse.ArgumentParser(description="How often `attnsweep check` is wrong.")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--comparisons", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--detect-seconds", type=float, default=60.0)
    parser.add_argument("--runs", type=Path, nargs="+", metavar="DIR")
    asked = parser.parse_args(arguments)
    runs = asked.runs or [ROOT / "results" / "h200" / name for name in RUNS]
    with Worker(timeout_s=60) as worker:
        here = worker.describe()
    arch = arch_named(here.arch)
    compiler = Compiler(arch)
    facts: dict[str, Any] = {"environment": here.model_dump(mode="json"), "slower": SLOWER}
    try:
        cubin = str(compiler.compile(SOURCE, {}).path)
        with tempfile.TemporaryDirectory() as place:
            found = list(cases(runs, arch, Path(place)))
            itself = compare_with_itself(found, asked.comparisons, asked.seconds)
            facts["itself"] = itself
            console.print(
                f"{itself['comparisons']} comparisons of a kernel with itself: "
                f"{itself['false_alarms']} false alarms, {itself['false_improvements']} false "
                f"improvements, {itself['inconclusive']} inconclusive, {itself['seconds']} s"
            )
            write(asked.file, facts)  # the rest may fail
            facts["slowed"] = detect(found, cubin, here, asked.detect_seconds)
    finally:
        compiler.close()
        write(asked.file, facts)


if __name__ == "__main__":
    main()
