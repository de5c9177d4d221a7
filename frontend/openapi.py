"""What the OpenAPI page says of the inference endpoints, generated from the same structs that parse their bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI

from frontend.schema import REFUSED_CHAT, REFUSED_COMPLETION, REFUSED_NVEXT, ChatBody, CompletionBody

_REFUSALS: Mapping[str, Mapping[str, tuple[tuple[object, ...], str]]] = {
    "ChatBody": REFUSED_CHAT,
    "CompletionBody": REFUSED_COMPLETION,
    "Nvext": REFUSED_NVEXT,
}

_STATUSES = {
    "400": "A field is wrong or not supported; `param` names it",
    "401": "The server has API keys, and the request has no good one",
    "403": "The API key does not open this model or feature",
    "404": "No such model",
    "413": "The body is too large",
    "415": "The body is not application/json",
    "429": "Busy; come back after Retry-After seconds",
    "500": "Generation failed",
    "503": "No worker can serve the model now",
}

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe_inference(app: FastAPI) -> None:
    """Add the two inference endpoints to the application's OpenAPI description."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = generated()
            (chat, completion), components = msgspec.json.schema_components(
                (ChatBody, CompletionBody), ref_template="#/components/schemas/{name}"
            )
            for name, refusals in _REFUSALS.items():
                _describe_refusals(components[name], refusals)
            schemas = description.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(components)
            schemas["Error"] = _ERROR_SCHEMA
            paths = description["paths"]
            paths["/v1/chat/completions"] = {"post": _operation("Answer a conversation", "chat", chat)}
            paths["/v1/completions"] = {"post": _operation("Continue prompts", "completion", completion)}
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the description


def _describe_refusals(component: dict[str, Any], refusals: Mapping[str, tuple[tuple[object, ...], str]]) -> None:
    for name, (inert, reason) in refusals.items():
        component["properties"][name] = {
            "enum": [None, *inert],
            "default": None,
            "description": f"Not supported: {reason}.",
        }


def _operation(summary: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "tags": ["inference"],
        "summary": summary,
        "operationId": f"create_{name}",
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {
                "description": "The answer; with `stream`, server-sent events that end with `data: [DONE]`",
                "headers": {
                    header: {"schema": {"type": "string"}}
                    for header in ("x-request-id", "x-poolgrid-worker", "x-poolgrid-decision")
                },
                "content": {
                    "application/json": {"schema": {"type": "object"}},
                    "text/event-stream": {"schema": {"type": "string"}},
                },
            },
            **{
                status: {
                    "description": text,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                }
                for status, text in _STATUSES.items()
            },
        },
    }
