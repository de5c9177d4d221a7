"""The tools of a request: the functions that the model is shown, what ``tool_choice`` makes of them, and its guide.

Clients declare tools in the forms of chat (a ``function`` inside the tool) and of Responses (its fields in the tool
itself), single or by ``namespace``. A tool of another form that the client runs itself (``custom``, ``shell``,
``tool_search``) is shown as a function, and its calls are answered in the client's form. Tools that clients load when
they are found (``defer_loading``) are not shown among the others, which would change the beginning of every later
prompt: their definitions stand in the results of searches, and they can be called. Tools that a vendor's servers
run (``web_search``) cannot be called here: they are left out of the request, and reported by their type.

``required`` and a named function become guided decoding: the engine writes the arguments of that function, or a list
``[{"name": …, "parameters": …}, …]``, and nothing else. A guide of the client's own (``response_format``) says what an
answer is when the model does not call: with ``auto`` it becomes a guide to either, with the others it has no use.
``allowed_tools`` lets the model call some of the functions; its prompt shows all of them, so that caches find it again.

Ids of tool calls: the same in every process, different for each call of a request, as the model's template has them.

Clients send ids back with the results, and templates print them: Mistral's accept nine letters and digits only, Kimi's
model is trained on ``functions.NAME:N`` with N counted over the whole conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from poolgrid.kernel.wire.hashing import stable_u64
from poolgrid.server.frontend.client_tools import openai_function
from poolgrid.server.frontend.errors import RequestError, invalid, quoted, unsupported, wrong_type
from poolgrid.server.frontend.field_words import without_nulls
from poolgrid.server.frontend.guides import Guide, json_guide, tag_guide
from poolgrid.server.frontend.model_parsers import ModelParsers
from poolgrid.server.frontend.schema import CUSTOM_ARGUMENT
from poolgrid.server.frontend.tool_use import NAME_CHARS_MAX, ToolUse
from poolgrid.server.structured_output.guide_parts import Part, any_of, const, one_of, schema_part

MISTRAL_ID_CHARS = 9
"""Length of the call ids that Mistral's templates accept, letters and digits only."""

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class CallIds(msgspec.Struct, frozen=True):
    """The ids of one answer's calls."""

    request_id: str
    format: str = ""
    """Name of the format of tool calls (``ModelParsers.tools``)."""
    earlier_calls: int = 0
    """Calls in the conversation before this answer."""

    def of(self, choice: int, call: int, name: str) -> str:
        if self.format == "kimi_k2":
            return f"functions.{name}:{self.earlier_calls + call}"
        seed = f"{self.request_id}/{choice}/{call}"
        return _short(seed) if self.format == "mistral" else f"call_{stable_u64(seed):016x}"


def mistral_id(call_id: str) -> str:
    """Return a call's id as Mistral's templates accept it: as it is, or another one that is always the same."""
    fits = len(call_id) == MISTRAL_ID_CHARS and call_id.isascii() and call_id.isalnum()
    return call_id if fits else _short(call_id)


def _short(seed: str) -> str:
    number = stable_u64(seed)
    characters = []
    for _ in range(MISTRAL_ID_CHARS):
        number, digit = divmod(number, len(_DIGITS))
        characters.append(_DIGITS[digit])
    return "".join(characters)


HOSTED_TOOL: Final = re.compile(
    r"(web_search|web_fetch|code_interpreter|code_execution|image_generation|file_search|computer|shell|tool_search|mcp"
    r"|mcp_server|mcp_toolset)(_[a-z_]{1,20})?(_\d{8})?"
)
"""Types of tools that cannot run here, with the date of their version where they have one."""

DEFER: Final = "defer_loading"
"""Field of a tool that the model is not shown before a search has found it."""

TOOLS_MAX: Final = 1024
"""Most tools of one request; OpenAI allows 128, agents with many servers come to hundreds."""

