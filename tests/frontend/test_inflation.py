"""Compressed request bodies: what comes out, how far, and for whom."""

from __future__ import annotations

import asyncio
import gc
import gzip
import random
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from poolgrid.frontend.errors import RequestError
from poolgrid.frontend.request_body import (
    RATIO_FREE_BYTES,
    STEP_INPUT_BYTES,
    STEP_OUTPUT_BYTES,
    STEPS_ON_LOOP,
    BodyReader,
    ClientLeft,
    InflationLimits,
    inflate,
)
from poolgrid.frontend.tokenization import TokenizationPool
from poolgrid.process.clock import SystemClock
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.server import application, served

LIMITS = InflationLimits(output_bytes=8 * 2**20, members=100, ratio=100, time_ms=60_000)


def whole(body: bytes, limits: InflationLimits = LIMITS) -> bytes:
    return b"".join(inflate(body, limits))


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@given(parts=st.lists(st.binary(max_size=3 * STEP_INPUT_BYTES), min_size=1, max_size=5))
def test_members_come_out_as_they_went_in(parts: list[bytes]) -> None:
    assert whole(b"".join(gzip.compress(part, 1) for part in parts)) == b"".join(parts)


@given(body=st.binary(max_size=200), cut=st.integers(min_value=1, max_value=30))
def test_what_is_cut_off_or_no_gzip_at_all_is_refused_and_ends(body: bytes, cut: int) -> None:
    for wrong in (gzip.compress(body)[:-cut], b"x" + body, gzip.compress(body) + b"x" * cut):
        if wrong:
            with pytest.raises(RequestError) as caught:
                whole(wrong)
            assert (caught.value.status, caught.value.code) == (400, "invalid_encoding")


def test_a_step_is_short() -> None:
    body = noise(500_000) + bytes(900_000)
    steps = list(inflate(gzip.compress(body, 1), LIMITS))
    assert max(map(len, steps)) <= STEP_OUTPUT_BYTES
    assert b"".join(steps) == body


@pytest.mark.parametrize(
    ("body", "limits", "code", "setting"),
    [
        (gzip.compress(b"") * 101, LIMITS, "inflation_refused", "gzip members"),
        (gzip.compress(bytes(RATIO_FREE_BYTES + 1)), LIMITS, "inflation_refused", "times as long"),
        (gzip.compress(noise(1001)), replace(LIMITS, output_bytes=1000), "body_too_large", "max_body_bytes"),
    ],
)
def test_a_body_is_refused_beyond_each_limit(body: bytes, limits: InflationLimits, code: str, setting: str) -> None:
    with pytest.raises(RequestError, match=setting) as caught:
        whole(body, limits)
    assert (caught.value.status, caught.value.code) == (413, code)


def test_empty_members_cost_no_more_each_the_more_there_are() -> None:
    # The 35 s that this took were spent on copies of what follows each member.
    assert whole(gzip.compress(b"") * 400_000, replace(LIMITS, members=400_000)) == b""
    with pytest.raises(RequestError, match="gzip members"):
        whole(gzip.compress(b"") * 400_000, replace(LIMITS, members=1024))


async def test_a_short_body_needs_no_thread_and_a_long_one_is_given_up_when_its_client_has_left_or_its_time_is_over() -> (  # noqa: E501
    None
):
    threads = TokenizationPool(1, 0, 0)
    threads.close()  # what would go to a thread would fail
    bodies = BodyReader(LIMITS, 0, threads, SystemClock())
    assert await bodies.inflated(gzip.compress(b"abc"), "gzip", lambda: True) == b"abc"
    assert await bodies.inflated(b"abc", "identity", lambda: True) == b"abc"
    threads = TokenizationPool(1, 0, 0)
    bodies = BodyReader(LIMITS, 0, threads, SystemClock())
    long = gzip.compress(noise(2 * STEPS_ON_LOOP * STEP_OUTPUT_BYTES))
    try:
        assert len(await bodies.inflated(long, "gzip", lambda: False)) == 2 * STEPS_ON_LOOP * STEP_OUTPUT_BYTES
        with pytest.raises(ClientLeft):
            await bodies.inflated(long, "gzip", lambda: True)
        hurried = BodyReader(replace(LIMITS, time_ms=0), 0, threads, SystemClock())
        with pytest.raises(RequestError, match="takes longer than"):
            await hurried.inflated(long, "gzip", lambda: False)
    finally:
        threads.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_nobody_works_for_a_client_that_has_left(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread stands amid a body until the server has noticed that the client left; then it does not go on."""
    amid, noticed = threading.Event(), threading.Event()
    steps = 0

    def counted(body: bytes, limits: InflationLimits) -> Iterator[bytes]:
        nonlocal steps
        for part in inflate(body, limits):
            steps += 1
            if steps == STEPS_ON_LOOP + 1:
                amid.set()
                assert noticed.wait(30)
            yield part

    monkeypatch.setattr("poolgrid.frontend.request_body.inflate", counted)
    registry = CollectorRegistry()
    body = gzip.compress(noise(100 * STEP_INPUT_BYTES), 1)

    def value(name: str) -> float:
        return registry.get_sample_value(name) or 0

    async with served(application(FakeBackend(), registry=registry)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = [
            f"POST {path} HTTP/1.1",
            "host: localhost",
            "content-encoding: gzip",
            f"content-length: {len(body)}",
        ]
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        assert await asyncio.to_thread(amid.wait, 30)
        assert value("poolgrid_frontend_tokenizations_pending") == 1
        # A reset, which is noticed at once; who only closes is found out by a probe.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        # The event loop has nothing else to do: when it has answered this, it has seen the end as well.
        other = await asyncio.open_connection("127.0.0.1", port)
        other[1].write(b"GET /live HTTP/1.1\r\nconnection: close\r\n\r\n")
        await other[0].read()
        noticed.set()
        while value("poolgrid_frontend_tokenizations_pending"):  # noqa: ASYNC110 - the thread tells nobody
            await asyncio.sleep(0.001)
    assert steps == STEPS_ON_LOOP + 1


def test_what_was_refused_does_not_wait_for_the_collector() -> None:
    bomb = gzip.compress(bytes(4 * LIMITS.output_bytes), 9)

    async def scenario() -> int:
        threads = TokenizationPool(1, 4, 0)
        bodies = BodyReader(replace(LIMITS, ratio=1e6), 0, threads, SystemClock())
        refusals = 0
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(4):
            # Not by pytest.raises, which refers to what it caught.
            try:
                await bodies.inflated(bomb, "gzip", lambda: False)
            except RequestError as error:
                refusals += error.status == 413
        assert refusals == 4
        await threads.run_in_thread(lambda: None)  # the one thread has let go of the last body
        held = tracemalloc.get_traced_memory()[0] - before
        threads.close()
        return held

    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        held = asyncio.run(scenario())
    finally:
        tracemalloc.stop()
        gc.enable()
    assert held < LIMITS.output_bytes / 8, "an error and its traceback refer to each other, and so to what came out"
