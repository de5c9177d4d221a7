"""What the fleet page of a global router shows of one request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from poolgrid.kernel.pool_grids.request_hints import NO_HINTS, ExpectedOutput
from poolgrid.plugins.fleet_page.global_source import whole_leg
from poolgrid.server.global_router.decisions import RequestDecision

ARRIVED_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("came", "placed", "prefilled", "ended"),
    [
        ({}, 40, None, None),
        ({"ttft_ms": 100.0}, 40, 100, None),
        ({"ttft_ms": 100.0, "itl_ms": 10.0, "output_tokens": 5, "outcome": "stop"}, 40, 100, 140),
        ({"ttft_ms": 100.0, "output_tokens": 1, "outcome": "length"}, 40, 100, 100),
        ({"outcome": "refused: no_worker"}, 40, None, 40),
    ],
)
def test_the_times_of_a_request_follow_from_its_record(
    came: dict[str, Any], placed: int, prefilled: int | None, ended: int | None
) -> None:
    record = RequestDecision("r", ARRIVED_MS, "tiny", 9, 1, NO_HINTS, ExpectedOutput(1, "default"), queued_ms=40.0)
    record.placements = [cast(Any, SimpleNamespace(dispatch_id=name, worker=name)) for name in ("r~1", "r~2")]
    for name, value in came.items():
        setattr(record, name, value)

    leg = whole_leg(record)

    after = [None if at is None else at - ARRIVED_MS for at in (leg.placed_ms, leg.prefilled_ms, leg.ended_ms)]
    assert (leg.worker, after) == ("r~2", [placed, prefilled, ended])
    assert leg.started_ms == leg.prefilled_ms
    assert leg.end == ("" if ended is None else came["outcome"])
