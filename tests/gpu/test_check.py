"""`check` on a GPU: unchanged code passes, a known slowdown regresses, a wrong result is wrong."""

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from attnsweep.tools.profile import find_ncu

pytestmark = pytest.mark.gpu

FAMILIES = Path(__file__).parent.parent / "families"
SPEC = """
problems:
  - {batch: 1, heads: 2, seqlen: 64, head_dim: 64}
kernels: {burns: {}}
baselines: []
measure: {rounds: 5, replay_us: 1000, cold: false, eager: false}
check: {slower: 0.02, budget_s: 60}
"""
CYCLES = 400_000  # what a block of the family takes


def attnsweep(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "attnsweep", *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The run of the unchanged family."""
    place = tmp_path_factory.mktemp("recorded")
    (place / "burns.yaml").write_text(SPEC)
    done = attnsweep(*("run", place / "burns.yaml", "--results", place / "results", "--kernels", FAMILIES))
    assert done.returncode == 0, done.stderr
    (path,) = (place / "results").rglob("trials.jsonl")
    return path.parent


@pytest.fixture
def check(recorded, tmp_path):
    """Check the families as a test edited them against the run; exit code, the finding, output."""
    families = Path(shutil.copytree(FAMILIES, tmp_path / "families"))
    (tmp_path / "burns.yaml").write_text(SPEC)

    def run(*edits, against=recorded, options=()):
        source = families / "burns.cu"
        for old, new in edits:
            assert old in source.read_text()
            source.write_text(source.read_text().replace(old, new))
        done = attnsweep(
            *("check", tmp_path / "burns.yaml", "--against", against, "--kernels", families), "--json", *options
        )
        assert done.stdout, done.stderr
        (finding,) = json.loads(done.stdout)["problems"]
        return done.returncode, finding

    return run


def slower_by(share):
    return ("EXTRA_CYCLES 0", f"EXTRA_CYCLES {round(CYCLES * share)}")


def test_code_that_did_not_change_passes_untimed(check):
    code, finding = check()
    assert (code, finding["verdict"]) == (0, "pass")
    assert "same machine code" in finding["why"]
    assert finding["rounds"] is None


def test_other_code_that_is_as_fast_passes_timed(check):
    code, finding = check(("float largest = -1e30f", "float largest = -2e30f"))
    assert (code, finding["verdict"]) == (0, "pass"), finding
    assert finding["rounds"] >= 20
    assert finding["interval"][1] < 1.02


@pytest.mark.parametrize("share", [0.03, 0.05, 0.3])
def test_a_known_slowdown_is_a_regression_of_that_size(check, share, tmp_path):
    pytest.importorskip("junitparser", reason="needs the ci extra: junitparser")
    code, finding = check(slower_by(share), options=("--junit", tmp_path / "check.xml"))
    assert (code, finding["verdict"]) == (1, "regression"), finding
    # Launching, some 2 of 200 us, is not slowed.
    assert finding["ratio"] - 1 == pytest.approx(share, rel=0.1)
    suite = ElementTree.parse(tmp_path / "check.xml").getroot().find("testsuite")
    assert suite.get("failures") == "1"


def test_a_known_speedup_is_an_improvement(check):
    code, finding = check(slower_by(-0.05))
    assert (code, finding["verdict"]) == (0, "improvement"), finding
    assert finding["ratio"] == pytest.approx(0.95, abs=0.005)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (("out / sum", "out / (1.01f * sum)"), "relative error"),
        (("float_to_half(out / sum);", "row ? 0 : float_to_half(out / sum);"), "wrong"),
        (("float largest", "float float largest"), "compile error"),
    ],
    ids=["one-per-cent-off", "one-row", "no-code"],
)
def test_wrong_code_is_wrong_however_fast(check, edit, why):
    code, finding = check(edit)
    assert (code, finding["verdict"]) == (1, "wrong")
    assert why in finding["why"]


def test_a_run_s_kept_code_is_what_is_timed_and_an_accepted_slowdown_passes(check, recorded, tmp_path):
    """After `accept` the slower code is the baseline, and today's faster code an improvement."""
    families = Path(shutil.copytree(FAMILIES, tmp_path / "slow"))
    source = families / "burns.cu"
    source.write_text(source.read_text().replace(*slower_by(0.1)))
    done = attnsweep(*("run", tmp_path / "burns.yaml", "--results", tmp_path / "new", "--kernels", families))
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "new").rglob("trials.jsonl")
    baseline = Path(shutil.copytree(recorded, tmp_path / "baseline"))
    assert attnsweep("accept", path.parent, baseline).returncode == 0
    code, finding = check(against=baseline)
    assert (code, finding["verdict"]) == (0, "improvement"), finding
    code, finding = check(slower_by(0.1), against=baseline)
    assert (code, finding["verdict"]) == (0, "pass")
    assert "same machine code" in finding["why"]


def test_profile_reads_counters_of_the_winner(recorded):
    if find_ncu() is None:
        pytest.skip("needs Nsight Compute: no ncu found")
    done = attnsweep("profile", recorded, "--kernels", FAMILIES, "--json")
    if done.returncode and "permission" in (done.stdout + done.stderr).lower():
        pytest.skip(f"needs the right to read hardware counters: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert (recorded / "counters.json").is_file()
