"""Which session a request names, by the headers and fields that clients send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import anthropic
import msgspec
import openai
import pytest

from poolgrid.kernel.projection.lineage import answer_key
from poolgrid.kernel.requests.inference import NO_HINT, InferenceRequest, SessionHint
from poolgrid.kernel.wire.sessions import SessionTurn
from poolgrid.plugins.messages_api.endpoint import keep_ms_of_messages
from poolgrid.plugins.messages_api.schema import MessagesBody
from poolgrid.plugins.responses_api.endpoint import parse_responses
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.prepared_request import PreparedRequest
from poolgrid.server.frontend.schema import Function, Message, ToolCall, chat_decoder, parse, parse_inference
from poolgrid.server.frontend.session_fields import (
    HOUR_MS,
    NAME_CHARS_MAX,
    answered_by,
    clean,
    keep_ms_of,
    response_key,
    session_hint,
)
from poolgrid.server.frontend.tools import CallIds
from tests.frontend.fake_backend import FakeBackend, Step, speak
from tests.frontend.server import application, served_in_thread

UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"


class Job:
    """What of a prepared request says something of its session."""

    def __init__(self, **fields: Any) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        self.body, self.is_plain = parse_inference(chat_decoder, json.dumps(body).encode())
        self.after_tool, self.answer = answered_by(self.body.messages)
        self.keep_ms = 0 if self.is_plain else keep_ms_of(self.body)


def hint(headers: dict[str, str] | None = None, **fields: Any) -> SessionHint:
    encoded = {name.encode(): value.encode() for name, value in (headers or {}).items()}
    return session_hint(cast(PreparedRequest, Job(**fields)), encoded)


@pytest.mark.parametrize(
    ("headers", "name", "parent"),
    [
        ({"x-dynamo-session-id": "a", "x-dynamo-parent-session-id": "b", "x-session-id": "c"}, "a", "b"),
        ({"x-claude-code-session-id": UUID}, UUID, ""),
        ({"x-claude-code-session-id": UUID, "x-claude-code-agent-id": "sub"}, "sub", UUID),
        ({"thread-id": "t", "x-codex-parent-thread-id": "p", "session_id": "s"}, "t", "p"),
        ({"session_id": "codex"}, "codex", ""),
        ({"x-opencode-session": "ses_1"}, "ses_1", ""),
        ({"x-session-id": "s", "x-parent-session-id": "p"}, "s", "p"),
        ({"x-session-affinity": "s"}, "s", ""),
        ({"x-multi-turn-session-id": "s"}, "s", ""),
        ({"x-correlation-id": "s"}, "s", ""),
    ],
)
def test_a_header_names_the_session(headers: dict[str, str], name: str, parent: str) -> None:
    assert hint(headers) == SessionHint(name, parent)


@pytest.mark.parametrize(
    ("fields", "name", "parent"),
    [
        ({"nvext": {"agent_context": {"session_id": "a", "parent_session_id": "b"}}}, "a", "b"),
        ({"nvext": {"agent_context": {"trajectory_id": "a"}}}, "a", ""),
        ({"nvext": {"session_control": {"session_id": "a"}}}, "a", ""),
        ({"conversation_params": {"conversation_id": "c"}, "prompt_cache_key": "k"}, "c", ""),
        ({"prompt_cache_key": "k"}, "k", ""),
        ({"metadata": {"conversation_id": "c"}}, "c", ""),
        ({"metadata": {"user_id": f"user_1_account__session_{UUID}"}}, UUID, ""),
        ({"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": UUID})}}, UUID, ""),
    ],
)
def test_a_field_names_the_session(fields: dict[str, Any], name: str, parent: str) -> None:
    assert hint(**fields) == SessionHint(name, parent)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"metadata": {"user_id": 7}},
        {"metadata": {"user_id": "[" * 2000}},
        {"metadata": ["session_id"]},
        {"nvext": {"agent_context": "a"}},
        {"prompt_cache_key": ""},
    ],
)
def test_what_names_no_session_is_no_error(fields: dict[str, Any]) -> None:
    assert hint(**fields) is NO_HINT


def test_a_header_wins_over_a_field() -> None:
    assert hint({"x-session-id": "header"}, prompt_cache_key="field").name == "header"


@pytest.mark.parametrize("name", ["two words", "ü", "a" * (NAME_CHARS_MAX + 1), "line\nbreak"])
def test_a_name_that_is_no_short_printable_text_stands_for_itself_by_its_hash(name: str) -> None:
    assert len(clean(name)) == 17
    assert clean(name) == clean(name)
    assert clean(name) != clean(name + "x")


def test_results_of_tools_name_the_answer_that_called_them() -> None:
    call = ToolCall(Function("f", "{}"), id=CallIds("req-7").of(0, 0, "f"))
    messages = [
        Message("user", "hi"),
        Message("assistant", tool_calls=[call]),
        Message("tool", "42", tool_call_id=call.id),
        Message("user", "and?"),
    ]
    assert answered_by(messages) == (True, answer_key("req-7~x1"))
    assert answered_by(messages[:2]) == (False, 0)
    assert answered_by([Message("user", "hi")]) == (False, 0)


@pytest.mark.parametrize("response_id", ["resp_req-7", "resp_req-7_0123456789abcdef01234567"])
def test_a_response_id_names_its_answer(response_id: str) -> None:
    assert response_key(response_id) == answer_key("req-7~x1")


MINUTE_MS = 60_000
HI: Any = [{"role": "user", "content": "hi"}]
CONTROL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
MESSAGES = msgspec.json.Decoder(MessagesBody)
KEPT_TOKENS, CACHED_TOKENS = 9, 2


def of_messages(**fields: Any) -> int:
    body = {"model": "m", "max_tokens": 1, "messages": HI, **fields}
    return keep_ms_of_messages(parse(MESSAGES, msgspec.json.encode(body)))


def of_chat(**fields: Any) -> int:
    body, _ = parse_inference(chat_decoder, msgspec.json.encode({"model": "m", "messages": HI, **fields}))
    return keep_ms_of(body)


def of_responses(**fields: Any) -> int:
    return keep_ms_of(parse_responses(msgspec.json.encode({"model": "m", "input": "hi", **fields})))


def block(control: Any) -> dict[str, Any]:
    return {"type": "text", "text": "hi", "cache_control": control}


@pytest.mark.parametrize(
    ("fields", "keep_ms"),
    [
        ({}, 0),
        ({"messages": [{"role": "user", "content": [block(CONTROL)]}]}, 5 * MINUTE_MS),
        ({"messages": [{"role": "user", "content": [block({**CONTROL, "ttl": "5m", "scope": "global"})]}]}, 300_000),
        ({"messages": [{"role": "user", "content": [block(None), {"type": "text", "text": "hi"}]}]}, 0),
        ({"system": [block(HOUR)], "messages": [{"role": "user", "content": [block(CONTROL)]}]}, HOUR_MS),
        ({"tools": [{"name": "t", "input_schema": {}, "cache_control": HOUR}]}, HOUR_MS),
        ({"cache_control": CONTROL}, 5 * MINUTE_MS),
        ({"messages": [{"role": "user", "content": [block(CONTROL)] * 5 + [block(HOUR)]}]}, HOUR_MS),
    ],
)
def test_a_messages_request_asks_for_the_longest_time_in_it(fields: dict[str, Any], keep_ms: int) -> None:
    assert of_messages(**fields) == keep_ms


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"system": [block({"type": "ephemeral", "ttl": "2h"})]}, "system[0].cache_control.ttl", "allowed is 5m or 1h"),
        ({"system": [block({"type": "ephemeral", "ttl": 300})]}, "system[0].cache_control.ttl", "allowed is 5m or 1h"),
        ({"system": [block({"type": "ephemeral", "ttl": []})]}, "system[0].cache_control.ttl", "allowed is 5m or 1h"),
        (
            {"messages": [{"role": "user", "content": [block(None), block({"type": "for ever"})]}]},
            "messages[0].content[1].cache_control.type",
            "allowed is ephemeral",
        ),
        ({"tools": [{"name": "t", "cache_control": "5m"}]}, "tools[0].cache_control", "allowed is an object"),
        ({"cache_control": {}}, "cache_control.type", "allowed is ephemeral"),
    ],
)
def test_a_malformed_cache_control_is_refused_by_its_place(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        of_messages(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "keep_ms"),
    [
        ({}, 0),
        ({"prompt_cache_key": "k"}, 0),
        ({"prompt_cache_retention": "in_memory"}, 5 * MINUTE_MS),
        ({"prompt_cache_retention": "in-memory"}, 5 * MINUTE_MS),
        ({"prompt_cache_retention": "24h"}, 24 * HOUR_MS),
        ({"prompt_cache_retention": None}, 0),
        ({"prompt_cache_options": {}}, 30 * MINUTE_MS),
        ({"prompt_cache_options": {"ttl": "12h", "mode": "implicit"}}, 12 * HOUR_MS),
        ({"prompt_cache_options": {"mode": "explicit", "ttl": "12h"}}, 0),
        ({"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}, 24 * HOUR_MS),
        ({"nvext": {"cache_control": HOUR}}, HOUR_MS),
    ],
)
def test_chats_and_responses_ask_by_the_fields_of_openai(fields: dict[str, Any], keep_ms: int) -> None:
    assert of_chat(**fields) == of_responses(**fields) == keep_ms


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_retention": "2h"}, "prompt_cache_retention"),
        ({"prompt_cache_retention": 24}, "prompt_cache_retention"),
        ({"prompt_cache_options": "30m"}, "prompt_cache_options"),
        ({"prompt_cache_options": {"ttl": "5m"}}, "prompt_cache_options.ttl"),
        ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "1d"}}}, "nvext.cache_control.ttl"),
    ],
)
def test_a_malformed_field_of_openai_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    for keep in (of_chat, of_responses):
        with pytest.raises(RequestError) as refused:
            keep(**fields)
        assert (refused.value.status, refused.value.param) == (400, param)


# -- usage -------------------------------------------------------------------------------------------------------------


def kept(request: InferenceRequest) -> list[Step]:
    """Play a worker that keeps some of each prompt that asks for it."""
    if request.session.keep_ms:
        request.turn = SessionTurn("s", keep_ms=request.session.keep_ms, keep_tokens=KEPT_TOKENS)
    return speak("Hello", cached_tokens=CACHED_TOKENS)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_in_thread(application(FakeBackend(kept))) as at:
        yield at


def test_anthropics_usage_has_what_is_newly_kept_by_its_time(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:

        def ask(control: Any) -> Any:
            message = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": control}]}
            asked: Any = {"model": "tiny", "max_tokens": 100, "messages": [message]}
            whole = client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                final = stream.get_final_message().usage
            assert final.cache_creation_input_tokens == whole.usage.cache_creation_input_tokens
            assert final.input_tokens == whole.usage.input_tokens
            assert final.cache_creation is None or not whole.usage.cache_creation_input_tokens, "never a wrong zero"
            return whole.usage

        plain, minutes, hour = ask(None), ask(CONTROL), ask(HOUR)
    assert [each.cache_read_input_tokens for each in (plain, minutes, hour)] == [CACHED_TOKENS] * 3
    assert [each.cache_creation_input_tokens for each in (plain, minutes, hour)] == [0, 7, 7]
    assert [each.cache_creation.ephemeral_5m_input_tokens for each in (plain, minutes, hour)] == [0, 7, 0]
    assert [each.cache_creation.ephemeral_1h_input_tokens for each in (plain, minutes, hour)] == [0, 0, 7]
    assert plain.input_tokens == minutes.input_tokens + 7 == hour.input_tokens + 7


def test_openais_usage_has_what_is_newly_kept_where_a_request_asks(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chats = client.chat.completions
        plain = chats.create(model="tiny", messages=HI).usage
        asked = chats.create(model="tiny", messages=HI, prompt_cache_retention="24h", n=2).usage
        response = client.responses.create(model="tiny", input="hi", prompt_cache_options={"ttl": "30m"}).usage
        unasked = client.responses.create(model="tiny", input="hi").usage

    assert plain is not None
    assert plain.prompt_tokens_details is not None
    assert plain.prompt_tokens_details.to_dict() == {"cached_tokens": CACHED_TOKENS}
    assert asked is not None
    assert asked.prompt_tokens_details is not None
    assert asked.prompt_tokens_details.cache_write_tokens == 7
    assert response is not None
    assert response.input_tokens_details.cache_write_tokens == 7
    assert unasked is not None
    assert unasked.input_tokens_details.cache_write_tokens == 0
