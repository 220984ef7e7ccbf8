"""Rows as lines of JSON: how they are written, and what is read of any line.

`RowReader` reads a line in a fifth of the time that pydantic takes, which reads the lines that are
not as most are. `StoredRows` are those of a large file: each is read when it is asked for.
"""

from __future__ import annotations

import re
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from sys import intern
from typing import Any, BinaryIO, get_args, overload

import msgspec
from msgspec.structs import asdict, replace
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_json

from attnsweep.core.errors import AttnsweepError
from attnsweep.core.files import utf8
from attnsweep.core.problem import Problem
from attnsweep.core.trial import OURS, Status, Trial, key_of, odd_time, unsound

# Without a limit, a foreign file would give one warning per line.
MAX_WARNINGS = 20
KEPT = 10_000
"""Rows of a file that are all kept as they are read; of a larger one, those of some problems."""

Key = tuple[object, ...]


class Warnings:
    """What was wrong with the lines of a file: lines that are no row, rows that cannot be so."""

    def __init__(self, path: Path) -> None:
        self._path, self._skipped = path, list[str]()
        self._odd: dict[Key, str] = {}

    def skipped(self, number: int, line: bytes, why: str) -> None:
        """Note a line that is no row."""
        if line.endswith(b"\n"):
            said = f"skipped, not a trial: {why}"
        else:
            said = "dropped the incomplete last line (its run was killed, or is still writing)"
        self._skipped.append(f"{self._path}:{number}: {said}")

    def read(self, number: int, key: Key, trial: Trial) -> None:
        """Note the impossible fact of a row, or that this row replaces one that had such."""
        if (why := _odd(trial)) is not None:
            self._odd[key] = f"{self._path}:{number}: {why}"
        elif self._odd:
            self._odd.pop(key, None)

    def texts(self) -> list[str]:
        """The first warnings, and how many more there are."""
        texts = [*self._skipped, *self._odd.values()]
        if len(texts) > MAX_WARNINGS:
            rest = len(texts) - MAX_WARNINGS
            texts = [*texts[:MAX_WARNINGS], f"{self._path}: and {rest} more lines like these"]
        return texts


def parse_trials(lines: Iterable[bytes], path: Path) -> tuple[dict[Key, Trial], list[str], int]:
    """Trials by key, warnings, and the number of whole rows, including replaced ones."""
    trials: dict[Key, Trial] = {}
    reader, warnings, rows = RowReader(), Warnings(path), 0
    for key, facts, _ in _parsed(lines, reader, warnings):
        trials[key] = trial_of(facts)
        rows += 1
    return trials, warnings.texts(), rows


def read_rows(file: BinaryIO, path: Path) -> tuple[Sequence[Trial], list[str]]:
    """The rows of a file, and warnings; of a large one StoredRows, which go on reading it.

    The file is closed when nothing reads it any more.
    """
    reader, warnings = RowReader(), Warnings(path)
    weakref.finalize(reader, file.close)
    places: dict[Key, int] = {}
    trials: dict[Key, Trial] | None = {}
    for key, facts, place in _parsed(file, reader, warnings):
        places[key] = place
        if trials is not None:
            trials[key] = trial_of(facts)
            trials = None if len(trials) > KEPT else trials
    if trials is not None:
        return list(trials.values()), warnings.texts()
    return StoredRows.of_keys(file, reader, places), warnings.texts()


def _parsed(
    lines: Iterable[bytes], reader: RowReader, warnings: Warnings
) -> Iterator[tuple[Key, Any, int]]:
    """The key of each row, what the reader makes it of, and where its line begins."""
    begin = 0
    for number, line in enumerate(lines, start=1):
        place, begin = begin, begin + len(line)
        if line.isspace():
            continue
        facts = reader.facts(line)
        if isinstance(facts, str):
            warnings.skipped(number, line, facts)
            continue
        key = reader.key(facts)
        warnings.read(number, key, facts)
        yield key, facts, place


