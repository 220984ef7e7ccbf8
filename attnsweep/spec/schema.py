"""The JSON Schema of a sweep spec, with which editors complete and check it."""

from __future__ import annotations

import json
from typing import Any

from attnsweep.spec.load import SpecFile

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
    """The schema without the titles that pydantic derives from field names."""
    if isinstance(schema, dict):
        return {key: _untitled(value) for key, value in schema.items() if key != "title"}
    return [_untitled(item) for item in schema] if isinstance(schema, list) else schema
