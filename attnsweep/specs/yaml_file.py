"""A YAML file with the position of each value, so that an error can say file:line:column.

Scalars are read by YAML 1.2's core schema, not PyYAML's 1.1: `no` is text, and neither `010` nor
`1:30` is a number. Repeated keys are refused. Pydantic's errors are put in plain words, with the
known name that an unknown one was probably meant to be.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from attnsweep.core.errors import SpecError
from attnsweep.core.formats import FORMATS

MAX_ERRORS = 5
_LONG = 400  # letters of an error that quotes a value
_MAX_VALUES = 100_000  # aliases can expand a short file without end

Loc = tuple[str | int, ...]
"""Keys and indices from the document's root, as in pydantic's errors."""
Mark = tuple[int, int] | str
"""Line and column, from 1; or the option that set a value which is not in the file."""


def wrong(what: str, hint: str | None = None) -> PydanticCustomError:
    """An error for a validator to raise; the file gives `{name}` and `{value}` in `what`."""
    return PydanticCustomError("attnsweep", "{what}", {"what": what, "hint": hint})


def nearest(word: str, names: Iterable[str]) -> str:
    """A hint such as `did you mean 'x'? there are: x, y, z`."""
    names = list(names)
    close = closest(word, names)
    there = f"there are: {', '.join(names)}" if names else "there are none"
    return f"did you mean {close!r}?{_looks_like(word)} {there}" if close else there


def _looks_like(word: str) -> str:
    """A sentence about the first letter that no name here has, which may look like one of them."""
    other = next((letter for letter in word if not letter.isascii()), None)
    if other is None:
        return ""
    return f" {other!r} is U+{ord(other):04X}, {unicodedata.name(other, 'without a name')};"


T = TypeVar("T")


class _OneOrMany:
    """Marks a list that may be written as one scalar. Repeats are dropped; it is never empty."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def distinct(values: list[Any]) -> list[Any]:
            if not values:
                raise wrong("{name} must not be empty")
            return list({(type(value), repr(value)): value for value in values}.values())

        one_or_list = core_schema.no_info_before_validator_function(
            lambda value: value if isinstance(value, list) else [value], handler(source)
        )
        return core_schema.no_info_after_validator_function(distinct, one_or_list)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        many = handler(schema)
        return {"anyOf": [many["items"], {**many, "minItems": 1}]}


Many = Annotated[list[T], _OneOrMany()]
"""A field of a model: a list of T, or one T."""


class _OneOrManyLists(_OneOrMany):
    """Marks a list of lists that may be written as one of these: it is one without a list in it."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        (item,) = get_args(source)

        def kind(value: object) -> str:
            inner = isinstance(value, list) and any(isinstance(each, list) for each in value)
            return _MANY if inner else _ONE

        one = core_schema.no_info_after_validator_function(lambda value: [value], handler(item))
        many = super().__get_pydantic_core_schema__(source, handler)
        return core_schema.tagged_union_schema({_ONE: one, _MANY: many}, kind)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        one, many = handler(schema)["oneOf"]
        return {"anyOf": [one, {**many, "minItems": 1}]}


_ONE, _MANY = "<one>", "<many>"  # pydantic puts them into the places of errors
ManyLists = Annotated[list[T], _OneOrManyLists()]
"""A field of a model: a list of T, each of which is a list, or one T."""


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars by YAML 1.2's core schema, with decimal numbers only."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 -- PyYAML's own declaration


class _Dumper(yaml.SafeDumper):
    """Quotes each text that YAML 1.1 or `_Loader` would read as another type."""


class Flow(dict[str, Any]):
    """A mapping that `dump` writes on one line."""


_NULL, _BOOL, _INT, _FLOAT, _STR, _SEQ, _MAP = (
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")
)
_DIGITS = "(?:0|[1-9][0-9]*)"
for _class in (_Loader, _Dumper):
    for _tag, _pattern, _first in (
        (_BOOL, "true|True|TRUE|false|False|FALSE", "tTfF"),
        (_INT, f"[-+]?{_DIGITS}", "-+0123456789"),
        (_FLOAT, rf"[-+]?(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
        (_NULL, "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ):
        _class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list(_first))
_Dumper.add_representer(
    Flow, lambda dumper, data: dumper.represent_mapping(_MAP, data.items(), flow_style=True)
)


def dump(data: Mapping[str, Any]) -> str:
    """YAML text that `Document.read` reads back equal."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)


