"""A lean HTTP/1.1 client for streamed completions: asyncio protocols, httptools, a keep-alive pool, typed SSE parsing.

One ``Connection`` carries one ``Exchange`` at a time. Everything the network does wrong becomes ``RequestFailed`` with
a kind that a report can count. A response without an end (no ``[DONE]``, no finish reason) is a failure, never a short
answer. Times are read once per arrival of bytes; chunks that arrive together share the gap before them evenly.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from poolgrid.runtime.clock import Clock

ERROR_BODY_BYTES_MAX = 2048
"""How much of an error answer is kept for the report."""

EVENT_BYTES_MAX = 8 * 1024 * 1024
"""Longest single SSE line: a chunk with the log probabilities of a long prompt stays below."""

HEADERS_BYTES_MAX = 64 * 1024
"""Response headers beyond this end the connection; servers in use stay below 16 KiB."""

ANSWER_CHARS_MAX = 64 * 1024 * 1024
"""Text kept of one answer; a longer one is a failure, for it is no answer to the tokens asked for."""


class RequestFailed(Exception):
    """One request did not succeed; ``kind`` is what reports count by."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        self.detail = detail
        super().__init__(f"{kind}: {detail}")


class Target:
    """Where requests go: the parts of an endpoint's URL, with or without a trailing ``/v1``."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"reading the URL {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"reading the URL {url!r}: allowed are http://HOST[:PORT] and https://HOST[:PORT]")
        self.secure = parts.scheme == "https"
        self.host = parts.hostname
        self.port = port or (443 if self.secure else 80)
        self.authority = parts.netloc.rpartition("@")[2]
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{self.authority}{self.path}"


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
        """Prompt tokens that the endpoint says it reused."""
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class Exchange:
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
        "now_ms",
        "retry_after",
        "status",
        "texts",
        "texts_chars",
        "usage",
        "worker",
    )

    def __init__(self) -> None:
        self.status = 0
        self.worker: str | None = None
        self.retry_after: str | None = None
        self.now_ms = 0.0
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
        self._pending = b""
        self._fresh = 0
        self._body = b""

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.texts)

    def take_body(self, data: bytes) -> None:
        """Take a piece of the response body."""
        if self.status != 200:
            self._body = (self._body + data)[:ERROR_BODY_BYTES_MAX]
            return
        if self._pending:
            data = self._pending + data
        lines = data.split(b"\n")
        self._pending = lines.pop()
        if len(self._pending) > EVENT_BYTES_MAX:
            raise RequestFailed("protocol", f"an SSE line exceeds {EVENT_BYTES_MAX} bytes")
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
            raise RequestFailed("protocol", f"a chunk does not decode ({error}): {_excerpt(data)}") from None
        if chunk.error is not None:
            raise RequestFailed("stream-error", _excerpt(msgspec.json.encode(chunk.error)))
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
            raise RequestFailed(f"http-{self.status}", f"{_excerpt(self._body)}{retry}")
        if not self.done and self.finish_reason is None:
            raise RequestFailed("stream-cut", f"the stream ended after {self.chunks} chunks without an end mark")


def _excerpt(data: bytes) -> str:
    return data[:300].decode(errors="replace")


class Connection(asyncio.Protocol):
    """One keep-alive connection; carries one exchange at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._complete = False
        self._fault: RequestFailed | None = None
        self._keep = False
        self._headers_bytes = 0
        self._transport: asyncio.Transport | None = None
        self.usable = False
        """Whether another request may follow on this connection."""
        self.used = False
        """Whether an exchange ended well on it before: then an early end may be the server's idle timeout."""

    async def send(self, head_and_body: tuple[bytes, bytes], exchange: Exchange) -> None:
        """Send a request and fill ``exchange`` from the answer, to its end."""
        assert self._transport is not None
        assert self._exchange is None, "one exchange at a time"
        self._exchange = exchange
        self._complete = False
        self._headers_bytes = 0
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.writelines(head_and_body)
        try:
            await self._waiter
        except BaseException:
            self.close()
            raise
        finally:
            self._exchange = None
            self._waiter = None
        self.used = True

    def close(self) -> None:
        """End the connection at once."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "writelines")
        self._transport = transport  # type: ignore[assignment]
        self.usable = True

    def data_received(self, data: bytes) -> None:
        """Parse what arrived, with one look at the clock."""
        exchange = self._exchange
        if exchange is None:
            self.close()  # nobody asked
            return
        exchange.now_ms = self._clock.monotonic_ms()
        try:
            self._parser.feed_data(data)
            exchange.end_of_read()
            if self._fault is not None:
                raise self._fault
            if self._complete:
                self.usable = self.usable and self._keep
                exchange.conclude()
                self._settle(None)
        except httptools.HttpParserError as error:
            self._settle(RequestFailed("protocol", f"not an HTTP response ({error}): {_excerpt(data)}"))
        except RequestFailed as error:
            self._settle(error)

    def eof_received(self) -> bool:
        """Close when the server does."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """End the exchange: an answer without a length ends here, too."""
        self.usable = False
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.status == 0:
            self._settle(RequestFailed("disconnect", f"the server closed the connection without an answer ({error})"))
        elif exchange.status == 200 and exchange.done:
            exchange.finished_ms = exchange.now_ms
            self._settle(None)
        else:
            self._settle(
                RequestFailed(
                    "disconnect", f"the server closed the connection after {exchange.chunks} chunks ({error})"
                )
            )

    def _settle(self, error: RequestFailed | None) -> None:
        if error is not None and not error.kind.startswith("http-"):
            self.usable = False
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep the headers that a report needs."""
        self._headers_bytes += len(name) + len(value)
        if self._headers_bytes > HEADERS_BYTES_MAX:
            self._fault = RequestFailed("protocol", f"response headers exceed {HEADERS_BYTES_MAX} bytes")
            return
        exchange = self._exchange
        assert exchange is not None
        key = name.lower()
        if key == b"x-poolgrid-worker":
            exchange.worker = value.decode(errors="replace")
        elif key == b"retry-after":
            exchange.retry_after = value.decode(errors="replace")

    def on_headers_complete(self) -> None:
        """Learn the status before the body comes."""
        assert self._exchange is not None
        self._exchange.status = self._parser.get_status_code()
        self._keep = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """Hand the body to the exchange."""
        assert self._exchange is not None
        if self._fault is None:
            try:
                self._exchange.take_body(data)
            except RequestFailed as error:
                self._fault = error  # raised through the parser it would lose its kind

    def on_message_complete(self) -> None:
        """The answer is whole."""
        self._complete = True


