"""Layouts: which keys each item of a batch has, or each part of it. The standard library only.

A layout answers for its problems: the inputs that tell a kernel its keys (`shapes`, `values`), what
is seen under an interval (`diagonals`, `pairs`, `empty_rows`), what cannot be beside it (`faults`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from attnsweep.core.errors import ProblemError
from attnsweep.core.masks import Interval, Range, check_drawn, drawn_order

if TYPE_CHECKING:
    from attnsweep.core.problem import Problem

_PADDED = re.compile(r"(?:padded\()?(right|left), ?(\d+)(?:, ?(\d+))?\)?")
_PACKED = re.compile(r"(?:packed\()?(\d+)(?:, ?(\d+))?(?:, ?(\d+))?\)?")
_HOW_PACKED = (
    "write the number of sequences, and percent of the longest that the shortest has: 8,40"
)
_HINT = "write the padded side and percent of the keys that the shortest item has: right,40"


Fault = tuple[str, str | None]
"""What cannot be together, and what to write in its place."""


class _OfItems:
    """Shared parts of layouts in which an item of the batch has one range of keys."""

    __slots__ = ()
    sequences = 0
    one_item = False

    def ranges(self, batch: int, seqlen_k: int) -> tuple[Range, ...]:
        """The keys of each item: the first, and the one after the last."""
        raise NotImplementedError

    def diagonals(self, interval: Interval, seqlen_q: int, seqlen_k: int) -> Range:
        """(low, high): query i sees the keys i + low to i + high that there are."""
        return interval.diagonals(seqlen_q, seqlen_k)

    def pairs(self, interval: Interval, batch: int, seqlen_q: int, seqlen_k: int) -> int:
        """Pairs of a query and a key that it sees, of one head in the whole batch."""
        return sum(interval.pairs(seqlen_q, seqlen_k, own) for own in self.ranges(batch, seqlen_k))

    def empty_rows(self, interval: Interval, batch: int, seqlen_q: int, seqlen_k: int) -> int:
        """Queries of a head that see no key, in the whole batch."""
        ranges = self.ranges(batch, seqlen_k)
        return sum(interval.empty_rows(seqlen_q, seqlen_k, own) for own in ranges)

    def unseen(self, batch: int, seqlen_k: int) -> int:
        """Keys of a head, in the whole batch, that no query may see."""
        return sum(seqlen_k - end + first for first, end in self.ranges(batch, seqlen_k))

    def faults(self, p: Problem) -> Iterator[Fault]:  # noqa: ARG002
        """What a problem cannot have beside it."""
        yield from ()


@dataclass(frozen=True, slots=True)
class Dense(_OfItems):
    """Every item has all keys."""

    kind = "dense"
    label = ""
    numbers = ()
    of_item = False

    @property
    def facts(self) -> dict[str, Any]:
        """The layout's facts in rows and specs: none."""
        return {}

    def ranges(self, batch: int, seqlen_k: int) -> tuple[Range, ...]:
        """The keys of each item: all."""
        return ((0, seqlen_k),) * batch

    def shapes(self, batch: int) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        """The inputs of a call, int32, that tell which keys there are: none."""
        return {}

    def values(self, batch: int, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:  # noqa: ARG002
        """The values of these inputs."""
        return {}

    def pairs(self, interval: Interval, batch: int, seqlen_q: int, seqlen_k: int) -> int:
        """As of every layout; items are alike."""
        return batch * interval.pairs(seqlen_q, seqlen_k)

    def empty_rows(self, interval: Interval, batch: int, seqlen_q: int, seqlen_k: int) -> int:
        """As of every layout; items are alike."""
        return batch * interval.empty_rows(seqlen_q, seqlen_k)

    def unseen(self, batch: int, seqlen_k: int) -> int:  # noqa: ARG002
        """The keys that no query sees: none."""
        return 0


@dataclass(frozen=True, slots=True)
class Padded(_OfItems):
    """Items have keys of their own number, and padding on one side of them, which no query sees.

    least: percent of seqlen_k that the shortest item has. Lengths are spread evenly from it to all
    keys, and seed draws their order. A batch of one has the least. The mask's diagonal is that of
    the whole seqlen_k, as in the padded batches of models.
    """

    side: str
    least: int
    seed: int = 0
    kind = "padded"
    of_item = True

    def __post_init__(self) -> None:
        if self.side not in ("right", "left"):
            raise ProblemError(f"padding is right or left, not {self.side!r}", hint=_HINT)
        check_drawn("the shortest item", self.least, self.seed, _HINT)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers that distinguish such layouts."""
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

    def shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The input that tells the keys of each item: the first, and the one after the last."""
        return {"key_range": (batch, 2)}

    def values(self, batch: int, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:  # noqa: ARG002
        """The values of `key_range`."""
        return {"key_range": self.ranges(batch, seqlen_k)}

    def faults(self, p: Problem) -> Iterator[Fault]:
        """What a problem cannot have beside it."""
        if p.mask.as_tensor and not p.mask.of_item:
            yield "a boolean mask that hides padding is of each item", "write boolean: [item]"

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
    of_item = False
    one_item = True

    def __post_init__(self) -> None:
        if type(self.sequences) is not int or self.sequences < 1:
            what = f"packed sequences are counted from 1, not {self.sequences!r}"
            raise ProblemError(what, hint=_HOW_PACKED)
        check_drawn("the shortest sequence", self.least, self.seed, _HOW_PACKED)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers that distinguish such layouts from each other and from padding."""
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
        """The range of keys of each item: all keys."""
        return DENSE.ranges(batch, seqlen_k)

    def shapes(self, batch: int) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        """The inputs that tell where sequences begin, and where the last ends."""
        return dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), (self.sequences + 1,))

    def values(self, batch: int, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:  # noqa: ARG002
        """The values of `cu_seqlens_q` and `cu_seqlens_k`."""
        return {"cu_seqlens_q": self.begins(seqlen_q), "cu_seqlens_k": self.begins(seqlen_k)}

    def of_sequences(self, seqlen_q: int, seqlen_k: int) -> tuple[tuple[Range, Range], ...]:
        """The range of queries and the range of keys of each sequence."""
        of_q, of_k = self.begins(seqlen_q), self.begins(seqlen_k)
        return tuple(zip(pairwise(of_q), pairwise(of_k), strict=True))

    def diagonals(self, interval: Interval, seqlen_q: int, seqlen_k: int) -> Range:
        """(low, high), counted from the key beside the last query of a sequence."""
        return interval.diagonals(whole := seqlen_q + seqlen_k, whole)

    def pairs(self, interval: Interval, batch: int, seqlen_q: int, seqlen_k: int) -> int:  # noqa: ARG002
        """Pairs of a query and a key that it sees, of one head."""
        each = self.of_sequences(seqlen_q, seqlen_k)
        return sum(interval.pairs(b - a, d - c) for (a, b), (c, d) in each)

    def empty_rows(self, interval: Interval, batch: int, seqlen_q: int, seqlen_k: int) -> int:  # noqa: ARG002
        """Queries of a head that see no key."""
        each = self.of_sequences(seqlen_q, seqlen_k)
        return sum(interval.empty_rows(b - a, d - c) for (a, b), (c, d) in each)

    def unseen(self, batch: int, seqlen_k: int) -> int:  # noqa: ARG002
        """Keys of a head that no query may see: none."""
        return 0

    def faults(self, p: Problem) -> Iterator[Fault]:
        """What a problem cannot have beside it."""
        if p.batch > 1:
            hint = "write batch 1, and as seqlen the tokens of all sequences"
            yield "packed sequences are a batch of 1", hint
        if p.mask.as_tensor or p.mask.interval.top_left or p.scales:
            what = "a boolean mask" if p.mask.as_tensor else "FP8" if p.scales else "top_left"
            yield f"packed sequences have no {what}", None

    def begins(self, seqlen: int) -> tuple[int, ...]:
        """cu_seqlens: where each sequence begins among `seqlen` tokens, and where the last ends."""
        return _begins(self, seqlen)

    @classmethod
    def parse(cls, text: str) -> Packed:
        """The layout of a label, or of `8,40`. Raises ProblemError for any other text."""
        numbers = _read(_PACKED, text, "no packing", _HOW_PACKED)
        return cls(*(int(number) for number in numbers if number is not None))


def _read(pattern: re.Pattern[str], text: str, none: str, hint: str) -> tuple[Any, ...]:
    """Parse a label, or the text inside its brackets, into its parts. Raises ProblemError."""
    bare = text.strip()
    match = pattern.fullmatch(bare)
    if match is None or (bare[:1] == "p") != bare.endswith(")"):
        raise ProblemError(f"{text!r} is {none}", hint=hint)
    return match.groups()


DENSE = Dense()
Layout = Dense | Padded | Packed
EXAMPLES: Mapping[str, Layout] = {
    each.kind: each for each in (DENSE, Padded("right", 40), Packed(8))
}
"""A layout of each kind."""


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
