"""The bytes of a Responses answer: items as they come to be, as typed events or as one object.

Events are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from poolgrid.kernel.wire.hashing import TOKEN_BYTES
from poolgrid.plugins.responses_api.calls import FORMS, CallItem
from poolgrid.plugins.responses_api.schema import ResponsesBody
from poolgrid.server.frontend.answer_pieces import PieceKind
from poolgrid.server.frontend.errors import RequestError
from poolgrid.server.frontend.piece_encoder import AnswerPart, PieceEncoder
from poolgrid.server.frontend.prepared_request import AnswerStart
from poolgrid.server.frontend.responses import escape_line_ends

_encode: Final = msgspec.json.Encoder().encode

Event = tuple[str, dict[str, Any]]


@dataclass(slots=True, eq=False)
class _Item(AnswerPart):
    form: CallItem | None = None
    """Of a call."""


class ResponsesEncoder(PieceEncoder[Event]):
    """Encodes one answer, ``response``."""

    def __init__(self, body: ResponsesBody, start: AnswerStart, response_id: str, stored: bool) -> None:
        super().__init__(start, body.model)
        # Of a response that is kept, its own secret is in the ids of its items: they are found by it.
        self._name = response_id.removeprefix("resp_")
        self._client_tools = start.tools.client_tools
        self._reasoning: list[str] = []
        self._sequence_number = 0
        self.response: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": start.created_s,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": self._parts,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": stored,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text.format if body.text is not None else None) or {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def begin(self) -> bytes:
        return self._events(
            [("response.created", {"response": self.response}), ("response.in_progress", {"response": self.response})]
        )

    def end(self, counts: dict[str, Any]) -> bytes:
        """Return the event of the complete response."""
        self._complete(counts)
        return self._end()

    def not_stored(self) -> bytes:
        """Return the end of a complete answer again, with ``store`` false."""
        self.response["store"] = False
        if not self._sequence_number:
            return _encode(self.response)
        self._sequence_number -= 1
        return self._end()

    def _end(self) -> bytes:
        return self._events([(f"response.{self.response['status']}", {"response": self.response})])

    def error(self, error: RequestError) -> bytes:
        """Return the event of a response that failed; what was written so far stays in it."""
        self._close_part()
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": error.message}
        return self._events([("response.failed", {"response": self.response})])

    def _complete(self, counts: dict[str, Any]) -> dict[str, Any]:
        response = self.response
        response["status"] = "completed"
        if self._finish_reason == "length":
            response["status"] = "incomplete"
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        reasoning = "".join(self._reasoning)
        response["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **counts["prompt_tokens_details"]},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {
                # As many tokens as its text makes by itself: markers are not counted.
                "reasoning_tokens": len(self._model.encode(reasoning)) // TOKEN_BYTES if reasoning else 0
            },
            "total_tokens": counts["total_tokens"],
        }
        return response

    def _finish(self) -> list[Event]:
        opened = self._open_part(PieceKind.CONTENT) if not self._parts and self._part is None else []
        return [*opened, *self._close_part()]

    def _made(self, kind: PieceKind, call_id: str, name: str) -> AnswerPart:
        data: dict[str, Any]
        form: CallItem | None = None
        if kind is PieceKind.ARGUMENTS:
            tool = self._client_tools.get(name)
            form = FORMS["function" if tool is None else tool.kind]
            data = form.begun(call_id, name, tool)
        elif kind is PieceKind.REASONING:
            data = {"type": "reasoning", "summary": [], "content": []}
        else:
            data = {"type": "message", "role": "assistant", "content": []}
        prefix = _PREFIXES[kind] if form is None else form.prefix
        return _Item(
            kind, {"id": f"{prefix}_{self._name}_{len(self._parts)}", "status": "in_progress", **data}, form=form
        )

    def _opened(self, part: AnswerPart) -> list[Event]:
        added = {"output_index": len(self._parts), "item": dict(part.data)}
        events: list[Event] = [("response.output_item.added", added)]
        if part.kind is not PieceKind.ARGUMENTS:
            empty = _part(part.kind, "")
            events.append(("response.content_part.added", {**self._place(part), "content_index": 0, "part": empty}))
        return events

    def _delta(self, part: AnswerPart, text: str) -> list[Event]:
        assert isinstance(part, _Item), "made above"
        part.texts.append(text)
        place = self._place(part)
        if part.form is not None:
            name = part.form.event
            return [(f"response.{name}.delta", {**place, "delta": text})] if name else []
        if part.kind is PieceKind.REASONING:
            self._reasoning.append(text)
        logprobs: dict[str, Any] = {"logprobs": []} if part.kind is PieceKind.CONTENT else {}
        name = _DELTAS[part.kind]
        return [(f"response.{name}.delta", {**place, "content_index": 0, **logprobs, "delta": text})]

    def _closed(self, part: AnswerPart, text: str) -> list[Event]:
        assert isinstance(part, _Item), "made above"
        place = self._place(part)
        events: list[Event] = []
        if part.form is not None:
            part.data[part.form.field] = part.form.value(text)
            if part.form.event:
                done = {**place, "name": part.data["name"], part.form.field: text}
                events.append((f"response.{part.form.event}.done", done))
        else:
            whole = _part(part.kind, text)
            part.data["content"] = [whole]
            place["content_index"] = 0
            logprobs: dict[str, Any] = {"logprobs": []} if part.kind is PieceKind.CONTENT else {}
            events.append((f"response.{_DELTAS[part.kind]}.done", {**place, **logprobs, "text": text}))
            events.append(("response.content_part.done", {**place, "part": whole}))
        part.data["status"] = "incomplete" if self._finish_reason == "length" else "completed"
        events.append(("response.output_item.done", {"output_index": len(self._parts), "item": part.data}))
        return events

    def _place(self, part: AnswerPart) -> dict[str, Any]:
        return {"item_id": part.data["id"], "output_index": len(self._parts)}

    def _events(self, events: Sequence[Event]) -> bytes:
        parts: list[bytes] = []
        for kind, data in events:
            numbered = {"type": kind, "sequence_number": self._sequence_number, **data}
            self._sequence_number += 1
            parts.append(b"event: %s\ndata: %s\n\n" % (kind.encode(), escape_line_ends(_encode(numbered))))
        return b"".join(parts)


_DELTAS: Final = {
    PieceKind.CONTENT: "output_text",
    PieceKind.REASONING: "reasoning_text",
}
_PREFIXES: Final = {PieceKind.CONTENT: "msg", PieceKind.REASONING: "rs"}


def _part(kind: PieceKind, text: str) -> dict[str, Any]:
    if kind is PieceKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
