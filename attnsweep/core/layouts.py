"""Layouts: which keys each item of a batch has, or each part of it. The standard library only.

A layout answers for its problems: the inputs that tell a kernel its keys (`shapes`, `values`), what
is seen under an interval (`diagonals`, `pairs`, `empty_rows`), what cannot be beside it (`faults`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

from attnsweep.core.errors import ProblemError
from attnsweep.core.formats import CACHE_DTYPES
from attnsweep.core.masks import Interval, Range, check_drawn, drawn_order

if TYPE_CHECKING:
    from attnsweep.core.problem import Problem

_PADDED = re.compile(r"(?:padded\()?(right|left), ?(\d{1,18})(?:, ?(\d{1,18}))?\)?")
_PACKED = re.compile(r"(?:packed\()?(\d{1,18})(?:, ?(\d{1,18}))?(?:, ?(\d{1,18}))?\)?")
_PAGED = re.compile(r"paged\(([^()]*)\)")
_NUMBERED = re.compile(r"(shared|seed)(\d{1,18})")
_LENGTHS = re.compile(r"\d{1,18}k?|\d{1,18}x\d{1,18}k?(?:\+\d{1,18}x\d{1,18}k?)*")
_HOW_PACKED = (
    "write the number of sequences, and percent of the longest that the shortest has: 8,40"
)
_HINT = "write the padded side and percent of the keys that the shortest item has: right,40"


_HOW_PAGED = (
    "write the page size, and, in any order, nhd or hnd, e4m3 for an FP8 cache, and how many "
    "requests have how many keys: paged(16,hnd,32x128+32x4k)"
)
_PAGE_ORDERS = ("nhd", "hnd")
"""Where a page has its heads: (page_size, heads_kv, head_dim), or heads before slots."""
_SPARE_PAGES = 2
"""Pages of a cache that no request has."""

Fault = tuple[str, str | None]
"""What cannot be together, and what to write in its place."""


class _Layout:
    """The answers that most layouts share; a layout overrides those that differ."""

    __slots__ = ()
    cache_dtype: str | None = None
    """How k and v are stored, if not as q is."""

    @property
    def scales(self) -> tuple[str, ...]:
        """Inputs that stored values of k and v are multiplied by, (batch, heads_kv) each."""
        return ()

    def of_keys(self, p: Problem, columns: int) -> tuple[int, ...]:
        """The shape of k, or of v with its columns."""
        return (p.batch, p.heads_kv, p.seqlen_k, columns)

    def slots(self, batch: int, seqlen_k: int) -> int:
        """How many rows of k a head has in the whole batch."""
        return batch * seqlen_k


class _OfItems(_Layout):
    """Shared parts of layouts in which an item of the batch has one range of keys."""

    __slots__ = ()
    sequences = 0
    one_item = False

    def ranges(self, batch: int, seqlen_k: int) -> tuple[Range, ...]:
        """The keys of each item: the first, and the one after the last."""
        raise NotImplementedError

    def shapes(self, batch: int, seqlen_k: int) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        """The inputs of a call, int32, that tell which keys there are."""
        return {"key_range": (batch, 2)}

    def values(self, batch: int, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:  # noqa: ARG002
        """The numbers that these inputs hold."""
        return {"key_range": self.ranges(batch, seqlen_k)}

    def diagonals(self, interval: Interval, seqlen_q: int, seqlen_k: int) -> Range:
        """(low, high): query i sees the keys i + low to i + high that there are."""
        return interval.diagonals(seqlen_q, seqlen_k)

    def pairs(self, interval: Interval, batch: int, seqlen_q: int, seqlen_k: int) -> int:
        """Pairs of a query and a key that it sees, of one head in the whole batch."""
        return sum(interval.pairs(seqlen_q, seqlen_k, own) for own in self.ranges(batch, seqlen_k))

    def empty_rows(self, interval: Interval, batch: int, seqlen_q: int, seqlen_k: int) -> int:
        """Number of queries of one head, over the whole batch, that see no key."""
        ranges = self.ranges(batch, seqlen_k)
        return sum(interval.empty_rows(seqlen_q, seqlen_k, own) for own in ranges)

    def unseen(self, batch: int, seqlen_k: int) -> int:
        """Number of keys of one head, over the whole batch, that no query may see."""
        return sum(seqlen_k - end + first for first, end in self.ranges(batch, seqlen_k))

    def faults(self, p: Problem) -> Iterator[Fault]:  # noqa: ARG002
        """Name what a problem with this layout cannot have."""
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

    def shapes(self, batch: int, seqlen_k: int) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        """The inputs that tell which keys there are: none."""
        return {}

    def values(self, batch: int, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:  # noqa: ARG002
        """The numbers that these inputs hold."""
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
    """Items of a batch with different numbers of keys; no query sees the padding on one side.

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
        """The layout's numbers, which tell two layouts of this class apart."""
        return int(self.side == "left"), self.least, self.seed

    @property
    def label(self) -> str:
        """` padded(right,40)`; with the seed after it if it is not 0."""
        return f" padded({self.side},{self.least}{f',{self.seed}' if self.seed else ''})"

    @property
    def facts(self) -> dict[str, Any]:
        """The values that rows and specs have for this layout or mask."""
        return {"padding": [self.side, self.least, self.seed]}

    def ranges(self, batch: int, seqlen_k: int) -> tuple[Range, ...]:
        """The keys of each item: the first, and the one after the last."""
        return _ranges(self, batch, seqlen_k)

    def faults(self, p: Problem) -> Iterator[Fault]:
        """Name what a problem with this layout cannot have."""
        if p.mask.as_tensor and not p.mask.of_item:
            yield "a boolean mask that hides padding is of each item", "write boolean: [item]"

    @classmethod
    def parse(cls, text: str) -> Padded:
        """The layout of a label, or of `right,40`. Raises ProblemError for any other text."""
        side, least, seed = _read(_PADDED, text, "not a padding", _HINT)
        return cls(side, int(least), int(seed or 0))