def _odd(trial: Trial) -> str | None:
    """The impossible fact of a row, for which nothing is compared with it; or None."""
    found = unsound(trial)
    why = None if found is None else found[1]
    if trial.status is Status.NOISY and (said := odd_time(trial)) is not None:
        why = f"says noisy, but {said}"
    name = trial.kernel if trial.provider == OURS else trial.provider
    return why and f"not ranked: {name} on {trial.problem.label} {why}"


_CONTROL = re.compile(rb"\\u00(?:0[1-8b-f]|1[0-9a-f]|7f|[89][0-9a-f])|\x7f|\xc2[\x80-\x9f]", re.I)


def _printable(data: bytes) -> bytes:
    """JSON whose texts have no control characters, which a terminal would obey."""
    # Most lines have no backslash, and one byte is sought faster than four.
    escaped = b"\\" in data and b"\\u00" in data
    odd = escaped or not data.isascii() or b"\x7f" in data
    return _CONTROL.sub(rb"\\ufffd", data) if odd else data


# -- one row --------------------------------------------------------------------------------

# Fields whose values many rows have: in recorded runs, 0.1 to 27 % of them are distinct.
_SHARED = ("problem", "config", "variant", "schedule", "conditions", "machine", "resources")
# Most names of facts of other versions that a file's lines are read quickly with.
_MOST_EXTRA = 40
_set = object.__setattr__  # the models are frozen
Known = dict[str, dict[bytes, Any]]
"""The values of shared fields, by the field and the JSON that was read as them."""


class RowReader:
    """Reads lines of one file. Rows share equal values: they are frozen, and nobody changes them.

    msgspec reads a line as a struct of the fields that Trial declares, and takes no line that
    pydantic would not take, or would read as something else. A line with facts of another version
    is one that pydantic reads; from then on their names are known.
    """

    def __init__(self) -> None:
        self._known: Known = {name: {} for name in _SHARED}
        self._extra: dict[type[BaseModel], dict[str, None]] = {}
        self._settings: dict[int, object] = {}
        self._learn(Trial, ())

    def row(self, line: bytes) -> Trial | str:
        """The Trial in one line, or the reason why there is none."""
        facts = self.facts(line)
        return facts if isinstance(facts, str) else trial_of(facts)

    def facts(self, line: bytes) -> Any:
        """The facts of a line: its Trial, or what has the same attributes; or the reason.

        Of the second kind `trial_of` makes a Trial, which takes as long as reading the line.
        """
        line = _printable(line)
        try:
            return self._fields.resolved(self._decoder.decode(line))
        except (msgspec.MsgspecError, ValueError, AttnsweepError):
            return self._as_pydantic_does(line)

    def key(self, facts: Any) -> Key:
        """Trial.key, which is worked out once for rows that share a config."""
        config = facts.config
        settings = self._settings.get(id(config))
        if settings is None:
            *_, settings = key_of(facts.problem, facts.provider, facts.kernel, config)
            self._settings[id(config)] = settings
        return facts.problem, intern(facts.provider), intern(facts.kernel), settings

    def _as_pydantic_does(self, line: bytes) -> Trial | str:
        try:
            trial = Trial.model_validate_json(line)
        except ValidationError as error:
            return first_fault(error)
        except AttnsweepError as error:
            return error.what
        for part in (trial, *(each for each in trial.__dict__.values() if _is_model(type(each)))):
            self._learn(type(part), part.model_extra or ())
        for name in ("config", "variant"):  # their ids stand for them, so they have to stay
            value = getattr(trial, name)
            trial.__dict__[name] = self._known[name].setdefault(to_json(value), value)
        return trial

    def _learn(self, model: type[BaseModel], names: Iterable[str]) -> None:
        """Read a model's objects with these names of facts, too."""
        known = self._extra.setdefault(model, {})
        # Attributes of a struct; a name that cannot be one is left to Pydantic.
        taken = {*known, *dir(model), "made", "with_"}
        new = [name for name in names if name.isidentifier() and name not in taken]
        if len(known) + len(new) <= _MOST_EXTRA and (new or (model is Trial and not known)):
            known |= dict.fromkeys(new)
            self._fields = _Fields(Trial, self._extra, self._known)
            self._decoder = msgspec.json.Decoder(self._fields.struct)


