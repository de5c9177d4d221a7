"""A lean HTTP/1.1 client: asyncio protocols, httptools, a keep-alive pool. For many long streams at a time.

One ``Connection`` carries one ``ClientExchange`` at a time, which gets each piece of the answer as it arrives: no
task, queue or copy lies in between. Everything the network does wrong becomes ``RequestFailed`` with a kind that can be
counted. A caller that stops waiting for an exchange closes its connection, which is how a stream is cancelled.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from urllib.parse import urlsplit

import httptools

from poolgrid.kernel.wire.addresses import without_credentials
from poolgrid.kernel.wire.secret_texts import blotted
from poolgrid.server.process.clock import Clock


class HttpTarget:
    """Where requests go: the parts of an endpoint's URL, with or without a trailing ``/v1``."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            why = "a user name is in it" if "@" in url else str(error)  # the error shows what it took for the port
            raise ValueError(f"reading the URL {without_credentials(url)!r}: {why}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"reading the URL {without_credentials(url)!r}: allowed are http://HOST[:PORT] and https://HOST[:PORT]"
            )
        self.secure = parts.scheme == "https"
        self.host = parts.hostname
        self.port = port or (443 if self.secure else 80)
        self.authority = parts.netloc.rpartition("@")[2]
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{self.authority}{self.path}"


HEADERS_BYTES_MAX = 64 * 1024
"""Response headers or trailers beyond this end the connection, whole or not: the parser keeps what is not whole, and
copies it with every piece. Servers in use stay below 16 KiB."""

IDLE_CONNECTIONS_MAX = 1024
"""Connections that are kept for the next request; beyond it they are closed. As many as streams at a time are usual."""

EXCERPT_BYTES = 300
"""How much of an answer stands in an error."""


class RequestFailed(Exception):
    """One request did not succeed; ``kind`` is what reports count by."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        self.detail = detail
        super().__init__(f"{kind}: {detail}")


class ClientExchange:
    """One request and what its answer has brought so far; a subclass takes it."""

    __slots__ = ("now_ms", "secrets", "status")

    def __init__(self) -> None:
        self.status = 0
        """Of the answer; 0 = none has come."""
        self.now_ms = 0.0
        """Monotonic time of the last arrival of bytes: the clock is read once for each."""
        self.secrets: tuple[bytes, ...] = ()
        """What the request carries that neither a log nor an answer of ours may show."""

    def excerpt(self, data: bytes | bytearray) -> str:
        """Return the beginning of an answer as it may stand in an error: servers may repeat the request."""
        return blotted(bytes(data), self.secrets)[:EXCERPT_BYTES].decode(errors="replace")

    def take_header(self, name: bytes, value: bytes) -> None:
        """Take a header of the answer; the name is in lower case."""

    def take_body(self, data: bytes) -> None:
        """Take a piece of the answer's body; raises ``RequestFailed``, which ends the exchange."""

    def end_of_read(self) -> None:
        """Note that all that arrived together has been taken; raises ``RequestFailed``."""

    def conclude(self) -> None:
        """Check an answer that has come to its end; raises ``RequestFailed``."""

    def cut_off(self, error: Exception | None) -> None:
        """Check an answer whose connection ended before it did; raises ``RequestFailed`` unless it is whole."""
        raise RequestFailed("disconnect", f"the server closed the connection within its answer ({error})")


