"""The commands with the real compiler: tests/unit has a stand-in for it."""

from pathlib import Path

import pytest
from fake_gpu import FakeGpu
from sweeping import use_gpu

from attnsweep.core.files import read_code
from attnsweep.core.trial import Status
from attnsweep.store.run import open_run

FAMILIES = Path(__file__).parent.parent / "families"
SPEC = """
problems:
  - {batch: 1, heads: 2, seqlen: 64, head_dim: 64}
kernels: {burns: {}, twice: {SCORE_THREADS: 64}}
baselines: []
measure: {rounds: 4}
"""
TIMES = {"CYCLES=400000": 20.0, "old": 20.0, "new": 20.0}
TIMES |= {f"SCORE_THREADS=64 MIX_THREADS={mix}": 30.0 for mix in (32, 64)}


@pytest.fixture(autouse=True)
def gpu(monkeypatch, tmp_path):
    use_gpu(monkeypatch, FakeGpu(TIMES))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ci.yaml").write_text(SPEC)


def test_a_sweep_keeps_its_winner_s_code_and_a_check_compiles_it_again(attnsweep, tmp_path):
    done = attnsweep("run", "ci.yaml", "--kernels", FAMILIES)
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "results" / "test-1" / "ci")
    assert [trial.status for trial in run.trials] == [Status.OK] * 3
    assert all(trial.resources.registers > 8 for trial in run.trials)
    (cubin,) = (run.directory / "cubins").glob("*.cubin.xz")
    assert b"burns" in read_code(cubin)
    done = attnsweep("check", "ci.yaml", "--against", run.directory, "--kernels", FAMILIES)
    assert done.returncode == 0, done.stderr
    assert "same machine code" in done.stdout


def test_code_that_does_not_compile_is_a_row_with_its_line(attnsweep, tmp_path):
    for name in ("burns.py", "burns.cu", "twice.cuh"):
        text = (FAMILIES / name).read_text()
        (tmp_path / name).write_text(text.replace("float largest", "float float largest"))
    (tmp_path / "ci.yaml").write_text(SPEC.replace(", twice: {SCORE_THREADS: 64}", ""))
    done = attnsweep("run", "ci.yaml", "--kernels", tmp_path)
    assert done.returncode == 1
    lines = (tmp_path / "burns.cu").read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "float float" in text)
    (row,) = open_run(tmp_path / "results" / "test-1" / "ci").trials
    assert row.status is Status.COMPILE_ERROR
    assert f"burns.cu({line}): error" in row.detail.splitlines()[0]
