"""Streamed completions as a load generator wants them: typed SSE parsing on the lean client of ``runtime``.

A response without an end (no ``[DONE]``, no finish reason) is a failure, never a short answer. Times are read once per
arrival of bytes; chunks that arrive together share the gap before them evenly.
"""

from __future__ import annotations

from typing import Any

import msgspec

from poolgrid.server.http import http_client
from poolgrid.server.http.http_client import HttpClient, HttpTarget, RequestFailed
from poolgrid.server.process.clock import Clock

__all__ = ["BenchExchange", "Client", "HttpTarget", "RequestFailed", "Usage"]

ERROR_BODY_BYTES_MAX = 2048
"""How much of an error answer is kept for the report."""

EVENT_BYTES_MAX = 8 * 1024 * 1024
"""Longest single SSE line: a chunk with the log probabilities of a long prompt stays below."""

ANSWER_CHARS_MAX = 64 * 1024 * 1024
"""Text kept of one answer; a longer one is a failure, for it is no answer to the tokens asked for."""


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    """Token counts as the endpoint reported them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the endpoint reports as reused."""
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class BenchExchange(http_client.ClientExchange):
    """One request and what its answer has brought so far."""

    __slots__ = (
        "_body",
        "_fresh",
        "_pending",
        "chunks",
        "done",
        "finish_reason",
        "finished_ms",
        "first_ms",
        "gaps_ms",
        "last_ms",
        "retry_after",
        "texts",
        "texts_chars",
        "usage",
        "worker",
    )

    def __init__(self) -> None:
        super().__init__()
        self.worker: str | None = None
        self.retry_after: str | None = None
        self.first_ms: float | None = None
        """When the first text arrived."""
        self.last_ms = 0.0
        self.finished_ms = 0.0
        self.gaps_ms: list[tuple[float, int]] = []
        self.chunks = 0
        self.texts: list[str] = []
        self.texts_chars = 0
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.done = False
        self._pending = bytearray()
        self._fresh = 0
        self._body = b""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def take_header(self, name: bytes, value: bytes) -> None:
        if name == b"x-poolgrid-worker":
            self.worker = value.decode(errors="replace")
        elif name == b"retry-after":
            self.retry_after = value.decode(errors="replace")

    def take_body(self, data: bytes) -> None:
        if self.status != 200:
            self._body = (self._body + data)[:ERROR_BODY_BYTES_MAX]
            return
        pending = self._pending
        lines = data.split(b"\n")
        if len(pending) + len(lines[0]) > EVENT_BYTES_MAX:
            raise RequestFailed("protocol", f"an SSE line exceeds {EVENT_BYTES_MAX} bytes")
        if pending:
            pending += lines[0]
            if len(lines) == 1:
                return
            lines[0] = bytes(pending)
            pending.clear()
        pending += lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take_event(line[5:].strip())

    def _take_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _decode_chunk(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RequestFailed("protocol", f"a chunk does not decode ({error}): {self.excerpt(data)}") from None
        if chunk.error is not None:
            raise RequestFailed("stream-error", self.excerpt(msgspec.json.encode(chunk.error)))
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            delta = choice.delta
            text = choice.text if delta is None else (delta.content or delta.reasoning_content)
            if text:
                self.texts.append(text)
                self.texts_chars += len(text)
                self._fresh += 1
                if self.texts_chars > ANSWER_CHARS_MAX:
                    raise RequestFailed("protocol", f"the answer exceeds {ANSWER_CHARS_MAX} characters")
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason

    def end_of_read(self) -> None:
        """Give the chunks of this read their times."""
        fresh = self._fresh
        if not fresh:
            return
        self._fresh = 0
        self.chunks += fresh
        if self.first_ms is None:
            self.first_ms = self.now_ms
            if fresh > 1:
                self.gaps_ms.append((0.0, fresh - 1))
        else:
            self.gaps_ms.append(((self.now_ms - self.last_ms) / fresh, fresh))
        self.last_ms = self.now_ms

    def conclude(self) -> None:
        """Check that the answer is whole; raise ``RequestFailed`` when it is not."""
        self.finished_ms = self.now_ms
        if self.status != 200:
            retry = f" (Retry-After: {self.retry_after})" if self.retry_after is not None else ""
            raise RequestFailed(f"http-{self.status}", f"{self.excerpt(self._body)}{retry}")
        if not self.done and self.finish_reason is None:
            raise RequestFailed("stream-cut", f"the stream ended after {self.chunks} chunks without an end mark")

    def cut_off(self, error: Exception | None) -> None:
        """Take an answer without a length, which ends with its connection."""
        if self.status != 200 or not self.done:
            raise RequestFailed("disconnect", f"the server closed the connection after {self.chunks} chunks ({error})")
        self.finished_ms = self.now_ms


class Client:
    """A keep-alive pool of connections to one target. The caller bounds how many requests are in flight."""

    def __init__(
        self,
        target: HttpTarget,
        clock: Clock,
        *,
        api_key: str | None = None,
        connect_timeout_s: float = 10.0,
        request_timeout_s: float = 600.0,
    ) -> None:
        self._request_timeout_s = request_timeout_s
        headers = ["Content-Type: application/json", "Accept: text/event-stream", "User-Agent: poolgrid-bench"]
        self._http = HttpClient(target, clock, headers, api_key=api_key or "", connect_timeout_s=connect_timeout_s)

    async def post(self, path: str, body: bytes) -> BenchExchange:
        """Send one request and return its finished exchange, or raise ``RequestFailed``."""
        exchange = BenchExchange()
        await self._http.send("POST", path, body, exchange, timeout_s=self._request_timeout_s)
        return exchange

    def close(self) -> None:
        self._http.close()
