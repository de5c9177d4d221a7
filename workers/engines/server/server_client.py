"""One engine server over HTTP: what it is asked now and then, and the streams of its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from poolgrid.http.http_client import ClientExchange, HttpClient, HttpTarget, RequestFailed, bearer
from poolgrid.process.clock import Clock
from poolgrid.wire.errors import DecodeError
from poolgrid.workers.engines.server.core.calls import Call, LineTooLong, ServerAnswerPiece, ServerSentEvents
from poolgrid.workers.engines.server.core.openai_words import KEY_REFUSED

PAGE_BYTES_MAX = 16 * 1024 * 1024
"""Largest answer that is not parsed as a whole: a page of metrics has some 200 KB, of 64 ranks some 10 MB."""

FACTS_BYTES_MAX = 1024 * 1024
"""Largest answer in JSON that is asked for again and again, parsed on the event loop of all engines' follower in 40 ms:
``/v1/models`` with 1,700 adapters."""

SCHEMA_BYTES_MAX = 8 * 1024 * 1024
"""Largest description of a server's API, which is asked for once, at its start: it has every field of every request."""

EVENTS_BYTES_MAX = 32 * 1024 * 1024
"""Largest answer of cache events: 100,000 of them, which is what waits for the follower at most."""

QUESTION_TIMEOUT_S = 10.0
"""How long an answer to a question may take: servers under load answer late, dead ones never."""

NOT_THERE = frozenset({400, 401, 403, 404, 405, 410, 422, 501})
"""Statuses of a path that a server does not have, or does not show; any other one may pass."""

T = TypeVar("T")


class ServerError(Exception):
    """The server did not answer a question as it should have."""

    def __init__(self, reason: str, status: int = 0, is_late: bool = False) -> None:
        self.status = status
        """Of the answer; 0 = none came."""
        self.is_late = is_late
        """Whether none came in time."""
        super().__init__(reason)


class KeyRefused(ServerError):
    """The server does not take the API key, or asks for one."""


class _Answer(ClientExchange):
    """A whole answer in memory."""

    __slots__ = ("_bytes_max", "body")

    def __init__(self, bytes_max: int) -> None:
        super().__init__()
        self._bytes_max = bytes_max
        self.body = bytearray()

    def take_body(self, data: bytes) -> None:
        if len(self.body) + len(data) > self._bytes_max:
            raise RequestFailed("protocol", f"the answer exceeds {self._bytes_max} bytes")
        self.body += data

    def cut_off(self, error: Exception | None) -> None:
        """Take an answer without a length, which ends with its connection."""


class ServerClient:
    """Asks one server; ``url`` may end in ``/v1``. Raises ``ValueError`` for a URL or key that is none."""

    def __init__(self, url: str, clock: Clock, api_key: str = "") -> None:
        self.target = HttpTarget(url)
        self.clock = clock
        headers = ["Content-Type: application/json", "User-Agent: poolgrid"]
        self._has_key = bool(api_key)
        if api_key:
            headers.append(bearer(api_key))
        self.http = HttpClient(self.target, clock, headers)

    async def ask(
        self,
        path: str,
        method: str = "GET",
        body: bytes = b"",
        timeout_s: float = QUESTION_TIMEOUT_S,
        bytes_max: int = PAGE_BYTES_MAX,
    ) -> bytes:
        """Return the answer's body; raises ``ServerError`` for any but a 200 of at most ``bytes_max``."""
        answer = _Answer(bytes_max)
        try:
            await self.http.send(method, path, body, answer, timeout_s=timeout_s)
        except RequestFailed as failure:
            late = failure.kind == "timeout"
            raise ServerError(f"asking {self.target.url}{path}: {failure.detail}", is_late=late) from None
        if answer.status in KEY_REFUSED:
            given = "is not the one that the engine's server asks for" if self._has_key else "is missing"
            raise KeyRefused(
                f"engine_api_key {given}: {self.target.url}{path} answers with status {answer.status}", answer.status
            )
        if answer.status != 200:
            said = answer.body[:300].decode(errors="replace")
            raise ServerError(f"asking {self.target.url}{path}: status {answer.status}: {said}", answer.status)
        return bytes(answer.body)

    async def ask_for(self, path: str, form: type[T], bytes_max: int = FACTS_BYTES_MAX) -> T:
        """Return the answer as a JSON value of a type; raises ``ServerError``, ``DecodeError``."""
        body = await self.ask(path, bytes_max=bytes_max)
        try:
            return msgspec.json.decode(body, type=form, strict=False)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise DecodeError(f"the answer to {path}", str(error)) from None

    async def ask_if_there(self, path: str, form: type[T], bytes_max: int = FACTS_BYTES_MAX) -> T | None:
        """Return the same, or ``None`` where the server has no such path or does not say it in that form."""
        try:
            return await self.ask_for(path, form, bytes_max)
        except DecodeError:
            return None
        except ServerError as error:
            if error.status in NOT_THERE:
                return None
            raise

    def close(self) -> None:
        self.http.close()


