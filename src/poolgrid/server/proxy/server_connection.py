"""One connection to an engine server: carries one exchange at a time, and hands its answer on as it arrives.

Rules
    1. The head of an answer is parsed, its body only where that is needed to find its end. Its payload is
       handed on, and chunks that arrive whole as they came too (``AnswerSink.on_data``).
    2. Interim answers (1xx) are skipped. Trailers end here.
    3. A connection is kept for the next request when its answer has ended, both sides keep it, and nothing has come
       behind the answer. It is not kept after an answer that announces a body and has none (``HEAD``, 204, 304): a
       server that sends it all the same would answer the next request with it.
    4. A read is taken in slices of the event loop: chunks or events of a byte each would block it for as long as a read
       of 256 KiB takes.
    5. What is malformed fails the exchange and closes the connection; no other exchange is touched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Final, Protocol, cast

import httptools

from poolgrid.server.proxy.chunks import ChunkError, ChunkReader, whole_payload

HEAD_END: Final = b"\r\n\r\n"

HEAD_BYTES_MAX: Final = 64 * 1024
"""Longest head of an answer; servers in use stay below 16 KiB."""

STATUS_MIN: Final = 100
STATUS_MAX: Final = 599
"""Statuses that HTTP has a class for, and that can be written to a client."""

INTERIM_ANSWERS_MAX: Final = 100
"""Answers 1xx before the one that counts: servers send one or two."""

SLICE_BYTES: Final = 32 * 1024
"""Most of an answer that is taken in one turn of the event loop."""

SLICE_BREAKS: Final = 500
"""Most carriage returns and line feeds in it, and so at most 125 chunks or 250 events: about a millisecond. A backlog
of an engine's chunks has some 800 of them in 32 KiB."""

SMALL_BYTES: Final = 4096
"""A read that is taken as it is."""

NO_BODY: Final = frozenset((204, 304))
"""Statuses of answers without a body."""

HeaderList = list[tuple[bytes, bytes]]


class AnswerFailed(Exception):
    """An exchange with a server ended before its answer did; the message is for people."""


class AnswerSink(Protocol):
    """What takes an answer. Calls come in the order head, body, end; after ``on_end`` or ``on_failed`` none comes."""

    def on_head(self, status: int, headers: HeaderList, is_chunked: bool) -> None:
        """Take status and headers, their names in lower case, hop-by-hop ones included."""
        ...

    def on_data(self, data: bytes, chunks: bytes = b"") -> None:
        """Take the next bytes of the body, without framing; ``chunks`` are the same bytes as they came, where those
        are whole chunks and none of them the last."""
        ...

    def on_end(self) -> None: ...

    def on_failed(self, error: AnswerFailed, is_stale: bool) -> None:
        """``is_stale``: a connection that had been kept ended without a byte of this answer, as it does when the server
        closes idle connections."""
        ...


class _Mode(Enum):
    HEAD = 0
    CHUNKS = 1
    LENGTH = 2
    """The parser finds the end."""
    CLOSE = 3
    """The answer ends with the connection."""


def _slice_of(data: bytes, at: int) -> int:
    """Return how many bytes are taken in one turn."""
    end = at + SLICE_BYTES
    breaks = data.count(b"\n", at, end) + data.count(b"\r", at, end)
    return SLICE_BYTES if breaks <= SLICE_BREAKS else SLICE_BYTES * SLICE_BREAKS // breaks


