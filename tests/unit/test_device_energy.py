"""The energy of a call, from a counter that moves in steps, on a simulated card and clock."""

from types import SimpleNamespace

import pytest

from attnsweep.device import energy
from attnsweep.device.energy import Replays, stretch

CALL_US = 100.0


class Board:
    """A card whose counter moves every `step_s`, and that draws `watts(seconds under load)`."""

    def __init__(self, watts=lambda at_s: 500.0, step_s=0.1, read_s=2e-5, begin_mj=7_000_000):
        self.watts, self.step_s, self.read_s = watts, step_s, read_s
        self.now, self.reset_at, self.begin_mj = 0.0, None, begin_mj
        self.marked, self.fed = [], 0
        self._shown, self._joules, self._upto = begin_mj, 0.0, 0.0
        self._next = step_s

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def counter(self):
        self.now += self.read_s
        while self._next <= self.now:
            self._joules += self.watts(self._upto) * (self._next - self._upto)
            self._upto = self._next
            self._shown = self.begin_mj + int(self._joules * 1e3)
            self._next += self.step_s
        if self.reset_at is not None and self.now >= self.reset_at:
            self.reset_at, self.begin_mj, self._joules, self._shown = None, 0, 0.0, 0
        return self._shown

    # -- the load ---------------------------------------------------------------------------

    def feed(self):
        self.fed += 1

    def mark(self):
        self.marked.append(self.now)

    def time_us(self):
        return CALL_US

    def measured(self):
        return stretch(self.counter, self, clock=self.clock, sleep=self.sleep)


@pytest.mark.parametrize("step_s", [0.02, 0.1, 0.13])
def test_power_is_that_between_two_steps_whatever_their_length(step_s):
    board = Board(step_s=step_s)
    found = board.measured()
    assert found.power_w == pytest.approx(500, rel=0.003)
    assert found.energy_uj == pytest.approx(500 * CALL_US, rel=0.003)
    assert board.now < energy.SETTLE_S + energy.STRETCH_S + 2 * step_s + 0.01, "bounded in time"
    assert board.fed > 100, "the card is kept busy"


def test_the_rise_of_the_power_at_the_beginning_does_not_count():
    board = Board(watts=lambda at_s: 100.0 if at_s < energy.SETTLE_S else 600.0)
    assert board.measured().power_w == pytest.approx(600, rel=0.003)


def test_only_calls_of_the_stretch_are_timed():
    board = Board()
    board.measured()
    (marked,) = board.marked
    assert marked >= energy.SETTLE_S


def test_a_counter_that_never_moves_gives_none_soon():
    board = Board(watts=lambda at_s: 0.0)
    assert board.measured() is None
    assert board.now < energy.STILL_S + 0.01


def test_a_counter_that_stops_gives_none():
    board = Board(watts=lambda at_s: 500.0 if at_s < 0.3 else 0.0)
    assert board.measured() is None
    assert board.now < 0.3 + energy.STILL_S + 0.2


def test_a_counter_too_slow_to_hold_a_stretch_ends_in_time():
    board = Board(step_s=0.99)
    found = board.measured()
    assert found is None or found.power_w == pytest.approx(500, rel=0.01)
    assert board.now <= energy.LONGEST_S + 0.01


def test_a_counter_that_begins_anew_begins_the_stretch_anew():
    """It wrapped, or the driver was loaded again: the difference would be negative."""
    board = Board()
    board.reset_at = 0.55
    found = board.measured()
    assert found.power_w == pytest.approx(500, rel=0.003)
    assert len(board.marked) == 2


class Event:
    def __init__(self, stream):
        self.stream, self.at = stream, stream.enqueued_us

    @property
    def done(self):
        return self.at <= self.stream.done_us


class Stream:
    """A session: replays enqueue time, and the device follows when it is told to."""

    def __init__(self):
        self.enqueued_us = self.done_us = 0.0

    def record(self):
        return Event(self)

    def elapsed_us(self, begin, end):
        return end.at - begin.at


@pytest.mark.parametrize("calls_us", [(1, 3.0), (300, 3.3), (10, 100.0), (1, 40_000.0)], ids=str)
def test_replays_keep_some_work_ahead_and_time_what_follows_the_mark(calls_us):
    calls, call_us = calls_us
    stream = Stream()

    def replay():
        stream.enqueued_us += calls * call_us

    load = Replays(stream, replay, calls, call_us)
    for _ in range(5):
        load.feed()
        ahead = stream.enqueued_us - stream.done_us
        assert 15_000 <= ahead <= 30_000 or ahead == 2 * calls * call_us
        stream.done_us = stream.enqueued_us - ahead / 2
    call_us *= 1.5  # before the mark, nothing counts
    load.mark()
    stream.done_us = stream.enqueued_us
    load.feed()
    assert load.time_us() == pytest.approx(call_us)


def test_a_call_longer_than_a_stretch_is_timed_too():
    stream = Stream()

    def replay():
        stream.enqueued_us += 2e6

    load = Replays(stream, replay, 1, 2e6)
    load.feed()
    load.mark()
    load.feed()  # two are still enqueued
    assert load.time_us() == pytest.approx(2e6)


def test_without_nvml_or_with_an_old_card_there_is_no_counter():
    def refuse(card):
        raise RuntimeError("Not Supported")

    def missing():
        raise ImportError("pynvml")

    old = SimpleNamespace(nvmlDeviceGetTotalEnergyConsumption=refuse)
    assert energy.counter(SimpleNamespace(nvml=lambda: (old, "card"))) is None
    assert energy.counter(SimpleNamespace(nvml=missing)) is None
    new = SimpleNamespace(nvmlDeviceGetTotalEnergyConsumption=lambda card: 12)
    assert energy.counter(SimpleNamespace(nvml=lambda: (new, "card")))() == 12
