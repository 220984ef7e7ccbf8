"""How many calls a timed graph holds."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.baselines import prepare
from attnsweep.bench.bench import Bench
from attnsweep.device.cuda_graph import lasting

LAUNCH_US = 13.0  # what a graph's own launch adds if nothing hides it


def lengthened(each_us: float, once_us: float, target_us: float = 300.0, most: int = 2000):
    """The calls of the graph, and every number of calls that was captured."""
    made = []

    def capture(calls):
        made.append(calls)
        return lambda: None

    replay, calls, launched = lasting(
        capture, lambda _: LAUNCH_US + made[-1] * each_us, once_us, target_us, most
    )
    assert callable(replay)
    assert calls == made[-1]
    assert launched >= 2 * sum(made[:-1])
    return calls, made


@pytest.mark.parametrize("once_us", [9.0, 20.0, 150.0, 299.0, 301.0, 5_000.0, 1e6])
def test_a_host_that_stood_still_at_first_makes_no_graph_of_one_call(once_us):
    """Of 9 us calls there are 33 to 300 us, and 23 to the 70 % that is enough."""
    calls, made = lengthened(9.0, once_us)
    assert 22 <= calls <= 34
    assert len(made) <= 4


def test_a_call_that_outlasts_the_graph_is_captured_once():
    assert lengthened(3_000.0, 3_010.0) == (1, [1])
    assert lengthened(3_000.0, 1.0)[0] >= 1


def test_no_graph_holds_more_calls_than_it_may():
    assert lengthened(0.5, 20.0, target_us=1500.0, most=50) == (50, [50])
    assert lengthened(0.5, 2000.0, target_us=1500.0, most=50)[0] == 50


@given(st.floats(0.5, 5000.0), st.floats(0.5, 1e7), st.sampled_from([300.0, 500.0, 1500.0]))
def test_it_lasts_long_enough_or_is_as_long_as_it_may_be(each_us, once_us, target_us):
    calls, made = lengthened(each_us, once_us, target_us)
    assert calls >= 1
    assert len(made) <= 5
    if once_us >= each_us:  # a guess that is too long
        assert calls == 2000 or LAUNCH_US + calls * each_us >= 0.7 * target_us
        assert calls == 1 or calls * each_us <= 1.2 * target_us + each_us


def test_the_bench_and_the_choice_of_a_way_ask_the_graph_itself(monkeypatch):
    """Both took an eager call's time for it where the host had stood still for a graph's length."""

    class Call:
        calls = 0

        def enqueue(self, copy=0, stage=None):
            Call.calls = 0

        def capture(self, calls, *, rotate=False, stage=None):
            def replay():
                Call.calls = calls

            return replay

    class Session:
        stream = nullcontext()

        def time_us(self, work, then=None):
            work()
            return LAUNCH_US + 9.0 * Call.calls if Call.calls else 5_000.0

    bench = SimpleNamespace(session=Session(), _launched=0, _long=False)
    _, calls = Bench._graph(bench, Call(), 300.0, rotate=False)
    assert 22 <= calls <= 34
    assert prepare._screen_us(Call(), Session(), replays=3) < 9.5