def recorded(text: str | None) -> dict[str, Any]:
    """The data of a text that `dump` wrote, or nothing if the text was damaged since."""
    try:
        data = yaml.safe_load(text or "")
    except (yaml.YAMLError, ValueError, LookupError, RecursionError):  # of a date, a tag, brackets
        return {}
    return data if isinstance(data, dict) else {}


def _scalar(tag: str, text: str) -> str | int | float | bool | None:
    """The value of a scalar. Raises KeyError or ValueError for a tag or text no spec may hold."""
    if tag == _NULL:
        return None
    if tag == _BOOL:
        return {"true": True, "false": False}[text.lower()]
    if tag == _INT:
        return text if len(text) > 4000 else int(text)  # int() converts no more than 4300 digits
    if tag == _FLOAT:
        return float(text)
    if tag == _STR:
        return text
    raise KeyError(tag)


def _read_text(path: Path, hint: str) -> str:
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            # Reading a FIFO without a writer would block for ever.
            raise SpecError("is not a regular file", where=str(path), hint=hint)
        return path.read_text(encoding="utf-8-sig")
    except IsADirectoryError:
        inside = path / "spec.yaml"
        hint = f"its spec is {inside}" if inside.is_file() else hint
        raise SpecError("is a directory, not a spec", where=str(path), hint=hint) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        column = error.start - error.object.rfind(b"\n", 0, error.start)
        raise SpecError(
            f"not UTF-8: byte 0x{error.object[error.start]:02x}",
            where=f"{path}:{line}:{column}",
            hint="save the file as UTF-8",
        ) from None
    except OSError as error:
        raise SpecError(f"cannot be read: {error.strerror}", where=str(path)) from None


def _mark(mark: yaml.Mark) -> tuple[int, int]:
    return mark.line + 1, mark.column + 1


def _merges(key: yaml.Node) -> bool:
    """Whether a key is `<<`, which PyYAML's own loaders merge and YAML 1.2 leaves open."""
    return isinstance(key, yaml.ScalarNode) and key.value == "<<" and not key.style


@dataclass(frozen=True, slots=True)
class _Issue:
    what: str
    hint: str | None
    mark: Mark | None


