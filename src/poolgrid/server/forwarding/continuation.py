"""A stream whose server died, continued by the answer of another server to the same request.

The other server computes the answer again from its beginning. ``ContinuedStream`` compares it with what the client has,
takes that part out, and passes the rest under the ids of the first stream. So what a client gets is always one server's
answer: each character that it has was repeated by the server that continues, in its place. An answer that differs ends
the stream. Counts, finish reasons, stop strings, tools, guides and log probabilities need no correction: they are those
of a whole answer.

An answer that is sampled is seldom computed alike twice (``is_repeatable``); of text alone the rest can be sampled
(``poolgrid.server.forwarding.text_continuation``). What is compared is the text
of each field, not its cut into events: engines merge tokens by timing. Ids, times and values of log probabilities are
not compared: they differ from server to server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

import msgspec

from poolgrid.server.forwarding.body_edit import edit, top_level
from poolgrid.server.forwarding.event_filter import MAX_EVENT_BYTES, AnswerNotes, ApiForm, data_of, with_data

GREEDY_TEMPERATURE_MAX: Final = 1e-6
"""Below it engines take the likeliest token: SGLang from here on, vLLM from 1e-5."""

DONE: Final = b"[DONE]"

STREAM_IDS: Final = ("id", "request_id", "created", "model")
"""Members of each chunk that are the stream's."""

PROMPT_MEMBERS: Final = ("prompt_token_ids", "prompt_text", "prompt_logprobs")
"""What the first chunk of a stream has of the prompt, where it was asked for."""

LAST_EVENTS: Final = frozenset(("message_stop", "response.completed", "response.incomplete", "response.failed"))
"""Types of the events that end an answer."""

DIFFERS: Final = "the other server's answer differs from what the client has"

ITEM_IDS: Final = frozenset(("id", "item_id", "call_id", "response_id"))
"""Members of Responses events that hold an id which a server makes up."""

_EVENT_END = re.compile(rb"(?>\r\n|\n|\r){2}")
_decode = msgspec.json.Decoder().decode


class ContinuationError(ValueError):
    """The stream cannot be continued; says why."""


def is_repeatable(values: Mapping[str, msgspec.Raw]) -> bool:
    """Return whether a server computes the answer to a body alike each time: without sampling, or with a seed."""
    temperature = _number(values.get("temperature"))
    if temperature is not None and 0 <= temperature < GREEDY_TEMPERATURE_MAX:
        return True
    return _number(values.get("seed")) is not None or _number(values.get("top_k")) == 1


def has_end(form: ApiForm, data: bytes) -> bool:
    """Return whether whole events have the end of an answer: nothing is left to continue."""
    found = data_of(_EVENT_END.split(data.rstrip(b"\r\n"))[-1])
    if found == DONE:
        return True
    value = None if form is ApiForm.CHAT else parsed_json(found)
    return value is not None and value.get("type") in LAST_EVENTS


def _number(raw: msgspec.Raw | None) -> float | None:
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=float)
    except msgspec.MsgspecError:
        return None


class _Had:
    """What a client has of an answer, and how much of it has been repeated.

    Keys begin with the choice that they are of, or with ``None``.
    """

    def __init__(self) -> None:
        self._texts: dict[tuple[Hashable, ...], list[Any]] = {}
        self._facts: dict[tuple[Hashable, ...], Any] = {}
        self._at: dict[tuple[Hashable, ...], int] = {}
        self._missing: dict[Hashable, int] = {}
        """Characters, list elements and facts of each choice that have not been repeated yet."""
        self.missing = 0
        """All of them."""
        self.is_read = False
        """Whether all that the client has is in it, so that what comes now is compared with it."""
        self.is_new = False
        """Whether something came that the client has not; for the caller to reset."""

    @property
    def has_output(self) -> bool:
        """Whether there is any text."""
        return bool(self._texts)

    def piece(self, key: tuple[Hashable, ...], piece: Any) -> Any:
        """Take a piece of a text or a list; return what of it the client has not."""
        if not piece:
            return piece
        if not self.is_read:
            self._texts.setdefault(key, []).append(piece)
            self._count(key, len(piece))
            return piece
        had = self._texts.get(key)
        if had is None:
            self.is_new = True
            return piece
        if len(had) > 1:
            had[:] = ["".join(had) if isinstance(had[0], str) else [each for part in had for each in part]]
        known, at = had[0], self._at.get(key, 0)
        count = min(len(piece), len(known) - at)
        if count:
            if type(known) is not type(piece) or _compared(known[at : at + count]) != _compared(piece[:count]):
                raise ContinuationError(DIFFERS)
            self._at[key] = at + count
            self._count(key, -count)
        if count < len(piece):
            self.is_new = True
        return piece[count:]

    def fact(self, key: tuple[Hashable, ...], value: Any = None) -> bool:
        """Take what an answer has once; return whether the client has it."""
        if not self.is_read:
            if key not in self._facts:
                self._facts[key] = value
                self._count(key, 1)
            return False
        if key not in self._facts:
            self.is_new = True
            return False
        if value != self._facts[key]:
            raise ContinuationError(DIFFERS)
        if key not in self._at:
            self._at[key] = 1
            self._count(key, -1)
        return True

    def check_order(self, choice: Hashable) -> None:
        """Refuse something new of a choice that comes before all that the client has of it."""
        if self.is_new and self.is_read and self._missing.get(choice):
            raise ContinuationError(DIFFERS)

    def _count(self, key: tuple[Hashable, ...], change: int) -> None:
        self._missing[key[0]] = self._missing.get(key[0], 0) + change
        self.missing += change


