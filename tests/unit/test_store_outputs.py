"""Files that commands write where a user says: never over a part of a recorded run."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from attnsweep.core.errors import StoreError
from attnsweep.store.outputs import check_output, refuse_recorded, write_output

RUN = Path(__file__).parent.parent.parent / "results" / "h100-80gb-hbm3" / "h100"


@pytest.fixture(autouse=True)
def run(tmp_path, monkeypatch):
    """A copy of a recorded run, and its files' bytes."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RUN, tmp_path / "run")
    (tmp_path / "run" / "profile.ncu-rep").write_bytes(b"precious")
    return tmp_path / "run"


def content(run):
    return {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}


COMMANDS = {
    "report html": "report run --html",
    "report csv": "report run --csv",
    "report markdown": "report run --markdown",
    "run html": "run quickstart --html",
    "check junit": "check --recorded run run --junit",
    "check markdown": "check --recorded run run --markdown",
    "init": "init --arch sm_90a --force",
    "tune": "tune 1,16,1024,64 --dry-run --arch sm_90a --force --save-spec",
    "shapes": "shapes --arch sm_90a --force",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_command_writes_over_a_part_of_a_run(attnsweep, run, command):
    before = content(run)
    after = ["--", "true"] if command.startswith("shapes") else []
    # A plain trials.jsonl would hide the packed rows, so it may not come to be either.
    for part in ("environment.json", "trials.jsonl"):
        done = attnsweep(*command.split(), f"run/{part}", *after)
        assert (done.returncode, f"run/{part}: is part of a run" in done.stderr) == (2, True)
        assert "Traceback" not in done.stderr
    assert content(run) == before


def test_every_file_of_a_run_is_part_of_it_and_nothing_else(run, tmp_path):
    for path in content(run):
        with pytest.raises(StoreError, match="is part of a run"):
            refuse_recorded(run / path)
    for path in ("run/ranking.csv", "run/ranking.md", "run/page.html", "spec.yaml", "trials.jsonl"):
        refuse_recorded(tmp_path / path)


def test_what_cannot_be_written_is_said_before_the_work(tmp_path):
    (tmp_path / "folder").mkdir()
    for wrong in (tmp_path / "no" / "x.md", tmp_path / "folder", Path("."), Path("/")):
        with pytest.raises(StoreError):
            check_output(wrong)
        with pytest.raises(StoreError, match="cannot be written"):
            write_output(wrong, "text")
    write_output(tmp_path / "x.md", "text")
    assert (tmp_path / "x.md").read_text() == "text"


def test_a_check_says_first_that_its_report_cannot_be_written(attnsweep):
    done = attnsweep("check", "--recorded", "run", "run", "--junit", "no/check.xml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no/check.xml: cannot be written: no: No such file or directory" in done.stderr


def test_a_check_says_first_that_junit_xml_needs_a_package(attnsweep, monkeypatch):
    monkeypatch.setitem(sys.modules, "junitparser", None)
    done = attnsweep("check", "--recorded", "run", "run", "--junit", "check.xml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "JUnit XML needs junitparser" in done.stderr
    assert "[ci]" in done.stderr


def test_a_check_prints_its_table_as_markdown(attnsweep):
    done = attnsweep("check", "--recorded", "run", "run", "--markdown", "-")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#") or done.stdout.startswith("|")
    assert "| pass |" in " ".join(done.stdout.split())
    assert not Path("-").exists()


def test_a_summary_that_cannot_be_written_does_not_lose_the_verdicts(attnsweep, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "no/summary.md")
    done = attnsweep("check", "--recorded", "run", "run", "--json")
    assert (done.returncode, "cannot write the job's summary" in done.stderr) == (2, True)
    assert json.loads(done.stdout)["problems"]
