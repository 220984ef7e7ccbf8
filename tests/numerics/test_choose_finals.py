"""The race and the finals on a simulated card: who gets through, at what cost, with what error."""

import math
import random
from types import SimpleNamespace

import pytest
from fake_gpu import FakeGpu
from samples import built, once

from attnsweep.bench.gpu import WorkerError
from attnsweep.choose import finals
from attnsweep.choose.finals import Finals, shared_pace
from attnsweep.choose.race import RACE_US, behind_best, in_order, race
from attnsweep.choose.ranking import rank
from attnsweep.core.observer import Observer
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy, Measurement, Status, Trial
from attnsweep.specs.model import MeasureSpec, SearchSpec

PROBLEM = Problem(1, 16, 16, 1024, 1024, 64)


class Card(FakeGpu):
    """A GPU with a drifting clock, noise and outliers; replays as bench.Bench does.

    rank_by: the kind of sample that a race must ask for. launched: calls that races launched.
    """

    def __init__(self, times, seed, noise=0.004, faults=(), rank_by="warm"):
        super().__init__(times)
        self.noise = noise
        self.faults = {fault: WorkerError(Status.TIMEOUT, "hung") for fault in faults}
        self.random = random.Random(seed)
        self.drift = 0.0
        self.held, self.graphs, self.launched = set(), set(), 0
        self.rank_by, self.shift = rank_by, {"warm": 1.0, "cold": 1.5, "eager": 0.1}

    def sample(self, name, kind):
        self.drift = 0.99 * self.drift + self.random.gauss(0, 0.002)
        outlier = 1.3 if self.random.random() < 0.01 else 1.0
        noise = math.exp(self.drift + self.random.gauss(0, self.noise))
        return self.times[name] * noise * outlier * self.shift[kind]

    def add(self, name, candidate, *, cold):
        super().add(name, candidate, cold=cold)
        self.held.add(name)

    def drop(self, name):
        super().drop(name)
        self.held.discard(name)

    def race(self, name, replay_us, kind):
        time_us, _ = super().race(name, replay_us, kind)
        assert name in self.held
        assert (replay_us, kind) == (RACE_US, self.rank_by)
        calls = max(1, round(RACE_US / self.times[name]))
        launched = 2 * calls + (0 if name in self.graphs else 3 + 2 * calls)
        self.graphs.add(name)
        self.launched += launched
        return time_us, launched


class Rows:
    """The part of a store that rounds need."""

    def __init__(self):
        self.rows = {}

    def append(self, row):
        self.rows[row.key] = row


def run_finals(spec, card, store, notes, checked):
    """A race and the finals, as a sweep runs them."""
    raced = race(checked, spec, card, put=store.append, observer=notes)
    finals = Finals(spec.measure, card, seed=0, put=store.append, keep=store.append, observer=notes)
    return finals.run(raced, [])


class Notes(Observer):
    def __init__(self):
        self.notes = []

        self.counted = []

    def note(self, text):
        self.notes.append(text)

    def timing(self, done, total):
        self.counted.append((done, total))


def pair(name, first_us):
    trial = Trial(
        kernel="k",
        provider="attnsweep",
        config={"A": int(name)},
        problem=PROBLEM,
        status=Status.OK,
        accuracy=Accuracy(rel_err=0.0, limit=1.0),
        time_us=once(first_us),
    )
    return built(name), trial


def spec_of(seed=0, **measure):
    measure = {"finalists": 4, "rounds": 15, **measure}
    return SimpleNamespace(measure=MeasureSpec(**measure), search=SearchSpec(seed=seed))


def sweep(medians, seed=0, finalists=4, rank_by="warm", first_noise=0.02, **card):
    card |= {"rank_by": "cold" if rank_by == "cold" else "warm"}
    card = Card({f"k {n}": us for n, us in enumerate(medians)}, seed, **card)
    # First times: one after another, minutes apart.
    first = random.Random(seed + 1000)
    checked = [pair(str(n), us * math.exp(first.gauss(0, first_noise))) for n, us in enumerate(medians)]
    spec = spec_of(seed, finalists=finalists, rank_by=rank_by)
    store, notes = Rows(), Notes()
    timed = run_finals(spec, card, store, notes, checked)
    return SimpleNamespace(
        card=card,
        finals=[int(build.config.label) for build, _ in timed],
        rows={row.config["A"]: row for row in store.rows.values()},
        notes=notes.notes,
        timing=notes.counted,
    )


def spread(count, step=0.01):
    return [30.0 * (1 + step * n) for n in range(count)]


