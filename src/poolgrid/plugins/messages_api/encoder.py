"""The bytes of a Messages answer: content blocks as they come to be, as events or as one object.

Nothing is signed: thinking blocks have an empty signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from poolgrid.kernel.wire.identifiers import name_of
from poolgrid.plugins.messages_api.conversation import parsed_input
from poolgrid.plugins.messages_api.schema import MessagesBody
from poolgrid.server.frontend.answer_pieces import PieceKind
from poolgrid.server.frontend.errors import ANTHROPIC, RequestError
from poolgrid.server.frontend.piece_encoder import AnswerPart, PieceEncoder
from poolgrid.server.frontend.prepared_request import AnswerStart
from poolgrid.server.frontend.responses import escape_line_ends
from poolgrid.server.frontend.session_fields import HOUR_MS

_encode: Final = msgspec.json.Encoder().encode

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens"}


Event = dict[str, Any]


class MessagesEncoder(PieceEncoder[Event]):
    """Encodes one answer."""

    def __init__(self, body: MessagesBody, keep_ms: int, start: AnswerStart) -> None:
        """``keep_ms`` is how long the client asks to keep its prompt."""
        super().__init__(start, body.model)
        self._request_id = name_of(start.request_ids[0])
        self._keep_ms = keep_ms
        self._shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        self._message: dict[str, Any] = {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": body.model,
            "content": self._parts,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(start.isl, 0, 0, 0, keep_ms),
        }
        if keep_ms:
            # Clients take the total from the last event, and the times from the first, which does not know them yet.
            del self._message["usage"]["cache_creation"]

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
        details = counts["prompt_tokens_details"]
        cached, written = details["cached_tokens"], details.get("cache_write_tokens", 0)
        prompt_tokens, output_tokens = counts["prompt_tokens"], counts["completion_tokens"]
        message["usage"] = _usage(prompt_tokens, output_tokens, cached, written, self._keep_ms)
        return message

    def _made(self, kind: PieceKind, call_id: str, name: str) -> AnswerPart:
        if kind is PieceKind.ARGUMENTS:
            return AnswerPart(kind, {"type": "tool_use", "id": call_id, "name": name, "input": {}})
        if kind is PieceKind.REASONING:
            return AnswerPart(kind, {"type": "thinking", "thinking": "", "signature": ""})
        return AnswerPart(kind, {"type": "text", "text": ""})

    def _opened(self, part: AnswerPart) -> list[Event]:
        return [{"type": "content_block_start", "index": len(self._parts), "content_block": dict(part.data)}]

    def _delta(self, part: AnswerPart, text: str) -> list[Event]:
        if part.kind is PieceKind.REASONING and not self._shows_thinking:
            return []
        part.texts.append(text)
        name, field = _DELTAS[part.kind]
        return [{"type": "content_block_delta", "index": len(self._parts), "delta": {"type": name, field: text}}]

    def _closed(self, part: AnswerPart, text: str) -> list[Event]:
        if part.kind is PieceKind.ARGUMENTS:
            part.data["input"] = parsed_input(text)
        else:
            part.data[_DELTAS[part.kind][1]] = text
        return [{"type": "content_block_stop", "index": len(self._parts)}]

    def _events(self, events: Sequence[Event]) -> bytes:
        return b"".join(
            b"event: %s\ndata: %s\n\n" % (event["type"].encode(), escape_line_ends(_encode(event))) for event in events
        )


_DELTAS: Final = {
    PieceKind.CONTENT: ("text_delta", "text"),
    PieceKind.REASONING: ("thinking_delta", "thinking"),
    PieceKind.ARGUMENTS: ("input_json_delta", "partial_json"),
}


def _usage(
    prompt_tokens: int, output_tokens: int, cached_tokens: int, written_tokens: int, keep_ms: int
) -> dict[str, Any]:
    """Return Anthropic's counts, whose ``input_tokens`` leave out what was read from a cache, or is newly kept."""
    return {
        "input_tokens": prompt_tokens - cached_tokens - written_tokens,
        "cache_creation_input_tokens": written_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": written_tokens if keep_ms < HOUR_MS else 0,
            "ephemeral_1h_input_tokens": written_tokens if keep_ms >= HOUR_MS else 0,
        },
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }
