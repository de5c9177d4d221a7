"""The content of the OpenAPI page, generated from the same structs that parse requests and encode answers.

``GET /v1/fleet``: who of a deployment has a name, for operators. It is there where a process has names itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI

from poolgrid.frontend.errors import RequestError
from poolgrid.frontend.messages_api.schema import CountedBody, MessagesBody
from poolgrid.frontend.openapi_answers import ANSWERS
from poolgrid.frontend.responses_api.conversation import ResponsesBody
from poolgrid.frontend.responses_api.kept import ITEMS_PATH, RESPONSE_PATH
from poolgrid.frontend.schema import ChatBody, CompletionBody
from poolgrid.frontend.tasks.schema import EmbeddingBody, ImageBody, VideoBody
from poolgrid.frontend.tasks.videos import IMAGE_CONTENT_PATH, VIDEO_CONTENT_PATH, VIDEO_PATH, VIDEOS_PATH
from poolgrid.frontend.tokenizer_endpoints import (
    DETOKENIZE_PATH,
    MESSAGES_COUNT_PATH,
    RESPONSES_COUNT_PATH,
    TOKENIZE_PATH,
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    Tokenized,
)
from poolgrid.wire.answers import FleetList

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
