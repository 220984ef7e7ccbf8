"""Tables of the pages are shown as tables: a blank line ends one, and what follows it is text with bars."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))


@pytest.mark.parametrize("page", PAGES)
def test_rows_stand_below_a_header(page):
    blocks = re.split(r"\n\s*\n", (ROOT / page).read_text())
    tables = [block.splitlines() for block in blocks if block.startswith("|")]
    alone = [rows[0] for rows in tables if len(rows) < 3 or not re.fullmatch(r"\|[-:| ]+\|", rows[1])]
    assert not alone
