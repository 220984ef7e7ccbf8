"""Elimination and the paired test are right as often as they say, however one looks at them."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.choose.evidence import (
    ERROR,
    Decision,
    PairedTest,
    Race,
    interval,
    log2_evidence,
    rounds_beyond,
    skipped,
)


@given(st.integers(1, 14))
def test_evidence_has_mean_one_under_the_null(rounds):
    mean = sum(
        math.comb(rounds, k) * 2.0 ** (log2_evidence(k, rounds) - rounds) for k in range(rounds + 1)
    )
    assert mean == pytest.approx(1.0)


@given(st.integers(0, 30), st.integers(0, 30))
def test_evidence_is_a_martingale_under_the_null(slower, faster):
    n = slower + faster
    next_ = (2 ** log2_evidence(slower + 1, n + 1) + 2 ** log2_evidence(slower, n + 1)) / 2
    assert next_ == pytest.approx(2 ** log2_evidence(slower, n))


@given(st.integers(1, 60))
def test_evidence_grows_with_slower_rounds(rounds):
    values = [log2_evidence(k, rounds) for k in range(rounds + 1)]
    assert all(a < b for a, b in itertools.pairwise(values))


def rounds_of(rng, medians, noise, drift):
    clock = math.exp(drift * rng.gauss(0, 1))
    return {
        name: median
        * clock
        * math.exp(noise * rng.gauss(0, 1))
        * (1.5 if rng.random() < 0.02 else 1)
        for name, median in medians.items()
    }


def test_the_best_is_rarely_eliminated_however_long_one_looks():
    rng = random.Random(1)
    lost = 0
    for _ in range(200):
        race = Race(tuple("abcdef"), alpha=0.05)
        medians = dict.fromkeys("abcdef", 10.0)  # all equal: every elimination is of a best one
        for _ in range(60):
            race.add_round(rounds_of(rng, {n: medians[n] for n in race.alive}, 0.01, 0.05))
        lost += "a" in race.out
    assert lost <= 200 * 0.05


def test_the_slower_are_out_soon():
    rng = random.Random(2)
    medians = {f"c{n}": 10.0 * (1 + 0.02 * n) for n in range(20)}
    race = Race(tuple(medians))
    for _ in range(40):
        race.add_round(rounds_of(rng, {n: medians[n] for n in race.alive}, 0.004, 0.05))
    assert race.alive[0] == "c0"
    assert len(race.alive) <= 2
    assert sum(map(len, race.rounds.values())) < 20 * 40 / 2


def test_equal_ones_stay_tied_and_are_decided_within():
    rng = random.Random(3)
    medians = {"a": 10.0, "b": 10.0, "c": 10.8}
    race = Race(tuple(medians))
    while not race.decided(0.005):
        race.add_round(rounds_of(rng, {n: medians[n] for n in race.alive}, 0.003, 0.05))
    assert set(race.tied()) == {"a", "b"}
    assert race.out == {"c": race.out["c"]}
    assert len(race.rounds["a"]) < 60


def test_the_interval_covers_the_ratio_at_every_look():
    rng = random.Random(4)
    missed = 0
    for _ in range(200):
        first, second = [], []
        for _look in range(1, 60):
            times = rounds_of(rng, {"a": 10.3, "b": 10.0}, 0.01, 0.05)
            first.append(times["a"])
            second.append(times["b"])
            low, high = interval(first, second, math.log2(1 / 0.025))
            if not low <= 1.03 <= high:
                missed += 1
                break
    assert missed <= 200 * 0.05


def test_few_rounds_say_nothing():
    assert rounds_beyond(3, math.log2(20)) is None
    assert interval([1.0, 2.0], [1.0, 1.0], math.log2(20)) == (0.0, math.inf)


def test_an_entry_that_is_dropped_is_out():
    race = Race(("a", "b"))
    race.add_round({"a": 1.0, "b": 2.0})
    race.drop("a", "launch_error")
    race.add_round({"b": 2.0})
    assert race.alive == ["b"]
    assert race.decided(0.0)
    assert race.tied() == ["b"]


# -- two sides in turns: intervals are those of the book, errors as rare as it says ----------


def binomial_below(rounds, number):
    return sum(math.comb(rounds, k) for k in range(number + 1)) / 2**rounds


@pytest.mark.parametrize("rounds", [1, 5, 6, 20, 101, 1500])
@pytest.mark.parametrize("tail", [0.025, 0.00025, 1e-6])
def test_so_many_are_left_out_as_the_binomial_allows(rounds, tail):
    number = skipped(rounds, tail)
    if rounds < 1000:
        assert number < 0 or binomial_below(rounds, number) <= tail
        assert binomial_below(rounds, number + 1) > tail
    else:  # normal approximation, which is near enough at 1500
        expected = rounds / 2 - {0.025: 1.96, 0.00025: 3.481, 1e-6: 4.753}[tail] * rounds**0.5 / 2
        assert number == pytest.approx(expected, abs=1.5)


def decide(ratio, noise, rng, threshold=0.02, limit=3000):
    test = PairedTest(threshold)
    for _ in range(limit):
        decision = test.add(10.0, 10.0 * ratio * rng.gauss(1, noise))
        if decision is not Decision.OPEN:
            return decision, test.interval
    return Decision.OPEN, test.interval


@pytest.mark.parametrize(
    ("ratio", "decision"),
    [
        (1.0, Decision.SAME),
        (1.005, Decision.SAME),
        (1.02, Decision.SLOWER),
        (1.05, Decision.SLOWER),
        (0.97, Decision.FASTER),
    ],
)
def test_what_is_clear_is_decided_rightly(ratio, decision):
    rng = random.Random(1)
    for _ in range(100):
        found, interval = decide(ratio, 0.005, rng)
        assert found is decision
        assert interval.low <= interval.median <= interval.high
        assert interval.rounds >= 20


def test_the_same_code_is_hardly_ever_called_slower_however_noisy():
    rng = random.Random(2)
    wrong = sum(decide(1.0, 0.03, rng)[0] in (Decision.SLOWER, Decision.FASTER) for _ in range(300))
    assert wrong <= 1  # ERROR / 2 each way: 0.3 are expected


def test_half_the_threshold_is_the_worst_case_and_still_rare():
    rng = random.Random(3)
    wrong = sum(decide(1.01, 0.01, rng, limit=500)[0] is Decision.SLOWER for _ in range(300))
    assert wrong <= 2  # at most 300 * ERROR / 2 are expected
    assert ERROR / 2 * 300 < 0.2


def test_too_few_rounds_leave_it_open():
    test = PairedTest(0.02)
    for _ in range(8):
        assert test.add(1.0, 2.0) is Decision.OPEN
    assert test.look() is Decision.OPEN
    assert test.interval is None


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_left_out_with_its_round(bad):
    test = PairedTest(0.02)
    for _ in range(100):
        assert test.add(bad, 1.0) is Decision.OPEN
        assert test.add(1.0, bad) is Decision.OPEN
    for _ in range(19):
        assert test.add(1.0, 1.0) is Decision.OPEN
    assert test.add(1.0, 1.0) is Decision.SAME
    assert test.interval.rounds == 20
