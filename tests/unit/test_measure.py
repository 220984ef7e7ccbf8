"""What needs no GPU of a Bench: which buffers a pipeline is bound to, and for how long."""

from __future__ import annotations

import pytest

from attnsweep import measure
from attnsweep.measure import Bench
from attnsweep.problem import Problem
from attnsweep.trial import Accuracy, Candidate, Plan

PROBLEM = Problem(1, 1, 1, 64, 64, 64)


class FakeBuffer:
    def __init__(self, nbytes):
        self.nbytes = nbytes


class FakePipeline:
    stage_names = ("fwd",)

    def __init__(self, session, plan, copies):
        self.copies = copies


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(measure, "Buffer", FakeBuffer)
    monkeypatch.setattr(measure, "Pipeline", FakePipeline)
    made = Bench.__new__(Bench)
    made.session, made.problem = None, PROBLEM
    made._workspaces, made._entries, made._cold_copies = {}, {}, []
    made._timed = type("Fixture", (), {"buffers": {"q": FakeBuffer(1)}})()
    monkeypatch.setattr(made, "_check_all", lambda candidate: Accuracy(rel_err=0.0, limit=1.0))
    monkeypatch.setattr(made, "_screen", lambda call, stage=None: 1.0)
    return made


def candidate(nbytes):
    plan = Plan(PROBLEM, (), {"scores": nbytes})
    return Candidate("k", {}, plan, (), 0)


def test_a_finalists_workspace_outlives_another_size(bench):
    bench.admit("a", candidate(100))
    bench.admit("b", candidate(200))
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
    bench.admit("a", candidate(100))
    bench.admit("b", candidate(100))
    assert (
        bench._entries["a"].call.copies[0]["scores"] is bench._entries["b"].call.copies[0]["scores"]
    )
