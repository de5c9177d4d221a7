"""From a Messages body to the chat body that means the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from poolgrid.frontend.errors import RequestError, invalid, quoted, unsupported
from poolgrid.frontend.messages_api.schema import (
    CountedBody,
    MessagesBody,
    MessageTool,
    MessageToolChoice,
    OutputConfig,
    Thinking,
)
from poolgrid.frontend.schema import ChatBody, ContentPart, Function, Message, PlacedPart, ToolCall

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""What published chat templates call the variable that switches reasoning on and off."""


def chat_body(body: CountedBody) -> ChatBody:
    """Return the chat request; raises ``RequestError`` that names the field of the Messages body."""
    messages = _messages(body)
    goes_on = messages[-1].role == "assistant" and not messages[-1].tool_calls
    chat = ChatBody(
        model=body.model,
        messages=messages,
        tools=None if not body.tools else [_tool(tool, index) for index, tool in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=None if body.tool_choice is None else not body.tool_choice.disable_parallel_tool_use,
        response_format=_response_format(body),
        reasoning_effort=None if body.output_config is None else body.output_config.effort,
        chat_template_kwargs=_template_variables(body.thinking, body.chat_template_kwargs),
        # The answer goes on with what the assistant has said last.
        continue_final_message=goes_on or None,
    )
    if isinstance(body, MessagesBody):
        chat.max_completion_tokens = body.max_tokens
        chat.stream = body.stream
        chat.stop = body.stop_sequences
        chat.temperature = body.temperature
        chat.top_p = body.top_p
        chat.top_k = body.top_k
        chat.min_p = body.min_p
        chat.seed = body.seed
        chat.stop_token_ids = body.stop_token_ids
        chat.min_tokens = body.min_tokens
        chat.ignore_eos = body.ignore_eos
        chat.cache_salt = body.cache_salt
        chat.nvext = body.nvext
    return chat


def _messages(body: CountedBody) -> list[Message]:
    messages: list[Message] = []
    if body.system:
        messages.append(Message(role="system", content=_system(body.system)))
    for index, message in enumerate(body.messages):
        where = f"messages[{index}].content"
        if message.role == "assistant":
            messages.append(_of_assistant(message.content, where))
        elif isinstance(message.content, str):
            messages.append(Message(role="user", content=message.content))
        else:
            messages += _of_user(message.content, where)
    return messages


def _system(system: str | Sequence[Mapping[str, Any]]) -> str | list[ContentPart]:
    if isinstance(system, str):
        return system
    return [_text_part(block, f"system[{index}]") for index, block in enumerate(system)]


def _of_user(blocks: Sequence[Mapping[str, Any]], where: str) -> list[Message]:
    """Return the messages of one turn: each result of a tool is one, and so is what stands between them."""
    messages: list[Message] = []
    parts: list[ContentPart] = []
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        if block.get("type") == "tool_result":
            if parts:
                messages.append(Message(role="user", content=parts))
                parts = []
            messages.append(_tool_result(block, place))
        else:
            parts.append(_part(block, place))
    if parts or not messages:
        messages.append(Message(role="user", content=parts))
    return messages


def _tool_result(block: Mapping[str, Any], place: str) -> Message:
    content = block.get("content")
    if content is not None and not isinstance(content, str | list):
        raise _wrong(f"{place}.content", content, "a string or a list of text and image blocks")
    result: str | list[ContentPart] = content if isinstance(content, str) else []
    if isinstance(content, list):
        result = [_part(inner, f"{place}.content[{number}]") for number, inner in enumerate(content)]
    return Message(role="tool", content=result or "", tool_call_id=_text(block, "tool_use_id", place))


def _of_assistant(content: str | Sequence[Mapping[str, Any]], where: str) -> Message:
    if isinstance(content, str):
        return Message(role="assistant", content=content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(content):
        place = f"{where}[{number}]"
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block, "text", place))
        elif kind == "thinking":
            thoughts.append(_text(block, "thinking", place))
        elif kind == "tool_use":
            calls.append(_call(block, place))
        elif kind != "redacted_thinking":  # that one says nothing to anybody but who made it
            raise _unknown(place, kind, "text, thinking and tool_use")
    return Message(
        role="assistant",
        content="".join(texts) if texts or not calls else None,
        reasoning_content="\n".join(filter(None, thoughts)) or None,
        tool_calls=calls or None,
    )


def _call(block: Mapping[str, Any], place: str) -> ToolCall:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise _wrong(f"{place}.input", arguments, "an object")
    function = Function(_text(block, "name", place), arguments)
    return ToolCall(function, id=_text(block, "id", place))


def _part(block: Any, place: str) -> ContentPart:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return _text_part(block, place)
    if kind == "image":
        return _image(block, place)
    raise _unknown(place, kind, "text, image and tool_result")


def _text_part(block: Mapping[str, Any], place: str) -> ContentPart:
    if block.get("type") != "text":
        raise _unknown(place, block.get("type"), "text")
    return ContentPart("text", _text(block, "text", place))


def _image(block: Mapping[str, Any], place: str) -> ContentPart:
    """Return the part of chat that names the same image; what it names is looked at as in chat."""
    source = block.get("source")
    if not isinstance(source, dict):
        raise _wrong(f"{place}.source", source, "an object of the type base64 or url")
    kind = source.get("type")
    if kind == "url":
        url = _text(source, "url", f"{place}.source")
    elif kind == "base64":
        kind_of_data, data = (_text(source, name, f"{place}.source") for name in ("media_type", "data"))
        url = f"data:{kind_of_data};base64,{data}"
    else:
        raise unsupported(f"{place}.source.type", f"images come as base64 or by their url (got {quoted(kind)})")
    return PlacedPart("image_url", image_url=url, place=place)


def _tool(tool: MessageTool, index: int) -> dict[str, Any]:
    """Return a tool as chat writes it."""
    if tool.type not in (None, "custom"):
        raise unsupported(
            f"tools[{index}].type", f"only functions of the client can be called (got {quoted(tool.type)})"
        )
    if tool.input_schema is None:
        raise invalid(
            f"tools[{index}].input_schema",
            f"tools[{index}].input_schema is missing: allowed is a JSON schema, an object",
            "missing_required_parameter",
        )
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: MessageToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise invalid(
                "tool_choice.name", "tool_choice.name is missing: allowed is the name of one of tools",
                "missing_required_parameter",
            )  # fmt: skip
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _response_format(body: CountedBody) -> Any:
    config = body.output_config or OutputConfig()
    param = "output_format" if config.format is None else "output_config.format"
    wanted = body.output_format if config.format is None else config.format
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
        raise invalid(
            param, f"{param} is {quoted(wanted)}: allowed is an object with the type json_schema and a schema"
        )
    return {"type": "json_schema", "json_schema": {"schema": wanted["schema"]}}


def _template_variables(thinking: Thinking | None, given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the variables of the chat template; without ``thinking`` the template's own default holds."""
    if thinking is None:
        return given
    return {**dict.fromkeys(THINKING_VARIABLES, thinking.type != "disabled"), **(given or {})}


def _text(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", value, "a string")
    return value


def _unknown(place: str, kind: Any, known: str) -> RequestError:
    return unsupported(f"{place}.type", f"blocks of the types {known} are served (got {quoted(kind)})")


def _wrong(param: str, value: Any, allowed: str) -> RequestError:
    return invalid(param, f"{param} is {quoted(value)}: allowed is {allowed}. The request was not run.", "invalid_type")


def parsed_input(arguments: str) -> dict[str, Any]:
    """Return the input of a call as an object; a call that broke off has its text in one, under ``INVALID_JSON``."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
