"""How an API describes itself on the OpenAPI page: its bodies, its answers, and what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

Schema = dict[str, Any]


def record(optional: Mapping[str, Schema] | None = None, /, **required: Schema) -> Schema:
    """Return the schema of an object."""
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def list_of(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> Schema:
    """Return the schema of a value that may be ``null``."""
    return {"anyOf": [schema, {"type": "null"}]}


TEXT: Final[Schema] = {"type": "string"}
INTEGER: Final[Schema] = {"type": "integer"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
NUMBER: Final[Schema] = {"type": "number"}

ITEM_LIST: Final = record(
    object={"const": "list"},
    data=list_of({"type": "object"}),
    first_id=nullable(TEXT),
    last_id=nullable(TEXT),
    has_more={"type": "boolean"},
)
"""What ``poolgrid.server.frontend.list_page`` answers."""

BAD_REQUEST: Final[Mapping[str, str]] = {
    "400": "A field is wrong or not supported; `param` names it",
    "401": "The server has API keys, and the request has no good one",
    "403": "The API key does not open this model or feature",
    "404": "No such model",
    "413": "The body is too large",
    "415": "The body is neither application/json nor, with a content-encoding, gzip",
    "429": "Busy, or over a limit of the tenant; come back after Retry-After seconds",
    "503": "No worker can serve the model now",
}
"""Statuses of an answer to a body that was not run, and why."""

TYPED_EVENTS: Final = "typed server-sent events"


class InferenceOperation(NamedTuple):
    """A ``POST`` that workers do."""

    path: str
    summary: str
    name: str
    body: type
    answer: str
    """Component of the answer."""
    events: str = ""
    """What a streamed answer consists of; empty = it comes whole."""
    error: str = "Error"


class Operation(NamedTuple):
    """Anything else that is asked of a path: FastAPI knows it, but not its answers."""

    method: str
    path: str
    answer: str
    """Component of the answer; empty = a file."""
    statuses: Mapping[str, str]
    body: type | None = None
    error: str = "Error"


class ApiDescription(NamedTuple):
    """What an API adds to the page."""

    bodies: Sequence[type]
    """Structs; each becomes a component of its name, with all that is in it."""
    answers: Mapping[str, Schema]
    """By the name of the component."""
    inference: Sequence[InferenceOperation] = ()
    operations: Sequence[Operation] = ()


def reference(name: str) -> Schema:
    """Return the schema of a component."""
    return {"$ref": f"#/components/schemas/{name}"}


def error_answers(statuses: Mapping[str, str], error: str = "Error") -> dict[int | str, dict[str, Any]]:
    """Return the description of answers that are errors, by status."""
    return {
        status: {
            "description": text,
            "content": {"application/json": {"schema": reference(error)}},
        }
        for status, text in statuses.items()
    }