class Connection(asyncio.Protocol):
    """One keep-alive connection; carries one exchange at a time."""

    def __init__(self, clock: Clock, secrets: tuple[bytes, ...] = ()) -> None:
        self._clock = clock
        self._secrets = secrets
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: ClientExchange | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._complete = False
        self._fault: RequestFailed | None = None
        self._keep = False
        self._reads = 0
        """How often something has come of the current answer."""
        self._is_interim = False
        """Whether what comes is an answer 1xx, behind which the answer follows."""
        self._beside_body_bytes = 0
        """What has come since the answer began, or since its last piece of a body."""
        self._transport: asyncio.Transport | None = None
        self.usable = False
        """Whether another request may follow on this connection."""
        self.used = False
        """Whether an exchange ended well on it before: then an early end may be the server's idle timeout."""

    async def send(self, head_and_body: tuple[bytes, bytes], exchange: ClientExchange) -> None:
        """Send a request and fill ``exchange`` from the answer, to its end; raises ``RequestFailed``."""
        assert self._transport is not None
        if not self.usable:  # a caller that waits for an answer on it would never learn of its end
            raise RequestFailed("disconnect", "the server closed the connection before anything was sent")
        assert self._exchange is None, "one exchange at a time"
        self._exchange = exchange
        exchange.secrets = self._secrets
        self._reads = 0
        self._complete = False
        self._beside_body_bytes = 0
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
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "writelines")
        self._transport = transport  # type: ignore[assignment]
        self.usable = True

    def data_received(self, data: bytes) -> None:
        """Parse what arrived, with one look at the clock."""
        exchange = self._exchange
        if exchange is None:
            self.close()  # no request is open
            return
        exchange.now_ms = self._clock.monotonic_ms()
        self._reads += 1
        try:
            try:
                if len(data) <= HEADERS_BYTES_MAX:
                    self._feed(data)
                else:
                    view = memoryview(data)
                    for at in range(0, len(data), HEADERS_BYTES_MAX):
                        self._feed(view[at : at + HEADERS_BYTES_MAX])
            except httptools.HttpParserError:
                if not self._complete:
                    raise
                self.usable = False  # the answer is whole; what follows it is none
            exchange.end_of_read()
            if self._fault is not None:
                raise self._fault
            if self._complete:
                self.usable = self.usable and self._keep
                exchange.conclude()
                self._settle(None)
        except httptools.HttpParserError as error:
            # Behind the first bytes of an answer half a key might begin.
            shown = f": {exchange.excerpt(data)}" if exchange.status == 0 and self._reads == 1 else ""
            self._settle(RequestFailed("protocol", f"not an HTTP response ({error}){shown}"))
        except httptools.HttpParserUpgrade:
            self._settle(RequestFailed("protocol", "the server switches protocols, and was not asked to"))
        except RequestFailed as error:
            self._settle(error)

    def _feed(self, part: bytes | memoryview) -> None:
        """Give the parser a part of what arrived; raises ``RequestFailed`` for headers that do not end."""
        self._beside_body_bytes += len(part)
        self._parser.feed_data(part)
        if self._beside_body_bytes > HEADERS_BYTES_MAX:
            raise RequestFailed("protocol", f"response headers exceed {HEADERS_BYTES_MAX} bytes")

    def eof_received(self) -> bool:
        """Close when the server does: nothing more is sent here, though it is not lost before the loop's next turn."""
        self.usable = False
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """End the exchange: an answer without a length ends here, too."""
        self.usable = False
        del self._parser  # which names this: the collector would see that late
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.status == 0:
            self._settle(RequestFailed("disconnect", f"the server closed the connection without an answer ({error})"))
            return
        try:
            exchange.cut_off(error)
        except RequestFailed as failure:
            self._settle(failure)
        else:
            self._settle(None)

    def _settle(self, error: RequestFailed | None) -> None:
        if error is not None:
            # Frames of the failed read hold what arrived, megabytes perhaps, and this connection holds the error.
            error.__traceback__ = error.__context__ = None
            if not error.kind.startswith("http-"):
                self.usable = False
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)

    # httptools

    def on_message_begin(self) -> None:
        if self._complete:
            self.usable = False  # a second answer, for which no request was sent

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._exchange is not None
        if not self._complete:
            self._exchange.take_header(name.lower(), value)

    def on_headers_complete(self) -> None:
        """Learn the status before the body comes."""
        assert self._exchange is not None
        status = self._parser.get_status_code()
        if self._complete:
            return
        self._is_interim = status < 200  # none that is counted: any number of them stays within the bound of headers
        if not self._is_interim:
            self._beside_body_bytes = 0
            self._exchange.status = status
            self._keep = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        if self._complete:
            return
        self._beside_body_bytes = 0
        assert self._exchange is not None
        if self._fault is None:
            try:
                self._exchange.take_body(data)
            except RequestFailed as error:
                self._fault = error  # raised through the parser it would lose its kind

    def on_message_complete(self) -> None:
        self._complete = self._complete or not self._is_interim


class HttpClient:
    """A keep-alive pool of connections to one target. The caller bounds how many requests are in flight."""

    def __init__(
        self,
        target: HttpTarget,
        clock: Clock,
        headers: Iterable[str] = (),
        *,
        api_key: str = "",
        connect_timeout_s: float = 10.0,
        trusted: ssl.SSLContext | None = None,
    ) -> None:
        """``headers`` are lines that every request gets, ``Name: value``.

        ``trusted`` are the authorities that may certify the target; by default the system's. Raises ``ValueError`` for
        a key that no header can carry.
        """
        self.target = target
        self._clock = clock
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[Connection] = []
        self._ssl = (trusted or ssl.create_default_context()) if target.secure else None
        lines = [f"Host: {target.authority}", *headers, *([_bearer(api_key)] if api_key else [])]
        self._headers = "".join(f"{line}\r\n" for line in lines)
        self._secrets = (api_key.encode(),) if api_key else ()

    async def send(
        self,
        method: str,
        path: str,
        body: bytes,
        exchange: ClientExchange,
        headers: Iterable[str] = (),
        timeout_s: float | None = None,
    ) -> None:
        """Send one request and fill ``exchange`` from the answer, to its end; raises ``RequestFailed``.

        A reused connection that the server closed before it answered is replaced, once a connection, by a new one:
        servers close what was idle for some seconds. ``timeout_s`` is for all of it; ``None`` = no bound but the
        caller's.
        """
        more = "".join(f"{line}\r\n" for line in headers)
        head = (
            f"{method} {self.target.path}{path} HTTP/1.1\r\n{self._headers}{more}Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    connection = await self._acquire()
                    reused = connection.used
                    try:
                        await connection.send((head, body), exchange)
                    except RequestFailed as error:
                        if reused and error.kind == "disconnect" and exchange.status == 0:
                            continue
                        raise
                    finally:
                        self._release(connection)
                    return
        except TimeoutError:
            raise RequestFailed("timeout", f"no whole answer within {timeout_s} s") from None

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _release(self, connection: Connection) -> None:
        if connection.usable and len(self._idle) < IDLE_CONNECTIONS_MAX:
            self._idle.append(connection)
        else:
            connection.close()

    async def _acquire(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        target = self.target
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, made = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self._clock, self._secrets), target.host, target.port, ssl=self._ssl
                )
        except TimeoutError:
            raise RequestFailed("connect", f"{target.url}: no connection within {self._connect_timeout_s} s") from None
        except OSError as error:
            is_plain = isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER"
            fault = "the TLS handshake failed; use http:// for a server without TLS" if is_plain else str(error)
            raise RequestFailed("connect", f"{target.url}: {fault}") from None
        return made


def _bearer(api_key: str) -> str:
    """Return the header line that carries an API key; raises ``ValueError`` for one that no header can carry."""
    if not api_key.isprintable() or not api_key.isascii():
        raise ValueError("reading the API key: it holds characters that an HTTP header cannot carry")
    return f"Authorization: Bearer {api_key}"
