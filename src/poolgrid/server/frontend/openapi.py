"""The content of the OpenAPI page, generated from the same structs that parse requests and encode answers.

``GET /v1/fleet``: who of a deployment has a name, for operators. It is there where a process has names itself.

JSON schemas of the answers, for the OpenAPI page; a test holds real answers against them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI

from poolgrid.kernel.wire.answers import FleetList
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.messages_api.schema import CountedBody, MessagesBody
from poolgrid.server.frontend.responses_api.conversation import ResponsesBody
from poolgrid.server.frontend.responses_api.kept import ITEMS_PATH, RESPONSE_PATH
from poolgrid.server.frontend.schema import ChatBody, CompletionBody
from poolgrid.server.frontend.tasks.schema import EmbeddingBody, ImageBody, VideoBody
from poolgrid.server.frontend.tasks.videos import IMAGE_CONTENT_PATH, VIDEO_CONTENT_PATH, VIDEO_PATH, VIDEOS_PATH
from poolgrid.server.frontend.tokenizer_endpoints import (
    DETOKENIZE_PATH,
    MESSAGES_COUNT_PATH,
    RESPONSES_COUNT_PATH,
    TOKENIZE_PATH,
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    Tokenized,
)

Schema = dict[str, Any]


def _object(optional: Mapping[str, Schema] | None = None, /, **required: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}

_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_nullable(_TEXT), code=_nullable(_TEXT)))
_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object({"cache_write_tokens": _COUNT}, cached_tokens=_COUNT),
)
_TOKEN = _object(token=_TEXT, logprob=_NUMBER, bytes=_list(_INTEGER))
_CHAT_LOGPROBS = _object(
    content=_list({"allOf": [_TOKEN, _object(top_logprobs=_list(_TOKEN))]}), refusal={"type": "null"}
)
_COMPLETION_LOGPROBS = _object(
    tokens=_list(_TEXT),
    token_logprobs=_list(_nullable(_NUMBER)),
    top_logprobs=_list(_nullable({"type": "object", "additionalProperties": _NUMBER})),
    text_offset=_list(_INTEGER),
)
_TOOL_CALL = _object(id=_TEXT, type={"const": "function"}, function=_object(name=_TEXT, arguments=_TEXT))
_MESSAGE = _object(
    {"reasoning_content": _TEXT, "tool_calls": _list(_TOOL_CALL)},
    role={"const": "assistant"},
    content=_nullable(_TEXT),
    refusal={"type": "null"},
)
_CHAT_CHOICE = _object(
    index=_COUNT,
    message=_MESSAGE,
    logprobs=_nullable(_CHAT_LOGPROBS),
    finish_reason={"enum": ["stop", "length", "tool_calls"]},
)
_COMPLETION_CHOICE = _object(
    index=_COUNT, text=_TEXT, logprobs=_nullable(_COMPLETION_LOGPROBS), finish_reason={"enum": ["stop", "length"]}
)


def _answer(kind: str, choice: Schema) -> Schema:
    return _object(id=_TEXT, object={"const": kind}, created=_INTEGER, model=_TEXT, choices=_list(choice), usage=_USAGE)


_ITEM_TEXT = _object(type={"enum": ["output_text", "reasoning_text"]}, text=_TEXT)
_ITEM = _object(
    {"content": _list(_ITEM_TEXT), "call_id": _TEXT, "name": _TEXT, "arguments": _TEXT},
    id=_TEXT,
    type={"enum": ["message", "reasoning", "function_call"]},
    status=_TEXT,
)
_RESPONSES_USAGE = _object(
    input_tokens=_COUNT,
    input_tokens_details=_object(cached_tokens=_COUNT, cache_write_tokens=_COUNT),
    output_tokens=_COUNT,
    output_tokens_details=_object(reasoning_tokens=_COUNT),
    total_tokens=_COUNT,
)
_RESPONSE = _object(
    id=_TEXT,
    object={"const": "response"},
    created_at=_INTEGER,
    status={"enum": ["completed", "incomplete"]},
    incomplete_details=_nullable(_object(reason=_TEXT)),
    model=_TEXT,
    output=_list(_ITEM),
    usage=_RESPONSES_USAGE,
)
_BLOCK = _object(
    {"text": _TEXT, "thinking": _TEXT, "signature": _TEXT, "id": _TEXT, "name": _TEXT, "input": {"type": "object"}},
    type={"enum": ["text", "thinking", "tool_use"]},
)
_MESSAGE_USAGE = _object(
    input_tokens=_COUNT,
    cache_creation_input_tokens=_COUNT,
    cache_creation=_object(ephemeral_5m_input_tokens=_COUNT, ephemeral_1h_input_tokens=_COUNT),
    cache_read_input_tokens=_COUNT,
    output_tokens=_COUNT,
)
_ANTHROPIC_MESSAGE = _object(
    id=_TEXT,
    type={"const": "message"},
    role={"const": "assistant"},
    model=_TEXT,
    content=_list(_BLOCK),
    stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
    stop_sequence=_nullable(_TEXT),
    usage=_MESSAGE_USAGE,
)
_MESSAGE_ERROR = _object(
    type={"const": "error"},
    error=_object({"param": _nullable(_TEXT), "code": _nullable(_TEXT)}, type=_TEXT, message=_TEXT),
    request_id=_TEXT,
)
_ITEM_LIST = _object(
    object={"const": "list"},
    data=_list({"type": "object"}),
    first_id=_nullable(_TEXT),
    last_id=_nullable(_TEXT),
    has_more={"type": "boolean"},
)
_EMBEDDING = _object(object={"const": "embedding"}, index=_COUNT, embedding={"anyOf": [_list(_NUMBER), _TEXT]})
_RESULT_PLACE = _object({"url": _TEXT, "b64_json": _TEXT, "output_format": _TEXT})
_VIDEO = _object(
    {
        "created_at": _INTEGER,
        "created": _INTEGER,
        "completed_at": _nullable(_INTEGER),
        "expires_at": _nullable(_INTEGER),
        "prompt": _TEXT,
        "seconds": _TEXT,
        "size": _TEXT,
        "data": _list(_RESULT_PLACE),
        "error": _nullable(_object(code=_TEXT, message=_TEXT)),
        "inference_time_s": _NUMBER,
    },
    id=_TEXT,
    object={"const": "video"},
    model=_TEXT,
    status={"enum": ["queued", "in_progress", "completed", "failed"]},
    progress=_COUNT,
)
_MODEL = _object(
    {"parent": _TEXT},
    id=_TEXT,
    object={"const": "model"},
    created=_INTEGER,
    owned_by=_TEXT,
    root=_TEXT,
    max_model_len=_nullable(_COUNT),
)

ANSWERS: Mapping[str, Schema] = {
    "Error": _ERROR,
    "ChatCompletion": _answer("chat.completion", _CHAT_CHOICE),
    "Completion": _answer("text_completion", _COMPLETION_CHOICE),
    "Response": _RESPONSE,
    "DeletedResponse": _object(id=_TEXT, object={"const": "response"}, deleted={"const": True}),
    "ItemList": _ITEM_LIST,
    "AnthropicMessage": _ANTHROPIC_MESSAGE,
    "MessageCount": _object(input_tokens=_COUNT),
    "InputTokenCount": _object(object={"const": "response.input_tokens"}, input_tokens=_COUNT),
    "MessageError": _MESSAGE_ERROR,
    "EmbeddingList": _object(
        object={"const": "list"},
        data=_list(_EMBEDDING),
        model=_TEXT,
        usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "ImageList": _object(created=_INTEGER, data=_list(_RESULT_PLACE), output_format=_nullable(_TEXT)),
    "Video": _VIDEO,
    "DeletedVideo": _object(id=_TEXT, object={"const": "video.deleted"}, deleted={"const": True}),
    "Model": _MODEL,
    "ModelList": _object(object={"const": "list"}, data=_list({"$ref": "#/components/schemas/Model"})),
}
"""By the name of the component."""


_BAD_REQUEST = {
    "400": "A field is wrong or not supported; `param` names it",
    "401": "The server has API keys, and the request has no good one",
    "403": "The API key does not open this model or feature",
    "404": "No such model",
    "413": "The body is too large",
    "415": "The body is neither application/json nor, with a content-encoding, gzip",
    "429": "Busy, or over a limit of the tenant; come back after Retry-After seconds",
    "503": "No worker can serve the model now",
}
_STATUSES = {**_BAD_REQUEST, "422": "Workers were lost with the request", "500": "Generation failed"}

BODIES = (
    ChatBody,
    CompletionBody,
    ResponsesBody,
    MessagesBody,
    CountedBody,
    TokenizeBody,
    DetokenizeBody,
    Tokenized,
    Detokenized,
    EmbeddingBody,
    ImageBody,
    VideoBody,
)
"""Bodies and answers that are structs; each becomes a component of its name, with all that is in it."""


_DONE = "server-sent events that end with `data: [DONE]`"
_TYPED = "typed server-sent events"
_GONE = {"404": "No such response is kept", "503": "What is kept cannot be read now"}
_NO_RESULT = {"404": "No such result is kept", "400": "It is not completed, or a parameter is wrong"}


def describe_inference(app: FastAPI) -> None:
    """Add to the application's OpenAPI description what FastAPI cannot see of it."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(generated())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the description


