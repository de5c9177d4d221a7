"""One request on the short way of ``poolgrid.http.http_protocol``, and what its endpoint gets beside ASGI.

Rules
    1. It has what uvicorn's ``RequestResponseCycle`` has, which the protocol knows it by.
    2. Status line, headers and the first part of the body are one write; a first part that is empty sends the rest
       alone, where more is to come. Headers are the endpoint's own and are not checked again.
    3. An endpoint that writes for itself does so by the ``Connection``, without waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

log: Final = logging.getLogger("uvicorn.error")

CONNECTION: Final = "poolgrid.connection"
"""Key of the ``Connection`` among a scope's extensions."""

_CLOSE = (b"connection", b"close")
SERVER_ERROR: dict[str, Any] = {
    "type": "http.response.start",
    "status": 500,
    "headers": [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"21"), _CLOSE],
}
SERVER_ERROR_BODY: dict[str, Any] = {"type": "http.response.body", "body": b"Internal Server Error"}

_line: Final = b": ".join
"""Returns the line of a header, without its end."""

Headers = Sequence[tuple[bytes, bytes]]
Answer = Callable[[int, Headers, bytes], bool]


class DefaultLines:
    """The lines of the headers that a server puts into every answer; uvicorn makes a new list of them each second."""

    __slots__ = ("_headers", "_lines")

    def __init__(self) -> None:
        self._headers: Headers | None = None
        self._lines = b""

    def of(self, headers: Headers) -> bytes:
        """Return the lines of a list of headers, made once for each list."""
        if headers is not self._headers:
            self._lines = b"".join([_line(header) + b"\r\n" for header in headers])
            self._headers = headers
        return self._lines


class Connection:
    """What a direct endpoint gets beside ASGI."""

    __slots__ = ("answer", "body", "of_head", "on_left", "task", "write")

    def __init__(
        self, body: bytes, write: Callable[[bytes], bool], answer: Answer, of_head: dict[str, Any] | None
    ) -> None:
        self.body = body
        """The whole body."""
        self.answer = answer
        """Writes a whole answer at once (status, headers without ``content-length``, body); ``False`` = it did not,
        because the client reads too slowly: send it, which waits."""
        self.write = write
        """Writes the next part of a body whose length was not announced, at once; ``False`` = it did not, because the
        client reads too slowly: send it, which waits."""
        self.task: asyncio.Task[None] | None = None
        """Which serves it; there is one as soon as the endpoint runs."""
        self.on_left: Callable[[], None] | None = None
        """Called once when the client leaves before the answer is complete."""
        self.of_head = of_head
        """What an endpoint keeps of a head that comes again, all but its length, for the next request with it; ``None``
        where it is not known whether it does."""


