"""The finals: the best candidates and all baselines take turns in full rounds.

A race or first times chose the finalists. The finals time them again, so that earlier luck gains
nothing, and replace their rows.

After the finals' rounds, our entries are checked again: the one that wins for longest.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnsweep.bench.gpu import Gpu, WorkerError
from attnsweep.choose import energy
from attnsweep.choose.baseline_ratio import below_ranking, may_be_base
from attnsweep.choose.pace import pace_of, time_of
from attnsweep.choose.race import Pair, first_of, in_order, label_of, settled_first
from attnsweep.choose.ranking import EQUIVALENT, middle_ratio, thrift, winner_of
from attnsweep.choose.rounds import Replay, Round, Rounds, affordable, measured, prepared, together
from attnsweep.choose.stats import ratio_interval
from attnsweep.core.callables import CALLABLE
from attnsweep.core.long_problems import is_long
from attnsweep.core.observer import Observer
from attnsweep.core.trial import OURS, Accuracy, Measurement, Status, Trial
from attnsweep.device.energy import Stretch
from attnsweep.specs.model import MeasureSpec

# At least this many of each family enter the finals, so that each family's best is measured well.
_FINALISTS_PER_FAMILY = 2
# If a race ends undecided, the thriftiest within this of the leader become finalists too. Luck in
# the race then does not decide which of the equally good candidates wins.
_UNDECIDED = 1.01
# Interquartile range over median above which a time is noisy, after removing the pace that all
# entries share: at its power cap an H200 ran whole rounds 20 % slower than others.
_NOISY_SPREAD = 0.15
# At most this multiple of the spec's rounds is taken, while a finalist is within _BORDER of the
# border between as good as the best and not: its side may decide the winner.
_MOST = 3
_BORDER = 0.0015
# Rounds continue until the would-be winner is shown to be at most this much slower than the best,
# or until this many rounds or this much time is spent: long calls at the power cap need hundreds.
REGRET = 1.005
_MOST_ROUNDS = 400
_UNDECIDED_US = 30e6
_KINDS = ("warm", "cold", "eager", "chained")
# After _ROUNDS_OF_THE_FAR rounds of the kind that ranks, an entry slower than the fastest by this
# factor is known well enough. Most such entries are slow baselines, whose call may take as long as
# those of all finalists.
_FAR = 1.5
_ROUNDS_OF_THE_FAR = 5
# The same where calls are long and one round tells: each further round of (4,32,131072,128) causal
# took 6 s, half of them for baselines that were 1.3 times as slow and more.
_FAR_OF_LONG = 1.25
# Only entries within this of the fastest take part in further rounds, and those not shown slower;
# beyond _MOST times as many, only the latter.
_NEAR = 1.02
# A noisy baseline is timed again, at most this often, in as many rounds as the spec asks for,
# beside the best entries: at least _COMPANY, because two cannot tell who of them is noisy.
_TIMES_AGAIN = 3
_COMPANY = 3
# Microseconds of calls one by one, of the winner and of every other candidate. The winner's call of
# 10 µs is then made 7,000 times, which shows a race of one call in a thousand with 99.9 %.
_WINNER_US = 200_000.0
_OTHERS_US = 2_000.0


@dataclass
class _Entry:
    """A finalist or a baseline, and what the rounds say of it.

    chains: whether its calls can be chained. samples: kind of time (warm, cold, eager, chained), or
    stage, to one time a round. first, discarded, least: of a baseline that was timed again: the
    position of its first round now, its earlier rounds, and the least lower quartile of a series
    that was too noisy, in µs at the usual pace.
    """

    trial: Trial
    chains: bool = False
    samples: dict[str, list[float]] = field(default_factory=dict)
    first: int = 0
    discarded: list[float] = field(default_factory=list)
    least: float = math.inf

    @property
    def ours(self) -> bool:
        return self.trial.provider == OURS

    @property
    def judged(self) -> bool:
        """Whether the limits decide if it is right: a candidate, or a callable of the user's."""
        return self.ours or CALLABLE.fullmatch(self.trial.provider) is not None

    @property
    def may_be_base(self) -> bool:
        return may_be_base(self.trial)

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages to be timed alone: none for a call of one launch, or for a baseline."""
        every = self.trial.resources.stages if self.trial.resources else ()
        stages = tuple(name for name in every if name not in self.trial.once_us)
        return stages if len(stages) > 1 else ()

    def has(self, kind: str) -> bool:
        """Whether it has times of this kind."""
        return bool(self.stages) if kind == "stages" else kind != "chained" or self.chains

    def at_pace(self, kind: str, pace: Sequence[float]) -> Measurement:
        """Its median and quartiles without the pace that all entries share."""
        own = zip(self.samples[kind], pace[self.first :], strict=False)
        return measured([us / slow for us, slow in own])

    def scatter(self, kind: str, pace: Sequence[float]) -> Measurement | None:
        """Its quartiles if it is noisy; None if it is not.

        A quiet series that is much slower than an earlier one was at its fastest is no better.
        """
        own = self.at_pace(kind, pace)
        wide = (own.high - own.low) / own.median > _NOISY_SPREAD
        return own if wide or own.median > (1 + _NOISY_SPREAD) * self.least else None

    def begin_again(self, kind: str, taken: int, pace: Sequence[float]) -> None:
        """Discard the entry's rounds so far; its next series begins after round `taken`."""
        self.least = min(self.least, self.at_pace(kind, pace).low)
        self.discarded += self.samples[kind]
        self.samples[kind].clear()
        self.first = taken

    def row(
        self,
        kind: str,
        rounds: Sequence[Round],
        pace: Sequence[float],
        conditions: Mapping[str, Any],
    ) -> Trial:
        """Its row with its rounds, ranked by `kind`."""
        times = self.samples[kind]
        # MHz are cycles a microsecond. An entry that left early was in the first rounds.
        clocks = [this.conditions.get("sm_mhz") for this in rounds[self.first :]]
        cycles = [us * mhz for us, mhz in zip(times, clocks, strict=False) if mhz]
        ranked = {
            "l2": kind,
            "rounds": [round(x, 4) for x in times],
            "cycles": statistics.median(cycles) if len(cycles) == len(times) else None,
            "first_round": self.first,
            "discarded": [round(x, 4) for x in self.discarded],
        }
        medians = {what: statistics.median(each) for what, each in self.samples.items()}
        changes: dict[str, object] = {
            "time_us": measured(times).model_copy(update=ranked),
            "stages_us": {name: us for name, us in medians.items() if name not in _KINDS},
            "conditions": dict(conditions),
            **{f"{name}_us": medians[name] for name in _KINDS if name in medians},
        }
        if (own := self.scatter(kind, pace)) is not None:
            detail = f"quartiles of {len(times)} rounds {own.low:.2f} to {own.high:.2f} us"
            if self.discarded:
                before = f"{len(self.discarded)} rounds with a quartile of {self.least:.2f}"
                detail += f", after {before}"
            changes |= {"status": Status.NOISY, "detail": detail}
        if self.ours and "warm" in medians:
            changes |= settled_first(self.trial, medians["warm"])
        return self.trial.with_(**changes)


