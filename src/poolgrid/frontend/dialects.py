"""What the APIs that are served say differently about one request: the names of its fields, and the shape of an error.

A request of every API goes the way of a chat request, and errors are made there, with chat's names. Before they go out
they are put into the words of the API that the client speaks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from poolgrid.frontend.errors import ContextOverflow, RequestError

ErrorBody = Callable[[RequestError, str], bytes]
"""Returns the body of an answer that is an error, given the request's id."""


def _openai_error(error: RequestError, request_id: str) -> bytes:
    return error.body()


_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _anthropic_error(error: RequestError, request_id: str) -> bytes:
    """Return Anthropic's object, with OpenAI's ``param`` and ``code`` in it, which clients may use or ignore."""
    kind = (
        "overloaded_error"
        if error.code == "busy"
        else _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    )
    told = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return msgspec.json.encode({"type": "error", "error": told, "request_id": str(request_id)})


def _anthropic_overflow(error: ContextOverflow) -> str:
    """Return what Anthropic says, by which its clients know that a conversation must be cut."""
    if error.wanted is None:
        return f"prompt is too long: {error.isl} tokens > {error.limit - 1} maximum. The request was not run."
    return (
        f"input length and `max_tokens` exceed context limit: {error.isl} + {error.wanted} > {error.limit}, "
        "decrease input length or `max_tokens` and try again. The request was not run."
    )


@dataclass(frozen=True, slots=True)
class ApiDialect:
    """One API's words."""

    error_body: ErrorBody = _openai_error
    fields: tuple[tuple[re.Pattern[str], str], ...] = ()
    """How paths of chat's fields begin, and what they are called here."""
    words: tuple[tuple[str, str], ...] = ()
    """Other names that messages may have in them, and what is said here."""
    overflow: Callable[[ContextOverflow], str] | None = None
    """What is said of a request that does not fit into the context, where it is not said as OpenAI does."""
    id_header: bytes = b""
    """Header of an answer that has the request's id, in addition to ``x-request-id``."""

    def named(self, error: RequestError) -> RequestError:
        """Return an error of the request with the names that its client wrote."""
        if error.param is None:
            return error
        for pattern, name in self.fields:
            param = pattern.sub(name, error.param, count=1)
            if param != error.param:
                first, space, rest = error.message.replace(error.param, param, 1).partition(" ")
                error.message = f"{pattern.sub(name, first)}{space}{rest}"
                error.param = param
                break
        for word, said in self.words:
            error.message = error.message.replace(word, said)
        if self.overflow is not None and isinstance(error, ContextOverflow):
            error.message = self.overflow(error)
        return error

    def headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        """Return the headers of an answer that name the request."""
        name = request_id.encode()
        return [(b"x-request-id", name), (self.id_header, name)] if self.id_header else [(b"x-request-id", name)]


def _fields(names: Mapping[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(rf"^{pattern}"), name) for pattern, name in names.items())


OPENAI: Final = ApiDialect()
RESPONSES: Final = ApiDialect(
    fields=_fields(
        {
            r"response_format\.json_schema\b": "text.format",
            r"response_format\b": "text.format",
            r"(max_completion_tokens|max_tokens)$": "max_output_tokens",
            r"tools\[(\d+)\]\.function\b": r"tools[\1]",
            r"tool_choice\.function\b": "tool_choice",
            r"tool_choice\.allowed_tools\.tools\[(\d+)\]\.function\b": r"tool_choice.tools[\1]",
            r"tool_choice\.allowed_tools\b": "tool_choice",
            r"reasoning_effort\b": "reasoning.effort",
            r"messages\b.*": "input",
        }
    ),
    words=(("max_completion_tokens", "max_output_tokens"), (" in the messages, ", " in the input, ")),
)
ANTHROPIC: Final = ApiDialect(
    error_body=_anthropic_error,
    fields=_fields(
        {
            r"response_format\.json_schema\b": "output_config.format",
            r"response_format\b": "output_config.format",
            r"max_completion_tokens$": "max_tokens",
            r"tools\[(\d+)\]\.function\.parameters\b": r"tools[\1].input_schema",
            r"tools\[(\d+)\]\.function\b": r"tools[\1]",
            r"tool_choice\.function\b": "tool_choice",
            r"reasoning_effort\b": "output_config.effort",
            r"stop(?=$|\[)": "stop_sequences",
            r"continue_final_message$": "messages",
        }
    ),
    words=(("max_completion_tokens", "max_tokens"),),
    overflow=_anthropic_overflow,
    id_header=b"request-id",
)


def dialect_of(path: str) -> ApiDialect:
    """Return the words of the API that a path belongs to."""
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    return RESPONSES if path.startswith("/v1/responses") else OPENAI