@final
class DirectCycle:
    """One request on the short way."""

    connection: Connection | None = None
    _head: bytes = b""
    access_log = False
    waiting_for_100_continue = False
    more_body = True
    expected_content_length = 0

    def __init__(self, protocol: Any, endpoint: Any, keep_alive: bool) -> None:
        """Take what uvicorn's own takes, from the connection (a ``DirectProtocol``) and the scope that it has now."""
        self.scope: Any = protocol.scope
        self.transport: Any = protocol.transport
        self.flow: Any = protocol.flow
        default_lines: DefaultLines = protocol.default_lines
        self.default_lines = default_lines.of(protocol.server_state.default_headers)
        self.on_response: Callable[[], None] = protocol.on_response_complete
        self.disconnected = False
        self.keep_alive = keep_alive
        self.body = bytearray()
        self.response_started = False
        self.response_complete = False
        self.chunked_encoding: bool | None = None
        self._event: asyncio.Event | None = None
        self.endpoint = endpoint
        self.parts: list[bytes] = []
        """What has come of the body, until it is whole."""

    @property
    def message_event(self) -> asyncio.Event:
        """Return what ``receive`` waits for; made when it is asked for, which is hardly ever."""
        event = self._event
        if event is None:
            event = self._event = asyncio.Event()
        return event

    async def run_asgi(self, app: Any) -> None:
        """Serve it, and answer 500 for an endpoint that fails; as uvicorn, without a coroutine around its own."""
        failed: BaseException | None = None
        try:
            try:
                await app(self.scope, self.receive, self.send)
                if not self.response_complete and not self.disconnected:
                    raise RuntimeError("serving a request: the endpoint returned without a complete response")
            except BaseException as error:
                failed = error
            if failed is not None:
                log.error("an endpoint failed: this is a bug", exc_info=failed)
                failed = None
                if self.response_started:
                    self.transport.close()
                else:
                    await self.send(SERVER_ERROR)
                    await self.send(SERVER_ERROR_BODY)
        finally:
            self.on_response = nobody

    async def receive(self) -> Any:
        """Return the next ASGI message: a part of a body that is gathered by the endpoint, or that the client left."""
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        message = {"type": "http.request", "body": bytes(self.body), "more_body": self.more_body}
        self.body = bytearray()
        return message

    async def send(self, message: Any) -> None:
        """Write; the first part of the body takes the headers along."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            self._begin(message)
        elif not self.response_complete:
            self._continue(message)
        else:
            raise RuntimeError("sending a response: it is complete already")

    def _begin(self, message: Any) -> None:
        self.response_started = True
        self.waiting_for_100_continue = False
        headers = [(name, value) for name, value in message.get("headers", ())]
        head = self._status_and_headers(message["status"], headers)
        self.chunked_encoding = b"content-length" not in dict(headers)
        self._head = head + (b"transfer-encoding: chunked\r\n\r\n" if self.chunked_encoding else b"\r\n")

    def _status_and_headers(self, status: int, headers: Headers) -> bytes:
        """Return a head up to where it says how long the body is."""
        if _CLOSE in headers:
            self.keep_alive = False
            headers = [header for header in headers if header != _CLOSE]
        last = b"" if self.keep_alive else b"connection: close\r\n"
        return b"".join((STATUS_LINE[status], self.default_lines, b"\r\n".join((*map(_line, headers), last))))

    def _continue(self, message: Any) -> None:
        # Both may be left out (ASGI, "Response Body").
        body: bytes = message.get("body", b"")
        more_body: bool = message.get("more_body", False)
        head, self._head = self._head, b""
        if not self.chunked_encoding:
            self.transport.write(head + body)
        elif body:
            end = b"\r\n" if more_body else b"\r\n0\r\n\r\n"
            self.transport.write(b"".join((head, b"%x\r\n" % len(body), body, end)))
        elif not more_body:
            self.transport.write(head + b"0\r\n\r\n")
        elif head:
            self.transport.write(head)
        if not more_body:
            self.response_complete = True
            self._complete()

    def write_now(self, part: bytes) -> bool:
        """Write the next part of a body of unknown length without waiting; return False where that has to wait."""
        if self.disconnected:
            return True
        if self.flow.write_paused or not self.chunked_encoding or not part or self._head:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def answer_now(self, status: int, headers: Headers, body: bytes) -> bool:
        """Write a whole answer without waiting; return False where that has to wait."""
        if self.disconnected:
            return True
        if self.flow.write_paused or self.response_started:
            return False
        self.response_started = self.response_complete = True
        self.waiting_for_100_continue = False
        head = self._status_and_headers(status, headers)
        self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self._complete()
        return True

    def _complete(self) -> None:
        self.let_go()
        if self._event is not None:
            self._event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    def let_go(self) -> None:
        """Break the circle of connection and cycle, which else stays until the collector comes round, minutes later."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.task = None
            connection.write = _is_over
            connection.answer = _is_answered

    def left(self) -> None:
        """Tell the endpoint that its client is gone."""
        connection = self.connection
        if connection is not None and connection.on_left is not None:
            on_left, connection.on_left = connection.on_left, None
            on_left()


def begun(protocol: Any, endpoint: Any, keep_alive: bool) -> DirectCycle:
    """Return a cycle for a ``DirectProtocol``, which is not compiled: a call of a class from there takes its arguments
    apart slowly."""
    return DirectCycle(protocol, endpoint, keep_alive)


def _is_over(_: bytes) -> bool:
    """In the place of ``Connection.write`` after the last byte."""
    return True


def _is_answered(_: int, __: Headers, ___: bytes) -> bool:
    """In the place of ``Connection.answer`` after the last byte."""
    return True


def nobody() -> None:
    """In the place of ``on_response`` where no answer will come, or it has come: the circle of protocol and cycle is
    broken."""
