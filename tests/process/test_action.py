"""check/action.yml, its steps run as the scripts they are, in a small repository of somebody else's."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

from attnsweep.cli.action import arguments_of, end_of, fail_on_of, outputs_of
from attnsweep.core.errors import SpecError
from attnsweep.regress.verdicts import Verdict

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "check" / "action.yml").read_text())
INSTALL, COMPARE = ACTION["runs"]["steps"]
LAUNCHERS = ROOT / "tests/support/launchers/tuned.py"
ASKED = {"kernel": "tuned.py:plain", "shapes": "1,2,64,16", "dtype": "bf16", "config": "BLOCK=64", "mode": "compile"}
# What the runner's shell runs a composite step with.
SHELL = ["bash", "--noprofile", "--norc", "-eo", "pipefail"]
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
needs_triton = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "triton"))), reason="needs torch and triton"
)
OTHER = ("range(D)", "range(D // 2)")
# One warp holds four thousand elements, in registers.
HUGE = ("BLOCK=BLOCK, **launch", "BLOCK=4096, num_warps=1, **launch")


def git(place, *command):
    own = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "protocol.file.allow=always"]
    return subprocess.run(["git", "-C", str(place), *own, *command], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A repository of two commits; the second changes nothing that is compiled."""
    place = tmp_path_factory.mktemp("origin")
    shutil.copy(LAUNCHERS, place)
    git(place, "init", "-q", "-b", "main")
    for message in ("first", "second"):
        with (place / "tuned.py").open("a") as file:
            file.write(f"# {message}\n")
        git(place, "add", ".")
        git(place, "commit", "-q", "-m", message)
    return place