class _Fields:
    """The fields of a model as a struct of msgspec, from which objects of the model are made.

    extra: names of facts that the model keeps, and does not declare. known: the values of shared
    fields by their JSON, which is what the struct has of them.
    """

    def __init__(
        self, model: type[BaseModel], extra: Mapping[type[BaseModel], Iterable[str]], known: Known
    ) -> None:
        self._model, self._extra = model, [*extra.get(model, ())]
        self._names = set(model.model_fields)
        self._parts: dict[str, _Fields] = {}
        self._shared: dict[str, tuple[dict[bytes, Any], TypeAdapter[Any], Any]] = {}
        fields: list[tuple[str, Any, Any]] = []
        for name, field in model.model_fields.items():
            kind: Any = field.annotation
            default: Any = msgspec.NODEFAULT
            if not field.is_required():
                default = field.get_default(call_default_factory=True)
            inner = next(filter(_is_model, (kind, *get_args(kind))), None)
            if model is Trial and name in _SHARED:
                self._shared[name] = known[name], TypeAdapter(kind), default
                kind = msgspec.Raw
                default = default if field.is_required() else msgspec.Raw()
            elif inner is not None:
                part = self._parts[name] = _Fields(inner, extra, known)
                kind = part.struct | None
            fields.append((name, kind, default))
        fields += [(name, Any, msgspec.UNSET) for name in self._extra]
        own: dict[str, Any] = {
            name: each for name, each in vars(model).items() if isinstance(each, property)
        }
        own |= {"made": lambda struct: self.made(struct), "with_": _with} if model is Trial else {}
        options: Any = {"kw_only": True, "forbid_unknown_fields": True, "gc": False}
        self.struct: Any = msgspec.defstruct(f"_{model.__name__}", fields, namespace=own, **options)

    def resolved(self, struct: Any) -> Any:
        """The struct with the values of shared fields. Raises ValidationError if one cannot be."""
        for name, (known, adapter, default) in self._shared.items():
            json = bytes(getattr(struct, name))
            try:
                value = known[json]
            except KeyError:
                value = known[json] = adapter.validate_json(json) if json else default
            setattr(struct, name, value)
        return struct

    def made(self, struct: Any) -> Any:
        """Make the row's object from a decoded JSON line."""
        facts = asdict(struct)
        for name, part in self._parts.items():
            if facts[name] is not None:
                facts[name] = part.made(facts[name])
        extra = {}
        for name in self._extra:
            if (value := facts.pop(name)) is not msgspec.UNSET:
                extra[name] = value
        row = self._model.__new__(self._model)
        _set(row, "__dict__", facts)
        _set(row, "__pydantic_fields_set__", self._names)  # nobody asks which a line had
        _set(row, "__pydantic_extra__", extra)
        _set(row, "__pydantic_private__", None)
        return row


def _with(facts: Any, **changes: Any) -> Any:
    """As Trial.with_."""
    return replace(facts, **changes)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def row_bytes(trial: Trial) -> bytes:
    """One line of strict JSON with its newline; NaN and infinity are strings, which read back."""
    if trial.detail is not None:
        # Compiler logs may hold bytes that are not UTF-8 and arrive as lone surrogates.
        trial = trial.with_(detail=utf8(trial.detail).decode())
    return to_json(trial.model_dump(mode="json"), inf_nan_mode="strings") + b"\n"


