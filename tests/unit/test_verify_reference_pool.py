"""What is right of a problem, computed by processes beside."""

from __future__ import annotations

import sys
from concurrent.futures import CancelledError

import numpy as np
import pytest

from attnsweep.core import cases
from attnsweep.core.problem import Problem
from attnsweep.verify import limits, reference_pool, rounded
from attnsweep.verify.expected import Known
from attnsweep.verify.reference_pool import Answer, ReferencePool, rounding, turns

PROBLEM, OTHER = Problem(1, 2, 1, 64, 64, 16), Problem(1, 1, 1, 32, 48, 16, "bf16")


@pytest.fixture
def ahead(monkeypatch):
    monkeypatch.setattr(reference_pool, "_LEAST_BYTES", 0)
    made = ReferencePool()
    yield made
    made.close()


def equal(one, other):
    for known, again in zip([one.timed, *one.small], [other.timed, *other.small], strict=True):
        for name, bits in known.inputs.items():
            assert (bits == again.inputs[name]).all()
        assert (known.rows == again.rows).all()
        for side, same in zip(known.sides, again.sides, strict=True):
            assert all((a == b).all() for a, b in zip(side, same, strict=True))
    assert one.maths == other.maths


def test_the_process_answers_what_this_one_would(ahead):
    ahead.begin(PROBLEM, 3)
    ahead.begin(OTHER, 3)
    equal(ahead.take(PROBLEM, 3), Answer.of(PROBLEM, 3))
    first = ahead._next.beside.process.pid
    equal(ahead.take(OTHER, 4), Answer.of(OTHER, 4))
    assert ahead._next.beside.process.pid == first
    one, other = (ahead.take(PROBLEM, seed).timed.inputs["q"] for seed in (3, 4))
    assert (one != other).any()


def test_a_process_that_died_is_done_without_and_replaced(ahead):
    ahead.take(PROBLEM, 3)
    first = ahead._next.beside.process
    first.kill()
    first.wait()
    equal(ahead.take(PROBLEM, 4), Answer.of(PROBLEM, 4))
    equal(ahead.take(PROBLEM, 5), Answer.of(PROBLEM, 5))
    assert ahead._next.beside.process.pid != first.pid


def test_the_process_computes_what_limits_of_rounded_scores_come_from(ahead, monkeypatch):
    expected = rounding(PROBLEM, 1)
    assert all(often == 1 for _, often in expected)
    assert {case for case, _ in expected} >= {cases.Case(PROBLEM)}

    def here(case, rounds_scores):
        raise AssertionError("computed in this process")

    monkeypatch.setattr(limits, "same_maths", here)
    ahead.begin_rounding(PROBLEM, 1)
    assert ahead.rounding(PROBLEM, 1) == expected
    assert ahead.rounding(PROBLEM, 1) == expected  # kept, for other candidates and baselines
    ahead.begin_rounding(OTHER, 2)  # the next problem's
    assert ahead.rounding(PROBLEM, 1) == expected
    begun = ahead._maths[OTHER, 2]
    assert len(ahead.rounding(OTHER, 2)) == len(expected)
    assert ahead._maths == {(OTHER, 2): begun}


def test_the_process_computes_what_short_turns_need_and_keeps_a_few(ahead, monkeypatch):
    case, other = (cases.short_turns(problem, 1) for problem in (PROBLEM, OTHER))
    known, maths = turns(case, 3)
    assert maths == {(case, 0): limits.same_maths(case, 0)}

    def here(case, rounds_scores):
        raise AssertionError("computed in this process")

    monkeypatch.setattr(limits, "same_maths", here)
    ahead.begin_turns(other, 3)
    ahead.begin_turns(case, 3)
    ahead.wait()
    again, said = ahead.turns(case, 3)
    assert said == maths
    assert all((known.inputs[name] == bits).all() for name, bits in again.inputs.items())
    for side, same in zip(known.sides, again.sides, strict=True):
        assert all((a == b).all() for a, b in zip(side, same, strict=True))
    begun = ahead._turns[case, 3]
    ahead.begin_turns(case, 3)  # the next problem may have the same
    assert ahead._turns[case, 3] is begun
    for seed in range(4, 20):
        ahead.begin_turns(other, seed)
    assert [*ahead._turns] == [(other, seed) for seed in range(20 - reference_pool._TURNS_KEPT, 20)]


