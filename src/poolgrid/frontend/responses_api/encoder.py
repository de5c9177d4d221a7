"""The bytes of a Responses answer: items as they come to be, as typed events or as one object.

An item is a stretch of one kind: reasoning, a message, a function call. It is added, grows by deltas, and is done when
the next begins or the answer ends. Events are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from poolgrid.frontend.call_ids import CallIds
from poolgrid.frontend.errors import RequestError
from poolgrid.frontend.parsers.pieces import Kind, OutputParser, Piece
from poolgrid.frontend.piece_encoder import PieceEncoder
from poolgrid.frontend.prompt_model import PromptModel
from poolgrid.frontend.responses import escape_line_ends
from poolgrid.frontend.responses_api.calls import FORMS, CallForm
from poolgrid.frontend.responses_api.schema import ResponsesBody
from poolgrid.frontend.tools import ClientTool
from poolgrid.wire.hashing import TOKEN_BYTES

_encode: Final = msgspec.json.Encoder().encode

Event = tuple[str, dict[str, Any]]


class _Item:
    """An item that is being written."""

    __slots__ = ("data", "form", "kind", "texts")

    def __init__(self, kind: Kind, data: dict[str, Any], form: CallForm | None) -> None:
        self.kind = kind
        self.data = data
        self.form = form
        """Of a call."""
        self.texts: list[str] = []


class ResponsesEncoder(PieceEncoder[Event]):
    """Encodes one answer, ``response``. ``parser``: what takes its text apart; ``None`` = all of it is the message."""

    def __init__(
        self,
        body: ResponsesBody,
        *,
        request_id: str,
        response_id: str,
        stored: bool,
        created_s: int,
        model: PromptModel,
        parser: OutputParser | None,
        call_ids: CallIds,
        client_tools: Mapping[str, ClientTool],
    ) -> None:
        super().__init__(parser=parser, request_id=request_id, model_name=body.model, created_s=created_s, model=model)
        # Of a response that is kept, its own secret is in the ids of its items: they are found by it.
        self._name = response_id.removeprefix("resp_")
        self._call_ids = call_ids
        self._client_tools = client_tools
        self._items: list[dict[str, Any]] = []
        self._item: _Item | None = None
        self._calls = 0
        self._reasoning: list[str] = []
        self._sequence_number = 0
        self.response: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": created_s,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": self._items,
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
        return self._events([(f"response.{self.response['status']}", {"response": self.response})])

    def error(self, error: RequestError) -> bytes:
        """Return the event of a response that failed; what was written so far stays in it."""
        self._close_item()
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
            "input_tokens_details": {"cached_tokens": counts["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {
                # As many tokens as its text makes by itself: markers are not counted.
                "reasoning_tokens": len(self._model.encode(reasoning)) // TOKEN_BYTES if reasoning else 0
            },
            "total_tokens": counts["total_tokens"],
        }
        return response

    def _finish(self) -> list[Event]:
        opened = self._open(Kind.CONTENT, "") if not self._items and self._item is None else []
        return [*opened, *self._close_item()]

    def _add(self, piece: Piece) -> list[Event]:
        kind, text = piece
        events: list[Event] = []
        if kind is Kind.CALL:
            return [*self._close_item(), *self._open(Kind.ARGUMENTS, text)]
        item = self._item
        if item is None or item.kind is not kind:
            events += [*self._close_item(), *self._open(kind, "")]
            item = self._item
        assert item is not None, "it was just begun"
        item.texts.append(text)
        if kind is Kind.REASONING:
            self._reasoning.append(text)
        place = self._place(item)
        if item.form is not None:
            if not item.form.event:
                return events
            name = item.form.event
        else:
            name = _DELTAS[kind]
            place["content_index"] = 0
        if kind is Kind.CONTENT:
            place["logprobs"] = []
        events.append((f"response.{name}.delta", {**place, "delta": text}))
        return events

    def _open(self, kind: Kind, name: str) -> list[Event]:
        number = len(self._items)
        data: dict[str, Any]
        form: CallForm | None = None
        if kind is Kind.ARGUMENTS:
            identity = self._call_ids.of(0, self._calls, name)
            self._calls += 1
            tool = self._client_tools.get(name)
            form = FORMS["function" if tool is None else tool.kind]
            data = form.begun(identity, name, tool)
        elif kind is Kind.REASONING:
            data = {"type": "reasoning", "summary": [], "content": []}
        else:
            data = {"type": "message", "role": "assistant", "content": []}
        prefix = _PREFIXES[kind] if form is None else form.prefix
        data = {"id": f"{prefix}_{self._name}_{number}", "status": "in_progress", **data}
        item = self._item = _Item(kind, data, form)
        events: list[Event] = [("response.output_item.added", {"output_index": number, "item": dict(data)})]
        if kind is not Kind.ARGUMENTS:
            part = _part(kind, "")
            events.append(("response.content_part.added", {**self._place(item), "content_index": 0, "part": part}))
        return events

    def _close_item(self) -> list[Event]:
        item = self._item
        if item is None:
            return []
        self._item = None
        text = "".join(item.texts)
        place = self._place(item)
        events: list[Event] = []
        if item.form is not None:
            item.data[item.form.field] = item.form.value(text)
            if item.form.event:
                done = {**place, "name": item.data["name"], item.form.field: text}
                events.append((f"response.{item.form.event}.done", done))
        else:
            part = _part(item.kind, text)
            item.data["content"] = [part]
            place["content_index"] = 0
            logprobs: dict[str, Any] = {"logprobs": []} if item.kind is Kind.CONTENT else {}
            events.append((f"response.{_DELTAS[item.kind]}.done", {**place, **logprobs, "text": text}))
            events.append(("response.content_part.done", {**place, "part": part}))
        item.data["status"] = "incomplete" if self._finish_reason == "length" else "completed"
        events.append(("response.output_item.done", {"output_index": len(self._items), "item": item.data}))
        self._items.append(item.data)
        return events

    def _place(self, item: _Item) -> dict[str, Any]:
        return {"item_id": item.data["id"], "output_index": len(self._items)}

    def _events(self, events: Sequence[Event]) -> bytes:
        parts: list[bytes] = []
        for kind, data in events:
            numbered = {"type": kind, "sequence_number": self._sequence_number, **data}
            self._sequence_number += 1
            parts.append(b"event: %s\ndata: %s\n\n" % (kind.encode(), escape_line_ends(_encode(numbered))))
        return b"".join(parts)


_DELTAS: Final = {
    Kind.CONTENT: "output_text",
    Kind.REASONING: "reasoning_text",
}
_PREFIXES: Final = {Kind.CONTENT: "msg", Kind.REASONING: "rs"}


def _part(kind: Kind, text: str) -> dict[str, Any]:
    if kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
