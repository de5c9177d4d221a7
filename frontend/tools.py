"""The tools of a chat request: which functions there are, what ``tool_choice`` makes of them, and its guide.

``required`` and a named function become guided decoding: the engine writes the arguments of that function, or a list
``[{"name": …, "parameters": …}, …]``, and nothing else. A guide of the client's own (``response_format``) says what an
answer is when the model does not call: with ``auto`` it becomes a guide to either, with the others it has no use.
``allowed_tools`` lets the model call some of the functions; its prompt shows all of them, so that caches find it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from poolgrid.frontend.errors import RequestError, invalid, quoted, unsupported
from poolgrid.frontend.guides import Guide, json_guide, tag_guide
from poolgrid.frontend.parsers.call_forms import NAME_CHARS_MAX
from poolgrid.frontend.parsers.call_guides import Part, any_of, const, llama3_json, one_of, schema_part
from poolgrid.frontend.parsers.formats import OutputFormat, ToolUse

TOOLS_MAX: Final = 1024
"""Most tools of one request; OpenAI allows 128, agents with many servers come to hundreds."""

_CHOICES: Final = "none, auto, required, an object that names a function, or one of the type allowed_tools"


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: bool | None
) -> tuple[ToolUse | None, Guide]:
    """Return what a request asks of tools (``None`` = nothing), and the guide it needs; raises ``RequestError``."""
    functions = _functions(tools or ())
    allowed = frozenset(functions)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed_tools(choice, functions)
    named = _named(choice)
    if named is None and choice not in (None, "none", "auto", "required"):
        raise invalid("tool_choice", f"tool_choice is {quoted(choice)}: allowed is {_CHOICES}")
    if not functions:
        if named is not None or choice == "required":
            raise invalid("tool_choice", f"tool_choice is {quoted(choice)}: it needs tools. The request was not run.")
        return None, {}
    if choice == "none":
        return None, {}
    several = parallel is not False
    if named is not None:
        if named not in functions:
            raise _unknown("tool_choice", named, functions)
        return ToolUse(allowed, several, named=named, schemas=functions), json_guide(functions[named], "tools")
    if choice == "required":
        use = ToolUse(allowed, several, required=True, schemas=functions)
        return use, json_guide(_calls_schema(use.allowed, several), "tools")
    return ToolUse(allowed, several, schemas=functions), {}


def beside_calls(own: Guide, param: str, use: ToolUse, output_format: OutputFormat, template: str) -> Guide:
    """Return the guide to an answer that keeps to ``own``, or calls functions in the model's own form.

    ``param`` is the field that ``own`` is from, ``template`` the source of the model's chat template. Where calls of
    the model are not read, they are text as all else, and ``own`` is all there is. Raises ``RequestError`` for a guide
    that does not go together with calls.
    """
    if not output_format.tools:
        return own
    calls = output_format.calls_guide(use, template)
    schema = own.get("guided_json")
    if calls is None:
        if schema is None:
            raise unsupported(
                param,
                f"this model writes calls as JSON, which beside tools goes together with a schema; {_ALTERNATIVES}",
            )
        return json_guide(any_of([json.loads(schema), *llama3_json(use.allowed)]), param)
    return tag_guide({"type": "structural_tag", "format": one_of([_part_of(own, param), calls])}, param)


_ALTERNATIVES: Final = "set tool_choice to none, or leave the guide out"


def _part_of(own: Guide, param: str) -> Part:
    """Return a client's guide as a part of a structural tag."""
    if "guided_json" in own:
        return schema_part(json.loads(own["guided_json"]))
    if "guided_choice" in own:
        return one_of([const(text) for text in own["guided_choice"]])
    if "structural_tag" in own:
        tag = json.loads(own["structural_tag"])
        if isinstance(tag, dict) and isinstance(tag.get("format"), dict):
            return dict(tag["format"])
    raise unsupported(
        param,
        "beside tools that the model may call, a guide is a JSON schema, a choice or a structural tag with a format; "
        f"{_ALTERNATIVES}",
    )


def _allowed_tools(choice: Mapping[str, Any], functions: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
    """Return the mode of ``allowed_tools`` and the names of the functions that may be called."""
    inner = choice.get("allowed_tools")
    if not isinstance(inner, dict):
        raise _wrong("tool_choice.allowed_tools", inner, "an object with a mode and tools")
    mode = inner.get("mode")
    if mode not in ("auto", "required"):
        raise _wrong("tool_choice.allowed_tools.mode", mode, "auto or required", code="invalid_value")
    tools = inner.get("tools")
    if not isinstance(tools, list) or not tools:
        raise _wrong("tool_choice.allowed_tools.tools", tools, "a list of at least one function of tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tool_choice.allowed_tools.tools[{index}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise _wrong(f"{where}.function.name", name, "the name of a function of tools")
        if name not in functions:
            raise _unknown(f"{where}.function.name", name, functions)
        names.add(name)
    return mode, frozenset(names)


def _unknown(param: str, name: str, functions: Mapping[str, Any]) -> RequestError:
    return invalid(param, f"{param} names {quoted(name)}: allowed are the functions of tools, {sorted(functions)}")


def _functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the parameter schema of each function by name."""
    if len(tools) > TOOLS_MAX:
        raise invalid("tools", f"tools has {len(tools)} entries: allowed are up to {TOOLS_MAX}")
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        kind = tool.get("type", "function")
        if kind != "function":
            raise unsupported(f"{where}.type", f"only functions can be called (got {quoted(kind)})")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise _wrong(f"{where}.function", function, "an object with a name")
        name = function.get("name")
        if not isinstance(name, str) or not 1 <= len(name) <= NAME_CHARS_MAX:
            raise _wrong(f"{where}.function.name", name, f"a string of 1 to {NAME_CHARS_MAX} characters")
        if name in functions:
            raise invalid(f"{where}.function.name", f"{where}.function.name is {quoted(name)}: allowed is it once")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise _wrong(f"{where}.function.parameters", parameters, "a JSON schema, an object")
        functions[name] = parameters or {"type": "object", "properties": {}}
    return functions


def _named(choice: Any) -> str | None:
    if not isinstance(choice, dict):
        return None
    if choice.get("type", "function") != "function":
        raise unsupported("tool_choice.type", f"allowed is {_CHOICES} (got {quoted(choice.get('type'))})")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _wrong("tool_choice.function.name", name, "the name of a function of tools")
    return name


def _calls_schema(functions: Mapping[str, Mapping[str, Any]], several: bool) -> dict[str, Any]:
    """Return the schema of a list of calls; definitions of the functions move to its top, where references look."""
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for name, parameters in functions.items():
        inner = dict(parameters)
        for group in ("$defs", "definitions"):
            for key, value in (inner.pop(group, None) or {}).items():
                if definitions.setdefault(group, {}).setdefault(key, value) != value:
                    raise unsupported(
                        "tool_choice", f"required needs one meaning of {group}.{key} in all functions, {name} differs"
                    )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [name]}, "parameters": inner},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items, **definitions}
    if not several:
        schema["maxItems"] = 1
    return schema


def _wrong(param: str, value: Any, allowed: str, code: str = "invalid_type") -> RequestError:
    return invalid(param, f"{param} is {quoted(value)}: allowed is {allowed}. The request was not run.", code)
