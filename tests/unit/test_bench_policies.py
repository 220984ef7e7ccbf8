"""How often is called, what inputs calls have, what is kept, and what is taken off: each alone."""

import itertools
from types import SimpleNamespace

import pytest
from bench_parts import PROBLEM, SHORT_TURNS, FakeBuffer, FakePipeline, FakeSession

from attnsweep.bench import problem as opening
from attnsweep.bench import timer
from attnsweep.bench.effort import Long, Short
from attnsweep.bench.strict import ChainedEntry, EmptyChains
from attnsweep.compile.launches import LaunchPlan
from attnsweep.verify.device_case import WrongResult


@pytest.mark.parametrize(
    ("times", "first_us", "asked"),
    [
        ([3.2, 3.1, 3.3], 3.2, 3),
        ([3.2, 3296.0, 3296.0, 3.1, 3.1, 3.2], 3.1, 6),  # two of three met something else
        ([3.2, 3.2, 5.0, 3.1], 3.1, 6),  # one did
        ([3296.0] * 3 + [3.1], 3.1, 6),  # all three did, and agree
        ([3296.0] * 6 + [3.1], 3.1, 9),
        ([3296.0], 3296.0, 15),  # it is what it is; the rounds will tell
        ([10_000.0], 10_000.0, 3),  # one call outlasts a replay
    ],
)
def test_a_first_time_that_is_contradicted_is_taken_again(times, first_us, asked):
    made, rest = [], itertools.chain(times, itertools.repeat(times[-1]))

    def sample():
        made.append(next(rest))
        return made[-1]

    assert Short().first_us(sample, 1 if times == [10_000.0] else 94) == first_us
    assert len(made) == asked
    del made[:]
    assert Long().first_us(sample, 1) == made[0]
    assert len(made) == 1


@pytest.mark.parametrize(
    ("effort", "longest_us", "warm_us", "most"),
    [
        (Short(), 2_000.0, 25_000.0, 7_000),
        (Long(), 2_000.0, 25_000.0, 0),
        (Long(), 19_000.0, 900_000.0, 0),
        (Long(), 200_000.0, 900_000.0, 2),
        (Long(), 2_000.0, 0.0, 2),  # in a new process, which has not timed it
    ],
)
def test_few_long_calls_confirm_an_entry_and_none_one_that_may_not_take_long(effort, longest_us, warm_us, most):
    assert effort.confirming(longest_us, warm_us)[0] == most


@pytest.mark.parametrize(("warm_us", "calls"), [(0.0, 20), (3.0, 20), (500.0, 4), (30_000.0, 1)])
def test_the_device_does_not_fall_behind_while_the_host_is_timed(warm_us, calls):
    assert Short().eager_calls(warm_us) == calls
    assert Long().eager_calls(warm_us) == 1


class Proof:
    """Says what it is asked for; what it looks at is wrong."""

    def __init__(self):
        self.log = []
        case = SimpleNamespace(buffers={"q": FakeBuffer(64), "o": FakeBuffer(64)}, go_to=lambda side: None, content=0)
        self.timed, self.session = case, FakeSession()

    def __getattr__(self, name):
        return lambda *given, **how: self.log.append((name, *(len(one) for one in given if isinstance(one, list))))

    def end(self, proven, copies=(), **how):
        raise WrongResult("no")


@pytest.fixture
def cold(monkeypatch):
    """Cold inputs of a problem of 128 bytes, where 32 of L2 are read three times."""
    monkeypatch.setattr(timer, "Buffer", FakeBuffer)
    proof = Proof()
    opened = SimpleNamespace(proof=proof, session=proof.session, timed=proof.timed.buffers)
    return lambda effort: (timer.Cold(opened, effort), proof)


@pytest.mark.parametrize(("effort", "copies"), [(Short(), 1), (Long(), 0)])
def test_a_wrong_cold_call_has_the_inputs_of_all_copies_mended(cold, effort, copies):
    inputs, proof = cold(effort)
    refreshed = []
    inputs.begin(SimpleNamespace(refresh=lambda *of: refreshed.append(of)), None)
    with pytest.raises(WrongResult):
        inputs.end(None)
    assert proof.log == [("begin_cold", copies), ("mend", copies)]
    assert refreshed == [()]
    assert inputs.look(None) is None  # all outputs are compared, where they are known
    proof.timed.content = 7
    inputs.look(None)()
    assert proof.log[2:] == [("look", copies)]


def test_a_workspace_is_shared_by_launches_that_need_its_very_size(monkeypatch):
    for name, fake in (("Buffer", FakeBuffer), ("BoundCall", FakePipeline)):
        monkeypatch.setattr(opening, name, fake)
    plans = [LaunchPlan(problem, (), {"o": size}) for problem, size in ((PROBLEM, 1), (SHORT_TURNS, 1), (PROBLEM, 2))]
    workspaces = opening.Workspaces(FakeSession())
    one, same, other = (workspaces.bind(plan, [{}]).copies[0]["o"] for plan in plans)
    assert one is same
    assert one is not other
    workspaces.entries["b"] = plans[2]
    workspaces.free_others(plans[0])
    assert [*workspaces] == [("o", 1), ("o", 2)]
    workspaces.free_others()
    assert [*workspaces] == [("o", 2)]


def test_what_empty_chains_take_is_what_they_took_before_any_stranger_ran():
    empty = EmptyChains()
    empty.begin(8, [(10.0, 40.0), (12.0, 42.0), (11.0, 41.0)])
    assert empty.usual_us == {8: (11.0, 41.0)}
    assert [empty.is_busy(8, (11.0, took)) for took in (261.0, 262.0)] == [False, True]
    assert empty.taken_off_us(8, 9.0, 1.0) == 9.0
    assert empty.taken_off_us(8, 90.0, 2.0) == pytest.approx(1.05 * 2.0 * 11.0)
    entry = ChainedEntry(None, True, 0, calls=8, claims=[100.0], apart=[30.0 + 8 * 5.0])
    assert empty.hidden_us(entry) == pytest.approx((5.0, 0.5 + 3.0))
