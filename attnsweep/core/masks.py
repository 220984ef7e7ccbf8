"""Masks: which keys a query sees. The standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from attnsweep.core.errors import ProblemError

_WINDOW = re.compile(r"window\((\d+|all|-1), ?(\d+|all|-1)\)")


@dataclass(frozen=True, slots=True)
class Interval:
    """Query i sees the keys from `left` before its diagonal to `right` after it; None: all.

    The diagonal of query i is key i + seqlen_k - seqlen_q: aligned bottom-right, as in
    FlashAttention >= 2.1, whose `window_size` these two numbers are (-1 for None).
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, size in (("left", self.left), ("right", self.right)):
            if size is not None and size < 0:
                raise ProblemError(f"a window's {name} is {size}: it must be at least 0, or None")

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """(left, right)."""
        return self.left, self.right

    def diagonals(self, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """(low, high): query i sees the keys j with low <= j - i <= high."""
        diagonal = seqlen_k - seqlen_q
        low = 1 - seqlen_q if self.left is None else diagonal - self.left
        high = seqlen_k - 1 if self.right is None else diagonal + self.right
        return max(low, 1 - seqlen_q), min(high, seqlen_k - 1)

    def pairs(self, seqlen_q: int, seqlen_k: int) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        low, high = self.diagonals(seqlen_q, seqlen_k)

        def below(first: int) -> int:
            """The sum over queries i of the number of keys below first + i."""
            return _clamped(first + seqlen_q - 1, seqlen_k) - _clamped(first - 1, seqlen_k)

        return max(0, below(high + 1) - below(low))

    def empty_rows(self, seqlen_q: int, seqlen_k: int) -> int:
        """Queries that see no key."""
        low, high = self.diagonals(seqlen_q, seqlen_k)
        before = min(seqlen_q, max(0, -high))  # their last key would be before the first one
        after = min(seqlen_q, max(0, seqlen_q - (seqlen_k - low)))
        return min(seqlen_q, before + after)

    @property
    def kind(self) -> str:
        """`full`, `causal` or `window`: what a family declares that it can."""
        return _NAMED.get(self, "window")

    @property
    def label(self) -> str:
        """`full`, `causal`, `window(512,0)`, `window(all,512)`.

        An open side is a word: names of files keep no sign, and -1 and 1 would share one.
        """
        if self in _NAMED:
            return _NAMED[self]
        left, right = ("all" if size is None else size for size in self.sides)
        return f"window({left},{right})"

    @property
    def facts(self) -> dict[str, Any]:
        """As rows and specs have it: `causal`, and `window` only where there is one."""
        if self in _NAMED:
            return {"causal": self == CAUSAL}
        return {"causal": False, "window": [self.left, self.right]}

    @classmethod
    def parse(cls, text: str) -> Interval:
        """The mask of a label. Raises ProblemError for any other text."""
        for mask, name in _NAMED.items():
            if text == name:
                return mask
        match = _WINDOW.fullmatch(text)
        if match is None:
            hint = "write full, causal, or window(LEFT,RIGHT): window(512,0)"
            raise ProblemError(f"{text!r} is not a mask", hint=hint)
        left, right = (None if size in ("all", "-1") else int(size) for size in match.groups())
        return cls(left, right)


FULL = Interval()
CAUSAL = Interval(None, 0)
_NAMED = {FULL: "full", CAUSAL: "causal"}


def _clamped(to: int, most: int) -> int:
    """The sum of min(max(x, 0), most) over all whole x up to `to`."""
    if to <= 0:
        return 0
    whole = min(to, most)
    return whole * (whole + 1) // 2 + (to - whole) * most
