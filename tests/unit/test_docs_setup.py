"""Commands that install attnsweep work on a bare Debian: pip refuses outside an environment."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
INSTALLS = "pip install -e "
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    if re.search(rf"^(?:\w*\$ )?{INSTALLS}", path.read_text(), re.MULTILINE)
)
REFUSES = "echo 'error: externally-managed-environment' >&2; exit 1"
# In an environment: tells what it was asked, if that is the active one.
TOOL = '[ "$VIRTUAL_ENV/bin/$(basename "$0")" = "$0" ] && echo "$(basename "$0") $*" >>"{said}"'
VENV = """[ "$1 $2" = "-m venv" ] && {python} -m venv --without-pip "$3"
for name in pip python python3 attnsweep pre-commit; do
  rm -f "$3/bin/$name"  # it may be a link to the interpreter
  cp "{tool}" "$3/bin/$name"
done"""


def blocks(text):
    """The shell commands of each fenced block, without prompts."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language in ("", "console") and INSTALLS in block:
            yield re.sub(r"^\w*\$ ", "", block, flags=re.MULTILINE)


def program(path, commands):
    path.write_text(f"#!/bin/sh -e\n{commands}\n")
    path.chmod(0o755)


@pytest.fixture
def bare(tmp_path):
    """Runs commands in an empty directory, where python3 is all there is; says what was asked."""
    said, tools, clone = tmp_path / "said", tmp_path / "tools", tmp_path / "clone"
    tools.mkdir()
    clone.mkdir()
    program(tools / "pip", REFUSES)
    program(tmp_path / "tool", TOOL.format(said=said))
    program(tools / "python3", VENV.format(python=sys.executable, tool=tmp_path / "tool"))

    def run(commands):
        done = subprocess.run(
            ["sh", "-e", "-c", commands],
            cwd=clone,
            env={"PATH": f"{tools}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"
        return said.read_text().splitlines()

    return run


@pytest.mark.parametrize("number", range(3))
def test_each_block_of_the_readme_runs_as_it_stands(bare, number):
    found = [*blocks(README)]
    assert len(found) == 3
    install, then = bare(found[number])
    assert install.startswith(INSTALLS)
    assert then.startswith(("attnsweep run", "attnsweep tune", "python -m pytest")[number])


@pytest.mark.parametrize("page", PAGES)
def test_a_page_makes_an_environment_before_it_installs(bare, page):
    lines = "".join(blocks((ROOT / page).read_text())).splitlines()
    wanted = [line for line in lines if "venv" in line or "pip install" in line]
    assert any(asked.startswith(INSTALLS) for asked in bare("\n".join(wanted)))
