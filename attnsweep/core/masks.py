"""Masks: which keys a query sees. The standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnsweep.core.errors import ProblemError

_OWN = ("item", "head")
_BOOLEAN = re.compile(r"boolean\((.+?)((?:,(?:item|head))*)\)")
_WINDOW = re.compile(r"window(_top_left)?\((\d+|all|-1), ?(\d+|all|-1)\)")


@dataclass(frozen=True, slots=True)
class Interval:
    """Query i sees the keys from `left` before its diagonal to `right` after it; None: all.

    The diagonal of query i is key i + seqlen_k - seqlen_q: aligned bottom-right, as in
    FlashAttention >= 2.1, whose `window_size` these two numbers are (-1 for None). top_left: it is
    key i, as PyTorch's is_causal has it. boolean: whether a call gets it as a boolean tensor, True
    where a query sees a key: a kernel that reads it takes any other such mask too. Each item of a
    batch has its own if `of_item`, and each head if `of_head`.
    """

    left: int | None = None
    right: int | None = None
    top_left: bool = False
    boolean: bool = False
    of_item: bool = False
    of_head: bool = False

    def __post_init__(self) -> None:
        for name, size in (("left", self.left), ("right", self.right)):
            if size is not None and size < 0:
                raise ProblemError(f"a window's {name} is {size}: it must be at least 0, or None")
        if (self.of_item or self.of_head) and not self.boolean:
            raise ProblemError("only a boolean mask is of an item of the batch, or of a head")

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """(left, right)."""
        return self.left, self.right

    @property
    def numbers(self) -> tuple[int, ...]:
        """What tells two such masks apart."""
        left, right = (-1 if side is None else side for side in self.sides)
        return left, right, *map(int, (self.top_left, self.boolean, self.of_item, self.of_head))

    def of_lengths(self, seqlen_q: int, seqlen_k: int) -> Interval:
        """The one of all equal masks of these lengths that problems have."""
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
    def plain(self) -> Interval:
        """What it lets queries see, however a call gets it."""
        return Interval(self.left, self.right, self.top_left)

    @property
    def kind(self) -> str:
        """`full`, `causal`, `window` or `boolean`: what a family declares that it can.

        A window has its diagonals at launch, so that causal masks aligned top-left are windows.
        """
        return "boolean" if self.boolean else _NAMED.get(self, "window")

    @property
    def label(self) -> str:
        """`full`, `causal`, `causal_top_left`, `window(512,0)`, `boolean(causal,item)`.

        An open side is a word: names of files keep no sign, and -1 and 1 would share one.
        """
        if self.boolean:
            own = [name for name in _OWN if getattr(self, f"of_{name}")]
            return f"boolean({','.join([self.plain.label, *own])})"
        aligned = "_top_left" if self.top_left else ""
        if (name := _NAMED.get(replace(self, top_left=False))) is not None:
            return name + aligned
        left, right = ("all" if size is None else size for size in self.sides)
        return f"window{aligned}({left},{right})"

    @property
    def facts(self) -> dict[str, Any]:
        """As rows and specs have it: `causal`, and the others only where they are."""
        causal = self.sides == CAUSAL.sides
        window = {} if causal or self.sides == FULL.sides else {"window": [self.left, self.right]}
        boolean = {"boolean": [n for n in _OWN if getattr(self, f"of_{n}")]} if self.boolean else {}
        return {"causal": causal} | window | ({"top_left": True} if self.top_left else {}) | boolean

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Interval:
        """The mask of such facts. Raises ProblemError."""
        window = facts.get("window")
        if window is not None and (not isinstance(window, list | tuple) or len(window) != 2):
            raise ProblemError(f"a window is [LEFT, RIGHT], not {window!r}")
        left, right = window or (CAUSAL if facts.get("causal") else FULL).sides
        mask = cls(left, right, bool(facts.get("top_left")))
        return mask if (own := facts.get("boolean")) is None else mask.as_boolean(own)

    def as_boolean(self, own: Iterable[str] = ()) -> Interval:
        """The same as a boolean tensor. own: `item`, `head`; else it raises ProblemError."""
        own = [own] if isinstance(own, str) else [*own]
        if not {*own} <= {*_OWN}:
            raise ProblemError(f"a boolean mask is of {', '.join(_OWN)}, not of {own!r}")
        return replace(self, boolean=True, of_item="item" in own, of_head="head" in own)

    @classmethod
    def parse(cls, text: str) -> Interval:
        """The mask of a label. Raises ProblemError for any other text."""
        for mask in (FULL, CAUSAL, replace(CAUSAL, top_left=True)):
            if text == mask.label:
                return mask
        if boolean := _BOOLEAN.fullmatch(text):
            inside, own = boolean.groups()
            return cls.parse(inside).as_boolean([word for word in own.split(",") if word])
        match = _WINDOW.fullmatch(text)
        if match is None:
            hint = "write full, causal, causal_top_left, or window(LEFT,RIGHT): window(512,0)"
            raise ProblemError(f"{text!r} is not a mask", hint=hint)
        aligned, *sizes = match.groups()
        left, right = (None if size in ("all", "-1") else int(size) for size in sizes)
        return cls(left, right, top_left=aligned is not None)


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


def mixed(number: int) -> int:
    """Sixty-four bits at random that follow from a number: the finaliser of SplitMix64."""
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
