"""What needs no GPU of a Bench: which buffers are held, how often is called, what is compared."""

import gc

import pytest
from bench_parts import LONG, PROBLEM, FakeBaseline, FakeBuffer, FakePipeline, FakeProof, FakeSession, candidate, right

from attnsweep.baselines import prepare as baselines_prepare
from attnsweep.bench import problem as opening
from attnsweep.bench import timer
from attnsweep.bench.bench import Bench
from attnsweep.core.trial import Accuracy
from attnsweep.verify.device_case import WrongResult


@pytest.fixture
def bench_of(monkeypatch):
    """bench_of(problem): a bench on a fake card."""
    fakes = {"Buffer": FakeBuffer, "BoundCall": FakePipeline, "CudaSession": FakeSession, "Verifier": FakeProof}
    for name, fake in fakes.items():
        monkeypatch.setattr(opening, name, fake)
    monkeypatch.setattr(timer, "Buffer", FakeBuffer)
    return lambda problem, **options: Bench(problem, replay_us=2_000.0, seed=0, **options)


@pytest.fixture
def bench(bench_of):
    return bench_of(PROBLEM)


def stale(look, mix):
    """What was written for other inputs."""
    return 7


def wrong_at(number):
    """One output of many is another than is right."""
    return lambda look, mix: right(look, mix) + (look == number)


def workspaces(bench):
    """Sizes of those in the card's memory."""
    gc.collect()
    return sorted(buffer.nbytes for buffer in bench.session.memory if buffer.nbytes > 8)


def test_a_workspace_is_held_once_and_while_an_entry_needs_it(bench):
    for nbytes in (100, 200, 300):
        bench.trial(candidate(nbytes))
        assert workspaces(bench) == [nbytes]
    bench.add("a", candidate(100), cold=True)
    bench.add("b", candidate(200), cold=True)
    bench.trial(candidate(300))
    bench.add("c", candidate(100), cold=False)
    assert workspaces(bench) == [100, 200, 300]
    bench.drop("a")
    assert workspaces(bench) == [100, 200]
    bench.replay("c", "warm")
    bench.drop("c")
    assert workspaces(bench) == [200]


@pytest.mark.parametrize("wrong_look", [3, 500, 6_999])
def test_one_other_output_in_many_calls_is_found(wrong_look):
    proof = FakeProof()
    proof.card.write(wrong_at(wrong_look))
    with pytest.raises(WrongResult, match=r"a race, or an answer kept from an earlier call: 1 of"):
        proof.repeat(proof.proven(), 7_000, 1e9)


def test_repeated_calls_meet_both_sets_of_inputs():
    proof, seen = FakeProof(), []
    proof.card.write(lambda look, mix: seen.append(mix) or right(look, mix))
    assert proof.repeat(proof.proven(), 64, 1e9) >= 64
    assert {0, 1} == set(seen[2:])


def test_an_answer_kept_from_other_inputs_is_found():
    proof = FakeProof()
    proof.card.write(lambda look, mix: 100)
    with pytest.raises(WrongResult, match="an answer kept from an earlier call"):
        proof.repeat(proof.proven(), 64, 1e9)


@pytest.mark.parametrize("problem", [PROBLEM, LONG])
def test_a_timed_replay_is_compared_with_the_checked_output(bench_of, problem):
    bench = bench_of(problem)
    bench.add("a", candidate(64), cold=False)
    samples = {"race": lambda: bench.race("a", 300.0, "warm"), "trial": lambda: bench.trial(candidate(128))}
    samples |= {kind: lambda kind=kind: bench.replay("a", kind) for kind in ("warm", "cold")}
    samples |= {"pair": lambda: bench.pair("a", "a")}
    for sample in samples.values():
        sample()
        bench.session.write(stale)
        with pytest.raises(WrongResult, match="a race"):
            sample()
        bench.replay("a", "fwd")  # a stage alone leaves no output
        bench.session.write(right)


def test_outputs_of_cold_copies_are_compared_too(bench):
    bench.add("a", candidate(64), cold=True)
    bench.session.write(wrong_at(3))
    with pytest.raises(WrongResult, match="1 of 4"):
        bench.replay("a", "cold")
    assert bench.session.rotated == [True]


@pytest.fixture
def prepared(bench, monkeypatch):
    """The mixes of inputs on which callables were prepared."""
    mixes = []

    def prepare(name, problem, copies, session, triton):
        mixes.append(session.timed.mix)
        return FakeBaseline(session, candidate(0).timed, [])

    monkeypatch.setattr(baselines_prepare, "prepare", prepare)
    return mixes


