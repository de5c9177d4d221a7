"""Write the messages and tools of a request as one chat template takes them.

Rules
    1. ``adapt`` is pure. The messages of a later turn begin with those of the turn before, so its prompt begins with
       the same tokens. Only where a template itself shows a message in some turns and not in others, they may differ.
    2. What a template takes as it came is not changed.
    3. No text of a message is lost. Where a template has no place for a message, its text moves to a neighbour:

       - ``developer`` becomes ``system``, and ``function`` becomes ``tool``. ``function_call`` becomes one of
         ``tool_calls``.
       - Several system messages at the beginning become one. A later system message becomes a user message in its
         place. A template without system messages gets them as the beginning of the next user message.
       - Messages of one role in a row become one where roles must alternate. A user message after a tool's result
         joins the result where the template refuses it there.
       - Calls and results that a template does not show become text, in the tags of ``call_text`` and ``result_text``.
         Where a template takes one call in a message, each call has a message of its own, before its result.
    4. Only reasoning can be left out, where the template shows it under no name.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import attrgetter, eq
from typing import Any, Final

import msgspec

from poolgrid.server.frontend.errors import invalid
from poolgrid.server.frontend.media.conversation import shape_message
from poolgrid.server.frontend.schema import ContentPart, Message, ToolCall
from poolgrid.server.frontend.template_capabilities import Arguments, EmptyContent, TemplateCapabilities, TextWithCalls
from poolgrid.server.frontend.tools import mistral_id

SEPARATOR: Final = "\n\n"
"""Stands between texts that are joined."""

_SYSTEM: Final = ("system", "developer")

# Conversations are long: what is asked of every message is asked without a call of ours for each.
ROLE, CONTENT, TOOL_CALLS, FUNCTION_CALL = map(attrgetter, ("role", "content", "tool_calls", "function_call"))


def adapt(messages: Sequence[Message], takes: TemplateCapabilities, placeholder: str = "") -> list[Mapping[str, Any]]:
    """Return the messages for a template; raises ``RequestError`` for content that cannot be shown.

    ``placeholder`` stands for a medium where the template takes none itself.
    """
    if not _is_regular(messages, takes):
        for index, message in enumerate(messages):  # errors name the place in the request
            if message.content is None:
                _check_missing(message, index)
            elif not isinstance(message.content, str):
                shape_message(message.content, index, takes.form(message.role), placeholder)
        messages = _rearranged(messages, takes)
    kinds = set(map(type, map(CONTENT, messages)))
    if takes.strings and list not in kinds and not any(map(TOOL_CALLS, messages)):
        # Nearly every message is its role and its content, and nothing further.
        written: list[Mapping[str, Any]] = msgspec.to_builtins(messages)
        if kinds == {str} and set(map(len, written)) == {2}:
            return written
        return [
            fields if len(fields) == 2 and "content" in fields else _adapted(messages[index], index, takes, placeholder)
            for index, fields in enumerate(written)
        ]
    return [_adapted(message, index, takes, placeholder) for index, message in enumerate(messages)]


def adapt_tools(
    tools: Sequence[Mapping[str, Any]] | None, takes: TemplateCapabilities
) -> Sequence[Mapping[str, Any]] | None:
    """Return the tools of a request for a template, with a description and parameters where it needs them."""
    if tools is None:
        return None if takes.null_tools else []
    return tools if takes.bare_tools else list(map(_whole_tool, tools))


def _whole_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    missing: dict[str, Any] = {"description": "", "parameters": {"type": "object", "properties": {}}}
    added = {name: value for name, value in missing.items() if function.get(name) is None}
    return {**tool, "function": {**function, **added}} if added else tool


def write_as_tool_calls(messages: Sequence[Message]) -> None:
    """Write each ``function_call`` as one of ``tool_calls``, in place."""
    for index, message in enumerate(messages):
        call = message.function_call
        if call is not None:
            calls = message.tool_calls or []
            if all(each.function != call for each in calls):  # some clients send a call in both forms
                calls = [*calls, ToolCall(call, id=f"call_{index}")]
            message.tool_calls, message.function_call = calls, None


def call_text(call: ToolCall) -> str:
    """Return a call as text, as Hermes and Qwen write it, for templates without calls."""
    arguments = _decoded(call.function.arguments)
    written = json.dumps({"name": call.function.name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def result_text(content: str | list[ContentPart] | None) -> str | list[ContentPart]:
    """Return a tool's result as text, as Hermes and Qwen write it, for templates without results."""
    if isinstance(content, list):
        return [ContentPart("text", "<tool_response>\n"), *content, ContentPart("text", "\n</tool_response>")]
    return f"<tool_response>\n{content or ''}\n</tool_response>"


