"""A helper process compiles Triton's configs; whatever becomes of it, the baseline is there."""

import sys
import time
from types import ModuleType

import pytest

from attnsweep.baselines.triton_precompile import TritonPrecompile
from attnsweep.core.problem import Problem

ONE, OTHER = (Problem(1, heads, 2, 100, 128, 96, "bf16", causal=True) for heads in (2, 4))


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    """Triton seems to be there: what the process compiles is the tests' own."""
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))


@pytest.fixture
def beside():
    """Makes one whose process runs a program that is given."""
    made = []

    def of(program, **options):
        made.append(TritonPrecompile([sys.executable, "-c", program], **options))
        return made[-1]

    yield of
    for each in made:
        each.close()


def test_it_waits_until_a_problem_is_compiled(beside):
    slow = beside(
        "import sys, time\n"
        "for line in sys.stdin:\n"
        "    time.sleep(0.3); print('a word of Triton'); print(line, end='', flush=True)"
    )
    begun = time.monotonic()
    slow.begin(["triton_flash"], ONE)
    assert time.monotonic() - begun < 0.3
    assert slow.wait(ONE)
    assert time.monotonic() - begun > 0.3
    slow.begin(["triton_flash"], OTHER)
    assert slow.wait(OTHER)


def test_a_problem_that_was_not_begun_is_not_waited_for(beside):
    never = beside("import time; time.sleep(60)")
    assert not never.wait(ONE)
    never.begin(["triton_flash"], ONE)
    assert not never.wait(OTHER)


@pytest.mark.parametrize("program", ["", "raise SystemExit(1)", "print('nonsense')"])
def test_a_process_that_ends_is_not_waited_for_and_replaced(beside, program):
    dying = beside(program)
    for problem in (ONE, OTHER):
        dying.begin(["triton_flash"], problem)
        assert not dying.wait(problem)


def test_a_process_that_hangs_is_waited_for_within_bounds(beside):
    hanging = beside("import time; time.sleep(60)", longest_s=0.2)
    hanging.begin(["triton_flash"], ONE)
    assert not hanging.wait(ONE)


def test_it_tells_without_waiting_whether_a_problem_is_compiled(beside):
    slow = beside("import sys, time\nfor line in sys.stdin: time.sleep(0.3); print(line, flush=True)")
    assert not slow.done(ONE)
    slow.begin(["triton_flash"], ONE)
    assert not slow.done(ONE)
    deadline = time.monotonic() + 30
    while not slow.done(ONE) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert slow.done(ONE)
    assert slow.wait(ONE)
