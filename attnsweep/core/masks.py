"""Masks: which keys a query sees. The standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from attnsweep.core.errors import ProblemError

PATTERNS = ("blocks", "documents", "holes", "padding")
_HINT = f"write one of {', '.join(PATTERNS)}, and its density: boolean(blocks,30)"
_OWN = ("item", "head")
_BOOLEAN = re.compile(r"boolean\((.+?)((?:,(?:item|head))*)\)")
_DRAWN = re.compile(r"boolean\((\w+), ?(\d{1,18})(?:, ?(\d{1,18}))?\)")
_WINDOW = re.compile(r"window(_top_left)?\((\d{1,18}|all|-1), ?(\d{1,18}|all|-1)\)")


class Mask(Protocol):
    """Which keys a query sees, as problems, references, kernels and baselines ask it."""

    @property
    def as_tensor(self) -> bool:
        """Whether a call gets it as the input `mask`, True where a query sees a key."""

    @property
    def kind(self) -> str:
        """The kind that families declare: `full`, `causal`, `window` or `boolean`."""

    @property
    def interval(self) -> Interval:
        """The keys that it lets queries see at most; all it hides, if it has no pattern."""

    @property
    def pattern(self) -> Pattern | None:
        """The pairs that it hides inside its interval; they are drawn element by element."""

    @property
    def of_item(self) -> bool:
        """Whether each item of a batch has a mask of its own."""

    @property
    def of_head(self) -> bool:
        """Whether each head has a mask of its own."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The mask's numbers, which tell two masks of one kind apart."""

    @property
    def label(self) -> str:
        """The mask's part of a problem's label."""

    @property
    def facts(self) -> dict[str, Any]:
        """The values that rows and specs have for this layout or mask."""

    def of_lengths(self, seqlen_q: int, seqlen_k: int) -> Mask:
        """The canonical mask among all that are equal at these lengths."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Query i sees the keys from `left` before its diagonal to `right` after it; None: all.

    The diagonal of query i is key i + seqlen_k - seqlen_q: aligned bottom-right, as in
    FlashAttention >= 2.1, whose `window_size` these two numbers are (-1 for None). top_left: it is
    key i, as PyTorch's is_causal has it.
    """

    left: int | None = None
    right: int | None = None
    top_left: bool = False
    as_tensor = of_item = of_head = False
    pattern = None

    def __post_init__(self) -> None:
        for name, size in (("left", self.left), ("right", self.right)):
            if size is not None and size < 0:
                raise ProblemError(f"a window's {name} is {size}: it must be at least 0, or None")

    @property
    def interval(self) -> Interval:
        """The mask itself, as it is an interval."""
        return self

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """(left, right)."""
        return self.left, self.right

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers that distinguish such masks from each other and from boolean ones."""
        left, right = (-1 if side is None else side for side in self.sides)
        return left, right, int(self.top_left), 0, 0, 0

    def of_lengths(self, seqlen_q: int, seqlen_k: int) -> Interval:
        """The canonical mask among all that are equal at these lengths."""
        same = seqlen_q == seqlen_k or self.sides == (None, None)
        return replace(self, top_left=False) if self.top_left and same else self

    def diagonals(self, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """(low, high): query i sees the keys j with low <= j - i <= high."""
        diagonal = 0 if self.top_left else seqlen_k - seqlen_q
        low = 1 - seqlen_q if self.left is None else diagonal - self.left
        high = seqlen_k - 1 if self.right is None else diagonal + self.right
        return max(low, 1 - seqlen_q), min(high, seqlen_k - 1)

    def pairs(self, seqlen_q: int, seqlen_k: int, keys: Range | None = None) -> int:
        """Pairs of a query and a key that it sees, of one head.

        keys: the first of the keys that count, and the one after the last (default: all).
        """
        first, end = keys or (0, seqlen_k)
        low, high = self.diagonals(seqlen_q, seqlen_k)

        def below(diagonal: int) -> int:
            """The sum over queries i of the number of keys below i + diagonal."""
            begin, most = diagonal - first, end - first
            return _clamped(begin + seqlen_q - 1, most) - _clamped(begin - 1, most)

        return max(0, below(high + 1) - below(low))

    def empty_rows(self, seqlen_q: int, seqlen_k: int, keys: Range | None = None) -> int:
        """Queries that see no key. keys: as of `pairs`."""
        first, end = keys or (0, seqlen_k)
        low, high = self.diagonals(seqlen_q, seqlen_k)
        before = min(seqlen_q, max(0, first - high))  # their last key would be before the first one
        after = min(seqlen_q, max(0, seqlen_q - (end - low)))
        return min(seqlen_q, before + after) if first < end else seqlen_q

    @property
    def kind(self) -> str:
        """`full`, `causal` or `window`.

        A window has its diagonals at launch, so that causal masks aligned top-left are windows.
        """
        return _NAMED.get(self, "window")

    @property
    def label(self) -> str:
        """`full`, `causal`, `causal_top_left`, `window(512,0)`.

        An open side is a word: names of files keep no sign, and -1 and 1 would share one.
        """
        aligned = "_top_left" if self.top_left else ""
        if (name := _NAMED.get(replace(self, top_left=False))) is not None:
            return name + aligned
        left, right = ("all" if size is None else size for size in self.sides)
        return f"window{aligned}({left},{right})"

    @property
    def facts(self) -> dict[str, Any]:
        """The mask's facts in rows and specs: `causal`, and the others only where set."""
        causal = self.sides == CAUSAL.sides
        window = {} if causal or self.sides == FULL.sides else {"window": [self.left, self.right]}
        return {"causal": causal} | window | ({"top_left": True} if self.top_left else {})

    def as_boolean(self, own: Iterable[str] = ()) -> Boolean:
        """This mask as a boolean tensor. own: `item`, `head`; else it raises ProblemError."""
        own = [own] if isinstance(own, str) else [*own]
        if not {*own} <= {*_OWN}:
            raise ProblemError(f"a boolean mask is of {', '.join(_OWN)}, not of {own!r}")
        return Boolean(self, "item" in own, "head" in own)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Pairs of a query and a key that are no interval; core/boolean_masks.py draws them.

    blocks: 128 x 128 pairs are seen together, `density` percent of all, and some of each row.
    documents: rows see the keys of their part of the sequence, of `density` parts of other lengths.
    holes: rows see `density` percent of the keys of their causal interval, and the last. padding:
    keys of Padded("right", density, seed), of each item of the batch.
    """

    name: str
    density: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in PATTERNS:
            raise ProblemError(f"{self.name!r} is no pattern of a boolean mask", hint=_HINT)
        percent = self.density
        if self.name == "documents":
            if type(self.density) is not int or not 1 <= self.density <= 2**15:
                what = f"a mask has 1 to {2**15} documents, not {self.density!r}"
                raise ProblemError(what, hint=_HINT)
            percent = 100
        check_drawn(self.name, percent, self.seed, _HINT)

    @property
    def label(self) -> str:
        """`blocks,30`; with the seed after it if it is not 0."""
        return f"{self.name},{self.density}" + (f",{self.seed}" if self.seed else "")


@dataclass(frozen=True, slots=True)
class Boolean:
    """A mask that a call gets as a tensor: a kernel that reads it takes any other such mask too.

    shows: what it lets queries see. Each item of a batch has its own if `of_item`, and each head if
    `of_head`; a pattern has the one or the other by itself.
    """

    shows: Interval | Pattern
    of_item: bool = False
    of_head: bool = False
    as_tensor = True
    kind = "boolean"

    def __post_init__(self) -> None:
        if self.pattern is not None:
            object.__setattr__(self, "of_item", self.pattern.name == "padding")

    @property
    def interval(self) -> Interval:
        """The interval that the tensor shows, if it is one; otherwise all keys."""
        return self.shows if isinstance(self.shows, Interval) else FULL

    @property
    def pattern(self) -> Pattern | None:
        """The drawn pattern that the tensor shows, if it is one."""
        return self.shows if isinstance(self.shows, Pattern) else None

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers that distinguish such masks."""
        if (drawn := self.pattern) is not None:
            return PATTERNS.index(drawn.name), drawn.density, drawn.seed
        return *self.interval.numbers[:3], 1, int(self.of_item), int(self.of_head)

    @property
    def _own(self) -> list[str]:
        return [name for name in _OWN if self.pattern is None and getattr(self, f"of_{name}")]

    @property
    def label(self) -> str:
        """`boolean(causal,item)`, `boolean(blocks,30)`."""
        return f"boolean({','.join([self.shows.label, *self._own])})"

    @property
    def facts(self) -> dict[str, Any]:
        """The values that rows and specs have for this layout or mask."""
        drawn = self.pattern
        own = self._own if drawn is None else [drawn.name, drawn.density, drawn.seed]
        return self.interval.facts | {"boolean": own}

    def of_lengths(self, seqlen_q: int, seqlen_k: int) -> Boolean:
        """The canonical mask among all that are equal at these lengths."""
        if self.pattern is not None:
            return self
        return replace(self, shows=self.interval.of_lengths(seqlen_q, seqlen_k))


