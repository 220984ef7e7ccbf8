"""A Bench without a GPU: its buffers, its session, what it runs, and how that is proved."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

from attnsweep.bench.bench import Bench
from attnsweep.compile.launches import Candidate, LaunchPlan
from attnsweep.core import cases
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy
from attnsweep.verify.calls import Proven
from attnsweep.verify.verifier import Verifier

PROBLEM = Problem(1, 1, 1, 64, 64, 64)


class FakeBuffer:
    copied: ClassVar = []
    """A word for each copy; a test clears it."""

    def __init__(self, nbytes, guard=0):
        self.nbytes = nbytes

    def poison(self):
        pass

    def fill(self, byte):
        pass

    def view(self, shape, dtype):
        return self

    def copy_from(self, other):
        self.copied.append("copy")


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

    def turn(self, copy=0, *, back=False, every=True):
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

    outputs = ("o",)
    redraws, content = False, 0

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

    look_at_inputs = renew_inputs = poison = draw_ahead


class FakeProof(Verifier):
    """A Verifier whose Comparer sees these digests, and which finds whatever is bound right.

    outputs: gets the number of the look, and the mix.
    """

    def __init__(self, outputs):
        self._session, self._seed, self._poisons = FakeSession(), 0, False
        self._preparation = None
        self.timed, self.timed.mix = PROVEN.fixture, 0
        self._judge = FakeJudge(outputs)

    def of_candidate(self, candidate, call, bind, workspaces, *, small):
        for launches in candidate.checks:
            bind(launches, [])
        return Accuracy(rel_err=0.0, limit=1.0), replace(PROVEN, call=call)

    def prepare_hard(self, rounds_scores):
        """It has what on_hard needs."""

    def on_hard(self, proven, replay):
        replay()
        return 1

    def of_turns(self, candidate, bind, workspaces):
        if candidate.turns is None:
            return None
        return replace(TURNS, call=bind(candidate.turns, [TURNS.fixture.buffers]))


PROVEN = Proven(*(FakeFixture(PROBLEM), FakePipeline(None, None, []), True, 0), np.array([[100], [101]], np.uint64))
TURNS = replace(PROVEN, fixture=FakeFixture(cases.short_turns(PROBLEM, 2).problem))


class FakeBench(Bench):
    """A bench of PROBLEM whose candidates are right, and whose calls take 1 µs."""

    def __init__(self):
        self.session, self.problem = FakeSession(), PROBLEM
        self._workspaces, self._entries, self._cold_copies = {}, {}, []
        self._right, self._launch_times, self._launched = {}, {}, 0
        self._judged = Counter()
        self._owned = SimpleNamespace(triton=None, right_on_short=set(), imports=SimpleNamespace(end=lambda: None))
        self._proof = FakeProof(lambda look, side: 100 + side)

    def _screen(self, call, stage=None, proven=None):
        return 1.0


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
