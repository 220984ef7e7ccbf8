"""Count the candidates of recorded exhaustive runs that a bound skips or a roofline excludes.

Nothing is measured. Rows are taken in the recorded order, with 12 finalists, as most specs have.
For each run, kernel and problem the file holds the number of candidates; those that
`search.skip_by_bound` leaves unrun, and the fastest of them over the best; the least share of its
stages timed alone that a pipeline took; and the number that a roofline would exclude that counts
waves: matrix FLOPs at peak on the busiest SM, if blocks are equal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from setting import console, options, recorded, write

from attnsweep import Build, Config, Environment, Run, Skips, Status, Trial, arch_named, bounds, families, open_run

RUNS = (
    *("three_kernel", "three_kernel_stages", "three_kernel_tuned", "ladder"),
    *("flash_training", "flash_short", "batched"),
)
FINALISTS, ENTRY = 12, 1.25
# The share of its stages timed alone that `Skips` takes a pipeline to need at least.
SHARE = 0.8
TOTALS = ("candidates", "skipped", "pipelines", "below_share", "excluded_by_roofline")
Timed = tuple[Build, Trial]


def timed_rows(run: Run) -> list[list[Timed]]:
    """The rows that were timed, by problem and family, with their builds."""
    kernels, card, spaces = families(), run.environment, defaultdict(list)
    # Nothing is compiled: code is the same where source and defines are the same.
    compiler: Any = SimpleNamespace(
        arch=arch_named(card.arch), key=lambda source, defines: repr((source.name, sorted(defines.items())))
    )
    for trial in run.trials:
        if trial.provider == "attnsweep" and trial.status is Status.OK:
            kernel = kernels[trial.kernel]
            # A parameter newer than the run has its first value, which changes nothing.
            config = Config({p.name: p.values[0] for p in kernel.params} | trial.config)
            build = Build.of(kernel, config, trial.problem, compiler, workspace_limit=card.memory_bytes // 4)
            spaces[trial.problem, trial.kernel].append((build, trial))
    return list(spaces.values())


def skipped_of(rows: Sequence[Timed]) -> list[Trial]:
    """The rows that a sweep that meets the candidates in this order leaves unrun."""
    skips, skipped = Skips(finalists=FINALISTS, entry=ENTRY), []
    for build, trial in rows:
        if skips.verdict(build) is None:
            skips.learn(build, trial)
        else:
            skipped.append(trial)
    return skipped


def roofline_us(build: Build, card: Environment) -> float:
    """The time that the matrix units of the busiest SM need at peak, if all blocks are equal."""
    matrix_us = bounds(build.problem, build.arch, card).get("matrix", 0.0)
    if not build.schedule.whole:
        return matrix_us
    blocks = max(math.prod(launch.grid) for launch in build.launches.values())
    return matrix_us * card.sm_count * math.ceil(blocks / card.sm_count) / blocks


def figures(rows: Sequence[Timed], card: Environment) -> dict[str, Any]:
    """Count on one problem and family."""
    best = min(trial.time_us.median for _, trial in rows)
    skipped = [trial.time_us.median / best for trial in skipped_of(rows)]
    shares = [
        trial.time_us.median / sum(trial.stages_us.values())
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
        "excluded_by_roofline": sum(roofline_us(build, card) > ENTRY * best for build, _ in rows),
    }


if __name__ == "__main__":
    file = options(__doc__).parse_args().file
    runs = map(open_run, map(recorded, RUNS))
    spaces = [{"run": run.directory.name, **figures(rows, run.environment)} for run in runs for rows in timed_rows(run)]
    totals = {key: sum(found[key] for found in spaces) for key in TOTALS}
    console.print(totals)
    write(file, None, {"finalists": FINALISTS, "share": SHARE, **totals, "spaces": spaces})
