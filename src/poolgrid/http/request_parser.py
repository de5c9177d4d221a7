"""The reading of HTTP/1.1 requests on httptools: where each ends, and how much of it may come.

Rules
    1. Bytes reach httptools up to the end of one request and not beyond, so what follows a request in flight waits as
       it came, unparsed. httptools does not report where a request ends, but every head and every chunked body ends
       with an empty line, and any other body where its announced length is over.
    2. A chunked body is read in slices of the event loop, a few hundred pieces each: one byte per chunk, or empty
       lines, would block the loop for as long as a read of 256 KiB takes.
    3. A head is counted as it comes, before httptools sees it, which copies a header's value at every read. Of a
       chunked body what is not payload is counted too: sizes, extensions and trailers have no other limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import unquote

import httptools

from poolgrid.http.browser_requests import shown
from poolgrid.http.connections import HttpConnections
from poolgrid.http.exchange import BODY_BUFFER_BYTES, ExchangeTask, HttpExchange, Scope
from poolgrid.http.flow import FlowControl

EMPTY_LINE = b"\r\n\r\n"

CHUNK_OVERHEAD = 8
"""Bytes around each byte of a chunked body that are accepted: chunks of one byte have five."""

COPIED_BYTES_MAX = 16 * 1024
"""Longest piece of a read that is copied for httptools; longer ones are passed as a view, which costs more to make."""

SLICE_PIECES = 500
"""Pieces of a chunked body, and calls of httptools, in one slice of the loop: a quarter of a millisecond."""

SLICE_BYTES = 4 * 1024
"""Most of a chunked body that httptools gets at once: it makes a slice's pieces of them at worst."""


TARGETS_MAX = 64
"""URLs whose parts are remembered: more than there are endpoints. The longest take a few MB together."""


