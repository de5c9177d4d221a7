"""From a Responses body to the chat body that means the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from poolgrid.frontend.errors import RequestError, invalid, quoted, unsupported
from poolgrid.frontend.responses_api.schema import ResponsesBody
from poolgrid.frontend.schema import ChatBody, ContentPart, Function, Message, PlacedPart, ToolCall

_ROLES = ("system", "developer", "user", "assistant")


Items = Sequence[Mapping[str, Any]]


def chat_body(body: ResponsesBody, earlier: Items = ()) -> ChatBody:
    """Return the chat request; raises ``RequestError`` that names the field of the Responses body.

    ``earlier`` are the items of the conversation that it goes on with.
    """
    return ChatBody(
        model=body.model,
        messages=_messages(body, earlier),
        stream=body.stream,
        tools=_tools(body.tools) if body.tools else None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None if body.text is None else _response_format(body.text.format),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        chat_template_kwargs=body.chat_template_kwargs,
        cache_salt=body.cache_salt,
        nvext=body.nvext,
    )


def _messages(body: ResponsesBody, earlier: Items) -> list[Message]:
    messages: list[Message] = []
    if body.instructions:
        messages.append(Message(role="system", content=body.instructions))
    for item in earlier:
        _add_item(messages, item, "previous_response_id")
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
        return messages
    for index, item in enumerate(body.input):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        message = _message(item, where)
        # The assistant's reasoning comes as an item before its words.
        if message.role == "assistant" and messages and _awaits_words(messages[-1]):
            messages[-1].content = message.content
        else:
            messages.append(message)
    elif kind == "reasoning":
        messages.append(Message(role="assistant", reasoning_content=_reasoning(item, where)))
    elif kind == "function_call":
        _assistant(messages).tool_calls.append(_call(item, where))  # type: ignore[union-attr]  # made there
    elif kind == "function_call_output":
        content = _content(item.get("output"), f"{where}.output")
        messages.append(Message(role="tool", content=content, tool_call_id=_text(item, "call_id", where)))
    else:
        raise unsupported(f"{where}.type", f"it is not served without memory or other tools (got {quoted(kind)})")


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
        raise _wrong(f"{where}.role", role, "system, developer, user or assistant")
    return Message(role=role, content=_content(item.get("content"), f"{where}.content"))


def _content(content: Any, where: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, content, "a string or a list of text and image parts")
    parts: list[ContentPart] = []
    for number, part in enumerate(content):
        place = f"{where}[{number}]"
        if not isinstance(part, dict):
            raise _wrong(place, part, "an object with a type")
        kind = part.get("type")
        if kind == "refusal":
            parts.append(ContentPart("text", _text(part, "refusal", place)))
        elif kind in ("input_text", "output_text", "text"):
            parts.append(ContentPart("text", _text(part, "text", place)))
        elif kind == "input_image":
            parts.append(_image(part, place))
        else:
            raise unsupported(f"{place}.type", f"only text and image parts are served (got {quoted(kind)})")
    return parts


def _image(part: Mapping[str, Any], place: str) -> ContentPart:
    """Return the part of chat that names the same image; what it names is looked at as in chat."""
    if part.get("file_id") is not None:
        raise unsupported(f"{place}.file_id", "no files are kept here; send the image as image_url")
    return PlacedPart("image_url", image_url=_text(part, "image_url", place), place=place)


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item: its content, or else its summary; an encrypted one has none."""
    for group in ("content", "summary"):
        parts = item.get(group) or []
        if not isinstance(parts, list):
            raise _wrong(f"{where}.{group}", parts, "a list of text parts")
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if texts:
            return "\n".join(texts)
    return ""


def _call(item: Mapping[str, Any], where: str) -> ToolCall:
    function = Function(_text(item, "name", where), _text(item, "arguments", where))
    return ToolCall(function, id=_text(item, "call_id", where))


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", value, "a string")
    return value


def _tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools as chat writes them: the function's fields in an object of their own."""
    converted: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        kind = tool.get("type")
        if kind != "function":
            raise unsupported(f"tools[{index}].type", f"only functions can be called (got {quoted(kind)})")
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        converted.append({"type": "function", "function": function})
    return converted


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and "allowed_tools" not in choice:
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [_tool_choice(tool) for tool in tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(text_format: Mapping[str, Any] | None) -> Any:
    if text_format is None or text_format.get("type") != "json_schema":
        return text_format
    if text_format.get("schema") is None:
        param = "text.format.schema"
        raise invalid(
            param,
            f"{param} is missing: allowed is a JSON schema. The request was not run.",
            "missing_required_parameter",
        )
    return {"type": "json_schema", "json_schema": {name: text_format[name] for name in text_format if name != "type"}}


def _wrong(param: str, value: Any, allowed: str) -> RequestError:
    return invalid(param, f"{param} is {quoted(value)}: allowed is {allowed}. The request was not run.", "invalid_type")
