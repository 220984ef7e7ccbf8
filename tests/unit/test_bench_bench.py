"""What needs no GPU of a Bench: which buffers a pipeline is bound to, and for how long."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from bench_parts import (
    PROBLEM,
    PROVEN,
    TURNS,
    FakeBuffer,
    FakeFixture,
    FakePipeline,
    FakeProof,
    Replay,
    candidate,
    in_turns,
)

from attnsweep.baselines import prepare as baselines_prepare
from attnsweep.bench import bench as measure
from attnsweep.bench.bench import Bench
from attnsweep.core import cases, timings
from attnsweep.core.trial import Accuracy
from attnsweep.verify.device_case import WrongResult


def test_a_finalists_workspace_outlives_another_size(bench):
    bench.add("a", candidate(100), cold=True)
    bench.add("b", candidate(200), cold=True)
    first, second = (bench._entries[name].call.copies[0]["scores"] for name in "ab")
    assert (first.nbytes, second.nbytes) == (100, 200)
    bench.trial(candidate(300))
    kept = list(bench._workspaces.values())
    assert any(first is buffer for buffer in kept)
    assert any(second is buffer for buffer in kept)


def test_before_the_rounds_only_the_candidates_own_workspaces_are_held(bench):
    for nbytes in (100, 200, 300):
        bench.trial(candidate(nbytes))
    assert list(bench._workspaces) == [("scores", 300)]


def test_equal_sizes_share_a_workspace(bench):
    bench.add("a", candidate(100), cold=True)
    bench.add("b", candidate(100), cold=True)
    assert bench._entries["a"].call.copies[0]["scores"] is bench._entries["b"].call.copies[0]["scores"]


@pytest.mark.parametrize("wrong_look", [3, 500, 6_999])
def test_one_other_output_in_many_calls_is_found(wrong_look):
    def outputs(look, side):
        return 100 + side + (look == wrong_look)

    with pytest.raises(WrongResult, match=r"a race, or an answer kept from an earlier call: 1 of"):
        FakeProof(outputs).repeat(PROVEN, 7_000, 1e9)


def test_repeated_calls_meet_both_sets_of_inputs():
    seen = []
    done = FakeProof(lambda look, side: seen.append(side) or 100 + side).repeat(PROVEN, 64, 1e9)
    assert done >= 64
    assert {0, 1} == set(seen[2:])


def test_an_answer_kept_from_other_inputs_is_found():
    with pytest.raises(WrongResult, match="an answer kept from an earlier call"):
        FakeProof(lambda look, side: 100).repeat(PROVEN, 64, 1e9)


def test_a_timed_replay_is_compared_with_the_checked_output(bench):
    bench._proof = FakeProof(lambda look, side: 7)
    with pytest.raises(WrongResult):
        bench._sample(PROVEN.call, lambda: None, 5, PROVEN)
    assert bench._sample(PROVEN.call, lambda: None, 5, None) == 2.0  # of a baseline, whose output is its own


def test_outputs_of_cold_copies_are_compared_too(bench):
    copies = [{name: FakeBuffer(8) for name in "qkvo"} for _ in range(3)]
    bench._cold_copies = copies
    bench._proof = FakeProof(lambda look, side: 100 if look < 3 else 7)
    with pytest.raises(WrongResult, match="1 of 4"):
        bench._sample(PROVEN.call, lambda: None, 4, PROVEN, cold=True)


@pytest.fixture
def prepared(bench, monkeypatch):
    """The mixes of inputs on which baselines were prepared."""
    mixes = []
    call = SimpleNamespace(rounds_scores=0, issued=None, gives_lse=False, kept=None, keep=lambda *_: None)
    monkeypatch.setattr(baselines_prepare, "prepare", lambda *_: mixes.append(bench._proof.timed.mix) or call)
    return mixes


def test_a_baseline_is_prepared_after_the_inputs_are_as_they_were_made(bench, prepared):
    """Some convert them, once."""
    timed = bench._proof.timed
    bench._proof.of_baseline = lambda *call, **how: (None, None)
    bench._dtype = np.uint16
    timed.draw()
    bench.add_baseline("flash")
    assert prepared == [timed.mix] == [0]


@pytest.mark.parametrize(("share", "asked"), [(0.9, 1), (1.1, 0)])
def test_a_callable_to_be_shown_gets_hard_inputs_unless_it_is_over_a_limit(bench, prepared, share, asked):
    """Otherwise one that is wrong on them alone were confirmed as a baseline."""
    found, made = Accuracy(rel_err=0.001, limit=0.002, shares={"row": share}), []
    bench._proof.of_baseline = lambda *_, **how: (found, PROVEN)
    bench._proof.hard = made.append
    bench._proof.on_hard = lambda *_: made.append("judged")
    bench._proof.repeat = lambda *_: 1
    bench._dtype, bench._shown = np.uint16, ["mine:f"]
    bench.add_baseline("mine:f")
    assert made == [0] * asked
    bench._entries["mine:f"].graphs["warm"] = (lambda: None, 1)
    bench._refuse_reuse = lambda entry: None
    assert bench.confirm("mine:f", 1.0) == 1
    assert made == [0, "judged"] * asked


def test_cold_copies_have_arrived_before_they_are_used(bench):
    done = FakeBuffer.copied
    done.clear()
    bench._cold_count = lambda: 3
    bench.session.settle = lambda: done.append("settle")
    bench._cold_copies = None
    assert len(bench._cold()) == 2
    assert done == ["copy"] * 8 + ["settle"]


@pytest.mark.parametrize(
    ("call_us", "calls", "turns"), [(5.0, 400, 1), (60.0, 33, 3), (500.0, 4, 20), (28_000.0, 1, 2), (6_000.0, 1, 8)]
)
def test_a_pair_of_long_calls_takes_more_turns(bench, call_us, calls, turns):
    """With a clock that slows evenly, both sides still come out alike."""
    played = []

    def spans(work):
        for each in work:
            each()
        return [calls * call_us * (1 + 0.01 * number) for number in range(len(work))]

    bench.session.spans_us = spans
    for name in "ab":
        graphs = {"warm": (Replay(name, played), calls)}
        bench._entries[name] = measure._Entry(PROVEN.call, None, graphs, warm_us=call_us)
    one, other = bench.pair("a", "b")
    assert "".join(played) == "a" + "abba" * turns
    assert one == pytest.approx(other)
    assert one == pytest.approx(call_us * (1 + 0.01 * (4 * turns - 1) / 2))


class Clock:
    """A session whose replays of ten calls take what is listed, in microseconds a call."""

    stream = nullcontext()

    def __init__(self, *times):
        self.times, self.asked = list(times), 0

    def time_us(self, replay):
        self.asked += 1
        return 10 * (self.times.pop(0) if len(self.times) > 1 else self.times[0])


@pytest.mark.parametrize(
    ("times", "first_us", "asked"),
    [
        ([3.2, 3.1, 3.3], 3.2, 3),
        ([3.2, 3296.0, 3296.0, 3.1, 3.1, 3.2], 3.1, 6),  # two of three met something else
        ([3296.0] * 3 + [3.1], 3.1, 6),  # all three did, and agree
        ([3296.0] * 6 + [3.1], 3.1, 9),
        ([3296.0], 3296.0, 15),  # it is what it is; the rounds will tell
    ],
)
def test_a_first_time_that_is_contradicted_is_taken_again(bench, times, first_us, asked):
    bench.session = Clock(*times)
    bench._graph = lambda call, target_us, *, rotate, stage=None: (lambda: None, 10)
    assert Bench._screen(bench, PROVEN.call) == first_us
    assert bench.session.asked == asked


def test_one_call_that_outlasts_a_replay_is_no_mistake(bench):
    bench.session = Clock(1000.0)
    bench._graph = lambda call, target_us, *, rotate, stage=None: (lambda: None, 1)
    assert Bench._screen(bench, PROVEN.call) == 10_000.0
    assert bench.session.asked == 3


def test_what_a_trial_proved_is_not_proved_again_but_other_launches_are(bench):
    proofs, prove = [], bench._proof.of_candidate

    def of_candidate(candidate, *args, **how):
        proofs.append(candidate.timed)
        return prove(candidate, *args, **how)

    bench._proof.of_candidate = of_candidate
    bench._cold_copies = [bench._timed]
    bench._proof.repeat = lambda *_: 8
    tried, other = candidate(64), candidate(128)
    bench.trial(tried)
    bench.add("tried", candidate(64), cold=True)
    assert proofs == [tried.timed]
    entry = bench._entries["tried"]
    assert len(entry.call.copies) == 2
    assert (entry.proven.digests == PROVEN.digests).all()
    bench._sample(entry.call, lambda: None, 1, entry.proven)
    bench._proof._judge.outputs = lambda look, side: 7  # wrong from now on
    with pytest.raises(WrongResult):
        bench._sample(entry.call, lambda: None, 1, entry.proven)
    bench.add("other", other, cold=False)
    assert proofs == [tried.timed, other.timed]


def test_a_candidate_is_tried_in_8_calls_one_by_one_and_a_finalist_in_7000(bench):
    asked = []

    def repeat(proven, most, longest_us, each_us=None):
        asked.append((most, longest_us))
        return most

    bench._cold_copies = [bench._timed]
    bench._proof.repeat = repeat
    accuracy, first = bench.trial(candidate(64))
    assert (accuracy.calls, first.sm_mhz) == (8, 1980.0)
    bench.add("k", candidate(64), cold=False)
    assert bench.confirm("k", 200_000.0) == 7_001  # and one on hard inputs
    assert asked == [(8, 1_000.0), (7_000, 200_000.0)]

    def wrong(*_):
        raise WrongResult("a race")

    bench._proof.repeat = wrong
    with pytest.raises(WrongResult, match="a race"):
        bench.confirm("k", 200_000.0)
    with pytest.raises(WrongResult, match="a race"):
        bench.trial(candidate(128))


def test_a_finalist_is_confirmed_on_the_timed_problem_and_then_on_short_turns(bench):
    asked, repeat = [], bench._proof.repeat

    def noted(proven, most, longest_us, each_us=None):
        asked.append((proven.fixture.case.problem, most, longest_us))
        return repeat(proven, most, longest_us, each_us)

    bench._proof.repeat = noted
    bench.add("turns", in_turns(), cold=False)
    assert bench.confirm("turns", 100.0) < 7_000
    calls = bench.confirm("turns", 1e9)
    assert calls >= 14_000
    short = TURNS.fixture.case.problem
    assert asked[2:] == [(PROBLEM, 7_000, 1e9), (short, 7_000, 1e9)]
    bench.add("none", candidate(64), cold=False)
    bench.add("again", in_turns(), cold=False)  # as on another problem with the same short turns
    for name in ("none", "again"):
        assert 7_000 <= bench.confirm(name, 1e9) < calls
    assert asked[4:] == [(PROBLEM, 7_000, 1e9)] * 2
    bench.add("other", in_turns(9), cold=False)
    assert bench.confirm("other", 1e9) >= 14_000


def test_the_workspaces_of_short_turns_are_not_kept(bench):
    bench.add("turns", in_turns(7), cold=False)
    bench.confirm("turns", 100.0)
    assert list(bench._workspaces) == [("scores", 64)]


def test_a_race_that_only_short_turns_show_is_named_so(bench):
    def outputs(look, side):
        return 100 + side + (look == 7_500)

    bench._proof._judge.outputs = outputs
    bench.add("turns", in_turns(), cold=False)
    with pytest.raises(WrongResult) as refused:
        bench.confirm("turns", 1e9)
    begin, _, end = refused.value.detail.partition(": a race, or an answer kept")
    assert begin == "right in all other cases, but not in many short turns"
    assert ": 1 of " in end
    assert "((5,1,300x64,64) fp16 full, normal)" in end
    assert list(bench._workspaces) == [("scores", 64)]
    bench._proof._judge.outputs = lambda look, side: 7
    with pytest.raises(WrongResult) as refused:
        bench.confirm("turns", 1e9)
    assert refused.value.detail.startswith("a race, or an answer kept")


def test_the_output_is_looked_at_before_the_host_waits_for_the_replay(bench):
    """So that the look is ready when the time is: nothing is launched between."""
    order = []

    def time_us(work, then=None):
        work()
        order.append("replayed")
        then()
        order.append("waited")
        return 10.0

    bench.session.time_us = time_us
    judge, digest = bench._proof._judge, bench._proof._judge.digest

    def looked(*args, **how):
        order.append("look")
        digest(*args, **how)

    judge.digest = looked
    bench._sample(PROVEN.call, lambda: None, 1, PROVEN)
    assert order == ["replayed", "look", "waited"]


def test_what_preparing_inputs_takes_of_the_device_is_counted(bench):
    times = iter([0.0, 40.0, 100.0, 130.0])
    bench._proof._session.record = lambda: next(times)
    timings.proof_taken()
    bench._proof.begin()
    bench._proof.begin()
    assert timings.proof_taken() == {"replays": pytest.approx(40e-6)}
    bench._proof._count_prepared()
    bench._proof._count_prepared()
    assert timings.proof_taken() == {"replays": pytest.approx(30e-6)}


def test_what_preparing_inputs_took_is_counted_where_the_output_is_compared_then(bench):
    times = iter([0.0, 50e6])
    bench._proof._session.record = lambda: next(times)
    bench._proof._compare = lambda *args: None
    timings.proof_taken()
    bench._proof.begin()
    bench._proof.end(PROVEN, looked=True)
    assert 50 <= timings.proof_taken()["replays"] < 60


@pytest.mark.parametrize(("dtype", "asked"), [("bf16", [2]), ("fp32", [])])
def test_limits_of_rounded_scores_are_asked_of_the_process_beside(dtype, asked):
    made, problem = FakeProof(lambda look, mix: 0), replace(PROBLEM, dtype=dtype)
    made.timed, said = FakeFixture(problem), []

    def rounding(of, often):
        said.append(often)
        return {(cases.Case(of), often): "errors"}

    made._pool = SimpleNamespace(rounding=rounding)
    made._maths = {(made.timed.case, 0): "known"}
    for _ in range(2):
        made._know_limits(0)
        made._know_limits(2)
    assert said == asked


# ---- long calls: nothing is called that their times and proof do not need ----
@pytest.fixture
def long(bench):
    bench._long = True
    return bench


class Captured(FakePipeline):
    """A pipeline that keeps how many calls its graphs have, and who was called alone."""

    def __init__(self):
        super().__init__(None, None, [])
        self.graphs, self.alone = [], 0

    def enqueue(self, copy=0, stage=None, *, turned=True):
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


def test_a_trial_counts_the_call_that_it_timed_and_makes_no_more(long):
    long._proof.repeat = lambda *_: pytest.fail("a call more")
    accuracy, _ = long.trial(candidate(64))
    assert accuracy.calls == 1


def test_no_copies_of_the_inputs_are_made(long):
    long._cold_copies = None
    assert long._cold() == []
    long.add("a", candidate(0), cold=True)
    assert len(long._entries["a"].call.copies) == 1


@pytest.mark.parametrize("call_us", [25_000.0, 180_000.0, 900_000.0])
def test_two_calls_of_the_winner_are_compared_and_none_of_others(long, call_us):
    """The finals ask for 200 ms of the winner, and for 2 ms of each other."""
    asked, repeat = [], long._proof.repeat

    def noted(proven, most, longest_us, each_us=None):
        asked.append((most, each_us))
        return repeat(proven, most, longest_us, each_us)

    long._proof.repeat = noted
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
def test_the_hosts_cost_is_of_one_call_where_no_time_is_known(long, is_long, calls):
    long._long, call = is_long, Captured()
    long._entries["a"] = measure._Entry(call)
    long.eager_us("a")
    assert call.alone == calls
