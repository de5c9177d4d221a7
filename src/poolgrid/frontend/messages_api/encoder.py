"""The bytes of a Messages answer: content blocks as they come to be, as events or as one object.

A block is a stretch of one kind: thinking, text, a tool use. It starts, grows by deltas, and stops when the next begins
or the answer ends. Nothing is signed: thinking blocks have an empty signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from poolgrid.frontend.call_ids import CallIds
from poolgrid.frontend.dialects import ANTHROPIC
from poolgrid.frontend.errors import RequestError
from poolgrid.frontend.messages_api.conversation import parsed_input
from poolgrid.frontend.messages_api.schema import MessagesBody
from poolgrid.frontend.parsers.pieces import Kind, OutputParser, Piece
from poolgrid.frontend.piece_encoder import PieceEncoder
from poolgrid.frontend.prompt_model import PromptModel
from poolgrid.frontend.responses import AnswerEncoder, escape_line_ends
from poolgrid.wire.request_ids import name_of

_encode: Final = msgspec.json.Encoder().encode

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens"}


@dataclass(frozen=True, slots=True)
class MessagesForm:
    """``AnswerForm`` of a Messages request."""

    body: MessagesBody

    @property
    def counts_reasoning(self) -> bool:
        """Return that the end of an answer costs nothing."""
        return False

    def encoder(
        self,
        request_ids: Sequence[str],
        created_s: int,
        isl: int,
        model: PromptModel,
        parser: OutputParser | None,
        call_ids: CallIds,
    ) -> MessagesEncoder:
        return MessagesEncoder(
            self.body, request_id=name_of(request_ids[0]), isl=isl, model=model, parser=parser, call_ids=call_ids
        )

    async def keep(self, encoder: AnswerEncoder) -> None:
        """Keep nothing: there is no asking for a message later."""


class _Block:
    """A block that is being written."""

    __slots__ = ("data", "kind", "texts")

    def __init__(self, kind: Kind, data: dict[str, Any]) -> None:
        self.kind = kind
        self.data = data
        self.texts: list[str] = []


Event = dict[str, Any]


class MessagesEncoder(PieceEncoder[Event]):
    """Encodes one answer. ``parser``: what takes its text apart; ``None`` = all of it is text."""

    def __init__(
        self,
        body: MessagesBody,
        *,
        request_id: str,
        isl: int,
        model: PromptModel,
        parser: OutputParser | None,
        call_ids: CallIds,
    ) -> None:
        super().__init__(parser=parser, request_id=request_id, model_name=body.model, created_s=0, model=model)
        self._request_id = request_id
        self._isl = isl
        self._call_ids = call_ids
        self._shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        self._blocks: list[dict[str, Any]] = []
        self._block: _Block | None = None
        self._calls = 0
        self._message: dict[str, Any] = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": body.model,
            "content": self._blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(isl, 0, 0),
        }

    def begin(self) -> bytes:
        return self._events([{"type": "message_start", "message": self._message}])

    def end(self, counts: dict[str, Any]) -> bytes:
        """Return the events of the complete message."""
        self._complete(counts)
        delta = {name: self._message[name] for name in ("stop_reason", "stop_sequence")}
        return self._events(
            [
                {"type": "message_delta", "delta": delta, "usage": self._message["usage"]},
                {"type": "message_stop"},
            ]
        )

    def error(self, error: RequestError) -> bytes:
        return b"event: error\ndata: %s\n\n" % escape_line_ends(ANTHROPIC.error_body(error, self._request_id))

    def _complete(self, counts: dict[str, Any]) -> dict[str, Any]:
        message = self._message
        reason = _STOP_REASONS.get(self._finish_reason, "end_turn")
        if self._finish_reason == "stop":
            matched = self.outputs[0].matched_stop if self.outputs else None
            if matched is not None:
                reason, message["stop_sequence"] = "stop_sequence", matched
            elif self._calls:
                reason = "tool_use"
        message["stop_reason"] = reason
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        message["usage"] = _usage(counts["prompt_tokens"], counts["completion_tokens"], cached)
        return message

    def _finish(self) -> list[Event]:
        return self._stop_block()

    def _add(self, piece: Piece) -> list[Event]:
        kind, text = piece
        if kind is Kind.CALL:
            return [*self._stop_block(), self._start_block(Kind.ARGUMENTS, text)]
        events: list[Event] = []
        if self._block is None or self._block.kind is not kind:
            events += [*self._stop_block(), self._start_block(kind, "")]
        block = self._block
        assert block is not None, "it was just started"
        if kind is Kind.REASONING and not self._shows_thinking:
            return events
        block.texts.append(text)
        name, field = _DELTAS[kind]
        delta = {"type": name, field: text}
        events.append({"type": "content_block_delta", "index": len(self._blocks), "delta": delta})
        return events

    def _start_block(self, kind: Kind, name: str) -> Event:
        data: dict[str, Any]
        if kind is Kind.ARGUMENTS:
            data = {"type": "tool_use", "id": self._call_ids.of(0, self._calls, name), "name": name, "input": {}}
            self._calls += 1
        elif kind is Kind.REASONING:
            data = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            data = {"type": "text", "text": ""}
        self._block = _Block(kind, data)
        return {"type": "content_block_start", "index": len(self._blocks), "content_block": dict(data)}

    def _stop_block(self) -> list[Event]:
        block = self._block
        if block is None:
            return []
        self._block = None
        text = "".join(block.texts)
        if block.kind is Kind.ARGUMENTS:
            block.data["input"] = parsed_input(text)
        else:
            block.data[_DELTAS[block.kind][1]] = text
        self._blocks.append(block.data)
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _events(self, events: Sequence[Event]) -> bytes:
        return b"".join(
            b"event: %s\ndata: %s\n\n" % (event["type"].encode(), escape_line_ends(_encode(event))) for event in events
        )


_DELTAS: Final = {
    Kind.CONTENT: ("text_delta", "text"),
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.ARGUMENTS: ("input_json_delta", "partial_json"),
}


def _usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return Anthropic's counts, whose ``input_tokens`` leave out what was read from a cache."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }
