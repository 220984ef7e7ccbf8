"""Triton's configs are compiled by a process beside; whatever becomes of it, the peer is there."""

from __future__ import annotations

import sys
import time

import pytest

from attnsweep.gpu import ahead, peers
from attnsweep.gpu.ahead import Ahead
from attnsweep.problem import Problem

ONE, OTHER = (Problem(1, heads, 2, 100, 128, 96, "bf16", True) for heads in (2, 4))


@pytest.fixture
def beside(monkeypatch):
    """Makes an Ahead whose process runs a program that is given."""
    made = []

    def of(program):
        monkeypatch.setattr(ahead, "_command", lambda: [sys.executable, "-c", program])
        made.append(Ahead())
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
    slow.begin(ONE)
    assert time.monotonic() - begun < 0.3
    assert slow.wait(ONE)
    assert time.monotonic() - begun > 0.3
    slow.begin(OTHER)
    assert slow.wait(OTHER)


def test_a_problem_that_was_not_begun_is_not_waited_for(beside):
    never = beside("import time; time.sleep(60)")
    assert not never.wait(ONE)
    never.begin(ONE)
    assert not never.wait(OTHER)


@pytest.mark.parametrize("program", ["", "raise SystemExit(1)", "print('nonsense')"])
def test_a_process_that_ends_is_not_waited_for_and_replaced(beside, program):
    dying = beside(program)
    for problem in (ONE, OTHER):
        dying.begin(problem)
        assert not dying.wait(problem)


def test_a_process_that_hangs_is_waited_for_within_bounds(beside, monkeypatch):
    monkeypatch.setattr(ahead, "_LONGEST_S", 0.2)
    hanging = beside("import time; time.sleep(60)")
    hanging.begin(ONE)
    assert not hanging.wait(ONE)


def test_a_machine_that_starts_no_process_compiles_later(monkeypatch):
    monkeypatch.setattr(ahead, "_command", lambda: ["/no/such/program"])
    nothing = Ahead()
    nothing.begin(ONE)
    assert not nothing.wait(ONE)


def test_the_process_compiles_and_says_so(monkeypatch, capsys):
    compiled = []
    monkeypatch.setattr(peers, "compile_triton", compiled.append)
    monkeypatch.setattr(sys, "stdin", [ahead._line_of(ONE), "damaged\n", ahead._line_of(OTHER)])
    ahead._serve()
    assert compiled == [ONE, OTHER]
    assert capsys.readouterr().out.splitlines()[1] == "damaged"


def test_only_what_triton_can_take_is_begun(monkeypatch):
    begun = []
    monkeypatch.setattr(peers._ahead, "begin", begun.append)
    monkeypatch.setattr(peers, "_importable", lambda module: True)
    peers.compile_ahead(["cudnn"], ONE)
    peers.compile_ahead(["triton_flash"], Problem(1, 2, 2, 100, 128, 96, "fp32", True))
    assert begun == []
    peers.compile_ahead(["cudnn", "triton_flash"], ONE)
    assert begun == [ONE]
