"""Calls, parts and items of earlier turns, in the forms that agents send: the model sees them or a line instead."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from poolgrid.kernel.wire.card import MediaSpec
from poolgrid.server.frontend.chat_template import ChatTemplate
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.media.conversation import FILES_BYTES_MAX, NO_MEDIA, find_media
from poolgrid.server.frontend.preparation import Preparation
from poolgrid.server.frontend.prompts import tokenize
from poolgrid.server.frontend.schema import Message
from poolgrid.server.frontend.settings import FrontendSettings
from tests.frontend.fake_backend import TINY, FakeBackend, speak
from tests.frontend.server import FrontEnd, front_end

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CALL = {"name": "f", "arguments": '{"a": "MARKCALL"}'}
ASKS: dict[str, Any] = {"role": "user", "content": "Hi."}
SAYS: dict[str, Any] = {"role": "assistant", "content": "Hello."}
IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with front_end() as opened:
        yield opened


def asked(front: FrontEnd, path: str = CHAT, **body: Any) -> tuple[httpx.Response, str]:
    """Return the answer and the prompt that the model was shown."""
    backend = FakeBackend(lambda _: speak("Fine."))
    answer = front.post(backend, path, json={"model": "tiny", **body})
    tokens = list(memoryview(backend.requests[0].token_ids).cast("I")) if backend.requests else []
    return answer, TINY.tokenizer.decode(tokens, skip_special_tokens=False)


def read(*messages: dict[str, Any], media: MediaSpec | None = None) -> list[Message]:
    found = msgspec.convert(messages, list[Message])
    find_media(found, media or MediaSpec(), "tiny")
    return found


def file_of(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": base64.b64encode(data).decode(), **more}}


def texts(message: Message) -> list[str | None]:
    assert isinstance(message.content, list)
    return [part.text for part in message.content]


@pytest.mark.parametrize("more", [{}, {"tool_calls": None}, {"tool_calls": []}])
def test_a_function_call_and_its_result_are_a_tool_call_and_its_result(front: FrontEnd, more: dict[str, Any]) -> None:
    legacy = [
        ASKS,
        {"role": "assistant", "content": None, "function_call": CALL, **more},
        {"role": "function", "name": "f", "content": "MARKRESULT"},
    ]
    modern = [
        ASKS,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}]},
        {"role": "function", "name": "f", "content": "MARKRESULT"},  # tiny's template takes any role
    ]
    answer, prompt = asked(front, messages=legacy)
    assert answer.status_code == 200, answer.text
    assert "MARKCALL" in prompt
    assert "MARKRESULT" in prompt
    assert prompt == asked(front, messages=modern)[1]


def test_the_result_of_a_function_answers_the_call_before_it() -> None:
    template = """{% for m in messages %}{% if m.role == 'tool' %}[{{ m.tool_call_id + '=' + m.content }}]
{%- elif m.role in ('user', 'assistant') %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}({{ c.id }}:{{ c.function.name }}:{{ c.function.arguments }}){% endfor %}
{%- endif %}{% endfor %}"""
    model = dataclasses.replace(TINY, template=ChatTemplate(template), encoder=None)
    calls = [{"role": "assistant", "function_call": {"name": name, "arguments": "{}"}} for name in "fg"]
    results = [{"role": "function", "name": name, "content": name.upper()} for name in "fg"]
    messages = [ASKS, calls[0], results[0], calls[1], results[1]]
    job = Preparation(FakeBackend(), {"tiny": model}, FrontendSettings()).chat(
        msgspec.json.encode({"model": "tiny", "messages": messages})
    )
    (shown,) = tokenize(job)
    assert TINY.decode(shown.token_ids) == "Hi.(call_1:f:{})[call_1=F](call_3:g:{})[call_3=G]"


def test_a_call_in_both_forms_is_shown_once(front: FrontEnd) -> None:
    call = {"id": "c", "type": "function", "function": CALL}
    both = {"role": "assistant", "content": "", "tool_calls": [call], "function_call": CALL}
    _, prompt = asked(front, messages=[ASKS, both, ASKS])
    assert prompt.count("MARKCALL") == 1
    other = {**both, "function_call": {"name": "g", "arguments": '{"a": "MARKOTHER"}'}}
    _, prompt = asked(front, messages=[ASKS, other, ASKS])
    assert prompt.count("MARKCALL") == prompt.count("MARKOTHER") == 1


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "MARK", "signature": "s"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "MA"}, {"type": "text", "text": "RK"}, 3]},
        {"type": "reasoning", "text": "MARK"},
        {"type": "reasoning", "reasoning": "MARK"},
    ],
)
def test_reasoning_parts_of_the_assistant_are_its_reasoning(part: dict[str, Any]) -> None:
    text = {"type": "text", "text": "Hello."}
    _, message, _ = read(ASKS, {"role": "assistant", "content": [part, text]}, ASKS)
    assert (message.reasoning_content, texts(message)) == ("MARK", ["Hello."])
    _, message, _ = read(ASKS, {"role": "assistant", "content": [part]}, ASKS)
    assert (message.reasoning_content, message.content) == ("MARK", None)
    _, message, _ = read(ASKS, {"role": "assistant", "content": [part, text], "reasoning_content": "Own."}, ASKS)
    assert (message.reasoning_content, texts(message)) == ("Own.", ["Hello."])
    (message,) = read({"role": "user", "content": [part]})
    assert texts(message) == ["MARK"]


def test_reasoning_that_only_its_vendor_can_read_is_skipped(front: FrontEnd) -> None:
    for part in ({"type": "redacted_thinking", "data": "x"}, {"type": "thinking"}, {"type": "reasoning", "text": None}):
        content = [part, {"type": "text", "text": "Hello."}]
        _, message, _ = read(ASKS, {"role": "assistant", "content": content}, ASKS)
        assert (message.reasoning_content, texts(message)) == (None, ["Hello."])
        answer, prompt = asked(front, messages=[ASKS, {"role": "assistant", "content": content}, ASKS])
        assert answer.status_code == 200, answer.text
        assert prompt == asked(front, messages=[ASKS, SAYS, ASKS])[1]


def test_files_of_text_are_shown_in_chat_and_responses(front: FrontEnd) -> None:
    encoded = base64.b64encode("MÄRK".encode()).decode()
    for data in (encoded, f"data:text/plain;base64,{encoded}", f"data:application/json;base64,{encoded}"):
        part = {"type": "file", "file": {"file_data": data, "filename": "a.txt"}}
        answer, prompt = asked(front, messages=[{"role": "user", "content": [part]}])
        assert answer.status_code == 200, answer.text
        assert "user\na.txt\nMÄRK<" in prompt
        item = {"role": "user", "content": [{"type": "input_file", "file_data": data, "filename": "a.txt"}]}
        assert asked(front, RESPONSES, input=[item])[1] == prompt


@pytest.mark.parametrize(
    "part",
    [
        file_of(b"%PDF-1.4 x"),
        file_of(b"a\0b"),
        file_of(b"\xff\xfe"),
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "file", "file": {"file_data": 5}},
        {"type": "file", "file": "x"},
        {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}},
        IMAGE,
    ],
)
def test_a_part_that_is_not_served_is_refused_once_and_then_a_line_of_text(
    front: FrontEnd, part: dict[str, Any]
) -> None:
    bad = {"role": "user", "content": [{"type": "text", "text": "See "}, part]}
    answer, _ = asked(front, messages=[ASKS, SAYS, bad])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages[2].content[1].")
    for later in ([ASKS], [SAYS, ASKS], [SAYS, {"role": "tool", "tool_call_id": "c", "content": "x"}, ASKS]):
        answer, prompt = asked(front, messages=[bad, *later])
        assert answer.status_code == 200, answer.text
        assert "See [a" in prompt
        assert "is left out: this" in prompt


def test_an_image_of_an_earlier_message_is_a_line_of_text_in_every_api(front: FrontEnd) -> None:
    chat = {"role": "user", "content": [IMAGE]}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": IMAGE["image_url"]["url"]}]}
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    turn = {"role": "user", "content": [{"type": "image", "source": source}]}
    prompts = set()
    for path, name, first, more in (
        (CHAT, "messages", chat, {}),
        (RESPONSES, "input", item, {}),
        (MESSAGES, "messages", turn, {"max_tokens": 9}),
    ):
        assert asked(front, path, **{name: [first]}, **more)[0].status_code == 400
        answer, prompt = asked(front, path, **{name: [first, SAYS, ASKS]}, **more)
        assert answer.status_code == 200, answer.text
        prompts.add(prompt)
    (prompt,) = prompts
    assert NO_MEDIA in prompt


def test_images_of_earlier_messages_stay_where_the_model_takes_them() -> None:
    messages = msgspec.convert([{"role": "user", "content": [IMAGE]}, SAYS, ASKS], list[Message])
    (found,) = find_media(messages, MediaSpec(("image",)), "tiny")
    assert found.param == "messages[0].content[0].image_url.url"


def test_files_of_a_request_have_a_limit_together() -> None:
    half = file_of(b"x" * (FILES_BYTES_MAX // 2 - 3))
    (message,) = read({"role": "user", "content": [half, half]})
    assert len("".join(filter(None, texts(message)))) == FILES_BYTES_MAX - 6
    with pytest.raises(RequestError, match=r"messages\[0\].content\[2\].file.file_data") as refused:
        read({"role": "user", "content": [half, half, file_of(b"x" * 9)]})
    assert refused.value.status == 400


def test_messages_of_chat_among_the_items_of_responses_keep_calls_and_results(front: FrontEnd) -> None:
    call = {"id": "c", "type": "function", "function": CALL}
    turns = [
        ASKS,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "MARKRESULT"},
    ]
    answer, prompt = asked(front, RESPONSES, input=turns)
    assert answer.status_code == 200, answer.text
    assert "MARKCALL" in prompt
    assert prompt == asked(front, messages=turns)[1]


def test_instructions_may_be_a_list_of_items(front: FrontEnd) -> None:
    items = [{"role": "system", "content": "Be brief."}]
    answer, prompt = asked(front, RESPONSES, input="hi", instructions=items)
    assert answer.status_code == 200, answer.text
    assert answer.json()["instructions"] == items
    assert prompt == asked(front, RESPONSES, input="hi", instructions="Be brief.")[1]
    assert asked(front, RESPONSES, input="hi", instructions=[])[1] == asked(front, RESPONSES, input="hi")[1]


def test_a_search_of_the_web_is_left_out_and_named(front: FrontEnd) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for tools in (None, [tool]):
        answer, prompt = asked(front, messages=[ASKS], tools=tools, web_search_options={"search_context_size": "low"})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-poolgrid-tools-left-out"] == "web_search_options"
        assert prompt == asked(front, messages=[ASKS], tools=tools)[1]
    assert "x-poolgrid-tools-left-out" not in asked(front, messages=[ASKS], web_search_options=None)[0].headers
