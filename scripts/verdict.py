"""What a claim's test ends in, for every page of claims."""

from __future__ import annotations

from dataclasses import dataclass

HOLDS, PART, FAILS, OPEN = "holds", "in part", "does not hold", "not tested"
# By how much one time must be below another to be called faster: the claims differ by more.
MARGIN = 1.02


@dataclass(frozen=True)
class Verdict:
    """One claim: in their words, measured here, whether it holds, and the reason found."""

    claim: str
    measured: str
    verdict: str
    reason: str