WHOLE_BYTES_MAX = 256 * 1024 * 1024
"""Largest whole answer: the log probabilities of a long prompt."""

ERROR_BYTES_MAX = 64 * 1024
"""How much of an error answer is read: validation errors repeat the prompt."""


class AnswerStream(ClientExchange):
    """Carries pieces from the connection to the engine, in the turn in which they arrive."""

    __slots__ = (
        "_body",
        "_call",
        "_on_over",
        "_on_piece",
        "_size",
        "_stream",
        "ended_ms",
        "error_body",
        "retry_after",
    )

    def __init__(self, call: Call, on_piece: Callable[[ServerAnswerPiece], None], on_over: Callable[[], None]) -> None:
        """``on_over`` is called when the stream's end mark has come; its connection may stay open."""
        super().__init__()
        self._call = call
        self._on_piece = on_piece
        self._on_over = on_over
        self._stream = ServerSentEvents()
        self._body: list[bytes] = []
        self._size = 0
        self.ended_ms = 0.0
        """When a finish reason, a failure, the end mark or an error status came; 0 = none of them has."""
        self.error_body = b""
        """Of an answer with another status than 200."""
        self.retry_after = ""

    def take_header(self, name: bytes, value: bytes) -> None:
        if name == b"retry-after":
            self.retry_after = value[:64].decode("latin-1")

    def take_body(self, data: bytes) -> None:
        if self.status != 200:
            self.error_body = (self.error_body + data)[:ERROR_BYTES_MAX]
            if len(self.error_body) == ERROR_BYTES_MAX:
                raise RequestFailed("protocol", f"an error answer exceeds {ERROR_BYTES_MAX} bytes")
        elif self._call.streams:
            try:
                for event in self._stream.take(data):
                    self._read(event)
            except LineTooLong as error:
                raise RequestFailed("protocol", str(error)) from None
            if self._stream.done:
                self.ended_ms = self.ended_ms or self.now_ms
                self._on_over()
        else:
            self._size += len(data)
            if self._size > WHOLE_BYTES_MAX:
                raise RequestFailed("protocol", f"the answer exceeds {WHOLE_BYTES_MAX} bytes")
            self._body.append(data)

    def conclude(self) -> None:
        """Read a whole answer; a stream must have come to its end, or to its end mark."""
        if self.status != 200:
            raise RequestFailed(f"http-{self.status}", "the server refuses the request")
        if not self._call.streams:
            self._read(b"".join(self._body))
        elif not self.ended_ms:
            raise RequestFailed("stream-cut", "the stream ended without a finish reason")

    def cut_off(self, error: Exception | None) -> None:
        """Take a stream that was over, whatever became of its connection."""
        if self.status == 200 and self.ended_ms:
            return
        super().cut_off(error)

    def detach(self) -> None:
        """Forget who takes the pieces, once the exchange is over."""
        del self._on_piece, self._on_over

    def _read(self, data: bytes) -> None:
        try:
            piece = self._call.read(data)
        except DecodeError as error:
            raise RequestFailed("protocol", str(error)) from None
        if piece is not None:
            if piece.finish is not None or piece.failure is not None:
                self.ended_ms = self.now_ms
            self._on_piece(piece)
