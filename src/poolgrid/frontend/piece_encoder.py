"""What the encoders of answers share that are made of typed parts: messages of blocks, responses of items.

The text of an answer is taken apart into pieces (``poolgrid.frontend.parsers``). What events a piece makes, and what
the whole answer looks like, is each API's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from poolgrid.frontend.parsers.pieces import OutputParser, Piece, taken_apart
from poolgrid.frontend.prompt_model import PromptModel
from poolgrid.frontend.responses import AnswerEncoder
from poolgrid.frontend.sequence_output import PlacedLogprobs, SequenceOutput

Event = TypeVar("Event")

_encode: Final = msgspec.json.Encoder().encode


class PieceEncoder(AnswerEncoder, ABC, Generic[Event]):
    """Encodes one answer of one choice. ``parser``: what takes its text apart; ``None`` = all of it is content."""

    def __init__(
        self, *, parser: OutputParser | None, request_id: str, model_name: str, created_s: int, model: PromptModel
    ) -> None:
        super().__init__(
            chat=True,
            include_usage=True,
            request_id=request_id,
            model_name=model_name,
            created_s=created_s,
            model=model,
        )
        self._parser = parser
        self._finish_reason = "stop"

    def role(self, index: int) -> bytes:
        """Return nothing: the parts of the answer say whose they are."""
        return b""

    def chunk(
        self, index: int, text: str, logprobs: Sequence[PlacedLogprobs] = (), finish_reason: str | None = None
    ) -> bytes:
        return self._events(self._take(text, finish_reason))

    def whole(self, outputs: Sequence[SequenceOutput], counts: dict[str, Any]) -> bytes:
        """Return the answer as one object."""
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

    @abstractmethod
    def _add(self, piece: Piece) -> list[Event]:
        """Take a piece and return its events."""

    @abstractmethod
    def _finish(self) -> list[Event]:
        """Close what is open, as ``_finish_reason`` says, and return the events of it."""

    @abstractmethod
    def _complete(self, counts: dict[str, Any]) -> dict[str, Any]:
        """Fill in what is known at the end, and return the whole answer."""

    @abstractmethod
    def _events(self, events: Sequence[Event]) -> bytes:
        """Return events as they are sent."""
