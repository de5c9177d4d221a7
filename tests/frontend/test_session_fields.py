"""Which session a request names, by the headers and fields that clients send."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from poolgrid.frontend.cache_fields import keep_ms_of
from poolgrid.frontend.prepared_request import PreparedRequest
from poolgrid.frontend.schema import Function, Message, ToolCall, chat_decoder, parse_inference
from poolgrid.frontend.session_fields import NAME_CHARS_MAX, answered_by, clean, response_key, session_hint
from poolgrid.frontend.tools import CallIds
from poolgrid.inference.inference_request import NO_HINT, SessionHint
from poolgrid.router.core.lineage import answer_key

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
