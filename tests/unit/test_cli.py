"""The commands as a user meets them: exit codes, what is printed where, and bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SPEC = """
arch: sm_90a
problems:
  - {batch: 1, heads: 2, seqlen: 256, head_dim: 64}
kernels: {naive: {}}
"""


def has_gpu() -> bool:
    try:
        import cupy

        return bool(cupy.cuda.is_available())
    except ImportError:
        return False


@pytest.fixture
def attnsweep(tmp_path):
    def run(*arguments, cwd=None):
        return subprocess.run(
            [sys.executable, "-m", "attnsweep", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=cwd or tmp_path,
            timeout=120,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        )

    return run


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SPEC)
    return path


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_run_without_a_gpu_says_what_works_and_writes_nothing(attnsweep, spec, tmp_path):
    done = attnsweep("run", spec)
    assert done.returncode == 3
    assert done.stdout == ""
    assert "Nothing was measured" in done.stderr
    for command in ("attnsweep run configs/quickstart.yaml", "compile", "attnsweep doctor"):
        assert command in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_doctor_names_what_is_missing_and_the_command(attnsweep):
    done = attnsweep("doctor", "--json")
    assert done.returncode == 3
    report = json.loads(done.stdout)
    assert report["ready"] is False
    missing = [f for f in report["findings"] if f["needed"] and not f["ok"]]
    assert missing
    assert all(f["fix"] for f in missing)


def test_dry_run_counts_and_compiles_nothing(attnsweep, spec, tmp_path):
    spec.write_text(SPEC.replace("seqlen: 256", "seqlen: 100"))
    done = attnsweep("run", spec, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "no_idle_block 1" in done.stdout
    assert "3 candidates; nothing was compiled" in done.stdout
    data = json.loads(attnsweep("run", spec, "--dry-run", "--json").stdout)
    assert data[0]["removed"]["no_idle_block"] == 1
    assert not (tmp_path / "results").exists()


def test_list_holds_every_family_rule_and_baseline(attnsweep):
    data = json.loads(attnsweep("list", "--json").stdout)
    names = {kernel["name"] for kernel in data["kernels"]}
    assert {"naive", "flash_fwd_mma", "three_kernel_mma"} <= names
    printed = attnsweep("list").stdout
    for kernel in data["kernels"]:
        for word in (kernel["name"], *kernel["rules"], *(p["name"] for p in kernel["params"])):
            assert word in printed
    assert "torch_cudnn" in printed


def test_a_family_of_the_users_own_is_listed_and_planned(attnsweep, tmp_path):
    families = ROOT / "tests" / "families"
    assert "twice" in attnsweep("list", "--kernels", families).stdout
    path = tmp_path / "own.yaml"
    path.write_text(SPEC.replace("naive: {}", "twice: {SCORE_THREADS: 64}"))
    done = attnsweep("run", path, "--dry-run", "--kernels", families)
    assert "2 candidates" in done.stdout
    assert "unknown kernel" in attnsweep("run", path, "--dry-run").stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("naive: {}", "naiv: {}"), ["unknown kernel 'naiv'", "'naive'"]),
        (("naive: {}", "naive: {THREAD: 3}"), ["'THREAD'", "'THREADS'"]),
        (("head_dim: 64", "head_dim: 96"), ["head_dim 96 is not one of"]),
        (("naive: {}", "naive: {THREADS: [512]}"), ["no_idle_block removed 1"]),
        (("arch: sm_90a", "arch: sm_1"), ["sm_1"]),
        (("kernels: {", "kernels: {{"), ["small.yaml:6:1", "begins in line 5"]),
    ],
    ids=["kernel", "parameter", "shape", "rules", "arch", "yaml"],
)
def test_bad_specs_are_exit_code_2_with_the_nearest_name(attnsweep, spec, change, words):
    spec.write_text(SPEC.replace(*change))
    done = attnsweep("run", spec, "--dry-run")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in " ".join(done.stderr.split()), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "nowhere"),
        ("report",),
        ("run", "nowhere.yaml"),
        ("compile", "small.yaml", "--arch", "sm_77"),
        ("list", "--kernels", "nowhere"),
        ("frobnicate",),
        ("run", "small.yaml", "--limit", "0"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_usage_errors_are_exit_code_2_without_a_traceback(attnsweep, spec, arguments):
    done = attnsweep(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()


def test_a_broken_declaration_is_named(attnsweep, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "broken.py").write_text("kernel = None\nraise RuntimeError('no')\n")
    done = attnsweep("list", "--kernels", tmp_path / "mine")
    assert done.returncode == 2
    assert "broken.py:2" in " ".join(done.stderr.split())


def test_quickstart_replays_and_says_so(attnsweep):
    done = attnsweep("run", ROOT / "configs" / "quickstart.yaml")
    assert done.returncode == 0, done.stderr
    assert "H200" in done.stdout
    assert "recorded" in done.stdout
    assert "\x1b[" not in done.stdout + done.stderr
    data = json.loads(attnsweep("report", "--json").stdout)
    rows = data["problems"][0]["ranking"]
    assert len(rows) > 50
    assert all(row["recorded"] for row in rows if row["rank"])


def test_version(attnsweep):
    assert attnsweep("--version").stdout.startswith("attnsweep ")
