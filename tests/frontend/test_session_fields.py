"""Which session a request names, by the headers and fields that clients send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import openai
import pytest

from poolgrid.kernel.projection.lineage import answer_key
from poolgrid.kernel.requests.inference import NO_HINT, SessionHint
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.prepared_request import PreparedRequest
from poolgrid.server.frontend.schema import Function, Message, ToolCall, chat_decoder, parse_inference
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
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.kept_prompts import CACHED_TOKENS, kept
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


def of_chat(**fields: Any) -> int:
    body, _ = parse_inference(chat_decoder, msgspec.json.encode({"model": "m", "messages": HI, **fields}))
    return keep_ms_of(body)


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
def test_chats_ask_by_the_fields_of_openai(fields: dict[str, Any], keep_ms: int) -> None:
    assert of_chat(**fields) == keep_ms


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
    with pytest.raises(RequestError) as refused:
        of_chat(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


# -- usage -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_in_thread(application(FakeBackend(kept))) as at:
        yield at


def test_openais_usage_has_what_is_newly_kept_where_a_request_asks(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chats = client.chat.completions
        plain = chats.create(model="tiny", messages=HI).usage
        asked = chats.create(model="tiny", messages=HI, prompt_cache_retention="24h", n=2).usage

    assert plain is not None
    assert plain.prompt_tokens_details is not None
    assert plain.prompt_tokens_details.to_dict() == {"cached_tokens": CACHED_TOKENS}
    assert asked is not None
    assert asked.prompt_tokens_details is not None
    assert asked.prompt_tokens_details.cache_write_tokens == 7
