"""What is right of a problem, computed by helper processes."""

import sys
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest

from attnsweep.core import cases
from attnsweep.core.layouts import Padded
from attnsweep.core.masks import pattern
from attnsweep.core.ops import BACKWARD
from attnsweep.core.problem import Problem
from attnsweep.core.scores import Scores
from attnsweep.verify import inputs, limits, reference_pool, rounded
from attnsweep.verify.oracle import oracle_of
from attnsweep.verify.reference_pool import Answer, ReferencePool, rounding, turns
from attnsweep.verify.sample import Sample

PROBLEM, OTHER = Problem(1, 2, 1, 64, 64, 16), Problem(1, 1, 1, 32, 48, 16, "bf16")


@pytest.fixture
def pool():
    """Makes a pool that gives a process the smallest problem."""
    made = []

    def of(*program, **options):
        command = {"command": program} if program else {}
        made.append(ReferencePool(least_bytes=0, **command, **options))
        return made[-1]

    yield of
    for each in made:
        each.close()


def processes():
    """Those of a pool."""
    own = psutil.Process().children()
    return [each for each in own if reference_pool.__name__ in " ".join(each.cmdline())]


def equal(one, other):
    both = ([each.timed, each.hard, *each.small] for each in (one, other))
    for known, again in zip(*both, strict=True):
        same_known(known, again)
    assert one.maths == other.maths


def same_known(known, again):
    for name, bits in known.inputs.items():
        assert (bits == again.inputs[name]).all()
    assert known.rows.keys() == again.rows.keys()
    assert all((rows == again.rows[name]).all() for name, rows in known.rows.items())
    for side, same in zip(known.sides, again.sides, strict=True):
        assert {*side} == {*same} == {*known.rows}
        assert all((exact == same[name]).all() for name, exact in side.items())


def test_the_processes_answer_what_this_one_would_and_are_replaced_if_they_die(pool):
    ahead, case = pool(), cases.short_turns(PROBLEM, 1)
    for problem in (PROBLEM, OTHER):
        ahead.begin(problem, 3)
    ahead.begin_rounding(PROBLEM, 1)
    ahead.begin_turns(case, 3)
    one = ahead.take(PROBLEM, 3)
    equal(one, Answer.of(PROBLEM, 3))
    equal(ahead.take(OTHER, 4), Answer.of(OTHER, 4))
    expected = rounding(PROBLEM, 1)
    assert ahead.rounding(PROBLEM, 1) == ahead.rounding(PROBLEM, 1) == expected
    hard = cases.hard_case(PROBLEM)
    assert {*expected} == {(c, 1) for c in (cases.Case(PROBLEM), *cases.small_cases(PROBLEM))}
    for often in (0, 1):
        same = {"o": limits.same_maths(hard, often)}
        assert ahead.rounding(PROBLEM, often, hard=True) == {(hard, often): same}
    known, maths = ahead.turns(case, 3)
    same_known(known, turns(case, 3)[0])
    assert maths == {(case, 0): {"o": limits.same_maths(case, 0)}}
    first = processes()
    assert len(first) == 3
    for each in first:
        each.kill()
    psutil.wait_procs(first)
    again = ahead.take(PROBLEM, 4)  # without a process
    assert (again.timed.inputs["q"] != one.timed.inputs["q"]).any()
    equal(ahead.take(PROBLEM, 5), Answer.of(PROBLEM, 5))
    assert len(processes()) == 1


MORE = [replace(PROBLEM, scores=Scores(30.0, True, ("head",))), replace(OTHER, layout=Padded("left", 0))]
MORE += [replace(OTHER, dtype="fp32"), Problem(2, 2, 1, 70, 90, 8, "bf16", mask=pattern("holes", 30))]


@pytest.mark.parametrize("problem", [PROBLEM, *MORE], ids=str)
def test_the_hard_case_has_larger_queries_and_what_is_right_of_them(problem):
    case, known = cases.hard_case(problem), Answer.of(problem, 3).hard
    larger = inputs.harder(inputs.make_inputs(cases.Case(problem), 3)["q"], case)
    given = {**inputs.make_inputs(case, 3), "q": larger}
    again = oracle_of(problem).expected(case, 3, sample=Sample.of(problem, 3), given=given)
    same_known(known, again)
    assert {*known.inputs} == {*given}
    assert len(known.sides) == 1


def test_gradients_and_scaled_problems_have_no_hard_case_of_ours():
    for problem in (Problem(1, 1, 1, 8, 8, 16, op=BACKWARD), Problem(1, 1, 1, 8, 8, 16, "e4m3")):
        assert Answer.of(problem, 3).hard is None


@pytest.fixture
def first_sleeps(pool, tmp_path):
    """A pool whose first process answers nothing, and a file that tells when it has started."""
    met = tmp_path / "met"
    program = (
        f"import pathlib, time; met = pathlib.Path({str(met)!r})\n"
        "if not met.exists():\n    met.touch()\n    time.sleep(1000)\n"
        f"from {reference_pool.__name__} import main; main()"
    )
    return pool(sys.executable, "-c", program), met


def test_what_this_problem_needs_waits_for_no_other(first_sleeps):
    """Another problem may come than was expected; the process of that one sleeps here."""
    ahead, met = first_sleeps
    ahead.begin(OTHER, 3)
    while not met.exists():
        time.sleep(0.01)
    begun, case = time.monotonic(), cases.short_turns(PROBLEM, 1)
    assert ahead.rounding(PROBLEM, 1) == rounding(PROBLEM, 1)
    assert ahead.turns(case, 3)[1] == turns(case, 3)[1]
    equal(ahead.take(PROBLEM, 4), Answer.of(PROBLEM, 4))
    equal(ahead.take(OTHER, 3), Answer.of(OTHER, 3))  # it may be wanted later
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("dtype", ["fp16", "e4m3_block"])
def test_few_rows_of_every_head_are_known_of_short_turns_on_both_sides(dtype):
    case = cases.short_turns(Problem(1, 4, 2, 500, 500, 32, dtype, causal=True), 2)
    (known, _), p = turns(case, 3), case.problem
    rows = known.rows["o"]
    assert {0, 63, 64, p.seqlen_q - 1} <= {*rows.tolist()}
    assert len(rows) < p.seqlen_q / 4
    plain, opposite = (side["o"] for side in known.sides)
    assert plain.shape == opposite.shape == (p.batch, p.heads, len(rows), p.head_dim)
    assert np.array_equal(plain, rounded.reference(known.inputs, p, rows))
    assert known.drawn is known.exact is None


HALF = "import sys, pickle; b = pickle.dumps([0] * 999); sys.stdout.buffer.write(b[: len(b) // 2]); sys.stdout.flush()"
STOPPED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.parametrize(
    "command",
    [(sys.executable, "-c", HALF), (sys.executable, "-c", STOPPED), ("/no/such/program",)],
    ids=["half an answer", "a stop", "no process"],
)
def test_a_process_that_gives_no_answer_is_done_without(command, pool):
    equal(pool(*command, longest_s=0.5).take(PROBLEM, 3), Answer.of(PROBLEM, 3))


def test_small_problems_start_no_process():
    ahead = ReferencePool()
    equal(ahead.take(PROBLEM, 3), Answer.of(PROBLEM, 3))
    ahead.close()
    assert processes() == []
