"""What of a forwarded request is for routing, and that what cannot be read does no harm."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poolgrid.kernel.pool_grids.request_hints import HintError, read_hints
from poolgrid.kernel.requests.inference import OUTPUT_LIMIT, InferenceRequest
from poolgrid.server.proxy.prompt_reading import UNLIMITED, members_of
from poolgrid.server.proxy.routing_hints import tell_hints

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def told(headers: dict[bytes, bytes] | None = None, **body: Any) -> InferenceRequest:
    request = InferenceRequest("r", "m", b"", UNLIMITED)
    tell_hints(request, members_of(json.dumps(body).encode()), headers or {})
    return request


def test_hints_of_body_and_headers_are_told() -> None:
    nvext = {"router": {"ttft_target": 100}, "agent_hints": {"priority": 7, "osl": 50}}

    request = told({b"x-itl-target-ms": b"20", b"x-other": b"1"}, nvext=nvext)

    assert request.hints == {"nvext": nvext, "headers": {"x-itl-target-ms": "20"}}
    assert (request.priority, request.expected_output_tokens) == (7, 50)
    hints = read_hints(request.hints["nvext"], request.hints["headers"])
    assert {name: target.value_ms for name, target in hints.targets.items()} == {"ttft": 100.0, "itl": 20.0}


@pytest.mark.parametrize(("header", "priority"), [(b"50", 50), (b"-1", -1), (b"1.5", 7), (b"", 7), (b"2147483648", 7)])
def test_priority_header_of_dynamo_wins_where_it_is_a_number(header: bytes, priority: int) -> None:
    request = told({b"x-dynamo-request-priority": header}, nvext={"agent_hints": {"priority": 7}})

    assert request.priority == priority


def test_a_request_without_hints_stays_as_it_is() -> None:
    request = told(model="m", messages=[])

    assert (request.hints, request.priority, request.expected_output_tokens) == ({}, 0, None)


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_output_tokens": 7}, 7),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
        ({"max_tokens": 0}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": 2**70}, None),
        ({"max_tokens": True}, None),
    ],
)
def test_the_bound_of_an_answer_is_told_and_bounds_nothing_here(body: dict[str, Any], limit: int | None) -> None:
    request = told(**body)

    assert request.hints.get(OUTPUT_LIMIT) == limit
    assert request.sampling is UNLIMITED


@given(JSON)
def test_any_extension_is_read_or_left(nvext: Any) -> None:
    request = told(nvext=nvext)

    assert -(2**31) <= request.priority < 2**31
    try:
        hints = read_hints(request.hints["nvext"], None)
    except HintError:
        return
    assert request.priority == (hints.priority or 0)
