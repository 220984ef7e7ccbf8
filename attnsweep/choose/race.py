"""The race: cheap rounds of all candidates whose first time is near the best, until few are left.

An entrant is out as soon as its rounds show it slower (stats.py). An entrant that wins by luck
gains nothing by it, because the finals time the finalists again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnsweep.bench.gpu import Gpu, WorkerError
from attnsweep.choose.pace import pace_of, time_of
from attnsweep.choose.rounds import Rounds, measured
from attnsweep.choose.stats import Race
from attnsweep.compile.candidate import Build
from attnsweep.core.observer import Observer
from attnsweep.core.trial import Trial
from attnsweep.specs.load import SweepSpec

Pair = tuple[Build, Trial]
# A candidate within this of the best first time may be the best: first times are taken minutes
# apart, in other states of the clock. In 234 recorded problems the best of the finals, or one as
# good, had a first time of at most 1.11 times the least (1.04 in all but three); relative to the
# finals' times, the first times of 720 finalists were 0.89 to 1.04 times the usual (99 % of them;
# two were mistakes). The rest covers other cards. First times are warm, so the best with a cold L2
# may be further off.
_ENTRY = {"warm": 1.25, "cold": 1.5}
# The largest probability that the race eliminates the fastest entrant.
_ALPHA = 0.05
# This many entrants, the first by first time, may eliminate others.
_REFERENCES = 8
# If no entrant alive is further than this from the leader, the race has nothing left to show.
_ALIKE = 0.005
# A race may cost at most this share of the launches of 100 ms of each entrant, but of long calls
# this many launches of each: rounds of one call, enough to show it slower and a few more.
_BUDGET_SHARE = 0.2
_FULL_US = 100_000.0
_LAUNCHES = 40
# A first time this many times as long as the rounds' is a mistake, not noise.
_CONTRADICTS = 2.0
# Length of a replay of the race: events resolve 0.5 us of it, and it is taken many times.
RACE_US = 300.0


def raced_by(spec: SweepSpec) -> str:
    """The kind of time that a race compares: `cold` if that ranks, otherwise `warm`."""
    return "cold" if spec.measure.rank_by == "cold" else "warm"


def race_entry(spec: SweepSpec) -> float:
    """The multiple of the best first time up to which a candidate races."""
    return _ENTRY[raced_by(spec)]


def label_of(build: Build) -> str:
    """The name of a candidate in a race and in the rounds."""
    return f"{build.kernel.name} {build.config.label}"


def first_of(trial: Trial) -> float:
    """The trial's first time in microseconds, or its only one; infinite without a time."""
    return trial.first_us or time_of(trial)


def settled_first(trial: Trial, warm_us: float) -> dict[str, float]:
    """The fields that replace a first time which rounds contradict by a factor of two or more.

    A search learns first times, and would otherwise learn a wrong one again in each rerun.
    """
    first = trial.first_us
    if first is None or 1 / _CONTRADICTS < first / warm_us < _CONTRADICTS:
        return {}
    return {"first_us": warm_us, "first_us_before": first}