class Document:
    """One YAML file: `data`, and the position of each value and key in it.

    `report` collects issues, and `raise_issues` raises them together.
    """

    def __init__(self, path: Path, *, made: bool = False) -> None:
        self.path, self._made = path, made
        self.data: Any = None
        self.values: dict[Loc, Mark] = {}
        self.keys: dict[Loc, Mark] = {}
        self.texts: dict[Loc, str] = {}
        """Scalars as the file writes them; quoted ones in quotes."""
        self._issues: list[_Issue] = []
        self._nodes: set[int] = set()
        self._aliased = False
        # By mapping, its keys and those that it merges: anchors inside anchors cost nothing more.
        self._flat: dict[int, dict[str, tuple[yaml.Node, yaml.Node]]] = {}

    @classmethod
    def read(cls, path: Path, hint: str) -> Document:
        """Read a file. Raises SpecError unless it is one document of mappings, lists and scalars.

        hint: advice if the file is empty, a directory, or not a regular file.
        """
        return cls.parse(path, _read_text(path, hint), hint)

    @classmethod
    def parse(
        cls, path: Path, text: str, hint: str | None = None, *, made: bool = False
    ) -> Document:
        """The document of a text, which is or will be in the file `path`. Raises SpecError.

        made: by a command, for itself: the user has no such file, and errors name no line of it.
        """
        document = cls(path, made=made)
        try:
            root = yaml.compose(text, _Loader)
            if root is None or root.start_mark.index == root.end_mark.index:
                raise SpecError("is empty", where=str(path), hint=hint)
            document.data = document._walk(root, (), ())
        except yaml.MarkedYAMLError as error:
            at = _mark(error.problem_mark) if error.problem_mark else None
            context = error.context
            if context and error.context_mark:
                context += f" that begins in line {error.context_mark.line + 1}"
            problem = error.problem or "it cannot be parsed"
            if context and problem.startswith("but "):  # one sentence in two halves
                problem, context = f"{error.context}, {problem}", None
            if problem.startswith("found character '\\t'"):
                context = "write spaces in place of the tab"
            document.report(f"not valid YAML: {problem}", context, at)
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            column = error.position - text.rfind("\n", 0, error.position)
            what = f"not valid YAML: character U+{ord(text[error.position]):04X} is not allowed"
            document.report(what, None, (line, column))
        except RecursionError:
            document.report("nested too deeply", None, None)
        document.raise_issues()
        return document

    def _walk(self, node: yaml.Node, loc: Loc, parents: tuple[int, ...]) -> Any:
        at = self.values[loc] = _mark(node.start_mark)
        self._aliased |= id(node) in self._nodes
        self._nodes.add(id(node))
        if id(node) in parents:
            self.report("this alias contains itself", "write the values out", at)
            return None
        if len(self.values) > _MAX_VALUES:
            if len(self.values) == _MAX_VALUES + 1:
                by, hint = "", "use several specs"
                if self._aliased:
                    by, hint = ", and aliases repeat them", "use fewer aliases inside aliases"
                self.report(f"too many values: at most {_MAX_VALUES}{by}", hint, at)
            return None
        parents = (*parents, id(node))
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
            return [self._walk(item, (*loc, i), parents) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
            return self._walk_mapping(node, loc, parents)
        if isinstance(node, yaml.ScalarNode):
            self.texts[loc] = repr(node.value) if node.style else node.value
            try:
                return _scalar(node.tag, node.value)
            except (ValueError, KeyError):
                pass
        self.report(f"a spec cannot use tag {node.tag}", "remove the tag", at)
        return None

    def _walk_mapping(
        self, node: yaml.MappingNode, loc: Loc, parents: tuple[int, ...]
    ) -> dict[str, Any]:
        out: dict[str, Any] = {}
        own = [pair for pair in node.value if not _merges(pair[0])]
        names = {key.value for key, _ in own if isinstance(key.value, str)}
        merged = self._merged(node, parents) if len(own) < len(node.value) else {}
        for key, value in [*own, *(pair for name, pair in merged.items() if name not in names)]:
            at, name = _mark(key.start_mark), key.value
            if not isinstance(name, str):
                self.report("a key must be text, not a list or a mapping", None, at)
            elif name in out:
                first = self.keys[(*loc, name)][0]
                self.report(f"duplicate key {name!r}", f"first in line {first}: drop one", at)
            else:
                self.keys[(*loc, name)] = at
                out[name] = self._walk(value, (*loc, name), parents)
        return out

    def _merged(
        self, node: yaml.MappingNode, parents: tuple[int, ...]
    ) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """The keys that `<<` adds to a mapping, with their values: of several, the first's."""
        found: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if not _merges(key):
                continue
            for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                at = _mark(each.start_mark)
                if not isinstance(each, yaml.MappingNode):
                    hint = "name one mapping, or a list of them: {<<: *a} or {<<: [*a, *b]}"
                    self.report("<< takes the keys of a mapping", hint, at)
                elif id(each) in parents:
                    self.report("this alias contains itself", "write the values out", at)
                else:
                    if id(each) not in self._flat:
                        below = self._merged(each, (*parents, id(each)))
                        own = [pair for pair in each.value if not _merges(pair[0])]
                        plain = {k.value: (k, v) for k, v in own if isinstance(k.value, str)}
                        self._flat[id(each)] = below | plain
                    found = self._flat[id(each)] | found
        return found

    def at(self, *loc: str | int) -> Mark | None:
        """Position of a value, or of the nearest value around it that is in the file."""
        while loc and loc not in self.values:
            loc = loc[:-1]
        return self.values.get(loc)

    def where(self, mark: Mark | None) -> str:
        """A position as an error says it: `file:line:column`, or the option that set the value."""
        if isinstance(mark, str):
            return mark
        return self.path.stem if self._made else ":".join(map(str, (self.path, *(mark or ()))))

    def put(self, loc: Loc, other: Document, source: str) -> None:
        """Set the value at `loc` to that of another document; `source` is its place in errors.

        All of `loc` but its last part is there.
        """
        for places in (self.values, self.keys, self.texts):
            for old in [place for place in places if place[: len(loc)] == loc]:
                del places[old]
        into = self.data
        for part in loc[:-1]:
            into = into[part]
        into[loc[-1]] = other.data
        self.keys[loc] = source
        self.values |= {(*loc, *inner): source for inner in other.values}
        self.keys |= {(*loc, *inner): source for inner in other.keys}
        self.texts |= {(*loc, *inner): text for inner, text in other.texts.items()}

    def drop(self, section: str, key: str) -> str | None:
        """Remove a key of a section; returns a sentence with its place, or None without the key."""
        values = self.data.get(section) if isinstance(self.data, dict) else None
        if not isinstance(values, dict) or key not in values:
            return None
        del values[key]
        where = self.where(self.keys[section, key])
        return f"{where}: {section}: {key} is ignored: attnsweep no longer has it"

    def find(self, value: object, *loc: str | int) -> Mark | None:
        """Where `value` stands in the list at `loc`, or in the scalar given for that list."""
        found: Any = self.data
        for part in loc:
            found = found[part]
        for index, item in enumerate(found if isinstance(found, list) else ()):
            if (type(item), item) == (type(value), value):
                return self.at(*loc, index)
        return self.at(*loc)

    def report(self, what: str, hint: str | None, at: Mark | None) -> None:
        """Note one error."""
        self._issues.append(_Issue(what, hint, at))

    def report_all(self, error: ValidationError, models: Mapping[str, type[BaseModel]]) -> None:
        """Note each of pydantic's errors. models: by top-level key, "" for the root's own."""
        self._issues += [self._explain(detail, models) for detail in error.errors()]

    def raise_issues(self) -> None:
        """Raise one SpecError with the first MAX_ERRORS issues, in file order, if there are any."""
        issues = sorted(dict.fromkeys(self._issues), key=lambda issue: _order(issue.mark))
        self._issues = []
        errors = []
        for issue in issues:
            what = issue.what if len(issue.what) <= _LONG else f"{issue.what[:_LONG]}…"
            errors.append(SpecError(what, where=self.where(issue.mark), hint=issue.hint))
        if len(errors) == 1:
            raise errors[0]
        if errors:
            lines = [error.render() for error in errors[:MAX_ERRORS]]
            if len(errors) > MAX_ERRORS:
                lines.append(f"{self.path}: and {len(errors) - MAX_ERRORS} more")
            raise SpecError("\n".join(lines))

    def _explain(self, error: ErrorDetails, models: Mapping[str, type[BaseModel]]) -> _Issue:
        kind, value = error["type"], error["input"]
        loc = tuple(part for part in error["loc"] if part not in (_ONE, _MANY))
        context = error.get("ctx", {})
        model = models.get(str(loc[0]) if len(loc) > 1 else "", models[""])
        fields = model.model_fields
        if kind == "extra_forbidden":
            there = nearest(str(loc[-1]), fields)
            return _Issue(f"unknown key {loc[-1]!r}", there, self.keys[loc])
        if kind == "missing":
            about = " ".join((fields[str(loc[-1])].description or "").split())
            return _Issue(f"{loc[-1]!r} is missing", about, self.at(*loc[:-1]))
        while loc and loc not in self.values:  # a scalar in place of a list
            loc = loc[:-1]
        name = "".join([part for part in loc if isinstance(part, str)][-1:]) or "a spec"
        if loc and isinstance(loc[-1], int):
            name += f"[{loc[-1]}]"
        shown = self._shown(loc, value)
        what = f"{name}: {error['msg']}"
        hint: str | None = context.get("hint")
        if kind == "attnsweep":
            what = context["what"].replace("{name}", name).replace("{value}", shown)
            if hint is None and isinstance(value, dict) and closest(name, ["variants"]):
                hint = "did you mean 'variants'?"
        elif kind == "literal_error":
            what = f"{name} cannot be {shown}"
            hint = nearest(str(value), re.findall(r"'(.*?)'", context["expected"]))
        elif kind in _BOUNDS:
            words, of = _BOUNDS[kind]
            limit = context[of]
            bound = str(limit) if isinstance(limit, int) else f"{limit:g}"
            what = f"{name} must be {words} {bound}, not {shown}"
        elif kind == "string_too_short" or context.get("actual_length") == 0:
            what = f"{name} must not be empty"
        elif kind in ("too_short", "too_long"):
            most = "most" if kind == "too_long" else "least"
            limit = context["max_length" if kind == "too_long" else "min_length"]
            what = f"{name} must have at {most} {limit} values, not {context['actual_length']}"
        elif kind == "string_pattern_mismatch":
            what = f"{name} must be {_PATTERNS[context['pattern']]}, not {shown}"
        elif kind in _WANTED:
            what = f"{name} must be {_WANTED[kind]}, not {shown}"
            hint = _spelling(kind, value)
            if _WANTED[kind] == "a mapping":
                example = _EXAMPLES.get(str(loc[0])) if len(loc) == 2 else None
                said = fields[name].description if name in fields else example
                hint = said and " ".join(said.split())
        return _Issue(what, hint, self.values[loc])

    def _shown(self, loc: Loc, value: object) -> str:
        """A value as the file writes it."""
        if isinstance(value, dict | list):
            return "a mapping" if isinstance(value, dict) else "a list"
        text = "null" if value is None else self.texts.get(loc, repr(value))
        return text if len(text) <= 60 else f"{text[:60]}…"


def _order(mark: Mark | None) -> tuple[bool, tuple[int, int]]:
    """File order; what an option set comes last."""
    return (True, (0, 0)) if isinstance(mark, str) else (False, mark or (0, 0))


_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
}
NAME_PATTERN = "^[a-z0-9_-]+$"
_PATTERNS = {NAME_PATTERN: "of a-z, 0-9, _ and - only"}
_EXAMPLES = {
    "problems": "write {batch: 1, heads: 16, seqlen: 1024, head_dim: 64}",
    "kernels": "write {} for the family's own values",
}
_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "finite_number": "a finite number",
}


