"""The sequential test: its intervals are those of the book, its errors as rare as it says."""

from __future__ import annotations

import math
import random

import pytest

from attnsweep.choose.evidence import ERROR, Decision, PairedTest, skipped


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
