"""A request as an engine server is asked, and its answer in pieces: what every dialect translates into and from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from poolgrid.wire.requests import FinishReason, Generate, RefusalKind, TokenLogprobs


class Failure(msgspec.Struct, frozen=True, gc=False):
    """Why the server stopped a request."""

    reason: str
    """For the client: nothing of it is the server's own text, unless the server wrote it for clients."""
    kind: RefusalKind | None
    """What the router may do next; ``None`` = nothing."""
    words: str = ""
    """The server's words, for the log."""
    retry_after_ms: int | None = None
    """With ``BUSY``: how long the server asks to be left alone."""
    unknown_model: bool = False
    """With ``CANNOT_DO``: whether the server does not know the model."""
    key_refused: bool = False
    """Whether the server does not take the worker's API key."""


class ServerAnswerPiece(msgspec.Struct, gc=False):
    """Content of one chunk of an answer, or of a whole answer."""

    tokens: list[int] = []
    finish: FinishReason | None = None
    """Set in the last piece that has tokens; more may follow that only counts."""
    cached_tokens: int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    params: bytes | None = None
    """What a leg that computed a prompt leaves for the leg after it."""
    failure: Failure | None = None


class Call(msgspec.Struct, frozen=True, gc=False):
    """One HTTP request."""

    path: str
    body: bytes
    read: Callable[[bytes], ServerAnswerPiece | None]
    """Read a chunk of a stream, or a whole answer; ``None`` = it has no content. Raises ``DecodeError``."""
    streams: bool = True
    """Whether the answer comes in chunks."""
    headers: tuple[str, ...] = ()
    left_at_once: bytes | None = None
    """Of a prefill leg that continues next to its decode leg: what the decode leg gets. The leg counts as prefilled as
    soon as the server has it."""


class ServerDialect(Protocol):
    """How requests are put to one kind of server. Pure."""

    @property
    def title(self) -> str: ...

    @property
    def tells_reuse_first(self) -> bool:
        """Whether the first piece of an answer has the number of reused prompt tokens; else the last has it."""
        ...

    def call(self, request: Generate) -> Call:
        """Return how to ask for a request; raises ``RefusedError`` for what the server cannot do."""
        ...


LINE_BYTES_MAX = 16 * 1024 * 1024
"""Longest line: a chunk that repeats the ids of a prompt of a million tokens stays below."""

DONE = b"[DONE]"


class LineTooLong(Exception):
    """A line is beyond ``LINE_BYTES_MAX``."""


class ServerSentEvents:
    """Lines of one answer; only ``data`` fields count, of one line each, as engines send them."""

    __slots__ = ("_rest", "done")

    def __init__(self) -> None:
        self._rest = bytearray()
        """The beginning of a line: what follows is searched and added, never all of it again."""
        self.done = False
        """Whether the end mark was seen."""

    def take(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of each event that is whole now; raises ``LineTooLong``."""
        rest = self._rest
        lines = data.split(b"\n")
        if len(rest) + len(lines[0]) > LINE_BYTES_MAX:
            raise LineTooLong(f"a line of the stream exceeds {LINE_BYTES_MAX} bytes")
        if rest:
            rest += lines[0]
            if len(lines) == 1:
                return
            lines[0] = bytes(rest)
            rest.clear()
        rest += lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                field = line[5:].strip()
                if field == DONE:
                    self.done = True
                else:
                    yield field


PAUSE_MIN_MS = 250
PAUSE_MAX_MS = 1_000
"""Pauses after a refusal without a time to come back: they double up to here."""

PROBE_MS = 250
"""How long one request is alone in finding out whether there is room again; a full server answers at once."""


class ServerRoom:
    """What is known of one server's room. One that has refused is left alone for the time that it asked for."""

    def __init__(self) -> None:
        self._until_ms = 0.0
        """When it is asked again; 0 = it takes requests."""
        self._pause_ms = 0
        self._probing = False

    def wait_ms(self, now_ms: float) -> int:
        """Return for how long the server is not asked; 0 = the request that asks now goes to it."""
        if not self._until_ms:
            return 0
        if now_ms < self._until_ms:
            return math.ceil(self._until_ms - now_ms)
        if self._probing:
            self._probing = False
            self._until_ms, self._pause_ms = 0.0, 0
        else:
            self._probing = True
            self._until_ms = now_ms + PROBE_MS
        return 0

    def refused(self, now_ms: float, retry_after_ms: int | None) -> int:
        """Note that the server refused a request; return for how long it is left alone."""
        if retry_after_ms is None and (self._probing or not self._until_ms):
            self._pause_ms = min(PAUSE_MAX_MS, max(PAUSE_MIN_MS, 2 * self._pause_ms))
        pause_ms = self._pause_ms if retry_after_ms is None else retry_after_ms
        self._probing = False
        self._until_ms = max(self._until_ms, now_ms + max(PAUSE_MIN_MS, pause_ms))
        return math.ceil(self._until_ms - now_ms)
