"""What docs/ci.md shows is real: its YAML parses, its commands exist, its extras are declared.

And what other pages say of names and links.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from attnsweep import cli
from attnsweep.specs.load import load_spec
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
COMMANDS = [
    line for line in [*STEPS, *"".join(SHOWN).splitlines()] if line.startswith("attnsweep ")
]


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
        extra
        for line in STEPS
        if "pip install" in line
        for extra in re.search(r"\.\[(.*?)\]", line)[1].split(",")
    }
    assert named == {"compile", "cuda13", "ci"}
    assert named <= set(declared["optional-dependencies"])


def test_the_defaults_it_names_are_the_spec_s():
    assert f"check: {{slower: {CheckSpec().slower:g}}}" in TEXT
    assert f"check: {{budget_s: {CheckSpec().budget_s:g}}}" in TEXT


def test_the_names_of_elements_are_those_of_their_header():
    header = (ROOT / "kernels" / "common" / "tile" / "fragments.cuh").read_text()
    header = header[: header.index("// ---- fragments")]
    defined = r"^(?:typedef [\w ]+ (\w+);|constexpr \w+ (\w+) =|__device__ [\w ]+ (\w+)\()"
    names = {name for found in re.findall(defined, header, re.MULTILINE) for name in found if name}
    page = (ROOT / "docs" / "writing-a-kernel.md").read_text()
    (table,) = re.findall(
        r"\nOf elements, `common/tile/fragments.cuh` has:\n\n(.*?)\n\n", page, re.DOTALL
    )
    cells = "".join(line.split("|")[1] for line in table.splitlines())
    assert set(re.findall(r"`(\w+)", cells)) == names
    assert len(names) == 10


@pytest.mark.parametrize("page", ["index.md", "tutorials/on-a-gpu.md"])
@pytest.mark.parametrize("spec", ["h100", "h200"])
def test_the_number_of_problems_is_the_spec_s(page, spec):
    words = {8: "eight", 9: "nine", 10: "ten"}
    said = f"pipeline on {words[len(load_spec(Path(spec)).problems)]} problems"
    assert said in (ROOT / "docs" / page).read_text()


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
    block = re.search(r"<!-- quickstart.*?-->\n```\n\$ (.*?)\n(.*?)```", README, re.DOTALL)
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
    # The name of the directory is the only difference.
    told = done.stdout.replace(f"{tmp_path}/", "")
    told = "\n" + "\n".join(line.rstrip() for line in told.splitlines()) + "\n"
    at = 0
    for piece in block[2].split("…\n"):  # … stands for lines that are left out
        assert piece.count("\n") >= 3
        at = told.index(f"\n{piece}", at) + len(piece)


def test_the_first_screen_is_short_and_has_every_problem():
    before, _ = README.split("## Read on")
    assert len(before.splitlines()) <= 60
    assert before.count("<picture>") == 1
    commands = re.findall(r"^pip install .*$", before, re.MULTILINE)
    assert [command.split(" && ")[1].split()[1] for command in commands] == ["run", "tune"]
    for problem in yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())["problems"]:
        named = f"({problem['batch']},{problem['heads']},{problem['seqlen']},{problem['head_dim']})"
        assert re.search(rf"^{re.escape(named)} .*×", before, re.MULTILINE)


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