def test_a_baseline_is_prepared_after_the_inputs_are_as_they_were_made(bench, prepared):
    """Some convert them, once."""
    bench.add("a", candidate(64), cold=True)
    bench.session.timed.draw()
    bench.add_baseline("mine:f")
    assert prepared == [bench.session.timed.mix] == [0]


@pytest.mark.parametrize(("share", "asked"), [(0.9, 1), (1.1, 0)])
@pytest.mark.usefixtures("prepared")
def test_a_callable_to_be_shown_gets_hard_inputs_unless_it_is_over_a_limit(bench_of, share, asked):
    """Otherwise one that is wrong on them alone were confirmed as a baseline."""
    bench = bench_of(PROBLEM, shown=["mine:f"])
    bench.session.accuracy = Accuracy(rel_err=0.001, limit=0.002, shares={"row": share})
    bench.add_baseline("mine:f")
    assert bench.session.hard == [0] * asked
    for _ in range(2):
        bench.replay("mine:f", "warm")
    assert bench.confirm("mine:f", 1.0) == 2 + 2  # those of replays too
    assert bench.session.hard == [0, "judged"] * asked
    bench.session.write(stale)
    with pytest.raises(WrongResult, match="a race"):
        bench.confirm("mine:f", 1.0)


def test_cold_copies_have_arrived_before_they_are_used(bench):
    done = bench.session.copied
    bench.session.settle = lambda: done.append("settle")
    for name in "ab":
        bench.add(name, candidate(64), cold=True)
    assert done == ["copy"] * 4 * 3 + ["settle"]


@pytest.mark.parametrize(
    ("call_us", "calls", "turns"), [(5.0, 400, 1), (60.0, 33, 3), (500.0, 4, 20), (28_000.0, 1, 2), (6_000.0, 1, 8)]
)
def test_a_pair_of_long_calls_takes_more_turns(bench, call_us, calls, turns):
    """With a clock that slows evenly, both sides still come out alike."""
    card = bench.session
    card.issue_us = card.call_us = call_us
    for nbytes, name in enumerate("ab"):
        bench.add(name, candidate(nbytes), cold=False)
        bench.replay(name, "warm")
    assert card.captured == [calls] * 2
    card.replayed.clear()
    card.spans_us = lambda works: [card.time_us(one) * (1 + 0.01 * number) for number, one in enumerate(works)]
    one, other = bench.pair("a", "b")
    assert "".join("ab"[nbytes] for nbytes in card.replayed) == "a" + "abba" * turns
    assert one == pytest.approx(other)
    assert one == pytest.approx(call_us * (1 + 0.01 * (4 * turns - 1) / 2))


def test_a_pair_in_a_new_process_times_both_warm_first(bench):
    for nbytes, name in enumerate("ab"):
        bench.add(name, candidate(nbytes), cold=False)
    assert bench.pair("a", "b") == (1.0, 1.0)


def test_what_a_trial_proved_is_not_proved_again_but_other_launches_are(bench):
    tried, other = candidate(64), candidate(128)
    bench.trial(tried)
    bench.add("tried", candidate(64), cold=True)
    assert bench.session.proved == [tried.timed]
    assert bench.replay("tried", "warm") == 1.0
    bench.session.write(stale)  # from now on
    with pytest.raises(WrongResult):
        bench.replay("tried", "warm")
    bench.add("other", other, cold=False)
    assert bench.session.proved == [tried.timed, other.timed]


def test_a_candidate_is_tried_in_8_calls_one_by_one_and_a_finalist_in_7000(bench):
    accuracy, first = bench.trial(candidate(64))
    assert (accuracy.calls, first.time_us, first.sm_mhz) == (8, 1.0, 1980.0)
    bench.add("a", candidate(64), cold=False)
    assert 7_001 <= bench.confirm("a", 200_000.0) < 7_200  # and one on hard inputs
    assert bench.session.hard == ["judged"]
    bench.session.issue_us = bench.session.call_us = 1_000.0  # whose calls would take too long
    assert bench.confirm("a", 200_000.0) < 240
    assert bench.trial(candidate(32))[0].calls == 2


@pytest.mark.parametrize("wrong_look", [2, 6, 9])
def test_a_race_in_a_timed_replay_of_a_trial_or_a_call_made_alone_is_found(bench, wrong_look):
    bench.session.write(wrong_at(wrong_look))
    with pytest.raises(WrongResult, match="a race"):
        bench.trial(candidate(64))


