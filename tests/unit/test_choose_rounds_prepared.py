"""Whoever watches a run hears what is prepared before the rounds, and how long it took."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from fake_gpu import FakeGpu
from samples import PROBLEM, built, candidate

from attnsweep.bench.gpu import WorkerError
from attnsweep.choose.finals import Finals
from attnsweep.choose.rounds import prepared
from attnsweep.core.observer import Observer
from attnsweep.core.trial import Status, Trial
from attnsweep.specs.model import MeasureSpec, SearchSpec


class Heard(Observer):
    """Keeps what is prepared, in order."""

    def __init__(self):
        self.events = []

    def preparing(self, baseline, done, total):
        self.events.append(("preparing", baseline, done, total))

    def prepared(self, what, took_s, steps_s):
        assert 0 <= took_s < 60
        self.events.append(("prepared", what, steps_s))


class Slow(FakeGpu):
    """A GPU whose process tells a step of each call."""

    def heard(self, method, name=""):
        self.steps_s[f"{method} {name}"] = 1.5
        super().heard(method, name)


def baseline(name):
    return Trial(
        kernel=name, provider=name, config={}, problem=PROBLEM, status=Status.SKIPPED, detail=None
    )


def test_each_baseline_is_told_before_and_after_it_is_prepared_also_if_it_cannot_be():
    gpu, heard, rows = Slow({"flash A=1": 7.0, "torch_flash": 9.0}), Heard(), {}

    def put(row):
        rows[row.provider] = row.status

    spec = SimpleNamespace(measure=MeasureSpec(rounds=3), search=SearchSpec())
    build = built("A=1", "flash")
    finals = Finals(spec, gpu, put=put, keep=put, observer=heard)
    finals.run(
        [(build, candidate("flash", 7.0, A=1))], [baseline("flash_attn_4"), baseline("torch_flash")]
    )
    assert heard.events == [
        ("prepared", "finalists", {"add flash A=1": 1.5}),
        ("preparing", "flash_attn_4", 0, 2),
        ("prepared", "flash_attn_4", {"add_baseline flash_attn_4": 1.5}),
        ("preparing", "torch_flash", 1, 2),
        ("prepared", "torch_flash", {"add_baseline torch_flash": 1.5}),
    ]
    assert rows["flash_attn_4"] is Status.SKIPPED
    assert rows["torch_flash"] is Status.OK


def test_a_step_is_told_once_and_a_failure_is_raised():
    gpu, heard = FakeGpu(), Heard()
    gpu.steps_s["start CUDA"] = 2.0
    with pytest.raises(WorkerError), prepared("problem", gpu, heard):
        raise WorkerError(Status.LAUNCH_ERROR, "out of memory")
    with prepared("finalists", gpu, heard):
        pass
    assert heard.events == [
        ("prepared", "problem", {"start CUDA": 2.0}),
        ("prepared", "finalists", {}),
    ]


def test_the_time_is_that_of_the_work(monkeypatch):
    clock = iter([10.0, 12.5])
    monkeypatch.setattr("attnsweep.choose.rounds.time.monotonic", lambda: next(clock))
    took = []

    class Timing(Observer):
        def prepared(self, what, took_s, steps_s):
            took.append(took_s)

    with prepared("problem", FakeGpu(), Timing()):
        pass
    assert math.isclose(took[0], 2.5)