def first_fault(error: ValidationError) -> str:
    """The first thing that is wrong, with its place."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


# -- many rows ------------------------------------------------------------------------------


class StoredRows(Sequence[Trial]):
    """The rows of a large file in order of first appearance, each read when it is asked for.

    Those of the problems that were asked for last are kept, up to KEPT rows. The file stays open,
    so its rows stay what they were, whatever becomes of its name.
    """

    def __init__(
        self,
        file: BinaryIO,
        reader: RowReader,
        places: Mapping[Problem, array[int]],
        in_order: array[int],
        change: Callable[[Trial], Trial] | None = None,
    ) -> None:
        """places, in_order: where the lines of a problem, and of all rows, begin."""
        self._file, self._reader, self._change = file, reader, change
        self._places, self._in_order = places, in_order
        self._kept: dict[Problem, list[Trial]] = {}
        self._last: tuple[Problem | None, list[Trial]] = None, []

    @classmethod
    def of_keys(cls, file: BinaryIO, reader: RowReader, keys: Mapping[Key, int]) -> StoredRows:
        """The rows whose lines begin at these places, by Trial.key."""
        places: dict[Any, array[int]] = {}
        for (problem, *_), place in keys.items():
            places.setdefault(problem, array("q")).append(place)
        return cls(file, reader, places, array("q", keys.values()))

    def changed(self, change: Callable[[Trial], Trial]) -> StoredRows:
        """These rows with `change` applied to each when it is read."""
        return StoredRows(self._file, self._reader, self._places, self._in_order, change)

    @property
    def problems(self) -> Iterable[Problem]:
        """The problems, in order of first appearance."""
        return self._places.keys()

    def of(self, problem: Problem) -> list[Trial]:
        """The facts of one problem's rows, of which no two have one key; see `trial_of`."""
        last, rows = self._last
        if problem is last:  # it is asked for each row
            return rows
        rows = self._kept.pop(problem, [])
        if not rows:
            rows = [*self._read(self._places[problem])]
            if self._change is not None:
                rows = [*{row.key: row for row in rows}.values()]
            room = KEPT - len(rows)
            while self._kept and sum(map(len, self._kept.values())) > room:
                del self._kept[next(iter(self._kept))]
        self._kept[problem] = rows
        self._last = problem, rows
        return rows

    def __len__(self) -> int:
        return len(self._in_order)

    @overload
    def __getitem__(self, number: int) -> Trial: ...
    @overload
    def __getitem__(self, number: slice) -> list[Trial]: ...
    def __getitem__(self, number: int | slice) -> Trial | list[Trial]:
        if isinstance(number, slice):
            return [*map(trial_of, self._read(self._in_order[number]))]
        return next(map(trial_of, self._read([self._in_order[number]])))

    def __iter__(self) -> Iterator[Trial]:
        return map(trial_of, self._read(self._in_order))

    def _read(self, places: Iterable[int]) -> Iterator[Trial]:
        """The facts of the lines that begin at these places."""
        for place in places:
            self._file.seek(place)
            facts = self._reader.facts(self._file.readline())
            assert not isinstance(facts, str), "it was a row when the file was opened"
            yield facts if self._change is None else self._change(facts)


def trial_of(facts: Trial) -> Trial:
    """The Trial of a row's facts, which may be that already."""
    return facts if isinstance(facts, Trial) else facts.made()


def of_problems(trials: Sequence[Trial]) -> dict[Problem, Callable[[], list[Trial]]]:
    """The problems in order of first appearance, each with what gives the facts of its rows."""
    if isinstance(trials, StoredRows):
        return {problem: partial(trials.of, problem) for problem in trials.problems}
    by_problem: dict[Problem, list[Trial]] = {}
    for problem, alike in groupby(trials, attrgetter("problem")):  # most stand one after another
        by_problem.setdefault(problem, []).extend(alike)
    return {problem: partial(_itself, members) for problem, members in by_problem.items()}


def rows_of(trials: Sequence[Trial], problem: Problem) -> list[Trial]:
    """The rows of one problem."""
    if isinstance(trials, StoredRows):
        return [*map(trial_of, trials.of(problem))]
    return [trial for trial in trials if trial.problem == problem]


def changed(trials: Sequence[Trial], change: Callable[[Trial], Trial]) -> Sequence[Trial]:
    """The rows, each as `change` makes it of its facts."""
    if isinstance(trials, StoredRows):
        return trials.changed(change)
    return [*map(change, trials)]


def _itself(rows: list[Trial]) -> list[Trial]:
    return rows
