"""A mock OpenAI server, for the peers that pass HTTP through: answers at once, with as many tokens as were asked for.

    python -m lab.benchmarks.http_engine PORT [STEP_MS]

``/v1/completions`` and ``/v1/chat/completions`` (JSON and SSE, one chunk per token), their ``/render`` (the prompt's
token ids: one per word, the same for the same word), any GET. Raw protocol on uvloop. With ``STEP_MS`` a step begins so
often, and gives every stream one token, as engines do it; without, all tokens leave at once.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import chain, repeat
from typing import Any, cast

import httptools
import msgspec
import uvloop


class _Wanted(msgspec.Struct):
    max_tokens: int = 1
    stream: bool = False


class _Text(msgspec.Struct):
    content: str = ""


class _Prompt(msgspec.Struct):
    prompt: Any = ""
    messages: list[_Text] = []


_decode = msgspec.json.Decoder(_Wanted).decode
_decode_prompt = msgspec.json.Decoder(_Prompt).decode
INFERENCE = (b"/v1/completions", b"/v1/chat/completions")
RENDERING = tuple(path + b"/render" for path in INFERENCE)
VOCABULARY = 32_000
MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","owned_by":"mock"}]}'


class Steps:
    """Writes the next chunk of every stream that runs, once in a step."""

    def __init__(self, step_ms: float) -> None:
        self._step_s = step_ms / 1000
        self._running: list[tuple[asyncio.Transport, Iterator[bytes]]] = []
        self._due_s = 0.0

    def begin(self, transport: asyncio.Transport, chunks: Iterator[bytes]) -> None:
        """Take a stream into the next step."""
        if not self._running:
            self._wait(asyncio.get_running_loop().time())
        self._running.append((transport, chunks))

    def _wait(self, since_s: float) -> None:
        # On a clock of its own: a step that came late does not make the next ones late.
        self._due_s = since_s + self._step_s
        asyncio.get_running_loop().call_at(self._due_s, self._step)

    def _step(self) -> None:
        running, self._running = self._running, []
        for transport, chunks in running:
            chunk = next(chunks, None)
            if chunk is not None and not transport.is_closing():
                transport.write(chunk)
                self._running.append((transport, chunks))
        if self._running:
            self._wait(self._due_s)


class _Server(asyncio.Protocol):
    def __init__(self, steps: Steps | None) -> None:
        self._steps = steps
        self._parser: httptools.HttpRequestParser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._url = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are transports in all but the base class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url, self._body = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path = self._url.partition(b"?")[0]
        if path in RENDERING:
            self._answer(rendered(b"".join(self._body), chat=b"chat" in path))
            return
        if path not in INFERENCE:
            known = self._parser.get_method() == b"GET"
            self._answer(MODELS if known else b'{"error":"unknown"}', b"200 OK" if known else b"404 Not Found")
            return
        wanted = _decode(b"".join(self._body))
        chat = b"chat" in path
        usage = b'{"prompt_tokens":1,"completion_tokens":%d,"total_tokens":%d}' % (
            wanted.max_tokens,
            wanted.max_tokens + 1,
        )
        if wanted.stream:
            self._stream(chat, wanted.max_tokens)
        elif chat:
            self._answer(
                b'{"id":"x","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,"message":'
                b'{"role":"assistant","content":"%s"},"finish_reason":"length"}],"usage":%s}'
                % (b" word" * wanted.max_tokens, usage)
            )
        else:
            self._answer(
                b'{"id":"x","object":"text_completion","created":1,"model":"bench","choices":[{"index":0,"text":"%s",'
                b'"logprobs":null,"finish_reason":"length"}],"usage":%s}' % (b" word" * wanted.max_tokens, usage)
            )

    def _answer(self, body: bytes, status: bytes = b"200 OK") -> None:
        assert self._transport is not None
        self._transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)
        )

    def _stream(self, chat: bool, tokens: int) -> None:
        assert self._transport is not None
        kind = b"chat.completion.chunk" if chat else b"text_completion"
        text = b'"delta":{"content":" word"}' if chat else b'"text":" word"'
        event = (
            b'data: {"id":"x","object":"%s","created":1,"model":"bench","choices":[{"index":0,%s,"logprobs":null,'
            b'"finish_reason":null}]}\n\n' % (kind, text)
        )
        chunk = b"%x\r\n%s\r\n" % (len(event), event)
        last = event.replace(b'"finish_reason":null', b'"finish_reason":"length"') + b"data: [DONE]\n\n"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        end = b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last)
        if self._steps is None:
            self._transport.write(head + chunk * (tokens - 1) + end)
        else:
            self._transport.write(head)
            self._steps.begin(self._transport, chain(repeat(chunk, tokens - 1), (end,)))


_ids: dict[str, int] = {}


def rendered(body: bytes, chat: bool) -> bytes:
    """Return the token ids of a request's prompt: an object for a chat, a list of one for a completion."""
    asked = _decode_prompt(body)
    text = " ".join(message.content for message in asked.messages) if chat else str(asked.prompt)
    token_ids = []
    for word in text.split():
        token_id = _ids.get(word)
        if token_id is None:
            token_id = _ids[word] = zlib.crc32(word.encode()) % VOCABULARY
        token_ids.append(token_id)
    answer: dict[str, Any] = {"request_id": "x", "token_ids": token_ids, "sampling_params": {}, "model": "bench"}
    return msgspec.json.encode(answer if chat else [answer])


async def serve(port: int, step_ms: float) -> None:
    """Listen until the process is ended; 0 = without steps."""
    steps = Steps(step_ms) if step_ms else None
    server = await asyncio.get_running_loop().create_server(partial(_Server, steps), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0))
