"""Texts of specs, and the schema that editors have of them."""

from __future__ import annotations

from typing import Any

import jsonschema

from attnsweep.core.files import shipped
from attnsweep.family.family import Family, Launch, Param
from attnsweep.specs.load import json_schema

ROOT = shipped("configs").parent
PROBLEM = "{batch: 1, heads: 16, seqlen: 1024, head_dim: 64}"
SCHEMA = jsonschema.Draft202012Validator(json_schema())
MINIMAL = f"problems: [{PROBLEM}]\nkernels: {{naive: {{}}}}\n"


def with_problem(fields: str) -> str:
    """A spec of this problem."""
    return f"problems:\n  - {{{fields}}}\nkernels: {{naive: {{}}}}\n"


def toy(**params: Any) -> dict[str, Family]:
    """A family with these parameters."""
    kernel = Family("toy", summary="", params=tuple(Param(n, v, "") for n, v in params.items()))
    kernel.stage("fwd")(lambda *_: Launch("toy", (1, 1, 1), 32, ()))
    return {"toy": kernel}
