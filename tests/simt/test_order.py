"""Families with seqlen before heads: what they are given, and what of theirs is judged."""

import numpy as np
import pytest

from attnsweep.compile.launches import Candidate, CompiledStage, LaunchPlan
from attnsweep.core.cases import Case
from attnsweep.core.ops import of_heads
from attnsweep.core.problem import BACKWARD, CAUSAL, Problem
from attnsweep.device.bound_call import BoundCall
from attnsweep.family.discover import discover
from attnsweep.family.family import Launch
from attnsweep.tools import inline as scaffold
from attnsweep.verify.device_case import WrongResult
from attnsweep.verify.verifier import Verifier

from .device import GUARD_BYTES, HostBuffer
from .harness import COMPILER, config_of
from .proving import attend, differentiate

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

PROBLEM = Problem(2, 4, 2, 9, 20, 16, "bf16")


# -- templates on the CPU ---------------------------------------------------------------------


@pytest.fixture
def family(tmp_path):
    """The smallest family, written for an order and declared in one."""

    def made(written, declared):
        (tmp_path / "mine.cu").write_text(scaffold.template("mine", None, written))
        (tmp_path / "mine.py").write_text(scaffold.declaration("mine", declared))
        return discover(tmp_path)["mine"]

    return made


@pytest.mark.parametrize("heads", ["4/2", "1"])
@pytest.mark.parametrize("declared", ["bhsd", "bshd"])
@pytest.mark.parametrize("written", ["bhsd", "bshd"])
def test_a_template_is_right_in_the_order_that_it_declares(written, declared, heads, family, simulator):
    mine = family(written, declared)
    problem = Problem.parse(f"2,{heads},65x131,64")
    found = simulator.check(mine, config_of(mine, ""), Case(problem))
    assert found.ok == (written == declared or heads == "1"), found  # one head has one order


# -- what is judged ---------------------------------------------------------------------------


class Bench:
    """A Verifier, and candidates in Python whose tensors lie in the other order."""

    def __init__(self, device, problem):
        self.device, self.problem = device, problem
        self.proof = Verifier(problem, 3, device)
        self.own = {}

    def bind(self, write, copies=()):
        """A call of `write`, which gets the problem, the buffers and the call's number."""
        count = iter(range(10**6))
        stage = CompiledStage("fwd", "x", Launch("f", (1, 1, 1), 32, ()))
        plan = LaunchPlan(self.problem, (stage,), {}, turned=True)
        self.device.bind = lambda _, at: lambda: write(self.problem, at, next(count))
        return plan, BoundCall(self.device, plan, [self.proof.timed.buffers, *copies])

    def prove(self, write, copies=(), **facts):
        plan, self.call = self.bind(write, copies)
        candidate = Candidate("k", {}, plan, (), 0, **facts)
        return self.proof.of_candidate(candidate, self.call, None, {}, small=False)

    def replay(self, proven, *, cold=()):
        """A replay of calls on each copy, judged as the bench judges it."""
        with self.device.stream:
            (self.proof.begin_cold(cold) if cold else self.proof.begin(proven))
            self.call.refresh(None if cold else 1)
            self.call.capture(1 + len(cold), rotate=bool(cold))()
            return self.proof.end(proven, cold)


@pytest.fixture
def bench(device, no_small_cases):
    return Bench(device, PROBLEM)


def in_rows_first(work):
    """A call that has the order: on tensors as of a problem, whose outputs it then turns."""

    def write(problem, buffers, number=0):
        shapes, own = of_heads(problem), dict(buffers)
        for name, shape in shapes.items():
            own[name] = HostBuffer(buffers[name].nbytes)
            turn(buffers[name], own[name], (shape[0], shape[2], shape[1], shape[3]))
        work(problem, own, number)
        for name in problem.outputs:
            turn(own[name], buffers[name], shapes[name])

    return write


def turn(of, to, shape):
    """Copy a tensor of a shape, with its second and third sizes in turn."""
    kind = f"u{of.nbytes // int(np.prod(shape))}"
    to.upload(np.ascontiguousarray(of.of(kind).reshape(shape).swapaxes(1, 2)))


right = in_rows_first(attend)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_call_in_its_order_is_right_whenever_it_is_judged(deterministic, bench):
    accuracy, proven = bench.prove(right, deterministic=deterministic)
    assert accuracy.rel_err < accuracy.limit
    assert bench.proof.repeat(proven, 12, 1e3) >= 12
    assert bench.proof.repeat(proven, 80, 1e4) >= 80  # in graphs
    for _ in range(3):
        assert bench.replay(proven) == 1


@pytest.mark.parametrize(
    ("problem", "work"),
    [
        (Problem(1, 2, 2, 12, 12, 16, "fp16", op=BACKWARD), differentiate),
        (Problem(1, 4, 2, 12, 20, 16, "fp16", CAUSAL), attend),
        (Problem(2, 4, 2, 9, 20, 24, "fp32", head_dim_v=8), attend),
        (Problem(2, 4, 2, 9, 20, 16, "e4m3"), attend),
    ],
    ids=["gradients", "causal", "v's own head_dim", "fp8"],
)
def test_other_problems_are_judged_in_that_order_too(problem, work, device, no_small_cases):
    bench = Bench(device, problem)
    _, proven = bench.prove(in_rows_first(work))
    for _ in range(2):
        bench.replay(proven)
    with pytest.raises(WrongResult, match=r"over the limit|NaN"):
        bench.prove(work)


def late(work, first):
    """Right until a call of this number."""
    return lambda p, buffers, n=0: (right if n < first else work)(p, buffers, n)


def writes_nothing(problem, buffers, number):
    """Leaves the output as it is."""


def beside(problem, buffers, number):
    right(problem, buffers)
    buffers["o"].all[GUARD_BYTES + buffers["o"].nbytes + 7] ^= 1


def to_an_input(problem, buffers, number):
    right(problem, buffers)
    buffers["v"].main[5] = 0x11


LATER = r"a race|NaN|over the limit"
WRONG = {
    "ignores the order": (attend, "over the limit"),
    "writes nothing": (writes_nothing, "NaN or were never written"),
    "writes beside its output": (beside, "wrote 1 bytes outside 'o'"),
    "writes to an input": (to_an_input, "wrote to its inputs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused(name, bench):
    work, said = WRONG[name]
    with pytest.raises(WrongResult, match=said):
        bench.prove(work)
    bench.prove(right)  # and leaves no damage


@pytest.mark.parametrize("work", [attend, writes_nothing])
def test_a_call_that_is_wrong_later_is_refused(work, bench):
    _, proven = bench.prove(late(work, 9))  # two checked calls, two that tell the time
    with pytest.raises(WrongResult, match=LATER):
        bench.proof.repeat(proven, 12, 1e3)
    _, proven = bench.prove(late(work, 2))
    with pytest.raises(WrongResult, match=LATER):
        _ = [bench.replay(proven) for _ in range(2)]  # one with a poisoned output


def test_every_cold_copy_has_tensors_of_its_own(bench):
    names = bench.proof.timed.buffers
    copies = [{name: HostBuffer(b.nbytes) for name, b in names.items()} for _ in range(3)]
    for copy in copies:
        for name, buffer in copy.items():
            buffer.copy_from(names[name])
    _, proven = bench.prove(right, copies)
    assert bench.replay(proven, cold=copies) > 1
    _, proven = bench.prove(late(writes_nothing, 3), copies)
    with pytest.raises(WrongResult, match=LATER):
        bench.replay(proven, cold=copies)
