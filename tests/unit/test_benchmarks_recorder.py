"""benchmarks/recorder.py on small models and the CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def recorder():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("recorder")
    sys.path.remove(str(BENCHMARKS))


def test_costs_are_of_the_rounds(recorder):
    times = {"plain": [1.0, 2.0, 4.0], "recorded": [1.1, 2.2, 4.4], "again": [1.0, 2.1, 3.9]}
    found = recorder.cost(times)
    assert found["plain_ms"] == 2.0
    assert found["cost"] == pytest.approx(0.1)
    assert found["noise"] == pytest.approx(0.0)


def test_the_whole_is_written_with_its_machine(recorder, tmp_path, capsys):
    out = tmp_path / "recorder.json"
    recorder.main([str(out), "--tiny", "--models", "diffusion", "--tokens", "16", "--rounds", "3"])
    made = json.loads(out.read_text())
    assert made["environment"]["packages"]["torch"] == torch.__version__
    (row,) = made["models"]
    assert (row["model"], row["tokens"]) == ("diffusion", 16)
    assert row["recorded_ms"] > 0
    assert made["call_us"].keys() == {"plain", "recorded", "again"}
    assert "diffusion 16: " in capsys.readouterr().out
