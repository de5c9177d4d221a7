"""Tool calls in a model's own form as parts of a structural tag: what an engine is told when calls are one of several
things that it may write. For each form that ``tool_calls`` reads there is one here that it would read.

Parts are those of ``poolgrid.structured_output.structural_tags``. XGrammar takes repetitions (``tags_with_separator``)
neither next to other parts nor before them, and no empty text. So several calls are written out, and of arguments in
tags that may be left out the later ones are left out first. Forms without a marker of their own (``llama3_json``) are
JSON that the answer could be as well, so theirs is a schema, which goes together with the answer's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poolgrid.frontend.parsers.tagged_call import types_of

CALLS_MAX = 4
"""Most calls of one answer that is guided so: each is written out in the guide once more, with all its schemas."""

WRITTEN_OUT_BYTES_MAX = 128 * 1024
"""Where that would be more, fewer calls are allowed, at last one: a guide goes to a worker with every request."""

Part = dict[str, Any]
Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's parameters, by its name."""

CallsGuide = Callable[[Schemas, bool, str], Part]
"""Returns the part for calls of some functions: by their schemas, whether there may be several calls, and the source of
the chat template, which shows the variant of a form that the model writes."""


def const(text: str) -> Part:
    """Return the part of a text that is given."""
    return {"type": "const_string", "value": text}


def schema_part(schema: Mapping[str, Any] | bool) -> Part:
    """Return the part of JSON that keeps to a schema."""
    return {"type": "json_schema", "json_schema": schema}


def one_of(parts: Sequence[Part]) -> Part:
    """Return the part that is one of several."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


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


@dataclass(frozen=True, slots=True)
class _JsonCalls:
    """Calls with arguments in JSON. ``{}`` stands for the function's name, ``{json}`` for it in quotes."""

    begin: str
    end: str = ""
    """Empty = there is no end, and one call at most."""
    separator: str = "\n"
    around: tuple[str, str] = ("", "")
    number: str = ""
    """What follows the call's number, for forms that number calls."""

    def __call__(self, schemas: Schemas, several: bool, template: str) -> Part:
        calls = [self._call(name, _arguments(schema)) for name, schema in schemas.items()]
        made = _calls(calls, self.separator, several) if self.end else one_of(calls)
        return _sequence(const(self.around[0]), made, const(self.around[1])) if self.around[0] else made

    def _call(self, name: str, arguments: Part) -> Part:
        begin = self.begin.replace("{json}", json.dumps(name, ensure_ascii=False)).replace("{}", name)
        if self.number:
            arguments = _sequence(schema_part({"type": "integer", "minimum": 0}), const(self.number), arguments)
        return _tag(begin, arguments, self.end) if self.end else _sequence(const(begin), arguments)


_CALL = '{"name": {json}, "arguments": '
_MISTRAL = _JsonCalls(_CALL, "}", ", ", ("[TOOL_CALLS][", "]"))
_MISTRAL_NAMED = _JsonCalls("[TOOL_CALLS]{}[ARGS]")
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK = _JsonCalls("<｜tool▁call▁begin｜>{}<｜tool▁sep｜>", "<｜tool▁call▁end｜>", around=_DEEPSEEK_SECTION)
_DEEPSEEK_CODE = _JsonCalls(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n", "\n```<｜tool▁call▁end｜>", around=_DEEPSEEK_SECTION
)


def mistral(schemas: Schemas, several: bool, template: str) -> Part:
    """``[TOOL_CALLS]name[ARGS]{…}`` if the template has that, else a list."""
    return (_MISTRAL_NAMED if "[ARGS]" in template else _MISTRAL)(schemas, several, template)


def deepseek_v3(schemas: Schemas, several: bool, template: str) -> Part:
    """With a code block where the template has one."""
    return (_DEEPSEEK_CODE if "```json" in template else _DEEPSEEK)(schemas, several, template)


def qwen3_coder(schemas: Schemas, several: bool, template: str) -> Part:
    """``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``, a tag on each line."""
    return _tagged(
        schemas,
        several,
        call=("<tool_call>\n<function={}>\n", "</function>\n</tool_call>"),
        value=("<parameter={}>\n", "\n</parameter>\n"),
    )


def glm45(schemas: Schemas, several: bool, template: str) -> Part:
    """``<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>``, a tag on each line."""
    return _tagged(
        schemas,
        several,
        call=("<tool_call>{}\n", "</tool_call>"),
        value=("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n"),
    )


def _tagged(schemas: Schemas, several: bool, *, call: tuple[str, str], value: tuple[str, str]) -> Part:
    calls: list[Part] = []
    for name, schema in schemas.items():
        required: list[Part] = []
        optional: list[Part] = []
        for key, inner in _properties(schema).items():
            argument = _tag(value[0].replace("{}", key), _bare_value(schema, key, inner), value[1])
            (required if key in schema.get("required", ()) else optional).append(argument)
        rest = end = const(call[1])
        for argument in reversed(optional):
            rest = one_of([end, _sequence(argument, rest)])
        calls.append(_sequence(const(call[0].replace("{}", name)), *required, rest))
    return _calls(calls, "\n", several)


def _bare_value(schema: Mapping[str, Any], key: str, inner: Any) -> Part:
    """Return the part of a value without quotes: text as it is, everything else as JSON."""
    if types_of(schema, key) not in (frozenset({"string"}), frozenset({"string", "null"})):
        return schema_part(_with_definitions(schema, inner))
    choices = inner.get("enum") if isinstance(inner, Mapping) else None
    if choices and all(choices):
        return one_of([const(choice) for choice in choices])
    return {"type": "any_text"}


def pythonic(schemas: Schemas, several: bool, template: str) -> Part:
    """``[f(x=1), g()]``; where a function requires nothing, all its arguments are given."""
    tags: list[Part] = []
    for name, schema in schemas.items():
        properties = _properties(schema)
        keys = [key for key in properties if key in schema.get("required", ())] or list(properties)
        if not keys:
            tags.append(_tag(name, const("("), ")"))
            continue
        parts: list[Part] = []
        for key in keys:
            if parts:
                parts.append(const(f", {key}="))
            parts.append(schema_part(_with_definitions(schema, properties[key])))
        tags.append(_tag(f"{name}({keys[0]}=", _sequence(*parts), ")"))
    return _sequence(const("["), _calls(tags, ", ", several), const("]"))


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


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _with_definitions(schema: Mapping[str, Any], inner: Any) -> Any:
    """Return the schema of one parameter with what it may refer to."""
    if not isinstance(inner, Mapping):
        return inner if isinstance(inner, bool) else {}
    return {**{group: schema[group] for group in ("$defs", "definitions") if group in schema}, **inner}


_HARMONY = _JsonCalls("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", "<|call|>")

CALL_GUIDES: Mapping[str, CallsGuide] = {
    "hermes": _JsonCalls("<tool_call>\n" + _CALL, "}\n</tool_call>"),
    "mistral": mistral,
    "pythonic": pythonic,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": _JsonCalls(
        "<|tool_call_begin|>functions.{}:",
        "<|tool_call_end|>",
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        number="<|tool_call_argument_begin|>",
    ),
    "qwen3_coder": qwen3_coder,
    "glm45": glm45,
    "granite": _JsonCalls(_CALL, "}", ", ", ("<|tool_call|>[", "]")),
    # One message to ``functions.NAME``, after which the model's turn ends.
    "harmony": lambda schemas, _, template: _HARMONY(schemas, False, template),
}
"""Those of ``llama3_json`` are JSON and have no marker."""
