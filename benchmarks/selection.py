"""How often does a sweep keep the best candidate, and what does its winner cost? By simulation.

With --only the problems of FILE.json whose run and label do not hold the text stay as they are, if
their runs are still there. Nothing is measured: the race, the finals and the ranking are the
sweep's own, on a card that draws its samples from recorded rounds. For every recorded problem a
candidate's true time is its recorded one, relative to the best; a sample is off by a residual of
that problem's rounds (a time over its entry's median and its round's), drawn anew. First times are
off by a lognormal of FIRST_NOISE. The file holds, for each problem, how often the tie set held the
true best, the 95th percentile of the regret (the winner's true time over the best's, less 1),
rounds, and seconds of calls.

Limits: residuals are drawn independently, so that a drift that meets one entry for several rounds
is not there; true times are recorded medians, which are themselves off.
"""

from __future__ import annotations

import functools
import json
import math
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import setting
import yaml
from setting import RESULTS, console, options, recorded_on, write

from attnsweep import Problem, Run, Status, Trial, open_run, rank
from attnsweep.core.trial import Measurement
from attnsweep.specs.load import SweepSpec

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))
from selecting import select

# A race's replay lasts 300 µs and a finals' about 1 ms: of short calls it averages fewer.
RACE_NOISE = math.sqrt(1000 / 300)
RUNS, FIRST_NOISE = 100, 0.05
HELD, REGRET = 0.95, 0.005

SPEC = """
problems: [{{batch: 1, heads: 2, seqlen: 64, head_dim: 64}}]
kernels: {{naive: {{}}}}
baselines: []
measure: {{cold: false, eager: false, rounds: {rounds}, finalists: {finalists}}}
"""


@functools.cache
def spec_of(rounds: int, finalists: int) -> SweepSpec:
    """A spec with these settings; its problem and kernel do not matter."""
    with tempfile.TemporaryDirectory() as directory:
        return setting.spec_of(SPEC.format(rounds=rounds, finalists=finalists), Path(directory))


@dataclass(frozen=True)
class Recorded:
    """One recorded problem: candidates' rows and true times, and how samples are off.

    levels: a candidate's label to true microseconds of a call.
    """

    run: str
    problem: Problem
    rows: Sequence[Trial]
    levels: Mapping[str, float]
    residuals: Sequence[float]
    rounds: int
    finalists: int

    @property
    def best_us(self) -> float:
        """True time of the best."""
        return min(self.levels.values())


def label(trial: Trial) -> str:
    """The name of a candidate in a race and in the rounds."""
    values = ((n, int(v) if isinstance(v, bool) else v) for n, v in trial.config.items())
    return " ".join([trial.kernel, *(f"{name}={value}" for name, value in values)])


def levels_of(rows: Sequence[Trial]) -> dict[str, float]:
    """The true time of each candidate, as the record tells it best.

    Finalists: their median. Those that a race eliminated: the middle of the interval of their ratio
    to the one that did. Others: their first time, at the clock of the finals.
    """
    finalists = [t for t in rows if t.time_us.rounds]
    pace = [t.first_us / t.time_us.median for t in finalists if t.first_us and t.time_us.l2 == "warm"]
    usual = statistics.median(pace) if pace else 1.0
    names = {label(t): t for t in rows}
    found = {label(t): t.time_us.median for t in finalists}

    def level(name: str, seen: frozenset[str] = frozenset()) -> float:
        if name in found:
            return found[name]
        trial = names[name]
        against, ratio = trial.race.get("against"), trial.race.get("ratio") or [None, None]
        if against in names and against not in seen and None not in ratio and against != name:
            return level(against, seen | {name}) * math.sqrt(ratio[0] * ratio[1])
        return (trial.first_us or trial.time_us.median * usual) / usual

    return {name: level(name) for name in names}


def residuals_of(finalists: Sequence[Trial]) -> list[float]:
    """Logarithms of samples over their entry's median and their round's, of entries in all rounds.

    Taking both medians away makes them smaller; they are scaled up by what that costs.
    """
    most = max((len(t.time_us.rounds) for t in finalists), default=0)
    whole = [t.time_us.rounds for t in finalists if len(t.time_us.rounds) == most]
    if len(whole) < 2 or most < 2:
        return []
    own = [[math.log(us) - math.log(statistics.median(times)) for us in times] for times in whole]
    shared = [statistics.median(column) for column in zip(*own, strict=True)]
    scale = math.sqrt(most / (most - 1) * len(whole) / (len(whole) - 1))
    return [scale * (us - s) for times in own for us, s in zip(times, shared, strict=True)]


def name_of(directory: Path) -> str:
    """Card and name of a run: two cards have runs of one name."""
    return "/".join(directory.parts[-2:])


def recorded_problems(run: Run, only: str = "") -> Iterator[Recorded]:
    """The problems of a run on which at least three finalists have rounds in common."""
    by_problem = defaultdict(list)
    for trial in run.trials:
        if trial.provider == "attnsweep" and trial.time_us and trial.status in (Status.OK, Status.NOISY):
            by_problem[trial.problem].append(trial)
    name = name_of(run.directory)
    for problem, rows in by_problem.items():
        residuals = residuals_of([t for t in rows if t.time_us.rounds])
        if only in f"{name} {problem.label}" and len(rows) >= 3 and residuals:
            measure = (yaml.safe_load(run.spec_text or "") or {}).get("measure", {})
            limits = measure.get("rounds", 15), min(measure.get("finalists", 12), 12)
            yield Recorded(name, problem, rows, levels_of(rows), residuals, *limits)


