"""Replay search strategies on recorded exhaustive runs: best so far against trials, and regret.

Usage: python benchmarks/search.py [FILE.json] [--seeds 10] [--results DIR]. Nothing is measured: a
strategy learns the recorded time of each config that it asks for. For each run, kernel and problem
the file holds the best time after a number of trials over the best recorded one (median and worst
of the seeds), and the median number of trials until a strategy was within 1 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from setting import RESULTS, console, recorded

from attnsweep import Config, Search, Space, Status, Trial, load_spec, open_run, plan

RUNS = ("flash_short", "three_kernel", "three_kernel_stages")
STRATEGIES = ("random", "tpe")
LEAST_CANDIDATES = 150
CHECKPOINTS = (10, 25, 50, 75, 100, 150)
GOOD = 1.01


def curve(space: Space, rows: Mapping[Config, Trial], strategy: str, seed: int) -> list[float]:
    """The best time so far in microseconds after each trial; infinite while none is ok."""
    search = Search(strategy, space, candidates=max(CHECKPOINTS), seed=seed)
    best, out = float("inf"), []
    while (config := search.ask()) is not None:
        row = rows[config]
        if row.status is Status.OK and row.time_us is not None:
            best = min(best, row.time_us.median)
        out.append(best)
        search.tell(row)
    return out


def figures(curves: Sequence[Sequence[float]], best_us: float) -> dict[str, Any]:
    """The best so far over the best at each checkpoint, and the trials until it is within 1 %."""
    reached = [next((n for n, us in enumerate(c, 1) if us <= GOOD * best_us), None) for c in curves]
    known = sorted(float("inf") if n is None else n for n in reached)
    middle = known[len(known) // 2]
    at = {n: sorted(c[n - 1] / best_us for c in curves) for n in CHECKPOINTS if n <= len(curves[0])}
    return {
        "median_ratio": {n: round(statistics.median(ratios), 4) for n, ratios in at.items()},
        "worst_ratio": {n: round(ratios[-1], 4) for n, ratios in at.items()},
        "median_trials_to_1_percent": None if middle == float("inf") else int(middle),
        "seeds_within_1_percent": sum(n is not None for n in reached),
    }


def replays(directory: Path, seeds: int) -> list[dict[str, Any]]:
    """Replay every strategy on every space of one recorded run that was tried whole."""
    run = open_run(directory)
    assert run.environment is not None
    found = []
    for item in plan(load_spec(directory / "spec.yaml"), arch=run.environment.arch):
        for space in item.spaces:
            rows = {
                Config(t.config): t
                for t in run.trials
                if (t.kernel, t.problem) == (space.kernel.name, item.problem)
            }
            whole = len(space.configs) >= LEAST_CANDIDATES and set(space.configs) <= set(rows)
            times = [t.time_us.median for t in rows.values() if t.status is Status.OK and t.time_us]
            if not whole or not times:
                continue
            for strategy in STRATEGIES:
                curves = [curve(space, rows, strategy, seed) for seed in range(seeds)]
                found.append(
                    {
                        "run": directory.name,
                        "kernel": space.kernel.name,
                        "problem": item.problem.label,
                        "candidates": len(space.configs),
                        "best_us": min(times),
                        "strategy": strategy,
                        **figures(curves, min(times)),
                    }
                )
                said = ("kernel", "problem", "strategy", "median_ratio")
                console.print("  ".join(str(found[-1][name]) for name in said))
    return found


def main() -> None:
    """Replay every strategy and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    results = RESULTS / "h200"
    parser.add_argument("file", nargs="?", type=Path, default=results / "search_replay.json")
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    spaces = []
    for name in RUNS:
        spaces += replays(recorded(name, arguments.results), arguments.seeds)
    environment = open_run(recorded(RUNS[0], arguments.results)).environment
    assert environment is not None
    result = {
        "replay_of": [
            f"results/{arguments.results.name}/{recorded(name, arguments.results).name}"
            for name in RUNS
        ],
        "recorded_on": f"{environment.gpu}, {environment.date[:10]}",
        "seeds": arguments.seeds,
        "spaces": spaces,
    }
    arguments.file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
