"""The whole command on a GPU: faults cost their own row, kill -9 and Ctrl-C lose nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnsweep.core.trial import Status
from attnsweep.specs.model import in_other_format
from attnsweep.store.run import read_trials

pytestmark = pytest.mark.gpu

FAMILIES = Path(__file__).parent.parent / "families"
SPEC = """
problems:
  - {{batch: 1, heads: 2, seqlen: 300, head_dim: 64, causal: [{causal}]}}
kernels: {kernels}
baselines: {baselines}
measure: {{rounds: 5, finalists: 4, replay_us: 200, timeout_s: 4.0}}
"""


def write_spec(path, *, kernels, baselines="[]", causal="false"):
    path.write_text(SPEC.format(kernels=kernels, baselines=baselines, causal=causal))
    return path


def command(spec, results, *options):
    return [
        *(sys.executable, "-m", "attnsweep", "run", str(spec), "--results", str(results)),
        *("--kernels", str(FAMILIES), *options),
    ]


def attnsweep(spec, results, *options):
    return subprocess.run(command(spec, results, *options), capture_output=True, text=True, timeout=300)


def rows(results):
    (path,) = results.rglob("trials.jsonl")
    trials, warnings = read_trials(path)
    return trials, warnings, path


def test_each_fault_is_its_own_row(tmp_path):
    spec = write_spec(tmp_path / "faults.yaml", kernels="{misbehaves: {}, naive: {THREADS: [64, 128]}}")
    done = attnsweep(spec, tmp_path / "results")
    trials, warnings, _ = rows(tmp_path / "results")
    assert warnings == []
    found = {t.config.get("FAULT"): t for t in trials if t.kernel == "misbehaves"}
    assert {fault: t.status for fault, t in found.items()} == {
        0: Status.OK,
        1: Status.TIMEOUT,
        2: Status.LAUNCH_ERROR,
        3: Status.WRONG,
        4: Status.WRONG,
        5: Status.WRONG,
        6: Status.WRONG,
        7: Status.WRONG,
    }
    assert "bytes outside 'o'" in found[3].detail
    assert "NaN" in found[4].detail
    assert "a race, or an answer kept from an earlier call" in found[7].detail
    assert "illegal" in found[2].detail.lower() or "address" in found[2].detail.lower()
    assert [t.status for t in trials if t.kernel == "naive"] == [Status.OK] * 2
    assert done.returncode == 0, done.stderr
    assert "naive" in done.stdout


def test_only_faults_is_exit_code_1(tmp_path):
    spec = write_spec(tmp_path / "wrong.yaml", kernels="{misbehaves: {FAULT: [4, 5]}}")
    done = attnsweep(spec, tmp_path / "results")
    assert done.returncode == 1, done.stderr


def test_baselines_are_rows_and_skipped_ones_say_why(tmp_path):
    spec = write_spec(tmp_path / "baselines.yaml", kernels="{naive: {}}", baselines="all")
    done = attnsweep(spec, tmp_path / "results", "--json")
    assert done.returncode == 0, done.stderr
    trials, _, _ = rows(tmp_path / "results")
    baselines = {t.provider: t for t in trials if t.provider != "attnsweep"}
    assert set(baselines) >= {"torch_flash", "torch_cudnn", "torch_efficient", "unfused", "triton_flash"}
    for baseline in baselines.values():
        assert baseline.status in (Status.OK, Status.NOISY, Status.SKIPPED)
        assert baseline.time_us is not None or baseline.detail
        if baseline.accuracy and not in_other_format(baseline.provider, baseline.problem):
            assert baseline.accuracy.rel_err <= baseline.accuracy.limit
    assert json.loads(done.stdout)["problems"]


@pytest.mark.parametrize(
    "problem",
    [
        "{batch: 3, heads: 8, heads_kv: 2, seqlen: 384, padding: [right, 40]}",
        "{batch: 3, heads: 8, heads_kv: 2, seqlen: 384, causal: true, padding: [right, 40]}",
        "{batch: 2, heads: 4, seqlen: 512, window: [100, 0]}",
        "{batch: 2, heads: 4, seqlen: 512, window: [100, 0], padding: [right, 90]}",
        "{batch: 1, heads: 4, seqlen: 1000, causal: true, packed: [5, 40]}",
    ],
)
def test_cudnns_own_lengths_bands_and_ragged_tensors_are_right(tmp_path, problem):
    """Or it says why not: its versions differ."""
    spec = tmp_path / "cudnn.yaml"
    problem = problem.replace("}", ", head_dim: 64, dtype: bf16}")
    facts = f"problems: [{problem}]\nkernels: {{flash_fwd_wgmma: {{}}}}\nbaselines: [cudnn]\n"
    how = "search: {strategy: random, candidates: 2}\nmeasure: {rounds: 5, finalists: 2, replay_us: 200}\n"
    spec.write_text(facts + how)
    done = attnsweep(spec, tmp_path / "results", "--json")
    assert done.returncode == 0, done.stderr
    (baseline,) = (t for t in rows(tmp_path / "results")[0] if t.provider == "cudnn")
    assert baseline.status in (Status.OK, Status.NOISY, Status.SKIPPED)
    if baseline.status == Status.SKIPPED:
        pytest.skip(baseline.detail)
    assert baseline.accuracy.rel_err <= baseline.accuracy.limit


def test_kill_and_resume(tmp_path):
    spec = write_spec(tmp_path / "resume.yaml", kernels="{naive: {}, misbehaves: {FAULT: [0, 1]}}")
    # The hang holds the run for four seconds: time to kill it with every other row written.
    running = subprocess.Popen(
        command(spec, tmp_path / "results"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = list((tmp_path / "results").rglob("trials.jsonl"))
        if found and len(read_trials(found[0])[0]) >= 3:
            break
        time.sleep(0.05)
    running.kill()
    running.wait()
    before, warnings, path = rows(tmp_path / "results")
    assert len(before) >= 3
    assert len(warnings) <= 1
    first_lines = path.read_text().splitlines()[: len(before)]
    done = attnsweep(spec, tmp_path / "results")
    assert done.returncode == 0, done.stderr
    assert "kept" in done.stderr
    after = path.read_text().splitlines()
    assert after[: len(first_lines)] == first_lines
    trials, warnings, _ = rows(tmp_path / "results")
    assert len({t.key for t in trials}) == len(trials)
    # A third run finds everything measured and writes nothing.
    again = attnsweep(spec, tmp_path / "results")
    assert again.returncode == 0, again.stderr
    assert path.read_text().splitlines() == after + path.read_text().splitlines()[len(after) :]
    assert len(path.read_text().splitlines()) == len(after)


def test_ctrl_c_prints_the_ranking_so_far(tmp_path):
    spec = write_spec(tmp_path / "stop.yaml", kernels="{naive: {}, misbehaves: {FAULT: [0, 1]}}")
    spec.write_text(spec.read_text().replace("timeout_s: 4.0", "timeout_s: 60.0"))
    running = subprocess.Popen(
        command(spec, tmp_path / "results"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = list((tmp_path / "results").rglob("trials.jsonl"))
        if found and len(read_trials(found[0])[0]) >= 4:
            break
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: every process of the group
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert "naive" in out
    assert "interrupted" in err


def test_a_plain_read_of_a_cache_is_a_bound_in_the_same_rounds(tmp_path):
    problem = (
        "{batch: 8, heads: 32, heads_kv: 8, seqlen_q: 1, seqlen_k: 16384, head_dim: 128, dtype: bf16, causal: true"
    )
    config = "WARPS: 4, NUM_STAGES: 2, KEYS: 16, BLOCKS_PER_SM: 2, HEADS: 1, ROW_FRAGMENTS: 1, ITEM_COST: 1"
    spec = tmp_path / "read.yaml"
    spec.write_text(
        f"problems:\n  - {problem}, paged: [16]}}\nbaselines: [plain_read]\n"
        f"kernels: {{decode_paged_mma: {{{config}, EVICT_FIRST: 1, SCHEDULE: 0, PDL: 0}}}}\n"
    )
    done = attnsweep(spec, tmp_path / "results")
    assert done.returncode == 0, done.stderr
    trials, _, path = rows(tmp_path / "results")
    (read,) = [trial for trial in trials if trial.provider == "plain_read"]
    assert read.status is Status.OK, read.detail
    rate = 2 * 8 * 16384 * 8 * 128 * 2 / read.time_us.median * 1e6
    most = json.loads((path.parent / "environment.json").read_text())["memory_bytes_per_second"]
    assert 0.75 * most < rate < 1.02 * most  # each byte once, and no faster than the memory
    assert "of a plain read of K and V" in " ".join(done.stdout.split())