@dataclass
class Card:
    """A GPU whose samples are the true times, off by a residual; see attnsweep.bench.gpu.Gpu."""

    of: Recorded
    random: random.Random
    spent_us: float = 0.0
    raced_us: float = 0.0
    steps_s: dict[str, float] = field(default_factory=dict)

    def sample(self, name: str, us: float, noise: float = 1.0) -> tuple[float, int]:
        """One replay of about `us`: microseconds a call, and calls launched."""
        level = self.of.levels[name]
        calls = max(1, round(us / level))
        self.spent_us += 2 * calls * level
        off = self.random.choice(self.of.residuals) * (noise if level < us else 1.0)
        return level * math.exp(off), 2 * calls

    def nothing(self, *_: object, **__: object) -> int:
        """Every candidate is there and none can be chained; no call is compared."""
        return 0

    add = confirm = drop = nothing

    def race(self, name: str, replay_us: float, _: str) -> tuple[float, int]:
        """A sample of a race, and the calls that it launched."""
        taken = self.sample(name, replay_us, RACE_NOISE)
        self.raced_us = self.spent_us
        return taken

    def replay(self, name: str, _: str) -> float:
        """A sample of the finals."""
        return self.sample(name, 1000.0)[0]

    def conditions(self) -> Mapping[str, Any]:
        """One clock for all, because samples are not off by it."""
        return {"sm_mhz": 1980}


def simulate(of: Recorded, seed: int) -> dict[str, float]:
    """One sweep on the simulated card: first times, race, finals, ranking."""
    card, checked = Card(of, random.Random(seed)), []
    for row in of.rows:
        name = label(row)
        first = of.levels[name] * math.exp(card.random.gauss(0, FIRST_NOISE))
        once = Measurement(median=first, low=first, high=first, samples=1)
        trial = row.with_(time_us=once, first_us=first, first_mhz=None, race={}, status=Status.OK, stages_us={})
        config = SimpleNamespace(label=name.partition(" ")[2])
        kernel = SimpleNamespace(name=row.kernel)
        build = SimpleNamespace(kernel=kernel, config=config, candidate=lambda: None)
        checked.append((build, trial))
    spec = spec_of(of.rounds, of.finalists)
    rows = select(checked, replace(spec, search=spec.search.model_copy(update={"seed": seed})), card)
    frame = rank(rows)
    (winner,) = frame.loc[frame["winner"], "trial"]
    ties = [of.levels[label(t)] for t in frame.loc[frame["rank"] == 1, "trial"]]
    return {
        "held": of.best_us in ties,
        "regret": of.levels[label(winner)] / of.best_us - 1,
        "rounds": max(len(t.time_us.rounds) for t in rows),
        "race_s": card.raced_us / 1e6,
        "finals_s": (card.spent_us - card.raced_us) / 1e6,
    }


def judge(of: Recorded, runs: int = RUNS) -> dict[str, Any]:
    """Many simulated sweeps of one problem."""
    told = [simulate(of, seed) for seed in range(runs)]
    each = {name: sorted(one[name] for one in told) for name in told[0]}
    held, at_95 = sum(each["held"]), each["regret"][math.ceil(0.95 * runs) - 1]
    return {
        "run": of.run,
        "problem": of.problem.label,
        "best_us": round(of.best_us, 3),
        "held": held,
        "regret_95_percent": round(100 * at_95, 3),
        "largest_regret_percent": round(100 * each["regret"][-1], 3),
        "rounds": statistics.median(each["rounds"]),
        "most_rounds": each["rounds"][-1],
        "race_s": round(statistics.median(each["race_s"]), 3),
        "finals_s": round(statistics.median(each["finals_s"]), 3),
        "reached": held >= HELD * runs and at_95 <= REGRET,
    }


def gather(directories: Sequence[Path], only: str = "") -> list[Recorded]:
    """The problems of all runs."""
    runs = (open_run(directory) for directory in directories if any(directory.glob("trials.jsonl*")))
    measured = (run for run in runs if not any(trial.recorded for trial in run.trials))  # a replay repeats another run
    return [of for run in measured for of in recorded_problems(run, only)]


def main() -> None:
    """Simulate every recorded problem."""
    parser = options(__doc__)
    parser.add_argument("--only", default="", help="problems whose run and label hold this text; others stay")
    asked, directories = parser.parse_args(), sorted(RESULTS.glob("*/*"))
    told: list[dict[str, Any]] = []
    if asked.only and asked.file.exists():
        old = json.loads(asked.file.read_text(encoding="utf-8"))
        if (old["runs"], old["first_noise"]) != (RUNS, FIRST_NOISE):
            raise SystemExit(f"{asked.file} has {old['runs']} runs, first noise {old['first_noise']}")
        runs = set(map(name_of, directories))
        told = [e for e in old["of"] if e["run"] in runs and asked.only not in f"{e['run']} {e['problem']}"]
    with ProcessPoolExecutor() as pool:
        for each in pool.map(judge, gather(directories, asked.only)):
            told.append(each)
            console.print(each)
    told = sorted(told, key=lambda each: str(each["run"]))
    reached = sum(each["reached"] for each in told)
    facts = {"runs": RUNS, "first_noise": FIRST_NOISE, "recorded_on": recorded_on(directories)}
    write(asked.file, None, {**facts, "problems": len(told), "reached": reached, "of": told})


if __name__ == "__main__":
    main()
