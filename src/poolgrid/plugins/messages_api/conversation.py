"""From a Messages body to the chat body that means the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from poolgrid.plugins.messages_api.client_tools import anthropic_function
from poolgrid.plugins.messages_api.schema import (
    CountedBody,
    MessagesBody,
    MessageTool,
    MessageToolChoice,
    OutputConfig,
)
from poolgrid.server.frontend.errors import invalid, missing, quoted, text_of, unsupported, wrong_type
from poolgrid.server.frontend.schema import (
    ChatBody,
    ContentPart,
    Function,
    Message,
    PlacedPart,
    ToolCall,
    shared_fields,
)
from poolgrid.server.frontend.tools import DEFER

_VENDOR_LINES = re.compile(r"\s*(?:x-[a-z0-9]+-billing-header:[^\n]*\s*)+", re.IGNORECASE)
"""Lines before a system prompt that are for the vendor's meter. Claude Code writes one that differs in each request. In
the prompt it would end the shared prefix at the first block; vLLM leaves it out too."""

_SHOWN_FIELDS = ("title", "context", "source", "url", "text", "stdout", "stderr", "content")
"""The text of a block that chat has no part for, in the order in which the model reads it."""

_NOT_SHOWN = frozenset({"thinking", "redacted_thinking", "tool_reference", "server_tool_use", "mcp_tool_use"})
"""Blocks without a text for the model."""

_SHOWN_DEPTH_MAX = 8
"""Blocks inside blocks that are read: a tool's result with a search result of text has three."""


def chat_body(body: CountedBody) -> ChatBody:
    """Return the chat request; raises ``RequestError`` that names the field of the Messages body."""
    tools = [_tool(tool, index) for index, tool in enumerate(body.tools or ())]
    _show_references(body, tools)
    messages = _messages(body)
    goes_on = messages[-1].role == "assistant" and not messages[-1].tool_calls
    return ChatBody(
        messages=messages,
        tools=[*tools, *({"type": "mcp_server"} for _ in body.mcp_servers or ())] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=None if body.tool_choice is None else not body.tool_choice.disable_parallel_tool_use,
        response_format=_response_format(body),
        reasoning_effort=None if body.output_config is None else body.output_config.effort,
        thinking=body.thinking,
        chat_template_kwargs=body.chat_template_kwargs,
        # The answer continues the assistant's last message.
        continue_final_message=goes_on or None,
        max_completion_tokens=body.max_tokens if isinstance(body, MessagesBody) else None,
        stop=body.stop_sequences if isinstance(body, MessagesBody) else None,
        **shared_fields(body),
    )


def _messages(body: CountedBody) -> list[Message]:
    messages: list[Message] = []
    if body.system:
        messages += _of_system(body.system, "system")
    for index, message in enumerate(body.messages):
        where = f"messages[{index}].content"
        content = message.content or ""
        if message.role == "assistant":
            messages.append(_of_assistant(content, where))
        elif message.role == "system":
            messages += _of_system(content, where)
        elif isinstance(content, str):
            messages.append(Message(role="user", content=content))
        else:
            messages += _of_user(content, where)
    return messages


def _of_system(content: str | Sequence[Mapping[str, Any]], where: str) -> list[Message]:
    """Return the system message without the lines for the vendor's meter; none where nothing else is in it."""
    if isinstance(content, str):
        text = _without_vendor_lines(content)
        return [Message(role="system", content=text)] if text or not content else []
    parts: list[ContentPart] = []
    for number, block in enumerate(content):
        for part in _parts(block, f"{where}[{number}]"):
            if part.text is None:
                parts.append(part)
            elif text := _without_vendor_lines(part.text):
                parts.append(ContentPart("text", text))
    return [Message(role="system", content=parts)] if parts else []


def _without_vendor_lines(text: str) -> str:
    lines = _VENDOR_LINES.match(text)
    return text if lines is None else text[lines.end() :]


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
            parts += _parts(block, place)
    if parts or not messages:
        messages.append(Message(role="user", content=parts or ""))
    return messages


def _tool_result(block: Mapping[str, Any], place: str) -> Message:
    content = block.get("content")
    if content is not None and not isinstance(content, str | list):
        raise wrong_type(f"{place}.content", content, "a string or a list of text and image blocks")
    result: str | list[ContentPart] = content if isinstance(content, str) else []
    if isinstance(content, list):
        result = [part for number, inner in enumerate(content) for part in _parts(inner, f"{place}.content[{number}]")]
    return Message(role="tool", content=result or "", tool_call_id=text_of(block, "tool_use_id", place))


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
            texts.append(text_of(block, "text", place))
        elif kind == "thinking":
            thoughts.append(text_of(block, "thinking", place))
        elif kind == "tool_use":
            calls.append(_call(block, place))
        else:
            texts += (part.text for part in _parts(block, place) if part.text is not None)
    return Message(
        role="assistant",
        content="".join(texts) if texts or not calls else None,
        reasoning_content="\n".join(filter(None, thoughts)) or None,
        tool_calls=calls or None,
    )


