"""``/v1/messages`` and ``/v1/messages/count_tokens``: what of the front end serves them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import msgspec
from fastapi import Request
from msgspec import UNSET

from poolgrid.plugins.messages_api.cache_lifetime import keep_ms_of_messages
from poolgrid.plugins.messages_api.conversation import chat_body
from poolgrid.plugins.messages_api.encoder import MessagesEncoder
from poolgrid.plugins.messages_api.schema import CountedBody, MessagesBody
from poolgrid.server.frontend.api_endpoint import ApiEndpoint, ForwardedPrompt, Kept, PromptFields
from poolgrid.server.frontend.description import (
    BAD_REQUEST,
    COUNT,
    TEXT,
    TYPED_EVENTS,
    ApiDescription,
    InferenceOperation,
    Operation,
    list_of,
    nullable,
    record,
)
from poolgrid.server.frontend.errors import ANTHROPIC
from poolgrid.server.frontend.front_end import FrontEnd
from poolgrid.server.frontend.inference_endpoint import InferenceEndpoint
from poolgrid.server.frontend.preparation import Preparation
from poolgrid.server.frontend.prepared_request import AnswerForm, PreparedRequest
from poolgrid.server.frontend.schema import parse, refuse

PATH: Final = "/v1/messages"
COUNT_PATH: Final = "/v1/messages/count_tokens"

_messages_decoder: Final = msgspec.json.Decoder(MessagesBody)
_counted_decoder: Final = msgspec.json.Decoder(CountedBody)


def join(front: FrontEnd) -> Mapping[str, InferenceEndpoint]:
    """Add the count of tokens to a front end; return what answers messages."""
    preparation = front.preparation

    @front.app.post(COUNT_PATH, tags=["tokenizer"])
    async def count_tokens(request: Request) -> dict[str, Any]:
        """Return the number of tokens that a request's prompt has, its images included."""
        raw = await front.bodies.read(request)
        return {"input_tokens": await front.count_prompt(request, raw, prepare_counted(preparation, raw))}

    return {
        PATH: InferenceEndpoint(front, "messages", lambda raw, caller: prepare(preparation, raw), ANTHROPIC),
    }


def prepare(preparation: Preparation, raw: bytes) -> PreparedRequest:
    """Check the body of a Messages request; raises ``RequestError``."""
    body = parse(_messages_decoder, raw)
    refuse(body)
    job = preparation.chat_job(chat_body(body), lenient=True)
    job.keep_ms = max(job.keep_ms, keep_ms_of_messages(body))
    job.form = AnswerForm(partial(MessagesEncoder, body, job.keep_ms))
    return job


def prepare_counted(preparation: Preparation, raw: bytes) -> PreparedRequest:
    """Check the body of a request to count the tokens of messages; raises ``RequestError``."""
    body = parse(_counted_decoder, raw)
    refuse(body)
    return preparation.chat_job(chat_body(body), lenient=True)


class _MessagesFields(PromptFields, kw_only=True, omit_defaults=True):
    messages: Kept = UNSET
    system: Kept = UNSET
    thinking: Kept = UNSET
    max_tokens: Kept = UNSET


_BLOCK = record(
    {"text": TEXT, "thinking": TEXT, "signature": TEXT, "id": TEXT, "name": TEXT, "input": {"type": "object"}},
    type={"enum": ["text", "thinking", "tool_use"]},
)
_MESSAGE_USAGE = record(
    input_tokens=COUNT,
    cache_creation_input_tokens=COUNT,
    cache_creation=record(ephemeral_5m_input_tokens=COUNT, ephemeral_1h_input_tokens=COUNT),
    cache_read_input_tokens=COUNT,
    output_tokens=COUNT,
)
_ANTHROPIC_MESSAGE = record(
    id=TEXT,
    type={"const": "message"},
    role={"const": "assistant"},
    model=TEXT,
    content=list_of(_BLOCK),
    stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
    stop_sequence=nullable(TEXT),
    usage=_MESSAGE_USAGE,
)
_MESSAGE_ERROR = record(
    type={"const": "error"},
    error=record({"param": nullable(TEXT), "code": nullable(TEXT)}, type=TEXT, message=TEXT),
    request_id=TEXT,
)

MESSAGES: Final = ApiEndpoint(
    join,
    ApiDescription(
        bodies=(MessagesBody, CountedBody),
        answers={
            "AnthropicMessage": _ANTHROPIC_MESSAGE,
            "MessageCount": record(input_tokens=COUNT),
            "MessageError": _MESSAGE_ERROR,
        },
        inference=(
            InferenceOperation(
                PATH,
                "Answer a conversation in Anthropic's form",
                "message",
                MessagesBody,
                "AnthropicMessage",
                TYPED_EVENTS,
                "MessageError",
            ),
        ),
        operations=(Operation("post", COUNT_PATH, "MessageCount", BAD_REQUEST, CountedBody, "MessageError"),),
    ),
    {PATH: ForwardedPrompt(_MessagesFields, prepare)},
)
