"""Shapes as a command line and a CSV file write them: `4,32,4096,128`, `B=4 H=32 S=4096 D=128`.

The grammar, in words apart from each other:

    4,32,4096,128          batch, heads, seqlen, head_dim; heads/heads_kv, seqlen_q x seqlen_k,
    2,32/8,512x2048,192/128            head_dim/head_dim_v:
    B=4 H=32 Hkv=8 S=4096 D=128        in any order; Sq and Sk instead of S; Dv
    bf16, causal, window(512,0)        after a shape: of that shape alone; also causal_top_left,
                                       window_top_left(512,0), boolean(blocks,30) and
                                       padded(right,40), paged(16,e4m3), value_in_key, backward
    S=1024:65536:*2        each length from the first to the last, times 2; 1024:4096:512 in steps
    shapes.csv                         a row for each shape
"""

from __future__ import annotations

import csv
import difflib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from attnsweep.core.errors import ProblemError
from attnsweep.core.layouts import of_label
from attnsweep.core.masks import Mask, mask_of_label
from attnsweep.core.ops import OPS
from attnsweep.core.problem import CAUSAL, DTYPE_BYTES, FULL, Problem
from attnsweep.core.scores import Scores
from attnsweep.specs.model import MAX_PROBLEMS
from attnsweep.specs.yaml_file import MAX_ERRORS, closest, nearest

_LARGEST = 2**31 - 1
_KEYS = {
    "B": "batch",
    "H": "heads",
    "Hkv": "heads_kv",
    "S": "seqlen",
    "Sq": "seqlen_q",
    "Sk": "seqlen_k",
    "D": "head_dim",
    "Dv": "head_dim_v",
}
"""The short name of each size; dtype and causal have none."""
_FIELDS = {name.lower(): of for name, of in _KEYS.items()} | {of: of for of in _KEYS.values()}
_FIELDS |= {"dtype": "dtype", "causal": "mask", "mask": "mask", "padding": "padding", "op": "op"}
_MASKS = {"causal": CAUSAL, "full": FULL, "true": CAUSAL, "false": FULL, "1": CAUSAL, "0": FULL}
_MASKS |= {"causal_top_left": replace(CAUSAL, top_left=True)}
# What has brackets of its own, and the field that it is of.
_CALLS = {"window": "mask", "window_top_left": "mask", "boolean": "mask", "padded": "padding"}
_CALLS |= {
    "packed": "padding",
    "paged": "padding",
    "scale": "scale",
    "softcap": "softcap",
    "bias": "bias",
}
_CALL = re.compile(rf",?\s*({'|'.join(_CALLS)})\(([^()]*)\)", re.IGNORECASE)
# Words of a shape that say which field they are of.
_WORDS = dict.fromkeys(("causal", "causal_top_left", "full"), "mask")
_WORDS |= {name: name for name in ("sinks", "value_in_key")}
_WORDS |= dict.fromkeys(OPS, "op") | dict.fromkeys(DTYPE_BYTES, "dtype")
_OF_SCORES = ("scale", "softcap", "sinks", "bias")
_OF_SHAPE = ("dtype", "mask", "padding", *_OF_SCORES, "value_in_key", "op")
_MASK_WORDS = (
    *("causal", "full", "window(LEFT,RIGHT)", "boolean(PATTERN,NUMBER)", "padded(SIDE,PERCENT)"),
    *("packed(SEQUENCES,PERCENT)", "paged(PAGE_SIZE)"),
    *("scale(NUMBER)", "softcap(NUMBER)", "sinks", "bias(item,head)", "value_in_key", "backward"),
)
_EXAMPLES = "4,32,4096,128 or B=4 H=32 Hkv=8 S=4096 D=128"


def read_shapes(
    arguments: Sequence[str],
    *,
    dtype: str = "fp16",
    causal: bool = False,
    padding: str | None = None,
    option: str = "",
) -> list[Problem]:
    """The distinct problems that these arguments name, in the order given.

    dtype, causal, padding: of each shape that does not say its own. option: its name, for errors;
    the arguments of a command have none. Raises ProblemError, which says where, what and what fits;
    of a CSV file for up to five rows at once.
    """
    found: list[Problem] = []
    words: list[str] = []

    def written() -> Iterator[Problem]:
        try:
            for shape in _shapes(_words(" ".join(words))):
                for each in shape.expanded(repr(shape.text)):
                    yield each.problem(dtype, causal, padding, repr(shape.text))
        except ProblemError as error:
            where = f"{option} {error.where or ''}".strip() or None
            raise ProblemError(error.what, where=where, hint=error.hint) from error
        words.clear()

    for argument in arguments:
        if argument.lower().endswith((".csv", ".tsv")):
            found += written()
            found += read_csv(Path(argument), dtype=dtype, causal=causal, padding=padding)
        else:
            words.append(argument)
    found += written()
    if not found:
        raise ProblemError("no shape", hint=f"write {_EXAMPLES}")
    distinct = list(dict.fromkeys(found))
    if len(distinct) > MAX_PROBLEMS:
        raise ProblemError(f"{len(distinct)} shapes; a sweep may have {MAX_PROBLEMS}")
    return distinct


def read_dtype(text: str, where: str) -> str:
    """The name of a dtype in any case. where: its option. Raises ProblemError."""
    with _placed(where):
        return _dtype(text)


