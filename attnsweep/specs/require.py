"""The requirements of a spec for compiled code: `require: {spill_bytes: 0, bar: "<= 4"}`.

A candidate that breaks a requirement is pruned, and its row names the value and the requirement.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from attnsweep.specs.yaml_file import Many, wrong

Requirements = Mapping[str, Sequence[str]]
"""Measure to its comparisons, each such as `<= 4`."""

# How the values of several stages become that of the pipeline, as in `Resources`.
LARGEST, SMALLEST = max, min
RESOURCES: dict[str, tuple[Callable[[Iterable[float]], float], str]] = {
    "registers": (LARGEST, "Registers per thread of the stage with most."),
    "spill_bytes": (sum, "Bytes of spill stores and loads per thread, all stages."),
    "smem_bytes": (LARGEST, "Shared memory per block, static and dynamic, of the stage with most."),
    "static_smem_bytes": (LARGEST, "Static shared memory per block of the stage with most."),
    "threads": (LARGEST, "Threads per block of the stage with most."),
    "blocks_per_sm": (SMALLEST, "Blocks resident on an SM of the stage with fewest."),
    "occupancy": (SMALLEST, "Resident warps over the SM's maximum, of the stage with fewest."),
    "cubin_bytes": (sum, "Size of the cubins of all stages."),
}
INSTRUCTIONS: dict[str, tuple[Callable[[Iterable[float]], float], str]] = {
    "instructions": (sum, "SASS instructions of all stages, each counted once."),
    "hgmma": (sum, "HGMMA, and QGMMA of FP8: warpgroup matrix instructions."),
    "hmma": (sum, "HMMA: warp matrix instructions."),
    "ffma": (sum, "FFMA: fp32 multiply-adds."),
    "mufu": (sum, "MUFU: exp2, reciprocals, roots."),
    "ex2_before_wait": (
        sum,
        "Exponentials between two waits for wgmma, with no product begun between: they run next to "
        "the product of the second wait.",
    ),
    "ldl": (sum, "LDL: loads from local memory, used by spills and indexed arrays."),
    "stl": (sum, "STL: stores to local memory."),
    "bar": (sum, "BAR: barriers of a block or of named warps."),
    "branches": (sum, "Branches, conditional or not."),
    "predicated_branches": (sum, "Branches that a predicate decides."),
}
MEASURES = RESOURCES | INSTRUCTIONS

_OPERATORS = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_COMPARISON = re.compile(rf"\s*(<=|>=|==|<|>)\s*({_NUMBER})\s*")


def _comparison(value: object) -> object:
    if type(value) in (int, float) and value >= 0:  # type: ignore[operator]
        return f"== {value}"
    match = _COMPARISON.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise wrong(
            "{name} must be a number or a comparison, not {value}",
            f"write a number, or one of {', '.join(_OPERATORS)} and a number: '<= 4'",
        )
    return f"{match[1]} {match[2]}"


Comparison = Annotated[
    str,
    BeforeValidator(
        _comparison,
        json_schema_input_type=Annotated[float, Field(ge=0)]
        | Annotated[str, Field(pattern=f"^{_COMPARISON.pattern}$")],
    ),
]
_fields: dict[str, Any] = {
    name: (Many[Comparison] | None, Field(default=None, description=description))
    for name, (_, description) in MEASURES.items()
}
RequireSpec: type[BaseModel] = create_model(
    "RequireSpec",
    __config__=ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False),
    __doc__="Requirements for compiled code: a number, a comparison like '<= 4', or several.",
    **_fields,
)


def requirements(spec: BaseModel) -> Requirements:
    """The requirements that a RequireSpec sets, and no others."""
    return {name: tuple(asked) for name, asked in spec.model_dump(exclude_none=True).items()}


def needs_sass(required: Requirements) -> bool:
    """Whether only the disassembled machine code can decide these requirements."""
    return any(name in INSTRUCTIONS for name in required)


def broken(required: Requirements, stages: Mapping[str, Mapping[str, float]]) -> str | None:
    """The first requirement that the stages break, with their values, or None.

    stages: stage name to its measures, which must include every required one.
    """
    for name, comparisons in required.items():
        each = {stage: measured[name] for stage, measured in stages.items()}
        value = MEASURES[name][0](each.values())
        for comparison in comparisons:
            sign, number = comparison.split()
            if not _OPERATORS[sign](value, float(number)):
                shares = ", ".join(f"{stage} {_text(part)}" for stage, part in each.items())
                where = f" ({shares})" if len(each) > 1 else ""
                return f"{name}: {_text(value)}{where}, the spec requires {comparison}"
    return None


def _text(value: float) -> str:
    return f"{value:g}" if value != int(value) else str(int(value))
