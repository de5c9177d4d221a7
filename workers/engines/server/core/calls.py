"""A request as an engine server is asked, and its answer in pieces: what every dialect translates into and from."""

from __future__ import annotations

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
