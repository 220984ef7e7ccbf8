"""Two versions of a callable, compared: real traces, a repository, and a GPU whose times are made up."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_gpu import FakeGpu
from samples import TEST_GPU
from sweeping import use_gpu

import attnsweep as package
from attnsweep.bench.gpu import WorkerError
from attnsweep.core.errors import NoGpuError
from attnsweep.core.trial import Status

missing = [name for name in ("torch", "triton", "git") if not (importlib.util.find_spec(name) or shutil.which(name))]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}"),
    pytest.mark.usefixtures("forked_tracers"),
]

LAUNCHERS = Path(__file__).parents[1] / "support/launchers/tuned.py"
ASKED = ["1,2,64,16", "--dtype", "bf16", "--config", "BLOCK=64"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A repository with one commit of the launchers, in which everything happens."""
    place, before = tmp_path_factory.mktemp("repository"), Path.cwd()
    shutil.copy(LAUNCHERS, place)
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    os.chdir(place)
    yield place
    os.chdir(before)


@pytest.fixture
def compared(place, attnsweep, monkeypatch):
    """The command's end, for a file that is changed so, and what the GPU was asked."""

    def compared(*arguments, changed=("", ""), old=20.0, new=20.0, faults=()):
        times = {"BLOCK=64": 20.0, "BLOKC=64": 20.0, "old": old, "new": new}
        gpu = FakeGpu(times, environment=TEST_GPU)
        gpu.faults |= dict(faults)
        use_gpu(monkeypatch, gpu)
        (place / "tuned.py").write_text(LAUNCHERS.read_text().replace(*changed))
        sides = ["--old", "tuned.py@HEAD:plain", "--new", "tuned.py:plain"]
        return attnsweep("check", *(arguments or [*sides, *ASKED])), gpu

    return compared


def test_without_a_gpu_it_says_what_compares_functions_there(attnsweep, place, monkeypatch):
    use_gpu(monkeypatch, FakeGpu({}, environment=NoGpuError("no CUDA GPU found")))
    done = attnsweep("check", "--old", "tuned.py@HEAD:plain", "--new", "tuned.py:plain", *ASKED)
    assert done.returncode == 3
    assert "--mode compile compares the machine code" in done.stderr
    assert "--recorded" not in done.stderr


SLOWER = ("range(D)", "range(D // 2)")  # other machine code, whatever it computes


def test_a_version_that_is_slower_is_a_regression(compared):
    done, gpu = compared(changed=SLOWER, new=22.0)
    assert (done.returncode, "regression" in done.stdout) == (1, True)
    assert ("trial", "BLOCK=64") in gpu.calls


def test_one_that_is_as_fast_passes(compared):
    done, _ = compared(changed=SLOWER)
    assert (done.returncode, "pass" in done.stdout) == (0, True)


def test_lines_that_moved_are_the_same_code_and_not_timed(compared):
    done, gpu = compared(changed=("CONFIGS = [", "\n\n# a comment\nCONFIGS = ["))
    assert done.returncode == 0
    assert "same machine code" in done.stdout
    assert not [call for call in gpu.calls if call[0] == "pair"]


def test_a_version_that_is_wrong_is_no_regression_but_wrong(compared):
    wrong = WorkerError(Status.WRONG, "relative error 2 over the limit 0.1")
    done, _ = compared(changed=SLOWER, faults={("trial", "BLOCK=64"): wrong})
    assert (done.returncode, "over the limit" in done.stdout) == (1, True)


def test_a_new_version_that_does_not_compile_is_wrong_and_an_old_one_inconclusive(compared):
    done, _ = compared("--old", "tuned.py@HEAD:plain", "--new", "tuned.py:plain", *ASKED[:3], "--config", "BLOCK=33")
    assert (done.returncode, "power of 2" in done.stdout) == (1, True)
    done, _ = compared("--old", "tuned.py@HEAD:gone", "--new", "tuned.py:plain", *ASKED)
    assert done.returncode in (2, 4)
    assert "gone" in done.stdout + done.stderr


