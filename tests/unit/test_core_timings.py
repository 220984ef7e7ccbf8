"""How long each part of proving took, and what is counted for which."""

import threading

import pytest

from attnsweep.core import timings


@pytest.fixture
def clock(timed_by):
    now = [0.0]
    timed_by(lambda: now[0], timings)
    timings.proof_taken()
    return now


def test_a_part_inside_another_counts_once(clock):
    with timings.proving("inputs"):
        clock[0] += 1
        with timings.proving("waits"):
            clock[0] += 10
        clock[0] += 2
        with timings.proving("waits"):
            clock[0] += 20
            with timings.proving("more"):
                clock[0] += 100
    with timings.proving("inputs"):
        clock[0] += 4
    assert timings.proof_taken() == {"inputs": 7, "waits": 30, "more": 100}
    assert timings.proof_taken() == {}


def test_a_part_that_fails_counts_too(clock):
    @timings.proves("candidates")
    def fail():
        with timings.proving("waits"):
            clock[0] += 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), timings.proving("outer"):
        fail()
    assert timings.proof_taken() == {"waits": 1, "candidates": 0, "outer": 0}


def test_threads_do_not_count_for_each_other(clock):
    with timings.proving("here"):
        clock[0] += 1
        thread = threading.Thread(target=timings.proves("there")(lambda: None))
        thread.start()
        thread.join()
        clock[0] += 1
    assert timings.proof_taken() == {"there": 0, "here": 2}
