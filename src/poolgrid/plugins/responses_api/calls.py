"""Calls as items of the Responses API: the item of each kind of tool, and what the model is shown of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from poolgrid.server.frontend.errors import text_of, wrong_type
from poolgrid.server.frontend.field_words import without_nulls
from poolgrid.server.frontend.schema import Function, ToolCall
from poolgrid.server.frontend.tools import ClientTool, custom_arguments, joined_name

_NAMED_BY_ID: Final = ("function_call", "custom_tool_call", "local_shell_call", "mcp_call")
"""Calls whose answers may name them by the item's own id, or that carry their answer."""

_OF_ITEMS: Final = ("type", "id", "call_id", "status", "execution", "namespace")


@dataclass(frozen=True, slots=True)
class CallItem:
    """The item of a call."""

    type: str
    prefix: str
    """Of the item's id."""
    field: str
    """The field that carries what the model wrote."""
    event: str
    """Prefix of the events of its deltas; empty = the API has none."""
    value: Callable[[str], Any] = str
    """Returns the value of ``field`` for the text that the model wrote."""

    def begun(self, call_id: str, name: str, tool: ClientTool | None) -> dict[str, Any]:
        data: dict[str, Any] = {"type": self.type, "call_id": call_id}
        if self.event:
            data["name"] = name if tool is None else tool.name
        else:
            data["execution"] = "client"
        if tool is not None and tool.namespace:
            data["namespace"] = tool.namespace
        return {**data, self.field: self.value("")}


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _shell_action(text: str) -> dict[str, Any]:
    action = _object(text)
    if action is None:
        action = {"command": [text] if text else []}
    return {"type": "exec", "env": {}, **action}


def _shell_commands(text: str) -> dict[str, Any]:
    action = _object(text) or {}
    # As the model wrote them first: the prompt of the next turn has them in this order.
    return {**action, **{name: None for name in ("timeout_ms", "max_output_length") if name not in action}}


FORMS: Final[Mapping[str, CallItem]] = {
    "function": CallItem("function_call", "fc", "arguments", "function_call_arguments"),
    "custom": CallItem("custom_tool_call", "ctc", "input", "custom_tool_call_input"),
    "local_shell": CallItem("local_shell_call", "lsh", "action", "", _shell_action),
    "shell": CallItem("shell_call", "sh", "action", "", _shell_commands),
    "apply_patch": CallItem("apply_patch_call", "apc", "operation", "", lambda text: _object(text) or {}),
    "tool_search": CallItem("tool_search_call", "tsc", "arguments", "", lambda text: _object(text) or {}),
}
"""By the type of the client's tool."""


def earlier_call(item: Mapping[str, Any], kind: str, where: str) -> ToolCall | None:
    """Return an item of the type ``kind`` as the call that the model is shown.

    ``None`` for a call that a vendor's server made and answered itself: it has no id, and the answer is not in it.
    """
    call_id = item.get("call_id") or (item.get("id") if kind in _NAMED_BY_ID else None)
    arguments: str | dict[str, Any]
    if kind in ("function_call", "custom_tool_call", "mcp_call"):
        name = joined_name(text_of(item, "namespace", where, ""), text_of(item, "name", where))
        if kind == "custom_tool_call":
            arguments = custom_arguments(text_of(item, "input", where, ""))
        elif isinstance(item.get("arguments"), dict):
            arguments = item["arguments"]
        else:
            arguments = text_of(item, "arguments", where, "")
    elif not isinstance(call_id, str):
        return None
    else:
        name = kind.removesuffix("_call")
        form = FORMS.get(name)
        inner = item.get("arguments" if form is None else form.field)
        if not isinstance(inner, dict):
            inner = {key: value for key, value in item.items() if key not in _OF_ITEMS}
        inner = without_nulls(inner)
        if kind != "apply_patch_call":
            inner = {key: value for key, value in inner.items() if key != "type"}
        arguments = msgspec.json.encode(inner).decode()
    if not isinstance(call_id, str):
        raise wrong_type(f"{where}.call_id", call_id, "a string")
    return ToolCall(Function(name, arguments), id=call_id)
