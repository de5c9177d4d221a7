"""From a Responses body to the chat body that means the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from poolgrid.plugins.responses_api.calls import earlier_call
from poolgrid.plugins.responses_api.schema import ResponsesBody
from poolgrid.server.frontend.errors import invalid, missing, text_of, unsupported, wrong_type
from poolgrid.server.frontend.field_words import without_nulls
from poolgrid.server.frontend.schema import ChatBody, ContentPart, Message, PlacedPart, ToolCall, shared_fields

_ROLES = ("system", "developer", "user", "assistant", "tool")


Items = Sequence[dict[str, Any]]


def chat_body(body: ResponsesBody, earlier: Items = ()) -> ChatBody:
    """Return the chat request; raises ``RequestError`` that names the field of the Responses body.

    ``earlier`` are the items of the conversation that it continues.
    """
    loaded: list[Any] = []
    messages = _messages(body, earlier, loaded)
    return ChatBody(
        messages=messages,
        tools=_with_loaded(body.tools, loaded) if loaded and body.tools else body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None if body.text is None else _response_format(body.text.format),
        reasoning=body.reasoning,
        thinking=body.thinking,
        max_completion_tokens=body.max_output_tokens,
        stop=body.stop,
        chat_template_kwargs=body.chat_template_kwargs,
        chat_template_args=body.chat_template_args,
        **shared_fields(body),
    )


def _messages(body: ResponsesBody, earlier: Items, loaded: list[Any]) -> list[Message]:
    """Return the messages of a conversation; the tools that searches in it found are added to ``loaded``."""
    messages: list[Message] = []
    if isinstance(body.instructions, list):
        for index, item in enumerate(body.instructions):
            _add_item(messages, item, f"instructions[{index}]", loaded)
    elif body.instructions:
        messages.append(Message(role="system", content=body.instructions))
    for item in earlier:
        _add_item(messages, item, "previous_response_id", loaded)
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
        return messages
    for index, item in enumerate(body.input):
        _add_item(messages, item, f"input[{index}]", loaded)
    if not messages:
        raise invalid("input", "input has no item that the model can read: allowed is at least one message")
    return messages


def _add_item(messages: list[Message], item: dict[str, Any], where: str, loaded: list[Any]) -> None:
    """Add what the model is shown of an item: nothing of one that only its vendor can read, or of an unknown one."""
    item = without_nulls(item)
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        raise wrong_type(f"{where}.type", kind, "a string")
    if kind == "message":
        message = _message(item, where)
        # The assistant's reasoning comes as an item before its words.
        if message.role == "assistant" and messages and _awaits_words(messages[-1]):
            messages[-1].content, messages[-1].tool_calls = message.content, message.tool_calls
        else:
            messages.append(message)
    elif kind == "reasoning":
        reasoning = _reasoning(item, where)
        if reasoning:
            messages.append(Message(role="assistant", reasoning_content=reasoning))
    elif kind.endswith("_call"):
        call = earlier_call(item, kind, where)
        if call is not None:
            _assistant(messages).tool_calls.append(call)  # type: ignore[union-attr]  # made there
            if kind == "mcp_call":
                _add_output(messages, item, where)
    elif kind == "tool_search_output":
        tools = item.get("tools")
        if isinstance(tools, list):
            loaded += tools
        _add_output(messages, {**item, "output": msgspec.json.encode(tools).decode()}, where)
    elif kind.endswith("_output"):
        _add_output(messages, item, where)
    elif "content" in item:
        role = item.get("role")
        messages.append(_message({**item, "role": role if role in _ROLES else "user"}, where))


def _add_output(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    call_id = item.get("call_id", item.get("id"))
    if call_id is not None and not isinstance(call_id, str):
        raise wrong_type(f"{where}.call_id", call_id, "a string")
    said = item.get("output", item.get("error", item.get("status", "")))
    content = _output(said, f"{where}.output")
    messages.append(Message(role="tool", content=content, tool_call_id=call_id))


def _output(output: Any, where: str) -> str | list[ContentPart]:
    """Return the result of a call: text and images as they are, all else as JSON."""
    if isinstance(output, dict):
        if output.get("type") == "computer_screenshot" and isinstance(output.get("image_url"), str):
            return [PlacedPart("image_url", image_url=output["image_url"], place=where)]
    elif isinstance(output, str) or (
        isinstance(output, list) and all(isinstance(part, dict) and part.get("type") for part in output)
    ):
        return _content(output, where)
    return msgspec.json.encode(output).decode()


def _with_loaded(tools: Sequence[Mapping[str, Any]], loaded: list[Any]) -> list[dict[str, Any]]:
    return [{**tool, "tools": loaded} if tool.get("type") == "tool_search" else dict(tool) for tool in tools]


def _awaits_words(message: Message) -> bool:
    return message.role == "assistant" and message.content is None and not message.tool_calls


def _assistant(messages: list[Message]) -> Message:
    """Return the assistant's message that a call belongs to: the last one, or a new one."""
    if not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant"))
    last = messages[-1]
    if last.tool_calls is None:
        last.tool_calls = []
    return last


