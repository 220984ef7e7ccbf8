"""A run of many rows is read and reported in seconds, and in some hundred megabytes."""

import json
import lzma
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnsweep.core.files import shipped

RECORDED = shipped("results") / "h100-80gb-hbm3" / "h100"
ROWS = 100_000


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The recorded run again and again, each time with shorter sequences."""
    place = tmp_path_factory.mktemp("runs") / "large"
    place.mkdir()
    for name in ("environment.json", "spec.yaml"):
        (place / name).write_bytes((RECORDED / name).read_bytes())
    packed = (RECORDED / "trials.jsonl.xz").read_bytes()
    rows = [json.loads(line) for line in lzma.decompress(packed).splitlines()]
    with (place / "trials.jsonl").open("w") as file:
        for number in range(ROWS):
            row = rows[number % len(rows)]
            problem, less = row["problem"], number // len(rows)
            shorter = {name: problem[name] - less for name in ("seqlen_q", "seqlen_k")}
            print(json.dumps(row | {"problem": problem | shorter}), file=file)
    return place


@pytest.mark.nightly(push=0)
@pytest.mark.parametrize(
    ("words", "cpu_s", "megabytes"),
    [
        (["report", "RUN", "--json"], 8, 400),
        (["report", "RUN"], 8, 400),
        (["report", "RUN", "--html", "page.html"], 8, 400),
        (["explain", "RUN"], 8, 400),
        (["compare", "RUN", "RUN"], 8, 400),
        (["check", "--recorded", "RUN", "RUN"], 8, 400),
    ],
)
def test_a_large_run_takes_seconds_and_megabytes(large, tmp_path, words, cpu_s, megabytes):
    """CPU time, which other work does not make longer; memory since the program began."""
    status = Path("/proc/self/status")
    if not status.is_file():
        pytest.skip("only Linux tells a process's largest memory since exec")
    program = (
        "import atexit, os, runpy, sys\n"
        f"told = lambda: sys.stderr.write(open('{status}').read() + f'CPU: {{os.times().user}}')\n"
        "atexit.register(told)\n"
        "runpy.run_module('attnsweep', run_name='__main__')"
    )
    command = [sys.executable, "-c", program, *(str(large) if word == "RUN" else word for word in words)]
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    used = dict(re.findall(r"^(VmHWM|CPU):\s*([\d.]+)", done.stderr, re.M))
    assert float(used["CPU"]) < cpu_s
    assert int(used["VmHWM"]) / 1e3 < megabytes
    if "--json" in words:
        problems = json.loads((tmp_path / "out").read_text())["problems"]
        assert sum(len(problem["ranking"]) for problem in problems) == ROWS
