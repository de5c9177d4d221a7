"""``null`` asks for nothing, at every depth of a body: it means what the absence of the field means."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.frontend.fake_backend import FakeBackend, speak
from tests.frontend.server import FrontEnd, front_end

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "f", "description": "Says it.", "strict": True, "parameters": SCHEMA}
SAMPLING = {
    "stream": False,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "seed": 1,
    "stop": ["x"],
    "cache_salt": "s",
    "nvext": {
        "agent_hints": {"priority": 1, "osl": 3},
        "cache_salt": "s",
        "kv_cache_retention_config": {
            "token_range_retention_configs": [{"token_start": 0, "token_end": 2, "priority": 1, "duration_ms": 3}],
            "decode_retention_priority": 3,
        },
    },
}
CHAT = {
    **SAMPLING,
    "model": "tiny",
    "messages": [
        {"role": "system", "name": "n", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Moment.",
            "reasoning_content": "Look.",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "d", "type": "custom", "custom": {"name": "g", "input": "x"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ],
    "stream_options": {"include_usage": False, "continuous_usage_stats": False},
    "logit_bias": {"3": 1},
    "logprobs": True,
    "top_logprobs": 1,
    "logits_processors": [{"name": "p", "arguments": {}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}},
    "tools": [
        {"type": "function", "function": FUNCTION},
        {"type": "custom", "custom": {"name": "g", "description": "d", "format": {"type": "text"}}},
    ],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "f"}}]}},
    "parallel_tool_calls": False,
    "chat_template_kwargs": {},
    "metadata": {"a": "b"},
}
RESPONSES = {
    **SAMPLING,
    "model": "tiny",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Look."}], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": "Moment.", "phase": "final"},
        {"type": "function_call", "call_id": "c", "namespace": "n", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
    ],
    "instructions": "Be brief.",
    "tools": [
        {"type": "function", **FUNCTION},
        {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", **FUNCTION}]},
        {"type": "custom", "name": "g", "description": "d", "format": {"type": "grammar", "definition": "d"}},
        {"type": "tool_search", "execution": "client", "description": "d"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "a", "strict": True, "schema": SCHEMA}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": [],
    "metadata": {"a": "b"},
    "store": False,
}
MESSAGES = {
    "model": "tiny",
    "max_tokens": 9,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "metadata": {"user_id": "u"},
    "nvext": SAMPLING["nvext"],
}
OPAQUE = ("parameters", "schema", "input_schema", "metadata", "arguments")
"""Objects whose fields are the client's own: a schema may say ``null``."""


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*path, name)
            if name not in OPAQUE:
                yield from places(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*path, index))


def changed(body: dict[str, Any], place: tuple[str | int, ...], absent: bool) -> dict[str, Any]:
    body = copy.deepcopy(body)
    at: Any = body
    for step in place[:-1]:
        at = at[step]
    if absent:
        del at[place[-1]]
    else:
        at[place[-1]] = None
    return body


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with front_end() as opened:
        yield opened


def outcome(front: FrontEnd, path: str, body: dict[str, Any]) -> Any:
    backend = FakeBackend(lambda _: speak("Fine."))
    answer = front.post(backend, path, json=body)
    if answer.status_code != 200:
        return answer.status_code
    (request,) = backend.requests
    return request.token_ids, request.sampling, request.priority, request.cache_salt, request.retention


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", RESPONSES),
        ("/v1/messages", MESSAGES),
        ("/v1/completions", {**SAMPLING, "model": "tiny", "prompt": "hi", "stream_options": {"include_usage": False}}),
    ],
)
def test_null_means_what_absence_means(front: FrontEnd, path: str, body: dict[str, Any]) -> None:
    assert isinstance(outcome(front, path, body), tuple)
    differing = [
        place
        for place in places(body)
        if outcome(front, path, changed(body, place, absent=False))
        != outcome(front, path, changed(body, place, absent=True))
    ]
    assert differing == []


def test_nulls_beside_whole_numbers_written_as_floats(front: FrontEnd) -> None:
    body = {**CHAT, "top_k": 3.0, "stream_options": {"include_usage": None}, "nvext": {"agent_hints": {"osl": 3.0}}}
    assert isinstance(outcome(front, "/v1/chat/completions", body), tuple)