class ServerConnection(asyncio.Protocol):
    """A connection to one server."""

    def __init__(self, release: Callable[[ServerConnection, bool], None]) -> None:
        """``release`` gets the connection back when an exchange is over: with ``True`` where another may follow."""
        self._release = release
        self._sink: AnswerSink | None = None
        self._transport: asyncio.Transport | None = None
        self._is_head_request = False
        self._has_answered = False
        """Whether an exchange before this one ended well."""
        self._came = False
        """Whether anything of the current answer has come."""
        self._interim_answers = 0
        self._rest = b""
        """A read that is not taken to its end."""
        self._rest_at = 0
        """Up to where it is taken."""
        self._is_held_back = False
        """Whether the client does not read."""
        self._is_sending = False
        """Whether more of the request follows."""
        self._is_full = False
        """Whether the server does not take what is written."""
        self._room: asyncio.Future[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._mode = _Mode.HEAD
        self._head = bytearray()
        self._headers: HeaderList = []
        self._chunks = ChunkReader()
        self._in_head = True
        self._is_complete = False
        self._keeps = False

    @property
    def is_usable(self) -> bool:
        return self._sink is None and self._transport is not None and not self._transport.is_closing()

    # -- in ------------------------------------------------------------------------------------------------------------

    def send(
        self, sink: AnswerSink, parts: tuple[bytes, ...], is_head_request: bool = False, is_whole: bool = True
    ) -> None:
        """Send a request, given as the bytes that are written, and hand its answer to ``sink``. More may follow a
        request that is not whole (``write``), until ``request_sent``."""
        assert self._transport is not None, "connected"
        self._is_sending = not is_whole
        self._sink, self._is_head_request, self._came = sink, is_head_request, False
        self._interim_answers = 0
        self._transport.writelines(parts)

    def write(self, data: bytes) -> None:
        """Send more of a request whose body follows in parts."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def request_sent(self) -> None:
        """Take note that nothing more of the request follows."""
        self._is_sending = False

    async def has_room(self) -> None:
        """Return when the server takes more, or never will."""
        while self._is_full and self._transport is not None and not self._transport.is_closing():
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def abort(self) -> None:
        """Close at once, without telling the sink."""
        self._sink = None
        self._rest = b""
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        self._is_held_back = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        self._is_held_back = False
        if self._transport is not None and not self._transport.is_closing() and not self._rest:
            self._transport.resume_reading()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
        elif len(data) <= SMALL_BYTES or (size := _slice_of(data, 0)) >= len(data):
            self._take(data)
        else:
            self._rest, self._rest_at = data, size
            if self._transport is not None:
                self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._take_next_slice)
            self._take(data[:size])

    def _take_slice(self) -> None:
        """Take the next slice of a read, and the others later."""
        begin = self._rest_at
        self._rest_at += _slice_of(self._rest, begin)
        data = self._rest[begin : self._rest_at]
        if self._rest_at < len(self._rest):
            asyncio.get_running_loop().call_soon(self._take_next_slice)
        else:
            self._rest = b""
            if not self._is_held_back:
                self.resume()
        self._take(data)

    def _take_next_slice(self) -> None:
        if self._rest:
            self._take_slice()

    def _take(self, data: bytes) -> None:
        sink = self._sink
        if sink is None:  # no exchange is open
            self.abort()
            return
        self._came = True
        try:
            if self._mode is _Mode.CHUNKS:
                if self._chunks.is_between and (payload := whole_payload(data)):
                    sink.on_data(payload, data)
                else:
                    self._take_chunks(sink, data)
            elif self._mode is _Mode.LENGTH:
                self._parser.feed_data(data)
                if self._is_complete:
                    self._finish(self._keeps)
            elif self._mode is _Mode.CLOSE:
                sink.on_data(data)
            else:
                self._take_head(sink, data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, ChunkError) as error:
            if self._mode is _Mode.LENGTH and self._is_complete:
                self._finish(False)  # the answer is whole; what follows it is none
            else:
                self._fail(AnswerFailed(f"the server's answer cannot be read: {error}"))

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        while self._rest:  # it was all there before the end
            self._take_slice()
        self.resume_writing()
        sink, self._sink = self._sink, None
        del self._parser  # which names this object
        self._release(self, False)
        if sink is None:
            return
        if self._mode is _Mode.CLOSE and exc is None:
            sink.on_end()
            return
        is_stale = self._has_answered and not self._came
        where = "within its answer" if self._came else "without an answer"
        sink.on_failed(AnswerFailed(f"the server closed the connection {where}"), is_stale)

    # -- an answer -----------------------------------------------------------------------------------------------------

    def _take_head(self, sink: AnswerSink, data: bytes) -> None:
        searched = 0
        if self._head:
            # It may come byte by byte: what was searched is not searched again, nor copied.
            searched = max(0, len(self._head) - len(HEAD_END) + 1)
            self._head += data
            if self._head.find(HEAD_END, searched) < 0 and len(self._head) <= HEAD_BYTES_MAX:
                return
            data, self._head = bytes(self._head), bytearray()
        while True:
            cut = data.find(HEAD_END, searched, HEAD_BYTES_MAX + len(HEAD_END))
            searched = 0
            if cut < 0:
                if len(data) > HEAD_BYTES_MAX:
                    raise ChunkError(f"its head has more than {HEAD_BYTES_MAX} bytes")
                self._head = bytearray(data)
                return
            self._in_head = True
            self._parser.feed_data(data[: cut + 4])
            data = data[cut + 4 :]
            status = self._parser.get_status_code()
            if not STATUS_MIN <= status <= STATUS_MAX:
                raise ChunkError(f"its status is {status}, allowed are {STATUS_MIN} to {STATUS_MAX}")
            if status >= 200:
                break
            if status == 101:
                raise ChunkError("it switches protocols, and was not asked to")
            self._interim_answers += 1
            if self._interim_answers > INTERIM_ANSWERS_MAX:
                raise ChunkError(f"it has more than {INTERIM_ANSWERS_MAX} interim answers")
            self._begin()
            if not data:
                return
        coding = [value.strip().lower() for name, value in self._headers if name == b"transfer-encoding"]
        lengths = [value.strip() for name, value in self._headers if name == b"content-length"]
        is_chunked = coding == [b"chunked"]
        if coding and not is_chunked:
            raise ChunkError(f"its transfer coding is {b', '.join(coding)[:60]!r}, allowed is chunked")
        has_body = not (self._is_head_request or status in NO_BODY)
        sink.on_head(status, self._headers, is_chunked and has_body)
        if self._sink is not sink:
            return  # it does not want the rest, and has closed the connection
        if not has_body:
            announces = bool(coding) or lengths not in ([], [b"0"])
            self._finish(self._keeps and not data and not announces)
        elif self._is_complete:
            self._finish(self._keeps and not data)
        elif is_chunked:
            self._mode = _Mode.CHUNKS
            if data:
                self._take_chunks(sink, data)
        elif lengths:
            self._mode = _Mode.LENGTH
            if data:
                self._parser.feed_data(data)
                if self._is_complete:
                    self._finish(self._keeps)
        else:
            self._mode = _Mode.CLOSE
            if data:
                sink.on_data(data)

    def _take_chunks(self, sink: AnswerSink, data: bytes) -> None:
        payload, end = self._chunks.feed(data)
        if payload:
            sink.on_data(payload)
        if end >= 0 and self._sink is sink:
            self._finish(self._keeps and end == len(data))

    def _finish(self, keep: bool) -> None:
        sink, self._sink = self._sink, None
        keep, self._rest = keep and not self._rest, b""
        self._is_held_back = False
        if self._is_sending and self._transport is not None:
            self._transport.abort()  # the server has answered before it has the whole request, and may never take it
        elif keep and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()  # the end may have come while its client did not read
            self._has_answered = True
            self._begin()
            self._release(self, True)
        elif self._transport is not None:
            self._transport.close()
        if sink is not None:
            sink.on_end()

    def _fail(self, error: AnswerFailed) -> None:
        sink, self._sink = self._sink, None
        self._rest = b""
        if self._transport is not None:
            self._transport.abort()
        if sink is not None:
            sink.on_failed(error, False)

    # -- httptools -----------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_complete:
            self._keeps = False  # a second answer, for which no request was sent

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._in_head:
            self._in_head = False
            self._keeps = self._parser.should_keep_alive()  # it forgets that at the message's end

    def on_body(self, data: bytes) -> None:
        if self._sink is not None and not self._is_complete:
            self._sink.on_data(data)

    def on_message_complete(self) -> None:
        self._is_complete = True