def is_malformed(arguments: str | dict[str, Any]) -> bool:
    """Return whether the arguments of a call are text that is not JSON."""
    return isinstance(arguments, str) and _decoded(arguments) is arguments


def _is_regular(messages: Sequence[Message], takes: TemplateCapabilities) -> bool:
    """Return whether every message keeps its place and role; in doubt it does not."""
    roles = list(map(ROLE, messages))
    if not takes.rewritten_roles.isdisjoint(roles):
        return False
    if takes.any_order:
        return True
    others = roles[1:]
    if "tool" in roles or "system" in others or "developer" in others:
        return False
    return not (any(map(eq, roles, others)) or any(map(TOOL_CALLS, messages)))


def _rearranged(messages: Sequence[Message], takes: TemplateCapabilities) -> list[Message]:
    """Return the messages with the roles and in the order that a template takes."""
    turns = _with_known_roles(messages, takes)
    if not takes.parallel_calls:
        turns = _one_call_each(turns)
    groups: list[list[Message]] = []
    for turn in turns:
        last = groups[-1][0] if groups else None
        if last is not None and _joins(last, turn, takes):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    return list(map(_joined, groups))


def _joins(last: Message, turn: Message, takes: TemplateCapabilities) -> bool:
    """Return whether a message must be one with the message before it."""
    if turn.role == "user":
        return (last.role == "user" and not takes.consecutive_user) or (
            last.role == "tool" and not takes.user_after_tool
        )
    return (
        turn.role == last.role == "assistant"
        and not takes.consecutive_assistant
        and not (last.tool_calls or turn.tool_calls)
    )


def _with_known_roles(messages: Sequence[Message], takes: TemplateCapabilities) -> list[Message]:
    groups: list[list[Message]] = []
    """Messages, each with those that join it."""
    names: dict[str | None, str] = {}
    """The function of each call."""
    as_text: set[str | None] = set()
    """Calls whose results are text."""
    leads = True
    joins_user = False
    system = takes.system and (takes.system_before_result or _ends_with_user(messages, takes))
    late = takes.lone_late_system if _systems(messages) == 1 else takes.late_system
    out_of_turn = _between_equals(messages) if late and not takes.consecutive_user else frozenset()
    answer = max((index for index, each in enumerate(messages) if _answers(each)), default=-1)
    for index, sent in enumerate(messages):
        message = sent
        role: str = message.role
        if role == "function" and not takes.function:
            role = "tool"
            if message.tool_call_id is None:  # it answers the call before it
                message = msgspec.structs.replace(message, tool_call_id=next(reversed(names), None))
        if role in _SYSTEM:
            if leads and groups and system and not takes.several_system:
                groups[-1].append(message)
            elif system and (leads or late) and index not in out_of_turn:
                role = role if takes.developer else "system"
                groups.append([message if role == message.role else msgspec.structs.replace(message, role=role)])
            else:
                instruction = Message("user", message.content)
                if joins_user:
                    groups[-1].append(instruction)
                else:
                    groups.append([instruction])
                joins_user = True
            continue
        leads = False
        if joins_user and role == "user":
            groups[-1].append(message)
        elif role == "tool" and (not takes.results or message.tool_call_id in as_text):
            groups.append([Message("user", result_text(message.content))])
        elif message.tool_calls:
            turn = message
            mode = takes.text_with_calls if message.content else TextWithCalls.CONTENT
            if mode is TextWithCalls.CONTENT_OF_FIRST:
                mode = TextWithCalls.OWN_MESSAGE if names else TextWithCalls.CONTENT
            elif mode is TextWithCalls.CONTENT_UNTIL_ANSWER:
                mode = TextWithCalls.CONTENT if index > answer else TextWithCalls.OWN_MESSAGE
                reasoning = _reasoning(message)
                if reasoning and index > answer:
                    text = f"{reasoning}{SEPARATOR}{_text(message.content)}"
                    turn = msgspec.structs.replace(message, content=None, reasoning_content=text)
            elif mode is TextWithCalls.ROUND_AS_TEXT:
                as_text.update(call.id for call in message.tool_calls)
            names.update((call.id, call.function.name) for call in message.tool_calls)
            groups += [[each] for each in _with_known_calls(turn, takes.calls, mode)]
        else:
            turn = message if role == message.role else msgspec.structs.replace(message, role=role)
            if role == "tool" and message.name is None and not takes.results_without_name:
                turn = msgspec.structs.replace(turn, name=names.get(message.tool_call_id))
            groups.append([turn])
        joins_user = False
    return list(map(_joined, groups))


