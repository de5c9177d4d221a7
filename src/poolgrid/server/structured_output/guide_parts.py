"""What guides are put together of: parts of structural tags (``structural_tags``), and schemas within a schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Part = dict[str, Any]


def const(text: str) -> Part:
    """Return the part of a text that is given."""
    return {"type": "const_string", "value": text}


def schema_part(schema: Mapping[str, Any] | bool) -> Part:
    """Return the part of JSON that keeps to a schema."""
    return {"type": "json_schema", "json_schema": schema}


def one_of(parts: Sequence[Part]) -> Part:
    """Return the part that is one of several."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def any_of(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schema of what keeps to one of several, each with definitions of its own."""
    definitions = {f"s{number}": within(schema, f"#/$defs/s{number}") for number, schema in enumerate(schemas)}
    return {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in definitions], "$defs": definitions}


def within(schema: Any, place: str) -> Any:
    """Return a schema as it is written at ``place`` of another: its references to itself lead there."""
    if isinstance(schema, list):
        return [within(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        elif key in _NAMED and isinstance(value, Mapping):
            moved[key] = {name: within(inner, place) for name, inner in value.items()}
        else:
            moved[key] = value if key in _VALUES else within(value, place)
    return moved


_VALUES = frozenset(("const", "enum", "default", "examples", "example"))
"""Keywords below which there are values and no schemas."""


_NAMED = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
"""Keywords below which there are schemas by names, which may be called like keywords."""