def _compared(piece: Any) -> Any:
    """What of a piece must be equal: of log probabilities the tokens, not the values."""
    if isinstance(piece, str):
        return piece
    return [
        each.get("token") if isinstance(each, dict) else None if isinstance(each, float) else each for each in piece
    ]


class ContinuedStream:
    """The second stream of an answer, as far as the client has not got it from the first."""

    def __init__(self, form: ApiForm, had: bytes) -> None:
        """``had`` are the events that the client has, whole ones.

        Raises:
            ContinuationError: They are of no known form.
        """
        self._had = _Had()
        self._held = b""
        self._walk: Callable[[dict[str, Any]], bool] = {
            ApiForm.CHAT: self._walk_chunk,
            ApiForm.MESSAGES: self._walk_message_event,
            ApiForm.RESPONSES: self._walk_response_event,
        }[form]
        self._form = form
        self._ids: dict[str, bytes] = {}
        """Of the first stream, as raw JSON."""
        self._names: dict[tuple[str, int], str] = {}
        """Ids of the first stream's items, by what they name."""
        self._renamed: dict[str, str] = {}
        """Its ids by those of the second stream."""
        self._sequence = -1
        """Number of the last event that the client has."""
        self._created_at: Any = None
        for event in events_of(had):
            self._note(event)
        self._had.is_read = True

    @property
    def has_output(self) -> bool:
        """Whether the client has any text of the answer: without it any answer continues the stream."""
        return self._had.has_output

    def feed(self, data: bytes) -> bytes:
        """Take more of the second stream; return what is for the client.

        Raises:
            ContinuationError: The answer differs from what the client has.
        """
        events, self._held = split_events(self._held + data)
        return b"".join(map(self._rest, events))

    def finish(self) -> None:
        """Take note that the second stream has ended.

        Raises:
            ContinuationError: It ended before it had all that the client has.
        """
        if self._had.missing:
            raise ContinuationError("the other server's answer ends before what the client has")

    def correct(self, notes: AnswerNotes) -> None:
        """Change nothing of what the second stream reports: it is of the whole answer."""

    def _note(self, event: bytes) -> None:
        """Take note of an event that the client has."""
        data = data_of(event)
        if not data:
            return
        value = parsed_json(data)
        if value is None or value.get("error"):
            raise ContinuationError("the stream has an error, or an event that cannot be read")
        if self._form is ApiForm.CHAT and not self._ids:
            self._ids = stream_ids(data)
        if not self._walk(value):
            raise ContinuationError(f"the stream has an unknown event: {data[:60]!r}")

    def _rest(self, event: bytes) -> bytes:
        """What of an event of the second stream is for the client."""
        data = data_of(event)
        if not data:
            return event  # a comment
        had, missing = self._had, self._had.missing
        if not missing:
            return self._renamed_event(event, data)
        value = None if data == DONE else parsed_json(data)
        if data == DONE:
            self.finish()
        if value is None or value.get("error"):
            what = "its answer cannot be read" if value is None else "it reports an error"
            raise ContinuationError(f"the other server does not repeat the answer: {what}")
        had.is_new = False
        if not self._walk(value):
            raise ContinuationError(f"the other server's answer has an unknown event: {data[:60]!r}")
        if not had.is_new:
            return b""
        is_cut = missing != had.missing
        if self._form is ApiForm.CHAT:
            return with_data(event, lambda raw: self._with_ids(raw, value if is_cut else {}))
        if self._form is ApiForm.MESSAGES:
            return with_data(event, lambda _: encoded_json(value)) if is_cut else event
        return with_data(event, lambda _: self._renumbered(value))

    def _renamed_event(self, event: bytes, data: bytes) -> bytes:
        """An event that comes behind all that the client has."""
        if data == DONE or self._form is ApiForm.MESSAGES:
            return event
        if self._form is ApiForm.CHAT:
            return with_data(event, lambda raw: self._with_ids(raw, {}))
        value = parsed_json(data)
        if value is None:
            return event
        self._walk_names(value)
        return with_data(event, lambda _: self._renumbered(value))

    def _with_ids(self, data: bytes, cut: dict[str, Any]) -> bytes:
        """A chunk with the first stream's ids, and with what is left of ``cut``."""
        fields = top_level(data)
        changes = {name: value for name, value in self._ids.items() if name in fields.values}
        for name in ("choices", *PROMPT_MEMBERS):
            if name in cut:
                changes[name] = encoded_json(cut[name])
        return edit(fields, changes)

    # -- chat and text completions -------------------------------------------------------------------------------------

    def _walk_chunk(self, chunk: dict[str, Any]) -> bool:
        """Take a chunk, and cut from it what the client has; return whether it is one."""
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            return False
        had = self._had
        for name in PROMPT_MEMBERS:
            if chunk.get(name) is not None and had.fact((None, name)):
                chunk[name] = None
        if not choices:
            had.is_new = False
            had.fact((None, "usage" if chunk.get("usage") else "no choices"))
            if had.is_new and had.missing:
                raise ContinuationError(DIFFERS)
            return True
        is_new, kept = False, []
        for choice in choices:
            had.is_new = False
            index = choice.get("index", 0)
            self._walk_choice(index, choice)
            had.check_order(index)
            if had.is_new:
                kept.append(choice)
                is_new = True
        had.is_new = is_new
        choices[:] = kept if had.is_read else choices
        return True

    def _walk_choice(self, index: int, choice: dict[str, Any]) -> None:
        had = self._had
        for name, value in list(choice.items()):
            if name == "delta" and isinstance(value, dict):
                self._walk_delta(index, value)
            elif name == "logprobs" and isinstance(value, dict):
                for part, elements in value.items():
                    if isinstance(elements, list):
                        value[part] = had.piece((index, name, part), elements)
            elif name in ("text", "token_ids", "output_ids") and isinstance(value, str | list):
                choice[name] = had.piece((index, name), value)
            elif name == "finish_reason" and value is not None:
                had.fact((index, name), value)
            elif name in PROMPT_MEMBERS and value is not None:
                if had.fact((index, name)):
                    choice[name] = None
            elif isinstance(value, list | dict) and value:
                self._only_once(index, f"choices[].{name}")

    def _walk_delta(self, index: int, delta: dict[str, Any]) -> None:
        had = self._had
        for name, value in list(delta.items()):
            if name == "role":
                if value is not None and had.fact((index, name), value):
                    del delta[name]
            elif name == "tool_calls":
                delta[name] = [call for call in value or () if self._walk_call(index, call)]
                if not delta[name]:
                    del delta[name]
            elif isinstance(value, str):
                delta[name] = had.piece((index, "delta", name), value)
            elif isinstance(value, list | dict) and value:
                self._only_once(index, f"delta.{name}")

    def _walk_call(self, index: int, call: dict[str, Any]) -> bool:
        """Take a part of a tool call; return whether there is something in it that the client has not."""
        had = self._had
        was_new, had.is_new = had.is_new, False
        number = call.get("index", 0)
        if call.get("id") is not None and had.fact((index, "call", number)):
            call.pop("id")
            call.pop("type", None)
        function = call.get("function")
        if isinstance(function, dict):
            for name, value in list(function.items()):
                if isinstance(value, str):
                    function[name] = had.piece((index, "call", number, name), value)
                    if name == "name" and value and not function[name]:
                        del function[name]
        is_new = had.is_new
        had.is_new = was_new or is_new
        return is_new

    def _only_once(self, choice: Hashable, name: str) -> None:
        """Take note of a member that cannot be compared: it may come behind what the client has, not in it."""
        if not self._had.is_read:
            raise ContinuationError(f"the answer has {name}, which cannot be compared")
        self._had.is_new = True
        self._had.check_order(choice)

    # -- Messages ------------------------------------------------------------------------------------------------------

    def _walk_message_event(self, event: dict[str, Any]) -> bool:
        had, kind, index = self._had, event.get("type"), event.get("index")
        if kind == "content_block_delta":
            delta = event.get("delta")
            if not isinstance(delta, dict):
                return False
            for name, value in list(delta.items()):
                if name == "signature":
                    had.fact((None, index, name))
                elif name != "type" and isinstance(value, str):
                    delta[name] = had.piece((None, index, name), value)
                elif isinstance(value, list | dict) and value:
                    self._only_once(None, f"delta.{name}")
        elif kind == "content_block_start":
            block = event.get("content_block") or {}
            had.fact((None, index, kind), (block.get("type"), block.get("name")))
        elif kind in ("message_start", "content_block_stop", "message_delta", "message_stop"):
            had.fact((None, index, kind))
        elif kind != "ping":
            return False
        had.check_order(None)
        return True

    # -- Responses -----------------------------------------------------------------------------------------------------

    def _walk_response_event(self, event: dict[str, Any]) -> bool:
        had, kind = self._had, event.get("type")
        if not isinstance(kind, str):
            return False
        if not had.is_read and isinstance(event.get("sequence_number"), int):
            self._sequence = event["sequence_number"]
        if kind == "keepalive":
            return True
        self._walk_names(event)
        key = (None, kind, event.get("output_index"), event.get("content_index"), event.get("summary_index"))
        if kind.endswith(".delta"):
            for name in ("delta", "logprobs"):
                if isinstance(event.get(name), str | list):
                    event[name] = had.piece((*key, name), event[name])
        else:
            had.fact(key)
        had.check_order(None)
        return True

    def _walk_names(self, event: dict[str, Any]) -> None:
        """Take note of the ids in an event."""
        response, item, index = event.get("response"), event.get("item"), event.get("output_index")
        found = [] if not isinstance(response, dict) else [("response", -1, response.get("id"))]
        if isinstance(item, dict) and isinstance(index, int):
            found += [(name, index, item.get(name)) for name in ("id", "call_id")]
        for name, number, value in found:
            if not isinstance(value, str) or not value:
                continue
            first = self._names.setdefault((name, number), value)
            if first != value:
                self._renamed[value] = first
        if isinstance(response, dict):
            if self._created_at is None:
                self._created_at = response.get("created_at")
            elif "created_at" in response:
                response["created_at"] = self._created_at

    def _renumbered(self, event: dict[str, Any]) -> bytes:
        """An event with the first stream's ids, and its number behind those that the client has."""
        if "sequence_number" in event:
            self._sequence += 1
            event["sequence_number"] = self._sequence
        return encoded_json(_with_names(event, self._renamed) if self._renamed else event)