def test_the_far_and_slow_take_part_in_the_first_rounds_alone():
    done = sweep([30.0, 30.4, 40.0, 90.0], finalists=4)
    taken = [len(done.rows[number].time_us.rounds) for number in range(4)]
    assert taken[3] == 5
    assert 15 <= taken[2] <= taken[1] == taken[0]
    assert done.rows[3].warm_us == pytest.approx(90, rel=0.05)


def test_what_slows_all_rounds_alike_makes_nobody_noisy():
    steps = [1.0] * 8 + [1.3] * 7
    one, other, far = ([us * step for step in steps] for us in (10.0, 11.0, 12.0))
    assert shared_pace([one, other, far, [90.0] * 5]) == pytest.approx(steps)
    noisy = [12.0 * (1.5 if n % 2 else 1.0) for n in range(15)]
    # Two tell what both share, and not who of them is noisy; one tells nothing.
    assert shared_pace([one, other]) == pytest.approx(steps)
    assert shared_pace([[10.0] * 15, noisy]) == [1.0] * 15
    assert shared_pace([one, [10.0] * 5]) == [1.0] * 15
    assert shared_pace([one, other, far, noisy]) == pytest.approx(steps, rel=0.2)


def test_the_race_leaves_few_and_the_best_among_them():
    done = sweep(spread(20, 0.005))
    assert 0 in done.finals
    assert 4 <= len(done.finals) <= 8
    assert len({len(done.rows[number].time_us.rounds) for number in done.finals}) == 1
    for number in done.finals:
        assert 15 <= len(done.rows[number].time_us.rounds) <= 45
        assert done.rows[number].time_us.cycles == pytest.approx(done.rows[number].time_us.median * 1980, rel=1e-4)
    out = done.rows[19]
    assert out.status is Status.OK
    assert not out.race["survived"]
    assert out.race["ratio"][0] > 1
    assert out.race["against"].startswith("k ")
    assert out.time_us.rounds == []
    assert out.time_us.samples == out.race["rounds"] > 5


def test_few_candidates_are_all_finalists_without_a_race():
    done = sweep(spread(4))
    assert sorted(done.finals) == [0, 1, 2, 3]
    assert done.card.launched == 0
    assert not any(row.race for row in done.rows.values())


def test_who_is_far_behind_at_first_does_not_race():
    done = sweep([*spread(10, 0.001), 60.0])
    assert 10 not in done.rows  # its row stays what it was
    assert done.rows[0].race["entrants"] == 10


def test_of_many_alike_the_fastest_and_as_many_thrifty_reach_the_finals():
    assert len(sweep([30.0] * 7).finals) == 7
    done = sweep([30.0] * 40)
    assert len(done.finals) == 8
    # Without resources the first configs are the thriftiest.
    assert len({0, 1, 2, 3} & set(done.finals)) >= 3
    assert sum(row.race["survived"] for row in done.rows.values()) >= 38


def test_who_fails_in_the_race_costs_its_own_row():
    done = sweep(spread(20), faults=[("race", "k 0"), ("add", "k 1"), ("drop", "k 5")])
    for number in (0, 1):
        assert done.rows[number].status is Status.TIMEOUT
        assert done.rows[number].detail == "while timing: hung"
    assert 2 in done.finals
    assert not {0, 1} & set(done.finals)
    assert any("k 5 was not freed" in note for note in done.notes)


def test_nothing_of_an_earlier_race_is_believed():
    card = Card({"k 0": 30.0}, 0)
    build, trial = pair("0", 30.0)
    stale = trial.with_(race={"survived": True})
    store = Rows()
    run_finals(spec_of(cold=False), card, store, Notes(), [(build, stale)])
    (row,) = store.rows.values()
    assert row.race == {}


def test_a_finalist_that_fails_keeps_its_failure_whatever_an_earlier_run_left():
    card = Card({"k 0": 30.0, "k 1": 31.0}, 0, faults=[("add", "k 0")])
    earlier = Measurement(median=30.0, low=30.0, high=30.0, samples=2, rounds=[30.0, 30.0])
    checked = [pair("0", 30.0), pair("1", 31.0)]
    checked[0] = (checked[0][0], checked[0][1].with_(time_us=earlier))
    store = Rows()
    run_finals(spec_of(), card, store, Notes(), checked)
    statuses = {row.config["A"]: row.status for row in store.rows.values()}
    assert statuses == {0: Status.TIMEOUT, 1: Status.OK}


