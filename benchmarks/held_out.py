"""How good is the config that a call on a paged cache takes, on recorded shapes that nobody tuned?

  python benchmarks/held_out.py RUN [FILE.json]

For each problem of a recorded run (held_out_paged, held_out_append): the config that
attnsweep.flash_attn_with_kvcache chooses by the winners of other runs, its recorded time, and that
of the run's best and of FlashAttention-3 with its metadata ready, of an FP8 cache with its queries
in FP8 too, whose error is over our limit. Needs no GPU.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from setting import options, write_rows

from attnsweep import open_run
from attnsweep.core.hardware import arch_named
from attnsweep.serve.paged_plans import alike, chosen


def rows_of(path: Path) -> Any:
    """A row for each problem, then one of all."""
    run = open_run(path)
    gpu = (run.environment.gpu or "").removeprefix("NVIDIA ") if run.environment else ""
    ours: dict[Any, dict[str, float]] = {}
    theirs: dict[Any, float] = {}
    for trial in run.trials:
        if trial.time_us is None:
            continue
        if trial.provider in ("flash_attn_3_ready", "flash_attn_3_fp8_ready"):
            theirs[trial.problem] = trial.time_us.median
        elif trial.provider == "attnsweep":
            config = {name: value for name, value in trial.config.items() if name != "LSE"}
            label = f"{trial.kernel} {sorted(config.items())}"
            own = ours.setdefault(trial.problem, {})
            own[label] = trial.time_us.median  # the last row of a config is the longest measured
    ratios = []
    for problem, times in ours.items():
        blocks = problem.layout.blocks(problem.seqlen_k)
        batch, rows, blocks = alike(problem.batch, problem.seqlen_q, blocks)
        seqlen_k = blocks * problem.layout.page_size
        layout = replace(problem.layout, lengths=(seqlen_k, *[0] * (batch - 1)), shared=0)
        sizes = {"batch": batch, "seqlen_q": rows, "seqlen_k": seqlen_k, "layout": layout}
        family, config, why = chosen(replace(problem, **sizes), arch_named("sm_90a"), gpu)
        row: dict[str, Any] = {"problem": problem.label, "why": why}
        if family is not None and config is not None:
            own = {name: value for name, value in config.items() if name != "LSE"}
            took = times.get(f"{family.name} {sorted(own.items())}")
            row |= {"kernel": family.name, "config": config.label, "us": took}
            if took:
                row["of_best"] = round(took / min(times.values()), 3)
                if problem in theirs:
                    ratios.append(theirs[problem] / took)
                    row["over_flash_3"] = round(ratios[-1], 3)
        yield row
    if ratios:
        mean = statistics.geometric_mean(ratios)
        yield {"problems": len(ratios), "mean": round(mean, 3), "least": round(min(ratios), 3)}


def main() -> None:
    """See the file's text."""
    parser = options(__doc__)
    parser.add_argument("run", type=Path)
    parser._actions.insert(1, parser._actions.pop())  # before the file
    told = parser.parse_args()
    write_rows(told.file, open_run(told.run).environment, rows_of(told.run))


if __name__ == "__main__":
    main()
