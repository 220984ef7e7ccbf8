"""Claims as rows of data, and the one evaluator that turns a row into a verdict.

A TOML file has `given` (constants), `rows` (name to a query, see records.Book.find), `let` (name to
an expression over other names), and claims. A claim says what its authors say; `holds`, `part` and
`open` are expressions, tried in the order open, holds, part; `measured` and `note` are templates.
Expressions and templates are Jinja's. A claim that needs a row which is not recorded is not tested.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import counts
import jinja2
import jinja2.meta
from records import Book, QueryError

from attnsweep.core.hardware import arch_named

HOLDS, PART, FAILS, OPEN, NONE = "holds", "in part", "does not hold", "not tested", "–"
RULES = {"open": OPEN, "holds": HOLDS, "part": PART}  # in the order in which they are tried
FILE_KEYS = {"given", "rows", "let", "claim", "section", "table"}
CLAIM_KEYS = {"says", "each", "rows", "let", "open", "holds", "part", "measured", "note"}
WRONG = (TypeError, ValueError, ArithmeticError, AttributeError, KeyError)  # in an expression
QUERY_KEYS = {"like", *inspect.signature(Book.find).parameters} - {"self"}


ENV = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "pages"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENV.globals |= {name: getattr(counts, name) for name in counts.__all__}
ENV.globals |= {"arch": arch_named, "max": max, "min": min, "mean": geometric_mean}
ENV.filters |= {
    "d": lambda value, digits=0: f"{value:.{digits}f}",
    "g": lambda value, digits=4: f"{value:.{digits}g}",
    "percent": lambda share, digits=0: f"{round(100 * share, digits) + 0.0:.{digits}f} %",
    "signed": lambda value, digits=0: f"{value:+.{digits}f}",
    "settings": lambda row, names: " ".join(f"{name}={row.config[name]}" for name in names),
    "mean_ratio": counts.mean_ratio,
    "wmma": counts.wmma,
}


@cache
def _names_in(template: str) -> set[str]:
    return jinja2.meta.find_undeclared_variables(ENV.parse(template))


@cache
def _compiled(expression: str) -> Callable[..., Any]:
    return ENV.compile_expression(expression, undefined_to_none=False)


class Missing(LookupError):
    """No recorded row answers a query."""


@dataclass(frozen=True)
class Verdict:
    """A claim, what was measured, whether it holds, and a note. result: one of the four words."""

    says: str
    measured: str
    result: str
    note: str


class Names:
    """Names that expressions may use: what is given, rows found by queries, computed values."""

    def __init__(
        self,
        where: str,
        book: Book,
        rows: Mapping[str, Mapping[str, Any]],
        let: Mapping[str, str],
        known: Mapping[str, Any],
        outer: Names | None = None,
    ) -> None:
        self.where, self.book, self.let, self.outer = where, book, let, outer
        self.queries: dict[str, Mapping[str, Any]] = {**(outer.queries if outer else {}), **rows}
        self._rows, self._known = rows, dict(known)
        if hidden := ENV.globals.keys() & {*rows, *let, *known}:
            raise QueryError(f"{where}: {min(hidden)!r} is the name of a function")

    def within(self, where: str, claim: Mapping[str, Any], **known: Any) -> Names:
        """These names and those of one claim."""
        rows, let = claim.get("rows", {}), claim.get("let", {})
        return Names(f"{self.where}: {where}", self.book, rows, let, known, self)

    def query(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """A query in full: `like` names another one to start from. Raises QueryError."""
        _check(self.where, query, QUERY_KEYS, "query key")
        if "like" not in query:
            return dict(query)
        if query["like"] not in self.queries:
            raise QueryError(f"{self.where}: like {query['like']!r}: there is no such query")
        base = self.query(self.queries[query["like"]])
        config = {**base.get("config", {}), **query.get("config", {})}
        own = {key: value for key, value in query.items() if key != "like"}
        return {**base, **own, "config": config}

    def find(self, **query: Any) -> Any:
        """What the book finds for a query."""
        full = self.query(query)
        try:
            return self.book.find(**full)
        except QueryError as error:
            raise QueryError(f"{self.where}: {error}") from error

    def __contains__(self, name: str) -> bool:
        own = name in self._known or name in self._rows or name in self.let
        return own or (self.outer is not None and name in self.outer)

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            if name in self._rows:
                self._known[name] = self.find(**self._rows[name])
            elif name in self.let:
                self._known[name] = self.value(self.let[name])
            elif self.outer is not None and name in self.outer:
                return self.outer[name]
            else:
                raise QueryError(f"{self.where}: unknown name {name!r}")
        found = self._known[name]
        if found is None or found == []:
            query = self.query(self.queries.get(name, {}))
            plain = {key: value for key, value in query.items() if isinstance(value, str | list)}
            told = ", ".join(f"{key} {value}" for key, value in sorted(plain.items()))
            raise Missing(told or name)
        return found

    def _needed(self, template: str) -> dict[str, Any]:
        return {name: self[name] for name in _names_in(template)}

    def value(self, expression: str) -> Any:
        """What an expression gives."""
        try:
            needed = self._needed(f"{{{{ {expression} }}}}")
            return _compiled(expression)(**needed)
        except (jinja2.TemplateError, *WRONG) as error:
            raise QueryError(f"{self.where}: {expression!r}: {error}") from error

    def text(self, template: str) -> str:
        """A template with its names filled in."""
        try:
            return ENV.from_string(template).render(self._needed(template))
        except (jinja2.TemplateError, *WRONG) as error:
            raise QueryError(f"{self.where}: {template!r}: {error}") from error


class Sheet(Names):
    """A file of claims, and the names that all of its claims may use."""

    def __init__(self, path: Path, book: Book) -> None:
        self.data = data = tomllib.loads(path.read_text(encoding="utf-8"))
        _check(path.name, data, FILE_KEYS)
        for claims in (data.get("claim", []), *(s["claim"] for s in data.get("section", []))):
            for number, claim in enumerate(claims, start=1):
                where = f"{path.name}: claim {number}, {claim.get('says', '')[:40]!r}"
                _check(where, claim, CLAIM_KEYS)
        known = {"book": book, "queries": data.get("rows", {})} | data.get("given", {})
        super().__init__(path.name, book, data.get("rows", {}), data.get("let", {}), known)

    @property
    def table(self) -> list[dict[str, Any]]:
        """Rows of data for the page."""
        return list(self.data.get("table", []))

    def verdicts(self) -> list[Verdict]:
        """The verdict of each claim."""
        return list(verdicts(self, self.data["claim"]))

    def sections(self) -> Iterator[dict[str, Any]]:
        """Sections about a recorded file: their data, the file, and the verdicts."""
        for section in self.data["section"]:
            if self.book.has(section["file"]):
                found = self.book.file(section["file"])
                names = self.within(section["file"], {}, found=found)
                told = list(verdicts(names, section["claim"]))
                about = names.text(section.get("about", ""))
                yield section | {"found": found, "verdicts": told, "about_text": about}


def _check(where: str, data: Mapping[str, Any], known: set[str], what: str = "key") -> None:
    if unknown := set(data) - known:
        listed = ", ".join(sorted(known))
        raise QueryError(f"{where}: unknown {what} {min(unknown)!r}; known: {listed}")


def verdicts(names: Names, claims: list[dict[str, Any]]) -> Iterator[Verdict]:
    """Each claim's verdict; a claim with `each` has one for each item of that expression."""
    for claim in claims:
        for item in names.value(claim["each"]) if "each" in claim else [None]:
            yield verdict(names.within(claim["says"][:40], claim, item=item), claim)


def verdict(names: Names, claim: Mapping[str, Any]) -> Verdict:
    """What a claim's rules say of the recorded rows."""
    says = names.text(claim["says"])
    rules = [(rule, word) for rule, word in RULES.items() if rule in claim]
    try:
        otherwise = FAILS if rules else NONE
        result = next((word for rule, word in rules if names.value(claim[rule])), otherwise)
        measured, note = (names.text(claim.get(part, "")) for part in ("measured", "note"))
    except Missing as missing:
        return Verdict(says, "", OPEN, f"not recorded: {missing}")
    return Verdict(says, measured, result, note)
