"""HTML pages as their readers see them."""

from __future__ import annotations

import re


def visible(text: str) -> str:
    """The page as its reader sees it before any script: no scripts, styles or tags."""
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))