def _ends_with_user(messages: Sequence[Message], takes: TemplateCapabilities) -> bool:
    if messages[-1].role != "user" or takes.user_after_tool:
        return messages[-1].role == "user"
    others = (each.role for each in reversed(messages) if each.role != "user" and each.role not in _SYSTEM)
    return next(others, "") not in ("tool", "function")


def _systems(messages: Sequence[Message]) -> int:
    return sum(message.role in _SYSTEM for message in messages)


def _answers(message: Message) -> bool:
    return message.role == "assistant" and not message.tool_calls


def _between_equals(messages: Sequence[Message]) -> frozenset[int]:
    """Return which system messages stand between two of one role, which would not alternate without them."""
    found: set[int] = set()
    waiting: list[int] = []
    before = ""
    for index, message in enumerate(messages):
        if message.role in _SYSTEM:
            waiting.append(index)
            continue
        if message.role == before:
            found.update(waiting)
        waiting.clear()
        before = message.role
    return frozenset(found)


def _with_known_calls(message: Message, takes_calls: bool, mode: TextWithCalls) -> list[Message]:
    if not takes_calls or mode in (TextWithCalls.CALLS_AS_TEXT, TextWithCalls.ROUND_AS_TEXT):
        text = "\n".join(map(call_text, message.tool_calls or ()))
        content = _joined_content([message.content, text], "\n")
        return [msgspec.structs.replace(message, content=content, tool_calls=None)]
    if mode is TextWithCalls.OWN_MESSAGE:
        return [Message("assistant", message.content), msgspec.structs.replace(message, content=None)]
    return [message]


def _one_call_each(turns: Sequence[Message]) -> list[Message]:
    """Return messages with one call each; each further call stands before its own result, or where results end."""
    result: list[Message] = []
    bearer: Message | None = None
    waiting: OrderedDict[int, ToolCall] = OrderedDict()
    numbers: dict[str | None, list[int]] = {}
    """The calls that wait, by their id."""

    def write(number: int) -> None:
        nonlocal bearer
        first = Message("assistant") if bearer is None else bearer
        bearer = None
        result.append(msgspec.structs.replace(first, tool_calls=[waiting.pop(number)]))

    for turn in turns:
        if waiting and turn.role == "tool":
            same = numbers.get(turn.tool_call_id)
            number = same.pop() if same else next(iter(waiting))
            if number in waiting:
                write(number)
            result.append(turn)
            continue
        while waiting:
            write(next(iter(waiting)))
        calls = turn.tool_calls or []
        if len(calls) > 1:
            bearer = turn
            waiting.update(enumerate(calls))
            numbers = {}
            for number, call in reversed(list(enumerate(calls))):
                numbers.setdefault(call.id, []).append(number)
        else:
            result.append(turn)
    while waiting:
        write(next(iter(waiting)))
    return result