_CHOICES: Final = "none, auto, required, an object that names a function, or one of the type allowed_tools"
_MODES: Final = {"none": "none", "auto": "auto", "required": "required", "any": "required"}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """The client's own name and form of a tool that the model knows as a function."""

    kind: str
    """The type of the tool: ``function``, ``custom``, ``tool_search`` or one of ``client_tools.openai_function``."""
    name: str
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request as the model gets them."""

    shown: list[dict[str, Any]] = field(default_factory=list)
    """As templates show them."""
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The schema of each function's parameters by the function's name."""
    client_tools: dict[str, ClientTool] = field(default_factory=dict)
    """By the name of the function; only those that the client knows by another name or form."""
    left_out: dict[str, None] = field(default_factory=dict)
    """The types of the tools that cannot run here, in order."""
    shows_deferred: bool = False
    """Whether deferred tools are shown: only a search that runs at a vendor could find them."""

    @property
    def custom(self) -> frozenset[str]:
        return frozenset(name for name, tool in self.client_tools.items() if tool.kind == "custom")

    def add_usual(self, tool: dict[str, Any]) -> bool:
        """Add a tool in chat's form, if nothing about it needs a closer look: nearly all are, and agents send many."""
        function = tool.get("function")
        if type(function) is not dict or tool.get("type") != "function":
            return False
        name, parameters = function.get("name"), function.get("parameters")
        if (
            type(name) is not str
            or not 1 <= len(name) <= NAME_CHARS_MAX
            or name in self.schemas
            or type(parameters) is not dict
            or not parameters
            or DEFER in tool
            or None in tool.values()
            or None in function.values()
        ):
            return False
        self.schemas[name] = parameters
        self.shown.append(tool)
        return True

    def add(self, tool: Any, where: str, namespace: str = "", found: bool = False) -> None:
        """Add a tool of a request; ``where`` is its place there. Raises ``RequestError``.

        ``found``: by a search of the conversation, whose result shows it. It may be there already.
        """
        if not isinstance(tool, dict):
            raise wrong_type(where, tool, "an object with a type")
        tool = without_nulls(tool)
        kind = tool.get("type", "function")
        if kind == "function":
            self._add_function(tool, where, namespace, found)
        elif kind == "custom":
            deferred = self._is_deferred(tool)
            definition, place = _definition(tool, "custom", where)
            name = _name(definition, place)
            function = _custom_function(definition, joined_name(namespace, name))
            self._show(function, place, ClientTool("custom", name, namespace), found=found, deferred=deferred)
        elif kind == "namespace":
            self._add_namespace(tool, where, found)
        elif (own := openai_function(tool)) is not None:
            self._show(own, where, ClientTool(own["name"], own["name"]))
        elif kind == "tool_search" and tool.get("execution") == "client":
            function = {name: tool[name] for name in ("description", "parameters") if name in tool}
            self._show({"name": kind, **function}, where, ClientTool(kind, kind))
            self._add_loaded(tool.get("tools"))
        elif isinstance(kind, str):
            self.left_out[kind] = None
        else:
            raise wrong_type(f"{where}.type", kind, "a string")

    def _add_function(self, tool: dict[str, Any], where: str, namespace: str, found: bool) -> None:
        deferred = self._is_deferred(tool)
        function, place = _definition(tool, "function", where)
        name = _name(function, place)
        if namespace:
            function = {**function, "name": joined_name(namespace, name)}
            client_tool = ClientTool("function", name, namespace)
            self._show(function, place, client_tool, found=found, deferred=deferred)
        else:
            whole = tool if function is tool.get("function") else None
            self._show(function, place, None, whole, found, deferred)

    def _is_deferred(self, tool: dict[str, Any]) -> bool:
        """Take the field from a tool that says so, and return whether the tool is not shown."""
        return tool.pop(DEFER, None) is True and not self.shows_deferred

    def _add_namespace(self, tool: dict[str, Any], where: str, found: bool) -> None:
        namespace = _name(tool, where)
        tools = tool.get("tools", [])
        if not isinstance(tools, list):
            raise wrong_type(f"{where}.tools", tools, "a list of functions")
        first = len(self.shown)
        for index, inner in enumerate(tools):
            self.add(inner, f"{where}.tools[{index}]", namespace, found)
        description = tool.get("description")
        if description and len(self.shown) > first:
            # Templates have no place for what functions have in common.
            function = self.shown[first]["function"]
            text = "\n\n".join((str(description), str(function.get("description", "")))).strip()
            self.shown[first] = {"type": "function", "function": {**function, "description": text}}

    def _add_loaded(self, tools: Any) -> None:
        """Add what earlier searches of the conversation found; a tool that is none is not a reason to end it."""
        for tool in tools if isinstance(tools, list) else ():
            with suppress(RequestError):
                self.add(tool, "input", found=True)

    def _show(
        self,
        function: dict[str, Any],
        place: str,
        client_tool: ClientTool | None,
        tool: dict[str, Any] | None = None,
        found: bool = False,
        deferred: bool = False,
    ) -> None:
        name = function["name"]
        if name in self.schemas:
            if found:
                return
            raise invalid(f"{place}.name", f"{place}.name is {quoted(name)}: allowed is it once")
        if len(name) > NAME_CHARS_MAX:
            words = f"{place}.name becomes {quoted(name)} with its namespace: allowed are {NAME_CHARS_MAX} characters"
            raise invalid(f"{place}.name", words)
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise wrong_type(f"{place}.parameters", parameters, "a JSON schema, an object")
        self.schemas[name] = parameters or {"type": "object", "properties": {}}
        if not found and not deferred:
            self.shown.append({"type": "function", "function": function} if tool is None else tool)
        if client_tool is not None:
            self.client_tools[name] = client_tool