def _completed(description: dict[str, Any]) -> dict[str, Any]:
    described, components = msgspec.json.schema_components(BODIES, ref_template="#/components/schemas/{name}")
    bodies = dict(zip(BODIES, described, strict=True))
    for component in components.values():
        _admit_nulls(component)
    description.setdefault("components", {}).setdefault("schemas", {}).update({**components, **ANSWERS})
    paths = description["paths"]
    for path, summary, name, body, answer, events, error in (
        ("chat/completions", "Answer a conversation", "chat", ChatBody, "ChatCompletion", _DONE, "Error"),
        ("completions", "Continue prompts", "completion", CompletionBody, "Completion", _DONE, "Error"),
        ("responses", "Answer items with items", "response", ResponsesBody, "Response", _TYPED, "Error"),
        ("messages", "Answer a conversation in Anthropic's form", "message", MessagesBody, "AnthropicMessage", _TYPED,
         "MessageError"),
        ("embeddings", "Embed texts", "embedding", EmbeddingBody, "EmbeddingList", "", "Error"),
        ("images/generations", "Make images", "image", ImageBody, "ImageList", "", "Error"),
    ):  # fmt: skip
        paths[f"/v1/{path}"] = {"post": _inference(summary, name, bodies[body], answer, events, error)}
    begin = _inference(
        "Begin a video, or with `response_format` make it", "video", bodies[VideoBody], "Video", "", "Error"
    )
    paths[VIDEOS_PATH]["post"] = begin
    tokenized, detokenized, bad = bodies[Tokenized], bodies[Detokenized], {"400": _STATUSES["400"]}
    for path, method, taken, answered, statuses, error in (
        (TOKENIZE_PATH, "post", TokenizeBody, tokenized, _BAD_REQUEST, "Error"),
        (DETOKENIZE_PATH, "post", DetokenizeBody, detokenized, _BAD_REQUEST, "Error"),
        (MESSAGES_COUNT_PATH, "post", CountedBody, _ref("MessageCount"), _BAD_REQUEST, "MessageError"),
        (RESPONSES_COUNT_PATH, "post", ResponsesBody, _ref("InputTokenCount"), _BAD_REQUEST, "Error"),
        (RESPONSE_PATH, "get", None, _ref("Response"), _GONE, "Error"),
        (RESPONSE_PATH, "delete", None, _ref("DeletedResponse"), _GONE, "Error"),
        (ITEMS_PATH, "get", None, _ref("ItemList"), {**_GONE, **bad}, "Error"),
        (VIDEO_PATH, "get", None, _ref("Video"), _NO_RESULT, "Error"),
        (VIDEO_PATH, "delete", None, _ref("DeletedVideo"), {"404": _NO_RESULT["404"]}, "Error"),
        (VIDEOS_PATH, "get", None, _ref("ItemList"), bad, "Error"),
        ("/v1/models/{model_id}", "get", None, _ref("Model"), {"404": _STATUSES["404"]}, "Error"),
        ("/v1/models", "get", None, _ref("ModelList"), {}, "Error"),
    ):
        operation = paths[path][method]
        if taken is not None:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": bodies[taken]}}}
        operation["responses"] = {
            "200": {"description": "The answer", "content": {"application/json": {"schema": answered}}},
            **error_answers(statuses, error),
        }
    for path in (VIDEO_CONTENT_PATH, IMAGE_CONTENT_PATH):
        file = {"schema": {"type": "string", "format": "binary"}}
        found = {"description": "The file", "content": {"application/octet-stream": file, "*/*": file}}
        paths[path]["get"]["responses"] = {"200": found, **error_answers(_NO_RESULT)}
    _shape_errors(description)
    return description


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _admit_nulls(schema: Any) -> None:
    """Say that what may be left out may be ``null``: clients write it so, and it asks for nothing."""
    if isinstance(schema, list):
        for each in schema:
            _admit_nulls(each)
    elif isinstance(schema, dict):
        for name, value in schema.get("properties", {}).items():
            if name not in schema.get("required", ()):
                schema["properties"][name] = _or_null(value)
        if schema.get("additionalProperties"):
            schema["additionalProperties"] = _or_null(schema["additionalProperties"])
        for value in schema.values():
            _admit_nulls(value)


