"""Compressed request bodies: what comes out, how far, and for whom."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import random
import socket
import struct
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.request_body import (
    RATIO_FREE_BYTES,
    STEP_INPUT_BYTES,
    STEP_OUTPUT_BYTES,
    STEPS_ON_LOOP,
    ZSTD_WINDOW_LOG_MAX,
    BodyReader,
    ClientLeft,
    InflationLimits,
    inflate,
)
from poolgrid.server.frontend.tokenization import TokenizationPool
from poolgrid.server.process.clock import SystemClock
from tests.frontend.fake_backend import FakeBackend
from tests.frontend.server import application, post_to_shared, served

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LIMITS = InflationLimits(output_bytes=8 * 2**20, members=100, ratio=100, time_ms=60_000)


def bare_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush()


COMPRESS: Mapping[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd.compress}
"""Codings of which several members may follow each other."""

ALONE = (("deflate", zlib.compress), ("deflate", bare_deflate))


def whole(body: bytes, limits: InflationLimits = LIMITS, coding: str = "gzip") -> bytes:
    return b"".join(inflate(body, limits, coding))


def noise(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("coding", COMPRESS)
@given(parts=st.lists(st.binary(max_size=3 * STEP_INPUT_BYTES), min_size=1, max_size=5))
def test_members_come_out_as_they_went_in(coding: str, parts: list[bytes]) -> None:
    assert whole(b"".join(map(COMPRESS[coding], parts)), coding=coding) == b"".join(parts)


@pytest.mark.parametrize(("coding", "compress"), ALONE, ids=["zlib", "bare"])
@given(body=st.binary(max_size=3 * STEP_INPUT_BYTES))
def test_deflated_text_comes_out_as_it_went_in_with_and_without_a_header(
    coding: str, compress: Callable[[bytes], bytes], body: bytes
) -> None:
    assert whole(compress(body), coding=coding) == body


@pytest.mark.parametrize(("coding", "compress"), [*COMPRESS.items(), *ALONE], ids=[*COMPRESS, "zlib", "bare"])
@given(body=st.binary(max_size=200), cut=st.integers(min_value=1, max_value=30))
def test_what_is_cut_off_or_of_no_such_coding_is_refused_and_ends(
    coding: str, compress: Callable[[bytes], bytes], body: bytes, cut: int
) -> None:
    for wrong in (compress(body)[:-cut], b"\xff" + body, compress(body) + b"x" * cut):
        if wrong:
            with pytest.raises(RequestError) as caught:
                whole(wrong, coding=coding)
            assert (caught.value.status, caught.value.code) == (400, "invalid_encoding")


def test_zstd_frame_with_a_window_of_more_than_8_mib_is_refused_before_memory_is_taken_for_it() -> None:
    for window_log in (20, ZSTD_WINDOW_LOG_MAX, ZSTD_WINDOW_LOG_MAX + 1, 27):
        # A frame by hand: no content size, this window, one last raw block of one byte.
        frame = b"\x28\xb5\x2f\xfd\x00" + bytes([(window_log - 10) << 3]) + (1 | 1 << 3).to_bytes(3, "little") + b"x"
        if window_log <= ZSTD_WINDOW_LOG_MAX:
            assert whole(frame, coding="zstd") == b"x"
        else:
            with pytest.raises(RequestError, match="not valid zstd"):
                whole(frame, coding="zstd")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"])
@pytest.mark.parametrize(("coding", "compress"), [*COMPRESS.items(), *ALONE], ids=[*COMPRESS, "zlib", "bare"])
def test_body_of_every_coding_is_served_on_every_path(
    path: str, coding: str, compress: Callable[[bytes], bytes]
) -> None:
    messages = [{"role": "user", "content": "hi " * 1000}]
    body = {"model": "tiny", "messages": messages, "input": "hi", "max_tokens": 4}
    headers = {"content-encoding": coding, "content-type": "application/json"}
    response = post_to_shared(None, path, content=compress(json.dumps(body).encode()), headers=headers)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("coding", ["br", "compress", "gzip, zstd", "zstd;q=1"])
def test_other_codings_are_refused_and_those_that_are_taken_are_named(coding: str) -> None:
    response = post_to_shared(None, "/v1/responses", content=b"x", headers={"content-encoding": coding})
    assert response.status_code == 415
    assert "gzip, deflate, zstd" in response.json()["error"]["message"]
    assert response.headers["accept-encoding"] == "gzip, deflate, zstd"


@pytest.mark.parametrize(("coding", "compress"), [*COMPRESS.items(), *ALONE], ids=[*COMPRESS, "zlib", "bare"])
def test_a_step_is_short(coding: str, compress: Callable[[bytes], bytes]) -> None:
    body = noise(500_000) + bytes(900_000)
    steps = list(inflate(compress(body), LIMITS, coding))
    assert max(map(len, steps)) <= STEP_OUTPUT_BYTES
    assert b"".join(steps) == body


@pytest.mark.parametrize(
    ("body", "limits", "code", "setting"),
    [
        (b"", LIMITS, "inflation_refused", "members"),
        (bytes(RATIO_FREE_BYTES + 1), LIMITS, "inflation_refused", "times as long"),
        (noise(1001), replace(LIMITS, output_bytes=1000), "body_too_large", "max_body_bytes"),
    ],
)
@pytest.mark.parametrize("coding", COMPRESS)
def test_a_body_is_refused_beyond_each_limit(
    coding: str, body: bytes, limits: InflationLimits, code: str, setting: str
) -> None:
    compressed = COMPRESS[coding](body) * (101 if not body else 1)
    with pytest.raises(RequestError, match=setting) as caught:
        whole(compressed, limits, coding)
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

    def counted(body: bytes, limits: InflationLimits, coding: str) -> Iterator[bytes]:
        nonlocal steps
        for part in inflate(body, limits, coding):
            steps += 1
            if steps == STEPS_ON_LOOP + 1:
                amid.set()
                assert noticed.wait(30)
            yield part

    monkeypatch.setattr("poolgrid.server.frontend.request_body.inflate", counted)
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
