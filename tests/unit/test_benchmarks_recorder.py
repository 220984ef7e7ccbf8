"""benchmarks/recorder.py on small models and the CPU."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def recorder():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("recorder")
    sys.path.remove(str(BENCHMARKS))


def test_costs_are_of_the_rounds_and_of_each_call(recorder):
    times = {"plain": [1.0, 2.0, 4.0], "recorded": [1.1, 2.2, 4.4], "again": [1.0, 2.1, 3.9]}
    found = recorder.cost(times, calls=2)
    assert found["plain_ms"] == 2.0
    assert found["cost"] == pytest.approx(0.1)
    assert found["noise"] == pytest.approx(0.0)
    assert found["added_us"] == pytest.approx(75.0)
    assert found["rounds"] == 3
    low, high = found["added_us_interval"]
    assert low <= 50.0 < found["added_us"] < 225.0 <= high


def test_the_interval_of_many_like_rounds_is_narrow(recorder):
    value, (low, high) = recorder.middle([0.01, 0.02, 0.03] * 100, 5)
    assert value == 0.02
    assert (low, high) == (0.02, 0.02)


def test_only_one_of_three_is_recorded_and_each_begins_in_turn(recorder, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def shapes(path, arch):
        seen.append("begins")
        yield
        seen.append("ends")

    monkeypatch.setattr(recorder.attnsweep, "shapes", shapes)
    monkeypatch.setattr(recorder, "WARM_CALLS", 1)
    monkeypatch.setattr(recorder, "RUNS", 1)
    recorder.turns(lambda: seen.append("run"), 3)
    plain, recorded = ["run", "run"], ["begins", "run", "run", "ends"]
    rounds = (plain, recorded, plain), (recorded, plain, plain), (plain, plain, recorded)
    assert seen == [word for each in rounds for turn in each for word in turn]


def test_no_round_begins_once_the_seconds_are_spent_but_three_there_are(recorder):
    times = recorder.turns(int, 9, seconds=0)
    assert [len(times[who]) for who in recorder.WHO] == [3, 3, 3]


def test_a_turns_time_is_its_fastest(recorder, monkeypatch):
    each = iter([3.0, 1.0, 2.0] * 3)
    monkeypatch.setattr(recorder, "timed_ms", lambda run: next(each))
    assert recorder.turns(int, 1) == {"plain": [1.0], "recorded": [1.0], "again": [1.0]}


def test_the_whole_is_written_with_its_machine(recorder, tmp_path, capsys):
    out = tmp_path / "recorder.json"
    recorder.main([str(out), "--tiny", "--models", "diffusion", "--tokens", "16", "--rounds", "3"])
    made = json.loads(out.read_text())
    assert made["environment"]["packages"]["torch"] == torch.__version__
    (row,) = made["models"]
    assert (row["model"], row["tokens"]) == ("diffusion", 16)
    assert row["recorded_ms"] > 0
    assert made["call_us"].keys() == {"plain", "recorded"}
    assert "diffusion 16: " in capsys.readouterr().out
