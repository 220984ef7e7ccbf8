"""What needs no GPU of a Bench: which buffers a pipeline is bound to, and for how long."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from attnsweep.build.launches import Candidate, Launches
from attnsweep.build.numerics import Case
from attnsweep.gpu import bench as measure
from attnsweep.gpu.bench import Bench, WrongResult
from attnsweep.problem import Problem
from attnsweep.trial import Accuracy

PROBLEM = Problem(1, 1, 1, 64, 64, 64)


class FakeBuffer:
    """Downloads what is put into `bits`."""

    def __init__(self, nbytes, guard=0):
        self.nbytes, self.bits = nbytes, None

    def upload(self, bits):
        pass

    def poison(self):
        pass

    def download(self, out):
        out[:] = self.bits


class FakeSession:
    stream = nullcontext()

    def pinned(self, shape, dtype):
        return np.zeros(shape, dtype)


class FakePipeline:
    stage_names = ("fwd",)

    def __init__(self, session, plan, copies):
        self.copies = copies


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(measure, "Buffer", FakeBuffer)
    monkeypatch.setattr(measure, "Pipeline", FakePipeline)
    made = Bench.__new__(Bench)
    made.session, made.problem = FakeSession(), PROBLEM
    made._workspaces, made._entries, made._cold_copies = {}, {}, []
    made._timed = measure._Fixture(Case(PROBLEM), 0, made.session)
    made._timed.buffers["o"].bits = 0
    monkeypatch.setattr(made, "_check_all", lambda candidate: Accuracy(rel_err=0.0, limit=1.0))
    monkeypatch.setattr(made, "_screen", lambda call, stage=None: 1.0)
    made._timed.output()
    return made


def candidate(nbytes):
    plan = Launches(PROBLEM, (), {"scores": nbytes})
    return Candidate("k", {}, plan, (), 0)


def test_a_finalists_workspace_outlives_another_size(bench):
    bench.add("a", candidate(100), cold=True)
    bench.add("b", candidate(200), cold=True)
    first, second = (bench._entries[name].call.copies[0]["scores"] for name in "ab")
    assert (first.nbytes, second.nbytes) == (100, 200)
    bench.trial(candidate(300))
    kept = list(bench._workspaces.values())
    assert any(first is buffer for buffer in kept)
    assert any(second is buffer for buffer in kept)


def test_before_the_rounds_only_the_candidates_own_workspaces_are_held(bench):
    for nbytes in (100, 200, 300):
        bench.trial(candidate(nbytes))
    assert list(bench._workspaces) == [("scores", 300)]


def test_equal_sizes_share_a_workspace(bench):
    bench.add("a", candidate(100), cold=True)
    bench.add("b", candidate(100), cold=True)
    assert (
        bench._entries["a"].call.copies[0]["scores"] is bench._entries["b"].call.copies[0]["scores"]
    )


def test_a_race_shows_in_calls_that_differ_in_a_bit(bench, monkeypatch):
    def replays(call, stage=None):
        bits = np.zeros((1, 1, 64, 64), np.uint16)
        bits[0, 0, 3, 5] = 1
        bench._timed.buffers["o"].bits = bits
        return 1.0

    monkeypatch.setattr(bench, "_screen", replays)
    with pytest.raises(WrongResult) as raised:
        bench.trial(candidate(100))
    assert raised.value.detail == (
        "a race: repeated calls differ in 1 of 4096 outputs ((1,1,64,64) fp16 full, normal)"
    )
    bench.trial(replace(candidate(100), deterministic=False))


class Replay:
    """Says who was replayed; its call takes what the clock says."""

    def __init__(self, name, played):
        self.name, self.played = name, played

    def __call__(self):
        self.played.append(self.name)


@pytest.mark.parametrize(
    ("call_us", "calls", "turns"),
    [(5.0, 400, 1), (60.0, 33, 3), (500.0, 4, 20), (28_000.0, 1, 2), (6_000.0, 1, 8)],
)
def test_a_pair_of_long_calls_takes_more_turns(bench, call_us, calls, turns):
    """With a clock that slows evenly, both sides still come out alike."""
    played = []

    def spans(work):
        for each in work:
            each()
        return [calls * call_us * (1 + 0.01 * number) for number in range(len(work))]

    bench.session.spans_us = spans
    for name in "ab":
        graphs = {"warm": (Replay(name, played), calls)}
        bench._entries[name] = measure._Entry(None, graphs, warm_us=call_us)
    one, other = bench.pair("a", "b")
    assert "".join(played) == "a" + "abba" * turns
    assert one == pytest.approx(other)
    assert one == pytest.approx(call_us * (1 + 0.01 * (4 * turns - 1) / 2))