def pattern(name: str, density: int, seed: int = 0) -> Boolean:
    """A boolean mask of a pattern: `pattern("blocks", 30)`. Raises ProblemError."""
    return Boolean(Pattern(name, density, seed))


def mask_of_facts(facts: Mapping[str, Any]) -> Mask:
    """The mask of a problem's facts. Raises ProblemError."""
    boolean = facts.get("boolean")
    if isinstance(boolean, list | tuple) and len(boolean) in (2, 3) and type(boolean[1]) is int:
        return pattern(*boolean)
    window = facts.get("window")
    if window is not None and (not isinstance(window, list | tuple) or len(window) != 2):
        raise ProblemError(f"a window is [LEFT, RIGHT], not {window!r}")
    left, right = window or (CAUSAL if facts.get("causal") else FULL).sides
    mask = Interval(left, right, bool(facts.get("top_left")))
    return mask if boolean is None else mask.as_boolean(boolean)


def mask_of_label(text: str) -> Mask:
    """The mask of a label. Raises ProblemError for any other text."""
    if drawn := _DRAWN.fullmatch(text):
        return pattern(drawn[1], int(drawn[2]), int(drawn[3] or 0))
    if boolean := _BOOLEAN.fullmatch(text):
        inside, own = boolean.groups()
        return _interval_of_label(inside).as_boolean([word for word in own.split(",") if word])
    return _interval_of_label(text)


