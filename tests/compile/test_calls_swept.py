"""Sweeps of callables of the user's: real traces, and a GPU whose times are made up."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
from fake_gpu import FakeGpu
from samples import TEST_GPU
from sweeping import use_gpu

import attnsweep
from attnsweep.core.trial import Status

missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"tracing needs {', '.join(missing)}")

LAUNCHERS = Path(__file__).parents[1] / "support/launchers/tuned.py"
SPEC = """
name: calls
problems: [{batch: 1, heads: 2, seqlen: 256, head_dim: 16, dtype: bf16}]
kernels: {tuned: {call: 'tuned.py:attention'}}
baselines: []
measure: {rounds: 4}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place, before = tmp_path_factory.mktemp("calls"), Path.cwd()
    shutil.copy(LAUNCHERS, place)
    (place / "calls.yaml").write_text(SPEC)
    os.chdir(place)
    yield place
    os.chdir(before)


class Gpu(FakeGpu):
    """One on which many warps are slow."""

    def time_us(self, name):
        return 40.0 if "num_warps=4" in name else 20.0 + ("BLOCK=128" in name)


@pytest.fixture
def swept(place, monkeypatch, tmp_path):
    def swept(results=tmp_path, **how):
        gpu = Gpu(environment=TEST_GPU)
        use_gpu(monkeypatch, gpu)
        return attnsweep.run("calls.yaml", results=results, cache_dir=place / "cache", **how), gpu

    return swept


def test_the_files_own_configs_are_swept_and_ranked(swept):
    outcome, _ = swept()
    rows = {row.config["BLOCK"]: row for row in outcome.run.trials if row.status is Status.OK}
    assert len(outcome.run.trials) == 4
    assert outcome.exit_code == 0
    said = rows[32].call
    assert (said["function"], said["covers"]) == ("tuned.py:attention", "this binary")
    assert said["triton"]
    assert "tuned takes 20.0 µs" in str(outcome)


def test_the_same_sweep_again_measures_nothing(swept, tmp_path):
    swept(tmp_path)
    again, gpu = swept(tmp_path)
    assert len(again.run.trials) == 4
    assert not [call for call in gpu.calls if call[0] == "trial"]


def test_a_changed_file_is_measured_again(swept, place, tmp_path):
    swept(tmp_path)
    file = place / "tuned.py"
    before = file.read_text()
    try:
        file.write_text(before + "\n# changed\n")
        _, gpu = swept(tmp_path)
    finally:
        file.write_text(before)
    assert len([call for call in gpu.calls if call[0] == "trial"]) == 4
