"""Boolean masks: any pairs, given element by element; core/drawn.py draws them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnsweep.core.errors import ProblemError
from attnsweep.core.masks import Interval, check_drawn

PATTERNS = ("blocks", "documents", "holes", "padding")
_BOOLEAN = re.compile(r"boolean\((\w+), ?(\d+)(?:, ?(\d+))?\)")
_HINT = f"write one of {', '.join(PATTERNS)}, and its density: boolean(blocks,30)"


@dataclass(frozen=True, slots=True)
class Boolean:
    """A mask that is no interval, and so an input of a call, `mask`, as Interval.boolean is.

    blocks: 128 x 128 pairs are seen together, `density` percent of all, and some of each row.
    documents: rows see the keys of their part of the sequence, of `density` parts of other lengths.
    holes: rows see `density` percent of the keys of their causal interval, and the last. padding:
    keys of Padded("right", density, seed), of each item of the batch. The seed draws all of them.
    """

    pattern: str
    density: int
    seed: int = 0
    # As an interval it hides nothing.
    left = right = None
    sides = None, None
    top_left = of_head = False
    boolean = True
    kind = "boolean"

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise ProblemError(f"{self.pattern!r} is no pattern of a boolean mask", hint=_HINT)
        percent = self.density
        if self.pattern == "documents":
            if type(self.density) is not int or not 1 <= self.density <= 2**15:
                what = f"a mask has 1 to {2**15} documents, not {self.density!r}"
                raise ProblemError(what, hint=_HINT)
            percent = 100
        check_drawn(self.pattern, percent, self.seed, _HINT)

    @property
    def numbers(self) -> tuple[int, ...]:
        """What tells two such masks apart."""
        return PATTERNS.index(self.pattern), self.density, self.seed

    @property
    def label(self) -> str:
        """`boolean(blocks,30)`; with the seed after it if it is not 0."""
        seed = f",{self.seed}" if self.seed else ""
        return f"boolean({self.pattern},{self.density}{seed})"

    @property
    def facts(self) -> dict[str, Any]:
        """As rows and specs have it."""
        return {"causal": False, "boolean": [self.pattern, self.density, self.seed]}

    def of_lengths(self, seqlen_q: int, seqlen_k: int) -> Boolean:  # noqa: ARG002
        """Itself."""
        return self

    def diagonals(self, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """Those of all keys."""
        return Interval().diagonals(seqlen_q, seqlen_k)

    @property
    def of_item(self) -> bool:
        """Whether each item of a batch has its own."""
        return self.pattern == "padding"

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Boolean | Interval:
        """The mask of a problem's facts. Raises ProblemError."""
        values = facts.get("boolean")
        if isinstance(values, list | tuple) and len(values) in (2, 3) and type(values[1]) is int:
            return cls(*values)
        return Interval.of(facts)

    @classmethod
    def parse(cls, text: str) -> Boolean | Interval:
        """The mask of a label. Raises ProblemError for any other text."""
        match = _BOOLEAN.fullmatch(text)
        if match is None:
            return Interval.parse(text)
        return cls(match[1], int(match[2]), int(match[3] or 0))
