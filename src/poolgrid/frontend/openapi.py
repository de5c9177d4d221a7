"""What the OpenAPI page says, generated from the same structs that parse requests and encode answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI

from poolgrid.frontend.messages_api.schema import CountedBody, MessagesBody
from poolgrid.frontend.openapi_answers import ANSWERS
from poolgrid.frontend.prompt_counts import MESSAGES_COUNT_PATH, RESPONSES_COUNT_PATH
from poolgrid.frontend.responses_api.endpoints import ITEMS_PATH, RESPONSE_PATH
from poolgrid.frontend.responses_api.schema import REFUSED_RESPONSES, ResponsesBody
from poolgrid.frontend.schema import REFUSED_CHAT, REFUSED_COMPLETION, REFUSED_NVEXT, ChatBody, CompletionBody
from poolgrid.frontend.tokenizer_endpoints import (
    DETOKENIZE_PATH,
    TOKENIZE_PATH,
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    Tokenized,
)

_REFUSALS: Mapping[str, Mapping[str, tuple[tuple[object, ...], str]]] = {
    "ChatBody": REFUSED_CHAT,
    "CompletionBody": REFUSED_COMPLETION,
    "ResponsesBody": REFUSED_RESPONSES,
    "Nvext": REFUSED_NVEXT,
}

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
)
"""Bodies and answers that are structs; each becomes a component of its name, with all that is in it."""


def describe_inference(app: FastAPI) -> None:
    """Add to the application's OpenAPI description what FastAPI cannot see of it."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = generated()
            described, components = msgspec.json.schema_components(BODIES, ref_template="#/components/schemas/{name}")
            chat, completion, responses, messages, counted, tokenize, detokenize, tokenized, detokenized = described
            for name, refusals in _REFUSALS.items():
                _describe_refusals(components[name], refusals)
            schemas = description.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(components)
            schemas.update(ANSWERS)
            paths = description["paths"]
            paths["/v1/chat/completions"] = {
                "post": _inference("Answer a conversation", "chat", chat, "ChatCompletion", _DONE)
            }
            paths["/v1/completions"] = {
                "post": _inference("Continue prompts", "completion", completion, "Completion", _DONE)
            }
            paths["/v1/responses"] = {
                "post": _inference("Answer items with items", "response", responses, "Response", _TYPED)
            }
            paths["/v1/messages"] = {
                "post": _inference(
                    "Answer a conversation in Anthropic's form",
                    "message",
                    messages,
                    "AnthropicMessage",
                    _TYPED,
                    "MessageError",
                )
            }
            for path, body, answer, error in (
                (TOKENIZE_PATH, tokenize, tokenized, "Error"),
                (DETOKENIZE_PATH, detokenize, detokenized, "Error"),
                (MESSAGES_COUNT_PATH, counted, {"$ref": "#/components/schemas/MessageCount"}, "MessageError"),
                (RESPONSES_COUNT_PATH, responses, {"$ref": "#/components/schemas/InputTokenCount"}, "Error"),
            ):
                operation = paths[path]["post"]
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
                operation["responses"] = {
                    "200": {"description": "The answer", "content": {"application/json": {"schema": answer}}},
                    **error_answers(_BAD_REQUEST, error),
                }
            _describe_models(paths)
            _describe_kept_responses(paths)
            _shape_errors(description)
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the description


_DONE = "server-sent events that end with `data: [DONE]`"
_TYPED = "typed server-sent events"


def _describe_refusals(component: dict[str, Any], refusals: Mapping[str, tuple[tuple[object, ...], str]]) -> None:
    for name, (inert, reason) in refusals.items():
        component["properties"][name] = {
            "enum": [None, *inert],
            "default": None,
            "description": f"Not supported: {reason}.",
        }


def _describe_models(paths: dict[str, Any]) -> None:
    one = paths["/v1/models/{model_id}"]["get"]["responses"]
    one["200"]["content"]["application/json"]["schema"] = {"$ref": "#/components/schemas/Model"}
    one.pop("422", None)  # any text is a model's name
    one.update(error_answers({"404": _STATUSES["404"]}))
    every = paths["/v1/models"]["get"]["responses"]["200"]["content"]["application/json"]
    every["schema"] = {"$ref": "#/components/schemas/ModelList"}


def _describe_kept_responses(paths: dict[str, Any]) -> None:
    gone = {"404": "No such response is kept", "503": "What is kept cannot be read now"}
    for path, method, answer in (
        (RESPONSE_PATH, "get", "Response"),
        (RESPONSE_PATH, "delete", "DeletedResponse"),
        (ITEMS_PATH, "get", "ItemList"),
    ):
        operation = paths[path][method]
        answers = operation["responses"]
        answers["200"]["content"]["application/json"]["schema"] = {"$ref": f"#/components/schemas/{answer}"}
        if path == RESPONSE_PATH:
            answers.pop("422", None)  # any text is a response's id
        answers.update(error_answers(gone if path == RESPONSE_PATH else {**gone, "400": _BAD_REQUEST["400"]}))


def _inference(
    summary: str, name: str, body: dict[str, Any], answer: str, events: str, error: str = "Error"
) -> dict[str, Any]:
    return {
        "tags": ["inference"],
        "summary": summary,
        "operationId": f"create_{name}",
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {
                "description": f"The answer; with `stream`, {events}",
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
                    "application/json": {"schema": {"$ref": f"#/components/schemas/{answer}"}},
                    # Readers of the page differ in what they take a stream for: a text, or its events one by one.
                    "text/event-stream": {"schema": {"description": events}},
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
                        {"$ref": "#/components/schemas/ChatBody"},
                        {"$ref": "#/components/schemas/CompletionBody"},
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
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}},
        }
        for status, text in statuses.items()
    }
