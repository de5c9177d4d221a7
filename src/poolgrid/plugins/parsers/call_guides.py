"""Tool calls in a model's own form as parts of a structural tag: what an engine is told when calls are one of several
things that it may write. A format's ``guides`` say how it writes them; those without one are not guided so.

Parts are those of ``poolgrid.server.structured_output.structural_tags``. XGrammar takes repetitions
(``tags_with_separator``) neither next to other parts nor before them, and no empty text. So several calls are written
out, and of arguments in tags that may be left out the later ones are left out first. Forms without a marker of their
own (``llama3_json``) are JSON that the answer could be as well, so theirs is a schema, which goes together with the
answer's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from poolgrid.plugins.parsers.argument_types import definitions_of, properties_of, types_of
from poolgrid.plugins.parsers.formats import Guide
from poolgrid.server.structured_output.guide_parts import Part, const, one_of, schema_part, within

CALLS_MAX = 4
"""Most calls of one answer that is guided so: each is written out in the guide once more, with all its schemas."""

WRITTEN_OUT_BYTES_MAX = 128 * 1024
"""Where that would be more, fewer calls are allowed, at last one: a guide goes to a worker with every request."""

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's parameters, by its name."""


def _sequence(*parts: Part) -> Part:
    return {"type": "sequence", "elements": list(parts)}


def _tag(begin: str, content: Part, end: str) -> Part:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _calls(calls: Sequence[Part], separator: str, several: bool) -> Part:
    """Return the part for one of some calls, or for as many as there may be."""
    one = made = one_of(calls)
    size = len(json.dumps(one))
    # The first has one copy, each further one two.
    further = min(CALLS_MAX - 1, (WRITTEN_OUT_BYTES_MAX // size - 1) // 2)
    for _ in range(further if several else 0):
        made = one_of([one, _sequence(one, const(separator), made)])
    return made


def _object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema of parameters that allows objects only, as far as it says nothing else itself."""
    return schema if schema.keys() & {"type", "$ref"} else {"type": "object", **schema}


def _arguments(schema: Mapping[str, Any]) -> Part:
    return schema_part(_object(schema))


def calls_part(guide: Guide, schemas: Schemas, several: bool) -> Part:
    """Return the part for calls of some functions, as a format writes them."""
    made = {"json": _json_call, "tagged": _tagged_call, "pythonic": _python_call}[guide.kind]
    calls = [made(guide, name, schema) for name, schema in schemas.items()]
    several = several and not guide.single and bool(guide.end or guide.kind == "pythonic")
    part = _calls(calls, guide.separator, several)
    return _sequence(const(guide.around[0]), part, const(guide.around[1])) if guide.around[0] else part


def _json_call(guide: Guide, name: str, schema: Mapping[str, Any]) -> Part:
    arguments = _arguments(schema)
    begin = guide.begin.replace("{json}", json.dumps(name, ensure_ascii=False)).replace("{}", name)
    if guide.number:
        arguments = _sequence(schema_part({"type": "integer", "minimum": 0}), const(guide.number), arguments)
    return _tag(begin, arguments, guide.end) if guide.end else _sequence(const(begin), arguments)


def _tagged_call(guide: Guide, name: str, schema: Mapping[str, Any]) -> Part:
    required: list[Part] = []
    optional: list[Part] = []
    for key, inner in properties_of(schema).items():
        value = _bare_value(schema, key, inner)
        is_text = "false" if value["type"] == "json_schema" else "true"
        begin = guide.value[0].replace("{}", key).replace("{text}", is_text)
        (required if key in schema.get("required", ()) else optional).append(_tag(begin, value, guide.value[1]))
    rest = end = const(guide.end)
    for argument in reversed(optional):
        rest = one_of([end, _sequence(argument, rest)])
    return _sequence(const(guide.begin.replace("{}", name)), *required, rest)


def _bare_value(schema: Mapping[str, Any], key: str, inner: Any) -> Part:
    """Return the part of a value without quotes: text as it is, everything else as JSON."""
    if types_of(schema, key) not in (frozenset({"string"}), frozenset({"string", "null"})):
        return schema_part(_with_definitions(schema, inner))
    choices = inner.get("enum") if isinstance(inner, Mapping) else None
    if choices and all(choices):
        return one_of([const(choice) for choice in choices])
    return {"type": "any_text"}


def _python_call(guide: Guide, name: str, schema: Mapping[str, Any]) -> Part:
    """``f(x=1)``; where a function requires nothing, all its arguments are given."""
    properties = properties_of(schema)
    keys = [key for key in properties if key in schema.get("required", ())] or list(properties)
    if not keys:
        return _tag(name, const("("), ")")
    parts: list[Part] = []
    for key in keys:
        if parts:
            parts.append(const(f", {key}="))
        parts.append(schema_part(_with_definitions(schema, properties[key])))
    return _tag(f"{name}({keys[0]}=", _sequence(*parts), ")")


def llama3_json(schemas: Schemas) -> list[dict[str, Any]]:
    """``{"name": …, "parameters": …}``: the schema of a call of each function."""
    return [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [name]},
                "parameters": within(_object(schema), "#/properties/parameters"),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, schema in schemas.items()
    ]


def _with_definitions(schema: Mapping[str, Any], inner: Any) -> Any:
    """Return the schema of one parameter with what it may refer to."""
    if not isinstance(inner, Mapping):
        return inner if isinstance(inner, bool) else {}
    return {**definitions_of(schema), **inner}
