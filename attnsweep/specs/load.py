"""The sweep spec: `load_spec` reads its file, checks it and expands it.

`model` has the models of the file; `yaml_file` reads the YAML and places errors in it. Every
family, parameter and value that a spec names must exist.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from attnsweep.core.errors import KernelError, SpaceError, SpecError
from attnsweep.core.problem import Problem, Value
from attnsweep.family.called import CalledFamily
from attnsweep.family.family import Family, Param
from attnsweep.family.space import Selection, Values
from attnsweep.specs.model import (
    MAX_PROBLEMS,
    MODELS,
    RETIRED,
    CheckSpec,
    Device,
    KernelSpec,
    LimitsSpec,
    MeasureSpec,
    ParameterValues,
    SearchSpec,
    SpecFile,
    UnservedCalls,
)
from attnsweep.specs.require import Requirements, requirements
from attnsweep.specs.shipped import find, shipped_hint
from attnsweep.specs.yaml_file import NAME_PATTERN, Document, Flow, Loc, Mark, apply, dump, nearest


@dataclass(frozen=True, slots=True)
class ProblemEntry:
    """One problem and the families swept on it, in the spec's order.

    slower: share by which a check lets it become slower (default: the spec's). calls: how often a
    program calls it, which changes no sweep.
    """

    problem: Problem
    kernels: tuple[str, ...]
    slower: float | None = None
    calls: int | None = field(default=None, compare=False)
    mark: Mark | None = field(default=None, compare=False, repr=False)
    """Where the spec's file has it, if it does."""


@dataclass(frozen=True, slots=True)
class SweepSpec:
    """A sweep spec, checked and expanded. Two are equal if they ask for the same sweep."""

    name: str
    device: Device
    recording: Path | None
    """Absolute; set if and only if device is `replay`."""
    arch: str | None
    kernel_dir: Path | None
    """Absolute; families besides the shipped ones."""
    problems: tuple[ProblemEntry, ...]
    kernels: dict[str, Selection]
    """Name of a space, which is mostly its family's, to the values that replace the family's."""
    baselines: tuple[str, ...]
    candidates: tuple[str, ...]
    """Callables that are judged and timed beside the families' candidates."""
    search: SearchSpec
    measure: MeasureSpec
    limits: LimitsSpec
    require: Requirements
    check: CheckSpec
    unserved: tuple[UnservedCalls, ...] = field(compare=False)
    document: Document = field(compare=False, repr=False)
    ignored: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """A sentence for each key of the file that attnsweep no longer has."""
    families: Mapping[str, Family] = field(default_factory=dict, compare=False, repr=False)
    """Every family that there is, by name; none if the spec was read without them."""

    def family_of(self, space: str) -> str:
        """Name of the family of one of the `kernels`."""
        return self.kernels[space].family or space

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the families of all spaces, each once."""
        return tuple(dict.fromkeys(map(self.family_of, self.kernels)))

    @property
    def imported(self) -> tuple[str, ...]:
        """Baselines and calls, whose packages are imported while candidates compile."""
        return (*self.baselines, *self.candidates, *self.calls)

    @property
    def calls(self) -> tuple[str, ...]:
        """The callables whose configs are swept."""
        calls = (self.families[name].call for name in self.used if name in self.families)
        return tuple(filter(None, calls))

    def resolved(self, relative_to: Path | None = None) -> str:
        """YAML of this spec with every default written out; `load_spec` reads it back equal.

        relative_to: the directory that the text will be written to; paths are then relative to it.
        """
        places = {"recording": self.recording, "kernel_dir": self.kernel_dir}
        base = None if relative_to is None else relative_to.resolve()
        usual = first_spaces(self.kernels)
        required = {name: [*comparisons] for name, comparisons in self.require.items()}
        data = {
            "name": self.name,
            "device": self.device,
            **({"arch": self.arch} if self.arch else {}),
            **{
                name: str(path) if base is None else os.path.relpath(path, base)
                for name, path in places.items()
                if path is not None
            },
            "problems": [
                Flow(
                    entry.problem.facts
                    | ({} if entry.kernels == usual else {"kernels": [*entry.kernels]})
                    | ({} if entry.slower is None else {"slower": entry.slower})
                    | ({} if entry.calls is None else {"calls": entry.calls})
                )
                for entry in self.problems
            ],
            "kernels": {name: _dumped(selection) for name, selection in self.kernels.items()},
            "baselines": [*self.baselines],
            **({"candidates": [*self.candidates]} if self.candidates else {}),
            **{
                section: Flow(getattr(self, section).model_dump())
                for section in ("search", "measure", "limits")
            },
            **({"require": Flow(required)} if required else {}),
            "check": Flow(self.check.model_dump()),
            **({"unserved": [Flow(dict(c)) for c in self.unserved]} if self.unserved else {}),
        }
        return dump(data)


def _tuples(parameters: ParameterValues) -> dict[str, tuple[Value, ...]]:
    return {name: tuple(values) for name, values in parameters.items()}


def _dumped(selection: Selection) -> dict[str, Any]:
    """The YAML data of a selection: on one line, but each variant on a line of its own."""

    def flow(values: Values) -> Flow:
        return Flow({name: [*of] for name, of in values.items()})

    of: dict[str, Any] = {"family": selection.family} if selection.family else {}
    of |= {"call": selection.call} if selection.call else {}
    of |= {"widen": True} if selection.widen else {}
    if not selection.variants:
        return Flow({**of, **flow(selection.values)})
    axes = {
        axis: {name: flow(values) for name, values in named.items()}
        for axis, named in selection.variants.items()
    }
    own = {name: [*values] for name, values in selection.values.items()}
    return {**of, **own, "variants": axes}


Families = Mapping[str, Family] | Callable[[Path | None], Mapping[str, Family]] | None
"""The families that a spec may name; `discover`, which finds them in the spec's `kernel_dir`; or
None: the spec is then read alone, nothing is imported, and it can be neither planned nor swept."""


def load_spec(path: Path, families: Families = None, settings: Sequence[str] = ()) -> SweepSpec:
    """Read a spec, or the shipped spec of that name if there is no such file.

    settings: `PATH=VALUE` each, which replace values of the file. Raises SpecError with
    `file:line:column: what` and a correction, for up to five errors at once; KernelError if the
    declaration of a family is broken.
    """
    document = Document.read(find(path), hint=shipped_hint())
    apply(document, settings)
    return spec_of(document, families)


def spec_of(document: Document, families: Families = None) -> SweepSpec:
    """The spec of a document, checked as `load_spec` says."""
    path = document.path
    dropped = [document.drop(*place) for place in RETIRED]

    def place(text: str | None) -> Path | None:
        return None if text is None else (path.parent / Path(text).expanduser()).resolve()

    try:
        file = SpecFile.model_validate(document.data)
    except ValidationError as error:
        document.report_all(error, MODELS)
        document.raise_issues()
        raise  # not reached: pydantic reports at least one error
    entries = _entries(file, document)
    if file.device == "replay" and file.recording is None:
        hint = "add recording: the run to replay, relative to this file"
        document.report("device replay needs a recording", hint, document.at("device"))
    if file.device != "replay" and file.recording is not None:
        hint = "add device: replay, or drop recording"
        document.report("recording is for device replay", hint, document.keys[("recording",)])
    if file.device == "replay" and requirements(file.require):
        hint = "drop require: a replay compiles nothing"
        document.report("require is for device cuda", hint, document.keys[("require",)])
    if file.name is None and not re.fullmatch(NAME_PATTERN, path.stem):
        what = f"the file's stem {path.stem!r} cannot name a run"
        document.report(what, "add name: of a-z, 0-9, _ and - only", document.at())
    spaces: dict[str, Selection] = {}
    for name, choice in file.kernels.items():
        try:
            spaces[name] = _selection(name, choice)
        except SpaceError as error:
            document.report(error.what, error.hint, document.keys["kernels", name, "variants"])
    own = place(file.kernel_dir)
    if callable(families) and own is not None and not own.is_dir():
        what = f"kernel_dir: no such directory: {own}"
        document.report(what, "name it relative to this file", document.at("kernel_dir"))
        families = None
    try:
        found = families(own) if callable(families) else families
    except KernelError:
        document.raise_issues()  # of the spec's own first
        raise
    if found is not None:
        found = {**found, **_called(spaces, found)}
        _check_spaces(document, spaces, found)
    document.raise_issues()
    judged = tuple(dict.fromkeys(file.candidates))
    return SweepSpec(
        name=file.name or path.stem,
        device=file.device,
        recording=place(file.recording),
        arch=file.arch,
        kernel_dir=own,
        problems=entries,
        kernels=spaces,
        baselines=tuple(name for name in dict.fromkeys(file.baselines) if name not in judged),
        candidates=judged,
        search=file.search,
        measure=file.measure,
        limits=file.limits,
        require=requirements(file.require),
        check=file.check,
        unserved=tuple(file.unserved),
        document=document,
        ignored=tuple(text for text in dropped if text is not None),
        families=found or {},
    )


def _selection(name: str, choice: KernelSpec) -> Selection:
    return Selection(
        _tuples(choice.__pydantic_extra__ or {}),
        {
            axis: {variant: _tuples(values) for variant, values in variants.items()}
            for axis, variants in choice.variants.items()
        },
        choice.family if choice.family != name else "",
        choice.call,
        choice.widen,
    )


def _entries(file: SpecFile, document: Document) -> tuple[ProblemEntry, ...]:
    """Each problem once. Several entries give it all kernels and calls, and the least `slower`."""
    chosen: dict[Problem, set[str]] = {}
    slower: dict[Problem, float] = {}
    calls: dict[Problem, int] = {}
    marks: dict[Problem, Mark | None] = {}
    for index, entry in enumerate(file.problems):
        for name in entry.kernels or ():
            if name not in file.kernels:
                loc = ("problems", index, "kernels")
                hint = nearest(name, file.kernels)
                what = f"kernel {name!r} is not among this spec's kernels"
                document.report(what, hint, document.find(name, *loc))
        for problem in entry.expand():
            names = entry.kernels or first_spaces(file.kernels)
            chosen.setdefault(problem, set()).update(names)
            marks.setdefault(problem, document.at("problems", index))
            named = [n for n in file.kernels if n in chosen[problem]]
            families = [file.kernels[name].family or name for name in named]
            twice = next((family for family in families if families.count(family) > 1), None)
            if twice:
                what = f"{problem.label} gets two spaces of {twice}"
                hint = "name one of them under its `kernels`"
                document.report(what, hint, document.at("problems", index))
            if entry.slower is not None:
                slower[problem] = min(entry.slower, slower.get(problem, entry.slower))
            if entry.calls is not None:
                calls[problem] = calls.get(problem, 0) + entry.calls
    if len(chosen) > MAX_PROBLEMS:
        what = f"{len(chosen)} problems; a spec may have {MAX_PROBLEMS}"
        document.report(what, None, document.at("problems"))
    return tuple(
        ProblemEntry(
            problem,
            tuple(name for name in file.kernels if name in names),
            slower.get(problem),
            calls.get(problem),
            marks[problem],
        )
        for problem, names in chosen.items()
    )


def first_spaces(kernels: Mapping[str, KernelSpec] | Mapping[str, Selection]) -> tuple[str, ...]:
    """The first space of each family, which problems get that name none."""
    first: dict[str, str] = {}
    for name, choice in kernels.items():
        first.setdefault(choice.family or name, name)
    return tuple(first.values())


def with_problems(spec: SweepSpec, problems: Sequence[Problem]) -> SweepSpec:
    """The spec with these problems in place of its own.

    A problem that the spec has keeps its families and its `slower`; another one gets every family.
    Raises SpecError if a setting changed the spec's own problems, which would do nothing.
    """
    for place, mark in spec.document.keys.items():
        if place[0] == "problems" and isinstance(mark, str):
            raise SpecError(
                "--problem replaces the spec's problems, so that this would do nothing",
                where=mark,
                hint="drop one of the two",
            )
    own = {entry.problem: entry for entry in spec.problems}
    every = first_spaces(spec.kernels)
    entries = tuple(own.get(problem) or ProblemEntry(problem, every) for problem in problems)
    return replace(spec, problems=entries)


def with_families(spec: SweepSpec, families: Mapping[str, Family]) -> SweepSpec:
    """The spec with these families, and the callables that it has in place of some."""
    return replace(spec, families={**families, **_called(spec.kernels, families)})


def _called(spaces: Mapping[str, Selection], families: Mapping[str, Family]) -> dict[str, Family]:
    """The families that are callables of the user's, by the names of their spaces.

    families: rules of such a one among them are kept.
    """
    found: dict[str, Family] = {}
    for name, selection in spaces.items():
        if selection.call:
            values: dict[str, tuple[Value, ...]] = {}
            for _, own in selection.groups():
                for param, chosen in own.items():
                    values[param] = tuple(dict.fromkeys((*values.get(param, ()), *chosen)))
            params = tuple(Param(param, chosen, "") for param, chosen in values.items())
            made = found[name] = CalledFamily(
                name, selection.call, params, call=selection.call, widen=selection.widen
            )
            known = families.get(name)
            if known is not None and known.call == made.call:
                made.rules |= known.rules
    return found


def _check_spaces(
    document: Document, spaces: Mapping[str, Selection], families: Mapping[str, Family]
) -> None:
    """Report each family, parameter and value that does not exist."""
    for name, selection in spaces.items():
        loc: Loc = ("kernels", name)
        if selection.call and selection.family:
            what = f"{name} has a call and a family"
            document.report(what, "drop one of the two", document.keys[(*loc, "family")])
        if selection.widen and (selection.names or not selection.call):
            what = f"{name} is to be widened, which is of a call's own configs"
            document.report(what, "drop widen, or all but call", document.keys[(*loc, "widen")])
        family = selection.family or name
        if family not in families:
            named = (*loc, "family") if selection.family else loc
            what, hint = f"unknown kernel {family!r}", nearest(family, families)
            document.report(what, hint, document.keys[named])
            continue
        own = families[family]
        declared = {param.name: param for param in (*own.params, *own.modes)}
        _check_values(document, family, loc, selection.values, declared)
        axis_of: dict[str, str] = {}
        for axis, variants in selection.variants.items():
            for variant, values in variants.items():
                at = (*loc, "variants", axis, variant)
                _check_values(document, family, at, values, declared)
                for parameter in values:
                    other = axis_of.setdefault(parameter, axis)
                    if other != axis:
                        what = f"{parameter} is in the variants of {other!r} and of {axis!r}"
                        hint = "a parameter belongs to one axis"
                        document.report(what, hint, document.keys[(*at, parameter)])
            if not variants:
                at = (*loc, "variants", axis)
                document.report(f"axis {axis!r} has no variant", None, document.keys[at])


def _check_values(
    document: Document, family: str, loc: Loc, values: Values, declared: Mapping[str, Param]
) -> None:
    for name, chosen in values.items():
        if name not in declared:
            what, hint = f"{family} has no parameter {name!r}", nearest(name, declared)
            document.report(what, hint, document.keys[(*loc, name)])
            continue
        for value in chosen:
            if (refused := refusal(declared[name], value)) is not None:
                document.report(
                    f"{family}: {refused[0]}", refused[1], document.find(value, *loc, name)
                )


def refusal(param: Param, value: Value) -> tuple[str, str] | None:
    """Why `value` cannot be a value of `param`, and a hint; None if it can."""
    alike = [declared for declared in param.values if type(declared) is type(value)]
    hint = f"its own values: {', '.join(map(_yaml_text, param.values))}"
    if not alike:
        return f"{param.name} cannot be {_yaml_text(value)}", hint
    if isinstance(value, str) and value not in alike:
        # A text selects a branch of the template, so an unknown one is always a mistake.
        return f"{param.name} cannot be {value!r}", nearest(value, map(str, alike))
    wrong = param.why_not(value) if type(value) is int else None
    return (wrong, hint) if wrong else None


def _yaml_text(value: Value) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


SCHEMA_ID = "urn:attnsweep:spec.schema.json"
"""A name, not an address: the text is in the package, and `attnsweep schema` prints it."""


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a spec, for editors."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        **SpecFile.model_json_schema(),
    }
    return {**_untitled(schema), "title": "attnsweep sweep spec"}


def schema_text() -> str:
    """The text of docs/spec.schema.json."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _untitled(schema: Any) -> Any:
    """The schema without pydantic's titles of fields, and each description on one line."""
    if isinstance(schema, dict):
        return {key: _untitled(value) for key, value in schema.items() if key != "title"}
    if isinstance(schema, str):
        return " ".join(schema.split())
    return [_untitled(item) for item in schema] if isinstance(schema, list) else schema
