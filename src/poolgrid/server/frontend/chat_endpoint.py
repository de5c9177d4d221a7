"""Chats and text completions, as OpenAI has them: the API that each front end has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import UNSET, Struct

from poolgrid.server.frontend.api_endpoint import ApiEndpoint, ForwardedPrompt, Kept, PromptFields
from poolgrid.server.frontend.description import (
    COUNT,
    INTEGER,
    NUMBER,
    TEXT,
    ApiDescription,
    InferenceOperation,
    Schema,
    list_of,
    nullable,
    record,
)
from poolgrid.server.frontend.front_end import FrontEnd
from poolgrid.server.frontend.inference_endpoint import InferenceEndpoint
from poolgrid.server.frontend.preparation import Preparation
from poolgrid.server.frontend.schema import ChatBody, CompletionBody

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETION_PATH: Final = "/v1/completions"


def join(front: FrontEnd) -> Mapping[str, InferenceEndpoint]:
    """Return the endpoints of a front end."""
    preparation = front.preparation
    return {
        CHAT_PATH: InferenceEndpoint(front, "chat_completions", lambda raw, caller: preparation.chat(raw)),
        COMPLETION_PATH: InferenceEndpoint(front, "completions", lambda raw, caller: preparation.completion(raw)),
    }


class _ChatFields(PromptFields, kw_only=True, omit_defaults=True):
    messages: Kept = UNSET
    documents: Kept = UNSET
    reasoning_effort: Kept = UNSET
    add_generation_prompt: Kept = UNSET
    continue_final_message: Kept = UNSET
    add_special_tokens: Kept = UNSET


class _CompletionFields(Struct, kw_only=True, omit_defaults=True):
    model: Kept = UNSET
    cache_salt: Kept = UNSET
    prompt: Kept = UNSET
    add_special_tokens: Kept = UNSET


_USAGE = record(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=record({"cache_write_tokens": COUNT}, cached_tokens=COUNT),
)
_TOKEN = record(token=TEXT, logprob=NUMBER, bytes=list_of(INTEGER))
_CHAT_LOGPROBS = record(
    content=list_of({"allOf": [_TOKEN, record(top_logprobs=list_of(_TOKEN))]}), refusal={"type": "null"}
)
_COMPLETION_LOGPROBS = record(
    tokens=list_of(TEXT),
    token_logprobs=list_of(nullable(NUMBER)),
    top_logprobs=list_of(nullable({"type": "object", "additionalProperties": NUMBER})),
    text_offset=list_of(INTEGER),
)
_TOOL_CALL = record(id=TEXT, type={"const": "function"}, function=record(name=TEXT, arguments=TEXT))
_MESSAGE = record(
    {"reasoning_content": TEXT, "tool_calls": list_of(_TOOL_CALL)},
    role={"const": "assistant"},
    content=nullable(TEXT),
    refusal={"type": "null"},
)
_CHAT_CHOICE = record(
    index=COUNT,
    message=_MESSAGE,
    logprobs=nullable(_CHAT_LOGPROBS),
    finish_reason={"enum": ["stop", "length", "tool_calls"]},
)
_COMPLETION_CHOICE = record(
    index=COUNT, text=TEXT, logprobs=nullable(_COMPLETION_LOGPROBS), finish_reason={"enum": ["stop", "length"]}
)


def _answer(kind: str, choice: Schema) -> Schema:
    return record(id=TEXT, object={"const": kind}, created=INTEGER, model=TEXT, choices=list_of(choice), usage=_USAGE)


_DONE: Final = "server-sent events that end with `data: [DONE]`"

CHAT: Final = ApiEndpoint(
    join,
    ApiDescription(
        bodies=(ChatBody, CompletionBody),
        answers={
            "ChatCompletion": _answer("chat.completion", _CHAT_CHOICE),
            "Completion": _answer("text_completion", _COMPLETION_CHOICE),
        },
        inference=(
            InferenceOperation(CHAT_PATH, "Answer a conversation", "chat", ChatBody, "ChatCompletion", _DONE),
            InferenceOperation(COMPLETION_PATH, "Continue prompts", "completion", CompletionBody, "Completion", _DONE),
        ),
    ),
    {
        CHAT_PATH: ForwardedPrompt(_ChatFields, Preparation.chat),
        COMPLETION_PATH: ForwardedPrompt(_CompletionFields, Preparation.completion),
    },
)
