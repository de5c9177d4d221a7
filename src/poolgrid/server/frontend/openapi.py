"""The content of the OpenAPI page, generated from the same structs that parse requests and encode answers.

``GET /v1/fleet``: who of a deployment has a name, for operators. It is there where a process has names itself.

JSON schemas of the answers, for the OpenAPI page; a test holds real answers against them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from fastapi import FastAPI

from poolgrid.kernel.wire.answers import FleetList
from poolgrid.server.frontend.description import (
    BAD_REQUEST,
    COUNT,
    INTEGER,
    TEXT,
    ApiDescription,
    InferenceOperation,
    Operation,
    error_answers,
    list_of,
    nullable,
    record,
    reference,
)
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.tokenizer_endpoints import (
    DETOKENIZE_PATH,
    TOKENIZE_PATH,
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    Tokenized,
)

_ERROR = record(error=record(message=TEXT, type=TEXT, param=nullable(TEXT), code=nullable(TEXT)))
_MODEL = record(
    {"parent": TEXT},
    id=TEXT,
    object={"const": "model"},
    created=INTEGER,
    owned_by=TEXT,
    root=TEXT,
    max_model_len=nullable(COUNT),
)

OWN: Final = ApiDescription(
    bodies=(TokenizeBody, DetokenizeBody, Tokenized, Detokenized),
    answers={
        "Error": _ERROR,
        "Model": _MODEL,
        "ModelList": record(object={"const": "list"}, data=list_of(reference("Model"))),
    },
    operations=(
        Operation("post", TOKENIZE_PATH, "Tokenized", BAD_REQUEST, TokenizeBody),
        Operation("post", DETOKENIZE_PATH, "Detokenized", BAD_REQUEST, DetokenizeBody),
        Operation("get", "/v1/models/{model_id}", "Model", {"404": BAD_REQUEST["404"]}),
        Operation("get", "/v1/models", "ModelList", {}),
    ),
)
"""What each front end has."""

_STATUSES = {**BAD_REQUEST, "422": "Workers were lost with the request", "500": "Generation failed"}


def describe_inference(app: FastAPI, apis: Sequence[ApiDescription]) -> None:
    """Add to the application's OpenAPI description what FastAPI cannot see of it."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(generated(), (*apis, OWN))
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the description


def _completed(description: dict[str, Any], apis: Sequence[ApiDescription]) -> dict[str, Any]:
    structs = [body for api in apis for body in api.bodies]
    described, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    bodies = dict(zip(structs, described, strict=True))
    for component in components.values():
        _admit_nulls(component)
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(components)
    paths = description["paths"]
    for api in apis:
        schemas.update(api.answers)
        for made in api.inference:
            paths.setdefault(made.path, {})["post"] = _inference(made, bodies[made.body])
        for asked in api.operations:
            operation = paths[asked.path][asked.method]
            if asked.body is not None:
                content = {"application/json": {"schema": bodies[asked.body]}}
                operation["requestBody"] = {"required": True, "content": content}
            operation["responses"] = {"200": _answer(asked.answer), **error_answers(asked.statuses, asked.error)}
    _shape_errors(description)
    return description


def _answer(component: str) -> dict[str, Any]:
    if component:
        return {"description": "The answer", "content": {"application/json": {"schema": reference(component)}}}
    file = {"schema": {"type": "string", "format": "binary"}}
    return {"description": "The file", "content": {"application/octet-stream": file, "*/*": file}}


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


def _inference(made: InferenceOperation, body: dict[str, Any]) -> dict[str, Any]:
    events = made.events
    return {
        "tags": ["inference"],
        "summary": made.summary,
        "operationId": f"create_{made.name}",
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
                    "application/json": {"schema": reference(made.answer)},
                    # Readers of the page differ in what they take a stream for: a text, or its events one by one.
                    **({"text/event-stream": {"schema": {"description": events}}} if events else {}),
                },
            },
            **error_answers(_STATUSES, made.error),
        },
    }


def _shape_errors(description: dict[str, Any]) -> None:
    """Say of wrong parameters what they are answered with, in place of what FastAPI says."""
    for operations in description["paths"].values():
        for operation in operations.values():
            answers = operation["responses"]
            if "HTTPValidationError" in str(answers.get("422")):
                del answers["422"]
                answers.setdefault("400", error_answers({"400": BAD_REQUEST["400"]})["400"])
    for name in ("HTTPValidationError", "ValidationError"):
        description["components"]["schemas"].pop(name, None)


ROUTE_REQUEST: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "anyOf": [
                        reference("ChatBody"),
                        reference("CompletionBody"),
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

ROUTE_STATUSES: Mapping[str, str] = {**BAD_REQUEST, "429": "The request would wait, or the tokenizer is busy"}


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
