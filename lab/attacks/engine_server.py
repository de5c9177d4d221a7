"""An engine server under the attacker's control: it answers all requests correctly but those that name a trick.

It speaks as vLLM's server does, as far as poolgrid asks. A request's `seed` names the trick, so that requests of others
are answered as the simulated engine would answer them, which is what the bystanders expect. `facts` are tricks for what
poolgrid itself asks: health, version, models, metrics.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from poolgrid.kernel.wire.hashing import pack_tokens
from poolgrid.kernel.wire.requests import Sampling
from poolgrid.plugins.simulated.core.next_token import expected_output
from poolgrid.server.frontend.models import TINY_MODEL_PATH
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
        prompt = body.get("prompt", "")
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


def _usage(number: str) -> Trick:
    """Return the trick of a correct answer all of whose counts are impossible."""
    named = ("prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens")
    counts = ", ".join(f'"{name}": {number}' for name in named)
    return lambda asked, write: answer(asked, write, f"{{{counts}}}")


async def long_id(asked: Asked, write: Write) -> None:
    """Give the answer an id of a megabyte, which no other answer has."""
    body = b'{"id": "%d%b", "choices": []}' % (id(asked), b"i" * int(1_000_000 * asked.share))
    await write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
    await write(body)


def raw(data: bytes) -> Trick:
    """Return the trick of exactly these bytes, after which the connection ends."""

    async def trick(asked: Asked, write: Write) -> None:
        await write(data)
        raise ConnectionResetError

    return trick


def kept(data: bytes, more: bytes = b"", pause_s: float = 0.0) -> Trick:
    """Return the trick of exactly these bytes, and more of them a moment later; the connection stays."""

    async def trick(asked: Asked, write: Write) -> None:
        await write(data)
        if more:
            await asyncio.sleep(pause_s)
            await write(more)

    return trick


def ever(beginning: bytes, piece: bytes, limit: int = 300_000_000) -> Trick:
    """Return the trick of a beginning and then one piece again and again, at most ``limit`` bytes."""

    async def trick(asked: Asked, write: Write) -> None:
        await write(beginning)
        pieces = piece * max(1, PIECE_BYTES // len(piece))
        for _ in range(int(limit * asked.share) // len(pieces)):
            await write(pieces)
            await asyncio.sleep(0)
        raise ConnectionResetError

    return trick


async def dripping(asked: Asked, write: Write) -> None:
    """Send a head a byte at a time, and do not end it."""
    await write(b"HTTP/1.1 200 OK\r\nx: ")
    while True:
        await write(b"y")
        await asyncio.sleep(DRIP_S)


async def unread(asked: Asked, write: Write) -> None:
    """Say nothing for as long as the client stays."""
    await asyncio.sleep(3600)


@cache
def bomb() -> bytes:
    """Return what inflates to 256 MB: as many members of one."""
    return gzip.compress(b"\0" * (1 << 20), 9, mtime=0) * 256


def bombed(kind: str, framing: bool) -> Trick:
    """Return the trick of an answer that inflates to a thousand times its size."""

    async def trick(asked: Asked, write: Write) -> None:
        data = bomb()
        length = b"transfer-encoding: chunked" if framing else b"content-length: %d" % len(data)
        await write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n" % kind.encode())
        await write(b"content-encoding: gzip\r\n%b\r\n\r\n" % length)
        for at in range(0, len(data), PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            await write(chunk(piece) if framing else piece)
        await write(b"0\r\n\r\n" if framing else b"")

    return trick


OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
PLAIN = OK + b"content-length: 2\r\n\r\n{}"
DRIP_S = 0.05
EVENT = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'

STREAMS = (
    endless,
    ever(HEAD, chunk(b"data: ")),
    ever(HEAD, chunk(b": comment\n")),
    ever(HEAD, chunk(EVENT * 50)),
    ever(OK + b"\r\n", b'{"a": '),
    ever(CHUNKED, b"1\r\nx\r\n"),
    ever(HEAD, chunk(b"data: 1\n\n" * 100)),
    ever(HEAD, chunk(b"\r" * 1000)),
    ever(HEAD, chunk(b'data: {"choices": [' + b"{}," * 100_000 + b'{}], "usage": NaN}\n\n')),
)
"""Answers without end, of each framing and with events, half events and none."""

CHUNKS = (
    ever(CHUNKED + b"ffffffff\r\n", b"x" * PIECE_BYTES),
    ever(CHUNKED + b"1;", b"extension"),
    ever(CHUNKED, b"1;" + b"e" * 15_000 + b"\r\nx\r\n", 100_000_000),
    *(
        raw(CHUNKED + size + b"\r\n{}\r\n0\r\n\r\n")
        for size in (
            b"ffffffffffffffff",
            b"-2",
            b"+2",
            b"0x2",
            b"2_0",
            b"",
            b" ",
            b"\xb2",
            b"2\r",
            b"1 1",
            b"000000002",
        )
    ),
)
"""Huge chunks, and sizes that are none."""

LENGTHS = (
    *(raw(OK + b"content-length: " + length + b"\r\n\r\n{}") for length in (b"100", b"18446744073709551615")),
    *(
        kept(OK + b"content-length: " + length + b"\r\n\r\n{}")
        for length in (b"-2", b"+2", b"2_0", b"0x2", b"2, 2", b"2 2", b"", b"99999999999999999999", b"1")
    ),
    kept(OK + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}"),
    kept(OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
    kept(OK + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
    kept(OK + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
)
"""Lengths that are wrong, none, or several."""

BOMBS = tuple(bombed(kind, framing) for kind in ("application/json", "text/event-stream") for framing in (False, True))

HEADERS = (
    ever(OK, b"x: y\r\n"),
    ever(OK, b"x-%b: y\r\n" % (b"n" * 500)),
    ever(CHUNKED + b"1\r\nx\r\n0\r\n", b"x: y\r\n"),
    kept(OK + b"x: y\r\n" * 10_000 + b"content-length: 2\r\n\r\n{}"),
    dripping,
)
"""Floods of headers and trailers, and heads that come slowly."""

ENDS = (
    raw(b""),
    raw(b"HTTP/1.1 2"),
    raw(OK),
    raw(OK + b"content-length: 9\r\n\r\n"),
    raw(CHUNKED + b"5\r\nab"),
    raw(CHUNKED + b"2\r\n{}\r\n"),
    raw(HEAD),
    raw(HEAD + chunk(EVENT)),
    raw(HEAD + chunk(EVENT[:20])),
    kept(HEAD + chunk(EVENT + EVENT[:20]) + b"0\r\n\r\n"),
    kept(HEAD + chunk(b"\n\n\r\n\r\ndata") + b"0\r\n\r\n"),
    unread,
)
"""Connections that end, in each stage of an answer, and streams that end within an event."""

INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"
EARLY = b"HTTP/1.1 103 Early Hints\r\nlink: </x>; rel=preload\r\n\r\n"
TWO = (
    ever(b"", INTERIM, 10_000_000),
    kept(INTERIM + EARLY + PLAIN),
    kept(b"HTTP/1.1 103 Early Hints\r\ncontent-length: 2\r\n\r\n{}" + PLAIN),
    kept(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n" + PLAIN),
    kept(PLAIN + PLAIN),
    kept(PLAIN + b"SSH-2.0-OpenSSH\r\n"),
    kept(CHUNKED + b"2\r\n{}\r\n0\r\n\r\n" + PLAIN),
    kept(b"HTTP/1.1 204 No Content\r\ncontent-length: 2\r\n\r\n{}"),
    kept(b"HTTP/1.1 304 Not Modified\r\n\r\n", b"{}", 0.05),
)
"""Interim answers, several answers at once, and bodies where none may be."""

MALFORMED = (
    *(raw(b"HTTP/1.1 " + status + b" Odd\r\ncontent-length: 2\r\n\r\n{}") for status in (b"99", b"099", b"1000", b"0")),
    *(
        raw(b"HTTP/1.1 " + status + b" Odd\r\ncontent-length: 2\r\n\r\n{}")
        for status in (b"600", b"999", b"-1", b"2 0")
    ),
    *(raw(OK + b"x: a" + odd + b"b: c\r\ncontent-length: 2\r\n\r\n{}") for odd in (b"\r", b"\n", b"\0", b"\x1b[2J")),
    *(
        raw(OK + line + b"\r\ncontent-length: 2\r\n\r\n{}")
        for line in (b": v", b"x y: v", b"x : v", b" folded", b"none")
    ),
    raw(b"HTTP/9.9 200 OK\r\n\r\n"),
    raw(b"\0" * 1000),
    raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    kept(b"HTTP/1.1 307 Again\r\nlocation: /v1/completions\r\ncontent-length: 0\r\n\r\n"),
)
"""Heads that are none, statuses without a class, another protocol, and a redirect to itself."""

_INFO = b'vllm:cache_config_info{block_size="%b",num_gpu_blocks="%b"} 1.0\n'
_RUNNING = b"vllm:num_requests_running"


def page(data: bytes) -> bytes:
    """Return a whole answer."""
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


def _models(count: int, name: str = "m", **more: Any) -> bytes:
    cards = [{"id": f"{name}{number}", "owned_by": "vllm", **more} for number in range(count)]
    return page(json.dumps({"object": "list", "data": cards}).encode())


FACTS: tuple[dict[bytes, Trick], ...] = (
    *({path: ever(OK + b"\r\n", b" ")} for path in (b"/health", b"/version", b"/v1/models", b"/metrics")),
    *({path: raw(b"HTTP/1.1 302 Found\r\nlocation: %b\r\n\r\n" % path)} for path in (b"/health", b"/v1/models")),
    {b"/metrics": kept(page(_RUNNING * 500_000))},
    {b"/metrics": kept(page((_RUNNING + b" 1\n") * 400_000))},
    {b"/metrics": kept(page(b"".join(_RUNNING + b" " + value + b"\n" for value in (b"NaN", b"Inf", b"-1", b"1e999"))))},
    {b"/metrics": kept(page((_INFO % (b"32", b"9" * 3000)) * 3000))},
    {b"/metrics": kept(page(_INFO % (b"4294967295", b"4294967295")))},
    {b"/metrics": kept(page(_INFO % (b"0", b"-1")))},
    {b"/v1/models": kept(_models(60_000))},
    {b"/v1/models": kept(_models(1, "x" * 5000))},
    {b"/v1/models": kept(_models(1, "\n\x1b[2Jready", max_model_len=10**300))},
    {b"/v1/models": kept(page(b'{"data": ' + b"[" * 900_000))},
    {b"/version": kept(page(b'{"version": "%b"}' % (b"9" * 500_000)))},
    {b"/kv_event_sources": kept(page(b"[%b]" % b",".join([b'{"endpoint": "tcp://*:1"}'] * 30_000)))},
    {b"/health": ever(b"", INTERIM)},
    {b"/health": raw(PLAIN + PLAIN), b"/metrics": raw(b"HTTP/1.1 101 No\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n")},
    {b"/health": dripping, b"/metrics": dripping, b"/v1/models": dripping},
)
"""Answers to what poolgrid itself asks of a server."""

IMPOSSIBLE = ("-1", "-9223372036854775808", "4294967296", "1" + "0" * 400, "1.5", '"7"')
NUMBERS = (*map(counted, IMPOSSIBLE), *map(_usage, IMPOSSIBLE), counted("NaN"), _usage("-Infinity"))
TOKENS = tuple(token(each) for each in ("-1", "4294967296", "1" + "0" * 400, "1.5", "true", "null"))
TRICKS: tuple[Trick, ...] = (
    *(*NUMBERS, *TOKENS, together, big_line, header, trailer, nested, error_body, long_id),
    *(*STREAMS, *CHUNKS, *LENGTHS, *BOMBS, *HEADERS, *ENDS, *TWO, *MALFORMED),
)


def seed_of(trick: Trick) -> int:
    """Return the seed that asks for a trick."""
    return FIRST_TRICK + TRICKS.index(trick)


class EngineServer:
    """One server, on the running loop."""

    def __init__(self, model: str) -> None:
        self.share = 1.0
        self.facts: dict[bytes, Trick] = {}
        """Tricks by path, of what poolgrid itself asks."""
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
                method, path, _ = head.split(b" ", 2)
                if method == b"post" and await self._answer(path, json.loads(body), write):
                    continue
                if path in self.facts:
                    await self.facts[path](Asked({"max_tokens": 1}, self.share), write)
                    continue
                said = self._facts(path)
                await write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (said[0], len(said[1]), said[1]))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # poolgrid has left
        finally:
            writer.close()

    async def _answer(self, path: bytes, body: dict[str, Any], write: Write) -> bool:
        """Answer a request with the trick that it names, or correctly; return whether it has an answer."""
        number = (body.get("seed") or 0) - FIRST_TRICK
        is_trick = 0 <= number < len(TRICKS)
        if is_trick or path == b"/v1/completions":
            await (TRICKS[number] if is_trick else answer)(Asked(body, self.share), write)
        return is_trick or path == b"/v1/completions"

    def _facts(self, path: bytes) -> tuple[bytes, bytes]:
        if path == b"/v1/models":
            entry = {"id": self._model, "owned_by": "vllm", "root": str(TINY_MODEL_PATH), "max_model_len": 131_072}
            return b"200 OK", json.dumps({"object": "list", "data": [entry]}).encode()
        if path == b"/metrics":
            blocks = f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",num_gpu_blocks="4096"}} 1.0\n'
            return b"200 OK", b"# TYPE vllm:cache_config_info gauge\n" + blocks.encode()
        # The harness asks each API once before it counts; bystanders and attacker use completions alone.
        if path in (b"/health", b"/version", b"/v1/chat/completions", b"/v1/responses"):
            return b"200 OK", b"{}"
        return b"404 Not Found", b"{}"