def _with_names(value: Any, names: Mapping[str, str], key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _with_names(each, names, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_names(each, names) for each in value]
    return names.get(value, value) if key in ITEM_IDS and isinstance(value, str) else value


def split_events(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the whole events, without blank lines before them, and what follows them.

    Raises:
        ContinuationError: An event is too long.
    """
    found, at = [], 0
    for end in _EVENT_END.finditer(data):
        event = data[at : end.end()].lstrip(b"\r\n")
        at = end.end()
        if event:
            found.append(event)
    if len(data) - at > MAX_EVENT_BYTES:
        raise ContinuationError(f"an event has more than {MAX_EVENT_BYTES} bytes")
    return found, data[at:]


def events_of(data: bytes) -> list[bytes]:
    """Return the events that a client has; raises ``ContinuationError`` if one is not whole."""
    found, rest = split_events(data)
    if rest.strip(b"\r\n"):
        raise ContinuationError("the client has a part of an event")
    return found


def stream_ids(data: bytes) -> dict[str, bytes]:
    """Return the members of a chunk that are its stream's, as raw JSON."""
    fields = top_level(data).values
    return {name: bytes(fields[name]) for name in STREAM_IDS if name in fields}


def parsed_json(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object of an event; ``None`` for anything else."""
    try:
        value = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            value = json.loads(data)  # which takes NaN, and halves of surrogate pairs
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def encoded_json(value: Any) -> bytes:
    """Return a value as JSON, with as few escapes as it allows."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value, separators=(",", ":")).encode()
