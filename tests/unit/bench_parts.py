"""A Bench without a GPU: its buffers, its session, what it runs, and how that is proved."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from attnsweep.bench import bench as measure
from attnsweep.bench.bench import Bench
from attnsweep.compile.launches import Candidate, LaunchPlan
from attnsweep.core import cases
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy
from attnsweep.verify.verifier import Proven, Verifier

PROBLEM = Problem(1, 1, 1, 64, 64, 64)


class FakeBuffer:
    def __init__(self, nbytes, guard=0):
        self.nbytes = nbytes

    def poison(self):
        pass

    def fill(self, byte):
        pass

    def view(self, shape, dtype):
        return self

    def copy_from(self, other):
        pass


class FakeSession:
    stream = nullcontext()

    def release(self):
        pass

    def synchronize(self):
        pass

    settle = synchronize

    def time_us(self, work, then=None):
        work()
        if then is not None:
            then()
        return 10.0

    def record(self):
        return 0.0

    def elapsed_us(self, begin, end):
        return end - begin

    def sm_mhz(self):
        return 1980.0


class FakePipeline:
    stage_names, once_names = ("fwd",), ()

    def __init__(self, session, plan, copies):
        self.copies = copies

    def enqueue(self):
        pass

    def refresh(self, copies=None):
        pass

    def capture(self, calls, *, after=None, **how):
        return lambda: [after(number) for number in range(calls)] if after else None


class FakeJudge:
    """Sees the outputs that a test says: their digests, by the number of the look and the mix."""

    def __init__(self, outputs):
        self.outputs, self.slots, self.looks = outputs, {}, 0

    def clear(self):
        self.slots = {}

    def digest(self, buffer, slot, *, poison=False):
        fixture = TURNS.fixture if buffer is TURNS.fixture.buffers["o"] else PROVEN.fixture
        self.slots[slot] = self.outputs(self.looks, fixture.mix)
        self.looks += 1

    def counts(self, slots):
        return np.array([self.slots.get(number, 0) for number in range(slots)], np.uint64)


class FakeFixture:
    """One problem with one head of keys, whose inputs are plain or opposite."""

    def __init__(self, problem):
        self.buffers, self.mix = {name: FakeBuffer(8) for name in "qkvo"}, 0
        self.case = cases.Case(problem)

    def draw(self):
        self.mix = 1 - self.mix

    def go_to(self, mix):
        self.mix = mix

    def digest(self, of_sides):
        return int(of_sides[self.mix, 0])

    def draw_ahead(self, *_):
        pass

    look_at_inputs = renew_inputs = draw_ahead


def proof_of(outputs):
    """A Verifier whose Comparer sees these digests; outputs gets the look's number, the mix."""
    made = Verifier.__new__(Verifier)
    made._session, made._seed, made._poisons = FakeSession(), 0, False
    made._preparation = None
    made.timed, made.timed.mix = PROVEN.fixture, 0
    made._judge = FakeJudge(outputs)
    return made


PROVEN = Proven(
    *(FakeFixture(PROBLEM), FakePipeline(None, None, []), True, 0),
    np.array([[100], [101]], np.uint64),
)
TURNS = replace(PROVEN, fixture=FakeFixture(cases.short_turns(PROBLEM, 2).problem))


def made(monkeypatch):
    """A bench of PROBLEM whose candidates are right, and whose calls take 1 µs."""
    monkeypatch.setattr(measure, "Buffer", FakeBuffer)
    monkeypatch.setattr(measure, "BoundCall", FakePipeline)
    made = Bench.__new__(Bench)
    made.session, made.problem = FakeSession(), PROBLEM
    made._workspaces, made._entries, made._cold_copies = {}, {}, []
    made._right = {}
    made._owned = SimpleNamespace(
        triton=None, right_on_short=set(), imports=SimpleNamespace(end=lambda: None)
    )
    made._proof = proof_of(lambda look, side: 100 + side)

    def of_candidate(candidate, call, bind, workspaces, *, small):
        for launches in candidate.checks:
            bind(launches, [])
        return Accuracy(rel_err=0.0, limit=1.0), replace(PROVEN, call=call)

    def of_turns(candidate, bind, workspaces):
        if candidate.turns is None:
            return None
        return replace(TURNS, call=bind(candidate.turns, [TURNS.fixture.buffers]))

    monkeypatch.setattr(made._proof, "of_candidate", of_candidate)
    monkeypatch.setattr(made._proof, "of_turns", of_turns)
    monkeypatch.setattr(made, "_screen", lambda call, stage=None, proven=None: 1.0)
    return made


def candidate(nbytes, turns=None):
    plan = LaunchPlan(PROBLEM, (), {"scores": nbytes})
    return Candidate("k", {}, plan, (), 0, turns=turns)


class Replay:
    """Says who was replayed; its call takes what the clock says."""

    def __init__(self, name, played):
        self.name, self.played = name, played

    def __call__(self):
        self.played.append(self.name)


def in_turns(nbytes=7):
    problem = TURNS.fixture.case.problem
    return candidate(64, LaunchPlan(problem, (), {"scores": nbytes}))