def _joined(group: Sequence[Message]) -> Message:
    first = group[0]
    if len(group) == 1:
        return first
    return Message(
        first.role,
        _joined_content([message.content for message in group], SEPARATOR),
        name=first.name,
        reasoning_content=SEPARATOR.join(filter(None, map(_reasoning, group))) or None,
        tool_call_id=first.tool_call_id,
    )


def _joined_content(
    contents: Sequence[str | list[ContentPart] | None], separator: str
) -> str | list[ContentPart] | None:
    texts = [content for content in contents if isinstance(content, str) and content]
    if not any(isinstance(content, list) for content in contents):
        return separator.join(texts)
    parts: list[ContentPart] = []
    for content in contents:
        if content:
            if parts:
                parts.append(ContentPart("text", separator))
            parts += [ContentPart("text", content)] if isinstance(content, str) else content
    return parts


def _reasoning(message: Message) -> str | None:
    for text in (message.reasoning_content, message.reasoning, message.thinking):
        if text is not None:
            return text
    return None


def _adapted(message: Message, index: int, takes: TemplateCapabilities, placeholder: str) -> Mapping[str, Any]:
    role, calls, written = message.role, message.tool_calls, message.content
    form = takes.form(role)
    reasoning = _reasoning(message)
    content = shape_message(written, index, form, placeholder)
    adapted: dict[str, Any] = {"role": role, "content": content}
    if calls and not content:
        if takes.empty_content is EmptyContent.ABSENT:
            del adapted["content"]
        elif takes.empty_content is not EmptyContent.AS_SENT:
            adapted["content"] = None if takes.empty_content is EmptyContent.NULL else shape_message("", 0, form, "")
    elif calls and takes.text_with_calls is TextWithCalls.TOOL_PLAN:
        adapted["tool_plan"] = _text(written)
    elif content is None:
        _check_missing(message, index)
        if role != "assistant" or not takes.null_content:
            adapted["content"] = shape_message("", 0, form, "")
    if message.name is not None:
        adapted["name"] = message.name
    if reasoning is not None:
        adapted[takes.reasoning] = reasoning
    if message.tool_call_id is not None:
        adapted["tool_call_id"] = _call_id(message.tool_call_id, takes)
    if calls:
        adapted["tool_calls"] = [
            {
                "id": _call_id(call.id, takes),
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, takes.arguments),
                },
            }
            for call in calls
        ]
    return adapted


def _check_missing(message: Message, index: int) -> None:
    """Refuse a message without content; an assistant's may have none, and a tool may return nothing."""
    if message.role not in ("assistant", "tool", "function") and not message.tool_calls:
        raise invalid(f"messages[{index}].content", f"messages[{index}].content is missing: allowed is a string")


def _text(content: str | list[ContentPart] | None) -> str:
    """Return the text of content; an assistant's has no media."""
    return "".join(part.text or "" for part in content) if isinstance(content, list) else content or ""


def _call_id(call_id: str | None, takes: TemplateCapabilities) -> str | None:
    return call_id if call_id is None or takes.long_call_ids else mistral_id(call_id)


def _arguments(arguments: str | dict[str, Any], form: Arguments) -> Any:
    """Return the arguments of an earlier call in the form that a template takes.

    Models break off and clients send back what came, so text may be no JSON.
    """
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False) if form is Arguments.TEXT else arguments
    if form is Arguments.AS_SENT or form is Arguments.TEXT:
        return arguments or "{}"
    decoded = _decoded(arguments)
    if form is Arguments.OBJECT_ONLY and not isinstance(decoded, dict):
        return {"INVALID_JSON": arguments}
    return decoded


def _decoded(arguments: str | dict[str, Any]) -> Any:
    """Return arguments as an object, or as they are if they are no JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        # Models write what is no JSON now and then; refused here, a conversation with it could never continue.
        return arguments