def _message(item: Mapping[str, Any], where: str) -> Message:
    role = item.get("role")
    if role not in _ROLES:
        raise wrong_type(f"{where}.role", role, "system, developer, user, assistant or tool")
    message = Message(role=role, content=_content(item.get("content", ""), f"{where}.content"))
    # As chat writes calls and results: agents that speak both APIs mix their forms.
    try:
        message.tool_calls = msgspec.convert(item.get("tool_calls"), list[ToolCall] | None) or None
        message.tool_call_id = msgspec.convert(item.get("tool_call_id", item.get("call_id")), str | None)
    except msgspec.ValidationError as error:
        raise invalid(where, f"{where} is no message: {error}. The request was not run.") from None
    return message


def _content(content: Any, where: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(where, content, "a string or a list of text and image parts")
    parts: list[ContentPart] = []
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        if not isinstance(part, dict):
            raise wrong_type(place, part, "an object with a type")
        kind = part.get("type")
        if kind == "refusal":
            parts.append(ContentPart("text", text_of(part, "refusal", place)))
        elif kind in ("input_text", "output_text", "text") or isinstance(part.get("text"), str):
            parts.append(ContentPart("text", text_of(part, "text", place)))
        elif kind == "input_image":
            parts.append(_image(part, place))
        elif isinstance(kind, str):  # what is made of it is decided as in chat
            name = "file" if kind == "input_file" else kind
            thinking, reasoning = part.get("thinking"), part.get("reasoning")
            parts.append(PlacedPart(name, thinking=thinking, reasoning=reasoning, file=part, place=place))
        else:
            raise wrong_type(f"{place}.type", kind, "the type of a part, such as input_text")
    return parts


def _image(part: Mapping[str, Any], place: str) -> ContentPart:
    """Return the part of chat that names the same image; what it names is looked at as in chat."""
    if part.get("file_id") is not None:
        raise unsupported(f"{place}.file_id", "no files are kept here; send the image as image_url")
    return PlacedPart("image_url", image_url=text_of(part, "image_url", place), place=place)


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item: its content, or else its summary; an encrypted one has none."""
    for group in ("content", "summary"):
        parts = item.get(group) or []
        if not isinstance(parts, list):
            raise wrong_type(f"{where}.{group}", parts, "a list of text parts")
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if texts:
            return "\n".join(texts)
    return ""


def _response_format(text_format: dict[str, Any] | None) -> Any:
    text_format = without_nulls(text_format) if text_format else None
    if not text_format or text_format.get("type") != "json_schema":
        return text_format
    if text_format.get("schema") is None:
        raise missing("text.format.schema", "a JSON schema")
    return {"type": "json_schema", "json_schema": {name: text_format[name] for name in text_format if name != "type"}}
