"""The commands as a user meets them: exit codes, what is printed where, and bad input."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from attnsweep.compile import nvrtc
from attnsweep.core.errors import ToolchainError
from attnsweep.store.run import open_run
from attnsweep.tools import doctor

ROOT = Path(__file__).parent.parent.parent
FAMILIES = ROOT / "tests" / "families"
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


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Where the commands run."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def environment(tmp_path):
    """Of a command that is a process of its own."""
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}


def raising(error):
    def function(*_, **__):
        raise error

    return function


@pytest.fixture
def without_nvrtc(monkeypatch):
    for module in (nvrtc, doctor):
        monkeypatch.setattr(module, "nvrtc_version", raising(ToolchainError("no NVRTC")))


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def without_gpu(found, no_gpu):
    found(driver_cuda=None)


@pytest.mark.usefixtures("without_gpu")
def test_run_without_a_gpu_says_what_works_and_writes_nothing(attnsweep, spec, tmp_path):
    done = attnsweep("run", spec)
    assert done.returncode == 3
    assert done.stdout == ""
    assert "Nothing was measured" in done.stderr
    for command in ("attnsweep run quickstart", "compile", "attnsweep doctor"):
        assert command in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.usefixtures("without_gpu", "without_nvrtc")
def test_without_nvrtc_compiling_is_not_offered_but_installing_it(attnsweep, spec, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = attnsweep("run", spec)
    assert done.returncode == 3
    assert "attnsweep compile" not in done.stderr
    assert "pip install -e '.[compile]'" in done.stderr
    done = attnsweep("doctor")
    assert done.returncode == 3
    out = done.stdout
    assert "compile, report and replay work" not in out
    assert "report and replay work; for compile: pip install -e '.[compile]'" in out
    assert "cuda13" not in out


@pytest.mark.usefixtures("without_gpu")
def test_with_nvrtc_compiling_is_offered(attnsweep, spec, found):
    found(nvrtc_version=(13, 0))
    said = attnsweep("run", spec, width=10_000).stderr  # however long the path
    assert f"attnsweep compile {spec} --arch sm_90a" in said
    out = attnsweep("doctor").stdout
    assert "compile, report and replay work" in out
    assert "pip install" not in out


@pytest.mark.skipif(has_driver(), reason="this machine has a driver")
@pytest.mark.parametrize("words", ["judge mine:f 1,16,1024,64", "speedup out -- python -c 1"])
def test_a_command_that_cannot_do_without_a_gpu_names_doctor(attnsweep, words):
    done = attnsweep(*words.split())
    assert done.returncode == 3
    assert "attnsweep doctor says what is missing" in done.stderr


@pytest.mark.skipif(has_driver(), reason="this machine has a driver")
def test_without_a_driver_nothing_for_the_gpu_is_to_be_installed(attnsweep, spec):
    said = attnsweep("run", spec).stderr
    assert said.startswith("error: no NVIDIA driver")
    assert "CuPy" not in said
    findings = {f["name"]: f for f in json.loads(attnsweep("doctor", "--json").stdout)["findings"]}
    assert findings["driver"]["needed"]
    assert not findings["driver"]["ok"]
    for name in ("CuPy", "GPU", "NVML", "PyTorch", "flash_attn_4"):
        assert not findings[name]["needed"]
        assert findings[name]["fix"] is None


@pytest.mark.parametrize("command", ["compile", "run", "run --dry-run"])
def test_ctrl_c_says_interrupted_and_is_exit_code_130(attnsweep, spec, tmp_path, command):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "naive.py").write_text("kernel = None\nraise KeyboardInterrupt\n")
    done = attnsweep(*command.split(), spec, "--kernels", "mine")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


# -- as a process of its own ----------------------------------------------------------------


def test_ctrl_c_while_the_commands_are_imported_has_no_traceback():
    code = (
        "import runpy, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'attnsweep.cli.sweep': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "runpy.run_module('attnsweep', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"attnsweep": "attnsweep.__main__:main"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_output_that_cannot_be_written_is_one_line(environment):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "attnsweep", "list", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            timeout=120,
        )
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last == "error: cannot write the output: No space left on device"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("asked", "begins", "code"),
    [
        ("list", "append_paged_", 0),
        # The verdict on a recording made anew, not that its reader had enough.
        (f"check --recorded {ROOT}/results/h200/mma_h200 {ROOT}/results/h200/ladder", "", 4),
    ],
)
def test_a_closed_pipe_is_quiet(environment, asked, begins, code):
    command = f"{sys.executable} -m attnsweep {asked} | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command.replace("head -c 1", "head -1") if begins else command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.stderr == ""
    assert done.stdout.startswith(begins)
    assert done.returncode == code


def test_an_ascii_terminal_gets_other_letters_not_a_traceback(environment):
    done = subprocess.run(
        [sys.executable, "-m", "attnsweep", "run", "µ.yaml"],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONIOENCODING": "ascii"},
        timeout=120,
    )
    assert "Traceback" not in done.stderr
    assert "u.yaml: no such file" in done.stderr


# -- what is asked for ----------------------------------------------------------------------


def test_a_fifo_is_no_spec(attnsweep, tmp_path):
    os.mkfifo(tmp_path / "spec.yaml")
    done = attnsweep("run", "spec.yaml", "--dry-run")
    assert done.returncode == 2
    assert "spec.yaml: is not a regular file" in done.stderr


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
    assert "naive.no_idle_block: a block has at most" in done.stdout
    done = attnsweep("run", spec, "--dry-run", "--problem", "1,2,256,64")
    assert "naive.no_idle_block" not in done.stdout  # it removes nothing there
    data = json.loads(attnsweep("run", spec, "--dry-run", "--json").stdout)
    assert data[0]["removed"]["no_idle_block"] == 1
    assert attnsweep("run", "quickstart", "--dry-run").returncode == 0  # for the recorded card
    assert not (tmp_path / "results").exists()


# -- on top of a spec -------------------------------------------------------------------------


def test_problems_and_settings_make_a_run_of_their_own(attnsweep, tmp_path):
    asked = ("run", "quickstart", "--problem", "4,32,4096,64 bf16")
    done = attnsweep(*asked)
    assert done.returncode == 0, done.stderr
    (directory,) = (tmp_path / "results" / "replay").iterdir()
    assert re.fullmatch("quickstart-[0-9a-f]{8}", directory.name)
    assert {trial.problem.label for trial in open_run(directory).trials} == {"(4,32,4096,64) bf16 full"}
    attnsweep(*asked, "--set", "kernels.flash_fwd_wgmma.BLOCK_N=[64]")
    attnsweep("run", "quickstart")
    names = {path.name for path in directory.parent.iterdir()}
    assert len(names) == 3
    assert "quickstart" in names
    attnsweep("run", "quickstart", "--problem", "B=4 H=32 S=4096 D=64 bf16")
    assert {path.name for path in directory.parent.iterdir()} == names


@pytest.mark.parametrize("command", [("run", "--dry-run"), ("compile",)])
def test_a_wrong_shape_or_setting_is_exit_code_2(attnsweep, spec, command):
    for option, value, words in (
        ("--problem", "4,32,4096", "--problem '4,32,4096'"),
        ("--problem", "nowhere.csv", "nowhere.csv: cannot be read"),
        ("--set", "measure.rounds=x", "--set measure.rounds=x: rounds must be"),
    ):
        done = attnsweep(*command, spec, option, value)
        assert done.returncode == 2
        assert words in done.stderr


def test_a_spec_may_name_its_kernels(attnsweep, tmp_path):
    path = tmp_path / "own.yaml"
    own = f"kernel_dir: {os.path.relpath(FAMILIES, tmp_path)}\n"
    path.write_text(own + SPEC.replace("naive: {}", "twice: {SCORE_THREADS: 64}"))
    assert "2 candidates" in attnsweep("run", path, "--dry-run").stdout
    assert "twice" in attnsweep("list", "--kernels", FAMILIES).stdout
    (tmp_path / "other").mkdir()
    for name in ("wrong.cu", "wrong.py"):
        shutil.copy(FAMILIES / name, tmp_path / "other")
    said = attnsweep("run", path, "--dry-run", "--kernels", tmp_path / "other").stderr
    assert "unknown kernel 'twice'" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("naive: {}", "naiv: {}"), ["unknown kernel 'naiv'", "'naive'"]),
        (("head_dim: 64", "head_dim: 96"), ["head_dim 96 is not one of"]),
        (("naive: {}", "naive: {THREADS: [512]}"), ["no_idle_block removed 1"]),
        (("kernels: {", "kernels: {{"), ["small.yaml:6:1", "begins in line 5"]),
    ],
    ids=["kernel", "shape", "rules", "yaml"],
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


def test_quickstart_replays_and_says_so(attnsweep):
    done = attnsweep("run", "quickstart")
    assert done.returncode == 0, done.stderr
    assert "H100" in done.stdout
    assert "recorded" in done.stdout
    assert "\x1b[" not in done.stdout + done.stderr
    data = json.loads(attnsweep("report", "--json").stdout)
    rows = data["problems"][0]["ranking"]
    assert len(rows) > 50
    assert all(row["recorded"] for row in rows if row["rank"])


def test_version(environment):
    """As a user who has no script on the PATH asks for it."""
    command = [sys.executable, "-m", "attnsweep", "--version"]
    said = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert re.fullmatch(r"attnsweep \d+\.\d+.*\n", said.stdout)