def test_a_finalist_is_confirmed_on_the_timed_problem_and_then_on_short_turns(bench):
    bench.add("turns", candidate(64, turns=7), cold=False)
    assert bench.confirm("turns", 100.0) < 7_000
    calls = bench.confirm("turns", 1e9)
    assert calls >= 14_000
    bench.add("none", candidate(64), cold=False)
    bench.add("again", candidate(64, turns=7), cold=False)  # as on another problem with the same short turns
    for name in ("none", "again"):
        assert 7_000 <= bench.confirm(name, 1e9) < calls
    bench.add("other", candidate(64, turns=9), cold=False)
    assert bench.confirm("other", 1e9) >= 14_000
    assert workspaces(bench) == [64]  # those of short turns are not kept


def test_a_race_that_only_short_turns_show_is_named_so(bench):
    bench.add("turns", candidate(64, turns=7), cold=False)
    bench.session.write(wrong_at(7_500))
    with pytest.raises(WrongResult) as refused:
        bench.confirm("turns", 1e9)
    begin, _, end = refused.value.detail.partition(": a race, or an answer kept")
    assert begin == "right in all other cases, but not in many short turns"
    assert ": 1 of " in end
    assert "((5,1,300x64,64) fp16 full, normal)" in end
    bench.session.write(stale)
    with pytest.raises(WrongResult) as refused:
        bench.confirm("turns", 1e9)
    assert refused.value.detail.startswith("a race, or an answer kept")
    del refused
    assert workspaces(bench) == [64]


@pytest.mark.parametrize("once_us", [5_000.0, 9.0])
def test_a_host_that_stood_still_at_first_makes_no_graph_of_one_call(bench, once_us):
    """Or an eager call's time is taken for one of a graph."""
    card, play = bench.session, bench.session.replay
    card.call_us, card.issue_us = 9.0, once_us

    def replay(plan, calls):
        card.clock_us += 13.0  # what a graph's own launch adds
        play(plan, calls)

    card.replay = replay
    _, first = bench.trial(candidate(64))
    assert first.time_us < 9.7
    assert 22 <= card.captured[-1] <= 34


# ---- long calls: nothing is called that their times and proof do not need ----
@pytest.fixture
def long(bench_of):
    return bench_of(LONG)


def test_graphs_hold_one_call_and_none_is_made_to_find_that(long):
    long.add("a", candidate(64), cold=True)
    for kind in ("warm", "cold", "fwd"):
        long.replay("a", kind)
    assert long.race("a", 300.0, "cold") == (1.0, 2)  # and the calls launched
    assert (long.session.captured, long.session.issued) == ([1] * 3, 0)
    assert len(long.session.replayed) == 4
    assert long.session.copied == []  # of the inputs


def test_a_trial_counts_the_call_that_it_timed_and_makes_no_more(long):
    long.session.call_us = 25_000.0
    accuracy, first = long.trial(candidate(64))
    assert (accuracy.calls, first.time_us) == (1, 25_000.0)
    assert (long.session.replayed, long.session.issued) == ([64], 0)


@pytest.mark.parametrize("call_us", [25_000.0, 180_000.0, 900_000.0])
def test_two_calls_of_the_winner_are_compared_and_none_of_others(long, call_us):
    """The finals ask for 200 ms of the winner, and for 2 ms of each other."""
    long.session.call_us = long.session.issue_us = call_us
    for name, turns in (("a", None), ("turns", 7)):
        long.add(name, candidate(64, turns), cold=False)
        long.replay(name, "warm")
        assert long.confirm(name, 2_000.0) == 0
    assert long.session.issued == 0
    assert long.confirm("a", 200_000.0) == long.session.issued == 2
    assert long.confirm("turns", 1e12) >= 7_002
    long.session.write(wrong_at(1))
    with pytest.raises(WrongResult, match="a race"):
        long.confirm("a", 200_000.0)


@pytest.mark.parametrize(("problem", "calls"), [(LONG, 5), (PROBLEM, 100)])
def test_the_hosts_cost_is_of_one_call_where_no_time_is_known(bench_of, problem, calls):
    bench = bench_of(problem)
    bench.add("a", candidate(64), cold=False)
    bench.eager_us("a")
    assert bench.session.issued == calls


def test_the_output_is_looked_at_before_the_host_waits_for_the_replay(bench):
    """So that the look is ready when the time is: nothing is launched between."""
    bench.add("a", candidate(64), cold=False)
    bench.replay("a", "warm")
    order = []

    def time_us(work, then):
        work()
        order.append("replayed")
        then()
        order.append("waited")
        return 10.0

    bench.session.time_us = time_us
    bench.session.write(lambda look, mix: order.append("look") or right(look, mix))
    bench.replay("a", "warm")
    assert order == ["replayed", "look", "waited"]
