"""``/v1/responses`` and what is below it: what of the front end serves it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import Request
from msgspec import UNSET

from poolgrid.plugins.responses_api.conversation import Items, chat_body
from poolgrid.plugins.responses_api.kept import KeptResponses, references
from poolgrid.plugins.responses_api.kept_endpoints import ITEMS_PATH, RESPONSE_PATH, add_kept_response_endpoints
from poolgrid.plugins.responses_api.response_store import TTL_S, ResponseStore
from poolgrid.plugins.responses_api.schema import ResponsesBody
from poolgrid.server.frontend.access.gate import caller_of
from poolgrid.server.frontend.access.tenants import Caller
from poolgrid.server.frontend.api_endpoint import ApiEndpoint, ForwardedPrompt, Kept, PromptFields
from poolgrid.server.frontend.description import (
    BAD_REQUEST,
    COUNT,
    INTEGER,
    ITEM_LIST,
    TEXT,
    TYPED_EVENTS,
    ApiDescription,
    InferenceOperation,
    Operation,
    list_of,
    nullable,
    record,
)
from poolgrid.server.frontend.errors import RESPONSES as WORDS
from poolgrid.server.frontend.errors import unsupported
from poolgrid.server.frontend.front_end import FrontEnd
from poolgrid.server.frontend.inference_endpoint import InferenceEndpoint
from poolgrid.server.frontend.preparation import Preparation
from poolgrid.server.frontend.prepared_request import AnswerForm, PreparedRequest
from poolgrid.server.frontend.schema import parse, refuse
from poolgrid.server.frontend.session_fields import response_key

log = logging.getLogger(__name__)

PATH: Final = "/v1/responses"
COUNT_PATH: Final = "/v1/responses/input_tokens"

FILE: Final = Path("responses") / "responses.sqlite3"
"""Where responses are kept within a data_dir."""

_decoder: Final = msgspec.json.Decoder(ResponsesBody)


def join(front: FrontEnd) -> Mapping[str, InferenceEndpoint]:
    """Add to a front end what is asked of responses that are kept; return what answers with new ones."""
    preparation, kept = front.preparation, _kept_responses(front)

    async def prepared(raw: bytes, caller: Caller | None, answered: bool = True) -> PreparedRequest:
        body = parse_responses(raw)
        whose = front.owner_of(caller)
        form = kept.form(body, whose) if answered else None
        await kept.dereference(body, whose)
        return prepare(preparation, body, await kept.earlier(body, whose), form)

    @front.app.post(COUNT_PATH, tags=["tokenizer"])
    async def count_input_tokens(request: Request) -> dict[str, Any]:
        """Return the number of tokens that a response's prompt has, its images included."""
        raw = await front.bodies.read(request)
        job = await prepared(raw, caller_of(request.scope), answered=False)
        return {"object": "response.input_tokens", "input_tokens": await front.count_prompt(request, raw, job)}

    add_kept_response_endpoints(front.app, kept, lambda request: front.owner_of(caller_of(request.scope)))
    return {PATH: InferenceEndpoint(front, "responses", prepared, WORDS)}


def _kept_responses(front: FrontEnd) -> KeptResponses:
    """Return what keeps responses: on disk with a data_dir or for a group, or in memory."""
    settings = front.settings
    store: ResponseStore | None = None
    if settings.response_store_bytes:
        limits = (settings.response_store_bytes, TTL_S)
        try:
            store = ResponseStore(front.directory(FILE), *limits, front.clock)
        except OSError as error:
            log.error("%s; they are kept in the memory of this process alone", error)
            store = ResponseStore(None, *limits, front.clock)
        front.opened.callback(store.close)
    count = front.metrics.kept_responses
    return KeptResponses(store, settings.max_body_bytes, lambda outcome: count.labels(outcome).inc())


def parse_responses(raw: bytes) -> ResponsesBody:
    """Parse the body of a Responses request; raises ``RequestError``."""
    body = parse(_decoder, raw)
    refuse(body)
    if body.include and "message.output_text.logprobs" in body.include:
        raise unsupported("include", "use /v1/chat/completions for log probabilities")
    return body


def prepare(
    preparation: Preparation, body: ResponsesBody, earlier: Items, form: AnswerForm | None = None
) -> PreparedRequest:
    """Check a Responses request that was parsed, with the items that it continues; raises ``RequestError``."""
    job = preparation.chat_job(chat_body(body, earlier))
    if body.previous_response_id and not job.answer:
        job.answer = response_key(body.previous_response_id)
    job.form = form
    return job


class _ResponsesFields(PromptFields, kw_only=True, omit_defaults=True):
    input: Kept = UNSET
    instructions: Kept = UNSET
    reasoning: Kept = UNSET
    previous_response_id: Kept = UNSET
    conversation: Kept = UNSET
    prompt: Kept = UNSET


def prepare_forwarded(preparation: Preparation, raw: bytes) -> PreparedRequest:
    """Check a Responses request; raises ``RequestError`` for one that continues what its engine keeps."""
    body = parse_responses(raw)
    if body.previous_response_id is not None or any(references(body.input)):
        raise unsupported("previous_response_id", "the engine keeps the conversation")
    return prepare(preparation, body, ())


_ITEM_TEXT = record(type={"enum": ["output_text", "reasoning_text"]}, text=TEXT)
_ITEM = record(
    {"content": list_of(_ITEM_TEXT), "call_id": TEXT, "name": TEXT, "arguments": TEXT},
    id=TEXT,
    type={"enum": ["message", "reasoning", "function_call"]},
    status=TEXT,
)
_RESPONSES_USAGE = record(
    input_tokens=COUNT,
    input_tokens_details=record(cached_tokens=COUNT, cache_write_tokens=COUNT),
    output_tokens=COUNT,
    output_tokens_details=record(reasoning_tokens=COUNT),
    total_tokens=COUNT,
)
_RESPONSE = record(
    id=TEXT,
    object={"const": "response"},
    created_at=INTEGER,
    status={"enum": ["completed", "incomplete"]},
    incomplete_details=nullable(record(reason=TEXT)),
    model=TEXT,
    output=list_of(_ITEM),
    usage=_RESPONSES_USAGE,
)

_GONE: Final = {"404": "No such response is kept", "503": "What is kept cannot be read now"}

RESPONSES: Final = ApiEndpoint(
    join,
    ApiDescription(
        bodies=(ResponsesBody,),
        answers={
            "Response": _RESPONSE,
            "DeletedResponse": record(id=TEXT, object={"const": "response"}, deleted={"const": True}),
            "ItemList": ITEM_LIST,
            "InputTokenCount": record(object={"const": "response.input_tokens"}, input_tokens=COUNT),
        },
        inference=(
            InferenceOperation(PATH, "Answer items with items", "response", ResponsesBody, "Response", TYPED_EVENTS),
        ),
        operations=(
            Operation("post", COUNT_PATH, "InputTokenCount", BAD_REQUEST, ResponsesBody),
            Operation("get", RESPONSE_PATH, "Response", _GONE),
            Operation("delete", RESPONSE_PATH, "DeletedResponse", _GONE),
            Operation("get", ITEMS_PATH, "ItemList", {**_GONE, "400": BAD_REQUEST["400"]}),
        ),
    ),
    {PATH: ForwardedPrompt(_ResponsesFields, prepare_forwarded)},
)
