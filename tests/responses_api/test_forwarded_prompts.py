"""Prompts of Responses requests that go to engines unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from tests.endpoint_picker.prompt_reading import CHAT, read, text_of


def test_responses_become_the_prompt_that_the_same_chat_has() -> None:
    function = {"name": "look_up", "parameters": {"type": "object", "properties": {}}}
    call = {"name": "look_up", "arguments": "{}"}
    chat = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be brief."},
            *CHAT["messages"],
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "c", "content": "It routes."},
        ],
        "tools": [{"type": "function", "function": function}],
    }
    response = {
        "model": "tiny",
        "instructions": "Be brief.",
        "input": [
            *CHAT["messages"],
            {"type": "function_call", "call_id": "c", **call},
            {"type": "function_call_output", "call_id": "c", "output": "It routes."},
        ],
        "tools": [{"type": "function", **function}],
        "store": False,
        "max_output_tokens": "many",
        "include": ["message.output_text.logprobs"],
    }
    assert text_of(read("/v1/responses", response)) == text_of(read("/v1/chat/completions", chat))
    assert text_of(read("/v1/responses", {"model": "tiny", "input": "What is a router?"})) == text_of(
        read("/v1/chat/completions", CHAT)
    )


ITEM = {"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_1"}]}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"previous_response_id": "r"}, "kept"),
        ({"conversation": "c"}, "kept"),
        (ITEM, "kept"),
        ({"input": []}, "invalid_value"),
    ],
)
def test_what_cannot_be_tokenized_counts_by_its_text_if_it_has_any(body: dict[str, Any], why: str) -> None:
    found = read("/v1/responses", {"model": "tiny", "input": "a text", **body})
    assert found.why == why
    assert (found.request is not None) is (why == "kept")
    assert found.request is None or found.request.by_text
