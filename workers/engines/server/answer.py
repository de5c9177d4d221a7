"""The answer to one request, as it arrives: chunks read by the server's dialect, pieces handed over at once."""

from __future__ import annotations

from collections.abc import Callable

from poolgrid.http.http_client import ClientExchange, RequestFailed
from poolgrid.wire.errors import DecodeError
from poolgrid.workers.engines.server.core.calls import Call, LineTooLong, ServerAnswerPiece, ServerSentEvents

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

    def _read(self, data: bytes) -> None:
        try:
            piece = self._call.read(data)
        except DecodeError as error:
            raise RequestFailed("protocol", str(error)) from None
        if piece is not None:
            if piece.finish is not None or piece.failure is not None:
                self.ended_ms = self.now_ms
            self._on_piece(piece)