@pytest.fixture
def first_sleeps(monkeypatch, tmp_path):
    """The first process that starts answers nothing; where a file tells that it has started."""
    met = tmp_path / "met"
    program = (
        f"import pathlib, time; met = pathlib.Path({str(met)!r})\n"
        "if not met.exists():\n    met.touch()\n    time.sleep(1000)\n"
        f"from {reference_pool.__name__} import main; main()"
    )
    monkeypatch.setattr(reference_pool, "_COMMAND", [sys.executable, "-c", program])
    return met


def test_what_this_problem_needs_does_not_wait_for_the_next_one(ahead, first_sleeps):
    """The next one's process sleeps here; this one's answers."""
    ahead.begin(OTHER, 3)
    while not first_sleeps.exists():
        assert not ahead._answers[OTHER, 3].done()
    case = cases.short_turns(PROBLEM, 1)
    assert ahead.rounding(PROBLEM, 1) == rounding(PROBLEM, 1)
    assert ahead.turns(case, 3)[1] == turns(case, 3)[1]
    assert not ahead._answers[OTHER, 3].done()


def test_what_was_begun_for_another_problem_is_not_waited_for(ahead, first_sleeps, monkeypatch):
    """A card that was expected to open a problem may get another one first."""
    expected = Answer.of(OTHER, 4)

    def here(*args):
        raise AssertionError("computed in this process")

    monkeypatch.setattr(limits, "same_maths", here)
    ahead.begin(PROBLEM, 3)
    begun = ahead._answers[PROBLEM, 3]
    while not first_sleeps.exists():
        assert not begun.done()
    equal(ahead.take(OTHER, 4), expected)
    with pytest.raises(CancelledError):
        begun.result(0)
    equal(ahead.take(PROBLEM, 3), ahead.take(PROBLEM, 3))  # it may be wanted later


@pytest.mark.parametrize("dtype", ["fp16", "e4m3_block"])
def test_few_rows_of_every_head_are_known_of_short_turns_on_both_sides(dtype):
    case = cases.short_turns(Problem(1, 4, 2, 500, 500, 32, dtype, causal=True), 2)
    known, p = Known.of_turns(case, 3), case.problem
    assert {0, 63, 64, p.seqlen_q - 1} <= {*known.rows.tolist()}
    assert len(known.rows) < p.seqlen_q / 4
    plain, opposite = (out for out, _ in known.sides)
    shape = (p.batch, p.heads, len(known.rows), p.head_dim)
    assert plain.shape == opposite.shape == shape
    assert np.array_equal(plain, rounded.reference(known.inputs, p, known.rows))
    assert known.drawn is known.exact is None


NONSENSE = {
    "words": "import this",
    "half an answer": "import sys, pickle; b = pickle.dumps([0] * 999); "
    "sys.stdout.buffer.write(b[: len(b) // 2]); sys.stdout.flush()",
    "a stop": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "no end": "import time; time.sleep(1000)",
}


@pytest.mark.parametrize("program", NONSENSE.values(), ids=NONSENSE)
def test_a_process_that_gives_no_answer_is_done_without(program, ahead, monkeypatch):
    monkeypatch.setattr(reference_pool, "_COMMAND", [sys.executable, "-c", program])
    monkeypatch.setattr(reference_pool, "_LONGEST_S", 1.0)
    equal(ahead.take(PROBLEM, 3), Answer.of(PROBLEM, 3))
    assert ahead.rounding(PROBLEM, 1) == rounding(PROBLEM, 1)


def test_a_machine_that_starts_no_process_computes_it_here(ahead, monkeypatch):
    monkeypatch.setattr(reference_pool, "_COMMAND", ["/no/such/program"])
    equal(ahead.take(PROBLEM, 3), Answer.of(PROBLEM, 3))


def test_small_problems_start_no_process(monkeypatch):
    monkeypatch.setattr(reference_pool, "_COMMAND", ["/no/such/program"])
    ahead = ReferencePool()
    ahead.begin(PROBLEM, 3)
    ahead.wait()
    assert ahead._next.beside.process is None
    assert np.isfinite(ahead.take(PROBLEM, 3).timed.sides[0][0]).all()
