"""The recorded runs of each card: our best beside every baseline, and means of × base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from counts import baselines_beside, mean_ratio
from records import OURS, Book

from attnsweep.specs.model import PLAIN_READ

FIRST = ("h100-80gb-hbm3", "h200")  # the order of cards; others follow by name
FA3 = "flash_attn_3"
TIMED = ("ok", "noisy")
ALONE = 4  # from this protocol on, calls have ordinary dependencies

Record = dict[str, Any]


@dataclass(frozen=True)
class Mean:
    """Geometric means over some problems: × the fastest baseline, and × FlashAttention-3."""

    of: str
    protocol: str
    records: Sequence[Record]

    @property
    def ratios(self) -> list[float]:
        """× base of each problem. A lower bound, where the base is noisy, counts as it is."""
        return [record["ratio"] for record in self.records]

    @property
    def overlapping(self) -> int:
        """Problems on which calls of ours may have overlapped, which no baseline's can."""
        return sum(record["overlaps"] for record in self.records)

    @property
    def slower(self) -> int:
        """Problems on which the fastest baseline is faster than ours."""
        return sum(ratio < 1 for ratio in self.ratios)

    @property
    def fa3(self) -> list[float]:
        """× FlashAttention-3 where it was timed."""
        return [record["fa3"]["ratio"] for record in self.records if record["fa3"]]

    @property
    def mean(self) -> float:
        """× the fastest baseline."""
        return mean_ratio(self.ratios)

    @property
    def fa3_mean(self) -> float | None:
        """× FlashAttention-3, if it was timed."""
        return mean_ratio(self.fa3) if self.fa3 else None


class Recordings:
    """What is recorded of one card.

    specs: name to title, kernel and whether it is `fused`. A row that a later run contradicts is
    shown, but is in no mean.
    """

    def __init__(self, book: Book, specs: Mapping[str, Mapping[str, Any]]) -> None:
        self.book, self.slug = book, book.results.name
        self._specs = {name: of for name, of in specs.items() if book.has(name)}

    @cached_property
    def tables(self) -> dict[str, list[Record]]:
        """Spec to a record for each problem on which our kernel and a baseline are ranked."""
        found = {name: self._records(name) for name in self._specs}
        return {name: records for name, records in found.items() if records}

    @property
    def gpu(self) -> str:
        """The card's own name."""
        return self.book.card(next(iter(self.tables))).gpu

    @property
    def means(self) -> list[Mean]:
        """A mean for each spec, then for each protocol over the fused kernel's problems.

        A problem of several specs counts once there, as the first of them has it.
        """
        each = [
            Mean(name, str(self.book.protocol(name)), self._current(name)) for name in self.tables
        ]
        seen: set[Any] = set()
        pooled: dict[bool, list[Record]] = {}
        contradicted = {label for name in self._specs for label in self.book.contradicted(name)}
        for record in self.fused:
            if record["problem"].label in contradicted:
                continue
            if record["problem"] not in seen:
                pooled.setdefault(record["protocol"] >= ALONE, []).append(record)
            seen.add(record["problem"])
        for alone, records in pooled.items():
            each.append(Mean("", f"{ALONE} or later" if alone else f"before {ALONE}", records))
        return each

    def _current(self, name: str) -> list[Record]:
        contradicted = self.book.contradicted(name)
        return [each for each in self.tables[name] if each["problem"].label not in contradicted]

    @property
    def fused(self) -> list[Record]:
        """Records of the fused kernel, those whose calls do not overlap first."""
        names = [name for name in self.tables if self._specs[name].get("fused")]
        names.sort(key=lambda name: self.book.protocol(name) < ALONE)
        return [record for name in names for record in self.tables[name]]

    def where(self, name: str) -> str:
        """The directory of a spec's run below `results`."""
        return f"{self.slug}/{self.book.place(name)}"

    def _records(self, name: str) -> list[Record]:
        book, protocol = self.book, self.book.protocol(name)
        every = {row.provider for row in book.rows(name)} - {OURS, PLAIN_READ}
        found = baselines_beside(book, [name], self._specs[name].get("kernel"), sorted(every))
        found = [record for record in found if record["baselines"]]
        against = book.against(name, FA3) if any(FA3 in r["baselines"] for r in found) else {}
        for record in found:
            best = record["best"]
            fa3 = against.get(best.trial.key) if FA3 in record["baselines"] else None
            overlaps = protocol < ALONE and best.config.get("PDL", 0) != 0
            chained = [row for row in record["rows"] if row.chained_us is not None]
            record |= {"protocol": protocol, "fa3": fa3, "overlaps": overlaps, "card": self.slug}
            # With the same config's time, for the best config may be one that cannot be chained.
            record["chained"] = min(chained, key=lambda row: row.chained_us, default=None)
        return found


def cards(
    results: Path, specs: Mapping[str, Mapping[str, Any]], known: Book | None = None
) -> list[Recordings]:
    """Every card below a directory of results. known: a book that was read already."""
    names = sorted(path.name for path in results.iterdir() if path.is_dir())
    ordered = sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    books = [
        known if known is not None and known.results == results / name else Book(results / name)
        for name in ordered
        if name != "replay"
    ]
    found = [Recordings(book, specs) for book in books]
    return [card for card in found if card.tables]


def by_spec(cards: Sequence[Recordings]) -> list[tuple[str, str, list[Mean | None]]]:
    """For each spec, and last each protocol of the fused kernel, the mean of each card or None."""
    of_card = [
        {(mean.of, "" if mean.of else mean.protocol): mean for mean in card.means} for card in cards
    ]
    keys = sorted(
        dict.fromkeys(key for means in of_card for key in means), key=lambda key: not key[0]
    )
    return [(*key, [means.get(key) for means in of_card]) for key in keys]