_TIME = re.compile(r"(\d{1,6}) ?([smh])(?:ec|econd|in|inute|our)?s?")


def _spelling(kind: str, value: object) -> str | None:
    """A hint with the spelling that was probably meant, or None."""
    if kind == "bool_type":
        word = str(value).lower()
        meant = {"yes": "true", "on": "true", "1": "true", "true": "true"}
        meant |= {"no": "false", "off": "false", "0": "false", "false": "false"}
        return f"write {meant[word]}" if word in meant else None
    if kind in ("int_type", "float_type") and (time := _TIME.fullmatch(str(value))):
        return f"write seconds: {int(time[1]) * {'s': 1, 'm': 60, 'h': 3600}[time[2]]}"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if kind == "int_type" and re.fullmatch(r"\d+:\d+:\*?\d+", str(value)):
        return "write a list, [1024, 2048]; --problem takes ranges"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        digits = value.replace("_", "").replace(",", "").lstrip("0")
        return f"write {digits}" if re.fullmatch("[1-9][0-9]{0,9}", digits) else None
    if kind == "string_type" and isinstance(value, bool | int | float):
        return "write it in quotes"
    return None


# By its letters, bfloat16 is next to fp16.
_DTYPES = {alias: name for name, each in FORMATS.items() for alias in each.aliases}


