"""The time left, of runs on a clock that the test turns."""

from __future__ import annotations

import pytest

from attnsweep.show.eta import Eta, Left


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def search(eta: Eta, clock: Clock, count: int, each_s: float, begin: int = 0) -> None:
    for number in range(begin, begin + count):
        clock.now += each_s
        eta.compiled(number + 1)
        eta.tried(number, kept=False)


def finals(eta: Eta, clock: Clock, rounds: int, each_s: float) -> None:
    eta.finals()
    for number in range(1, rounds + 1):
        eta.finals(number, rounds)
        clock.now += each_s


def test_nothing_is_said_before_anything_was_measured(clock) -> None:
    eta = Eta(clock)
    assert eta.left is None or eta.left.seconds == 0
    eta.planned([100])
    assert eta.left is None
    eta.opening()
    clock.now += 5
    assert eta.left is None


def test_a_steady_rate_is_met_and_finals_are_missing_until_seen(clock) -> None:
    eta = Eta(clock)
    eta.planned([100])
    eta.opening()
    search(eta, clock, 40, 0.5)
    assert eta.left is not None
    assert eta.left.seconds == pytest.approx(30.0, rel=0.02)
    assert eta.left.at_least


def test_the_estimate_of_several_problems_comes_true(clock) -> None:
    eta = Eta(clock)
    eta.planned([100, 100, 100])
    eta.opening()
    search(eta, clock, 100, 0.4)
    finals(eta, clock, 20, 1.0)
    eta.opening()
    search(eta, clock, 50, 0.4)
    assert eta.left is not None
    # 50 and 100 candidates, and the finals of two problems.
    assert eta.left.seconds == pytest.approx(150 * 0.4 + 2 * 20, rel=0.05)
    assert not eta.left.at_least


def test_it_follows_a_machine_that_gets_six_times_slower(clock) -> None:
    """An ETA of the mean of all events said 5 minutes for what took 31."""
    eta = Eta(clock)
    eta.planned([492])
    eta.opening()
    search(eta, clock, 100, 0.6)
    search(eta, clock, 40, 3.8, begin=100)
    assert eta.left is not None
    assert eta.left.seconds == pytest.approx(352 * 3.8, rel=0.1)
    mean = (100 * 0.6 + 40 * 3.8) / 140 * 352
    assert eta.left.seconds > 2 * mean


def test_it_grows_while_nothing_happens(clock) -> None:
    eta = Eta(clock)
    eta.planned([100])
    eta.opening()
    search(eta, clock, 20, 0.5)
    before = eta.left
    clock.now += 60
    after = eta.left
    assert before is not None
    assert after is not None
    assert after.seconds > 2 * before.seconds


def test_kept_rows_and_second_rows_do_not_speed_it_up(clock) -> None:
    eta = Eta(clock)
    eta.planned([100])
    eta.opening()
    for number in range(50):
        clock.now += 0.001
        eta.tried(number, kept=True)
    search(eta, clock, 10, 2.0, begin=50)
    for number in range(50, 60):
        eta.tried(number, kept=False)
    assert eta.left is not None
    assert eta.left.seconds == pytest.approx(40 * 2.0, rel=0.05)


def test_the_compiler_decides_if_it_is_slower(clock) -> None:
    eta = Eta(clock)
    eta.planned([100])
    eta.opening()
    for number in range(1, 21):
        clock.now += 1.0
        eta.compiled(number)
    assert eta.left is not None  # nothing is timed yet, and still there is a rate
    assert eta.left.seconds == pytest.approx(80.0, rel=0.05)


def test_a_search_that_stops_early_shortens_the_problems_to_come(clock) -> None:
    eta = Eta(clock)
    eta.planned([100, 100])
    eta.opening()
    search(eta, clock, 20, 1.0)
    finals(eta, clock, 5, 1.0)
    eta.opening()
    search(eta, clock, 4, 1.0)
    assert eta.left is not None
    assert eta.left.seconds == pytest.approx(16 + 5, rel=0.1)


def test_rounds_under_way_are_counted_down(clock) -> None:
    eta = Eta(clock)
    eta.planned([10])
    eta.opening()
    search(eta, clock, 10, 0.1)
    eta.finals()
    clock.now += 3
    for number in range(1, 11):
        eta.finals(number, 30)
        clock.now += 2.0
    assert eta.left is not None
    assert eta.left.seconds == pytest.approx(44.0, rel=0.15)
    assert not eta.left.at_least


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "1 s"),
        (9.2, "10 s"),
        (42, "50 s"),
        (95, "2 min"),
        (1860, "31 min"),
        (7300, "2 h 0 min"),
    ],
)
def test_it_is_said_in_round_figures(seconds, said) -> None:
    assert str(Left(seconds, False)) == f"about {said} left"
    assert str(Left(seconds, True)) == f"at least {said} left"


def test_compiling_alone_has_no_finals_to_wait_for(clock) -> None:
    eta = Eta(clock)
    eta.planned([100, 50], finals=False)
    eta.opening()
    search(eta, clock, 40, 0.5)
    assert eta.left is not None
    assert eta.left.seconds == pytest.approx(55.0, rel=0.02)
    assert not eta.left.at_least
