"""Sweeps of callables of the user's: real traces, and a GPU whose times are made up."""

import importlib
import importlib.util
import os
import shutil
from pathlib import Path

import pytest
from fake_gpu import FakeGpu
from samples import TEST_GPU
from sweeping import use_gpu

import attnsweep
from attnsweep.core.trial import OURS, Status

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
    file, spec = place / "tuned.py", place / "calls.yaml"
    before = file.read_text()
    try:
        file.write_text(before + "\n# changed\n")
        _, gpu = swept(tmp_path)
        spec.write_text(SPEC.replace("'tuned.py:attention'", "'tuned.py:plain', BLOCK: [64], num_warps: [1]"))
        other, _ = swept(tmp_path)
    finally:
        file.write_text(before)
        spec.write_text(SPEC)
    assert {row.config["BLOCK"] for row in other.run.trials if row.status is Status.OK} == {64}
    assert len([call for call in gpu.calls if call[0] == "trial"]) == 4


def test_tune_knows_a_call_by_its_name_and_by_the_function(place, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(place)
    use_gpu(monkeypatch, gpu := Gpu({"torch_flash": 50.0}, environment=TEST_GPU))
    how = {"results": tmp_path, "cache_dir": place / "cache", "dtype": "bf16"}
    wide = {"no block of 32": lambda config, problem, arch: config["BLOCK"] != 32}
    one = attnsweep.tune("tuned.py:attention", "1,2,256,16", rules=wide, **how)
    assert {row.config["BLOCK"] for row in one.run.trials if row.provider == OURS} == {128}
    module = importlib.import_module("tuned")
    params = {"BLOCK": [32, 64], "num_warps": [None]}
    other = attnsweep.tune(module.plain, "1,2,256,16", params=params, **how)
    assert {row.config["BLOCK"] for row in other.run.trials if row.provider == OURS} == {32, 64}
    assert "tuned_plain" in str(other)
    assert gpu.calls


def test_the_command_counts_the_configs_of_a_call(place, attnsweep):
    shape = ["1,2,64,16", "--dtype", "bf16", "--dry-run", "--arch", "sm_90a"]
    done = attnsweep("tune", "--kernel", "tuned.py:attention", *shape)
    assert done.returncode == 0
    assert "tuned_attention 4 2 prune_configs_by 2" in " ".join(done.stdout.split())
