"""The tools of a chat request: which functions there are, what ``tool_choice`` makes of them, and its JSON schema.

``required`` and a named function become guided decoding: the engine writes the arguments of that function, or a list
``[{"name": …, "parameters": …}, …]``, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from poolgrid.frontend.errors import RequestError, invalid, quoted, unsupported
from poolgrid.frontend.guides import Guide, json_guide
from poolgrid.frontend.parsers.call_forms import NAME_CHARS_MAX
from poolgrid.frontend.parsers.formats import ToolUse

TOOLS_MAX = 1024
"""Most tools of one request; OpenAI allows 128, agents with many servers come to hundreds."""

_CHOICES = "none, auto, required or an object that names a function"


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: bool | None
) -> tuple[ToolUse | None, Guide]:
    """Return what a request asks of tools (``None`` = nothing), and the guide it needs; raises ``RequestError``."""
    functions = _functions(tools or ())
    named = _named(choice)
    if named is None and choice not in (None, "none", "auto", "required"):
        raise invalid("tool_choice", f"tool_choice is {quoted(choice)}: allowed is {_CHOICES}")
    if not functions:
        if named is not None or choice == "required":
            raise invalid("tool_choice", f"tool_choice is {quoted(choice)}: it needs tools. The request was not run.")
        return None, {}
    if choice == "none":
        return None, {}
    names = frozenset(functions)
    several = parallel is not False
    if named is not None:
        if named not in functions:
            raise invalid(
                "tool_choice", f"tool_choice names {quoted(named)}: allowed are the functions of tools, {sorted(names)}"
            )
        return ToolUse(names, several, named=named, schemas=functions), json_guide(functions[named], "tools")
    if choice == "required":
        return ToolUse(names, several, required=True, schemas=functions), json_guide(
            _calls_schema(functions, several), "tools"
        )
    return ToolUse(names, several, schemas=functions), {}


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


def _wrong(param: str, value: Any, allowed: str) -> RequestError:
    return invalid(param, f"{param} is {quoted(value)}: allowed is {allowed}. The request was not run.", "invalid_type")
