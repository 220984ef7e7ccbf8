"""The race: everyone whose first time is near the best, in cheap rounds, until few are left.

An entrant is out as soon as its rounds show it slower (evidence.py). Who wins by luck gains nothing
from it: the finals time the finalists anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnsweep.build.candidate import Build
from attnsweep.build.observer import Observer
from attnsweep.choose.evidence import Race, interval, rounds_to_eliminate
from attnsweep.choose.rounds import Rounds, measured
from attnsweep.gpu.worker import Gpu, WorkerError
from attnsweep.spec.load import SweepSpec
from attnsweep.trial import Trial

Pair = tuple[Build, Trial]
# First times are taken minutes apart, in other states of the clock (recorded finals of an H200 ran
# at 1395 to 1980 MHz under its power cap): a candidate within this of the best may be the best.
# They are warm, so that the best with a cold L2 may be further off.
_ENTRY = {"warm": 1.25, "cold": 1.5}
# The probability that the fastest entrant is lost in the race, at most.
_ALPHA = 0.05
# The first so many by first time may eliminate others.
_REFERENCES = 8
# Nobody alive is further than this from the leader: the race has nothing left to tell.
_ALIKE = 0.005
# What a race may cost: this share of the launches of 100 ms of each entrant.
_BUDGET_SHARE = 0.2
_FULL_US = 100_000.0
# A replay of the race: events resolve 0.5 us of it, and it is taken many times.
RACE_US = 300.0


def raced_by(spec: SweepSpec) -> str:
    """The kind of time that a race is about: launches cost the host alike, so never eager."""
    return "cold" if spec.measure.rank_by == "cold" else "warm"


def race_entry(spec: SweepSpec) -> float:
    """The multiple of the best first time up to which a candidate races."""
    return _ENTRY[raced_by(spec)]


def label_of(build: Build) -> str:
    """The name of a candidate in a race and in the rounds."""
    return f"{build.kernel.name} {build.config.label}"


def time_of(trial: Trial) -> float:
    """Its median in microseconds, infinite without one."""
    return trial.time_us.median if trial.time_us else math.inf


def by_time(pair: Pair) -> tuple[bool, float]:
    """Sorts by time, those that raced first: a race may be of cold times, first times are warm."""
    return not pair[1].race, time_of(pair[1])


def race(
    checked: Sequence[Pair],
    spec: SweepSpec,
    gpu: Gpu,
    *,
    put: Callable[[Trial], None],
    observer: Observer,
) -> list[Pair]:
    """Everyone of `checked` that is left, with what the race told in the row.

    put: stores a row that changed. There is no race where few are near the best, or where one call
    takes so long that the budget does not hold the rounds.
    """
    best = min((time_of(trial) for _, trial in checked), default=0.0)
    near = [pair for pair in checked if time_of(pair[1]) <= race_entry(spec) * best]
    nobody = [(build, trial.with_(race={})) for build, trial in checked]
    if len(near) <= spec.measure.finalists:
        return nobody
    if not _worth_it([time_of(trial) for _, trial in near]):
        observer.note("no race: a call takes too long for it; finalists by first times")
        return nobody
    return _Race(spec, gpu, put, observer).run(checked, near)


class _Race:
    """One problem's race on the GPU."""

    def __init__(
        self, spec: SweepSpec, gpu: Gpu, put: Callable[[Trial], None], observer: Observer
    ) -> None:
        self._spec, self._gpu, self._put, self._observer = spec, gpu, put, observer
        self._kind = raced_by(spec)
        self._lost: set[str] = set()

    def run(self, checked: Sequence[Pair], near: Sequence[Pair]) -> list[Pair]:
        """Race those that are near; everyone of `checked` that did not fail, with its row."""
        entrants: dict[str, Pair] = {}
        for build, trial in sorted(near, key=by_time):
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
        first_us = {name: time_of(trial) for name, (_, trial) in entrants.items()}
        launches = self._rounds(race, rounds, first_us)
        told = {}
        for name, (_, trial) in entrants.items():
            self._drop(name)
            if name not in self._lost and race.rounds[name]:
                facts = _facts(race, name) | {
                    "launches": launches[name],
                    "launches_of_100_ms": round(_FULL_US / time_of(trial)),
                }
                time_us = measured(race.rounds[name]).model_copy(update={"l2": self._kind})
                told[name] = trial.with_(time_us=time_us, race=facts)
                self._put(told[name])
        return [
            (build, told.get(label_of(build)) or trial.with_(race={}))
            for build, trial in checked
            if label_of(build) not in self._lost
        ]

    def _rounds(self, race: Race, rounds: Rounds, first_us: Mapping[str, float]) -> dict[str, int]:
        """Rounds until few are left, all left are alike, or the budget is spent.

        Returns how often each entrant was launched, warm-up and repeated rounds included.
        """
        launches = dict.fromkeys(race.entrants, 0)
        last = dict.fromkeys(race.entrants, 0)
        budget = _BUDGET_SHARE * sum(_FULL_US / us for us in first_us.values())

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
        """Free its graph and workspace, and never add it to a new process."""
        try:
            self._gpu.drop(name)
        except WorkerError as error:
            self._observer.note(f"{name} was not freed after the race: {error.detail}")

    def _fail(self, name: str, trial: Trial, error: WorkerError) -> None:
        self._lost.add(name)
        self._gpu.forget(name)
        self._put(trial.with_(status=error.status, detail=f"while timing: {error.detail}"))


def _worth_it(times_us: Sequence[float]) -> bool:
    """Whether the budget holds the rounds that the slowest need to be shown slower."""
    rounds = rounds_to_eliminate(math.log2(min(_REFERENCES, len(times_us)) / _ALPHA))
    calls = [max(1.0, RACE_US / us) for us in times_us]
    # A graph takes three calls and two replays to make, a round two replays.
    cost = sum(3 + 2 * (1 + rounds) * count for count in calls)
    return cost <= _BUDGET_SHARE * sum(_FULL_US / us for us in times_us)


def _facts(race: Race, name: str) -> dict[str, Any]:
    """What a row says of the race: how many took part, and why the candidate stayed or left."""
    shown_by = race.out.get(name)
    other = shown_by or race.leader
    rounds = race.rounds[name]
    low, high = interval(rounds, race.rounds[other][: len(rounds)], race.threshold)
    return {
        "entrants": len(race.entrants),
        "rounds": len(rounds),
        "survived": shown_by is None,
        "against": other,
        # JSON has no infinity: too few rounds bound nothing.
        "ratio": [low or None, high if math.isfinite(high) else None],
    }
