"""The rounds: candidates race, then the best of them and all baselines take turns.

First a race of everyone whose first time is near the best: cheap rounds, in which a candidate is
out as soon as its rounds show it slower (evidence.py). Then the finalists and the baselines are
timed anew in full rounds, so that who won the race by luck gains nothing from it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnsweep.build.candidate import Build, Observer
from attnsweep.choose.evidence import Race, interval, rounds_to_eliminate
from attnsweep.choose.ranking import EQUIVALENT, OURS, thrift
from attnsweep.choose.rounds import Round, Turns
from attnsweep.gpu.worker import Worker, WorkerError
from attnsweep.spec.load import SweepSpec
from attnsweep.store.run import Store
from attnsweep.trial import Measurement, Status, Trial

Pair = tuple[Build, Trial]
# The best of each family always enters the rounds, so that every family's best is well measured.
_FINALISTS_PER_FAMILY = 2
# Interquartile range over median above which a time is not to be trusted, once what all shared is
# taken off: at its power cap an H200 ran whole rounds 20 % slower than others.
_NOISY_SPREAD = 0.15
# First times are taken minutes apart, in other states of the clock (recorded finals of an H200 ran
# at 1395 to 1980 MHz under its power cap): who is within this of the best may be the best. They are
# warm, so that who is best with a cold L2 may be further off.
_ENTRY = {"warm": 1.25, "cold": 1.5}
# With what probability the fastest entrant may be lost in the race.
_ALPHA = 0.05
# Who may eliminate: the first so many by first time.
_REFERENCES = 8
# Nobody alive is further than this from the leader: the race has nothing left to tell.
_ALIKE = 0.005
# Rounds as a multiple of those the spec asks for, while a finalist is this close to the border
# between as good as the best and not: on which side it falls may decide who wins.
_MOST = 3
_BORDER = 0.0015
_KINDS = ("warm", "cold", "eager")
# After the first rounds of the kind that ranks, who is slower than the fastest by this is known
# well enough; most are slow baselines, of which a call may take as long as all finalists'.
_FAR = 1.5
_ROUNDS_OF_THE_FAR = 5
# Who takes part in further rounds: those that may yet win, and who is just behind them.
_NEAR = 1.02
# What a race may cost: this share of the launches of 100 ms of each entrant.
_BUDGET_SHARE = 0.2
_FULL_US = 100_000.0
# A replay of the race: events resolve 0.5 us of it, and it is taken many times.
RACE_US = 300.0
# Of a race that ends undecided the thriftiest within this of the leader are finalists too, so that
# which of the equally good is chosen does not hang on who was lucky in the race.
_UNDECIDED = 1.01


def _raced_by(spec: SweepSpec) -> str:
    """The kind of time that a race is about: launches cost the host alike, so never eager."""
    return "cold" if spec.measure.rank_by == "cold" else "warm"


def race_entry(spec: SweepSpec) -> float:
    """Who races: those whose first time is at most this multiple of the best."""
    return _ENTRY[_raced_by(spec)]


def label_of(build: Build) -> str:
    """What a candidate is called in a race and in the rounds."""
    return f"{build.kernel.name} {build.config.label}"


class Rounds:
    """One problem's finalists on the worker's GPU. What is measured replaces rows in the store."""

    def __init__(self, spec: SweepSpec, worker: Worker, store: Store, observer: Observer) -> None:
        self._spec, self._worker, self._store, self._observer = spec, worker, store, observer

    def run(self, checked: Sequence[Pair], peers: Sequence[Trial]) -> list[Pair]:
        """Race `checked`, time the best of them and all peers in turns; replace their rows.

        peers: the row of each baseline, as it is if the baseline cannot run. Returns who of
        `checked` was a finalist.
        """
        entries: dict[str, Trial] = {}
        finalists = []
        raced = self._race(checked)
        for build, trial in self._finalists(raced):
            name = label_of(build)
            try:
                self._worker.call("admit", name, build.candidate(), keep=True, slow=True)
                entries[name] = trial
                finalists.append((build, trial))
            except WorkerError as error:
                self._lose(trial, error)
        for row in peers:
            try:
                accuracy = self._worker.call("admit_baseline", row.provider, keep=True, slow=True)
                entries[row.provider] = row.with_(status=Status.OK, accuracy=accuracy)
            except WorkerError as error:
                row = row.with_(status=error.status, detail=error.detail, accuracy=error.payload)
                self._put(row)
        for _, trial in raced:  # rounds of an earlier session do not pair with today's
            if trial.time_us and trial.time_us.rounds and trial not in entries.values():
                alone = trial.time_us.model_copy(update={"rounds": []})
                self._store.append(trial.with_(time_us=alone))
        for trial in self._rounds(entries):
            self._put(trial)
        return finalists

    # -- the race ---------------------------------------------------------------------------

    def _race(self, checked: Sequence[Pair]) -> list[Pair]:
        """Everyone of `checked` that is left, with what the race told in the row."""
        best = min((_time(trial) for _, trial in checked), default=0.0)
        near = [pair for pair in checked if _time(pair[1]) <= race_entry(self._spec) * best]
        if len(near) <= self._spec.measure.finalists:
            return [(build, trial.with_(race={})) for build, trial in checked]
        if not _worth_a_race([_time(trial) for _, trial in near]):
            self._observer.note("no race: a call takes too long for it; finalists by first times")
            return [(build, trial.with_(race={})) for build, trial in checked]
        entrants: dict[str, Pair] = {}
        lost: set[str] = set()
        kind = _raced_by(self._spec)
        for build, trial in sorted(near, key=_order):
            try:
                self._worker.call("enter", label_of(build), build.candidate(), kind, keep=True)
                entrants[label_of(build)] = (build, trial)
            except WorkerError as error:
                lost.add(label_of(build))
                self._lose(trial, error)
        names = tuple(entrants)
        race = Race(names, alpha=_ALPHA, references=names[:_REFERENCES])

        def lose(name: str, error: WorkerError) -> None:
            lost.add(name)
            race.withdraw(name, error.detail)
            self._lose(entrants[name][1], error, name)

        turns = Turns(self._worker, seed=self._spec.search.seed, lose=lose)
        launches = self._run_race(
            race, turns, {name: _time(trial) for name, (_, trial) in entrants.items()}
        )
        told = {}
        for name, (_, trial) in entrants.items():
            self._dismiss(name)
            if name not in lost and race.rounds[name]:
                facts = _race_facts(race, name) | {
                    "launches": launches[name],
                    "launches_of_100_ms": round(_FULL_US / _time(trial)),
                }
                time_us = _measured(race.rounds[name]).model_copy(update={"l2": kind})
                told[name] = trial.with_(time_us=time_us, race=facts)
                self._put(told[name])
        return [
            (build, told.get(label_of(build)) or trial.with_(race={}))
            for build, trial in checked
            if label_of(build) not in lost
        ]

    def _run_race(self, race: Race, turns: Turns, first_us: Mapping[str, float]) -> dict[str, int]:
        """Rounds until few are left, all left are alike, or the budget is spent.

        Returns how often each entrant was launched, warm-up and repeated rounds included.
        """
        launches = dict.fromkeys(race.entrants, 0)
        last = dict.fromkeys(race.entrants, 0)
        budget = _BUDGET_SHARE * sum(_FULL_US / us for us in first_us.values())

        def replay(name: str) -> float:
            time_us, launched = self._worker.call("race", name, RACE_US, _raced_by(self._spec))
            launches[name] += launched
            last[name] = launched
            return float(time_us)

        turns.warm_up(race.alive, replay)
        while len(race.alive) > self._spec.measure.finalists and not race.decided(_ALIKE):
            affordable = (budget - sum(launches.values())) // sum(last[n] for n in race.alive)
            if affordable < 1:
                break
            turn = turns.round(race.alive, replay, repeats=int(affordable) - 1)
            for name in race.add_round(turn.times):
                self._dismiss(name)
            self._observer.racing(len(race.alive), len(race.entrants))
        return launches

    def _dismiss(self, name: str) -> None:
        """Out of the race: its graph and workspace are freed, and it is not entered again."""
        self._worker.forget(name)
        try:
            self._worker.call("dismiss", name)
        except WorkerError as error:
            self._observer.note(f"{name} was not freed after the race: {error.detail}")

    def _finalists(self, raced: Sequence[Pair]) -> list[Pair]:
        """The fastest up to the spec's number, as many thrifty as good, and each family's best."""
        asked = self._spec.measure.finalists
        ordered = sorted(raced, key=_order)
        chosen = ordered[:asked]
        alive = [pair for pair in ordered[asked:] if pair[1].race.get("survived")]
        good = [pair for pair in alive if _time(pair[1]) <= _UNDECIDED * _time(ordered[0][1])]
        chosen += sorted(good, key=lambda pair: thrift(pair[1]))[:asked]
        for _, family in itertools.groupby(
            sorted(ordered, key=lambda pair: pair[0].kernel.name),
            key=lambda pair: pair[0].kernel.name,
        ):
            best = sorted(family, key=_order)[:_FINALISTS_PER_FAMILY]
            chosen += [pair for pair in best if pair not in chosen]
        return chosen

    # -- the finals -------------------------------------------------------------------------

    def _rounds(self, entries: dict[str, Trial]) -> list[Trial]:
        """The measured row of each entry that got through; one that fails becomes its row."""
        if not entries:
            return []
        settings = self._spec.measure
        samples: dict[str, dict[str, list[float]]] = {name: {} for name in entries}

        def lose(name: str, error: WorkerError) -> None:
            self._lose(entries.pop(name), error, name)

        turns = Turns(self._worker, seed=settings.rounds + self._spec.search.seed, lose=lose)
        # Warm ones first: how long a call takes decides how it is timed cold and eager.
        fewer = max(3, settings.rounds // 3)
        kinds = [("warm", fewer), ("cold", fewer), ("eager", 1), ("stages", 3)]
        kinds = [
            (kind, settings.rounds if kind == settings.rank_by else rounds)
            for kind, rounds in kinds
            if getattr(settings, kind, True)
        ]
        total, done = sum(rounds for _, rounds in kinds), 0
        ranked: list[Round] = []
        for kind, rounds in kinds:
            names = [name for name in entries if kind != "stages" or _stages(entries[name])]
            scratch: dict[tuple[str, str], float] = {}
            replay = self._replay(kind, entries, scratch)
            if kind == "warm":
                turns.warm_up(names, replay)
            else:
                turns.round(names, replay)  # captures the graphs, and does not count
            taken = 0
            while taken < rounds:
                names = [name for name in names if name in entries]
                if kind == settings.rank_by and taken >= _ROUNDS_OF_THE_FAR:
                    within = _FAR if taken < settings.rounds else _NEAR
                    names = _within({name: samples[name][kind] for name in names}, within)
                turn = turns.round(names, replay)
                ranked += [turn] if kind == settings.rank_by else []
                for (name, what), time_us in scratch.items():
                    if name in turn.times:
                        samples[name].setdefault(what, []).append(time_us)
                taken, done = taken + 1, done + 1
                if taken == rounds < _MOST * settings.rounds and kind == settings.rank_by:
                    ours = [samples[n][kind] for n in names if entries[n].provider == OURS]
                    if border_is_open(ours):
                        rounds, total = rounds + 1, total + 1
                self._observer.timing(done, total)
        conditions = turns.summary(ranked)
        strays = conditions.get("strays", {})
        for number, differs in list(strays.items())[:1]:
            others = f", and {len(strays) - 1} more" if len(strays) > 1 else ""
            self._observer.note(f"round {number} of {len(ranked)}: {differs}{others}")
        pace = _pace([samples[name][settings.rank_by] for name in entries])
        return [
            _measured_row(trial, settings.rank_by, samples[name], ranked, pace, conditions)
            for name, trial in entries.items()
        ]

    def _replay(
        self, kind: str, entries: Mapping[str, Trial], scratch: dict[tuple[str, str], float]
    ) -> Callable[[str], float]:
        """Times an entry once: itself, or each of its stages. scratch: the times last taken."""

        def replay(name: str) -> float:
            for what in _stages(entries[name]) if kind == "stages" else (kind,):
                call = ("eager_us", name) if what == "eager" else ("replay", name, what)
                scratch[name, what] = self._worker.call(*call)
            return scratch[name, what]

        return replay

    def _put(self, row: Trial) -> None:
        self._store.append(row)
        self._observer.tried(row)

    def _lose(self, trial: Trial, error: WorkerError, name: str | None = None) -> None:
        """A finalist that failed after it passed: its row says so, the others go on."""
        if name is not None:
            self._worker.forget(name)
        self._put(trial.with_(status=error.status, detail=f"while timing: {error.detail}"))


def _stages(trial: Trial) -> tuple[str, ...]:
    """The stages to be timed alone: none of a candidate that is one launch, or of a baseline."""
    stages = tuple(trial.resources.stages) if trial.resources else ()
    return stages if len(stages) > 1 else ()


def _time(trial: Trial) -> float:
    return trial.time_us.median if trial.time_us else math.inf


def _order(pair: Pair) -> tuple[bool, float]:
    """By time, who raced before who did not: a race may be of cold times, first times are warm."""
    return not pair[1].race, _time(pair[1])


def _worth_a_race(times_us: Sequence[float]) -> bool:
    """Whether the budget holds the rounds that the slowest need to be shown slower."""
    rounds = rounds_to_eliminate(math.log2(min(_REFERENCES, len(times_us)) / _ALPHA))
    calls = [max(1.0, RACE_US / us) for us in times_us]
    # A graph takes three calls and two replays to make, a round two replays.
    cost = sum(3 + 2 * (1 + rounds) * count for count in calls)
    return cost <= _BUDGET_SHARE * sum(_FULL_US / us for us in times_us)


def _race_facts(race: Race, name: str) -> dict[str, Any]:
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


def _within(rounds: Mapping[str, Sequence[float]], ratio: float) -> list[str]:
    """Whose median is within `ratio` of the least, in the rounds that they ran."""
    least = min(map(statistics.median, rounds.values()), default=0.0)
    return [name for name, times in rounds.items() if statistics.median(times) <= ratio * least]


def _pace(rounds: Sequence[Sequence[float]]) -> list[float]:
    """How slow each round was for everyone: the median of times over their own medians.

    Told by those who were in all rounds, and 1 if they are fewer than three.
    """
    count = max(map(len, rounds), default=0)
    whole = [times for times in rounds if len(times) == count]
    if len(whole) < 3:
        return [1.0] * count
    own = [statistics.median(times) for times in whole]
    return [
        statistics.median(times[n] / us for times, us in zip(whole, own, strict=True))
        for n in range(count)
    ]


def border_is_open(rounds: Sequence[Sequence[float]]) -> bool:
    """Whether more rounds may tell whether one of the candidates is as good as the best."""
    best = min(rounds, key=statistics.median, default=())
    middles = (
        statistics.median(a / b for a, b in zip(times, best, strict=True)) for times in rounds
    )
    return any(abs(middle - EQUIVALENT) < _BORDER for middle in middles)


def _measured(times: Sequence[float]) -> Measurement:
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else [*times] * 3
    return Measurement(median=statistics.median(times), low=low, high=high, samples=len(times))


def _measured_row(
    trial: Trial,
    kind: str,
    samples: Mapping[str, list[float]],
    rounds: Sequence[Round],
    pace: Sequence[float],
    conditions: Mapping[str, Any],
) -> Trial:
    """The finalist's row with its rounds, ranked by `kind`."""
    times = samples[kind]
    time = _measured(times)
    clocks = [turn.conditions.get("sm_mhz") for turn in rounds]
    # MHz are cycles a microsecond.
    # Who left early was in the first rounds.
    cycles = [us * mhz for us, mhz in zip(times, clocks, strict=False) if mhz]
    changes: dict[str, object] = {
        "time_us": time.model_copy(
            update={
                "l2": kind,
                "rounds": [round(x, 4) for x in times],
                "cycles": statistics.median(cycles) if len(cycles) == len(times) else None,
            }
        ),
        "stages_us": {
            name: statistics.median(of_stage)
            for name, of_stage in samples.items()
            if name not in _KINDS
        },
        "conditions": dict(conditions),
        **{f"{name}_us": statistics.median(samples[name]) for name in _KINDS if name in samples},
    }
    own = _measured([us / slow for us, slow in zip(times, pace, strict=False)])
    if (own.high - own.low) / own.median > _NOISY_SPREAD:
        changes["status"] = Status.NOISY
        changes["detail"] = f"quartiles of {len(times)} rounds {own.low:.2f} to {own.high:.2f} us"
    return trial.with_(**changes)
