"""What docs/ci.md shows is real: its YAML parses, its commands exist, its extras are declared.

And what other pages say of names and links.
"""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest
import typer
import yaml
from samples import candidate, full_run
from typer.testing import CliRunner

from attnsweep import cli, open_run, rank
from attnsweep.core.trial import OURS, Accuracy, Status
from attnsweep.specs.model import CheckSpec

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
TEXT = (ROOT / "docs" / "ci.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL)
WORKFLOWS = [yaml.safe_load(block) for language, block in BLOCKS if language == "yaml"]
SHOWN = [block for language, block in BLOCKS if not language]


def run_steps(workflow):
    return [
        line
        for job in workflow["jobs"].values()
        for step in job["steps"]
        for line in str(step.get("run", "")).splitlines()
    ]


STEPS = [line for workflow in WORKFLOWS for line in run_steps(workflow)]
COMMANDS = [line for line in [*STEPS, *"".join(SHOWN).splitlines()] if line.startswith("attnsweep ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_shown_command_is_one_with_valid_options(command):
    archs = WORKFLOWS[0]["jobs"]["compile"]["strategy"]["matrix"]["arch"]
    for arch in archs:
        _, name, *arguments = shlex.split(command.replace("${{ matrix.arch }}", arch))
        group = typer.main.get_command(cli.app)
        found = group.get_command(group.make_context("attnsweep", [name]), name)
        found.make_context(name, arguments)  # raises UsageError
        for argument in arguments:
            if argument.endswith(".yaml"):
                assert (ROOT / argument).is_file()


def test_its_extras_are_declared():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        extra for line in STEPS if "pip install" in line for extra in re.search(r"\.\[(.*?)\]", line)[1].split(",")
    }
    assert named == {"compile", "cuda13", "ci"}
    assert named <= set(declared["optional-dependencies"])


def test_the_defaults_it_names_are_the_spec_s():
    assert f"check: {{slower: {CheckSpec().slower:g}}}" in TEXT
    assert f"check: {{budget_s: {CheckSpec().budget_s:g}}}" in TEXT


def anchor_of(heading):
    """The anchor that a code host gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


PAGES = sorted(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *map(str, PAGES)])
def test_links_lead_somewhere(page):
    home = (ROOT / page).parent
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", (ROOT / page).read_text()):
        there = home / target if target else ROOT / page
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert anchor in map(anchor_of, headings), f"{target}#{anchor}"


def test_the_readme_shows_what_a_pipe_prints(tmp_path):
    block = re.search(r"<!-- answer.*?-->\n```\n\$ (.*?)\n(.*?)```", README, re.DOTALL)
    assert block is not None
    command = shlex.split(block[1])[1:]
    results = tmp_path / "results"
    plain = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    done = subprocess.run(
        [sys.executable, "-m", "attnsweep", *command, "--results", str(results)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=plain,
    )
    assert done.stdout.replace(str(results), "results") == block[2]
    ours, theirs = re.search(r"\((\d+) against (\d+) µs\)", block[2]).groups()
    table = README.split("```\n\n| kernel", 1)[1].split("\n\n")[0].split("\n<!--")[0]
    times = [int(line.split("|")[2]) for line in table.splitlines()[2:]]
    assert (times[:2], len(times), times) == ([int(ours), int(theirs)], 5, sorted(times))


def test_the_readme_is_short_and_its_commands_are_about_one_shape():
    assert len(README.splitlines()) <= 90
    tuned = re.findall(r"attnsweep tune (.*)", README)
    assert len(tuned) == 3
    assert all("4,32,4096,64 --dtype bf16" in each for each in tuned)


def test_the_table_of_commands_has_them_all():
    index = (ROOT / "docs" / "index.md").read_text()
    shown = set(re.findall(r"`attnsweep (\w+)", index))
    group = typer.main.get_command(cli.app)
    assert shown >= set(group.list_commands(group.make_context("attnsweep", ["doctor"])))


SHOWN_READERS = sorted(
    {
        line
        for page in PAGES
        for line in re.findall(
            r"^\$? ?(attnsweep (?:report|explain|inspect|compare|profile) .*results/.*)",
            (ROOT / page).read_text(),
            re.MULTILINE,
        )
    }
)


@pytest.mark.parametrize("command", SHOWN_READERS)
def test_a_run_that_a_page_reads_is_recorded(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, name, *arguments = shlex.split(command)
    for argument in arguments:
        mine = argument.startswith(("results/replay/", "results/h100-80gb-hbm3/tune-"))
        if argument.startswith("results/") and not mine:
            assert Path(argument).is_dir()
    if name == "explain":
        done = CliRunner().invoke(cli.app, [name, *arguments])
        assert done.exit_code == 0, done.exception


# ---- what docs/explanation/fp8.md says of the recorded runs is in them ----
PAGE = " ".join((ROOT / "docs/explanation/fp8.md").read_text().split())


def ratios_at_fa3s_error(card):
    """Time of FlashAttention-3 over that of our fastest config that errs 2 % more at most."""
    run = open_run(ROOT / "results" / card / "fp8_h100")
    ratios = []
    for _, rows in rank(run.trials, run.environment).groupby("problem"):
        theirs = rows[rows["provider"] == "flash_attn_3_fp8"].iloc[0]
        ours = rows[(rows["provider"] == OURS) & rows["rank"].notna()]
        alike = ours[ours["rel_err"] <= 1.02 * theirs["rel_err"]]
        ratios.append(theirs["time_us"] / alike["time_us"].min())
    assert len(ratios) == 12
    return ratios


@pytest.mark.parametrize(("card", "name"), [("h100-80gb-hbm3", "an H100"), ("h200", "an H200")], ids=["H100", "H200"])
def test_how_fast_we_are_at_flash_attention_3s_error(card, name):
    ratios = ratios_at_fa3s_error(card)
    faster, slower = sum(ratio > 1 for ratio in ratios), 1 / min(ratios) - 1
    said = f"on {name} {min(ratios):.2f} to {max(ratios):.2f} times as fast, faster on {faster}"
    assert f"{said} and up to {100 * slower:.0f} % slower on the other {12 - faster}" in PAGE


def less_headroom(card):
    """By how much `HEADROOM=2` is slower than 5, and how much more exact, on each shape."""
    ours = defaultdict(list)
    for trial in open_run(ROOT / "results" / card / "fp8_h100").trials:
        if trial.provider == OURS and trial.time_us is not None and trial.accuracy is not None:
            found = trial.time_us.median, trial.accuracy.timed_err, trial.config
            ours[trial.problem].append(found)
    slower, errors = [], {2: [], 5: []}
    for rows in ours.values():
        best = {room: min((us, error) for us, error, c in rows if c["HEADROOM"] == room) for room in (2, 5)}
        slower.append(best[2][0] / best[5][0] - 1)
        for room, (_, error) in best.items():
            errors[room].append(error)
    less = [1 - a / b for a, b in zip(errors[2], errors[5], strict=True)]
    return sorted(slower), sorted(less)


def test_what_less_headroom_costs_and_what_it_gains_in_the_worst_row():
    slower, less = less_headroom("h200")
    assert f"was recorded on an H200: it is {100 * min(slower):.0f} to {100 * max(slower):.0f} %" in PAGE
    assert abs(median(less)) < 0.01
    assert f"the same at the median of the twelve shapes, and {100 * less[-1]:.0f} % smaller" in PAGE
    slower, less = less_headroom("h100-80gb-hbm3")
    costs = f"{max(0, 100 * slower[0]):.0f} to {100 * slower[-1]:.0f} %"
    assert f"on an H100 it is {costs} slower, and as exact at the median" in PAGE
    assert abs(median(less)) < 0.01


# ---- the tutorial's figures come from what was recorded ----


@pytest.fixture
def used():
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("used")
    sys.path.remove(str(ROOT / "scripts"))


NUMBERS = ("no", "one", "two", "three", "four", "five")


def test_the_page_sums_up_the_training_steps(used):
    rows = json.loads((ROOT / used.CARD / "training.json").read_text())["rows"]
    found = [(row["code"] == "short_training", row[m]) for row in rows for m in used.STEPS]
    served, short = ([each for over, each in found if over == kind] for kind in (False, True))

    def span(values):
        return f"{min(values):.2f} to {max(values):.2f}"

    faster = [each["pytorch"]["forward"] / each["package"]["forward"] for each in served]
    backward = [each["pytorch"]["backward"] / each["package"]["backward"] for each in served]
    undecided = sum(each["ratio"][1] <= 1 <= each["ratio"][2] for each in served)
    page = " ".join((ROOT / "docs/performance.md").read_text().split())
    for told in (
        f"steps are {span([each['ratio'][0] for each in served])} times as fast at the median; "
        f"{NUMBERS[undecided]} of {len(served)} intervals hold 1",
        f"the forward is {span(faster)} times as fast, the backward {span(backward)} times",
        f"The medians of the ratio are {span([each['ratio'][0] for each in short])}: handing a call over",
    ):
        assert told in page


# ---- what docs/explanation/numerics.md says of the share of proof is what runs printed ----
PRINTED = re.compile(
    r"\$ attnsweep run configs/\w+\.yaml --exhaustive\ntook (\d+) s; ([\d.]+) s of them proved outputs right"
)


def test_the_page_says_what_share_of_six_sweeps_proved_outputs():
    page = " ".join((ROOT / "docs/explanation/numerics.md").read_text().split())
    latest = PRINTED.findall((ROOT / "results/h100-80gb-hbm3/proof.txt").read_text())[-6:]
    shares = [100 * float(proof) / float(took) for took, proof in latest]
    assert f"in six sweeps of an H100 with empty caches {min(shares):.0f} to {max(shares):.0f} % of the whole" in page


# ---- docs/explanation/numerics.md has the largest share of each limit that rows used ----
def judged_row(us, **shares):
    worst = shares.get("row", 0.1)
    accuracy = Accuracy(rel_err=1e-3 * worst, limit=1e-3, case="normal", shares=shares, seed=7)
    return candidate("flash_fwd_wgmma", us, A=int(10 * us)).with_(accuracy=accuracy)


def a_baseline(name, status=Status.OK, **shares):
    row = judged_row(9.0, **shares)
    return row.with_(kernel=name, provider=name, config={}, status=status, detail="it is so")


def test_a_page_has_the_largest_share_of_each_limit(used):
    rows = [
        judged_row(1.0, row=0.5, gain=0.25, scale=0.75),
        judged_row(2.0, row=0.64, gain=0.125, scale=0.9),
        judged_row(3.0, row=7.0).with_(status=Status.WRONG, detail="wrong"),
        candidate("naive", 4.0),  # of an older protocol
        a_baseline("torch_math", row=1.5, rms=1.25),
        a_baseline("cudnn", Status.NOISY, row=0.5),
        a_baseline("unfused", Status.SKIPPED, row=0.5),
        a_baseline("plain_read", row=900.0),  # it computes nothing
    ]
    accuracy = importlib.import_module("accuracy")
    found = accuracy.summary([full_run(Path("results/h200/x"), trials=rows)])
    assert found["runs"] == ["h200/x"]
    assert found["recorded_on"] == ["NVIDIA H200"]
    ours, noisy, over = found["of"]
    assert ours == {
        "who": "flash_fwd_wgmma",
        "baseline": False,
        "dtype": "fp16",
        "rows": 2,
        "shares": {"row": 0.64, "gain": 0.25, "scale": 0.9},
        "error": 1e-3 * 0.64,
        "limit": 1e-3,
    }
    assert (noisy["who"], over["who"], over["baseline"]) == ("cudnn", "torch_math", True)
    header, _, first, second, third = accuracy.markdown(found).splitlines()
    assert header == (
        "| kernel or baseline | dtype | rows | row | RMS | gain of all | softmax scale | largest error | its limit |"
    )
    assert first == ("| `flash_fwd_wgmma` | fp16 | 2 | 64 % | – | 25 % | 90 % | 0.00064 | 0.001 |")
    assert second.startswith("| cudnn (baseline) | fp16 | 1 | 50 % | – |")
    assert third.endswith("| 150 % | 125 % | – | – | 0.0015, over the limit | 0.001 |")
