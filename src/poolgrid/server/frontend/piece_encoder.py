"""What the encoders of answers share that are made of typed parts: messages of blocks, responses of items.

The text of an answer is taken apart into pieces (``model_parsers``). A part is a stretch of one
kind: reasoning, text, a call. It opens, grows by deltas, and closes when the next opens or the answer ends. What events
that makes, and what the whole answer looks like, is each API's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import msgspec

from poolgrid.kernel.wire.identifiers import name_of
from poolgrid.server.frontend.answer_pieces import AnswerPiece, PieceKind, taken_apart
from poolgrid.server.frontend.prepared_request import AnswerStart
from poolgrid.server.frontend.responses import AnswerEncoder
from poolgrid.server.frontend.sequence_output import PlacedLogprobs, SequenceOutput

Event = TypeVar("Event")

_encode: Final = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False)
class AnswerPart:
    """A part that is being written; ``data`` is what the client gets of it."""

    kind: PieceKind
    data: dict[str, Any]
    texts: list[str] = field(default_factory=list)


class PieceEncoder(AnswerEncoder, ABC, Generic[Event]):
    """Encodes one answer of one choice."""

    def __init__(self, start: AnswerStart, model_name: str) -> None:
        super().__init__(
            chat=True,
            include_usage=True,
            request_id=name_of(start.request_ids[0]),
            model_name=model_name,
            created_s=start.created_s,
            model=start.model,
        )
        self._parser = start.parser
        self._call_ids = start.call_ids
        self._calls = 0
        self._parts: list[dict[str, Any]] = []
        """Those that have closed."""
        self._part: AnswerPart | None = None
        self._finish_reason = "stop"

    def role(self, index: int) -> bytes:
        """Return nothing: the parts of the answer say whose they are."""
        return b""

    def chunk(
        self, index: int, text: str, logprobs: Sequence[PlacedLogprobs] = (), finish_reason: str | None = None
    ) -> bytes:
        return self._events(self._take(text, finish_reason))

    def whole(self, outputs: Sequence[SequenceOutput], counts: dict[str, Any]) -> bytes:
        (output,) = outputs
        self._take(output.take_text(), output.finish_reason or "stop")
        return _encode(self._complete(counts))

    def _take(self, text: str, finish_reason: str | None) -> list[Event]:
        events: list[Event] = []
        for piece in taken_apart(self._parser, text, finish_reason is not None):
            events += self._add(piece)
        if finish_reason is not None:
            self._finish_reason = finish_reason
            events += self._finish()
        return events

    def _add(self, piece: AnswerPiece) -> list[Event]:
        kind, text = piece
        if kind is PieceKind.CALL:
            return [*self._close_part(), *self._open_part(PieceKind.ARGUMENTS, text)]
        events: list[Event] = []
        if self._part is None or self._part.kind is not kind:
            events += [*self._close_part(), *self._open_part(kind)]
        assert self._part is not None, "it was just opened"
        return [*events, *self._delta(self._part, text)]

    def _open_part(self, kind: PieceKind, name: str = "") -> list[Event]:
        """Open a part; ``name`` is that of a call's function."""
        call_id = ""
        if kind is PieceKind.ARGUMENTS:
            call_id = self._call_ids.of(0, self._calls, name)
            self._calls += 1
        self._part = self._made(kind, call_id, name)
        return self._opened(self._part)

    def _close_part(self) -> list[Event]:
        part = self._part
        if part is None:
            return []
        self._part = None
        events = self._closed(part, "".join(part.texts))
        self._parts.append(part.data)
        return events

    def _finish(self) -> list[Event]:
        return self._close_part()

    @abstractmethod
    def _made(self, kind: PieceKind, call_id: str, name: str) -> AnswerPart: ...

    @abstractmethod
    def _opened(self, part: AnswerPart) -> list[Event]: ...

    @abstractmethod
    def _delta(self, part: AnswerPart, text: str) -> list[Event]:
        """Add text to a part."""

    @abstractmethod
    def _closed(self, part: AnswerPart, text: str) -> list[Event]:
        """Fill in a part whose whole text is there."""

    @abstractmethod
    def _complete(self, counts: dict[str, Any]) -> dict[str, Any]:
        """Fill in what is known at the end, and return the whole answer."""

    @abstractmethod
    def _events(self, events: Sequence[Event]) -> bytes:
        """Return events as they are sent."""
