"""Baselines in the finals: a noisy one is timed again, and what it then stands for."""

import itertools
from types import SimpleNamespace

import pytest
from fake_gpu import FakeGpu
from hypothesis import given
from hypothesis import strategies as st
from samples import PROBLEM, built, candidate, once

from attnsweep.choose.finals import Finals
from attnsweep.choose.race import race, settled_first
from attnsweep.choose.ranking import rank
from attnsweep.core.observer import Observer
from attnsweep.core.trial import OURS, Accuracy, Status, Trial
from attnsweep.specs.model import MeasureSpec, SearchSpec

ROUNDS = 15


class Card(FakeGpu):
    """Entries take `times`; a series of factors is what one entry's samples are off by, in turn."""

    def __init__(self, times, **series):
        super().__init__(times)
        self.series = {name: itertools.cycle(factors) for name, factors in series.items()}
        self.taken = dict.fromkeys(times, 0)

    def sample(self, name, kind):
        self.taken[name] += kind == "warm"
        return self.time_us(name) * next(self.series[name], 1.0) if name in self.series else (
            super().sample(name, kind)
        )  # fmt: skip


def pair(number, first_us):
    row = candidate("k", 1.0, A=number).with_(time_us=once(first_us), first_us=first_us)
    return built(str(number)), row


def baseline(name):
    return Trial(kernel=name, provider=name, config={}, problem=PROBLEM, status=Status.SKIPPED)


def finals(card, firsts, **measure):
    rows, notes = {}, []
    measure = {"finalists": 4, "rounds": ROUNDS, "cold": False, "eager": False, **measure}
    spec = SimpleNamespace(measure=MeasureSpec(**measure), search=SearchSpec())

    def put(row):
        rows[row.key] = row

    observer = Observer()
    observer.note = notes.append
    checked = [pair(number, us) for number, us in enumerate(firsts)]
    baselines = [baseline(name) for name in card.times if not name.startswith("k ")]
    raced = race(checked, spec, card, put=put, observer=observer)
    Finals(spec.measure, card, seed=0, put=put, keep=put, observer=observer).run(raced, baselines)
    by_name = {row.config.get("A", row.provider): row for row in rows.values()}
    return SimpleNamespace(rows=by_name, notes=notes)


OURS_THREE = {"k 0": 10.0, "k 1": 10.5, "k 2": 11.0}
NOISY = [1.0, 1.6, 1.1, 1.5]


# The first sample of each is that of the warm-up; then 15 rounds, and 15 more for each time again.
SERIES = {
    "quiet when timed again": ({"torch_cudnn": 12.0}, [*NOISY * 4, *[1.0] * 100], 15, ("rounds", 1.2)),
    "slow, left after five rounds, and comes back": (
        {"unfused": 90.0, "b": 12.0},
        [1.0, 1.0, 2.0, 1.1, 1.9, 1.0, *[1.0] * 100],
        5,
        ("rounds", 1.2),
    ),
    # Given up in bounds; then its fastest round counts, not its median.
    "noisy for ever": ({"torch_cudnn": 12.0}, NOISY, None, ("bound", 1.2)),
    # A series in the slow one of two modes alone would flatter us by 1.4x.
    "quiet in its slow mode": ({"torch_cudnn": 12.0}, [1.0, *[1.0, 1.4] * 8, *[1.4] * 1000], None, ("bound", 1.2)),
    # Four of five rounds look quiet, and too slow to stay: × base was then a slower baseline's.
    "slow in most of five rounds": (
        {"torch_cudnn": 11.5, "flash_attn_3": 14.0},
        [1.0, *[1.4] * 4, 1.0, *[1.0, 1.4] * 5, *[1.0, 1.4] * 30],
        None,
        ("bound", 1.15),
    ),
}


