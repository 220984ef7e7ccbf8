"""How long each part of proving took, and what is counted for which."""

from __future__ import annotations

import threading

import pytest

from attnsweep.gpu import steps


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(steps.time, "perf_counter", lambda: now[0])
    steps.proof_taken()
    return now


def test_a_part_inside_another_counts_once(clock):
    with steps.proving("inputs"):
        clock[0] += 1
        with steps.proving("waits"):
            clock[0] += 10
        clock[0] += 2
        with steps.proving("waits"):
            clock[0] += 20
            with steps.proving("more"):
                clock[0] += 100
    with steps.proving("inputs"):
        clock[0] += 4
    assert steps.proof_taken() == {"inputs": 7, "waits": 30, "more": 100}
    assert steps.proof_taken() == {}


def test_a_part_that_fails_counts_too(clock):
    @steps.proves("candidates")
    def fail():
        with steps.proving("waits"):
            clock[0] += 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), steps.proving("outer"):
        fail()
    assert steps.proof_taken() == {"waits": 1, "candidates": 0, "outer": 0}


def test_threads_do_not_count_for_each_other(clock):
    with steps.proving("here"):
        clock[0] += 1
        thread = threading.Thread(target=steps.proves("there")(lambda: None))
        thread.start()
        thread.join()
        clock[0] += 1
    assert steps.proof_taken() == {"there": 0, "here": 2}
