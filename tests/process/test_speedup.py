"""`attnsweep exec` and `speedup` on a program whose PyTorch and package are stand-ins."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict

import pytest
from fake_gpu import FakeGpu
from sweeping import use

from attnsweep.cli.program import said_of
from attnsweep.core.problem import Problem
from attnsweep.serve.export_code import CODE

PROGRAM = """
import sys, time, torch
time.sleep(0 if torch.fast else 1)
print("fast" if torch.fast else "slow")
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""
PACKAGE = """
import torch
def enable(): torch.fast = True
def counters(): return {"kernel": 3, "not_tuned": 1, "mask": 0}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A program, a PyTorch that knows whether it is fast, and an exported package."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lib" / "torch").mkdir(parents=True)
    (tmp_path / "lib" / "torch" / "__init__.py").write_text("fast = False\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"), prepend=os.pathsep)
    (tmp_path / "program.py").write_text(PROGRAM)
    write_package(tmp_path / "mine")
    return tmp_path


def write_package(out, text=PACKAGE):
    (out / "tuned").mkdir(parents=True, exist_ok=True)
    (out / "tuned" / "__init__.py").write_text(text)
    (out / "tuned" / "table.json").write_text("{}")


def attnsweep(*words, **options):
    command = [sys.executable, "-m", "attnsweep", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


CHILD = "import subprocess, sys; subprocess.run([sys.executable, 'program.py'])"


@pytest.mark.nightly(push=2)
@pytest.mark.parametrize(
    ("package", "program", "code", "printed", "said"),
    [
        ("mine", ["-c", CHILD], 0, "fast\n", "mine: 3 of 4 attention calls went to its kernels (1 not_tuned)"),
        ("mine", ["program.py", 7], 7, "fast\n", "mine: 3 of 4"),
        ("broken", ["program.py"], 1, "slow\n", "broken was not enabled: RuntimeError: no driver"),
        ("mine", ["-c", "print(1)"], 0, "1\n", "mine: not used: no process imported PyTorch"),
        ("mine", ["-c", "import os, torch; os._exit(0)"], 0, "", "mine: 0 of 0 attention calls went to its kernels"),
        ("lib", ["program.py"], 2, "", "is no exported package"),
        ("a b", ["program.py"], 2, "", "no such"),
    ],
    ids=["child", "exit code", "not enabled", "no PyTorch", "ended in the middle", "no package", "not there"],
)
def test_exec_runs_a_program_with_a_package_on_and_says_what_came_of_it(place, package, program, code, printed, said):
    write_package(place / "broken", "raise RuntimeError('no driver')")
    done = attnsweep("exec", package, "--", sys.executable, *program)
    assert (done.returncode, done.stdout) == (code, printed)
    assert said in done.stderr


@pytest.mark.nightly(push=1)
@pytest.mark.parametrize(
    ("table", "warned"),
    [
        ({"kernels": [{"mask": "causal"}, {"mask": "full bias"}]}, True),
        ({"kernels": [{"mask": "padded backward"}], "code": 0}, True),
        ({"kernels": [{"mask": "causal"}, {"mask": "window"}]}, False),
        ({"kernels": [{"mask": "full bias"}], "code": CODE}, False),
    ],
    ids=["bias", "padded", "none of these", "of today"],
)
def test_a_package_of_kernels_that_were_wrong_is_named_with_how_to_make_it_anew(place, table, warned):
    (place / "mine" / "tuned" / "table.json").write_text(json.dumps(table))
    shutil.copytree(place / "mine" / "tuned", place / "lib" / "tuned")
    for package in ("mine", "tuned"):  # a directory, and one that is installed
        done = attnsweep("exec", package, "--", sys.executable, "program.py")
        assert (done.returncode, done.stdout) == (0, "fast\n")
        again = f"make it anew: attnsweep export RUN... --out {package}"
        assert [line for line in done.stderr.splitlines() if again in line] == (
            [f"{package}: finite masks, or NaN beyond an item's keys, give NaN in its kernels; {again}"] * warned
        )


def test_a_program_that_runs_alone_later_has_no_package_on(place):
    attnsweep("exec", "mine", "--", sys.executable, "-c", "import torch")
    alone = subprocess.run([sys.executable, "program.py"], capture_output=True, text=True)
    assert alone.stdout == "slow\n"


# -- speedup ---------------------------------------------------------------------------------------

SPEC = """
name: model
arch: sm_90a
problems:
  - {batch: 1, heads: 4, seqlen: 2048, head_dim: 64, calls: 100}
  - {batch: 1, heads: 4, seqlen: 64, head_dim: 64, calls: 1}
kernels:
  naive: {}
