"""What a client is told when its request cannot be served: ``{"error": {"message", "type", "param", "code"}}``.

``RequestError`` is the only exception of the HTTP surface. Its message says what was wrong with which field, the
offending value and the allowed range; ``param`` is the field's path in the body (``messages[0].content``).

What the APIs that are served say differently about one request: the names of its fields, and the shape of an error.

A request of every API goes the way of a chat request, and errors are made there, with chat's names. Before they go out
they are put into the words of the API that the client speaks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from poolgrid.kernel.requests.inference import Refused

VALUE_CHARS_MAX = 80
"""An offending value is quoted up to here: enough to recognise it, too little to fill a log with a prompt."""

_TYPE_BY_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


REFUSAL_STATUSES = frozenset({401, 403, 413, 429, 503})
"""What says "not you", "not this much" or "not now": the request may be right, and is refused all the same."""

REFUSAL_HEADER = b"x-poolgrid-refusal"
"""Carries the reason code of a refusal, for readers of heads only: proxies, load balancers, logs."""


RETRY_AFTER_S: Final = {"not_ready": 1, "no_worker": 5}
"""When to come again after a refusal that passes by itself, in seconds, by its code. Routers start within a second or
two, workers that were lost are started again within some."""


class RequestError(Exception):
    """One request that is not served, with the HTTP status and the body that say why."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        retry_after_s = RETRY_AFTER_S.get(code)
        if retry_after_s is not None and all(name != b"retry-after" for name, _ in headers):
            headers = (*headers, (b"retry-after", b"%d" % retry_after_s))
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = (*headers, (REFUSAL_HEADER, code.encode())) if status in REFUSAL_STATUSES else headers

    @property
    def is_refusal(self) -> bool:
        return self.status in REFUSAL_STATUSES

    @property
    def type(self) -> str:
        """Return OpenAI's coarse class of the error, which its clients map to exception types."""
        known = _TYPE_BY_STATUS.get(self.status)
        if known is not None:
            return known
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> bytes:
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )


class ContextOverflow(RequestError):
    """A request that does not fit into the model's context: the 400 in OpenAI's words, and the figures for others.

    litellm, LangChain, agents and test rigs know it by its words; they cut the conversation then, or ask another model.
    """

    def __init__(self, param: str, limit: int, isl: int, wanted: int | None, message: str) -> None:
        super().__init__(400, "context_length_exceeded", message, param=param)
        self.limit = limit
        """Tokens of prompt and answer together."""
        self.isl = isl
        self.wanted = wanted
        """Tokens of the answer that were asked for; ``None`` when the prompt alone is too long."""


def invalid(param: str, message: str, code: str = "invalid_value") -> RequestError:
    """Return the 400 that names the field ``param``."""
    return RequestError(400, code, message, param=param)


def wrong_type(param: str, value: object, allowed: str, code: str = "invalid_type") -> RequestError:
    """Return the 400 for a value of another type than a field has."""
    return invalid(param, f"{param} is {quoted(value)}: allowed is {allowed}. The request was not run.", code)


def missing(param: str, allowed: str) -> RequestError:
    """Return the 400 for a field that must be there."""
    return invalid(param, f"{param} is missing: allowed is {allowed}", "missing_required_parameter")


def text_of(item: Mapping[str, Any], name: str, where: str, otherwise: str | None = None) -> str:
    """Return the text in a field of an object at ``where``; raises ``RequestError`` for anything else there."""
    value = item.get(name, otherwise)
    if not isinstance(value, str):
        raise wrong_type(f"{where}.{name}", value, "a string")
    return value


def unsupported(param: str, reason: str) -> RequestError:
    """Return the 400 for a feature that exists elsewhere but not here: refused by name, never silently dropped."""
    return RequestError(
        400, "unsupported_parameter", f"{param} is not supported: {reason}. The request was not run.", param=param
    )


def refused(refusal: Refused) -> RequestError:
    """Translate a router's refusal, with ``Retry-After`` in whole seconds (rounded up, at least 1) when it has one."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if refusal.retry_after_s is not None:
        headers = ((b"retry-after", str(max(1, math.ceil(refusal.retry_after_s))).encode()),)
    return RequestError(refusal.status, refusal.code, str(refusal), param=refusal.param, headers=headers)


_WITHOUT_OTHERS = {
    "busy": "there is no room for the request now; try again later",
    "no_worker": "no worker can take the request now; try again later",
    "tokenizer_busy": "there is no room for the prompt now; try again later",
    "media_busy": "there is no room for the media now; try again later",
    "guide_check_busy": "there is no time to try the guide now; try again later",
}


def without_others(error: RequestError) -> RequestError:
    """Return an error without what its words tell of other clients: how many wait, what they hold, where they run."""
    error.message = _WITHOUT_OTHERS.get(error.code, error.message)
    return error


def quoted(value: object) -> str:
    """Return an offending value as it was written in JSON, cut to ``VALUE_CHARS_MAX``."""
    if isinstance(value, str) and len(value) > VALUE_CHARS_MAX:
        # Some are as long as a body may be.
        return f"{quoted(value[:VALUE_CHARS_MAX])[:VALUE_CHARS_MAX]}… ({len(value)} characters)"
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}… ({len(text)} characters)"


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


ANTHROPIC_VERSION: Final = b"anthropic-version"
"""Header of every request of Anthropic's clients."""

_OPENAI_PATHS: Final = ("/v1/chat/", "/v1/completions", "/v1/embeddings", "/v1/images/", "/v1/videos")


def dialect_of(path: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> ApiDialect:
    """Return the words of the API that a path belongs to, and on a path of several that of the request's client."""
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    if path.startswith("/v1/responses"):
        return RESPONSES
    if not path.startswith(_OPENAI_PATHS) and any(name == ANTHROPIC_VERSION for name, _ in headers):
        return ANTHROPIC
    return OPENAI
