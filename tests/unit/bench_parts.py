"""A card that no machine has, for a Bench: what a test says of it, and what was done on it."""

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import ClassVar
from weakref import WeakSet

import numpy as np

from attnsweep.compile.launches import Candidate, LaunchPlan
from attnsweep.core import cases
from attnsweep.core.problem import Problem
from attnsweep.core.trial import Accuracy
from attnsweep.verify.calls import Calls, Proven
from attnsweep.verify.verifier import Verifier

PROBLEM = Problem(1, 1, 1, 64, 64, 64)
LONG = Problem(1, 32, 32, 131072, 131072, 128)
SHORT_TURNS = cases.short_turns(PROBLEM, 2).problem


def right(look, mix):
    """What a right call writes: another output for each mix of inputs."""
    return 100 + mix


class FakeBuffer:
    """Memory of the last card; that of a workspace has a size of its own."""

    memory: ClassVar = WeakSet()
    copied: ClassVar = []

    def __init__(self, nbytes, guard=0):
        self.nbytes = nbytes
        self.memory.add(self)

    def poison(self):
        pass

    def fill(self, byte):
        pass

    def view(self, shape, dtype):
        return self

    def copy_from(self, other):
        self.copied.append("copy")


class FakeSession:
    """The card. A test says what a call takes and writes: `call_us`, and by `write`.

    memory: buffers that somebody holds. issued, captured and replayed: the number of eager calls,
    the calls of each graph (rotated: and whether they are on copies), and for each replay the size
    of its workspace. proved, hard: plans that were proved, and what hard inputs were for.
    """

    stream = nullcontext()
    gpu = SimpleNamespace(l2_bytes=32, memory_bytes_per_second=1e9)
    call_us = issue_us = 1.0

    def __init__(self):
        FakeBuffer.memory, FakeBuffer.copied = self.memory, self.copied = WeakSet(), []
        self.issued, self.captured, self.rotated, self.replayed = 0, [], [], []
        self.proved, self.hard = [], []
        self.accuracy = Accuracy(rel_err=0.0, limit=1.0)
        self.clock_us, self.slots = 0.0, {}
        self.write(right)

    def write(self, outputs):
        """outputs: gets the number of the look at them from now on, and the mix of inputs."""
        self.outputs, self.looks = outputs, itertools.count()

    def replay(self, plan, calls):
        self.replayed.append(plan.workspaces["scores"])
        self.clock_us += calls * self.call_us

    def time_us(self, work, then=None):
        began = self.clock_us
        work()
        if then is not None:
            then()
        return self.clock_us - began

    def spans_us(self, works):
        return [self.time_us(work) for work in works]

    def release(self):
        pass

    settle = synchronize = release

    def record(self):
        return 0.0

    def elapsed_us(self, begin, end):
        return end - begin

    def sm_mhz(self):
        return 1980.0


class FakePipeline:
    stage_names, once_names = ("fwd",), ()

    def __init__(self, session, plan, copies):
        self.session, self.plan, self.copies = session, plan, copies

    def enqueue(self, copy=0, stage=None):
        self.session.issued += 1
        self.session.clock_us += self.session.issue_us

    issue = enqueue

    def refresh(self, copies=None):
        pass

    def turn(self, copy=0, *, back=False, every=True):
        pass

    def capture(self, calls, *, rotate=False, stage=None, after=None):
        self.session.captured.append(calls)
        self.session.rotated.append(rotate)

        def replay():
            self.session.replay(self.plan, calls)
            for number in range(calls if after else 0):
                after(number)

        return replay


class FakeBaseline(FakePipeline):
    """A callable's calls."""

    stage_names, rounds_scores, issued, gives_lse, kept = (), 0, None, False, None

    def keep(self, nbytes, session):
        pass

    def out_of_step(self, calls):
        pass


@dataclass
class FakeFixture:
    """One problem with one head of keys, whose inputs are plain or opposite."""

    case: cases.Case
    buffers: dict[str, FakeBuffer] = field(default_factory=lambda: {name: FakeBuffer(8) for name in "qkvo"})
    mix: int = 0
    outputs: ClassVar = ("o",)
    redraws, content = False, 0

    def draw(self):
        self.mix = 1 - self.mix

    def go_to(self, mix):
        self.mix = mix

    def digest(self, of_sides):
        return int(of_sides[self.mix, 0])

    def draw_ahead(self, *_):
        pass

    look_at_inputs = renew_inputs = poison = draw_ahead


class FakeJudge:
    """Sees the outputs that a test says."""

    def __init__(self, session, *fixtures):
        self.session, self.fixtures, self.slots = session, fixtures, {}

    def clear(self):
        self.slots = {}

    def digest(self, buffers, slot, *, poison=False):
        timed, turns = self.fixtures
        for number, buffer in enumerate(buffers, slot):
            of = turns if buffer is turns.buffers["o"] else timed
            self.slots[number] = self.session.outputs(next(self.session.looks), of.mix)

    def regions(self, every):
        return every

    def renew(self, regions, guard_bytes):
        pass

    def counts(self, slots):
        return np.array([self.slots.get(number, 0) for number in range(slots)], np.uint64)


class FakeProof(Verifier):
    """A Verifier that finds whatever is bound right, and then judges what its calls write."""

    def __init__(self, problem=PROBLEM, seed=0, session=None, *_):
        self.card = session = session or FakeSession()
        timed, turns = (FakeFixture(cases.Case(each)) for each in (problem, SHORT_TURNS))
        Calls.__init__(self, timed, session, FakeJudge(session, timed, turns), {})
        session.timed, self.short = timed, turns

    def proven(self, call=None):
        digests = np.array([[100], [101]], np.uint64)
        call = call or FakePipeline(self.card, LaunchPlan(PROBLEM, (), {"scores": 0}), [])
        return Proven(self.timed, call, True, 0, digests)

    def of_candidate(self, candidate, call, bind, workspaces, *, small):
        self.card.proved.append(candidate.timed)
        return self.card.accuracy, self.proven(call)

    def of_baseline(self, call, *_, **how):
        return self.card.accuracy, self.proven(call)

    def hard(self, rounds_scores):
        self.card.hard.append(rounds_scores)

    def prepare_hard(self, rounds_scores):
        """It has what on_hard needs."""

    def on_hard(self, proven, replay):
        self.card.hard.append("judged")
        replay()
        return 1

    def of_turns(self, candidate, bind, workspaces):
        if candidate.turns is None:
            return None
        call = bind(candidate.turns, [self.short.buffers])
        return replace(self.proven(call), device_case=self.short)


def candidate(nbytes, turns=None):
    """nbytes: of its workspace, by which it is told from others. turns: the same on short turns."""
    turns = turns and LaunchPlan(SHORT_TURNS, (), {"scores": turns})
    return Candidate("k", {}, LaunchPlan(PROBLEM, (), {"scores": nbytes}), (), 0, turns=turns)
