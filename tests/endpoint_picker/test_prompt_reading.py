"""Bodies of requests that go to engines unchanged: what is read of them, and what is left to the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.endpoint_picker.prompt_reading import CHAT, asked, read, text_of


def test_chats_texts_and_token_ids_become_the_prompt_that_the_engine_makes_of_them() -> None:
    chat = read("/v1/chat/completions", CHAT)
    assert chat.request is not None
    assert asked("/v1/chat/completions?x=1", CHAT) == asked("/v1/chat/completions", CHAT)
    assert text_of(read("/v1/completions", {"model": "tiny", "prompt": "Hello world"})) == "Hello world"
    assert text_of(read("/v1/completions", {"model": "tiny", "prompt": list(range(100, 110))}))


def test_adapter_and_salt_are_read_as_the_client_wrote_them() -> None:
    found = read("/v1/completions", {"model": "poet", "prompt": "x", "cache_salt": "mine"}).request
    assert found is not None
    assert (found.model, found.lora_name, found.cache_salt) == ("tiny", "poet", "mine")


def test_fields_that_shape_no_prompt_are_between_client_and_engine() -> None:
    for more in (
        {"n": 500, "max_tokens": 999_999, "temperature": 77, "use_beam_search": True, "guided_json": 1},
        {"max_tokens": "many", "unheard_of": {"a": [1]}, "stream": "yes"},
    ):
        assert asked("/v1/chat/completions", {**CHAT, **more}) == asked("/v1/chat/completions", CHAT)


def test_tools_are_in_the_prompt_also_where_they_must_not_be_used() -> None:
    tools = {**CHAT, "tools": [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]}
    for choice in ({}, {"tool_choice": "none"}, {"tool_choice": "required"}):
        assert "look_up" in text_of(read("/v1/chat/completions", {**tools, **choice}))


def test_several_prompts_count_together_and_the_first_one_is_compared() -> None:
    found = read("/v1/completions", {"model": "tiny", "prompt": [[5, 6, 7], [8, 9]]})
    assert found.request is not None
    assert (found.isl, len(found.request.token_ids)) == (5, 12)


@pytest.mark.parametrize(
    ("path", "body", "why", "has_text"),
    [
        ("/v1/embeddings", {"model": "tiny", "input": "a text"}, "another API", True),
        ("/v1/completions", b"{", "invalid_json", False),
        ("/v1/completions", b"\xff\xfe", "invalid_json", False),
        ("/v1/completions", {"model": "other", "prompt": "a text"}, "model_not_found", False),
        ("/v1/chat/completions", {"model": "tiny", "messages": []}, "invalid_value", False),
    ],
)
def test_what_cannot_be_tokenized_is_no_error_and_counts_by_its_text_if_it_has_any(
    path: str, body: Any, why: str, has_text: bool
) -> None:
    found = read(path, body)
    assert found.why == why
    assert (found.request is not None) is has_text
    assert found.request is None or found.request.by_text


def test_a_prompt_that_is_too_long_for_the_model_is_left_to_its_server() -> None:
    found = read("/v1/completions", {"model": "tiny", "prompt": "word " * 9000})
    assert found.request is not None
    assert not found.request.by_text