def closest(word: str, names: Iterable[str]) -> str | None:
    """The name that is most like a word, whatever the case of its letters; None if none is."""
    folded = {name.lower(): name for name in names}
    plain = word.lower()
    meant = _DTYPES.get(plain.removeprefix("torch."))
    if meant in folded:
        return folded[meant]
    close = difflib.get_close_matches(plain, folded, n=1)
    return folded[close[0]] if close else None


# -- `--set PATH=VALUE` -----------------------------------------------------------------------

# A path has the spec's keys with dots between them, and numbers for places in a list:
# `problems[0].causal=true`. Quotes keep a dot or an equals sign: `variants."a.b".x.THREADS=64`.
_PART = re.compile(r"""\.\s*(?:"([^"]+)"|([^."=\[\]]+))|\[(\d{1,6})\]""")
# Sections that a spec may leave out; a value in one brings it.
_SECTIONS = ("search", "measure", "limits", "require", "check")


def apply(document: Document, settings: Sequence[str]) -> None:
    """Set each of these values in a document. Raises SpecError, which names the setting."""
    if not isinstance(document.data, dict):
        return  # no spec; whoever reads it says so
    done: dict[Loc, str] = {}
    for setting in settings:
        source = f"--set {setting}"
        loc, text = _parted(setting, source)
        if loc in done:
            raise SpecError(f"sets what {done[loc]} sets", where=source, hint="drop one")
        done[loc] = source
        try:
            value = Document.parse(
                Path("value"), text, hint="write a value: null, a number, a list"
            )
        except SpecError as error:
            raise SpecError(error.what, where=source, hint=error.hint) from error
        document.put(_found(document.data, loc, source), value, source)


