"""Bodies of requests that go to engines unchanged: what is read of them, and what is left to the engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from poolgrid.kernel.requests.inference import InferenceRequest, ServedModel
from poolgrid.server.frontend.access.tenants import CacheDomains
from poolgrid.server.frontend.preparation import Preparation
from poolgrid.server.frontend.settings import FrontendSettings
from poolgrid.server.frontend.tokenization import TokenizationPool
from poolgrid.server.proxy.prompt_reading import PromptReader, PromptReading
from tests.frontend.fake_backend import TINY
from tests.frontend.inference_requests import fields_of

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "What is a router?"}]}


class Backend:
    def models(self) -> list[ServedModel]:
        return [ServedModel("tiny", 0, 4096, ("poet",))]

    async def submit(self, request: InferenceRequest) -> Any:
        raise AssertionError("nothing is sent")


def read(path: str, body: bytes | dict[str, Any]) -> PromptReading:
    async def whole() -> PromptReading:
        tokenization = TokenizationPool(1, 1, 10_000)
        preparation = Preparation(Backend(), {"tiny": TINY}, FrontendSettings())
        try:
            reader = PromptReader(preparation, tokenization, CacheDomains(isolate=False), 10_000)
            return await reader.read(path, body if isinstance(body, bytes) else json.dumps(body).encode(), "r")
        finally:
            tokenization.close()

    return asyncio.run(whole())


def asked(path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = read(path, body).request
    assert request is not None
    return fields_of(request)


def text_of(reading: PromptReading) -> str:
    assert reading.request is not None, reading.why
    assert reading.isl == len(reading.request.token_ids) // 4
    return TINY.decode(reading.request.token_ids)


def test_chats_texts_token_ids_and_messages_become_the_prompt_that_the_engine_makes_of_them() -> None:
    chat = read("/v1/chat/completions", CHAT)
    assert chat.request is not None
    assert asked("/v1/chat/completions?x=1", CHAT) == asked("/v1/chat/completions", CHAT)
    messages = {**CHAT, "max_tokens": 5, "stop_sequences": ["x"]}
    same = read("/v1/messages", messages)
    assert same.request is not None
    assert same.request.token_ids == chat.request.token_ids
    line = "x-anthropic-billing-header: cc_version=2.1; cch=36ee5;"
    blocks = [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}]
    turns = [*CHAT["messages"], {"role": "system", "content": "MARKSYSTEM"}]
    agent = read("/v1/messages", {**messages, "messages": turns, "system": blocks})
    chat = read("/v1/chat/completions", {**CHAT, "messages": [{"role": "system", "content": "Be brief."}, *turns]})
    assert text_of(agent) == text_of(chat)
    assert text_of(read("/v1/completions", {"model": "tiny", "prompt": "Hello world"})) == "Hello world"
    assert text_of(read("/v1/completions", {"model": "tiny", "prompt": list(range(100, 110))}))


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


ITEM = {"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_1"}]}


@pytest.mark.parametrize(
    ("path", "body", "why", "has_text"),
    [
        ("/v1/embeddings", {"model": "tiny", "input": "a text"}, "another API", True),
        ("/v1/completions", b"{", "invalid_json", False),
        ("/v1/completions", b"\xff\xfe", "invalid_json", False),
        ("/v1/completions", {"model": "other", "prompt": "a text"}, "model_not_found", False),
        ("/v1/chat/completions", {"model": "tiny", "messages": []}, "invalid_value", False),
        (
            "/v1/responses",
            {"model": "tiny", "input": "a text", "previous_response_id": "r"},
            "kept",
            True,
        ),
        ("/v1/responses", {"model": "tiny", "input": "a text", "conversation": "c"}, "kept", True),
        ("/v1/responses", {"model": "tiny", **ITEM}, "kept", True),
        ("/v1/responses", {"model": "tiny", "input": []}, "invalid_value", False),
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