def _interval_of_label(text: str) -> Interval:
    for mask in (FULL, CAUSAL, replace(CAUSAL, top_left=True)):
        if text == mask.label:
            return mask
    match = _WINDOW.fullmatch(text)
    if match is None:
        hint = "write full, causal, causal_top_left, or window(LEFT,RIGHT): window(512,0)"
        raise ProblemError(f"{text!r} is not a mask", hint=hint)
    aligned, *sizes = match.groups()
    left, right = (None if size in ("all", "-1") else int(size) for size in sizes)
    return Interval(left, right, top_left=aligned is not None)


Range = tuple[int, int]
"""The first key and the one after the last."""
FULL = Interval()
CAUSAL = Interval(None, 0)
_NAMED = {FULL: "full", CAUSAL: "causal"}


def _clamped(to: int, most: int) -> int:
    """The sum of min(max(x, 0), most) over all whole x up to `to`."""
    if to <= 0:
        return 0
    whole = min(to, most)
    return whole * (whole + 1) // 2 + (to - whole) * most


def check_drawn(what: str, percent: Any, seed: Any, hint: str) -> None:
    """Raise ProblemError for a percentage or a seed, of what is drawn by it, that is none."""
    if type(percent) is not int or not 0 <= percent <= 100:
        raise ProblemError(f"{what} has 0 to 100 percent, not {percent!r}", hint=hint)
    if type(seed) is not int or seed < 0:
        raise ProblemError(f"a seed is a whole number of at least 0, not {seed!r}", hint=hint)
    if seed >= 2**63:
        raise ProblemError("a seed is less than 2^63", hint=hint)


def mixed(number: int) -> int:
    """Hash a number to 64 bits, by the finaliser of SplitMix64."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _BITS
    return number ^ number >> 31


def drawn_order(count: int, *seed: int) -> list[int]:
    """The numbers below count in an order at random, the same in every version of Python."""
    begin = 0
    for part in seed:
        begin = mixed((begin + part + 1) * 0x9E3779B97F4A7C15 & _BITS)
    return sorted(range(count), key=lambda at: mixed(begin + at * 0x9E3779B97F4A7C15 & _BITS))


_BITS = 2**64 - 1