def _call(block: Mapping[str, Any], place: str) -> ToolCall:
    arguments = block.get("input") or {}
    if not isinstance(arguments, dict):
        raise wrong_type(f"{place}.input", arguments, "an object")
    function = Function(text_of(block, "name", place), arguments)
    return ToolCall(function, id=text_of(block, "id", place))


def _parts(block: Any, place: str) -> list[ContentPart]:
    """Return the parts of chat that show a block to the model: none for one without text, such as a reference."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise wrong_type(f"{place}.type", kind, "the type of a content block, such as text")
    if kind == "text":
        text = text_of(block, "text", place)
        return [ContentPart("text", text)] if text else []
    if kind == "image":
        return [_image(block, place)]
    shown = "\n".join(_shown(block))
    return [ContentPart("text", shown)] if shown else []


def _shown(block: Any, depth: int = 0) -> Iterator[str]:
    """Yield the text in a block of another type: a document, a search result, the result of a tool of Anthropic's."""
    if depth > _SHOWN_DEPTH_MAX:
        return
    if isinstance(block, str):
        yield block
    elif isinstance(block, list):
        for inner in block:
            yield from _shown(inner, depth + 1)
    elif isinstance(block, dict):
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("data"), str):  # the source of a document
            yield block["data"]
        elif kind in ("base64", "file", "url"):
            named = block.get("media_type") or block.get("url") or kind
            yield f"[{named}: this server reads documents of text only]"
        elif kind not in _NOT_SHOWN:
            for name in _SHOWN_FIELDS:
                yield from _shown(block.get(name), depth + 1)


def _image(block: Mapping[str, Any], place: str) -> ContentPart:
    """Return the part of chat that names the same image; what it names is looked at as in chat."""
    source = block.get("source")
    if not isinstance(source, dict):
        raise wrong_type(f"{place}.source", source, "an object of the type base64 or url")
    kind = source.get("type")
    if kind == "url":
        url = text_of(source, "url", f"{place}.source")
    elif kind == "base64":
        kind_of_data, data = (text_of(source, name, f"{place}.source") for name in ("media_type", "data"))
        url = f"data:{kind_of_data};base64,{data}"
    else:
        raise unsupported(f"{place}.source.type", f"images come as base64 or by their url (got {quoted(kind)})")
    return PlacedPart("image_url", image_url=url, place=place)


def _tool(tool: MessageTool, index: int) -> dict[str, Any]:
    """Return a tool as chat writes it. One that only Anthropic can run keeps its type, by which it is left out."""
    if tool.input_schema is None and tool.type not in (None, "custom"):
        own = anthropic_function(tool.type, tool.name, tool.display_width_px, tool.display_height_px)
        return {"type": tool.type} if own is None else {"type": "function", "function": own, **_deferral(tool)}
    if tool.name is None:
        raise missing(f"tools[{index}].name", "a string")
    if tool.input_schema is None:
        raise missing(f"tools[{index}].input_schema", "a JSON schema, an object")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function, **_deferral(tool)}


def _deferral(tool: MessageTool) -> dict[str, Any]:
    return {DEFER: True} if tool.defer_loading else {}


def _show_references(body: CountedBody, tools: Sequence[Mapping[str, Any]]) -> None:
    """Put the definitions of deferred tools where results of searches refer to them."""
    definitions = {tool["function"]["name"]: tool["function"] for tool in tools if DEFER in tool}
    for message in body.messages if definitions else ():
        for block in message.content if isinstance(message.content, list) else ():
            content = block.get("content") if block.get("type") == "tool_result" else None
            if isinstance(content, list):
                block["content"] = [_definition_of(inner, definitions) for inner in content]


def _definition_of(block: Any, definitions: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the text for a reference to a deferred tool, and every other block as it is."""
    if not isinstance(block, dict) or block.get("type") != "tool_reference":
        return block
    name = block.get("tool_name")
    function = definitions.get(name) if isinstance(name, str) else None
    if function is None:
        return block
    return {"type": "text", "text": msgspec.json.encode({"type": "function", "function": function}).decode()}


def _tool_choice(choice: MessageToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise missing("tool_choice.name", "the name of one of tools")
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


def parsed_input(arguments: str) -> dict[str, Any]:
    """Return the input of a call as an object; a call that broke off has its text in one, under ``INVALID_JSON``."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
