"""What a function's schema allows an argument to be, and the JSON of an argument's text.

Rules
- A value that can only be a string is one; another is JSON if it is, of a type that the schema allows, and else a
  string. Where the schema has no type, what reads as JSON is JSON, but never a string in quotes.
- Where the schema excludes strings, values may also be as Python prints them: templates show earlier calls so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from poolgrid.plugins.parsers.values import PYTHON_NAMES, json_of, strict_json

REFERENCES_MAX = 8
"""References of a schema that are followed for one argument."""

_INTEGER = re.compile(r"-?[0-9]+")
STRING = frozenset({"string"})


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of an object's members, by key."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def definitions_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a schema that holds what its references lead to."""
    return {group: schema[group] for group in ("$defs", "definitions") if group in schema}


def member_schema(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the schema of a member of an object, or of the items of a list, with the definitions it refers to."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else schema.get("items")
    for _ in range(REFERENCES_MAX):
        if not isinstance(found, Mapping) or not isinstance(found.get("$ref"), str):
            break
        found = _referred(found["$ref"], schema)
    definitions = definitions_of(schema)
    return {**definitions, **found} if isinstance(found, Mapping) else definitions


def types_of(schema: Mapping[str, Any] | None, key: str) -> frozenset[str] | None:
    """Return the JSON types that a function's schema allows for an argument; ``None`` = it does not say."""
    root = schema or {}
    return own_types(properties_of(root).get(key), root)


def own_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the JSON types that a schema allows, which may refer to ``root``; ``None`` = it does not say."""
    return _types(schema, root, REFERENCES_MAX)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or not depth:
        return None
    found = _own_types(schema, root, depth)
    return found | {"null"} if found is not None and schema.get("nullable") is True else found


def _own_types(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _types(_referred(reference, root), root, depth - 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return frozenset(_type_of(json.dumps(value)) for value in values)
    for group in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(group)
        if isinstance(parts, list):
            kinds = [_types(part, root, depth - 1) for part in parts]
            known = [each for each in kinds if each is not None]
            return frozenset().union(*known) if known and len(known) == len(kinds) else None
    return None


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    target: Any = root if reference.startswith("#/") else None
    for step in reference[2:].split("/"):
        target = target.get(step) if isinstance(target, Mapping) else None
    return target


def _type_of(text: str) -> str:
    """Return the type of a JSON value's text."""
    types = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    return types.get(text[0]) or ("integer" if _INTEGER.fullmatch(text) else "number")


def as_json(text: str, types: frozenset[str] | None) -> str:
    """Return the JSON of an argument's text, given the types that it may have."""
    if types != STRING:
        stripped = text.strip()
        never_text = types is not None and "string" not in types
        written = PYTHON_NAMES.get(stripped.capitalize() if never_text else stripped, stripped)
        value = strict_json(written, python=never_text)
        found = None if value is None else _fitting(value, types)
        if found is not None:
            return found
    return json_of(text)


def _fitting(written: str, types: frozenset[str] | None) -> str | None:
    """Return a JSON value of a type that is allowed, from one that was written; ``None`` = it is text."""
    kind = _type_of(written)
    # Text that may be a string is not taken out of its quotes.
    if kind == "string":
        inner = None if types is None or "string" in types else json.loads(written).strip()
        return None if not inner or inner[0] in "'\"" else _if_no_text(as_json(inner, types))
    if types is None or kind in types or (kind == "integer" and "number" in types):
        return written
    if kind == "number" and "integer" in types:
        number = float(written)
        return str(int(number)) if number.is_integer() and abs(number) <= _EXACT_MAX else None
    return written if kind == "null" and "string" not in types else None


def _if_no_text(value: str) -> str | None:
    return None if value.startswith('"') else value


_EXACT_MAX = 2**53
"""Integers up to this are exact as a floating-point number."""


class Fitting:
    """What becomes of the arguments of one call, written in JSON, so that they have types that its schema allows.

    Text where the schema allows none becomes what it stands for. Nothing is changed where all types are right.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema

    def holds(self, key: str) -> bool:
        """Return whether a string cannot be this argument's value, so that it stands for something else."""
        types = types_of(self._schema, key)
        return types is not None and "string" not in types

    def converted(self, key: str, written: str) -> str | None:
        """Return another value for a string, number or name; ``None`` = it stays."""
        types = types_of(self._schema, key)
        if types is None or _type_of(written) in types:
            return None
        if written.startswith('"'):
            return None if "string" in types else _if_no_text(as_json(json.loads(written), types))
        return _fitting(written, types) if _type_of(written) == "number" else None
