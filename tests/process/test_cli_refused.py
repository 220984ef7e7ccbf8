"""What the system refuses a command, and faults of ours: a message and an exit code, never 1."""

import errno
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from ordinary import locked

from attnsweep.core.files import shipped
from attnsweep.regress import recorded as recordings
from attnsweep.specs import load as loading

ROOT = Path(__file__).parent.parent.parent
RUN = ROOT / "results" / "h200" / "ladder"
OTHER = ROOT / "results" / "h200" / "mma_h200"
LONG = "a" * 300

# Every place where a command takes a path; PATH is below a directory that may not be read.
PATHS = [
    "accept PATH new",
    "accept RUN PATH",
    "check --recorded PATH RUN",
    "check --recorded RUN PATH",
    "check --recorded RUN RUN --junit PATH",
    "check --recorded RUN RUN --markdown PATH",
    "check PATH --against RUN",
    "check quickstart --against PATH",
    "compare PATH RUN",
    "compare RUN PATH",
    "compile PATH",
    "compile quickstart --kernels PATH",
    "explain PATH",
    "explain PATH=1",
    "explain --results PATH",
    "export PATH --out new",
    "export RUN --out PATH",
    "init PATH --arch sm_90a",
    "inspect PATH",
    "inspect naive --kernels PATH",
    "list --kernels PATH",
    "merge PATH RUN --out new",
    "merge RUN RUN --out PATH",
    "profile PATH",
    "report PATH",
    "report --results PATH",
    "report RUN --csv PATH",
    "report RUN --html PATH",
    "report RUN --markdown PATH",
    "run PATH",
    "run quickstart --html PATH",
    "run quickstart --kernels PATH",
    "run quickstart --problem PATH.csv --dry-run",
    "run quickstart --results PATH",
    "shapes PATH --arch sm_90a -- true",
    "tune 1,16,1024,64 --arch sm_90a --dry-run --save-spec PATH",
    "tune 1,16,1024,64 --replay PATH",
    "tune PATH.csv --arch sm_90a --dry-run",
]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Where the commands run."""
    monkeypatch.chdir(tmp_path)


def words(command, path):
    given = {"RUN": str(RUN)}
    return [given.get(word, word.replace("PATH", str(path))) for word in command.split()]


@pytest.mark.nightly(push=12)
@pytest.mark.parametrize("command", PATHS)
def test_what_may_not_be_read_is_a_message(attnsweep, tmp_path, command):
    (folder := tmp_path / "closed").mkdir()
    with locked(folder):
        done = attnsweep(*words(command, folder / "mine"), width=1000)
    assert done.returncode == 2, done.stderr
    assert re.match(r"error: \S*closed\b.*(Permission denied|no writable directory)", done.stderr)
    assert done.stdout == ""


@pytest.mark.parametrize("command", PATHS[::8])
def test_a_name_that_is_too_long_is_a_message(attnsweep, command):
    done = attnsweep(*words(command, LONG), width=1000)
    assert done.returncode == 2, done.stderr
    assert re.match(r"error: \S*aaa\S*: .*File name too long", done.stderr)
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["list --kernels PATH", "report PATH", "report --results PATH"])
def test_a_directory_that_may_not_be_read_is_not_called_empty(attnsweep, tmp_path, command):
    (folder := tmp_path / "closed").mkdir()
    with locked(folder):
        done = attnsweep(*words(command, folder), width=1000)
    assert done.returncode == 2
    assert re.match(r"error: \S*closed\b.* Permission denied\n  check its perm", done.stderr)


@pytest.mark.parametrize("command", ["accept RUN PATH", "export RUN --out PATH"])
def test_a_link_to_itself_is_a_message(attnsweep, tmp_path, command):
    (tmp_path / "loop").symlink_to("loop")
    done = attnsweep(*words(command, "loop"), width=1000)
    assert done.returncode == 2
    assert re.match(r"error: \S*loop: cannot be used: Too many levels of symbolic", done.stderr)


def test_merge_does_not_leave_out_machine_code_that_may_not_be_read(attnsweep, tmp_path):
    shutil.copytree(RUN, tmp_path / "part")
    with locked(tmp_path / "part" / "cubins"):
        done = attnsweep("merge", "part", "--out", "whole")
    assert done.returncode == 2
    assert "cubins: cannot be used: Permission denied" in " ".join(done.stderr.split())


@pytest.mark.parametrize("command", ["list --kernels mine", "run quickstart --kernels mine"])
def test_a_directory_without_families_is_said(attnsweep, tmp_path, command):
    (tmp_path / "mine" / "deeper").mkdir(parents=True)
    (tmp_path / "mine" / "_shared.py").touch()
    done = attnsweep(*command.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: mine: has no kernel families")
    (tmp_path / "mine" / "deeper" / "one.py").touch()
    assert "there are .py files in mine/deeper" in attnsweep(*command.split()).stderr


# -- faults of ours -------------------------------------------------------------------------------


FAULT = "attnsweep has a fault: {}\n  report it"
MEMORY = "Unable to allocate 3.5 TiB for an array"


@pytest.fixture
def comparing(monkeypatch):
    """Sets how runs are compared."""
    return partial(monkeypatch.setattr, recordings, "compare")


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (KeyError("cells"), 70, FAULT.format("KeyError: 'cells'")),
        (TypeError("no such thing"), 70, FAULT.format("TypeError: no such thing")),
        (AssertionError(), 70, FAULT.format("AssertionError")),
        # An EOFError was `Aborted!` of Click, and exit code 1, as every other.
        (EOFError("a pipe of ours"), 70, FAULT.format("EOFError: a pipe of ours")),
        (OSError("no file in it"), 70, FAULT.format("OSError: no file in it")),
        (MemoryError(MEMORY), 70, f"the host has no memory left: {MEMORY}\n"),
        # As progress on stderr does.
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 2,
         "no verdict: the reader of the output is gone\n"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else "",
)  # fmt: skip
def test_a_fault_of_ours_is_no_verdict(attnsweep, comparing, fault, code, said):
    def compare(*_, **__):
        raise fault

    comparing(compare)
    done = attnsweep("check", "--recorded", RUN, RUN, width=1000)
    assert (done.returncode, done.stdout) == (code, "")
    traceback = done.stderr.startswith("Traceback (most recent call last)")
    assert traceback == (FAULT[:22] in said)
    assert f"error: {said}" in done.stderr


def test_a_file_of_ours_that_is_missing_is_to_be_installed_again(attnsweep, monkeypatch):
    def load_spec(*_, **__):
        return open(shipped("configs") / "gone.yaml")

    monkeypatch.setattr(loading, "load_spec", load_spec)
    done = attnsweep("run", "quickstart", width=1000)
    assert done.returncode == 2
    assert "gone.yaml: cannot be used: No such file or directory" in done.stderr
    assert "it comes with attnsweep: install that again" in done.stderr


def test_a_working_directory_that_is_gone_is_said(attnsweep, tmp_path, monkeypatch):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = attnsweep("accept", RUN, "mine", "--force")
    assert done.returncode == 2
    assert done.stderr.startswith("error: the working directory: cannot be used: No such file")


# -- as a process of its own ----------------------------------------------------------------------


def shell(command, **options):
    return subprocess.run(
        ["bash", "-c", command.replace("attnsweep", f"{sys.executable} -m attnsweep")],
        capture_output=True, text=True, cwd=ROOT, timeout=120, **options,
    )  # fmt: skip


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(
    ("asked", "code"), [(f"check --recorded {OTHER} {RUN} <&- >&- 2>&-", 4), ("report nowhere 2>&-", 2)]
)
def test_a_closed_stream_changes_no_exit_code(asked, code):
    assert shell(f"attnsweep {asked}").returncode == code


def test_an_error_that_nobody_reads_keeps_its_exit_code():
    assert shell("attnsweep report nowhere 2>&1 | true; exit ${PIPESTATUS[0]}").returncode == 2


def test_a_package_that_cannot_be_imported_is_no_verdict():
    code = (
        "import runpy, sys\n"
        "sys.modules['typer'] = None\n"
        "sys.argv = ['attnsweep', 'check', '--recorded', 'old', 'new']\n"
        "runpy.run_module('attnsweep', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 70
    assert done.stderr.endswith("error: attnsweep cannot start: install it again\n")


def test_the_example_of_an_error_is_what_is_said(attnsweep):
    said = attnsweep("run", "nosuch.yaml").stderr
    assert f"$ attnsweep run nosuch.yaml\n{said}```" in (ROOT / "docs/reference/exit-codes.md").read_text()


def test_a_check_without_its_baseline_says_what_makes_one(attnsweep):
    done = attnsweep("check", "quickstart", "--against", "baselines/ci")
    assert done.returncode == 2
    hint = "attnsweep run quickstart, then attnsweep accept RUN baselines/ci"
    assert done.stderr == f"error: --against baselines/ci: no such run\n  {hint}\n"
