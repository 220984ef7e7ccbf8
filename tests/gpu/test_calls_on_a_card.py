"""Callables of the user's on a card: one sweep of forward, masks and gradients, its files and its checks."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attnsweep.core.trial import OURS, Status
from attnsweep.store.run import open_run

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

LAUNCHERS = Path(__file__).parents[1] / "support/launchers/whole.py"
SPEC = """
name: calls
problems:
  - {batch: 1, heads: 4, heads_kv: 2, seqlen_q: 128, seqlen_k: 200, head_dim: 64, dtype: bf16, causal: true}
  - {batch: 1, heads: 2, seqlen: 320, head_dim: 64, window: [100, 20]}
  - {batch: 2, heads: 2, seqlen: 256, head_dim: 64, dtype: bf16, boolean: [documents, 3]}
  - {batch: 1, heads: 4, heads_kv: 2, seqlen: 192, head_dim: 64, dtype: bf16, causal: true, op: backward}
kernels:
  attention: {call: 'whole.py:attention'}
  composed: {call: 'whole.py:composed', BLOCK: [256, 1024]}
  gradients: {call: 'whole.py:gradients'}
  by_autograd: {call: 'whole.py:by_autograd', BLOCK: [1024]}
baselines: []
measure: {rounds: 5, replay_us: 200}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A repository of the launchers, and the run of the spec in it."""
    place = tmp_path_factory.mktemp("calls")
    shutil.copy(LAUNCHERS, place)
    (place / "calls.yaml").write_text(SPEC)
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    return place


@pytest.fixture(scope="module")
def attnsweep(place):
    def run(*arguments):
        command = [sys.executable, "-m", "attnsweep", *map(str, arguments)]
        return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300, check=False)

    return run


@pytest.fixture(scope="module")
def swept(attnsweep, place):
    done = attnsweep("run", "calls.yaml", "--results", "results")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (place / "results").rglob("trials.jsonl")
    return open_run(path.parent)


@pytest.fixture(scope="module")
def rows(swept):
    """Rows of each function."""
    rows = [row for row in swept.trials if row.provider == OURS]
    return {name: [row for row in rows if row.kernel == name] for name in {row.kernel for row in rows}}


def test_every_config_of_every_call_is_right(swept):
    # Noisy rows are right ones, timed while something else used the card.
    others = [row for row in swept.trials if row.status not in (Status.OK, Status.NOISY)]
    assert not [f"{row.kernel} {row.config} {row.problem.label}: {row.status}: {row.detail}" for row in others]


def test_a_call_is_swept_on_the_problems_that_it_takes(rows):
    problems = {name: {row.problem.op.name for row in own} for name, own in rows.items()}
    assert problems == {
        "attention": {"forward"},
        "composed": {"forward"},
        "gradients": {"backward"},
        "by_autograd": {"backward"},
    }
    assert {name: len(own) for name, own in rows.items()} == {
        "attention": 12,
        "composed": 6,
        "gradients": 4,
        "by_autograd": 1,
    }


def test_two_autotuners_of_a_call_are_swept_together(rows):
    configs = {(row.config["grad_q.BLOCK"], row.config["grad_kv.BLOCK"]) for row in rows["gradients"]}
    assert configs == {(a, b) for a in (32, 64) for b in (32, 64)}


def test_what_ran_is_what_was_compiled_and_the_rows_say_what_the_proof_covers(rows):
    covers = {name: {row.call["covers"] for row in own} for name, own in rows.items()}
    for name in ("attention", "composed", "gradients"):
        assert covers[name] <= {"this binary", "any length"}, name
        assert all(row.resources.registers > 0 for row in rows[name])
    assert "any length" in covers["attention"] & covers["gradients"]
    (untraced,) = covers["by_autograd"]
    assert untraced.startswith("whole.py:by_autograd raised RuntimeError")


def test_winners_are_exported(attnsweep, place, swept):
    for how in (["--out", "out.py"], ["--out", "out.json"], ["--format", "vllm", "--out", "tables"]):
        done = attnsweep("export", swept.directory, "--kernel", "attention", *how)
        assert done.returncode == 0, done.stderr
        assert "of whole.py:attention on" in done.stdout
    assert json.loads((place / "out.json").read_text())
    assert "BLOCK_M" in (place / "out.py").read_text()
    assert [*(place / "tables").glob("H=*.json")]


def test_the_same_files_pass_the_check_of_the_run(attnsweep, swept):
    same = attnsweep("check", "calls.yaml", "--against", swept.directory, "--budget-s", "120")
    assert same.returncode == 0, same.stdout + same.stderr
    assert "same machine code" in same.stdout


def test_a_revision_passes_and_a_wrong_change_does_not(attnsweep, place):
    sides = ["--old", "whole.py@HEAD:attention", "--new", "whole.py:attention", "1,2,256,64", "--budget-s", "30"]
    same = attnsweep("check", *sides, "--config", "BLOCK_M=64 BLOCK_N=64")
    assert (same.returncode, "same machine code" in same.stdout) == (0, True), same.stdout + same.stderr
    before = (place / "whole.py").read_text()
    (place / "whole.py").write_text(before.replace("other=0.0)\n", "other=0.0) * 1.1\n", 1))
    wrong = attnsweep("check", *sides, "--config", "BLOCK_M=64 BLOCK_N=64")
    (place / "whole.py").write_text(before)
    assert (wrong.returncode, "over the limit" in wrong.stdout) == (1, True), wrong.stdout + wrong.stderr
