"""A client's TTFT target reaches the policy, from wherever it was given."""

from __future__ import annotations

from typing import Any

import pytest

from poolgrid.router.choosing import ttft_target_ms

HEADER = "x-ttft-target-ms"


@pytest.mark.parametrize(
    ("hints", "target_ms"),
    [
        ({}, 0.0),
        ({"headers": {HEADER: "250.5"}}, 250.5),
        ({"nvext": {"router": {"ttft_target": 300}}}, 300.0),
        ({"nvext": {"router": {"ttft_target": 300}}, "headers": {HEADER: "250"}}, 300.0),
        ({"nvext": {"router": {"ttft_target": None}}, "headers": {HEADER: "250"}}, 250.0),
        ({"nvext": {"router": None}, "headers": {"x-itl-target-ms": "5"}}, 0.0),
        ({"headers": {HEADER: "soon"}}, 0.0),
        ({"headers": {HEADER: "nan"}}, 0.0),
        ({"headers": {HEADER: "-3"}}, 0.0),
        ({"headers": {HEADER: "9" * 1000}}, 0.0),
        ({"nvext": {"router": {"ttft_target": True}}}, 0.0),
        ({"nvext": {"router": {"ttft_target": 10**400}}}, 0.0),
        ({"nvext": {"router": [1]}}, 0.0),
    ],
)
def test_a_target_is_read_from_body_or_header_and_what_is_none_asks_for_nothing(
    hints: dict[str, Any], target_ms: float
) -> None:
    assert ttft_target_ms(hints) == target_ms