NO_TOOLS: Final = Tools()
"""Of a request without tools; nothing is added to it."""


def read_tools(tools: Sequence[dict[str, Any]]) -> Tools:
    """Return the tools of a request; raises ``RequestError``."""
    if len(tools) > TOOLS_MAX:
        raise invalid("tools", f"tools has {len(tools)} entries: allowed are up to {TOOLS_MAX}")
    found = Tools(shows_deferred=any(map(_is_hosted_search, tools)))
    for index, tool in enumerate(tools):
        if not found.add_usual(tool):
            found.add(tool, f"tools[{index}]")
    if len(found.schemas) > TOOLS_MAX:
        raise invalid("tools", f"tools has {len(found.schemas)} functions: allowed are up to {TOOLS_MAX}")
    return found


def _is_hosted_search(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind.startswith("tool_search") and tool.get("execution") != "client"


def joined_name(namespace: str, name: str) -> str:
    """Return the name that the model knows a function of a namespace by."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """Return the text of a custom tool's call as the arguments of its function."""
    return msgspec.json.encode({CUSTOM_ARGUMENT: text}).decode()


def custom_text(arguments: str) -> str:
    """Return the text that the arguments of a custom tool's function carry; arguments of another form are the text."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = value.get(CUSTOM_ARGUMENT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _definition(tool: dict[str, Any], kind: str, where: str) -> tuple[dict[str, Any], str]:
    """Return the fields of a function or custom tool, and their place: inside the tool, or the tool itself."""
    definition = tool.get(kind)
    if definition is None and "name" in tool:
        return {name: value for name, value in tool.items() if name != "type"}, where
    if not isinstance(definition, dict):
        raise wrong_type(f"{where}.{kind}", definition, "an object with a name")
    return without_nulls(definition), f"{where}.{kind}"


def _name(definition: Mapping[str, Any], place: str) -> str:
    name = definition.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_CHARS_MAX:
        raise wrong_type(f"{place}.name", name, f"a string of 1 to {NAME_CHARS_MAX} characters")
    return name


def _custom_function(definition: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the function that stands for a custom tool: its one argument is the text of the call."""
    description = str(definition.get("description", ""))
    form = definition.get("format")
    if isinstance(form, dict):
        inner = form.get("grammar")
        grammar: Mapping[str, Any] = inner if isinstance(inner, dict) else form
        if grammar.get("definition"):
            syntax = grammar.get("syntax") or ""
            description += f"\n\nThe input must match this {syntax} grammar:\n{grammar['definition']}"
    return {
        "name": name,
        "description": description.strip(),
        "parameters": {
            "type": "object",
            "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
            "required": [CUSTOM_ARGUMENT],
            "additionalProperties": False,
        },
    }


def plain_choice(choice: Any) -> Any:
    """Return a tool choice whose mode is written as an object (``{"type": "auto"}``) as the mode alone."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return _MODES.get(kind, choice) if isinstance(kind, str) else choice


def tool_use(tools: Tools, choice: Any, parallel: bool | None) -> tuple[ToolUse | None, Guide]:
    """Return what a request asks of tools (``None`` = nothing), and the guide it needs; raises ``RequestError``."""
    functions = tools.schemas
    allowed = frozenset(functions)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed_tools(choice, tools)
    named = _named(choice, tools)
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


def beside_calls(own: Guide, param: str, use: ToolUse, output_format: ModelParsers, template: str) -> Guide:
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
                f"this model writes calls as JSON, so only a schema can be combined with tools; {_ALTERNATIVES}",
            )
        return json_guide(any_of([json.loads(schema), *output_format.call_schemas(use)]), param)
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
        "with tools that the model may call, the grammar must be a JSON schema, a choice or a structural "
        "tag with a format; "
        f"{_ALTERNATIVES}",
    )


def _allowed_tools(choice: Mapping[str, Any], tools: Tools) -> tuple[str, frozenset[str]]:
    """Return the mode of ``allowed_tools`` and the names of the functions that may be called."""
    inner, place = choice.get("allowed_tools"), "tool_choice.allowed_tools"
    if inner is None and "tools" in choice:
        inner, place = choice, "tool_choice"
    if not isinstance(inner, dict):
        raise wrong_type(place, inner, "an object with a mode and tools")
    mode = inner.get("mode")
    if mode not in ("auto", "required"):
        raise wrong_type(f"{place}.mode", mode, "auto or required", code="invalid_value")
    entries = inner.get("tools")
    if not isinstance(entries, list) or not entries:
        raise wrong_type(f"{place}.tools", entries, "a list of at least one function of tools")
    names: set[str] = set()
    for index, entry in enumerate(entries):
        if isinstance(entry, dict) and _type(entry, place) in tools.left_out:
            continue
        name, param = _function_name(entry, f"{place}.tools[{index}]", tools)
        if name not in tools.schemas:
            raise _unknown(param, name, tools.schemas)
        names.add(name)
    if not names:
        raise unsupported(f"{place}.tools", f"none of them runs here (got {quoted(entries)})")
    return mode, frozenset(names)


def _unknown(param: str, name: str, functions: Mapping[str, Any]) -> RequestError:
    return invalid(param, f"{param} names {quoted(name)}: allowed are the functions of tools, {sorted(functions)}")


def _named(choice: Any, tools: Tools) -> str | None:
    """Return the name of the function that must be called, if there is one."""
    if not isinstance(choice, dict):
        return None
    kind = _type(choice, "tool_choice")
    if kind in tools.left_out:
        raise unsupported("tool_choice.type", f"tools of this type do not run here (got {quoted(kind)})")
    return _function_name(choice, "tool_choice", tools)[0]


def _type(value: Mapping[str, Any], place: str) -> str:
    kind = value.get("type") or "function"
    if not isinstance(kind, str):
        raise wrong_type(f"{place}.type", kind, "a string")
    return kind


def _function_name(value: Any, place: str, tools: Tools) -> tuple[str, str]:
    """Return the model's name of a function that a tool choice names, and the place of the client's name for it."""
    value = value if isinstance(value, dict) else {}
    kind = _type(value, place)
    if kind in tools.client_tools:
        return kind, f"{place}.type"
    if kind not in ("function", "custom"):
        raise unsupported(f"{place}.type", f"allowed is {_CHOICES} (got {quoted(kind)})")
    inner = value.get(kind)
    if inner is None and "name" in value:
        inner, param = value, f"{place}.name"
    else:
        param = f"{place}.{kind}.name"
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str):
        raise wrong_type(param, name, "the name of a function of tools")
    namespace = value.get("namespace")
    if isinstance(namespace, str):
        return joined_name(namespace, name), param
    if name not in tools.schemas:
        name = next((known for known, each in tools.client_tools.items() if each.name == name), name)
    return name, param


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
