"""The benchmark of the gate with a stand-in for the GPU: it counts what happened."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest
from fake_compiler import FakeCompiler
from fake_gpu import FakeGpu
from samples import H200

from attnsweep.bench.gpu import WorkerError
from attnsweep.core.trial import Status

ROOT = Path(__file__).parent.parent.parent
TIME_US = 40.0


class Card(FakeGpu):
    """A card on which every call takes TIME_US, and what it is told to wait for.

    fixed_us: what a launch that waits takes more, however short it waits. noise: of a time, one
    sigma. offset: of the ratio of new to old, one sigma of what a process adds.
    """

    noise, offset, fixed_us = 0.002, 0.0, 0.0
    started = 0

    def __init__(self, timeout_s):
        super().__init__(environment=H200)
        self._random, self._sides = random.Random(self.started), {}
        self._own = {}
        type(self).started += 1

    def open(self, problem, *, replay_us, seed):
        self._sides = {}
        self._own = {"new": 1 + self._random.gauss(0, self.offset)}

    def forget(self, name):
        self._sides.pop(name, None)

    def add(self, name, candidate, *, cold):
        self._sides[name] = candidate.timed

    def sample(self, name, kind):
        waits = [s.launch.args[0] for s in self._sides[name].stages if s.name == "burn"]
        time_us = TIME_US + sum(waits) / H200.clock_hz * 1e6 + self.fixed_us * any(waits)
        return time_us * self._random.gauss(1, self.noise) * self._own.get(name, 1.0)


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("gate_benchmark", ROOT / "benchmarks" / "gate.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gate_benchmark", module)
    spec.loader.exec_module(module)
    module.Worker, module.Compiler = type("Own", (Card,), {}), FakeCompiler  # of this test

    def run(*options):
        file = tmp_path / "gate.json"
        runs = [str(ROOT / "results" / "h200" / "ladder")]
        module.main([str(file), "--runs", *runs, *options])
        return json.loads(file.read_text())

    run.module, run.card = module, module.Worker
    return run


def test_it_counts_comparisons_and_detections(benchmark, capsys):
    benchmark.card.fixed_us = 0.3  # what calibration must take off
    benchmark.card.noise = 0.0005  # calibration by the median of 60 is then 0.01 % off
    found = benchmark("--pairs", "6")
    assert found["environment"]["gpu"] == "NVIDIA H200"
    assert found["processes"] == 12
    itself = found["itself"]
    assert (itself["comparisons"], itself["false_alarms"], itself["unfinished"]) == (12, 0, 0)
    assert sum(row["verdicts"]["pass"] for row in itself["cases"]) == 12
    assert itself["false_alarms_bounds"] == pytest.approx([0, 0.2646], abs=1e-4)
    assert set(found["slowed"]["totals"]) == {"2 %", "5 %"}
    for row in found["slowed"]["cases"]:
        assert row["ratio"] - 1 == pytest.approx(row["share"], abs=0.0015)
        assert row["detected"] == row["comparisons"] > 0
        assert row["process_sd"] < 0.001
    for of in found["slowed"]["totals"].values():
        assert of["detected"] == of["comparisons"]
        assert of["passed"]["count"] == 0
        assert of["passed"]["bounds"][1] < 0.5
    printed = capsys.readouterr().out
    assert "12 comparisons of a kernel with itself: 0 of 12 (0.0 to 26.5 %) false alarms" in printed
    assert "slower by 2 %: detected " in printed


def test_every_process_serves_one_comparison_of_a_series(benchmark):
    """So that comparisons are independent: each has processes of its own, and uses them all."""
    benchmark.card.offset = 0.02  # comparisons need more than two processes
    found = benchmark("--pairs", "10")
    for row in [*found["itself"]["cases"], *found["slowed"]["cases"]]:
        assert len(set(row["ratios"])) == len(row["ratios"]) == sum(row["processes"])
        assert 20 - 8 < sum(row["processes"]) <= 20
        assert row["unfinished"] == (sum(row["processes"]) < 20)
        assert row["failed"] == []
    assert max(n for row in found["itself"]["cases"] for n in row["processes"]) > 2
    assert found["process_sd"] == pytest.approx(0.02, rel=0.4)


def test_a_kernel_that_fails_is_named_and_the_others_go_on(benchmark):
    def fails(self, first, second):
        if (
            len(self._sides["new"].stages) > 1
            and self.started > 1 + benchmark.module.CALIBRATION_PROCESSES
        ):
            raise WorkerError(Status.LAUNCH_ERROR, "illegal address")
        return FakeGpu.pair(self, first, second)

    benchmark.card.pair = fails
    found = benchmark("--pairs", "2")
    assert found["itself"]["comparisons"] == 4
    assert all(row["failed"] == ["illegal address"] * 4 for row in found["slowed"]["cases"])
    assert found["slowed"]["totals"]["2 %"]["comparisons"] == 0


def test_two_series_are_counted_together(benchmark, tmp_path):
    one = benchmark("--pairs", "3")
    (tmp_path / "gate.json").rename(tmp_path / "one.json")
    other = benchmark("--pairs", "2")
    (tmp_path / "gate.json").rename(tmp_path / "other.json")
    files = [str(tmp_path / name) for name in ("one.json", "other.json")]
    both = benchmark("--pool", *files)
    assert both["processes"] == one["processes"] + other["processes"] == 10
    assert both["itself"]["comparisons"] == 10
    assert both["itself"]["false_alarms_bounds"] == pytest.approx([0, 0.3085], abs=1e-4)
    for share, of in both["slowed"]["totals"].items():
        parts = [series["slowed"]["totals"][share] for series in (one, other)]
        assert of["comparisons"] == sum(part["comparisons"] for part in parts)
        assert of["detected"] == sum(part["detected"] for part in parts)
    assert [series["processes"] for series in both["series"]] == [6, 4]
    again = json.loads((tmp_path / "one.json").read_text())
    again["environment"]["gpu"] = "another"
    (tmp_path / "one.json").write_text(json.dumps(again))
    with pytest.raises(ValueError, match="belong together"):
        benchmark("--pool", *files)