def tag(settings: Sequence[str], problems: Sequence[str]) -> str:
    """A short name for what is asked on top of a spec, the same for the same values.

    problems: labels. Spelling and the order of settings make no difference.
    """
    values = []
    for setting in settings:
        loc, text = _parted(setting, setting)
        values.append([[*loc], Document.parse(Path("value"), text).data])
    facts = json.dumps([sorted(values, key=repr), [*problems]], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:8]


def _parted(setting: str, source: str) -> tuple[Loc, str]:
    """`a.b[0]=VALUE` as the place and the text of the value."""
    parts: list[str | int] = []
    bad = SpecError(
        "is not PATH=VALUE",
        where=source,
        hint="write the spec's keys and a value: kernels.flash_fwd_wgmma.BLOCK_N=[64,128], "
        "problems[0].causal=true, measure.rounds=30",
    )
    rest = f".{setting.lstrip()}"
    while not rest.startswith("="):
        match = _PART.match(rest)
        if match is None:
            raise bad
        quoted, plain, index = match.groups()
        text = quoted or index or plain.strip()
        if not text:
            raise bad
        number = quoted is None and re.fullmatch("[0-9]{1,6}", text)
        parts.append(int(text) if number else text)
        rest = rest[match.end() :].lstrip()
    if not parts:
        raise bad
    return tuple(parts), rest[1:].strip()


def _found(data: dict[str, Any], loc: Loc, source: str) -> Loc:
    """`loc` as the document has it; sections that are left out are made. Raises SpecError."""
    into: Any = data
    place: list[str | int] = []
    for depth, part in enumerate(loc):
        last = depth == len(loc) - 1
        path = _dotted(place)
        if isinstance(into, list):
            if not isinstance(part, int):
                raise SpecError(f"{path} is a list", where=source, hint=f"write {path}[0].{part}")
            if part >= len(into):
                have = f"{path}[0] to {path}[{len(into) - 1}]" if into else "an empty list"
                raise SpecError(f"{path} has no place {part}", where=source, hint=f"it has {have}")
        elif isinstance(into, dict):
            # A number can be a key: `variants.qk rows.128`.
            part = str(part)
            if not last and part not in into:
                if depth or part not in _SECTIONS:
                    raise _no_key(into, path, part, loc[depth + 1 :], source)
                into[part] = {}
            elif not last and into[part] is None:  # `naive:` alone, its own values
                into[part] = {}
        else:
            raise SpecError(f"{path} is {into!r}, which holds nothing", where=source)
        place.append(part)
        if not last:
            into = into[part]
    if isinstance(into, dict) and place[0] == "kernels" and len(place) == 3:
        _not_in_variants(into, place, source)
    return tuple(place)


def _no_key(
    into: dict[str, Any], path: str, part: str, below: Sequence[str | int], source: str
) -> SpecError:
    where = path or "the spec"
    hint = nearest(part, into)
    if path == "kernels":
        hint += f"; to add another family: --set 'kernels.{part}={{{_dotted([*below])}: …}}'"
    return SpecError(f"{where} has no {part!r}", where=source, hint=hint)


def _not_in_variants(family: dict[str, Any], place: Sequence[str | int], source: str) -> None:
    """Refuse a value that every variant of an axis replaces: it would have no effect."""
    name, axes = place[-1], family.get("variants")
    for axis, variants in axes.items() if isinstance(axes, dict) else ():
        named = [isinstance(v, dict) and name in v for v in variants.values()]
        if named and all(named):
            first = next(iter(variants))
            raise SpecError(
                f"the variants of {axis!r} set {name}, so that this would do nothing",
                where=source,
                hint=f"set it in one: kernels.{place[1]}.variants.{axis}.{first}.{name}=…",
            )


def _dotted(place: Sequence[str | int]) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")
