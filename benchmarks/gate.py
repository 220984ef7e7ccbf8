"""How often `attnsweep check` is wrong: kernels against themselves, and slowed by a known amount.

Usage: python benchmarks/gate.py [FILE.json] [--comparisons 1000] [--seconds 240]
       [--detect-seconds 60] [--runs DIR ...]. Needs a GPU.

The kernels are winners of recorded runs, compiled anew. A comparison is `gate.compare`, as `check`
makes it of code that changed: rounds in which both sides take turns, and a second process if the
first says slower. Each side has its own copy of the machine code, so that they lie apart in memory
as two versions do; every kernel has two new processes.

A slowed kernel is the kernel with a launch behind it that waits for so many clock cycles; the other
side has the same launch with no cycles to wait for. What it is really slower by is measured beside
it, as the median ratio of many rounds, by which the cycles are corrected.
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

from attnsweep.build.candidate import Build
from attnsweep.build.launches import Candidate, CompiledStage, Launches
from attnsweep.build.nvrtc import Compiler
from attnsweep.check.live import Outcome, compare
from attnsweep.check.recorded import Verdict
from attnsweep.choose.evidence import ratio_interval
from attnsweep.choose.ranking import rank, winners
from attnsweep.family.chunks import changed_since
from attnsweep.family.declare import Config, Launch, discover
from attnsweep.gpu.worker import Worker
from attnsweep.hardware import arch_named
from attnsweep.show.terminal import console
from attnsweep.store.run import open_run
from attnsweep.trial import Environment

ROOT = Path(__file__).parent.parent
SOURCE = Path(__file__).with_name("burn.cu")
RUNS = (
    *("batched_h100", "flash_dims_h200", "flash_short_h200", "h200", "ladder"),
    *("three_kernel_h200", "wide_head"),
)
SLOWER = 0.02
SHARES = (0.02, 0.05)
# Of each run, and calls no longer than this: a comparison then takes 0.1 to 0.2 s.
PER_RUN = 2
LONGEST_US = 250.0
# Kernels on which slowdowns are detected: spread over those that are compared.
DETECTED_ON = 3
# Rounds in which a slowdown is measured before its cycles are corrected, and after.
CALIBRATION_ROUNDS, VERIFICATION_ROUNDS = 100, 300
# Corrected until it is slower by the share and no more than so much above: what is slower by a
# little less than 2 % is shown to be less, and passes as it should.
CORRECTIONS, MOST_ABOVE = 5, 0.0006


@dataclass(frozen=True)
class Case:
    """One kernel on one problem, compiled; two copies of its code."""

    label: str
    old: Candidate
    new: Candidate


class Processes:
    """Two processes with the same problem open, the second only if it is asked for."""

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

    def compare(self, old: Candidate, new: Candidate, seed: str) -> Outcome:
        """The comparison of `check`."""
        return compare(self.first, self.second, old, new, slower=SLOWER, budget_s=60.0, seed=seed)


def cases(runs: Sequence[Path], compiler: Compiler, place: Path) -> Iterator[Case]:
    """Winners of the runs that this GPU can launch."""
    kernels = discover()
    builds = []
    for directory in runs:
        run = open_run(directory)
        won = [t for t in winners(rank(run.trials, run.environment)) if t.kernel in kernels]
        won = [t for t in won if t.time_us is not None and t.time_us.median <= LONGEST_US]
        won = [t for t in won if kernels[t.kernel].refusal(t.problem, compiler.arch) is None]
        for trial in won[:: max(1, len(won) - 1)][:PER_RUN]:
            kernel, config = kernels[trial.kernel], Config(trial.config)
            if changed_since(kernel, config) is not None:
                continue
            if kernel.refused_by(config, trial.problem, compiler.arch) is None:
                builds.append(Build.of(kernel, config, trial.problem, compiler))
                builds[-1].submit()
    for number, build in enumerate(builds):
        candidate = build.candidate()
        old = replace(candidate, timed=copied(candidate.timed, place / str(number)))
        yield Case(f"{build.kernel.name} {build.problem.label}", old, candidate)


def copied(plan: Launches, place: Path) -> Launches:
    """The same code in other files, which are then loaded to other addresses."""
    place.mkdir()
    stages = []
    for number, stage in enumerate(plan.stages):  # whose files may all have one name
        path = place / f"{number}.cubin"
        shutil.copyfile(stage.cubin, path)
        stages.append(replace(stage, cubin=str(path)))
    return replace(plan, stages=tuple(stages))


def compare_with_itself(found: Sequence[Case], count: int, seconds: float) -> dict[str, Any]:
    """So many comparisons, shared out among the cases, or as many as the time allows."""
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
                # Sides change, so that what one of them has by being first shows as noise.
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
    """The candidate with a launch behind it that waits for so many clock cycles."""
    burn = CompiledStage("burn", cubin, Launch("burn", (1, 1, 1), 32, (cycles,)))
    return replace(
        candidate, timed=replace(candidate.timed, stages=(*candidate.timed.stages, burn))
    )


def ratios(worker: Worker, old: Candidate, new: Candidate, rounds: int) -> list[float]:
    """New time over old of so many rounds, and nothing decided."""
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
    """Both sides with what the slowed one really takes more."""
    old = slowed(case.old, cubin, 0)
    worker.forget("old")
    worker.add("old", old, cold=False)
    time_us = median(worker.replay("old", "warm") for _ in range(10))
    # A wait of few cycles is over before it is looked at first, so the first guess adds some.
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
    """Known slowdowns, each compared as often as the time allows."""
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
    # `check` opens the second process only when it needs it, so a detection takes this on top.
    process_s = round(max(opened_s), 2) if opened_s else None
    return {"totals": totals, "opening_a_second_process_s": process_s, "cases": rows}


def write(file: Path | None, facts: dict[str, Any]) -> None:
    """What there is so far, if a file is named."""
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
    compiler = Compiler(arch_named(here.arch))
    facts: dict[str, Any] = {"environment": here.model_dump(mode="json"), "slower": SLOWER}
    try:
        cubin = str(compiler.compile(SOURCE, {}).path)
        with tempfile.TemporaryDirectory() as place:
            found = list(cases(runs, compiler, Path(place)))
            itself = compare_with_itself(found, asked.comparisons, asked.seconds)
            facts["itself"] = itself
            console.print(
                f"{itself['comparisons']} comparisons of a kernel with itself: "
                f"{itself['false_alarms']} false alarms, {itself['false_improvements']} false "
                f"improvements, {itself['inconclusive']} inconclusive, {itself['seconds']} s"
            )
            write(asked.file, facts)  # whatever becomes of the rest
            facts["slowed"] = detect(found, cubin, here, asked.detect_seconds)
    finally:
        compiler.close()
        write(asked.file, facts)


if __name__ == "__main__":
    main()
