"""What a forwarded request asks of routing: latency targets, priority, the output that is expected.

They are in ``nvext`` and in headers, as in requests whose tokens poolgrid makes (``docs/http_api.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

from poolgrid.kernel.requests.inference import OUTPUT_LIMIT, InferenceRequest, header_priority
from poolgrid.server.frontend.inference_endpoint import hints_of_headers

NVEXT: Final = "nvext"

LIMIT_FIELDS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Fields that bound an answer, the one that counts first."""


def tell_hints(request: InferenceRequest, values: Mapping[str, Raw], headers: Mapping[bytes, bytes]) -> None:
    """Put the hints of a body's members and its headers into its request.

    A hint that cannot be read is left as it is: a router that goes by hints refuses it, and the others do without.
    """
    hints: dict[str, Any] = {}
    if NVEXT in values:
        hints[NVEXT] = nvext = _read(values[NVEXT])
        if isinstance(nvext, dict) and isinstance(agent := nvext.get("agent_hints"), dict):
            request.priority = _number(agent.get("priority")) or 0
            request.expected_output_tokens = _number(agent.get("osl"))
    if told := hints_of_headers(headers):
        hints["headers"] = told
        if (priority := header_priority(told)) is not None:
            request.priority = priority
    limits = (_number(_read(values[name])) for name in LIMIT_FIELDS if name in values)
    limit = next((each for each in limits if each is not None), None)
    if limit is not None and limit > 0:
        hints[OUTPUT_LIMIT] = limit
    if hints:
        request.hints = hints


def _read(value: Raw) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _number(value: Any) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool) and -(2**31) <= value < 2**31
    return value if is_number else None
