"""A spec against the families: every family, parameter and value that it names must exist."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attnsweep.family.chunks import MODES
from attnsweep.family.declare import Kernel, Param, discover
from attnsweep.family.space import Values
from attnsweep.spec.yaml_file import Document, Loc, nearest
from attnsweep.trial import Value

if TYPE_CHECKING:
    from attnsweep.spec.load import SweepSpec


def families_of(spec: SweepSpec, directory: Path | None = None) -> dict[str, Kernel]:
    """The shipped families, and those in `directory`, or else in the spec's `kernel_dir`.

    This imports their declarations, which are code. Raises KernelError if one is broken, SpecError
    if the spec names a directory that is not there.
    """
    if directory is None and spec.kernel_dir is not None and not spec.kernel_dir.is_dir():
        what, hint = f"no such directory: {spec.kernel_dir}", "name it relative to this file"
        spec.document.report(f"kernel_dir: {what}", hint, spec.document.at("kernel_dir"))
        spec.document.raise_issues()
    return discover(directory or spec.kernel_dir)


def check_against(spec: SweepSpec, kernels: Mapping[str, Kernel]) -> None:
    """Raise SpecError if the spec names a family, parameter or value that does not exist."""
    document = spec.document
    for name, selection in spec.kernels.items():
        loc: Loc = ("kernels", name)
        family = spec.family_of(name)
        if family not in kernels:
            hint = nearest(family, kernels)
            named = (*loc, "family") if selection.family else loc
            document.report(f"unknown kernel {family!r}", hint, document.keys[named])
            continue
        declared = {param.name: param for param in (*kernels[family].params, *MODES)}
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
    document.raise_issues()


def _check_values(
    document: Document, family: str, loc: Loc, values: Values, declared: Mapping[str, Param]
) -> None:
    for name, chosen in values.items():
        if name not in declared:
            what, hint = f"{family} has no parameter {name!r}", nearest(name, declared)
            document.report(what, hint, document.keys[(*loc, name)])
            continue
        for value in chosen:
            refusal = _refusal(declared[name], value)
            if refusal is not None:
                document.report(
                    f"{family}: {refusal[0]}", refusal[1], document.find(value, *loc, name)
                )


def _refusal(param: Param, value: Value) -> tuple[str, str] | None:
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
    return str(value).lower() if isinstance(value, bool) else repr(value)
