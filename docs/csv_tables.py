"""Tables from CSV files, on the site only. A MkDocs hook; mkdocs.yml names it.

`<!-- table: FILE.csv COLUMN COLUMN … -->` becomes a table of these columns. A code host shows
nothing in its place, so the page links to the file as well.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas

TABLE = re.compile(r"<!-- table: (\S+\.csv) (.*?) -->")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text with its tables in place of their comments."""
    home = Path(page.file.abs_src_path).parent

    def table(found: re.Match[str]) -> str:
        rows = pandas.read_csv(home / found[1], dtype=str, keep_default_na=False)
        html = str(rows[found[2].split()].to_html(index=False))
        # Material styles tables without a class, and javascripts/sort.js sorts them.
        return html.replace('<table border="1" class="dataframe">', "<table>", 1)

    return TABLE.sub(table, markdown)