@pytest.mark.parametrize(("times", "factors", "discarded", "ratio"), SERIES.values(), ids=SERIES)
def test_a_noisy_baseline_is_timed_again_and_bounds_the_ratio_if_it_stays_noisy(times, factors, discarded, ratio):
    name, us = next(iter(times.items()))
    card = Card({**OURS_THREE, **times}, **{name: factors})
    done = finals(card, [10.0, 10.5, 11.0])
    row = done.rows[name]
    if discarded is None:
        assert row.status is Status.NOISY
        assert "quartiles of 15 rounds" in row.detail
        assert "after 45 rounds" in row.detail
        assert card.taken[name] == 1 + ROUNDS * (1 + 3)
        assert len(row.time_us.discarded) >= ROUNDS
    else:
        assert row.status is Status.OK
        assert (row.time_us.rounds, len(row.time_us.discarded)) == ([us] * ROUNDS, discarded)
        assert row.time_us.first_round == ROUNDS
        assert row.time_us.cycles == pytest.approx(us * 1980)
        assert len(done.rows[0].time_us.rounds) == 2 * ROUNDS
    assert done.notes[:1] == [f"timed again, because noisy: {name}"]
    first = rank(list(done.rows.values()), None).iloc[0]
    assert (first["ratio_of"], first["ratio_to_best_baseline"]) == (ratio[0], pytest.approx(ratio[1]))
    assert first["best_baseline"] == (name if us < 20 else "b")


def test_baselines_alone_are_all_timed_again_if_all_are_noisy():
    """As in a verdict about a callable: nobody is left whose rounds are those of before."""
    series = {"torch_cudnn": NOISY, "b": [*NOISY[1:] * 30, *[1.0] * 1000]}
    done = finals(Card({"torch_cudnn": 12.0, "b": 14.0}, **series), [])
    assert [len(done.rows[name].time_us.discarded) for name in series] == [3 * ROUNDS] * 2
    assert [done.rows[name].time_us.first_round for name in series] == [3 * ROUNDS] * 2


def test_those_near_are_timed_again_beside_one_that_left_if_all_are_noisy():
    """The far one's rounds are the first five, and no longer those of all the others."""
    series = {"torch_cudnn": [*NOISY * 4, *[1.0] * 1000], "b": [1.6, *NOISY * 4, *[1.0] * 1000]}
    done = finals(Card({"unfused": 90.0, "torch_cudnn": 12.0, "b": 12.2}, **series), [])
    assert {name: done.rows[name].time_us.first_round for name in series} == dict.fromkeys(series, ROUNDS)
    assert [done.rows[name].status for name in series] == [Status.OK] * 2
    assert len(done.rows["unfused"].time_us.rounds) == 5


def test_what_slows_all_rounds_alike_is_no_reason_to_time_a_baseline_again():
    class Capped(Card):
        def sample(self, name, kind):
            return super().sample(name, kind) * (1.3 if self.taken[name] > 8 else 1.0)

    card = Capped({**OURS_THREE, "torch_cudnn": 12.0})
    assert finals(card, [10.0, 10.5, 11.0]).rows["torch_cudnn"].time_us.discarded == []
    assert card.taken["torch_cudnn"] == 1 + ROUNDS


class Paced(Card):
    """All entries of a round take what they usually do times a factor, in turn."""

    def __init__(self, times, paces):
        super().__init__(times)
        self.paces, self.round = paces, 0

    def conditions(self):
        self.round += 1
        return super().conditions()

    def sample(self, name, kind):
        return super().sample(name, kind) * self.paces[self.round % len(self.paces)]


OTHERS = st.dictionaries(st.sampled_from(["torch_cudnn", "unfused", "b", "c"]), st.floats(8, 90), min_size=1)
FACTORS = st.lists(st.sampled_from([1.0, 1.1, 1.3, 1.6, 0.8, 2.5]), min_size=1, max_size=40)


@given(OTHERS, FACTORS)
def test_what_all_rounds_share_makes_no_entry_noisy(others, paces):
    done = finals(Paced({**OURS_THREE, **others}, paces), [10.0, 10.5, 11.0])
    assert {name: (row.status, row.time_us.discarded) for name, row in done.rows.items()} == dict.fromkeys(
        [0, 1, 2, *others], (Status.OK, [])
    )


