"""The inference endpoints as an ASGI server sees them: what is sent when, and what is left behind."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from poolgrid.kernel.requests.inference import StreamDelta
from tests.frontend.fake_backend import TINY, FakeBackend, speak
from tests.frontend.server import application


class Exchange:
    """One request to the application, with the guard of a connection, which reports a client that leaves.

    ``writable`` cleared makes the server's write wait, as a slow reader does.
    """

    def __init__(self, app: FastAPI, **fields: Any) -> None:
        self._app = app
        self._body = json.dumps({"model": "tiny", "prompt": "hi", **fields}).encode()
        self._asked = False
        self.left = asyncio.Event()
        self.started = asyncio.Event()
        self.writing = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()
        self.broken = False
        self.guard = SimpleNamespace(is_lost=False, source=None)
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.start":
            self.started.set()
            return
        self.writing.set()
        await self.writable.wait()
        if self.broken:
            raise OSError("the connection is closed")

    async def run(self) -> None:
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        await self._app({**scope, "state": {"guard": self.guard}}, self.receive, self.send)


async def test_headers_are_sent_once_the_worker_is_known_before_any_token() -> None:
    hold = asyncio.Event()
    exchange = Exchange(application(FakeBackend(lambda request: [hold, *speak("hello")])), stream=True)
    task = asyncio.ensure_future(exchange.run())
    # A server sends them with what comes first of the body (ASGI), though it is empty.
    await exchange.writing.wait()
    assert [message.get("body") for message in exchange.sent] == [None, b""]
    hold.set()
    await task
    assert dict(exchange.sent[0]["headers"])[b"x-poolgrid-worker"] == b"worker-0"


async def test_a_slow_reader_holds_up_its_own_stream_only() -> None:
    backend = FakeBackend(lambda request: speak("Hello, world!"))
    app = application(backend)
    slow, quick = Exchange(app, stream=True), Exchange(app, stream=True)
    slow.writable.clear()
    task = asyncio.ensure_future(slow.run())
    await slow.writing.wait()
    steps_left = len(backend.streams[0].steps)
    assert steps_left > 0

    await quick.run()

    assert quick.sent[-1]["more_body"] is False
    assert len(backend.streams[0].steps) == steps_left
    slow.writable.set()
    await task
    assert slow.sent[-1]["more_body"] is False


@pytest.mark.parametrize("broken", [False, True])
async def test_a_client_that_leaves_while_it_is_written_to_frees_its_worker(broken: bool) -> None:
    backend = FakeBackend(lambda request: speak("Hello, world!"))
    exchange = Exchange(application(backend), stream=True)
    exchange.writable.clear()
    task = asyncio.ensure_future(exchange.run())
    await exchange.writing.wait()

    if broken:
        exchange.broken = True
        exchange.writable.set()
    else:
        exchange.guard.source.client_gone()
    with suppress(OSError):  # of the server, which logs it
        await task

    assert backend.streams[0].cancels == 1


async def test_stopping_the_process_cancels_requests_as_usual() -> None:
    backend = FakeBackend(lambda request: [asyncio.Event()])
    waits = asyncio.Event()
    backend.on_waiting = waits.set
    task = asyncio.ensure_future(Exchange(application(backend), n=2).run())
    await waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [stream.cancels for stream in backend.streams] == [1, 1]


@pytest.mark.parametrize("n", [1, 2])
async def test_tokens_after_a_stop_string_in_the_same_arrival_are_not_counted(n: int) -> None:
    token_ids = TINY.encode("one two three")

    backend = FakeBackend(
        lambda request: [
            [StreamDelta(token_ids[at : at + 4]) for at in range(0, len(token_ids), 4)],
            [StreamDelta(token_ids, "length")],
        ]
    )
    exchange = Exchange(application(backend), stop="two", n=n)
    await exchange.run()
    answer = json.loads(exchange.sent[-1]["body"])
    assert [choice["text"] for choice in answer["choices"]] == ["one "] * n
    counted = answer["usage"]["completion_tokens"] // n
    assert TINY.decode(token_ids[: 4 * counted]).endswith("two")


async def test_one_request_goes_between_the_many_choices_of_another() -> None:
    backend = FakeBackend(lambda request: speak("hello"))
    app = application(backend)
    await asyncio.gather(Exchange(app, prompt="many", n=64, best_of=64).run(), Exchange(app, prompt="one").run())
    lone = TINY.encode("one")
    (place,) = [place for place, request in enumerate(backend.requests) if request.token_ids == lone]
    assert 0 < place < 32