def read_csv(
    path: Path, *, dtype: str = "fp16", causal: bool = False, padding: str | None = None
) -> list[Problem]:
    """The problems of a CSV file: a row each, below a row of names or without one.

    The names are those of a spec's fields, or B, H, Hkv, S, Sq, Sk, D, Dv. Without names the
    columns are batch, heads, seqlen, head_dim, and then dtype and mask. `#` begins a comment.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProblemError("not UTF-8", where=str(path), hint="save it as UTF-8") from error
    except OSError as error:
        raise ProblemError(f"cannot be read: {error.strerror}", where=str(path)) from error
    rows = _rows(text, path)
    if not rows:
        raise ProblemError(
            "holds no shape", where=str(path), hint="write a row for each: 4,32,4096,128"
        )
    (first, names), found, wrong = rows[0], [], []
    named = not any(name.strip()[:1].isdigit() for name in names)
    columns = _columns(names, f"{path}:{first}") if named else []
    for line, cells in rows[named:]:
        where = f"{path}:{line}"
        try:
            with _placed(where):
                shape = _of_row(columns, cells) if named else _of_cells(cells)
            found += [each.problem(dtype, causal, padding, where) for each in shape.expanded(where)]
        except ProblemError as error:
            wrong.append(error)
    if wrong:
        shown = [error.render() for error in wrong[:MAX_ERRORS]]
        if len(wrong) > MAX_ERRORS:
            shown.append(f"{path}: and {len(wrong) - MAX_ERRORS} more rows like these")
        raise wrong[0] if len(wrong) == 1 else ProblemError("\n".join(shown))
    if not found:
        raise ProblemError("has names of columns and no row below them", where=str(path))
    return found


@contextmanager
def _placed(where: str) -> Iterator[None]:
    """Say of an error inside where the shape that cannot be read stands."""
    try:
        yield
    except ProblemError as error:
        raise ProblemError(error.what, where=where, hint=error.hint) from error


@dataclass
class _Shape:
    """One shape as far as it is read: texts by field."""

    words: list[str] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def expanded(self, where: str) -> list[_Shape]:
        """The shape with each value of its ranges. Raises ProblemError."""
        sizes = {of: text for of, text in self.fields.items() if of in _KEYS.values()}
        with _placed(where):
            ranges = {of: _range(of, text) for of, text in sizes.items() if ":" in text}
        if (count := math.prod(map(len, ranges.values()))) > MAX_PROBLEMS:
            raise ProblemError(f"{count} shapes; a sweep may have {MAX_PROBLEMS}", where=where)
        return [
            _Shape(self.words, self.fields | dict(zip(ranges, values, strict=True)))
            for values in itertools.product(*ranges.values())
        ]

    def problem(self, dtype: str, causal: bool, padding: str | None, where: str) -> Problem:
        """Its Problem. Raises ProblemError."""
        with _placed(where):
            sizes = _sizes({of: text for of, text in self.fields.items() if of in _KEYS.values()})
            own = _dtype(self.fields.get("dtype", dtype))
            mask = _mask(self.fields["mask"]) if "mask" in self.fields else None
            facts = (mask or (CAUSAL if causal else FULL)).facts
            if (said := self.fields.get("padding", padding)) is not None:
                facts |= of_label(_bracketed(said)).facts
            words = [_bracketed(self.fields[name]) for name in _OF_SCORES if name in self.fields]
            facts |= Scores.parse(" ".join(words)).facts
            facts |= {"op": self.fields["op"].lower()} if "op" in self.fields else {}
            facts |= {"value_in_key": True} if "value_in_key" in self.fields else {}
            return Problem.of({**sizes, "dtype": own} | facts)


def _words(text: str) -> list[str]:
    """The words of a text; one space or none around a comma or an equals sign is the same.

    A window is one word, with colons for the comma and brackets that shapes are written with.
    """

    def one_word(found: re.Match[str]) -> str:
        return f" {':'.join([found[1], *map(str.strip, found[2].split(','))])}"

    text = _CALL.sub(one_word, text)
    return re.sub(r"\s*([,=/])\s*", r"\1", text).replace("(", " ").replace(")", " ").split()


def _shapes(words: Iterable[str]) -> list[_Shape]:
    """Words as shapes: a list of numbers begins one, and so does a field that is there already."""
    shapes: list[_Shape] = []
    words = list(words)
    for number, word in enumerate(words):
        bare = word.strip(",")
        if not bare:
            continue
        pieces = [bare]
        if "=" in bare:
            pieces = bare.split(",")
            given = [_named(piece) for piece in pieces]
        elif bare.lower() in _WORDS:
            given = [(_WORDS[bare.lower()], bare.lower())]
        elif (of := _CALLS.get(bare.lower().partition(":")[0])) is not None:
            given = [(of, bare.lower())]
        elif bare[:1].isdigit() or bare[:1] in "-+.":
            apart = list(itertools.takewhile(str.isdigit, words[number:]))
            if len(apart) >= 4:
                raise ProblemError(
                    f"{' '.join(apart)!r}: the numbers of a shape stand together",
                    hint=f"write commas and no spaces: {','.join(apart[:4])}",
                )
            with _placed(repr(bare)):
                shapes.append(_of_cells(bare.split(",")))
            shapes[-1].words.append(bare)
            continue
        else:
            close = closest(bare, [*DTYPE_BYTES, *_MASK_WORDS])
            guess = f"did you mean {close!r}? " if close else ""
            hint = f"{guess}write {_EXAMPLES}, or a file .csv"
            raise ProblemError(f"{bare!r} is no shape", hint=hint)
        for piece, (of, text) in zip(pieces, given, strict=True):
            if not shapes and of in _OF_SHAPE:
                raise ProblemError(
                    f"{piece!r} stands before its shape",
                    hint=f"write the shape first: 4,32,4096,128 {piece}",
                )
            if not shapes or of in shapes[-1].fields:
                if of in _OF_SHAPE:
                    raise ProblemError(
                        f"{piece!r} is the second {of} of one shape", where=repr(shapes[-1].text)
                    )
                shapes.append(_Shape())
            shapes[-1].fields[of] = text
            shapes[-1].words.append(piece)
    return shapes


def _bracketed(word: str) -> str:
    """`window:512:0` as it is written: `window(512,0)`."""
    name, colon, values = word.lower().partition(":")
    return f"{name}({values.replace(':', ',')})" if colon else name


def _of_cells(cells: Sequence[str]) -> _Shape:
    """The shape of four cells, with dtype and mask after them if they are there."""
    texts = [cell.strip() for cell in cells]
    while len(texts) > 4 and not texts[-1]:
        texts.pop()
    if not 4 <= len(texts) <= 6:
        hint = f"batch, heads, seqlen, head_dim: {_EXAMPLES}"
        if len(texts) == 1 and re.fullmatch(r"\d+(x\d+){3}", texts[0]):
            hint = f"write commas: {texts[0].replace('x', ',')}"
        raise ProblemError(f"a shape has four numbers, not {len(texts)}", hint=hint)
    batch, heads, seqlen, dims, *rest = texts
    query, _, kv = heads.partition("/")
    head_dim, _, of_v = dims.partition("/")
    rows, _, keys = seqlen.lower().partition("x")
    fields = {"batch": batch, "heads": query, "head_dim": head_dim}
    fields |= {"heads_kv": kv} if "/" in heads else {}
    fields |= {"head_dim_v": of_v} if "/" in dims else {}
    # An `x` with nothing on one side of it is a word, not two lengths.
    fields |= {"seqlen_q": rows, "seqlen_k": keys} if rows and keys else {"seqlen": seqlen}
    for text in rest:
        if text.lower() not in (*DTYPE_BYTES, *_MASKS):
            what = f"{text!r} is neither a dtype nor a mask"
            raise ProblemError(what, hint=nearest(text, [*DTYPE_BYTES, *_MASK_WORDS]))
        of = "dtype" if text.lower() in DTYPE_BYTES else "mask"
        if of in fields:
            raise ProblemError(f"{text!r} is the second {of} of one shape")
        fields[of] = text
    return _Shape([], fields)


def _named(piece: str) -> tuple[str, str]:
    """`B=4` as the field and its text."""
    name, equals, text = piece.partition("=")
    if not equals:
        raise ProblemError(
            f"{piece!r} is no NAME=NUMBER",
            hint=f"for several shapes repeat the names: {' '.join(f'{n}=…' for n in _KEYS)}",
        )
    if name.lower() not in _FIELDS:
        raise ProblemError(f"{name!r} is no part of a shape", where=piece, hint=_nearest(name))
    return _FIELDS[name.lower()], text


def _nearest(name: str) -> str:
    known = [*_FIELDS]
    close = difflib.get_close_matches(name.lower(), known, n=1)
    shown = next((short for short in _KEYS if close and short.lower() == close[0]), None)
    parts = ", ".join(f"{short} ({of})" for short, of in _KEYS.items())
    guess = f"did you mean {shown or close[0]!r}? " if close else ""
    return f"{guess}there are: {parts}, dtype, causal"


def _sizes(texts: Mapping[str, str]) -> dict[str, int]:
    """The sizes of a Problem from the fields that were given."""
    numbers = {of: _number(of, text) for of, text in texts.items()}
    seqlen = numbers.pop("seqlen", None)
    if seqlen is not None:
        if "seqlen_q" in numbers or "seqlen_k" in numbers:
            raise ProblemError("S sets both Sq and Sk", hint="give S alone, or Sq and Sk")
        numbers |= {"seqlen_q": seqlen, "seqlen_k": seqlen}
    needed = ("batch", "heads", "seqlen_q", "seqlen_k", "head_dim")
    missing = [of for of in needed if of not in numbers]
    if missing == ["seqlen_q", "seqlen_k"]:
        missing = ["seqlen"]
    elif {"seqlen_q", "seqlen_k"} <= {*missing}:
        missing = ["seqlen", *(of for of in missing if not of.startswith("seqlen"))]
    if missing:
        short = {of: name for name, of in _KEYS.items()}
        *first, last = [f"{short[of]} ({of})" for of in missing]
        lacks = f"{', '.join(first)} and {last}" if first else last
        verb = "is" if len(missing) == 1 else "are"
        raise ProblemError(f"{lacks} {verb} missing", hint=f"as {_EXAMPLES}")
    numbers.setdefault("heads_kv", numbers["heads"])
    return numbers


def _range(of: str, text: str) -> list[str]:
    """The sizes of `1024:65536:*2` or `1024:4096:512`, the last one too if they reach it."""
    match = re.fullmatch(r"([^:]+):([^:]+):(\*?)([^:*]+)", text)
    if match is None:
        hint = "write FIRST:LAST:STEP or FIRST:LAST:*FACTOR, as 1024:65536:*2"
        raise ProblemError(f"{text!r} is no range of {of}", hint=hint)
    first, last, step = (_number(of, match[part]) for part in (1, 2, 4))
    if first > last or (match[3] and step < 2):
        why = "its first is larger than its last" if first > last else "a factor is 2 or more"
        raise ProblemError(f"{text!r} is no range of {of}: {why}")
    if not match[3]:
        values = range(first, last + 1, step)
        if len(values) > MAX_PROBLEMS:
            what = f"{text!r} has {len(values)} values; a sweep may have {MAX_PROBLEMS}"
            raise ProblemError(what)
        return list(map(str, values))
    sizes = itertools.takewhile(lambda size: size <= last, (first * step**n for n in range(32)))
    return list(map(str, sizes))


def _number(of: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        meant = re.fullmatch(r"(\d{1,6})[kK]", text)
        grouped = text.replace("_", "").replace("'", "")
        hint = f"write {int(meant[1]) * 1024}" if meant else None
        hint = f"write {grouped}" if grouped.isdigit() and grouped.isascii() else hint
        raise ProblemError(f"{of} must be a whole number, not {text!r}", hint=hint)
    if len(text) > 10 or not 1 <= int(text) <= _LARGEST:
        raise ProblemError(f"{of} must be 1 to {_LARGEST}, not {text[:20]}")
    return int(text)


def _dtype(text: str) -> str:
    if text.lower() not in DTYPE_BYTES:
        raise ProblemError(f"unknown dtype {text!r}", hint=nearest(text, DTYPE_BYTES))
    return text.lower()


def _mask(text: str) -> Mask:
    if text.lower() in _MASKS:
        return _MASKS[text.lower()]
    said = _bracketed(text)
    try:
        return mask_of_label(said)
    except ProblemError as error:
        hint = "write causal, full, window(512,0) or boolean(blocks,30)"
        raise ProblemError(f"mask cannot be {said!r}", hint=hint) from error


# -- CSV ------------------------------------------------------------------------------------


def _rows(text: str, path: Path) -> list[tuple[int, list[str]]]:
    """Line and cells of each row that is neither blank nor a comment."""
    lines = text.splitlines()
    first = next((line for line in lines if line.strip() and line.lstrip()[0] != "#"), "")
    delimiter = max(",;\t", key=first.count)
    rows = []
    for number, line in enumerate(lines, 1):
        bare = line.partition("#")[0].strip()
        if bare.strip(delimiter):
            try:
                cells = next(csv.reader([bare], delimiter=delimiter, skipinitialspace=True))
            except csv.Error as error:
                raise ProblemError(f"not CSV: {error}", where=f"{path}:{number}") from error
            rows.append((number, cells))
    return rows


def _columns(names: Sequence[str], where: str) -> list[str]:
    columns: list[str] = []
    for name in names:
        of = _FIELDS.get(name.strip().lower())
        if of is None:
            raise ProblemError(f"unknown column {name!r}", where=where, hint=_nearest(name.strip()))
        if of in columns:
            raise ProblemError(f"column {of} is there twice", where=where, hint="drop one")
        columns.append(of)
    return columns


def _of_row(columns: Sequence[str], cells: Sequence[str]) -> _Shape:
    if len(cells) > len(columns):
        raise ProblemError(f"{len(cells)} cells below {len(columns)} names of columns")
    texts = dict(zip(columns, (cell.strip() for cell in cells), strict=False))
    return _Shape([], {of: text for of, text in texts.items() if text})