class Finals:
    """One problem's finals on the GPU."""

    def __init__(
        self,
        measure: MeasureSpec,
        gpu: Gpu,
        *,
        seed: int,
        put: Callable[[Trial], None],
        keep: Callable[[Trial], None],
        observer: Observer,
    ) -> None:
        """seed: of the order of turns. put: stores and shows a row that changed.

        keep: stores one without showing it.
        """
        self._measure, self._seed = measure, measure.rounds + seed
        self._kind = measure.timed_by
        self._gpu, self._put, self._keep, self._observer = gpu, put, keep, observer
        self._entries: dict[str, _Entry] = {}
        self._undecided_us = 0.0

    def run(self, raced: Sequence[Pair], baselines: Sequence[Trial]) -> list[Pair]:
        """Time the best of `raced` and all baselines in turns; returns the finalists among `raced`.

        baselines: a row for each baseline, with the status for a baseline that cannot run.
        """
        chosen = finalists_of(raced, self._measure.finalists)
        finalists = []
        with prepared("finalists", self._gpu, self._observer):
            for build, trial in chosen:
                name = label_of(build)
                try:
                    chains = self._gpu.add(name, build.candidate(), cold=True)
                except WorkerError as error:
                    self._fail(name, trial, error)
                else:
                    self._entries[name] = _Entry(trial, chains)
                    finalists.append((build, trial))
        for done, row in enumerate(baselines):
            name = row.provider
            self._observer.preparing(name, done, len(baselines))
            try:
                with prepared(name, self._gpu, self._observer):
                    accuracy, issued = self._gpu.add_baseline(name)
                facts = {"status": Status.OK, "accuracy": accuracy, "issued": issued}
                self._entries[name] = _Entry(row.with_(**facts))
            except WorkerError as error:
                failed = {"status": error.status, "detail": error.detail}
                self._put(row.with_(**failed, accuracy=error.payload))
        asked = {trial.key for _, trial in chosen}
        for _, trial in raced:  # rounds of an earlier run do not pair with today's
            if trial.time_us and trial.time_us.rounds and trial.key not in asked:
                alone = trial.time_us.model_copy(update={"rounds": []})
                self._keep(trial.with_(time_us=alone))
        for trial in together(self._timed()):
            self._put(trial)
        return finalists

    def _timed(self) -> list[Trial]:
        """The measured row of each entry; that of one that fails is stored at once instead."""
        if not self._entries:
            return []
        settings = self._measure
        rounds = Rounds(self._gpu, seed=self._seed, fail=self._lose)
        # Warm rounds come first: the time of a call decides how it is timed cold and eager.
        fewer = max(3, settings.rounds // 3)
        asked = {"warm": fewer, "cold": fewer, "eager": 1, "stages": 3}
        asked |= {"chained": 3} if any(entry.chains for entry in self._entries.values()) else {}
        asked |= {self._kind: settings.rounds}
        kinds = {kind: n for kind, n in asked.items() if getattr(settings, kind, True)}
        if self._long:
            kinds = {self._kind: self._affordable()}
        ranked: list[Round] = []
        done = 0
        for kind in kinds:
            for this in self._rounds_of(kind, kinds, rounds):
                ranked += [this] if kind == self._kind else []
                done += 1
                self._observer.timing(done, sum(kinds.values()))
        energies = self._energies()
        conditions = rounds.summary(ranked)
        self._note(conditions.get("strays", {}), len(ranked))

        def rows() -> dict[str, Trial]:
            pace, by_energy = self._pace(), settings.rank_by == "energy"
            return {
                name: entry.row(self._kind, ranked, pace, conditions).with_(
                    **energy.fields(energies, name, ranks=by_energy)
                )
                for name, entry in self._entries.items()
            }

        self._confirm(rows)
        return [*rows().values()]

    @property
    def _long(self) -> bool:
        return any(is_long(entry.trial.problem) for entry in self._entries.values())

    def _affordable(self) -> int:
        ours = [first_of(entry.trial) for entry in self._entries.values() if entry.ours]
        return affordable(ours, len(self._entries) - len(ours), self._measure.rounds)

    def _energies(self) -> dict[str, list[Stretch]]:
        """Stretches of each entry, if the spec asks for them."""
        if not self._measure.energy:
            return {}
        found = energy.stretches(
            self._gpu,
            [*self._entries],
            ranks=self._measure.rank_by == "energy",
            seed=self._seed,
            fail=self._lose,
        )
        if self._entries and not found:
            self._observer.note("no energies: NVML's counter is missing, or stands still")
        return found

    def _rounds_of(self, kind: str, wanted: dict[str, int], rounds: Rounds) -> Iterator[Round]:
        """Rounds of one kind of time. An open border adds to the number that is `wanted` of it."""
        ranks = kind == self._kind
        names = [name for name, entry in self._entries.items() if entry.has(kind)]
        last: dict[tuple[str, str], float] = {}

        def replay(name: str) -> float:
            for what in self._entries[name].stages if kind == "stages" else (kind,):
                eager = what == "eager"
                time_us = self._gpu.eager_us(name) if eager else self._gpu.replay(name, what)
                last[name, what] = time_us
            return time_us

        if self._long:
            rounds.begin()
        elif kind == "warm":
            rounds.warm_up(names, replay)
        else:
            rounds.round(names, replay)  # captures the graphs, and does not count
        of_the_far = 1 if self._long else _ROUNDS_OF_THE_FAR
        taken = 0
        while taken < wanted[kind]:
            names = [name for name in names if name in self._entries]
            if ranks and taken >= of_the_far:
                names = self._still(names, taken)
            this = rounds.round(names, replay)
            for (name, what), time_us in last.items():
                if name in this.times:
                    self._entries[name].samples.setdefault(what, []).append(time_us)
            taken += 1
            if taken == wanted[kind] and ranks and not self._long:
                wanted[kind] += self._more([n for n in this.times if self._entries[n].ours], taken)
            yield this
        if ranks:
            yield from self._again(wanted, rounds, replay)

    def _times(self, names: Iterable[str]) -> dict[str, list[float]]:
        """The rounds that rank these entries."""
        return {name: self._entries[name].samples[self._kind] for name in names}

    def _more(self, names: Sequence[str], taken: int) -> int:
        """How many rounds must follow: none if it is clear which of these are as good."""
        settings, times = self._measure, self._times(names)
        if taken < _MOST * settings.rounds and border_is_open([*times.values()]):
            return 1
        if not undecided([(self._entries[name].trial, each) for name, each in times.items()]):
            return 0
        # Each replay is preceded by an untimed one.
        each_us = 2 * sum(max(settings.replay_us, statistics.median(t)) for t in times.values())
        affordable = int((_UNDECIDED_US - self._undecided_us) / each_us)
        more = max(0, min((taken + 1) // 2, _MOST_ROUNDS - taken, affordable))
        self._undecided_us += more * each_us
        return more

    def _still(self, names: Sequence[str], taken: int) -> list[str]:
        """The entries that need more rounds, and the fastest baseline, which × base pairs with."""
        entries, times = self._entries, self._times(names)
        if taken >= self._measure.rounds:
            ours = {name: own for name, own in times.items() if entries[name].ours}
            keep = ours.keys() - shown_slower(ours)
            if taken < _MOST * self._measure.rounds:
                keep |= set(_within(times, _NEAR))
            return [name for name in names if name in keep]
        # An entry that is not ranked may be twice as fast, and does not count here.
        ranked = {n: own for n, own in times.items() if below_ranking(entries[n].trial) is None}
        least = min(map(statistics.median, (ranked or times).values()))
        far = _FAR_OF_LONG if self._long else _FAR
        keep = {name for name, own in times.items() if statistics.median(own) <= far * least}
        keep &= ranked.keys() if self._long else times.keys()
        baselines = [name for name in names if entries[name].may_be_base]
        # A noisy baseline may be slow in most of five rounds, and look quiet: its fastest one
        # counts.
        keep |= {name for name in baselines if min(times[name]) <= far * least}
        if baselines:
            keep.add(min(baselines, key=lambda name: statistics.median(times[name])))
            keep.add(min(baselines, key=lambda name: min(times[name])))
        return [name for name in names if name in keep]

    def _again(self, wanted: dict[str, int], rounds: Rounds, replay: Replay) -> Iterator[Round]:
        """More rounds with noisy baselines, beside the best entries, until they are not noisy.

        The last series of a baseline replaces its earlier rounds. Those are kept as `discarded`.
        """
        kind, entries = self._kind, self._entries
        for _ in range(0 if self._long else _TIMES_AGAIN):
            pace = self._pace()
            noisy = [n for n, e in entries.items() if not e.ours and e.scatter(kind, pace)]
            if not noisy:
                return
            times, taken = self._times(entries), len(pace)
            whole = [
                name
                for name, entry in entries.items()
                if name not in noisy and len(times[name]) + entry.first == taken
            ]
            whole.sort(key=lambda name: statistics.median(times[name]))
            near = _within({name: times[name] for name in whole}, _NEAR)
            company = list(dict.fromkeys([*whole[:_COMPANY], *near]))
            self._observer.note(f"timed again, because noisy: {', '.join(noisy)}")
            for name in noisy:
                entries[name].begin_again(kind, taken, pace)
            wanted[kind] += self._measure.rounds
            for _ in range(self._measure.rounds):
                this = rounds.round([n for n in (*company, *noisy) if n in entries], replay)
                for name, time_us in this.times.items():
                    times[name].append(time_us)
                yield this

    def _pace(self) -> list[float]:
        """The pace of all rounds so far: 1 in those that no entry has which is in the last one."""
        last = {n: e.first + len(e.samples[self._kind]) for n, e in self._entries.items()}
        whole = [self._entries[n] for n, end in last.items() if end == max(last.values())]
        first = min((entry.first for entry in whole), default=0)
        begun = [e.samples[self._kind] for e in self._entries.values() if e.first == first]
        counts = sorted(map(len, begun), reverse=True)
        # All others of one that is alone in the last rounds have left: the pace is of theirs.
        together = min(counts[:2], default=0)
        pace = shared_pace([times[:together] for times in begun if len(times) >= together])
        return [*[1.0] * first, *pace, *[1.0] * (max(counts, default=0) - together)]

    def _note(self, strays: Mapping[str, str], rounds: int) -> None:
        for number, differs in list(strays.items())[:1]:
            others = f", and {len(strays) - 1} more" if len(strays) > 1 else ""
            self._observer.note(f"round {number} of {rounds}: {differs}{others}")

    def _confirm(self, rows: Callable[[], Mapping[str, Trial]]) -> None:
        """Check each of our entries again, the winner for longest, and count the calls in its row.

        rows: the rows of the entries as they would be ranked now. If the winner is wrong, it leaves
        the entries, and the next winner is checked for as long.
        """
        at_length, briefly = set[str](), set[str]()
        entered = -1
        while len(self._entries) != entered:  # one that leaves may change who wins
            entered, now = len(self._entries), rows()
            winner = winner_of([*now.values()])
            for name, row in now.items():
                if row is winner and name not in at_length:
                    at_length.add(name)
                    longest_us = _WINNER_US
                elif self._entries[name].judged and name not in at_length | briefly:
                    briefly.add(name)
                    longest_us = _OTHERS_US
                else:
                    continue
                try:
                    calls = self._gpu.confirm(name, longest_us)
                except WorkerError as error:
                    self._lose(name, error)
                    continue
                entry = self._entries[name]
                if (accuracy := entry.trial.accuracy) is not None:
                    counted = {"calls": calls + (accuracy.calls or 0)}
                    entry.trial = entry.trial.with_(accuracy=accuracy.model_copy(update=counted))

    def _lose(self, name: str, error: WorkerError) -> None:
        """Remove an entry that failed; the others go on."""
        self._fail(name, self._entries.pop(name).trial, error)

    def _fail(self, name: str, trial: Trial, error: WorkerError) -> None:
        """Store the failure of a finalist that passed before."""
        self._gpu.forget(name)
        found = {"accuracy": error.payload} if isinstance(error.payload, Accuracy) else {}
        facts = {"status": error.status, "detail": f"while timing: {error.detail}", **found}
        self._put(trial.with_(**facts))


def finalists_of(raced: Sequence[Pair], asked: int) -> list[Pair]:
    """The fastest `asked`, up to as many thrifty ones that are as good, and each family's best."""
    ordered = in_order(raced)
    chosen = ordered[:asked]
    alive = [pair for pair in ordered[asked:] if pair[1].race.get("survived")]
    good = [pair for pair in alive if time_of(pair[1]) <= _UNDECIDED * time_of(ordered[0][1])]
    chosen += sorted(good, key=lambda pair: thrift(pair[1]))[:asked]

    def family(pair: Pair) -> str:
        return pair[0].kernel.name

    for _, members in itertools.groupby(sorted(ordered, key=family), key=family):
        best = list(members)[:_FINALISTS_PER_FAMILY]
        chosen += [pair for pair in best if pair not in chosen]
    return chosen


def _within(rounds: Mapping[str, Sequence[float]], ratio: float) -> list[str]:
    """The entries whose median is within `ratio` of the least, in the rounds that they ran."""
    least = min(map(statistics.median, rounds.values()), default=0.0)
    return [name for name, times in rounds.items() if statistics.median(times) <= ratio * least]


def shared_pace(rounds: Sequence[Sequence[float]]) -> list[float]:
    """The pace of each round (pace.pace_of), of the entries that were in all rounds.

    If only two were, it is what both share: the nearer to 1 of theirs, and 1 where one was faster
    than usual and the other slower. One alone cannot tell its own noise from the card's.
    """
    count = max(map(len, rounds), default=0)
    whole = [times for times in rounds if len(times) == count]
    if len(whole) < 2:
        return [1.0] * count
    if len(whole) == 2:
        whole = [*whole, [1.0] * count]
    return pace_of(whole)


def border_is_open(rounds: Sequence[Sequence[float]]) -> bool:
    """Whether more rounds may tell if one of the candidates is as good as the best."""
    best = min(rounds, key=statistics.median, default=())
    middles = (
        statistics.median(a / b for a, b in zip(times, best, strict=True)) for times in rounds
    )
    return any(abs(middle - EQUIVALENT) < _BORDER for middle in middles)


def shown_slower(times: Mapping[str, Sequence[float]]) -> set[str]:
    """The entries whose 95 % interval shows them more than 0.4 % slower than the fastest."""
    best = min(times.values(), key=statistics.median, default=())
    return {name for name, own in times.items() if ratio_interval(own, best)[0] > EQUIVALENT}


def undecided(timed: Sequence[tuple[Trial, Sequence[float]]]) -> bool:
    """Whether the candidate that would win now may be more than 0.5 % slower than another.

    timed: the candidates that are still timed, with their rounds; all have as many.
    """
    best = min((own for _, own in timed), key=statistics.median, default=())
    good = [pair for pair in timed if middle_ratio(pair[1], best) <= EQUIVALENT]
    if not good:
        return False
    _, winner = min(good, key=lambda pair: thrift(pair[0]))
    return any(own is not winner and ratio_interval(winner, own)[1] > REGRET for _, own in timed)
