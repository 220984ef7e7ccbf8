"""Replay search strategies on recorded exhaustive runs: how soon is one within 1 % of the best?

Nothing is measured: a strategy learns the recorded first time of each config that it asks for. A
space is what one run tried of one family on one problem. A trial is a success if the config took
part in the run's rounds and its median there is at most 1 % above the least one, which is what the
ranking sees; first times alone are not enough.

- `gp` begins without the history of the problem itself, on any card and of any run (of a problem
  that differs in its mask or its dtype it keeps it).
- `gp, other shapes` also without the history of problems of the same shape.
- `gp, no history` knows nothing.
- `random` draws without repeats.
- `kernel_tuner …` are strategies of Kernel Tuner, in its own simulation mode and with its defaults,
  if it is installed: pip install kernel-tuner scipy scikit-learn. It is told which configs exist.
  (Of Kernel Tuner 1.5.0, greedy_ils did not end in four minutes on a space of 410, and diff_evo
  failed with an IndexError on another.)

`gp` and `random` run on every space of LEAST candidates or more, the others on spaces of LARGE or
more, and no further than TRIALS. `curves` holds the median over the seeds of the best time so far
over the best one, after each trial, for the spaces in CURVES; null while nothing is timed. Rows do
not hold how long a candidate took to compile and to check, so there is no axis of seconds.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import statistics
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from setting import RESULTS, console, options, recorded_on, write

import attnsweep
from attnsweep import Problem, Status, Trial
from attnsweep.choose.search import Search
from attnsweep.choose.strategies.gp import gp
from attnsweep.choose.strategies.history import shipped_history
from attnsweep.family.family import Config
from attnsweep.family.space import Space

CARDS = (RESULTS / "h100-80gb-hbm3", RESULTS / "h200")
LEAST, LARGE, TRIALS, SEEDS = 40, 120, 150, 20
GOOD = 1.01
HISTORY = ("gp", "gp, other shapes", "gp, no history")
EVERYWHERE = (*HISTORY, "random")
KERNEL_TUNER = ("kernel_tuner genetic_algorithm", "kernel_tuner simulated_annealing", "kernel_tuner bayes_opt")
# On spaces of LARGE or more these get all seeds. Others get a quarter of them, and the last of
# Kernel Tuner's, which takes seconds a seed, a tenth.
ALL_SEEDS = ("gp", "random")
CURVES = (("h200/flash_short", "(1,8,512,64) fp16 causal"), ("h200/three_kernel_stages", "(1,16,1024,64) fp16 full"))


@dataclass(frozen=True)
class Recorded:
    """What one run tried of one family on one problem."""

    run: str
    space: Space
    rows: Mapping[Config, Trial]

    @property
    def finals(self) -> dict[Config, float]:
        """Microseconds of each config that was in the rounds."""
        ok = {c: row.time_us for c, row in self.rows.items() if row.status is Status.OK and row.time_us}
        return {config: time.median for config, time in ok.items() if time.rounds}

    def times(self) -> dict[Config, float]:
        """The same of every config that ran; first times are scaled to those of the rounds."""
        finals = self.finals
        firsts = {c: row.screened_us for c, row in self.rows.items() if row.screened_us}
        scale = statistics.median(us / firsts[c] for c, us in finals.items())
        return {c: finals.get(c, us * scale) for c, us in firsts.items()}


@cache
def spaces() -> list[Recorded]:
    """Every space of LEAST candidates or more that a recorded run tried whole; read once a process."""
    kernels, whole = attnsweep.families(), []
    for directory in (found for place in CARDS for found in attnsweep.find_runs(place)):
        if attnsweep.load_spec(directory / "spec.yaml", kernels).search.strategy != "exhaustive":
            continue
        groups: dict[tuple[str, Problem], dict[Config, Trial]] = defaultdict(dict)
        for trial in attnsweep.open_run(directory).trials:
            if trial.provider == "attnsweep":
                groups[trial.kernel, trial.problem][Config(trial.config)] = trial
        for (kernel, problem), rows in groups.items():
            space = Space(kernels[kernel], problem, tuple(rows), len(rows), {})
            found = Recorded(f"{directory.parent.name}/{directory.name}", space, rows)
            whole += [found] if len(rows) >= LEAST and found.finals else []
    return whole


def asked(recorded: Recorded, name: str, seed: int) -> tuple[list[Config], str | None]:
    """The configs that a strategy asks for, in order, and why it ended."""
    if name in KERNEL_TUNER:
        return by_kernel_tuner(recorded, name.removeprefix("kernel_tuner "), seed), None
    strategy: Any = name
    if name in HISTORY:
        strategy = partial(gp, history=history_of(recorded.space, name))
    search = Search(strategy, recorded.space, candidates=len(recorded.rows), seed=seed)
    configs = []
    while (config := search.ask()) is not None:
        configs.append(config)
        search.tell(recorded.rows[config])
    return configs, search.why_ended


def history_of(space: Space, name: str) -> list[Any]:
    """The history that a replay may use."""

    def shape(p: Problem) -> tuple[int, ...]:
        return (p.batch, p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.head_dim)

    of, all_of_them = space.problem, shipped_history(space.kernel.name)
    if name == "gp":
        return [each for each in all_of_them if each.problem != of]
    return [each for each in all_of_them if name == "gp, other shapes" and shape(each.problem) != shape(of)]


def by_kernel_tuner(recorded: Recorded, name: str, seed: int) -> list[Config]:
    """The same of a strategy of Kernel Tuner, on a cache file of the recorded first times."""
    from kernel_tuner import tune_kernel

    configs = recorded.space.configs
    names = [n for n in configs[0] if len({config[n] for config in configs}) > 1]
    params = {n: list(dict.fromkeys(config[n] for config in configs)) for n in names}
    by_values = {tuple(config[n] for n in names): config for config in configs}
    spent = ("compile_time", "verification_time", "benchmark_time", "strategy_time", "framework_time")
    cached = {}
    for values, config in by_values.items():
        us = recorded.rows[config].screened_us
        facts = {"time": us / 1e3 if us else "RuntimeFailedConfig", "timestamp": "-", **dict.fromkeys(spent, 0.0)}
        cached[",".join(map(str, values))] = dict(zip(names, values, strict=True)) | facts
    content = {"device_name": "Simulation", "kernel_name": "k", "problem_size": 1}
    content |= {"tune_params_keys": names, "tune_params": params, "objective": "time", "cache": cached}

    def exists(values: Mapping[str, Any]) -> bool:  # Kernel Tuner reads the source of a lambda
        return tuple(values[n] for n in names) in by_values

    random.seed(seed)
    np.random.seed(seed)
    with (
        tempfile.TemporaryDirectory() as place,
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(action="ignore"),
    ):
        file = Path(place) / "cache.json"
        file.write_text(json.dumps(content), encoding="utf-8")
        results, _ = tune_kernel(
            *("k", "", 1, [], params),
            restrictions=exists,
            cache=str(file),
            simulation_mode=True,
            strategy=name,
            strategy_options={"max_fevals": min(TRIALS, len(configs))},
            lang="CUPY",
            quiet=True,
        )
    # A config that it visits again costs it nothing.
    visited = (by_values[tuple(result[n] for n in names)] for result in results)
    return list(dict.fromkeys(visited))


def kernel_tuner_version() -> str | None:
    """Its version, or None if it is not installed."""
    try:
        return version("kernel-tuner")
    except PackageNotFoundError:
        return None


def first_good(configs: Sequence[Config], finals: Mapping[Config, float]) -> float:
    """The number of trials until one is within 1 % of the best; infinite if none is."""
    limit = GOOD * min(finals.values())
    return next((n for n, c in enumerate(configs, 1) if finals.get(c, math.inf) <= limit), math.inf)


def finite(number: float, digits: int | None = None) -> float | None:
    """A number, rounded to digits if they are given; None: it is infinite."""
    return None if number == math.inf else number if digits is None else round(number, digits)


def figures(tried: Sequence[Sequence[Config]], finals: Mapping[Config, float]) -> dict[str, Any]:
    """Trials to 1 % and to the end over the seeds, and the worst regret of the end, in percent."""
    reached = sorted(first_good(configs, finals) for configs in tried)
    regret = max(min((finals.get(c, math.inf) for c in configs), default=math.inf) for configs in tried)
    return {
        "median_trials_to_1_percent": finite(reached[len(reached) // 2]),
        "worst_trials_to_1_percent": finite(reached[-1]),
        "median_trials": statistics.median(map(len, tried)),
        "worst_regret_percent": finite(100 * (regret / min(finals.values()) - 1), 2),
    }


def curve(tried: Sequence[Sequence[Config]], times: Mapping[Config, float]) -> list[float | None]:
    """After each trial, the median over the seeds of the best time so far over the best one."""
    of_seed = np.full((len(tried), TRIALS), math.inf)
    for row, configs in zip(of_seed, tried, strict=True):
        own = [times.get(config, math.inf) for config in configs[:TRIALS]]
        row[: len(own)] = own
    best = np.minimum.accumulate(of_seed, axis=1) / min(times.values())
    return [finite(float(ratio), 4) for ratio in np.median(best, axis=0)]


def replays(number: int) -> list[dict[str, Any]]:
    """A row for each strategy on one of the spaces."""
    recorded, found = spaces()[number], []
    problem, large = recorded.space.problem.label, len(recorded.rows) >= LARGE
    theirs = KERNEL_TUNER if large and kernel_tuner_version() else ()
    for name in (*EVERYWHERE, *theirs):
        share = 0.1 if name == KERNEL_TUNER[-1] else 1 if name in ALL_SEEDS and large else 0.25
        count = math.ceil(SEEDS * share)
        tried, ends = zip(*(asked(recorded, name, seed) for seed in range(count)), strict=True)
        row = {
            "run": recorded.run,
            "kernel": recorded.space.kernel.name,
            "problem": problem,
            "candidates": len(recorded.rows),
            "strategy": name,
            "seeds": count,
            **figures(tried, recorded.finals),
            "ended": ends[0],
        }
        if (recorded.run, problem) in CURVES:
            row["curve"] = curve(tried, recorded.times())
        found.append(row)
    return found


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each strategy and size of space: the share of the candidates until one is within 1 %."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["strategy"], row["candidates"] < LARGE].append(row)
    names = [*dict.fromkeys(name for name, _ in groups)]
    found = []
    for (name, small), mine in sorted(groups.items(), key=lambda group: (names.index(group[0][0]), group[0][1])):
        middles, worsts = (
            [(row[f"{which}_trials_to_1_percent"] or math.inf) / row["candidates"] for row in mine]
            for which in ("median", "worst")
        )
        regrets = [row["worst_regret_percent"] for row in mine]
        tried = sum(row["median_trials"] for row in mine)
        found.append(
            {
                "strategy": name,
                "least_candidates": LEAST if small else LARGE,
                "below": LARGE if small else None,
                "spaces": len(mine),
                "median_share": finite(statistics.median(middles), 4),
                "worst_share": finite(max(worsts), 4),
                "spaces_worst_above_20_percent": sum(share > 0.2 for share in worsts),
                "share_tried": round(tried / sum(row["candidates"] for row in mine), 4),
                "worst_regret_percent": None if None in regrets else max(regrets),
            }
        )
    return found


def main() -> None:
    """Replay every strategy and write the file."""
    file, rows = options(__doc__).parse_args().file, []
    with ProcessPoolExecutor() as pool:
        for found in pool.map(replays, range(len(spaces()))):
            rows += found
            for row in found:
                console.print({name: value for name, value in row.items() if name != "curve"})
    runs = sorted({each.run for each in spaces()})
    facts = {"replay_of": runs, "recorded_on": recorded_on([RESULTS / run for run in runs])}
    facts |= {"kernel_tuner": kernel_tuner_version(), "seeds": SEEDS}
    write(file, None, facts | {"summary": summary(rows), "spaces": rows})


if __name__ == "__main__":
    main()