def test_what_the_first_rounds_share_makes_no_entry_noisy_that_leaves_one_alone():
    """The pace was that of the fastest alone, which is none: candidates without a sound row."""
    card = Paced({"k 0": 16.0, "k 1": 22.0, "torch_math": 10.0, "cudnn": 90.0}, [1.0, 1.4, 1.3])
    done = finals(card, [16.0, 22.0])
    assert {name: len(row.time_us.rounds) for name, row in done.rows.items()} == {
        0: 5,
        1: 5,
        "cudnn": 5,
        "torch_math": ROUNDS,
    }
    assert [done.rows[name].status for name in (0, 1, "cudnn")] == [Status.OK] * 3
    assert rank(list(done.rows.values()), None).query("winner")["config"].tolist() == ["A=0"]


@given(OTHERS, st.lists(FACTORS, min_size=4, max_size=4), st.sampled_from([OURS_THREE, {"k 0": 10.0}, {}]))
def test_whatever_noise_entries_have_each_has_a_row(others, noise, ours):
    done = finals(Card({**ours, **others}, **dict(zip(others, noise, strict=False))), [*ours.values()])
    assert done.rows.keys() == {*range(len(ours)), *others}
    assert all(row.status in (Status.OK, Status.NOISY) and row.time_us.rounds for row in done.rows.values())
    assert len(rank(list(done.rows.values()), None)) == len(done.rows)


def test_the_fastest_baseline_stays_in_the_rounds_however_slow_it_is():
    """Otherwise × base would rest on five rounds."""
    card = Card({**OURS_THREE, "unfused": 40.0, "torch_math": 90.0, "flash_attn_3_fp8": 20.0})
    done = finals(card, [10.0, 10.5, 11.0])
    taken = {name: len(done.rows[name].time_us.rounds) for name in ("unfused", "torch_math")}
    assert taken == {"unfused": ROUNDS, "torch_math": 5}
    assert len(done.rows["flash_attn_3_fp8"].time_us.rounds) == 5


def test_the_fastest_baseline_stays_in_the_rounds_though_its_error_is_over_the_limit():
    class Wrong(Card):
        def add_baseline(self, name):
            right = super().add_baseline(name)
            return (Accuracy(rel_err=0.2, limit=0.1), None) if name == "cudnn" else right

    card = Wrong({**OURS_THREE, "unfused": 40.0, "torch_math": 90.0, "cudnn": 20.0})
    rows = finals(card, [10.0, 10.5, 11.0]).rows
    assert len(rows["cudnn"].time_us.rounds) == ROUNDS
    assert len(rows["unfused"].time_us.rounds) == 5


def test_a_noisy_candidate_is_not_timed_again():
    card = Card({**OURS_THREE, "torch_cudnn": 12.0}, **{"k 2": NOISY})
    done = finals(card, [10.0, 10.5, 11.0])
    assert done.rows[2].status is Status.NOISY
    assert done.notes == []


# -- first times ----------------------------------------------------------------------------


def test_a_first_time_that_the_rounds_contradict_is_replaced_and_said():
    card = Card({"k 0": 3.17, "k 1": 3.2, "k 2": 3.3})
    done = finals(card, [3296.0, 3.2, 3.3])
    assert (done.rows[0].first_us, done.rows[0].first_us_before) == (3.17, 3296.0)
    assert (done.rows[1].first_us, done.rows[1].first_us_before) == (3.2, None)


def test_a_race_replaces_it_too():
    card = Card({f"k {n}": 30.0 + n / 10 for n in range(20)})
    done = finals(card, [*(30.0 + n / 10 for n in range(19)), 14.0 * 1.9])
    raced = done.rows[19]
    assert raced.provider == OURS
    assert raced.first_us_before is None  # 26.6 for 31.9 is noise, not a mistake
    assert settled_first(raced.with_(first_us=15.0), 31.9) == {"first_us": 31.9, "first_us_before": 15.0}
    assert settled_first(raced.with_(first_us=None), 31.9) == {}