class Client:
    """A keep-alive pool of connections to one target. The caller bounds how many requests are in flight."""

    def __init__(
        self,
        target: Target,
        clock: Clock,
        *,
        api_key: str | None = None,
        connect_timeout_s: float = 10.0,
        request_timeout_s: float = 600.0,
    ) -> None:
        self._target = target
        self._clock = clock
        self._connect_timeout_s = connect_timeout_s
        self._request_timeout_s = request_timeout_s
        self._idle: list[Connection] = []
        self._ssl = ssl.create_default_context() if target.secure else None
        lines = [
            f"Host: {target.authority}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "User-Agent: poolgrid-bench",
        ]
        if api_key:
            if not api_key.isprintable() or not api_key.isascii():
                raise ValueError("reading the API key: it holds characters that an HTTP header cannot carry")
            lines.append(f"Authorization: Bearer {api_key}")
        self._headers = "\r\n".join(lines)

    async def post(self, path: str, body: bytes) -> Exchange:
        """Send one request and return its finished exchange, or raise ``RequestFailed``.

        A reused connection that the server closed before it answered is replaced, once, by a new one.
        """
        head = (
            f"POST {self._target.path}{path} HTTP/1.1\r\n{self._headers}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        try:
            async with asyncio.timeout(self._request_timeout_s):
                while True:
                    connection = await self._acquire()
                    exchange = Exchange()
                    reused = connection.used
                    try:
                        await connection.send((head, body), exchange)
                    except RequestFailed as error:
                        if reused and error.kind == "disconnect" and exchange.status == 0:
                            continue
                        raise
                    finally:
                        self._release(connection)
                    return exchange
        except TimeoutError:
            raise RequestFailed("timeout", f"no whole answer within {self._request_timeout_s} s") from None

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _release(self, connection: Connection) -> None:
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _acquire(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        target = self._target
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, made = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self._clock), target.host, target.port, ssl=self._ssl
                )
        except TimeoutError:
            raise RequestFailed("connect", f"{target.url}: no connection within {self._connect_timeout_s} s") from None
        except OSError as error:
            raise RequestFailed("connect", f"{target.url}: {error}") from None
        return made