def _or_null(schema: Any) -> Any:
    has_type = isinstance(schema, dict) and schema.keys() & {"type", "$ref", "anyOf", "enum"}
    if not has_type or {"type": "null"} in schema.get("anyOf", ()) or None in schema.get("enum", ()):
        return schema
    return {"anyOf": [schema, {"type": "null"}]}


def _inference(summary: str, name: str, body: dict[str, Any], answer: str, events: str, error: str) -> dict[str, Any]:
    return {
        "tags": ["inference"],
        "summary": summary,
        "operationId": f"create_{name}",
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {
                "description": f"The answer; with `stream`, {events}" if events else "The answer",
                "headers": {
                    header: {"schema": {"type": "string"}}
                    for header in (
                        "x-request-id",
                        "x-poolgrid-worker",
                        "x-poolgrid-decision",
                        "x-poolgrid-tools-left-out",
                    )
                },
                "content": {
                    "application/json": {"schema": _ref(answer)},
                    # Readers of the page differ in what they take a stream for: a text, or its events one by one.
                    **({"text/event-stream": {"schema": {"description": events}}} if events else {}),
                },
            },
            **error_answers(_STATUSES, error),
        },
    }


def _shape_errors(description: dict[str, Any]) -> None:
    """Say of wrong parameters what they are answered with, in place of what FastAPI says."""
    for operations in description["paths"].values():
        for operation in operations.values():
            answers = operation["responses"]
            if "HTTPValidationError" in str(answers.get("422")):
                del answers["422"]
                answers.setdefault("400", error_answers({"400": _BAD_REQUEST["400"]})["400"])
    for name in ("HTTPValidationError", "ValidationError"):
        description["components"]["schemas"].pop(name, None)


