"""An engine server under the attacker's control: it answers everybody rightly, and whoever names a trick by that trick.

It speaks as vLLM's server does, as far as a worker asks. A request's `seed` names the trick, so that requests of others
are answered as the simulated engine would answer them, which is what the bystanders expect.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from poolgrid.wire.hashing import pack_tokens
from poolgrid.wire.requests import Sampling
from poolgrid.workers.engines.simulated.core.next_token import expected_output
from tests.e2e.expectation import MODEL, SPOKEN, pieces_of

FIRST_TRICK = 900_000
"""Seed of the first trick; bystanders give none."""

PIECE_BYTES = 1200
STEP_S = 0.002
BLOCK_TOKENS = 32

Write = Callable[[bytes], Awaitable[None]]
Trick = Callable[["Asked", Write], Awaitable[None]]


class Asked:
    """One request."""

    def __init__(self, body: dict[str, Any], share: float) -> None:
        self.max_tokens: int = body["max_tokens"]
        self.share = share
        """Of the full size of a trick."""
        prompt = body["prompt"]
        packed = MODEL.encode(prompt) if isinstance(prompt, str) else pack_tokens(prompt)
        self.tokens = expected_output(packed, Sampling(max_tokens=self.max_tokens, ignore_eos=True), SPOKEN)
        """The right answer."""


def chunk(data: bytes) -> bytes:
    """Return a chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    """Return an event as a chunk; text goes as it is."""
    data = value if isinstance(value, str) else json.dumps(value)
    return chunk(b"data: " + data.encode() + b"\n\n")


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def answer(asked: Asked, write: Write, usage: Any = None, pause_s: float = STEP_S) -> None:
    """Answer rightly; ``usage`` is what follows the last token."""
    await write(HEAD)
    last = len(asked.tokens) - 1
    for number, piece in enumerate(pieces_of(asked.tokens)):
        choice = {"index": 0, "text": piece, "finish_reason": "length" if number == last else None}
        await write(event({"choices": [choice]}))
        await asyncio.sleep(pause_s)
    counts = {"prompt_tokens": 1, "completion_tokens": len(asked.tokens), "total_tokens": 1 + len(asked.tokens)}
    said = {**counts, "prompt_tokens_details": {"cached_tokens": 0}} if usage is None else usage
    await write(event(f'{{"choices": [], "usage": {said if isinstance(said, str) else json.dumps(said)}}}'))
    await write(event("[DONE]") + b"0\r\n\r\n")


def counted(number: str) -> Trick:
    """Return the trick of a right answer with an impossible number of cached tokens."""
    return lambda asked, write: answer(asked, write, f'{{"prompt_tokens_details": {{"cached_tokens": {number}}}}}')


def token(text: str) -> Trick:
    """Return the trick of a token that is none."""

    async def trick(asked: Asked, write: Write) -> None:
        await write(HEAD + event(f'{{"choices": [{{"index": 0, "token_ids": [{text}], "finish_reason": null}}]}}'))
        await write(event("[DONE]") + b"0\r\n\r\n")

    return trick


async def together(asked: Asked, write: Write) -> None:
    """Send very many tokens in one chunk."""
    many = "7," * max(1000, int(1_000_000 * asked.share))
    await write(HEAD + event(f'{{"choices": [{{"index": 0, "token_ids": [{many}7], "finish_reason": null}}]}}'))
    await asyncio.sleep(3600)


async def endless(asked: Asked, write: Write) -> None:
    """Send tokens for as long as somebody reads."""
    await write(HEAD)
    while True:
        await write(
            event({"choices": [{"index": 0, "text": "a", "token_ids": asked.tokens[:1], "finish_reason": None}]})
        )
        await asyncio.sleep(0)  # others are answered on this loop as well


async def _pieces(write: Write, size: int, wrap: Callable[[bytes], bytes] = bytes) -> None:
    for _ in range(size // PIECE_BYTES):
        await write(wrap(b"1" * PIECE_BYTES))
        await asyncio.sleep(0)


async def big_line(asked: Asked, write: Write) -> None:
    """Send one line in small pieces."""
    await write(HEAD + chunk(b'data: {"choices": ['))
    await _pieces(write, int(15_000_000 * asked.share), chunk)
    await write(chunk(b"\n\n") + b"0\r\n\r\n")


async def header(asked: Asked, write: Write) -> None:
    """Send one header that does not end."""
    await write(b"HTTP/1.1 200 OK\r\nx: ")
    await _pieces(write, int(300_000_000 * asked.share))


async def trailer(asked: Asked, write: Write) -> None:
    """Send a trailer that does not end."""
    await write(HEAD + chunk(b": comment\n\n") + b"0\r\nx: ")
    await _pieces(write, int(300_000_000 * asked.share))


async def nested(asked: Asked, write: Write) -> None:
    """Send an event that nests very deep."""
    await write(HEAD + event('{"choices": ' + "[" * 1_000_000) + b"0\r\n\r\n")


async def error_body(asked: Asked, write: Write) -> None:
    """Refuse with a body that does not end."""
    await write(b"HTTP/1.1 500 no\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n")
    await _pieces(write, int(300_000_000 * asked.share), chunk)


NUMBERS = tuple(counted(each) for each in ("-1", "-9223372036854775808", "4294967296", "1" + "0" * 400, "1.5", '"7"'))
TOKENS = tuple(token(each) for each in ("-1", "4294967296", "1" + "0" * 400, "1.5", "true", "null"))
TRICKS: tuple[Trick, ...] = (*NUMBERS, *TOKENS, together, endless, big_line, header, trailer, nested, error_body)


def seed_of(trick: Trick) -> int:
    """Return the seed that asks for a trick."""
    return FIRST_TRICK + TRICKS.index(trick)


class EngineServer:
    """One server, on the running loop."""

    def __init__(self, model: str) -> None:
        self.share = 1.0
        self._model = model
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> str:
        """Listen on a free port; return the URL."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        return f"http://{host}:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
                body = await reader.readexactly(size)
                path = head.split(b" ", 2)[1]
                if path == b"/v1/completions":
                    await self._complete(json.loads(body), write)
                    continue
                said = self._facts(path)
                await write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (said[0], len(said[1]), said[1]))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the worker has left
        finally:
            writer.transport.abort()

    async def _complete(self, body: dict[str, Any], write: Write) -> None:
        number = (body.get("seed") or 0) - FIRST_TRICK
        asked = Asked(body, self.share)
        await (TRICKS[number] if 0 <= number < len(TRICKS) else answer)(asked, write)

    def _facts(self, path: bytes) -> tuple[bytes, bytes]:
        if path == b"/v1/models":
            entry = {"id": self._model, "owned_by": "vllm", "root": "", "max_model_len": 131_072}
            return b"200 OK", json.dumps({"object": "list", "data": [entry]}).encode()
        if path == b"/metrics":
            blocks = f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",num_gpu_blocks="4096"}} 1.0\n'
            return b"200 OK", b"# TYPE vllm:cache_config_info gauge\n" + blocks.encode()
        # The harness asks each API once before it counts; bystanders and attacker use completions alone.
        if path in (b"/health", b"/version", b"/v1/chat/completions", b"/v1/responses"):
            return b"200 OK", b"{}"
        return b"404 Not Found", b"{}"