class Runner:
    """Runs the action's steps as a runner does. changed: the working tree's launchers are."""

    def __init__(self, place, temp):
        self.place, self.temp = place, temp
        temp.mkdir()

    def change(self, old, new):
        text = (self.place / "tuned.py").read_text()
        assert old in text
        (self.place / "tuned.py").write_text(text.replace(old, new))

    def step(self, step, inputs, **more):
        """A step's end, its log and what it left in the file of each variable of the runner's."""
        given = {name: each.get("default", "") for name, each in ACTION["inputs"].items()} | inputs
        own = {
            name: EXPRESSION.sub(lambda found: given[found[1].removeprefix("inputs.")], value)
            for name, value in step["env"].items()
        }
        files = {name: self.temp / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        runner = {"GITHUB_ACTIONS": "true", "GITHUB_EVENT_NAME": "pull_request", "RUNNER_TEMP": str(self.temp)}
        runner |= {"GITHUB_ACTION_PATH": str(ROOT / "check"), "CUDA_VISIBLE_DEVICES": ""}
        runner |= {name: str(file) for name, file in files.items()}
        script = self.temp / "script.sh"
        script.write_text(step["run"])
        done = subprocess.run(
            [*SHELL, str(script)],
            cwd=self.place,
            env={**os.environ, **runner, **own, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        left = {name: file.read_text() if file.exists() else "" for name, file in files.items()}
        outputs = dict(line.split("=", 1) for line in left["GITHUB_OUTPUT"].splitlines())
        return done.returncode, done.stdout, outputs, left["GITHUB_STEP_SUMMARY"]

    def __call__(self, inputs, **more):
        return self.step(COMPARE, {"python": sys.executable, **ASKED, **inputs}, **more)


@pytest.fixture
def runner(origin, tmp_path):
    """A checkout of two commits, as `fetch-depth: 2` makes it."""
    git(tmp_path, "clone", "-q", "--depth", "2", f"file://{origin}", "clone")
    return Runner(tmp_path / "clone", tmp_path / "temp")


# -- the file ---------------------------------------------------------------------------------


def test_no_input_is_part_of_a_script():
    for step in (INSTALL, COMPARE):
        assert "${{" not in step["run"]
        for value in step["env"].values():
            (name,) = EXPRESSION.fullmatch(value).groups()
            assert name.removeprefix("inputs.") in ACTION["inputs"]
    whole = (ROOT / "check" / "action.yml").read_text()
    assert not re.search(r"GITHUB_TOKEN|github\.token|secrets\.|permissions", whole)


def test_every_input_reaches_a_step_and_every_output_is_written():
    used = {value for step in (INSTALL, COMPARE) for value in step["env"].values()}
    assert used == {f"${{{{ inputs.{name} }}}}" for name in ACTION["inputs"]}
    found = outputs_of({"problems": [{"verdict": "pass", "ratio": None}]}) | {"json": "", "junit": ""}
    written = {f"${{{{ steps.check.outputs.{name} }}}}" for name in found}
    assert {each["value"] for each in ACTION["outputs"].values()} == written


@pytest.mark.parametrize(
    ("inputs", "pip", "code", "extras"),
    [
        ({"mode": "compile"}, 0, 0, "ci,inspect"),
        ({}, 0, 0, "ci,cuda13"),
        ({"cuda": "12"}, 0, 0, "ci,cuda12"),
        ({"mode": "compile"}, 1, 2, "ci,inspect"),  # no registry: exit code 1 would be a verdict
    ],
)
def test_it_installs_itself(runner, tmp_path, inputs, pip, code, extras):
    asked, python = tmp_path / "asked", tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\nif [ "$3" = pip ]; then printf "%s\\n" "$@" > {asked}; exit {pip}; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    # Files with the names of modules, in the repository that is checked.
    for name in ("pip", "json", "attnsweep"):
        (runner.place / f"{name}.py").write_text("raise SystemExit(0)\n")
    ended, log, _, _ = runner.step(INSTALL, {"python": str(python), **inputs})
    assert ended == code, log
    assert asked.read_text().split()[:4] == ["-P", "-m", "pip", "install"]
    assert asked.read_text().split()[-1] == f"{ROOT}/check/..[{extras}]"
    assert pip or log.startswith("attnsweep ")


def test_its_page_has_every_input_and_output_and_workflows_that_are_some():
    page = (ROOT / "docs" / "how-to" / "action.md").read_text()
    used = []
    for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL):
        workflow = yaml.safe_load(block)
        assert workflow["permissions"] == {"contents": "read"}
        (job,) = workflow["jobs"].values()
        used += [step["with"] for step in job["steps"] if "attnsweep/check" in step.get("uses", "")]
    assert [{*inputs} <= {*ACTION["inputs"]} for inputs in used] == [True, True]
    rows = {word for row in re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE) for word in re.findall("`(.*?)`", row)}
    assert rows == {*ACTION["inputs"], *ACTION["outputs"]}
    for name, default in re.findall(r"^\| `([a-z-]+)` \| `([^`]*)` \|", page, re.MULTILINE):
        assert ACTION["inputs"][name]["default"] == default


# -- verdicts ---------------------------------------------------------------------------------


@needs_triton
def test_a_pull_request_that_changes_no_code_passes(runner):
    code, log, outputs, summary = runner({})
    assert code == 0, log
    assert (outputs["verdict"], outputs["ratio"], outputs["low"], outputs["high"]) == ("pass", "", "", "")
    (problem,) = json.loads(Path(outputs["json"]).read_text())["problems"]
    assert problem["why"] == "same machine code and launches"
    assert [*ElementTree.parse(outputs["junit"]).getroot().iter("testcase")]
    assert "| copied |" in summary
    assert "tuned.py@HEAD^1:plain" in summary.replace("\\", "")


@needs_triton
def test_a_regression_fails_the_step_and_is_annotated(runner):
    runner.change(*HUGE)
    code, log, outputs, summary = runner({})
    assert (code, outputs["verdict"]) == (1, "regression"), log
    assert "::error title=attnsweep%3A (1%2C2%2C64%2C16) bf16 full::regression" in log
    assert "limited by registers" in summary


@needs_triton
def test_several_shapes_of_a_file_and_the_code_of_a_change_sees_no_file_of_the_runner(runner):
    (runner.place / "shapes.csv").write_text("B,H,S,D\n1,2,64,16\n1,2,128,16\n")
    runner.change(*OTHER)
    runner.change(
        "import os\n", "import os\nassert not [n for n in os.environ if n.startswith(('GITHUB_O', 'INPUT_'))]\n"
    )
    code, log, outputs, _ = runner({"shapes": "shapes.csv", "causal": "true", "fail-on": "changed"})
    assert (code, outputs["verdict"]) == (1, "changed"), log
    labels = [each["problem"] for each in json.loads(Path(outputs["json"]).read_text())["problems"]]
    assert labels == ["(1,2,64,16) bf16 causal", "(1,2,128,16) bf16 causal"]


@pytest.mark.parametrize(
    ("met", "fail_on", "code"),
    [
        ("pass improvement changed", "regression,wrong", 0),
        ("pass inconclusive", "regression,wrong", 0),
        ("pass inconclusive", "regression, wrong, inconclusive", 4),
        ("regression inconclusive", "regression inconclusive", 1),
        ("wrong", "regression", 0),
        ("wrong", "regression,wrong", 1),
        ("changed", "changed", 1),
    ],
)
def test_the_verdicts_that_fail_are_those_that_are_named(met, fail_on, code):
    assert end_of({*map(Verdict, met.split())}, fail_on_of(fail_on)) == code


def test_the_outputs_are_of_the_worst_shape():
    timed = [("pass", 1.001, [0.99, 1.01]), ("regression", 1.05, [1.03, 1.07]), ("inconclusive", None, None)]
    found = {"problems": [dict(zip(("verdict", "ratio", "interval"), each, strict=True)) for each in timed]}
    assert outputs_of(found) == {"verdict": "regression", "ratio": "1.0500", "low": "1.0300", "high": "1.0700"}


def test_time_and_compile_get_the_options_that_they_have():
    given = {name: each.get("default", "") for name, each in ACTION["inputs"].items()} | ASKED
    timed = arguments_of(given | {"mode": "time", "kernel": "a/b.py:f?layout=bshd", "shapes": "1,2,64,16\n1,2,128,16"})
    assert timed[:2] == ["--old=a/b.py@HEAD^1:f?layout=bshd", "--new=a/b.py:f?layout=bshd"]
    assert timed[-3:] == ["--", "1,2,64,16", "1,2,128,16"]
    assert "--slower=0.02" in timed
    assert not [word for word in timed if word.startswith("--arch")]
    compiled = arguments_of(given)
    assert "--arch=sm_90a" in compiled
    assert not [word for word in compiled if word.startswith("--slower")]


# -- no verdict -------------------------------------------------------------------------------


def no_verdict(found, code, *says):
    """The step failed with a code that is no verdict, said why, and wrote no output."""
    ended, log, outputs, summary = found
    assert ended == code, log
    assert code not in (0, 1, 4)
    for text in says:
        assert text in " ".join(log.split())
    assert "::error title=attnsweep%3A no verdict::" in log
    assert (outputs, summary) == ({}, "")


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"fail-on": "regresion"}, "no verdict: 'regresion'"),
        ({"fail-on": " , "}, "names no verdict"),
        ({"fail-on": "pass"}, "no verdict: 'pass'"),
        ({"mode": "fast"}, "no mode: 'fast'"),
        ({"causal": "yes"}, "neither: 'yes'"),
        ({"base": "--output=tuned.py"}, "no revision"),
        ({"base": ""}, "no revision"),
        ({"kernel": "tuned.py"}, "no function"),
        ({"kernel": "$(touch made).py:f"}, "no function"),
    ],
)
def test_an_input_that_is_none_is_refused_before_anything_runs(inputs, says):
    given = {name: each.get("default", "") for name, each in ACTION["inputs"].items()} | ASKED | inputs
    with pytest.raises(SpecError, match=re.escape(says)) as raised:
        arguments_of(given), fail_on_of(given["fail-on"])
    assert raised.value.where in inputs


