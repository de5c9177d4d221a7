"""Where no trace is kept: requests pay no call for one, and carry that of their client."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from poolgrid.kernel.requests.inference import InferenceRequest
from poolgrid.kernel.wire.events import WorkerJoined
from poolgrid.kernel.wire.trace_context import TraceContext
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.inference_requests import like
from tests.frontend.server import application, in_process
from tests.router.test_admission import scene
from tests.router.test_service import BEFORE, OLD, REQUEST, card, routed

OF_TRACES = (
    "poolgrid.server.process.tracing",
    "poolgrid.server.frontend.traffic.tell_request",
    "poolgrid.server.serving.request_tracker.begin_leg",
    "poolgrid.server.serving.request_tracker.follow_legs",
    "poolgrid.server.router.placement.tell_decision",
    "poolgrid.kernel.wire.trace_context",
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
        with calls() as seen:
            answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert "traceresponse" not in answer.headers
        assert "poolgrid.server.frontend.inference_endpoint" in seen
        assert not of_traces(seen)


async def test_the_router_calls_nothing_of_traces_for_a_request_that_has_none_nor_for_one_that_waits() -> None:
    async with scene() as pool:
        with calls() as seen:
            await pool.submit("first")
            await pool.submit("waits")
            assert await pool.finish(2) == ["first", "waits"]
            await asyncio.gather(*pool.submitted.values())
        assert {
            "poolgrid.server.router.tracker",
            "poolgrid.server.router.queue",
            "poolgrid.kernel.requests.request_machine",
        } <= set(seen)
        assert not of_traces(seen)


TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
NOT_SAMPLED = TRACEPARENT[:-1] + "0"
STATE = [("tracestate", "vendor=1"), ("tracestate", "other=2")]


async def asked(path: str, body: dict[str, Any], headers: list[tuple[str, str]]) -> list[InferenceRequest]:
    """Return the requests that a router gets."""
    backend = FakeBackend()
    async with in_process(application(backend)) as client:
        answer = await client.post(path, json={"model": "tiny", **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    return backend.requests


@pytest.mark.parametrize("parent", [TRACEPARENT, NOT_SAMPLED])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_request_without_a_trace_here_carries_the_context_of_its_client(
    path: str, body: dict[str, Any], parent: str
) -> None:
    requests = await asked(path, body, [("traceparent", parent), *STATE])
    assert {request.trace_context for request in requests} == {TraceContext(parent, "vendor=1,other=2")}


@pytest.mark.parametrize(
    "headers",
    [[], [("traceparent", "nonsense")], [("traceparent", f"00-{'0' * 32}-{'b' * 16}-01")], STATE],
    ids=["none", "no traceparent", "zero", "state alone"],
)
async def test_request_with_no_readable_context_carries_none(headers: list[tuple[str, str]]) -> None:
    [request] = await asked("/v1/completions", {"prompt": "a"}, headers)
    assert request.trace_context is None


@pytest.mark.parametrize("not_sampled", [None, TraceContext(f"00-{'c' * 32}-{'d' * 16}-00")])
async def test_worker_gets_the_context_of_the_client_whether_the_router_sends_traces_or_not(
    not_sampled: TraceContext | None,
) -> None:
    context = TraceContext(TRACEPARENT, "vendor=1")
    async with routed() as router:
        router.service.tracker._not_sampled = not_sampled
        router.feed.tell((OLD, WorkerJoined(card(BEFORE))))
        router.bring_up(BEFORE)
        for request_id, given, right in (("with", context, context), ("without", None, not_sampled)):
            await router.service.submit(like(REQUEST, request_id=request_id, trace_context=given))
            last = router.dealers[BEFORE].last
            assert last is not None
            assert (last.request_id.partition("~")[0], last.trace) == (request_id, right)
