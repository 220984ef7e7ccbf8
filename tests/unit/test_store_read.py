"""Reading recorded runs: what is missing, damaged, packed or of an older version."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from samples import H200 as ENVIRONMENT
from samples import filled, numbers
from samples import numbered as trial

from attnsweep.core.errors import StoreError
from attnsweep.store.run import find_runs, latest_run, open_run, pack, read_trials
from attnsweep.store.store import Store


def test_open_run_says_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such run"):
        open_run(tmp_path / "gone")
    with pytest.raises(StoreError, match=r"not a run directory: it has no trials\.jsonl"):
        open_run(tmp_path)
    run = tmp_path / "h200" / "quick"
    filled(run, 1)
    with pytest.raises(StoreError, match="not a run directory") as raised:
        open_run(tmp_path)
    assert str(run) in str(raised.value)
    (run / "spec.yaml").write_text("name: quick\n")
    with pytest.raises(StoreError, match="not a run: neither") as raised:
        open_run(run / "spec.yaml")
    assert str(run) in (raised.value.hint or "")


def test_a_run_without_rows_names_the_command(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        with pytest.raises(StoreError, match="nothing is recorded yet") as raised:
            open_run(tmp_path)
        assert "attnsweep run SPEC" in str(raised.value)
        store.describe("name: quick\n", ENVIRONMENT)
        with pytest.raises(StoreError) as raised:
            open_run(tmp_path)
        assert f"attnsweep run {tmp_path / 'spec.yaml'}" in str(raised.value)


def test_a_broken_environment_is_a_warning(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    (tmp_path / "environment.json").write_text('{"gpu": "NVIDIA H200"}')
    run = open_run(tmp_path)
    assert run.environment is None
    assert "arch: Field required" in run.warnings[0]


def test_latest_run_is_the_one_written_last(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no runs here"):
        latest_run(tmp_path)
    for age, name in ((300, "h200/a"), (100, "h100/b"), (200, "h200/c")):
        path = filled(tmp_path / name, 1)
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    with Store.open(tmp_path / "h200/empty"):  # newest, but without a row
        assert latest_run(tmp_path).directory == tmp_path / "h100/b"
    with Store.open(tmp_path / "h200/a") as store:
        store.append(trial(5))
    assert latest_run(tmp_path).directory == tmp_path / "h200/a"
    assert find_runs(tmp_path)[0] == tmp_path / "h100/b"


@pytest.mark.parametrize("text", ["{}", "[3]", "[{", "\xff"])
def test_a_plan_that_cannot_be_read_is_a_warning(tmp_path: Path, text: str) -> None:
    with Store.open(tmp_path) as store:
        store.append(trial(1))
    (tmp_path / "spaces.json").write_text(text, encoding="latin-1")
    run = open_run(tmp_path)
    assert run.spaces == []
    assert "spaces.json: not" in run.warnings[0]


def test_the_spaces_of_a_run_of_an_older_version_are_read(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.append(trial(1))
    (tmp_path / "planned.json").write_text('[{"candidates": 3}]')
    assert open_run(tmp_path).spaces == [{"candidates": 3}]
    (tmp_path / "spaces.json").write_text('[{"candidates": 4}]')
    assert open_run(tmp_path).spaces == [{"candidates": 4}]


def test_a_packed_run_has_the_same_rows_and_the_same_bytes_each_time(tmp_path):
    first, again = trial(32), trial(64)
    for name in ("one", "two"):
        with Store.open(tmp_path / name) as store:
            for row in (first, again, first.with_(detail="replaced", fingerprint="abc")):
                store.append(row)
        (tmp_path / name / "ranking.csv").write_text("derived")
    before = open_run(tmp_path / "one").trials
    sizes = {pack(tmp_path / name) for name in ("one", "two")}
    packed = [(tmp_path / name / "trials.jsonl.gz").read_bytes() for name in ("one", "two")]
    assert packed[0] == packed[1]
    assert sizes == {len(packed[0])}
    assert open_run(tmp_path / "one").trials == [t.with_(fingerprint=None) for t in before]
    assert not list((tmp_path / "one").glob("*.jsonl"))
    assert not (tmp_path / "one" / "ranking.csv").exists()
    assert pack(tmp_path / "one") == len(packed[0])
    assert find_runs(tmp_path) == [tmp_path / "one", tmp_path / "two"]


@pytest.mark.parametrize("damage", [b"", b"not gzip", None], ids=["empty", "foreign", "cut"])
def test_a_damaged_packed_run_is_an_error_that_names_it(tmp_path, damage):
    with Store.open(tmp_path) as store:
        store.append(trial(32))
    pack(tmp_path)
    path = tmp_path / "trials.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20] if damage is None else damage)
    with pytest.raises(StoreError, match=re.escape(str(tmp_path))) as caught:
        open_run(tmp_path)
    assert "restore the file from version control" in (caught.value.hint or "")


def test_a_sweep_in_the_directory_of_a_packed_run_begins_anew(tmp_path):
    with Store.open(tmp_path) as store:
        store.append(trial(32))
    pack(tmp_path)
    with Store.open(tmp_path) as store:
        assert store.trials == []
        store.append(trial(64))
    assert numbers(open_run(tmp_path).trials) == [64]


def test_one_problem_is_set_aside_with_every_line_of_it(tmp_path):
    other = replace(trial(0).problem, batch=7)
    with Store.open(tmp_path / "run") as store:
        for row in (trial(0), trial(1, problem=other), trial(0, detail="again")):
            store.append(row)
        before = store.path.read_bytes().splitlines(keepends=True)
        store.set_aside(trial(0).problem)
        store.set_aside(trial(0).problem)  # nothing is left of it: no second file
        assert store.trials == [trial(1, problem=other)]
        assert store.rows == 1
        store.append(trial(2))
    assert read_trials(store.path)[0] == [trial(1, problem=other), trial(2)]
    [aside] = (tmp_path / "run").glob("trials.2*.jsonl")
    assert aside.read_bytes() == before[0] + before[2]


# -- the environment ------------------------------------------------------------------------------

LADDER = Path(__file__).parent.parent.parent / "results" / "h200" / "ladder"
NEEDS_IT = [
    "tune 2,8,4096,128 --replay run",
    "run replay.yaml",
    "merge run --out whole",
    "export run --out mine",
    "accept run baseline",
]
SHOWS_IT = ["report run", "explain run", "check --recorded run run"]


@pytest.fixture
def told(attnsweep, tmp_path, monkeypatch):
    """All that a command says of a run with such an environment.json."""

    def run(command, text):
        monkeypatch.chdir(tmp_path)
        shutil.copytree(LADDER, "run")
        Path("run", "environment.json").unlink()
        if text is not None:
            Path("run", "environment.json").write_text(text)
        spec = (LADDER / "spec.yaml").read_text()
        replay = "device: replay\nrecording: run\n"
        Path("replay.yaml").write_text(spec.replace("device: cuda\n", replay))
        done = attnsweep(*command.split(), width=1000)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("command", NEEDS_IT)
def test_a_damaged_environment_is_called_damaged_where_it_is_needed(told, command):
    code, said = told(command, "{")
    assert code == 2
    assert "damaged" in said
    assert "no environment.json" not in said
    assert "has no" not in said


@pytest.mark.parametrize("command", NEEDS_IT)
def test_a_missing_environment_is_called_missing_where_it_is_needed(told, command):
    code, said = told(command, None)
    assert code == 2
    assert "no environment.json" in said
    assert "damaged" not in said


@pytest.mark.parametrize("command", SHOWS_IT)
def test_a_damaged_environment_is_not_called_missing_where_it_is_shown(told, command):
    code, said = told(command, "{")
    assert code in (0, 4)
    assert "no environment.json" not in said
