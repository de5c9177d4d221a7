"""A small OpenAI endpoint on a real socket, in its own thread: counts what it is sent and misbehaves on request."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def answer_of(prompt: list[int] | str, number: int) -> str:
    """The ``number``-th piece of text of an answer: a function of the prompt, so that a mix-up shows."""
    seed = sum(prompt) if isinstance(prompt, list) else len(prompt)
    return f" {(seed * 31 + number) % 997}"


class FakeEndpoint:
    """Answers ``/v1/models`` and streamed completions; ``fault(n)`` names what goes wrong with request ``n``."""

    def __init__(
        self,
        *,
        ttft_s: float = 0.0,
        itl_s: float = 0.0,
        fault: Callable[[int], str | None] = lambda _number: None,
        workers: int = 2,
        line_end: bytes = b"\n",
        gate: int = 0,
        tokens_per_word: float = 1.0,
        overhead_tokens: int = 0,
        unready: int = 0,
        ready_status: int = 200,
    ) -> None:
        self.tokens_per_word = tokens_per_word
        self.overhead_tokens = overhead_tokens
        """Of a chat template, for each message."""
        self.unready = unready
        """How often ``/ready`` says no first."""
        self.ready_status = ready_status
        self.ttft_s = ttft_s
        self.itl_s = itl_s
        self.fault = fault
        self.workers = workers
        self.line_end = line_end
        self.gate = gate
        """Requests that must run at once before any is answered."""
        self._gate_opened = asyncio.Event()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[bytes] = []
        self.connections = 0
        self.running = 0
        self.running_max = 0
        self.holding = threading.Event()
        """Set once a request with the fault ``hold`` has arrived."""
        self.port = 0
        self._seen: set[tuple[int, ...]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        tasks: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            self.connections += 1
            try:
                await self._connection(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass  # the client went away
            finally:
                writer.close()
                tasks.discard(task)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /ready"):
                self.unready -= 1
                status = 503 if self.unready >= 0 else self.ready_status
                writer.write(b"HTTP/1.1 %d said\r\nContent-Length: 0\r\n\r\n" % status)
                continue
            if head.startswith(b"GET"):
                body = json.dumps({"object": "list", "data": [{"id": "fake-model"}]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                continue
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            request = json.loads(await reader.readexactly(length))
            self.bodies.append(request)
            self.headers.append(head)
            self.running += 1
            self.running_max = max(self.running_max, self.running)
            try:
                if not await self._answer(request, len(self.bodies) - 1, writer):
                    return
            finally:
                self.running -= 1

    async def _answer(self, request: dict[str, Any], number: int, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection goes on."""
        fault = self.fault(number)
        if fault == "close":
            return False
        if fault == "hold":
            self.holding.set()
            await asyncio.Event().wait()
        if fault == "not-http":
            writer.write(b"SSH-2.0-OpenSSH_9.9\r\n")
            return False
        if fault == "busy":
            writer.write(b"HTTP/1.1 429 Too Many\r\nRetry-After: 3\r\nContent-Length: 4\r\n\r\nfull")
            return True
        if self.running >= self.gate:
            self._gate_opened.set()
        await self._gate_opened.wait()
        chat = "messages" in request
        messages = request.get("messages", ())
        prompt = " ".join(message["content"] for message in messages) if chat else request["prompt"]
        await asyncio.sleep(self.ttft_s)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            b"X-Poolgrid-Worker: w%d\r\n\r\n" % (number % self.workers)
        )
        if chat:
            self._event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for count in range(request["max_tokens"]):
            if count:
                await asyncio.sleep(self.itl_s)
            if count == 1 and fault == "cut":
                return False
            if count == 1 and fault == "end":
                break
            if count == 1 and fault == "garbage":
                self._chunk(writer, b"data: {oops" + self.line_end * 2)
            if count == 1 and fault == "error":
                self._event(writer, {"error": {"message": "worker lost", "code": 500}})
            text = answer_of(prompt, count)
            choice = {"delta": {"content": text}} if chat else {"text": text}
            self._event(writer, {"choices": [{"index": 0, **choice, "finish_reason": None}]})
        if fault not in ("end", "no-usage"):
            usage = {
                "prompt_tokens": len(prompt)
                if isinstance(prompt, list)
                else round(len(prompt.split()) * self.tokens_per_word) + len(messages) * self.overhead_tokens,
                "completion_tokens": request["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": self._cached(prompt)},
            }
            self._event(writer, {"choices": [], "usage": usage})
        if fault != "end":
            self._chunk(writer, b": a comment" + self.line_end + b"data: [DONE]" + self.line_end * 2)
        writer.write(b"0\r\n\r\n")
        return fault != "close-after"

    def _cached(self, prompt: list[int] | str, block: int = 16) -> int:
        """Tokens of whole leading blocks that came before: an infinite prefix cache."""
        if isinstance(prompt, str):
            return 0
        paths = [tuple(prompt[:end]) for end in range(block, len(prompt) + 1, block)]
        lead = next((at for at, path in enumerate(paths) if path not in self._seen), len(paths))
        self._seen.update(paths)
        return lead * block

    def _event(self, writer: asyncio.StreamWriter, payload: dict[str, Any]) -> None:
        self._chunk(writer, b"data: " + json.dumps(payload).encode() + self.line_end * 2)

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))


@contextmanager
def serving(endpoint: FakeEndpoint) -> Iterator[FakeEndpoint]:
    """Run the endpoint in a thread until the block ends."""
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    def main() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(endpoint.serve(ready, stop))

    thread = threading.Thread(target=main, name="fake-endpoint")
    thread.start()
    try:
        assert ready.wait(10), "the fake endpoint did not start"
        yield endpoint
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive(), "the fake endpoint did not end"
