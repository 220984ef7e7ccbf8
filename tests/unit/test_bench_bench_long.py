"""A Bench of long calls: nothing is called that its times and its proof do not need."""

from __future__ import annotations

import pytest
from bench_parts import PROVEN, FakeBuffer, FakePipeline, Replay, candidate, in_turns

from attnsweep.bench import bench as measure
from attnsweep.bench.bench import Bench
from attnsweep.verify.device_case import WrongResult
from attnsweep.verify.verifier import Verifier


@pytest.fixture
def long(bench):
    bench._long = True
    bench._launch_times, bench._launched = {}, 0
    return bench


class Captured(FakePipeline):
    """A pipeline that keeps how many calls its graphs have, and who was called alone."""

    def __init__(self):
        super().__init__(None, None, [])
        self.graphs, self.alone = [], 0

    def enqueue(self, copy=0, stage=None):
        self.alone += 1

    def capture(self, calls, *, after=None, **how):
        self.graphs.append(calls)
        return lambda: None


@pytest.mark.parametrize(("is_long", "replays"), [(True, 1), (False, 2)])
def test_no_untimed_replay_precedes_a_sample(long, is_long, replays):
    long._long, played = is_long, []
    assert long._sample(PROVEN.call, Replay("a", played), 1, PROVEN) == 10.0
    assert played == ["a"] * replays


def test_a_sample_is_still_compared_with_the_checked_output(long):
    long._proof._judge.outputs = lambda look, side: 7
    with pytest.raises(WrongResult):
        long._sample(PROVEN.call, lambda: None, 1, PROVEN)


@pytest.mark.parametrize("how", [{}, {"rotate": True}, {"stage": "fwd"}])
def test_a_graph_is_one_call_and_none_is_made_to_find_that(long, how):
    call = Captured()
    _, calls = long._graph(call, 300.0, **{"rotate": False, **how})
    assert (calls, call.graphs, call.alone, long._launched) == (1, [1], 0, 0)


def test_a_first_time_is_one_call(long):
    played = []
    long._graph = lambda call, target_us, *, rotate, stage=None: (Replay("a", played), 1)
    assert Bench._screen(long, PROVEN.call) == 10.0
    assert played == ["a"]


def test_a_trial_counts_the_call_that_it_timed_and_makes_no_more(long, monkeypatch):
    monkeypatch.setattr(Verifier, "repeat", lambda *_: pytest.fail("a call more"))
    accuracy, _ = long.trial(candidate(64))
    assert accuracy.calls == 1


def test_no_copies_of_the_inputs_are_made(long, monkeypatch):
    monkeypatch.setattr(measure, "Buffer", lambda *_: pytest.fail("a buffer"))
    long._cold_copies = None
    assert long._cold() == []
    monkeypatch.setattr(measure, "Buffer", FakeBuffer)
    long.add("a", candidate(0), cold=True)
    assert len(long._entries["a"].call.copies) == 1


@pytest.mark.parametrize("call_us", [25_000.0, 180_000.0, 900_000.0])
def test_two_calls_of_the_winner_are_compared_and_none_of_others(long, monkeypatch, call_us):
    """The finals ask for 200 ms of the winner, and for 2 ms of each other."""
    asked, repeat = [], Verifier.repeat

    def noted(proof, proven, most, longest_us, each_us=None):
        asked.append((most, each_us))
        return repeat(proof, proven, most, longest_us, each_us)

    monkeypatch.setattr(Verifier, "repeat", noted)
    long.add("a", candidate(64), cold=False)
    long._entries["a"].warm_us = call_us
    assert long.confirm("a", 2_000.0) == 0
    assert asked == []
    assert long.confirm("a", 200_000.0) == 2
    assert asked == [(2, call_us)]


def test_the_winner_is_compared_on_short_turns_as_well(long):
    long.add("a", in_turns(), cold=False)
    long._entries["a"].warm_us = 180_000.0
    assert long.confirm("a", 2_000.0) == 0
    assert long.confirm("a", 1e9) >= 7_002


def test_a_winner_that_is_wrong_in_one_of_its_two_calls_is_found(long):
    long._proof._judge.outputs = lambda look, side: 100 + side + (look == 1)
    long.add("a", candidate(64), cold=False)
    long._entries["a"].warm_us = 180_000.0
    with pytest.raises(WrongResult, match="a race"):
        long.confirm("a", 200_000.0)


@pytest.mark.parametrize(("is_long", "calls"), [(True, 5), (False, 100)])
def test_the_hosts_cost_is_of_one_call_where_no_time_is_known(long, monkeypatch, is_long, calls):
    long._long, call = is_long, Captured()
    long._entries["a"] = measure._Entry(call)
    monkeypatch.setattr(Verifier, "settle", lambda self: None, raising=False)
    long.eager_us("a")
    assert call.alone == calls
