"""The time left, of runs on a clock that the test turns."""

import pytest

from attnsweep.reports.eta import Eta, Left


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


def problem(eta: Eta, clock: Clock, count: int, each_s: float = 0.5, finals_s: float = 5.0) -> None:
    eta.opening()
    search(eta, clock, count, each_s)
    eta.finals()
    clock.now += finals_s


def compiling(clock: Clock, count: int) -> Eta:
    """Where nothing is decided, half of the candidates are enough to say something."""
    eta = Eta(clock)
    eta.planned([count], finals=False)
    eta.opening()
    return eta


def test_nothing_is_said_before_anything_was_measured(clock) -> None:
    eta = Eta(clock)
    assert eta.left is None
    eta.planned([100])
    assert eta.left is None
    eta.opening()
    clock.now += 5
    assert eta.left is None


def test_nothing_is_said_before_two_problems_are_over(clock) -> None:
    """A run of 95 s began with "at least 20 min left": three candidates after a slow opening."""
    eta = Eta(clock)
    eta.planned([54, 81, 54])
    eta.opening()
    clock.now += 5.5
    search(eta, clock, 54, 0.03)
    assert eta.left is None
    eta.finals()
    clock.now += 9
    assert eta.left is None
    eta.opening()
    search(eta, clock, 81, 0.03)
    assert eta.left is None
    eta.finals()
    clock.now += 6
    assert eta.left is None
    eta.opening()
    assert eta.left is not None
    assert eta.left.seconds == pytest.approx(54 * 0.03 + 6, rel=0.01)


def test_one_problem_has_its_counts_alone(clock) -> None:
    eta = Eta(clock)
    eta.planned([10])
    problem(eta, clock, 10)
    assert eta.left is None


def test_the_estimate_of_several_problems_comes_true(clock) -> None:
    eta = Eta(clock)
    eta.planned([100] * 4)
    problem(eta, clock, 100, 0.4, 60.0)  # the first one also imports the baselines
    problem(eta, clock, 100, 0.4, 20.0)
    eta.opening()
    clock.now += 2.0
    search(eta, clock, 50, 0.4)
    assert eta.left is not None
    # 50 and 100 candidates, an opening, and the finals of two problems.
    assert eta.left.seconds == pytest.approx(149 * 0.4 + 0.4 + 2 * 20, rel=0.02)


def test_it_is_counted_down_while_a_problem_opens_and_while_it_is_decided(clock) -> None:
    eta = Eta(clock)
    eta.planned([10, 10, 10])
    for _ in range(2):
        eta.opening()
        clock.now += 4.0
        search(eta, clock, 10, 0.5)
        eta.finals()
        clock.now += 6.0
    eta.opening()
    assert eta.left is not None
    whole = eta.left.seconds
    assert whole == pytest.approx(4.5 + 9 * 0.5 + 6, rel=0.04)
    clock.now += 3.0
    assert eta.left.seconds == pytest.approx(whole - 3.0)
    clock.now += 1.0
    search(eta, clock, 10, 0.5)
    eta.finals()
    clock.now += 2.0
    assert eta.left.seconds == pytest.approx(4.0)
    clock.now += 9.0
    assert eta.left.seconds == 0.0


def test_it_follows_a_machine_that_gets_six_times_slower(clock) -> None:
    """An ETA of the mean of all events said 5 minutes for what took 31."""
    eta = compiling(clock, 280)
    search(eta, clock, 100, 0.6)
    search(eta, clock, 40, 3.8, begin=100)
    assert eta.left is not None
    assert eta.left.seconds == pytest.approx(140 * 3.8, rel=0.1)
    mean = (100 * 0.6 + 40 * 3.8) / 140 * 140
    assert eta.left.seconds > 2 * mean


def test_kept_rows_and_second_rows_do_not_speed_it_up(clock) -> None:
    eta = compiling(clock, 100)
    for number in range(50):
        clock.now += 0.001
        eta.tried(number, kept=True)
    search(eta, clock, 10, 2.0, begin=50)
    for number in range(50, 60):
        eta.tried(number, kept=False)
    assert eta.left is not None
    assert eta.left.seconds == pytest.approx(40 * 2.0, rel=0.05)


def test_the_compiler_decides_if_it_is_slower(clock) -> None:
    eta = compiling(clock, 100)
    for number in range(1, 71):
        clock.now += 1.0
        eta.compiled(number)
    for number in range(60):
        clock.now += 0.01
        eta.tried(number, kept=False)
    assert eta.left is not None
    assert eta.left.seconds == pytest.approx(30.0, rel=0.05)


def test_a_search_that_stops_early_shortens_the_problems_to_come(clock) -> None:
    eta = Eta(clock)
    eta.planned([100] * 3)
    problem(eta, clock, 20, 1.0, 5.0)
    problem(eta, clock, 20, 1.0, 5.0)
    eta.opening()
    search(eta, clock, 4, 1.0)
    assert eta.left is not None
    assert eta.left.seconds == pytest.approx(16 + 5, rel=0.1)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "1 s"), (9.2, "10 s"), (42, "50 s"), (95, "2 min"), (1860, "31 min"), (7300, "2 h 0 min")],
)
def test_it_is_said_in_round_figures(seconds, said) -> None:
    assert str(Left(seconds)) == f"about {said} left"