def in_order(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs in the order in which they may be the best.

    First those that raced, by their times in it; a race may be cold, and first times are warm. Then
    the others, by how far their first times are behind the best (behind_best).
    """
    raced = [pair for pair in pairs if pair[1].race]
    others = [pair for pair in pairs if not pair[1].race]
    behind = behind_best([trial for _, trial in others])
    ordered = sorted(zip(behind, others, strict=True), key=lambda each: each[0])
    return sorted(raced, key=lambda pair: time_of(pair[1])) + [pair for _, pair in ordered]


def race(
    checked: Sequence[Pair],
    spec: SweepSpec,
    gpu: Gpu,
    *,
    put: Callable[[Trial], None],
    observer: Observer,
) -> list[Pair]:
    """Run the race; returns the candidates that did not fail, with the race's facts in their rows.

    put: stores a row that changed. There is no race if few candidates are near the best.
    """
    behind = behind_best([trial for _, trial in checked])
    near = [pair for pair, ratio in zip(checked, behind, strict=True) if ratio <= race_entry(spec)]
    if len(near) <= spec.measure.finalists:
        return [(build, trial.with_(race={})) for build, trial in checked]
    return _Race(spec, gpu, put, observer).run(checked, near)


def behind_best(trials: Sequence[Trial]) -> list[float]:
    """Each first time over the best one, in time or in clock cycles, whichever is nearer.

    A first time at the power cap is as slow as the clock was then; cycles do not depend on it. But
    the clock that NVML reports may be of another moment: on a hot H100 it said 1380 and 1980 MHz
    beside calls that took 3127 and 3206 us. A candidate stays out only if both say that it is slow.
    """
    # A row that an earlier run ranked holds another kind of time, or rounds of another day.
    times = [first_of(trial) for trial in trials]
    cycles = [t.first_us * t.first_mhz if t.first_us and t.first_mhz else math.inf for t in trials]
    best, least = min(times, default=0.0), min(cycles, default=0.0)
    nearer = [time / best for time in times]
    if least < math.inf:
        nearer = [min(ratio, each / least) for ratio, each in zip(nearer, cycles, strict=True)]
    return nearer


class _Race:
    """One problem's race on the GPU."""

    def __init__(
        self, spec: SweepSpec, gpu: Gpu, put: Callable[[Trial], None], observer: Observer
    ) -> None:
        self._spec, self._gpu, self._put, self._observer = spec, gpu, put, observer
        self._kind = raced_by(spec)
        self._lost: set[str] = set()

    def run(self, checked: Sequence[Pair], near: Sequence[Pair]) -> list[Pair]:
        """Race those that are near; returns each of `checked` that did not fail, with its row."""
        entrants: dict[str, Pair] = {}
        for build, trial in in_order([(b, t.with_(race={})) for b, t in near]):
            name = label_of(build)
            try:
                self._gpu.add(name, build.candidate(), cold=self._kind == "cold")
                entrants[name] = (build, trial)
            except WorkerError as error:
                self._fail(name, trial, error)
        names = tuple(entrants)
        race = Race(names, alpha=_ALPHA, references=names[:_REFERENCES])

        def fail(name: str, error: WorkerError) -> None:
            race.drop(name, error.detail)
            self._fail(name, entrants[name][1], error)

        rounds = Rounds(self._gpu, seed=self._spec.search.seed, fail=fail)
        first_us = {name: first_of(trial) for name, (_, trial) in entrants.items()}
        launches = self._rounds(race, rounds, first_us)
        told = {}
        whole = [race.rounds[name] for name in race.alive]
        pace = pace_of([times for times in whole if times])
        for name, (_, trial) in entrants.items():
            self._drop(name)
            if name not in self._lost and race.rounds[name]:
                facts = _facts(race, name) | {
                    "launches": launches[name],
                    "launches_of_100_ms": round(_FULL_US / first_us[name]),
                }
                times = race.rounds[name]
                if len(times) < len(pace):  # it left while the card was faster, or slower
                    times = [us / slow for us, slow in zip(times, pace, strict=False)]
                time_us = measured(times).model_copy(update={"l2": self._kind})
                first = settled_first(trial, time_us.median) if self._kind == "warm" else {}
                told[name] = trial.with_(time_us=time_us, race=facts, **first)
                self._put(told[name])
        return [
            (build, told.get(label_of(build)) or trial.with_(race={}))
            for build, trial in checked
            if label_of(build) not in self._lost
        ]

    def _rounds(self, race: Race, rounds: Rounds, first_us: Mapping[str, float]) -> dict[str, int]:
        """Take rounds until few are left, all left are alike, or the budget is spent.

        Returns the number of launches of each entrant, including warm-up and repeated rounds.
        """
        launches = dict.fromkeys(race.entrants, 0)
        last = dict.fromkeys(race.entrants, 0)
        budget = sum(max(_BUDGET_SHARE * _FULL_US / us, _LAUNCHES) for us in first_us.values())

        def replay(name: str) -> float:
            time_us, launched = self._gpu.race(name, RACE_US, self._kind)
            launches[name] += launched
            last[name] = launched
            return time_us

        rounds.warm_up(race.alive, replay)
        while len(race.alive) > self._spec.measure.finalists and not race.decided(_ALIKE):
            affordable = (budget - sum(launches.values())) // sum(last[n] for n in race.alive)
            if affordable < 1:
                break
            this = rounds.round(race.alive, replay, repeats=int(affordable) - 1)
            for name in race.add_round(this.times):
                self._drop(name)
            self._observer.racing(len(race.alive), len(race.entrants))
        return launches

    def _drop(self, name: str) -> None:
        """Drop an entrant: free its graph and workspace, and do not add it to a new process."""
        try:
            self._gpu.drop(name)
        except WorkerError as error:
            self._observer.note(f"{name} was not freed after the race: {error.detail}")

    def _fail(self, name: str, trial: Trial, error: WorkerError) -> None:
        self._lost.add(name)
        self._gpu.forget(name)
        self._put(trial.with_(status=error.status, detail=f"while timing: {error.detail}"))


def _facts(race: Race, name: str) -> dict[str, Any]:
    """Facts of the race for a row: number of entrants, and why the candidate stayed or left."""
    shown_by = race.out.get(name)
    other = shown_by or race.leader
    low, high = race.ratio(name, other)
    return {
        "entrants": len(race.entrants),
        "rounds": len(race.rounds[name]),
        "survived": shown_by is None,
        "against": other,
        # JSON has no infinity; None means that too few rounds give no limit.
        "ratio": [low or None, high if math.isfinite(high) else None],
    }
