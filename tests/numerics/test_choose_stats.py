"""Elimination and the paired test are right as often as they say, however one looks at them."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.choose.stats import Race, interval, log2_evidence, rounds_beyond, skipped


@given(st.integers(1, 14))
def test_evidence_has_mean_one_under_the_null(rounds):
    mean = sum(math.comb(rounds, k) * 2.0 ** (log2_evidence(k, rounds) - rounds) for k in range(rounds + 1))
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
        name: median * clock * math.exp(noise * rng.gauss(0, 1)) * (1.5 if rng.random() < 0.02 else 1)
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
    assert race.alive == ["a", "b"]
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
