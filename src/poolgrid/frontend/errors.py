"""What a client is told when its request cannot be served: ``{"error": {"message", "type", "param", "code"}}``.

``RequestError`` is the only exception of the HTTP surface. Its message says what was wrong with which field, the
offending value and the allowed range; ``param`` is the field's path in the body (``messages[0].content``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from poolgrid.inference.ports import Refused

VALUE_CHARS_MAX = 80
"""An offending value is quoted up to here: enough to recognise it, too little to fill a log with a prompt."""

_TYPE_BY_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


REFUSAL_STATUSES = frozenset({401, 403, 413, 429, 503})
"""What says "not you", "not this much" or "not now": the request may be right, and is refused all the same."""

REFUSAL_HEADER = b"x-poolgrid-refusal"
"""Carries the reason code of a refusal, for readers of heads only: proxies, load balancers, logs."""


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
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}… ({len(text)} characters)"
