"""A run of many rows is read and reported in seconds, and in some hundred megabytes."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys

import pytest

from attnsweep.core.files import shipped

RECORDED = shipped("results") / "h100-80gb-hbm3" / "h100"
ROWS = 20_000


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The recorded run again and again, each time with other batches."""
    place = tmp_path_factory.mktemp("runs") / "large"
    place.mkdir()
    for name in ("environment.json", "spec.yaml"):
        (place / name).write_bytes((RECORDED / name).read_bytes())
    packed = (RECORDED / "trials.jsonl.xz").read_bytes()
    rows = [json.loads(line) for line in lzma.decompress(packed).splitlines()]
    with (place / "trials.jsonl").open("w") as file:
        for number in range(ROWS):
            row = rows[number % len(rows)]
            batch = row["problem"]["batch"] + 100 * (number // len(rows))
            print(json.dumps(row | {"problem": row["problem"] | {"batch": batch}}), file=file)
    return place


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(
    ("words", "cpu_s", "megabytes"), [(["--json"], 8, 700), (["--html", "page.html"], 12, 600)]
)
def test_a_large_run_takes_seconds_and_megabytes(large, tmp_path, words, cpu_s, megabytes):
    """CPU time, which other work on the machine does not make longer."""
    command = [sys.executable, "-m", "attnsweep", "report", str(large), *words]
    with (tmp_path / "out").open("wb") as out:
        child = subprocess.Popen(command, stdout=out, cwd=tmp_path)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    assert used.ru_utime < cpu_s
    assert used.ru_maxrss / 1e3 < megabytes
    if words == ["--json"]:
        problems = json.loads((tmp_path / "out").read_text())["problems"]
        assert sum(len(problem["ranking"]) for problem in problems) == ROWS