class RequestRefusedError(Exception):
    """A request breaks a limit, or is not HTTP."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message


class _Open(NamedTuple):
    """What a connection has while it is open."""

    transport: asyncio.Transport
    flow: FlowControl
    common: Scope
    """What is the same for all of its requests."""
    on_complete: Callable[[HttpExchange], None]


@lru_cache(TARGETS_MAX)
def _target_of(url: bytes) -> Scope:
    """Return what the scope of a request has of its URL."""
    raw_path, _, query = url.partition(b"?")
    if not raw_path.startswith(b"/") or b"#" in url:
        parsed = httptools.parse_url(url)
        raw_path, query = parsed.path or b"/", parsed.query or b""
    path = raw_path.decode("ascii")
    return {"path": unquote(path) if "%" in path else path, "raw_path": raw_path, "query_string": query}


class RequestParser:
    """Reads the requests of one connection, one after the other, and calls the application for each."""

    def __init__(self, table: HttpConnections, loop: asyncio.AbstractEventLoop) -> None:
        self._table = table
        self._task = ExchangeTask(table.app, table.tasks, loop)
        self._limits = table.limits
        self._open: _Open | None = None
        self._allowed_host: bytes | None = None
        """That of the request before: clients of one connection name one."""
        self._parser: Any = httptools.HttpRequestParser(self)
        # What follows a request that asks for the end of the connection is ignored later, and no error of the parser.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._refusal: RequestRefusedError | None = None
        """What a head is refused with, once httptools has returned."""
        self.head_bytes = 0
        """What has come of a head that is not whole."""
        self.in_body = False
        """The head is whole and its body is not."""
        self.body_left: int | None = None
        """What is still to come of a body of announced length."""
        self.payload_bytes = 0
        """What has come of the body."""
        self._wire_bytes = 0
        """What has come of a chunked body, with what is around its payload."""
        self._chunk_tail = b""
        """The last bytes of it, less than an empty line."""
        self._pieces = 0
        """Pieces of this slice so far."""
        self.exchange: HttpExchange | None = None
        """The last request."""
        self._scope: Scope | None = None
        """Of a request whose application is not called yet."""

    def open(
        self,
        transport: asyncio.Transport,
        flow: FlowControl,
        common: Scope,
        on_complete: Callable[[HttpExchange], None],
    ) -> None:
        """Begin; ``common`` is part of every scope, ``on_complete`` is called with each request that is answered."""
        self._open = _Open(transport, flow, common, on_complete)

    def close(self) -> None:
        """Tell the application that its client has left, and break the circle with httptools' parser."""
        exchange, self.exchange = self.exchange, None
        self._parser = self._open = None
        self._task.close()
        if exchange is not None and not exchange.is_complete:
            exchange.disconnect()

    def is_busy(self) -> bool:
        """Return whether a request has no complete answer yet."""
        return self.exchange is not None and not self.exchange.is_complete

    def read(self, data: bytes | bytearray) -> int:
        """Read up to the end of a slice, or of a request that is in flight then; return how far that was.

        Raises ``RequestRefusedError``.
        """
        size = len(data)
        at = self._pieces = 0
        while at < size:
            if not self.in_body:
                if self._open is None or (self.exchange is not None and not self.exchange.is_complete):
                    return at
                end = data.find(EMPTY_LINE, at) + len(EMPTY_LINE)
                if end < len(EMPTY_LINE):
                    end = size
                self.head_bytes += end - at
                if self.head_bytes > self._limits.head_bytes:
                    message = f"reading a request: its head has more than {self._limits.head_bytes} bytes, the limit"
                    raise RequestRefusedError(431, "head_too_large", message)
                self._feed(data, at, end)
            elif self.body_left is not None:
                end = min(size, at + self.body_left)
                self.body_left -= end - at
                self._feed(data, at, end)
            else:
                if self._pieces >= SLICE_PIECES:
                    return at
                end = self._read_chunks(data, at, min(size, at + SLICE_BYTES))
            at = end
        return size

    def _read_chunks(self, data: bytes | bytearray, at: int, limit: int) -> int:
        """Read of a chunked body up to its possible end, or to ``limit``; return how far that was."""
        # The empty line of its end may have begun in what was read before.
        before = self._chunk_tail
        end = (before + data[at : at + len(EMPTY_LINE) - 1]).find(EMPTY_LINE) + len(EMPTY_LINE) - len(before) + at
        if end <= at:
            end = data.find(EMPTY_LINE, at, limit) + len(EMPTY_LINE)
            if end < len(EMPTY_LINE):
                end = limit
        self._chunk_tail = (before + data[max(at, end - len(EMPTY_LINE)) : end])[1 - len(EMPTY_LINE) :]
        self._feed(data, at, end)
        if self.in_body:
            self._wire_bytes += end - at
            around = self._wire_bytes - self.payload_bytes
            if around > self._limits.head_bytes + self.payload_bytes * CHUNK_OVERHEAD:
                message = "reading a chunked body: what is around its chunks is many times what is in them"
                raise RequestRefusedError(400, "chunk_overhead", message)
        return end

    def _feed(self, data: bytes | bytearray, at: int, end: int) -> None:
        self._pieces += 1
        try:
            self._parser.feed_data(memoryview(data)[at:end] if end - at > COPIED_BYTES_MAX else data[at:end])
        except httptools.HttpParserUpgrade:
            # No protocol is upgraded to here: the request is answered as what it is otherwise. To httptools what
            # follows it belongs to that protocol, so the connection ends with the answer.
            if self.exchange is not None:
                self.exchange.keep_alive = False
        except httptools.HttpParserError:
            raise RequestRefusedError(400, "invalid_http", "reading a request: this is not HTTP/1.1") from None
        if self._refusal is not None:
            raise self._refusal

    # -- called by httptools -------------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Check the whole head, then begin its request."""
        # Trailers go to whatever list is here, long after the head was checked.
        headers, self._headers = self._headers, []
        fields = dict(reversed(headers))  # of several of one name the first
        limits, host, url = self._limits, fields.get(b"host", b"localhost"), self._url
        # A head that is no longer than a line may be has no line that is.
        if host != self._allowed_host or len(headers) > limits.headers or self.head_bytes > limits.header_line_bytes:
            self._refusal = self._refused(headers, host)
        opened = self._open
        if self._refusal is not None or opened is None:
            return
        parser = self._parser
        announced = None if b"transfer-encoding" in fields else int(fields.get(b"content-length", 0))  # it was checked
        expects_continue = b"expect" in fields and fields[b"expect"].lower() == b"100-continue"
        self.head_bytes = self.payload_bytes = self._wire_bytes = 0
        self._chunk_tail = b""
        self.in_body = True
        self.body_left = announced
        version = parser.get_http_version()
        method = parser.get_method().decode("ascii")
        self._scope = {
            **opened.common,
            **_target_of(url),
            "http_version": version,
            "method": method,
            "headers": headers,
        }
        self.exchange = HttpExchange(
            opened.transport,
            opened.flow,
            self._table.date_line,
            opened.on_complete,
            method,
            version,
            version != "1.0" and parser.should_keep_alive(),
            expects_continue,
        )
        if expects_continue or (announced or 0) > BODY_BUFFER_BYTES:
            self._call(self.exchange)

    def on_body(self, body: bytes) -> None:
        exchange, opened = self.exchange, self._open
        if self._refusal is not None or exchange is None or opened is None:
            return
        self.payload_bytes += len(body)
        self._pieces += 1
        if not exchange.is_complete and exchange.take(body):
            self._call(exchange)
            if not opened.flow.is_full:
                opened.flow.fill(True)

    def on_message_complete(self) -> None:
        self._url = b""
        self._headers = []  # what is there are trailers
        exchange = self.exchange
        if self._refusal is not None or exchange is None:
            return
        self.in_body = False
        if not exchange.is_complete:
            exchange.receive_end()
            self._call(exchange)

    def drop_body(self) -> None:
        """Forget the request that is not whole."""
        self.in_body = False
        self._scope = None

    def _call(self, exchange: HttpExchange) -> None:
        """Call the application, once for each request."""
        scope, self._scope = self._scope, None
        if scope is not None:
            self._task.serve(exchange, scope)

    def _refused(self, headers: list[tuple[bytes, bytes]], host: bytes) -> RequestRefusedError | None:
        """Return what is wrong with a head."""
        limits = self._limits
        if len(headers) > limits.headers:
            message = f"reading a request: it has {len(headers)} header fields, allowed are {limits.headers}"
            return RequestRefusedError(431, "head_too_large", message)
        longest = max([len(self._url), *(len(name) + len(value) for name, value in headers)])
        if longest > limits.header_line_bytes:
            message = f"reading a request: a line of its head has {longest} bytes, allowed are"
            return RequestRefusedError(431, "head_too_large", f"{message} {limits.header_line_bytes}")
        hosts = self._table.hosts
        if hosts is not None and host != self._allowed_host and not hosts.allow(host):
            message = f"reading a request: Host is {shown(host)}, allowed are addresses, names without a dot"
            where = "and names of setting http_hosts, for a server on a loopback address without API keys"
            return RequestRefusedError(403, "foreign_host", f"{message} {where}")
        self._allowed_host = host
        return None