def test_files_of_the_old_version_are_named_by_its_revision(compared, tmp_path):
    junit, sides = tmp_path / "check.xml", ["--old", "tuned.py@HEAD:plain", "--new", "tuned.py:plain"]
    asked = [*sides, *ASKED[:3], "--mode", "compile", "--config", "BLOKC=64", "--json", "--junit", junit]
    done, _ = compared(*asked)
    said = "tuned.py@HEAD:plain raised KeyError: 'Keyword argument BLOKC was specified but unrecognised' "
    assert said in done.stdout
    assert said in done.stderr
    assert "(tuned.py@HEAD:" in junit.read_text()
    assert "attnsweep-old-" not in done.stdout + done.stderr + junit.read_text()
    timed, _ = compared(*sides, *ASKED[:3], "--config", "BLOKC=64", changed=("BLOCK=32, **", "BLOKC, BLOCK=32, **"))
    assert said in timed.stdout
    assert "attnsweep-old-" not in timed.stdout + timed.stderr
    done, _ = compared("--old", "tuned.py@HEAD:gone", *sides[2:], *ASKED)
    assert "cannot import tuned.py@HEAD:gone: gone is not in it" in done.stderr


def test_a_new_version_whose_compiler_is_killed_is_inconclusive(compared):
    done, gpu = compared(
        changed=("    grid = (triton.cdiv(p", "    os.kill(os.getpid(), 9)\n    grid = (triton.cdiv(p")
    )
    assert (done.returncode, "died (SIGKILL)" in done.stdout) == (4, True)
    assert not [call for call in gpu.calls if call[0] == "trial"]


@pytest.mark.parametrize(
    ("old", "says"),
    [
        ("tuned.py@nowhere:plain", "no revision 'nowhere'"),
        ("other.py@HEAD:plain", "HEAD has no other.py"),
        ("tuned@HEAD:plain", "a revision needs a file"),
        ("tuned.py@HEAD", "no callable"),
    ],
)
def test_what_is_no_old_version_is_one_sentence(compared, old, says):
    done, gpu = compared("--old", old, "--new", "tuned.py:plain", *ASKED)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert not gpu.calls


def test_options_of_the_other_ways_are_refused(compared):
    done, _ = compared("--old", "tuned.py:plain", "--new", "tuned.py:plain", "1,2,64,16", "--recorded")
    assert (done.returncode, "--recorded" in done.stderr) == (2, True)
    done, _ = compared("spec.yaml", "--against", "run", "--causal")
    assert (done.returncode, "--causal" in done.stderr) == (2, True)


@pytest.mark.parametrize("config", ["BLOCK", "BLOCK=", "=64"])
def test_a_config_without_a_name_or_a_value_is_refused_with_its_option(compared, config):
    done, _ = compared("--old", "tuned.py:plain", "--new", "tuned.py:plain", *ASKED[:3], "--config", config)
    said = f"--config: not a parameter's value: {config!r}"
    assert (done.returncode, said in done.stderr, "NAME=VALUE" in done.stderr) == (2, True, True)


def test_a_run_of_calls_is_checked_against_the_files_that_it_kept(place, attnsweep, monkeypatch, tmp_path):
    gpu = FakeGpu({"BLOCK=64": 20.0, "old": 20.0, "new": 23.0}, environment=TEST_GPU)
    use_gpu(monkeypatch, gpu)
    (place / "attnsweep").symlink_to(Path(package.__file__).parent)  # as in a checkout of attnsweep's
    (place / "tuned.py").write_text(LAUNCHERS.read_text())
    problems = "problems: [{batch: 1, heads: 2, seqlen: 64, head_dim: 16, dtype: bf16}]"
    spec = place / "kept.yaml"
    spec.write_text(f"{problems}\nkernels: {{plain: {{call: 'tuned.py:plain', BLOCK: [64]}}}}\nbaselines: []\n")
    assert attnsweep("run", spec, "--results", tmp_path).returncode == 0
    (run,) = tmp_path.glob("*/kept")
    same = attnsweep("check", spec, "--against", run)
    assert (same.returncode, "same machine code" in same.stdout) == (0, True)
    (place / "tuned.py").write_text(LAUNCHERS.read_text().replace(*SLOWER))
    slower = attnsweep("check", spec, "--against", run)
    assert (slower.returncode, "regression" in slower.stdout) == (1, True)
    for kept in run.rglob("*.files.json.xz"):
        kept.unlink()
    lost = attnsweep("check", spec, "--against", run)
    assert (lost.returncode, "lacks the winner's files" in lost.stdout) == (4, True)
