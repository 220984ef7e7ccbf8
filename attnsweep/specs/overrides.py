"""`--set PATH=VALUE`: values that replace those of a spec's file, as YAML writes them.

A path has the spec's keys with dots between them and numbers for places in a list:
`kernels.flash_fwd_wgmma.BLOCK_N=[64, 128]`, `problems[0].causal=true`, `measure.rounds=30`.
Quotes keep a dot or an equals sign: `kernels.naive.variants."a.b".x.THREADS=64`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnsweep.core.errors import SpecError
from attnsweep.specs.yaml_file import Document, Loc, nearest

_PART = re.compile(r"""\s*(?:"([^"]+)"|\[(\d{1,6})\]|([^."=\[\]]+))""")
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
    at = 0
    while True:
        match = _PART.match(setting, at)
        if match is None:
            raise _unreadable(source)
        quoted, index, plain = match.groups()
        text = quoted or (plain or "").strip()
        number = index or (text if plain and re.fullmatch("[0-9]{1,6}", text) else None)
        parts.append(int(number) if number else text)
        at = match.end()
        rest = setting[at:].lstrip()
        if rest.startswith("="):
            break
        if parts[-1] == "" or not rest.startswith((".", "[")):
            raise _unreadable(source)
        at = len(setting) - len(rest) + rest.startswith(".")
    if "" in parts:
        raise _unreadable(source)
    return tuple(parts), rest[1:].strip()


def _unreadable(source: str) -> SpecError:
    return SpecError(
        "is not PATH=VALUE",
        where=source,
        hint="write the spec's keys and a value: kernels.flash_fwd_wgmma.BLOCK_N=[64,128], "
        "problems[0].causal=true, measure.rounds=30",
    )


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
    """Refuse a value that every variant of an axis replaces, because it would do nothing."""
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