def test_an_unknown_verdict_ends_the_step_in_2(runner):
    no_verdict(runner({"fail-on": "regresion"}), 2, "fail-on: no verdict: 'regresion'")


def test_pull_request_target_is_refused(runner):
    found = runner({}, GITHUB_EVENT_NAME="pull_request_target")
    no_verdict(found, 2, "on: pull_request_target: would run a stranger's change")


def test_inputs_are_words_and_never_commands(runner):
    given = {"config": '"; touch made; $(touch made)', "shapes": "`touch made`\n$(touch made)\n--help"}
    no_verdict(runner(given), 2)
    no_verdict(runner({"dtype": "$(touch made)"}), 2)
    assert not [*runner.place.rglob("made"), *runner.temp.rglob("made")]


def test_a_shallow_clone_is_told_how_to_fetch_its_base(origin, tmp_path):
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{origin}", "clone")
    runner = Runner(tmp_path / "clone", tmp_path / "temp")
    no_verdict(runner({}), 2, "no revision 'HEAD^1'", "this clone is shallow", "fetch-depth: 0")
    fork = git(origin, "rev-parse", "HEAD^1").stdout.strip()  # the commit of an event, as of a fork's
    no_verdict(runner({"base": fork}), 2, f"no revision '{fork}'", "this clone is shallow")


def test_a_base_that_does_not_exist(origin, tmp_path):
    git(tmp_path, "clone", "-q", f"file://{origin}", "clone")
    runner = Runner(tmp_path / "clone", tmp_path / "temp")
    no_verdict(runner({"base": "nowhere"}), 2, "no revision 'nowhere'", "git log")


def test_a_new_kernel_has_no_old_version(runner):
    shutil.copy(LAUNCHERS, runner.place / "new.py")
    no_verdict(runner({"kernel": "new.py:plain"}), 2, "HEAD^1 has no new.py: what is new has nothing")


def test_a_file_of_shapes_that_is_not_there(runner):
    no_verdict(runner({"shapes": "shapes.csv"}), 2, "shapes.csv")


def test_without_a_gpu_nothing_is_timed(runner):
    no_verdict(runner({"mode": "time"}), 3, "Nothing was compared")


def test_without_pytorch_nothing_is_compiled(runner, tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), str(ROOT)])
    no_verdict(runner({}, PYTHONPATH=path), 2, "pip install torch triton")


def test_a_check_that_is_killed_is_no_verdict(runner, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'check' in sys.orig_argv and '--json' in sys.orig_argv: os.kill(os.getpid(), 9)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), str(ROOT)])
    no_verdict(runner({}, PYTHONPATH=path), 137, "exit code -9")
