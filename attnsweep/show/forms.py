"""The forms of progress, apart from it, so that `attnsweep --version` need not import it."""

from __future__ import annotations

from enum import StrEnum


class Form(StrEnum):
    """Bars on a terminal and lines elsewhere, always lines, or JSON."""

    AUTO = "auto"
    PLAIN = "plain"
    JSON = "json"