baselines: [torch_flash, triton_flash]
"""


@pytest.fixture
def swept(place, monkeypatch):
    """What was swept, with how many seconds, by a command that has recorded its program."""
    gpu = FakeGpu()
    gpu.times = defaultdict(lambda: 10.0)
    use(monkeypatch, gpu)
    made = []

    def export(runs, out, families, *, name, compiled):
        made.append([*runs])
        write_package(out)

    monkeypatch.setattr("attnsweep.serve.export.export", export)
    (place / "out").mkdir()
    (place / "out" / "model.yaml").write_text(SPEC)
    command = [sys.executable, "program.py"]
    (place / "out" / "attnsweep-speedup.json").write_text(json.dumps({"command": command}))
    return made, gpu


def test_without_a_gpu_no_directory_is_made(place):
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = attnsweep("speedup", "out", "--", sys.executable, "program.py", env=hidden)
    assert (done.returncode, done.stdout) == (3, "")
    assert not (place / "out").exists()


@pytest.mark.nightly(push=0)
def test_speedup_says_before_and_after_and_goes_on_where_it_ended(place, swept, attnsweep):
    made, _ = swept
    words = ("speedup", "out", "--budget-s", "100", "--", sys.executable, "program.py")
    done = attnsweep(*words)
    assert done.returncode == 0, done.stderr
    assert "times as fast (95 % interval" in done.stdout
    assert "6 pairs of runs); 3 of 4 attention calls" in done.stdout
    pairs = [json.loads(line) for line in (place / "out" / "times.jsonl").read_text().splitlines()]
    assert len(pairs) == 6
    assert all(pair["before_s"] > pair["after_s"] for pair in pairs)
    (run,) = made[0]
    rows = map(json.loads, (run / "trials.jsonl").read_text().splitlines())
    assert {row["problem"]["seqlen_q"] for row in rows} == {2048}  # the other takes no time
    # It ended after two pairs; the others are run, and those are not run again.
    kept = (place / "out" / "times.jsonl").read_text().splitlines()[:2]
    (place / "out" / "times.jsonl").write_text("\n".join(kept) + "\n")
    assert attnsweep(*words).returncode == 0
    assert (place / "out" / "times.jsonl").read_text().splitlines()[:2] == kept
    assert len((place / "out" / "times.jsonl").read_text().splitlines()) == 6
    assert "attnsweep-" not in os.environ["PYTHONPATH"]


def test_a_directory_of_another_command_is_refused(place, swept, attnsweep):
    done = attnsweep("speedup", "out", "--", sys.executable, "another.py")
    assert done.returncode == 2
    assert "is of another command" in done.stderr
    done = attnsweep("speedup", "lib", "--", sys.executable, "program.py")
    assert done.returncode == 2
    assert "is no directory of attnsweep speedup" in done.stderr


def test_a_program_that_fails_ends_it_with_its_exit_code(place, swept, attnsweep):
    (place / "program.py").write_text("import torch, sys; sys.exit(5 * torch.fast)")
    done = attnsweep("speedup", "out", "--", sys.executable, "program.py")
    assert done.returncode == 5
    assert "after: the program ended with exit code 5" in done.stderr
    assert not (place / "out" / "times.jsonl").exists()


def pairs_of(*ratios):
    return [{"before_s": r, "after_s": 1.0, "calls": {"kernel": 1}} for r in ratios]


def test_the_sentence_claims_no_difference_where_the_interval_holds_one():
    said = said_of("p", pairs_of(1.2, 1.1, 1.15, 1.3, 1.2, 1.2))
    assert "1.2 → 1 s, 1.200 times as fast (95 % interval 1.100–1.300, 6 pairs" in said
    assert "no difference is shown" in said_of("p", pairs_of(1.2, 0.99, 1.15, 1.3, 1.2, 1.2))
    assert "(range 1.100–1.200, 2 pairs" in said_of("p", pairs_of(1.2, 1.1))
    assert "0.500 times as fast" in said_of("p", pairs_of(0.5, 0.5))
    assert "0 of 0 attention calls" in said_of("p", [{**pairs_of(2)[0], "calls": Counter()}] * 2)


def test_the_costliest_problems_share_the_budget(place):
    from attnsweep.cli.program import costliest
    from attnsweep.family.discover import discover
    from attnsweep.specs.load import load_spec

    (place / "s.yaml").write_text(SPEC.replace("calls: 1}", "calls: 200}"))
    spec = costliest(load_spec(place / "s.yaml", discover), 100)
    assert len(spec.problems) == 2
    assert spec.search.budget_s == 50
    assert spec.baselines == ("torch_flash",)
    few = costliest(load_spec(place / "s.yaml", discover), 20)
    assert [entry.problem for entry in few.problems] == [Problem(1, 4, 4, 2048, 2048, 64)]