def test_a_finalist_that_fails_in_the_last_round_has_no_say_in_further_ones():
    class Late(Card):
        def replay(self, name, kind):
            if self.calls.count(("replay", "k 2")) == 15:  # one in warm-up, one a round before
                self.faults["replay", "k 2"] = WorkerError(Status.TIMEOUT, "hung")
            return super().replay(name, kind)

    card = Late({"k 0": 30.0, "k 1": 30.12, "k 2": 40.0}, 0, noise=0.0)
    store = Rows()
    run_finals(spec_of(), card, store, Notes(), [pair(str(n), 30.0) for n in range(3)])
    rows = {row.config["A"]: row for row in store.rows.values()}
    assert rows[2].status is Status.TIMEOUT
    assert [len(rows[n].time_us.rounds) for n in (0, 1)] == [45, 45]


class Confirming(Card):
    """Notes for how long each finalist is to be confirmed, and after which replays."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.longest_us = {}

    def confirm(self, name, longest_us):
        self.longest_us[name] = longest_us
        return super().confirm(name, longest_us)


def test_the_best_is_in_the_finals_as_often_as_it_says():
    """One best, many near it: it is lost in at most 5 % of races."""
    runs = 60
    lost = sum(0 not in sweep([30.0, *[30.15] * 5, *spread(18)[1:]], seed).finals for seed in range(runs))
    assert lost <= 0.05 * runs


def test_a_rerun_picks_the_same_winner_and_its_set_holds_the_best():
    """Two alike in time, one thriftier: the same one wins; the ties of the first rank hold both."""
    medians = [30.0, 30.0, *[30.9 + 0.1 * n for n in range(10)]]
    winners, held = [], 0
    for seed in range(30):
        done = sweep(medians, seed)
        ranking = rank(list(done.rows.values()), None)
        first = {row.config["A"] for row in ranking.loc[ranking["rank"] == 1, "trial"]}
        held += bool({0, 1} & first)
        (winner,) = ranking.loc[ranking["winner"], "trial"]
        winners.append(winner.config["A"])
    assert held == 30
    assert winners.count(0) >= 28
    assert set(winners) <= {0, 1}


def test_rounds_go_on_while_the_border_is_open():
    base = [30.0, 30.1, 29.9]
    assert finals.border_is_open([base, [1.0039 * us for us in base]])
    assert not finals.border_is_open([base, [1.001 * us for us in base]])
    assert not finals.border_is_open([base, [1.009 * us for us in base], base])
    assert not finals.border_is_open([])
    done = sweep([30.0, 30.12, 40.0], noise=0.0)
    assert len(done.rows[0].time_us.rounds) == 45


@pytest.mark.parametrize("kind", ["warm", "cold", "eager"])
def test_the_spec_says_what_is_ranked_and_the_others_are_there(kind):
    done = sweep(spread(15), rank_by=kind)
    best = done.rows[0]
    factor = {"warm": 1.0, "cold": 1.5, "eager": 0.1}
    assert best.time_us.l2 == kind
    assert len(best.time_us.rounds) >= 15
    assert best.time_us.median == pytest.approx(30 * factor[kind], rel=0.05)
    for name in factor:
        assert getattr(best, f"{name}_us") == pytest.approx(30 * factor[name], rel=0.05)
    raced_out = done.rows[10]
    assert raced_out.time_us.l2 == ("cold" if kind == "cold" else "warm")
    ranking = rank(list(done.rows.values()), None)
    assert list(ranking["timed_as"][:4]) == [kind] * 4
    assert ranking.loc[ranking["winner"], "time_us"].item() == best.time_us.median


def test_entry_looks_at_times_and_at_cycles_and_takes_the_nearer():
    fast, slow = (pair(str(n), us)[1] for n, us in enumerate((30.0, 39.0)))
    assert behind_best([fast, slow]) == [1.0, 1.3]
    assert behind_best([]) == []
    # The second was timed at 1395 MHz, under a power cap: it takes fewer cycles than the first.
    fast = fast.with_(first_us=30.0, first_mhz=1980.0)
    slow = slow.with_(first_us=39.0, first_mhz=1395.0)
    assert behind_best([fast, slow]) == [1.0, 1.0]
    assert behind_best([fast, slow.with_(first_mhz=None)]) == [1.0, 1.3]
    # The clock read beside the second is one of another moment: it is as fast as the first.
    late = pair("1", 30.3)[1].with_(first_us=30.3, first_mhz=1980.0)
    assert behind_best([fast.with_(first_mhz=1380.0), late]) == pytest.approx([1.0, 1.01])


def test_a_slow_clock_at_its_first_time_keeps_no_candidate_out_of_the_race():
    medians = [30.0, *spread(19, 0.01)[1:]]
    card = Card({f"k {n}": us for n, us in enumerate(medians)}, 0)
    checked = []
    for n, us in enumerate(medians):
        mhz = 1395.0 if n == 0 else 1980.0
        build, trial = pair(str(n), us * 1980 / mhz)
        checked.append((build, trial.with_(first_us=us * 1980 / mhz, first_mhz=mhz)))
    store = Rows()
    run_finals(spec_of(), card, store, Notes(), checked)
    rows = {row.config["A"]: row for row in store.rows.values()}
    assert rows[0].race["survived"]


class Slowing(Card):
    """A card whose calls take 1.3 times as long after some looks at its state in race or finals."""

    def __init__(self, *args, after, **options):
        super().__init__(*args, **options)
        self.phase, self.after, self.looks = "race", after, {"race": 0, "finals": 0}

    def sample(self, name, kind):
        slow = 1.3 if self.looks[self.phase] > self.after.get(self.phase, math.inf) else 1.0
        return super().sample(name, kind) * slow

    def replay(self, name, kind):
        self.phase = "finals"
        return super().replay(name, kind)

    def conditions(self):
        self.looks[self.phase] += 1
        return {}


def test_who_left_a_race_before_the_card_became_slow_is_no_faster_by_it():
    medians = [30.0, 30.09, 30.18, *(30.0 * (1 + 0.02 * n) for n in range(1, 10))]
    after = {"race": 14}
    card = Slowing({f"k {n}": us for n, us in enumerate(medians)}, 0, noise=0.004, after=after)
    checked = [pair(str(n), us) for n, us in enumerate(medians)]
    spec = spec_of(finalists=2)
    raced = race(checked, spec, card, put=lambda row: None, observer=Notes())
    times = [trial.time_us.median for _, trial in raced]
    rounds = {trial.race["rounds"] for _, trial in raced}
    assert min(rounds) <= 12
    assert max(rounds) >= 25  # half of them on a slow card
    assert [us / times[0] for us in times] == pytest.approx([us / 30 for us in medians], rel=0.02)
    assert [int(build.config.label) for build, _ in in_order(raced)][3:] == list(range(3, 12))


def test_two_that_go_on_while_the_card_becomes_slow_are_not_noisy():
    card = Slowing({f"k {n}": us for n, us in enumerate((30.0, 30.12, 33.0, 34.0))}, 0, noise=0.0,
                   after={"finals": 20})  # fmt: skip
    card.random = SimpleNamespace(gauss=lambda *_: 0.0, random=lambda: 0.5)
    store = Rows()
    run_finals(spec_of(), card, store, Notes(), [pair(str(n), 30.0) for n in range(4)])
    rows = {row.config["A"]: row for row in store.rows.values()}
    assert [len(rows[n].time_us.rounds) for n in range(4)] == [45, 45, 15, 15]
    assert max(rows[0].time_us.rounds) > 1.25 * min(rows[0].time_us.rounds)
    assert [rows[n].status for n in range(4)] == [Status.OK] * 4
    ranking = rank(list(rows.values()), None)
    assert [trial.config["A"] for trial in ranking["trial"]] == [0, 1, 2, 3]


def test_who_wins_is_confirmed_for_longest_though_the_card_became_slow():
    class Card(Slowing, Confirming):
        pass

    card = Card({f"k {n}": us for n, us in enumerate((30.0, 30.12, 33.0, 34.0))}, 0, noise=0.0,
                after={"finals": 20})  # fmt: skip
    card.random = SimpleNamespace(gauss=lambda *_: 0.0, random=lambda: 0.5)
    run_finals(spec_of(), card, Rows(), Notes(), [pair(str(n), 30.0) for n in range(4)])
    assert card.longest_us == {"k 0": 2e5, "k 1": 2e3, "k 2": 2e3, "k 3": 2e3}


def test_few_that_are_near_by_their_cycles_are_finalists_before_those_that_are_far():
    # No race: one of two that are near was timed on a slow card, and three that are far were not.
    first = [(30.0, 1980.0), (42.0, 1395.0), (39.0, 1980.0), (40.0, 1980.0), (41.0, 1980.0)]
    checked = []
    for number, (us, mhz) in enumerate(first):
        build, trial = pair(str(number), us)
        checked.append((build, trial.with_(first_us=us, first_mhz=mhz)))
    chosen = finals.finalists_of(checked, 3)
    assert [int(build.config.label) for build, _ in chosen] == [0, 1, 2]


def test_entry_compares_first_times_whatever_an_earlier_run_ranked():
    # Two rows are kept with eager times of 3 us, and one with those of a race on a hot card.
    kept = [pair(str(n), 3.0)[1].with_(first_us=30.0) for n in (0, 1)]
    hot = pair("2", 40.0)[1].with_(first_us=30.3)
    assert behind_best([*kept, hot, pair("3", 30.6)[1]]) == pytest.approx([1, 1, 1.01, 1.02])
