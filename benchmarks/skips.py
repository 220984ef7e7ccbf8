"""Who is skipped by bound on recorded exhaustive runs, and whom a roofline would exclude.

Usage: python benchmarks/skips.py [FILE.json] [--results DIR]. Nothing is measured. Rows are taken
in the recorded order, with 12 finalists, as most specs have. Told are, per run, kernel and problem:
the candidates; those that `search.skip_by_bound` leaves unrun, and the fastest of them over the
best; the least share of its stages timed alone that a pipeline took; and how many a roofline would
exclude that knows waves: matrix FLOPs at peak on the busiest SM, if blocks are equal.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from attnsweep.build.candidate import Build
from attnsweep.choose.columns import OURS
from attnsweep.choose.skips import SHARE, Skips
from attnsweep.family.declare import Config, Kernel, discover
from attnsweep.hardware import Chip, arch_named, bounds
from attnsweep.show.terminal import console
from attnsweep.store.run import Run, open_run
from attnsweep.trial import Status, Trial

ROOT = Path(__file__).parent.parent
RUNS = (
    *("three_kernel", "three_kernel_stages", "three_kernel_h200", "ladder"),
    *("flash_h200", "flash_short_h200", "batched_h100"),
)
FINALISTS, ENTRY = 12, 1.25
TOTALS = ("candidates", "skipped", "pipelines", "below_share", "excluded_by_roofline")
Timed = tuple[Build, Trial]


def timed_rows(run: Run) -> list[list[Timed]]:
    """The rows that were timed, of each problem and family, with their builds."""
    assert run.environment is not None
    kernels = discover()
    # Builds as if compiled: code is the same where source and defines are.
    compiler: Any = SimpleNamespace(
        arch=arch_named(run.environment.arch),
        key=lambda source, defines: repr((source.name, sorted(defines.items()))),
    )
    spaces = defaultdict(list)
    for trial in run.trials:
        if trial.provider == OURS and trial.status is Status.OK:
            kernel: Kernel = kernels[trial.kernel]
            # What is newer than the run has its first value, with which nothing changed.
            config = Config({p.name: p.values[0] for p in kernel.params} | trial.config)
            build = Build.of(
                kernel,
                config,
                trial.problem,
                compiler,
                workspace_limit=run.environment.memory_bytes // 4,
            )
            spaces[trial.problem, trial.kernel].append((build, trial))
    return list(spaces.values())


def time_of(trial: Trial) -> float:
    """Microseconds of a call."""
    return trial.time_us.median if trial.time_us is not None else math.inf


def skipped_of(rows: Sequence[Timed]) -> list[Trial]:
    """Those that a sweep that meets the candidates in this order leaves unrun."""
    skips, skipped = Skips(finalists=FINALISTS, entry=ENTRY), []
    for build, trial in rows:
        if skips.verdict(build) is None:
            skips.learn(build, trial)
        else:
            skipped.append(trial)
    return skipped


def roofline_us(build: Build, chip: Chip) -> float:
    """What the matrix units of the busiest SM need at peak, if all blocks are equal."""
    matrix_us = bounds(build.problem, build.arch, chip).get("matrix", 0.0)
    if not build.schedule.whole:
        return matrix_us
    blocks = max(math.prod(launch.grid) for launch in build.launches.values())
    return matrix_us * chip.sm_count * math.ceil(blocks / chip.sm_count) / blocks


def figures(rows: Sequence[Timed], chip: Chip) -> dict[str, Any]:
    """What is told of one problem and family."""
    best = min(time_of(trial) for _, trial in rows)
    skipped = [time_of(trial) / best for trial in skipped_of(rows)]
    shares = [
        time_of(trial) / sum(trial.stages_us.values())
        for build, trial in rows
        if len(trial.stages_us) > 1 and build.schedule.streams == 1
    ]
    return {
        "kernel": rows[0][1].kernel,
        "problem": rows[0][1].problem.label,
        "candidates": len(rows),
        "skipped": len(skipped),
        "fastest_skipped": round(min(skipped), 3) if skipped else None,
        "pipelines": len(shares),
        "least_share": round(min(shares), 3) if shares else None,
        "below_share": sum(share < SHARE for share in shares),
        "excluded_by_roofline": sum(roofline_us(build, chip) > ENTRY * best for build, _ in rows),
        "largest_roofline_share": round(max(roofline_us(b, chip) / time_of(t) for b, t in rows), 3),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "h200")
    chosen = parser.parse_args()
    spaces, totals = [], dict.fromkeys(TOTALS, 0)
    for name in RUNS:
        run = open_run(chosen.results / name)
        assert run.environment is not None
        for rows in timed_rows(run):
            found = figures(rows, run.environment)
            spaces.append({"run": name, **found})
            totals = {key: count + found[key] for key, count in totals.items()}
            console.print(
                f"{name} {found['kernel']} {found['problem']}: {found['skipped']} of "
                f"{found['candidates']} skipped, {found['excluded_by_roofline']} by roofline"
            )
    if chosen.out is not None:
        told = {"finalists": FINALISTS, "share": SHARE, **totals, "spaces": spaces}
        chosen.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
