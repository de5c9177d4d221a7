"""A mock OpenAI server, for what passes HTTP through: answers at once, with as many tokens as were asked for.

    python -m lab.benchmarks.http_engine PORT [STEP_MS [EVENTS_PORT MODEL]]

``/v1/completions`` and ``/v1/chat/completions`` (JSON and SSE, one chunk per token), their ``/render`` (the prompt's
token ids: one per word, the same for the same word), any GET. Raw protocol on uvloop. With ``STEP_MS`` a step begins so
often, and gives every stream one token, as engines do it; without, all tokens leave at once.

To a worker of ours it looks like vLLM's server: prompts and answers of token ids, its facts, and at ``EVENTS_PORT`` the
events of a prefix cache that never evicts, for prompts of token ids and of text. It tokenizes text by the directory
``MODEL``, as a real server would; that costs the engine's core, which is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, cast

import httptools
import msgspec
import uvloop
import zmq

from poolgrid.server.frontend.prompt_model import PromptModel


class _Text(msgspec.Struct):
    content: str = ""
    role: str = "user"


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class _Wanted(msgspec.Struct):
    max_tokens: int = 1
    stream: bool = False
    return_token_ids: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    prompt: Any = ""
    messages: list[_Text] = []


class _Prompt(msgspec.Struct):
    prompt: Any = ""
    messages: list[_Text] = []


_decode = msgspec.json.Decoder(_Wanted).decode
_decode_prompt = msgspec.json.Decoder(_Prompt).decode
INFERENCE = (b"/v1/completions", b"/v1/chat/completions")
RENDERING = tuple(path + b"/render" for path in INFERENCE)
VOCABULARY = 32_000
MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","owned_by":"vllm","max_model_len":131072}]}'
BLOCK_SIZE = 16
PAGES = {
    b"/version": b'{"version":"0.25.0"}',
    b"/metrics": b'vllm:cache_config_info{block_size="%d",engine="0",num_gpu_blocks="65536"} 1.0\n' % BLOCK_SIZE,
}
OUTPUT_TOKEN = 1000


class CacheEvents:
    """What the prefix cache of one server publishes, as vLLM does: a frame for each prompt, and for each full block."""

    def __init__(self, port: int, model: Path) -> None:
        """``model`` tokenizes prompts of text."""
        self._model = PromptModel.load(model)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.bind(f"tcp://127.0.0.1:{port}")
        self._known: set[int] = set()
        self._sequence = 0
        self.sources = msgspec.json.encode({"0": {"endpoint": f"tcp://*:{port}"}})

    def token_ids(self, wanted: _Wanted) -> list[int]:
        """Return the prompt of a request, by the template of ``lab.benchmarks.http_model``."""
        if isinstance(wanted.prompt, list):
            return wanted.prompt
        text = str(wanted.prompt)
        if wanted.messages:
            turns = (f"<|im_start|>{each.role}\n{each.content}<|im_end|>\n" for each in wanted.messages)
            text = "".join(turns) + "<|im_start|>assistant\n"
        return list(memoryview(self._model.encode(text)).cast("I"))

    def store(self, token_ids: list[int]) -> int:
        """Publish the blocks of a prompt that are new; return how many of its tokens were there."""
        parent, before, cached = None, None, 0
        hashes: list[int] = []
        for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE):
            name = hash((before, tuple(token_ids[end - BLOCK_SIZE : end])))
            if name in self._known:
                parent, cached = name, end
            else:
                self._known.add(name)
                hashes.append(name)
            before = name
        if hashes:
            event = {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": token_ids[cached : cached + BLOCK_SIZE * len(hashes)],
                "block_size": BLOCK_SIZE,
                "lora_id": None,
                "medium": "GPU",
            }
            frames = [b"", self._sequence.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, [event], 0])]
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            self._sequence += 1
        return cached

    def output(self, prompt: list[int], tokens: int, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the chunks of an answer, one a token; publish each block that they fill."""
        for number in range(len(prompt) + 1, len(prompt) + tokens + 1):
            if number % BLOCK_SIZE == 0:
                self.store([*prompt, *repeat(OUTPUT_TOKEN, number - len(prompt))])
            yield next(chunks)


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
    def __init__(self, steps: Steps | None, events: CacheEvents | None) -> None:
        self._steps = steps
        self._events = events
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
            page = PAGES.get(path, MODELS)
            if path == b"/kv_event_sources":
                known, page = self._events is not None, b"" if self._events is None else self._events.sources
            self._answer(page if known else b'{"error":"unknown"}', b"200 OK" if known else b"404 Not Found")
            return
        wanted = _decode(b"".join(self._body))
        chat = b"chat" in path
        prompt = [] if self._events is None else self._events.token_ids(wanted)
        cached = 0 if self._events is None else self._events.store(prompt)
        usage = (
            b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
            % (len(prompt) or 1, wanted.max_tokens, (len(prompt) or 1) + wanted.max_tokens, cached)
        )
        if wanted.stream:
            self._stream(chat, wanted, prompt, usage)
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

    def _stream(self, chat: bool, wanted: _Wanted, prompt: list[int], counts: bytes) -> None:
        assert self._transport is not None
        tokens = wanted.max_tokens
        kind = b"chat.completion.chunk" if chat else b"text_completion"
        text = b'"delta":{"content":" word"}' if chat else b'"text":" word"'
        if wanted.return_token_ids:
            text += b',"token_ids":[%d]' % OUTPUT_TOKEN
        event = (
            b'data: {"id":"x","object":"%s","created":1,"model":"bench","choices":[{"index":0,%s,"logprobs":null,'
            b'"finish_reason":null}]}\n\n' % (kind, text)
        )
        chunk = b"%x\r\n%s\r\n" % (len(event), event)
        chunks: Iterator[bytes] = repeat(chunk, tokens - 1)
        if self._events is not None:
            chunks = self._events.output(prompt, tokens - 1, chunks)
        usage = b""
        if wanted.stream_options.include_usage:
            usage = b'data: {"id":"x","object":"%s","created":1,"model":"bench","choices":[],"usage":%s}\n\n' % (
                kind,
                counts,
            )
        last = event.replace(b'"finish_reason":null', b'"finish_reason":"length"') + usage + b"data: [DONE]\n\n"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        end = b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last)
        if self._steps is None:
            self._transport.write(head + b"".join(chunks) + end)
        else:
            self._transport.write(head)
            self._steps.begin(self._transport, chain(chunks, (end,)))


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


async def serve(port: int, step_ms: float = 0.0, events_port: int = 0, model: str = "") -> None:
    """Listen until the process is ended; 0 = without steps, without events."""
    steps = Steps(step_ms) if step_ms else None
    events = CacheEvents(events_port, Path(model)) if events_port else None
    server = await asyncio.get_running_loop().create_server(partial(_Server, steps, events), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("step_ms", type=float, nargs="?", default=0.0)
    parser.add_argument("events_port", type=int, nargs="?", default=0)
    parser.add_argument("model", nargs="?", default="")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options.port, options.step_ms, options.events_port, options.model))
