"""Links that leave docs/, made fit for the site. A MkDocs hook; mkdocs.yml names it.

On a code host `[template](../kernels/naive.cu)` leads to the file. The site holds no such file:
with `repo_url` set the link leads to the code host, otherwise it becomes the path as text, of which
a table has room for the link's own text alone. A link to a file that does not exist is a warning,
which `mkdocs build --strict` makes an error.
"""

from __future__ import annotations

import posixpath
import re
from logging import getLogger
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[([^]]*)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")
log = getLogger("mkdocs.hooks.repository_links")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page's text with its links to files outside docs/ replaced."""

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join("docs", page.file.src_uri, "..", target))
        if path.startswith("docs/"):
            return link[0]  # another page, which MkDocs itself checks
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, path)
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor or ''})"
        bare = text.strip("`").rstrip("/")
        if not path.endswith(bare):
            return f"{text} (`{path}`)"
        row = markdown.rfind("\n|", 0, link.start()) >= markdown.rfind("\n", 0, link.start())
        return f"`{bare if row else path}`"

    return LINK.sub(replaced, markdown)
