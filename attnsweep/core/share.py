"""A share of a time by which a kernel may be slower, as people write one."""

from __future__ import annotations

import re
from numbers import Real
from typing import Any

LEAST, MOST = 0.001, 0.5
"""Rounds resolve no less. Above half, who wrote a number meant percent: 3 for 3 %."""
IN_PERCENT = r"(\d+(?:\.\d*)?|\.\d+) ?%"
HINT = "0.03 or 3% is 3 %"


class ShareError(ValueError):
    """Not a share. `hint`: what was probably meant."""

    def __init__(self, what: str, hint: str = HINT) -> None:
        super().__init__(what)
        self.hint = hint


def share(value: object) -> float:
    """Read a share: a number, 0.02, or a text in percent, `2%`. Raises ShareError."""
    match = re.fullmatch(IN_PERCENT, value.strip()) if isinstance(value, str) else None
    found: Any = value  # a whole number may be too large for a float
    if match is not None:
        found = float(match[1]) / 100
    elif not isinstance(value, Real) or isinstance(value, bool):
        raise ShareError(f"must be a share, not {value!r}")
    if LEAST <= found <= MOST:
        return float(found)
    meant = match is None and MOST < found <= 100 * MOST
    raise ShareError(
        f"must be between {100 * LEAST:g}% and {100 * MOST:g}%, not {value}",
        f"did you mean {found:g}%, which is {found / 100:g}?" if meant else HINT,
    )


def share_of_text(text: str) -> float:
    """Read a share from a command line: `0.02` or `2%`. Raises ShareError."""
    try:
        return share(float(text))
    except ShareError:
        raise
    except ValueError:
        return share(text)
