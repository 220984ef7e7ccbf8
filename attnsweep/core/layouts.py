"""Layouts: which keys each item of a batch has, or each part of it. The standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from attnsweep.core.errors import ProblemError
from attnsweep.core.masks import Range, check_drawn, drawn_order

_PADDED = re.compile(r"(?:padded\()?(right|left), ?(\d+)(?:, ?(\d+))?\)?")
_PACKED = re.compile(r"(?:packed\()?(\d+)(?:, ?(\d+))?(?:, ?(\d+))?\)?")
_HOW_PACKED = (
    "write the number of sequences, and percent of the longest that the shortest has: 8,40"
)
_HINT = "write the padded side and percent of the keys that the shortest item has: right,40"


@dataclass(frozen=True, slots=True)
class Dense:
    """Every item has all keys."""

    kind = "dense"
    sequences = 0
    label = ""
    numbers = ()

    @property
    def facts(self) -> dict[str, Any]:
        """As rows and specs have it: nothing."""
        return {}

    def ranges(self, batch: int, seqlen_k: int) -> tuple[Range, ...]:
        """The keys of each item."""
        return ((0, seqlen_k),) * batch


@dataclass(frozen=True, slots=True)
class Padded:
    """Items have keys of their own number, and padding on one side of them, which no query sees.

    least: percent of seqlen_k that the shortest item has. Lengths are spread evenly from it to all
    keys, and seed draws their order. A batch of one has the least. The mask's diagonal is that of
    the whole seqlen_k, as in the padded batches of models.
    """

    side: str
    least: int
    seed: int = 0
    kind = "padded"
    sequences = 0

    def __post_init__(self) -> None:
        if self.side not in ("right", "left"):
            raise ProblemError(f"padding is right or left, not {self.side!r}", hint=_HINT)
        check_drawn("the shortest item", self.least, self.seed, _HINT)

    @property
    def numbers(self) -> tuple[int, ...]:
        """What tells two such layouts apart."""
        return int(self.side == "left"), self.least, self.seed

    @property
    def label(self) -> str:
        """` padded(right,40)`; with the seed after it if it is not 0."""
        return f" padded({self.side},{self.least}{f',{self.seed}' if self.seed else ''})"

    @property
    def facts(self) -> dict[str, Any]:
        """As rows and specs have it."""
        return {"padding": [self.side, self.least, self.seed]}

    def ranges(self, batch: int, seqlen_k: int) -> tuple[Range, ...]:
        """The keys of each item: the first, and the one after the last."""
        return _ranges(self, batch, seqlen_k)

    @classmethod
    def parse(cls, text: str) -> Padded:
        """The layout of a label, or of `right,40`. Raises ProblemError for any other text."""
        side, least, seed = _read(_PADDED, text, "not a padding", _HINT)
        return cls(side, int(least), int(seed or 0))


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences of other lengths, one behind the other in the one item of a batch.

    The queries of a sequence see its own keys alone, and the mask's diagonal is that of the
    sequence. sequences: how many there are. least: percent of the longest that the shortest has;
    0: it has no token. Lengths of queries, and of keys, are spread evenly, and seed draws their
    order.
    """

    sequences: int
    least: int = 40
    seed: int = 0
    kind = "packed"

    def __post_init__(self) -> None:
        if type(self.sequences) is not int or self.sequences < 1:
            what = f"packed sequences are counted from 1, not {self.sequences!r}"
            raise ProblemError(what, hint=_HOW_PACKED)
        check_drawn("the shortest sequence", self.least, self.seed, _HOW_PACKED)

    @property
    def numbers(self) -> tuple[int, ...]:
        """What tells two such layouts apart, and from padding."""
        return 2, self.sequences, self.least, self.seed

    @property
    def label(self) -> str:
        """` packed(8,40)`; with the seed after it if it is not 0."""
        seed = f",{self.seed}" if self.seed else ""
        return f" packed({self.sequences},{self.least}{seed})"

    @property
    def facts(self) -> dict[str, Any]:
        """As rows and specs have it."""
        return {"packed": [self.sequences, self.least, self.seed]}

    def ranges(self, batch: int, seqlen_k: int) -> tuple[Range, ...]:
        """Those of items: all keys."""
        return DENSE.ranges(batch, seqlen_k)

    def begins(self, seqlen: int) -> tuple[int, ...]:
        """cu_seqlens: where each sequence begins among `seqlen` tokens, and where the last ends."""
        return _begins(self, seqlen)

    @classmethod
    def parse(cls, text: str) -> Packed:
        """The layout of a label, or of `8,40`. Raises ProblemError for any other text."""
        numbers = _read(_PACKED, text, "no packing", _HOW_PACKED)
        return cls(*(int(number) for number in numbers if number is not None))


def _read(pattern: re.Pattern[str], text: str, none: str, hint: str) -> tuple[Any, ...]:
    """The parts of a label, or of what is inside its brackets. Raises ProblemError."""
    bare = text.strip()
    match = pattern.fullmatch(bare)
    if match is None or (bare[:1] == "p") != bare.endswith(")"):
        raise ProblemError(f"{text!r} is {none}", hint=hint)
    return match.groups()


DENSE = Dense()
Layout = Dense | Padded | Packed


def of_label(text: str) -> Layout:
    """The layout of a label. Raises ProblemError."""
    return Packed.parse(text) if text.startswith("packed") else Padded.parse(text)


def of_facts(facts: Mapping[str, Any]) -> Layout:
    """The layout of a problem's facts. Raises ProblemError."""
    padding, packed = facts.get("padding"), facts.get("packed")
    if packed is not None:
        if padding is not None or not isinstance(packed, list | tuple) or len(packed) > 3:
            what = f"packed is [SEQUENCES, PERCENT], without padding, not {packed!r}"
            raise ProblemError(what, hint=_HOW_PACKED)
        return Packed(*packed)
    if padding is None:
        return DENSE
    if not isinstance(padding, list | tuple) or len(padding) not in (2, 3):
        raise ProblemError(f"padding is [SIDE, PERCENT], not {padding!r}", hint=_HINT)
    return Padded(*padding)


@lru_cache(maxsize=256)
def _ranges(layout: Padded, batch: int, seqlen_k: int) -> tuple[Range, ...]:
    steps, least = max(1, batch - 1), layout.least
    percents = (least * steps + (100 - least) * step for step in range(batch))
    lengths = [max(int(least > 0), seqlen_k * percent // (100 * steps)) for percent in percents]
    ordered = [lengths[item] for item in drawn_order(batch, layout.seed)]
    if layout.side == "right":
        return tuple((0, length) for length in ordered)
    return tuple((seqlen_k - length, seqlen_k) for length in ordered)


@lru_cache(maxsize=256)
def _begins(layout: Packed, seqlen: int) -> tuple[int, ...]:
    count, least = layout.sequences, layout.least
    steps = max(1, count - 1)
    percents = [least * steps + (100 - least) * step for step in range(1, count)]
    shares = [max(least * steps, int(count == 1)), *percents]
    ends = [*accumulate(shares[number] for number in drawn_order(count, layout.seed))]
    return (0, *(seqlen * end // ends[-1] for end in ends))
