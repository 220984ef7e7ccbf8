"""Numbers as tables and sentences show them."""

from __future__ import annotations

import math


def figure(value: float, digits: int) -> str:
    """At least this many significant digits, never in powers of ten."""
    return f"{value:.{decimals_for(value, digits)}f}"


def decimals_for(value: float | None, digits: int, most: int = 5) -> int:
    """Decimals that give the value this many significant digits; at most `most`."""
    return min(most, max(0, digits - 1 - math.floor(math.log10(value or 1.0))))