@dataclass(frozen=True, slots=True)
class Packed(_Layout):
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
        """The values that rows and specs have for this layout or mask."""
        return {"packed": [self.sequences, self.least, self.seed]}

    def ranges(self, batch: int, seqlen_k: int) -> tuple[Range, ...]:
        """The range of keys of each item: all keys."""
        return DENSE.ranges(batch, seqlen_k)

    def shapes(self, batch: int, seqlen_k: int) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        """The inputs that tell where sequences begin, and where the last ends."""
        return dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), (self.sequences + 1,))

    def values(self, batch: int, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:  # noqa: ARG002
        """What the inputs `cu_seqlens_q` and `cu_seqlens_k` hold: where sequences begin."""
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
        """Name what a problem with this layout cannot have."""
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


@dataclass(frozen=True, slots=True)
class Gathered(_OfItems):
    """A paged cache as tensors (batch, heads_kv, seqlen_k, head_dim): keys of an item end at the
    last row, so that its own diagonal is that of the tensor. References compute in it.
    """

    lengths: tuple[int, ...]
    of_cache: tuple[str, ...] = ()
    kind = "gathered"
    of_item = True

    @property
    def scales(self) -> tuple[str, ...]:
        """Names of the scales of the cache that was gathered."""
        return self.of_cache

    @property
    def numbers(self) -> tuple[int, ...]:
        """The layout's numbers, which tell two layouts of this class apart."""
        return 4, len(self.of_cache), *self.lengths

    @property
    def label(self) -> str:
        """` gathered`: no spec has it."""
        return " gathered"

    @property
    def facts(self) -> dict[str, Any]:
        """Raise ProblemError: no row or spec has this layout."""
        raise ProblemError("a gathered cache is no problem of a spec")

    def ranges(self, batch: int, seqlen_k: int) -> tuple[Range, ...]:  # noqa: ARG002
        """The keys of each item."""
        return tuple((seqlen_k - length, seqlen_k) for length in self.lengths)


@dataclass(frozen=True, slots=True)
class Paged(_OfItems):
    """A cache of pages, as serving engines have it: an item's keys lie in pages of a table.

    k and v are (pages, page_size, heads_kv, head_dim), or (pages, heads_kv, page_size, head_dim)
    with order hnd. Two more inputs, int32: `seqused_k` (batch,), the keys of each item, and
    `block_table` (batch, ceil(seqlen_k / page_size)), the pages that it has; entries behind its
    last page, and slots behind its last key, may hold anything. seqlen_k is the longest length. The
    mask's diagonal is that of an item's own length: its last query sees its last key. With
    cache_dtype e4m3, k and v are FP8, a stored value times its scale is the value, and k_scale and
    v_scale, float32 (batch, heads_kv), are inputs too.

    lengths: of each item; none: all have seqlen_k. shared: pages at the beginning that all long
    items have in common. seed draws which pages an item has.
    """

    page_size: int
    order: str = "nhd"
    lengths: tuple[int, ...] = ()
    cache_dtype: str | None = None
    shared: int = 0
    seed: int = 0
    kind = "paged"
    of_item = True

    def __post_init__(self) -> None:
        for what, value, least in (
            ("a page size", self.page_size, 1),
            ("a number of shared pages", self.shared, 0),
            ("a seed", self.seed, 0),
            *(("a length", length, 0) for length in self.lengths),
        ):
            if type(value) is not int or not least <= value < 2**31:
                what = f"{what} is a whole number of at least {least}, not {value!r}"
                raise ProblemError(what, hint=_HOW_PAGED)
        if self.order not in _PAGE_ORDERS:
            raise ProblemError(f"pages are nhd or hnd, not {self.order!r}", hint=_HOW_PAGED)
        if self.cache_dtype not in (None, *CACHE_DTYPES):
            known = ", ".join(CACHE_DTYPES)
            what = f"a cache is {known}, or as q is, not {self.cache_dtype!r}"
            raise ProblemError(what, hint=_HOW_PAGED)

    @property
    def scales(self) -> tuple[str, ...]:
        """k_scale and v_scale of an FP8 cache."""
        return ("k_scale", "v_scale") if self.cache_dtype else ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The layout's numbers, which tell two layouts of this class apart."""
        own = (self.page_size, self.order == "hnd", bool(self.cache_dtype), self.shared, self.seed)
        return 3, *map(int, own), *self.lengths

    @property
    def label(self) -> str:
        """` paged(16)`; hnd, e4m3, lengths, shared pages and the seed after it, if it has them."""
        parts = [str(self.page_size), *[self.order] * (self.order != "nhd")]
        parts += [self.cache_dtype] if self.cache_dtype else []
        parts += [_in_groups(self.lengths)] if self.lengths else []
        parts += [f"shared{self.shared}"] * (self.shared > 0) + [f"seed{self.seed}"] * (
            self.seed > 0
        )
        return f" paged({','.join(parts)})"

    @property
    def facts(self) -> dict[str, Any]:
        """The values that rows and specs have for this layout or mask."""
        size, *others = self.label.removeprefix(" paged(").removesuffix(")").split(",")
        others = [other for other in others if other != self.cache_dtype]
        own = {"cache_dtype": self.cache_dtype} if self.cache_dtype else {}
        return {"paged": [int(size), *others], **own}

    def ranges(self, batch: int, seqlen_k: int) -> tuple[Range, ...]:
        """The keys of each item, as `Gathered` has them."""
        return Gathered(self.of_items(batch, seqlen_k)).ranges(batch, seqlen_k)

    def of_items(self, batch: int, seqlen_k: int) -> tuple[int, ...]:
        """How many keys each item has; the seed orders groups of lengths."""
        if not self.lengths:
            return (seqlen_k,) * batch
        return tuple(self.lengths[at] for at in drawn_order(batch, self.seed))

    def pages(self, batch: int, seqlen_k: int) -> int:
        """Pages of the cache."""
        counts = Counter(self.of_items(batch, seqlen_k) if self.lengths else {seqlen_k: batch})
        shared = min(self.shared, -(-max(counts) // self.page_size))
        own = sum(
            items * max(0, -(-length // self.page_size) - shared)
            for length, items in counts.items()
        )
        return shared + own + _SPARE_PAGES

    def blocks(self, seqlen_k: int) -> int:
        """Columns of block_table."""
        return -(-seqlen_k // self.page_size)

    def of_keys(self, p: Problem, columns: int) -> tuple[int, ...]:
        """The shape of k, or of v with its columns."""
        inside = (self.page_size, p.heads_kv)
        pages = self.pages(p.batch, p.seqlen_k)
        return (pages, *(inside if self.order == "nhd" else inside[::-1]), columns)

    def strides(self, p: Problem) -> tuple[int, int, int]:
        """Elements of k from page to page, slot to slot, head to head."""
        page, row = self.page_size * p.heads_kv * p.head_dim, p.head_dim
        inside = (p.heads_kv * row, row) if self.order == "nhd" else (row, self.page_size * row)
        return page, *inside

    def gathered(self, p: Problem) -> Problem:
        """The problem with its pages gathered: see Gathered. Its k and v are of q's dtype."""
        layout = Gathered(self.of_items(p.batch, p.seqlen_k), self.scales)
        return replace(p, layout=layout)

    def shapes(self, batch: int, seqlen_k: int) -> dict[str, tuple[int, ...]]:
        """The inputs that tell the keys of each item."""
        return {"seqused_k": (batch,), "block_table": (batch, self.blocks(seqlen_k))}

    def values(self, batch: int, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:  # noqa: ARG002
        """The numbers that these inputs hold."""
        return {
            "seqused_k": self.of_items(batch, seqlen_k),
            "block_table": _tables(self, batch, seqlen_k),
        }

    def slots(self, batch: int, seqlen_k: int) -> int:
        """How many rows of k a head has in the cache; rows of shared pages count for each item."""
        most = self.shared * self.page_size
        shared = sorted(min(most, n) for n in self.of_items(batch, seqlen_k))
        return self.pages(batch, seqlen_k) * self.page_size + sum(shared[:-1])

    def unseen(self, batch: int, seqlen_k: int) -> int:
        """Slots of a head in the whole cache that no query may see."""
        return self.slots(batch, seqlen_k) - sum(self.of_items(batch, seqlen_k))

    def faults(self, p: Problem) -> Iterator[Fault]:
        """Name what a problem with this layout cannot have."""
        if self.lengths and len(self.lengths) != p.batch:
            hint = f"write batch {len(self.lengths)}"
            yield f"a cache of {len(self.lengths)} lengths is of as many items", hint
        elif self.lengths and max(self.lengths) != p.seqlen_k:
            yield "seqlen_k is the longest length", f"write seqlen_k {max(self.lengths)}"
        others = ["boolean mask"] * p.mask.as_tensor
        others += ["head_dim_v"] * (p.head_dim_v is not None and not p.value_in_key)
        others += [f"{self.cache_dtype} with value_in_key"] * (p.value_in_key and bool(self.scales))
        others += ["top_left"] * p.mask.interval.top_left
        others += [f"q of {p.dtype}"] * (p.format.nbytes != 2)
        yield from ((f"a paged cache has no {other} beside it", None) for other in others)

    @classmethod
    def parse(cls, text: str) -> Paged:
        """The layout of a label. Raises ProblemError for any other text."""
        (inside,) = _read(_PAGED, text, "no paged cache", _HOW_PAGED)
        size, *others = (part.strip().lower() for part in inside.split(","))
        return cls.of([int(size) if size.isdecimal() and len(size) < 19 else size, *others])

    @classmethod
    def of(cls, parts: Any, cache_dtype: Any = None) -> Paged:
        """The layout of its page size and what else is said of it. Raises ProblemError."""
        if not isinstance(parts, list | tuple) or not parts:
            raise ProblemError(f"paged is [PAGE_SIZE], not {parts!r}", hint=_HOW_PAGED)
        size, *others = parts
        own: dict[str, Any] = {} if cache_dtype is None else {"cache_dtype": cache_dtype}
        for other in others:
            found: dict[str, Any] = {}
            if other in _PAGE_ORDERS:
                found = {"order": other}
            elif other in CACHE_DTYPES:
                found = {"cache_dtype": other}
            elif isinstance(other, str) and _LENGTHS.fullmatch(other):
                found = {"lengths": _of_groups(other)}
            elif isinstance(other, str) and (match := _NUMBERED.fullmatch(other)):
                found = {match[1]: int(match[2])}
            if not found or own.keys() & found:
                raise ProblemError(f"{other!r} is no part of a paged cache", hint=_HOW_PAGED)
            own |= found
        return cls(size, **own)


def _in_groups(lengths: tuple[int, ...]) -> str:
    """`32x128+32x4k`: how many items in a row have how many keys."""
    groups = [(len([*own]), length) for length, own in groupby(lengths)]
    return "+".join(
        f"{count}x{f'{length // 1024}k' if length and length % 1024 == 0 else length}"
        for count, length in groups
    )


def _of_groups(text: str) -> tuple[int, ...]:
    """The lengths of such a text; one number is the length of one item."""
    found: list[int] = []
    for group in text.split("+"):
        count, _, length = group.rpartition("x")
        number = int(length.removesuffix("k")) * (1024 if length.endswith("k") else 1)
        if len(found) + int(count or 1) > _MOST_ITEMS:
            raise ProblemError(f"a cache has at most {_MOST_ITEMS} items", hint=_HOW_PAGED)
        found += [number] * int(count or 1)
    return tuple(found)


_MOST_ITEMS = 2**16


def _read(pattern: re.Pattern[str], text: str, none: str, hint: str) -> tuple[Any, ...]:
    """Parse a label, or the text inside its brackets, into its parts. Raises ProblemError."""
    bare = text.strip()
    match = pattern.fullmatch(bare)
    if match is None or (bare[:1] == "p") != bare.endswith(")"):
        raise ProblemError(f"{text!r} is {none}", hint=hint)
    return match.groups()


DENSE = Dense()
Layout = Dense | Padded | Packed | Paged | Gathered
EXAMPLES: Mapping[str, Layout] = {
    each.kind: each for each in (DENSE, Padded("right", 40), Packed(8), Paged(16))
}
"""A layout of each kind."""


def of_label(text: str) -> Layout:
    """The layout of a label. Raises ProblemError."""
    kinds: dict[str, type[Packed | Paged]] = {"packed": Packed, "paged": Paged}
    return kinds.get(text.partition("(")[0], Padded).parse(text)


def of_facts(facts: Mapping[str, Any]) -> Layout:
    """The layout of a problem's facts. Raises ProblemError."""
    padding, packed = facts.get("padding"), facts.get("packed")
    paged, cache_dtype = facts.get("paged"), facts.get("cache_dtype")
    if paged is not None and padding is None and packed is None:
        return Paged.of(paged, cache_dtype)
    if paged is not None or cache_dtype is not None:
        beside = "a paged cache has no padding or packing beside it"
        raise ProblemError(beside if paged else "cache_dtype is of a paged cache", hint=_HOW_PAGED)
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


@lru_cache(maxsize=8)
def _tables(layout: Paged, batch: int, seqlen_k: int) -> tuple[tuple[int, ...], ...]:
    """The pages of each item.

    Pages are in an order at random, as a pool's are. Behind an item's last page stand numbers that
    are no pages.
    """
    size, blocks = layout.page_size, layout.blocks(seqlen_k)
    counts = [-(-length // size) for length in layout.of_items(batch, seqlen_k)]
    shared = min(layout.shared, max(counts))
    order = drawn_order(layout.pages(batch, seqlen_k), layout.seed, size)
    in_common, at, rows = order[:shared], shared, []
    for count in counts:
        own = max(0, count - shared)
        row = [*in_common[:count], *order[at : at + own]]
        at += own
        row += [_NO_PAGES[place % len(_NO_PAGES)] for place in range(blocks - len(row))]
        rows.append(tuple(row))
    return tuple(rows)


_NO_PAGES = (-1, 2**31 - 1, -(2**31), 2**30)
