"""Nothing of a request waits for the garbage collector, however the request ends.

The collector runs rarely in a process that serves (``poolgrid.server.process.garbage``): what is in a circle stays for
minutes with its connection, its prompt and its answer.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine
from itertools import product
from typing import Any

import msgspec

from poolgrid.server.frontend.api_endpoint import absent_endpoint
from poolgrid.server.frontend.stream_head import StreamHead
from tests.frontend.fake_backend import FakeBackend, Step, speak
from tests.frontend.server import application, served
from tests.process.leftovers import collected

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "user", "content": "Hi"}]

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "Hi"}),
    "choices": ("/v1/completions", {"prompt": "Hi", "n": 3, "temperature": 1.0}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "chat with stop strings": ("/v1/chat/completions", {"messages": MESSAGES, "stop": ["zz"]}),
    "chat with tools": ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS}),
    "response": ("/v1/responses", {"input": "Hi", "store": False}),
    "message": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
}
SERVED = [name for name, (path, _) in REQUESTS.items() if not absent_endpoint(path)]


class Client:
    """One connection, for one request or for a second one."""

    def __init__(self, port: int, backend: FakeBackend, number: int = 1) -> None:
        self.port = port
        self.backend = backend
        self.number = number

    async def sends(self, path: str, body: dict[str, Any], part: float = 1.0) -> None:
        """Connect and send this part of a request."""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        if self.number == 2:
            self.writer.write(b"HEAD /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await self.reader.readuntil(b"\r\n\r\n")
        content = msgspec.json.encode({"model": "tiny", **body})
        head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(content))
        self.writer.write(head + content[: int(len(content) * part)])

    async def leaves(self) -> None:
        """Go, and wait until the server has heard of it: it answers what was asked later."""
        self.writer.close()
        await self.asks_for_nothing()

    async def asks_for_nothing(self) -> None:
        """Have an answer on another connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /nothing HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        await reader.read()
        writer.close()


End = Callable[[Client, str, dict[str, Any]], Coroutine[Any, Any, None]]


async def answered(client: Client, path: str, body: dict[str, Any]) -> None:
    await client.sends(path, body)
    assert (await client.reader.readline()).startswith(b"HTTP/1.1 200")
    await client.leaves()


async def streamed(client: Client, path: str, body: dict[str, Any]) -> None:
    await answered(client, path, {**body, "stream": True})


async def left_amid_the_request(client: Client, path: str, body: dict[str, Any]) -> None:
    await client.sends(path, body, 0.5)
    await client.leaves()


async def left_amid_the_answer(client: Client, path: str, body: dict[str, Any]) -> None:
    waiting = asyncio.Event()
    client.backend.on_waiting = waiting.set
    client.backend.script = lambda _: [*half(), asyncio.Event(), *half()]
    await client.sends(path, {**body, "stream": True})
    await waiting.wait()
    await client.leaves()


async def left_before_the_answer(client: Client, path: str, body: dict[str, Any]) -> None:
    waiting = asyncio.Event()
    client.backend.on_waiting = waiting.set
    client.backend.script = lambda _: [asyncio.Event()]
    await client.sends(path, body)
    await waiting.wait()
    await client.leaves()


async def left_in_the_queue(client: Client, path: str, body: dict[str, Any]) -> None:
    client.backend.admission = asyncio.Event()
    await client.sends(path, body)
    await client.backend.submitted.wait()
    await client.leaves()


async def refused(client: Client, path: str, body: dict[str, Any]) -> None:
    await client.sends(path, {**body, "temperature": "hot"})
    assert (await client.reader.readline()).startswith(b"HTTP/1.1 400")
    await client.leaves()


def half() -> list[Step]:
    steps = speak("Hello, world!")
    del steps[len(steps) // 2 :]
    return steps


ENDS: list[End] = [
    answered,
    streamed,
    left_amid_the_request,
    left_amid_the_answer,
    left_before_the_answer,
    left_in_the_queue,
    refused,
]


def test_nothing_of_a_request_waits_for_the_collector() -> None:
    async def scenario() -> dict[str, Counter[str]]:
        found = {}
        async with served(application(backend)) as port:
            await Client(port, backend).asks_for_nothing()  # its tasks run now
            for end in ENDS:
                await once(end, port, "chat")  # what is made with the first one stays
            gc.collect()
            gc.freeze()
            gc.disable()
            try:
                for end, name, number in product(ENDS, SERVED, (1, 2)):
                    await once(end, port, name, number)
                    if waiting := collected():
                        found[f"{name}, {end.__name__}, {number}"] = waiting
            finally:
                gc.enable()
                gc.unfreeze()
        return found

    async def once(end: End, port: int, name: str, number: int = 2) -> None:
        others = asyncio.all_tasks()
        backend.__init__()  # type: ignore[misc]
        await end(Client(port, backend, number), *REQUESTS[name])
        if tasks := asyncio.all_tasks() - others:
            await asyncio.wait(tasks)

    backend = FakeBackend()
    assert asyncio.run(asyncio.wait_for(scenario(), 60)) == {}


async def test_nothing_of_a_head_that_could_not_be_sent_waits_for_the_collector() -> None:
    began, never = asyncio.Event(), asyncio.Event()

    async def start() -> None:
        began.set()
        await never.wait()

    async def write(_: bytes) -> None:
        raise AssertionError("nothing was sent yet")

    head = StreamHead(start, write, b"")
    others = asyncio.all_tasks()
    await began.wait()  # by itself, because nobody writes
    sending = asyncio.all_tasks() - others
    head.close()
    await asyncio.wait(sending)
    sending.clear()
    known = weakref.ref(head)
    gc.disable()
    try:
        del head
        assert known() is None
    finally:
        gc.enable()
