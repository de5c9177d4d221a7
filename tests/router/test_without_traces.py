"""What requests pay for traces where there are none: no call."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from tests.frontend.fake_backend import FakeBackend
from tests.frontend.server import application, in_process
from tests.router.test_admission import scene

OF_TRACES = (
    "poolgrid.process.tracing",
    "poolgrid.frontend.traffic.tell_request",
    "poolgrid.serving.request_tracker.begin_leg",
    "poolgrid.serving.request_tracker.follow_legs",
    "poolgrid.router.placement.tell_decision",
    "poolgrid.wire.trace_context",
    "opentelemetry",
)


@contextmanager
def calls() -> Iterator[list[str]]:
    """Note every function that is called in this thread, and its module."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            module = str(frame.f_globals.get("__name__", ""))
            seen.extend((module, f"{module}.{frame.f_code.co_name}"))

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def of_traces(seen: list[str]) -> set[str]:
    return {name for name in seen if name.startswith(OF_TRACES)}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_front_end_calls_nothing_of_traces_for_a_request_that_has_none(stream: bool) -> None:
    async with in_process(application(FakeBackend())) as client:
        body = {"model": "tiny", "prompt": "hi", "stream": stream}
        headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
        with calls() as seen:
            answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert "traceresponse" not in answer.headers
        assert "poolgrid.frontend.inference_endpoint" in seen
        assert not of_traces(seen)


async def test_the_router_calls_nothing_of_traces_for_a_request_that_has_none_nor_for_one_that_waits() -> None:
    async with scene() as pool:
        with calls() as seen:
            await pool.submit("first")
            await pool.submit("waits")
            assert await pool.finish(2) == ["first", "waits"]
            await asyncio.gather(*pool.submitted.values())
        assert {"poolgrid.router.tracker", "poolgrid.router.queue", "poolgrid.serving.request_machine"} <= set(seen)
        assert not of_traces(seen)
