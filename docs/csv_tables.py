"""The table of every recorded problem, on the site only. A MkDocs hook; mkdocs.yml names it.

What stands between `<!-- problems: FILE.csv -->` and `<!-- /problems -->`, for a code host, becomes
a table of that file with filters and a plot, which javascripts/tables.js makes.
"""

from __future__ import annotations

import csv
import html
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

SORT = Path(__file__).parent.parent / "attnsweep/reports/assets/sort.js"
PROBLEMS = re.compile(r"<!-- problems: (\S+\.csv) -->.*<!-- /problems -->", re.DOTALL)
COLUMNS = {
    "card": "card",
    "problem": "problem",
    "ours_us": "ours, µs",
    "base": "fastest baseline",
    "base_us": "its µs",
    "x_base": "× base",
    "x_fa3": "× FA-3",
    "tflops": "TFLOP/s",
    "spec": "spec",
    "notes": "notes",
}
_TEXT = ("card", "problem", "base", "spec", "notes")
_LABEL = re.compile(r"\(\d+,[\d/]+,(\d+)(?:x(\d+))?,([\d/]+)\) (\w+) (.*)")


def on_files(files: Files, *, config: Any) -> Files:
    """The files of the site, with the script that sorts the tables of a run's page too."""
    text = SORT.read_text(encoding="utf-8")
    files.append(File.generated(config, "javascripts/sort.js", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text with the table in place of its comment, and the width of the contents."""
    home = Path(page.file.abs_src_path).parent
    found = PROBLEMS.search(markdown)
    if found is None:
        return markdown
    page.meta["hide"] = ["toc"]
    with open(home / found[1], encoding="utf-8", newline="") as file:
        return PROBLEMS.sub(lambda _: table([*csv.DictReader(file)]), markdown, count=1)


def table(rows: list[dict[str, str]]) -> str:
    """The HTML of the rows, each with what filters and the plot ask of it."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in COLUMNS.values())
    body = "\n".join(_row(row) for row in rows)
    rows_of = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>"
    box = f'<div class="box"><table class="every">\n{rows_of}</table></div>'
    return f'<div class="problems">\n{box}\n</div>'


def _row(row: dict[str, str]) -> str:
    facts = facts_of(row)
    row = {**row, "card": facts["card"]}
    right = ' style="text-align: right;"'
    cells = [
        f"<td{'' if name in _TEXT else right}>{html.escape(row[name])}</td>" for name in COLUMNS
    ]
    data = " ".join(f'data-{name}="{html.escape(value)}"' for name, value in facts.items())
    return f"<tr {data}>{''.join(cells)}</tr>"


def facts_of(row: dict[str, str]) -> dict[str, str]:
    """Card, op, mask, dtype and head_dim of a row, its × base, and its group in the plot."""
    label = _LABEL.fullmatch(row["problem"])
    assert label is not None, row["problem"]
    seqlen_q, seqlen_k, head_dim, dtype, rest = label.groups()
    words = re.sub(r"\([^()]*(?:\([^()]*\)[^()]*)*\)", "", rest).split()
    op = "backward" if "backward" in words else "forward"
    words = [word for word in words if word != "backward"]
    few = seqlen_k is not None and int(seqlen_q) <= 64
    group = (
        ("backward" if op == "backward" else None)
        or ("FP8" if dtype.startswith("e4m3") else None)
        or ("fp32" if dtype == "fp32" else None)
        or ("few queries" if few else None)
        or (f"with {words[1]}" if len(words) > 1 else words[0])
    )
    card = row["card"].split()[1] if " " in row["card"] else row["card"]
    facts = {"card": card, "op": op, "mask": " ".join(words), "dtype": dtype, "head_dim": head_dim}
    return facts | {"ratio": row["x_base"], "group": group}
