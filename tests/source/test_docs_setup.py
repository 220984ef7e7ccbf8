"""Commands that install attnsweep work on a bare Debian: pip refuses outside an environment."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
INSTALL = re.compile(r"^(?:\w*\$ )?pip install -e ", re.MULTILINE)
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    if INSTALL.search(path.read_text())
)
ENVIRONMENT = re.compile(r"^(?:\w*\$ )?python3 -m venv \.venv && \. \.venv/bin/activate\b", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_an_environment_is_made_before_pip_is_called(page):
    """In each block of the README, which people copy alone; once on every other page."""
    text = (ROOT / page).read_text()
    blocks = [text] if page != "README.md" else re.findall(r"^```\w*\n.*?^```", text, re.MULTILINE | re.DOTALL)
    installs = [block for block in blocks if INSTALL.search(block)]
    assert len(installs) == (3 if page == "README.md" else 1)
    for block in installs:
        assert ENVIRONMENT.search(block)
        assert ENVIRONMENT.search(block).end() < INSTALL.search(block).start()
