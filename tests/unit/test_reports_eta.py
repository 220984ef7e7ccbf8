"""The time left, of runs on a clock that the test turns."""

import pytest
from arrivals import Clock

from attnsweep.reports.eta import Eta, Left


@pytest.fixture
def clock() -> Clock:
    return Clock()


def problem(eta: Eta, clock: Clock, took_s: float, measures: bool = True) -> None:
    eta.opening(0, measures=measures)
    clock.now += took_s


def test_it_is_counted_down_while_a_problem_goes_on(clock) -> None:
    eta = Eta(1, clock)
    eta.planned([10] * 5)
    for took_s in (60.0, 10.0, 20.0):
        problem(eta, clock, took_s)
    eta.opening(0, measures=True)
    for left_s in (30.0, 26.0, 22.0, 18.0, 15.0, 15.0):
        assert eta.left is not None
        assert eta.left.seconds == left_s
        clock.now += 4.0


def test_problems_that_an_earlier_run_has_measured_tell_nothing(clock) -> None:
    eta = Eta(1, clock)
    eta.planned([10] * 9)
    for _ in range(4):
        problem(eta, clock, 0.1, measures=False)
    problem(eta, clock, 50.0)
    assert eta.left is None
    problem(eta, clock, 10.0)
    eta.opening(0, measures=True)
    assert eta.left is not None
    assert eta.left.seconds == 30.0


def compiling(clock: Clock, count: int) -> Eta:
    """Where nothing is decided, half of the candidates are enough to say something."""
    eta = Eta(1, clock)
    eta.planned([count], finals=False)
    eta.opening(0, measures=True)
    return eta


def compile_more(eta: Eta, clock: Clock, numbers: range, each_s: float) -> None:
    for number in numbers:
        clock.now += each_s
        eta.tried(number, kept=False)


def test_it_follows_a_machine_that_gets_six_times_slower(clock) -> None:
    eta = compiling(clock, 280)
    compile_more(eta, clock, range(100), 0.6)
    assert eta.left is None
    compile_more(eta, clock, range(100, 140), 3.8)
    assert eta.left is not None
    assert eta.left.seconds == pytest.approx(140 * 3.8, rel=0.1)


def test_kept_rows_and_second_rows_do_not_speed_it_up(clock) -> None:
    eta = compiling(clock, 100)
    for number in range(50):
        clock.now += 0.001
        eta.tried(number, kept=True)
    compile_more(eta, clock, range(50, 60), 2.0)
    for number in range(50, 60):
        eta.tried(number, kept=False)
    assert eta.left is not None
    assert eta.left.seconds == pytest.approx(40 * 2.0, rel=0.05)
    clock.now += 9.0  # a compiler that hangs
    assert eta.left.seconds == pytest.approx(40 * 3.0, rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "1 s"), (9.2, "10 s"), (42, "50 s"), (95, "2 min"), (1860, "31 min"), (7300, "2 h 0 min")],
)
def test_it_is_said_in_round_figures(seconds, said) -> None:
    assert str(Left(seconds)) == f"about {said} left"