ROUTE_REQUEST: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "anyOf": [
                        _ref("ChatBody"),
                        _ref("CompletionBody"),
                        {
                            "type": "object",
                            "required": ["model", "token_ids"],
                            "properties": {
                                "model": {"type": "string"},
                                "token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                            },
                        },
                    ]
                }
            }
        },
    }
}
"""What ``POST /v1/route`` takes."""

ROUTE_STATUSES: Mapping[str, str] = {**_BAD_REQUEST, "429": "The request would wait, or the tokenizer is busy"}


def error_answers(statuses: Mapping[str, str], error: str = "Error") -> dict[int | str, dict[str, Any]]:
    """Return the description of answers that are errors, by status."""
    return {
        status: {
            "description": text,
            "content": {"application/json": {"schema": _ref(error)}},
        }
        for status, text in statuses.items()
    }


LIST_PATH = "/v1/fleet"


def add_fleet_list(app: FastAPI, look: Callable[[], Awaitable[FleetList]]) -> None:
    """Add the endpoint; ``look`` raises ``OSError`` when registrations cannot be read."""

    @app.get(LIST_PATH, tags=["names"], responses=error_answers({"503": "Registrations cannot be read now"}))
    async def fleet() -> dict[str, Any]:
        """List every process that has a name, in all namespaces, and the registrations that are refused and why."""
        try:
            return (await look()).to_json()
        except OSError as error:
            raise RequestError(503, "names_unavailable", f"looking up the process with a name: {error}") from None
