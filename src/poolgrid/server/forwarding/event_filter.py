"""What poolgrid asked a server for itself is taken out of the answer again, and what answers count is noted.

``EventFilter`` takes the bytes of a ``text/event-stream`` as they come, split anywhere, and returns those for the
client. An event that holds nothing to take out is passed byte for byte: comments, unknown fields, line ends. No event
is passed before it is whole, so a client never has a part of one when a server dies.
``read_answer`` notes the counts of a whole JSON answer, ``cut_answer`` takes token ids out of it as well.

The common event of a token is looked at with a few searches for constant bytes and never parsed. Such a search finds
keys only: within a JSON string a quote has a backslash before it.

Figures of the forms, of vLLM 0.33, SGLang 0.5.23 and TensorRT-LLM 1.4:

- vLLM writes ``"token_ids":null`` where no ids were asked for, SGLang has no such member then.
- vLLM sends chat events without a delta only where ids are asked for (half of a tool call, for example).
- SGLang sends the ids of a chat's prompt in an event of their own behind the choices, or with other parts of its
  ``sglext``.
- vLLM writes its ``system_fingerprint`` into the chunk with usage where there is one, else into the last chunk of each
  choice. The event with a finish reason therefore waits for the one behind it, which vLLM writes at once.
- ``"usage":null`` with each chunk is OpenAI's form of ``include_usage``. SGLang writes it unasked in most chunks,
  trtllm-serve in those of text completions, vLLM never: of these three it is never to be cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import pairwise
from typing import Annotated, Any, Final

import msgspec

from poolgrid.server.forwarding.body_edit import edit, edit_elements, top_level

ABORTED: Final = "abort"
"""Finish reason of a request that its server gives up. vLLM ends all of them so on SIGTERM; its Messages API has a
``stop_reason`` of null then."""

GAVE_UP_BY_ABORT: Final = "the server aborted the answer"

LOST_CODE: Final = "server_lost"
"""Code of the error with which a router ends a stream that it cannot have continued. Another router before it may."""

SERVER_ERROR_STATUS_MIN: Final = 500

SERVER_ERROR_TYPES: Final = frozenset(("internal_error", "api_error", "overloaded_error"))
"""Of the Messages API; other types are the client's errors."""

MAX_EVENT_BYTES: Final = 2 << 20
"""Bytes of an event that is held until it is whole, and parsed at 50 ms a megabyte at worst. The largest that is to be
changed is the one with the ids of a prompt: 128k ids of six digits and a comma. A longer event is passed as it comes,
unparsed."""

MAX_OBJECTS: Final = 10_000
"""Opening braces of an answer or an event that is read: each costs up to a microsecond. A chunk of 400 tokens with 20
log probabilities each has fewer. Others are not noted."""

MAX_SLOW_BYTES: Final = 256 << 10
"""Bytes of an answer or an event that Python's parser reads, at 200 ms a megabyte at worst. Those with ``NaN`` and the
like beyond it are not noted."""

MAX_COUNT: Final = (1 << 32) - 1
"""Of tokens. What a server reports beyond it is unknown, for it does not fit the messages between processes."""

_ABSENT: Final = msgspec.Raw()
_COUNT = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]


class ApiForm(StrEnum):
    """Of which API an answer is."""

    CHAT = "chat"
    """Chat and text completions."""
    MESSAGES = "messages"
    RESPONSES = "responses"


class TakenIds(Enum):
    """The token ids that poolgrid asked for, and what is left in their place."""

    NONE = "none were asked for, or the client did so too"
    NULL = "null, as vLLM writes where no ids were asked for"
    ABSENT = "no member, as SGLang's text completions have it where no ids were asked for"
    EXTENSION = "those of the prompt in SGLang's extension of chat"


@dataclass(slots=True)
class AnswerNotes:
    """What an answer reports; ``None`` is unknown."""

    response_id: str | None = None
    prompt_tokens: int | None = None
    """All of them, cached ones too, in the Messages API as well."""
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_token_ids: bytes | None = None
    """A JSON array, where ids were taken out."""
    is_aborted: bool = False
    """Whether its server gave it up (``ABORTED``); noted of whole answers."""


class _Details(msgspec.Struct):
    cached_tokens: _COUNT | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _COUNT | None = None
    completion_tokens: _COUNT | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _COUNT | None = None
    output_tokens: _COUNT | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _COUNT | None = None
    cache_creation_input_tokens: _COUNT | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    code: int | str | None = None
    type: str | None = None


class _Delta(msgspec.Struct):
    stop_reason: str | None = None


class _Part(msgspec.Struct):
    """The ``message`` or ``response`` of an event."""

    id: str | None = None
    usage: msgspec.Raw = _ABSENT


class _Answer(msgspec.Struct):
    """A whole answer or the data of an event, of any form."""

    id: str | None = None
    choices: list[_Choice] | None = None
    usage: msgspec.Raw = _ABSENT
    system_fingerprint: msgspec.Raw = _ABSENT
    message: _Part | None = None
    response: _Part | None = None
    type: str | None = None
    stop_reason: str | None = None
    error: msgspec.Raw = _ABSENT
    delta: msgspec.Raw = _ABSENT


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_error = msgspec.json.Decoder(_Error | None).decode
_decode_delta = msgspec.json.Decoder(_Delta).decode
_decode_usage = msgspec.json.Decoder(_Usage).decode

_EVENT_END = re.compile(rb"(?>\r\n|\n|\r){2}")
_DATA_LINE = re.compile(rb"(?:^|[\r\n])(data(?:: ?([^\r\n]*)|(?=[\r\n]|$)))")
_LINE_END = re.compile(rb"\r\n|\n|\r")

_NEWLINE: Final = 10
_FINISH, _USAGE, _IDS = b'"finish_reason"', b'"usage"', b'token_ids"'
_NULLS = (b":null", b": null")
_CHOICE_WITH_IDS = re.compile(
    rb'"finish_reason":(?:null|"[a-z_]*")'
    rb'(?:,"(?:stop_reason|matched_stop)":(?:null|-?\d+|"[^"\\]*"))?'
    rb'(?:,"prompt_token_ids":null)?'
    rb'(,"token_ids":)(\[[\d,]*\])'
)
"""From the finish reason of a choice to its ids, as vLLM and SGLang write them."""
_WITHOUT_DELTA = b'"delta":{},"logprobs":null,"finish_reason":null'
_ID_MEMBERS = ("token_ids", "prompt_token_ids")


class EventFilter:
    """One stream of events, from the server to the client."""

    def __init__(self, form: ApiForm, takes_usage: bool = False, ids: TakenIds = TakenIds.NONE) -> None:
        """``takes_usage`` takes the chunk with usage alone out, and puts the fingerprint in it back. Usage is not to be
        asked for where a client sets ``continuous_usage_stats``: its chunks would then have usage, or not, by the
        server. ``ids`` are not to be asked for with ``echo``: vLLM then leaves the prompt out of its text."""
        self.notes = AnswerNotes()
        self._form = form
        self._takes_usage = takes_usage
        self._ids = ids
        self._takes_ids = ids is TakenIds.NULL or ids is TakenIds.ABSENT
        self._event: Callable[[bytes], bytes] = {
            ApiForm.CHAT: self._chat_event,
            ApiForm.MESSAGES: self._messages_event,
            ApiForm.RESPONSES: self._responses_event,
        }[form]
        self._held = bytearray()
        self._is_passing = False
        """Within an event beyond the bound."""
        self._tail = b""
        """The last byte of that event."""
        self._has_returns = False
        """Lines end in carriage returns."""
        self._newline: bytes | None = None
        """What a newline becomes that follows an event's last carriage return."""
        self._is_first = True
        self.given_up = ""
        """How the server gave the answer up, if it did. What it wrote of that is withheld until ``finish``."""
        self._withheld = bytearray()
        self._waiting = b""
        """The event with a finish reason."""
        self._fingerprint: bytes | None = None

    @property
    def is_between_events(self) -> bool:
        """Whether an event of another source can be put into the client's stream now: always, but within an event that
        is longer than ``MAX_EVENT_BYTES``."""
        return not self._is_passing

    def again(self) -> EventFilter:
        """A filter of the same kind, for another answer."""
        return EventFilter(self._form, self._takes_usage, self._ids)

    def feed(self, data: bytes) -> bytes:
        """The bytes for the client, whole events: ``data`` itself where it is whole and nothing is taken out."""
        if (
            self._held
            or self._is_passing
            or self._has_returns
            or not data.endswith(b"\n\n")
            or b"\r" in data
            or len(data) > MAX_EVENT_BYTES
        ):
            passed = self._feed_any(data)
        elif data.find(b"\n\n") == len(data) - 2 and data[0] != _NEWLINE:
            passed = self._event(data)
        else:
            passed = b"".join(map(self._block, data[:-2].split(b"\n\n")))
        return passed

    def finish(self) -> bytes:
        """What is still held when the stream ends: how its server gave up, an event whose blank line is missing."""
        rest = bytes(self._held)
        self._held.clear()
        passed = self._event(rest) if rest else b""
        passed, self._waiting = passed + self._waiting, b""
        return passed + self._withheld if self._withheld else passed

    def _give_up(self, event: bytes, why: str) -> bytes:
        """Withhold an event and all that come."""
        self.given_up = why
        self._event = self._withhold
        return self._withhold(event)

    def _withhold(self, event: bytes) -> bytes:
        if len(self._withheld) + len(event) <= MAX_EVENT_BYTES:
            self._withheld += event
        return b""

    def _feed_any(self, data: bytes) -> bytes:
        if not data:
            return b""
        self._has_returns = self._has_returns or b"\r" in data
        pieces: list[bytes] = []
        if self._newline is not None and data.startswith(b"\n"):
            if self._waiting:
                self._waiting += b"\n"
            else:
                pieces.append(self._newline)
            data = data[1:]
        self._newline = None
        if self._is_passing:
            end = self._end_of(self._tail + data, 0) - len(self._tail)
            if end < 0:
                self._tail = data[-1:]
                return data
            pieces.append(data[:end])
            data = data[end:]
            self._is_passing = False
        held = self._held
        # The first of the two line ends may have come before.
        at, start = 0, max(0, len(held) - 1)
        held += data
        while (end := self._end_of(held, start)) >= 0:
            block = bytes(held[at:end])
            event = block.lstrip(b"\r\n")
            passed = self._event(event) if 0 < len(event) <= MAX_EVENT_BYTES else event
            pieces += (block[: len(block) - len(event)], passed)
            if end == len(held) and block.endswith(b"\r"):
                self._newline = b"\n" if passed.endswith(b"\r") or not event else b""
            at = start = end
        del held[:at]
        if len(held) > MAX_EVENT_BYTES:
            self._is_passing, self._tail = True, bytes(held[-1:])
        # A long event that is held is not copied for each piece of it.
        if self._is_passing or (held.startswith((b"\r", b"\n")) and not held.strip(b"\r\n")):
            pieces.append(bytes(held))
            held.clear()
        return b"".join(pieces)

    def _block(self, block: bytes) -> bytes:
        """One of several whole events, without its blank line; blank lines before it are passed."""
        event = block.lstrip(b"\n")
        passed = self._event(event + b"\n\n") if event else b"\n\n"
        return block[: len(block) - len(event)] + passed if len(event) < len(block) else passed

    def _end_of(self, data: bytes | bytearray, start: int) -> int:
        """The offset behind the blank line that ends an event, or -1."""
        if self._has_returns:
            found = _EVENT_END.search(data, start)
            return found.end() if found else -1
        at = data.find(b"\n\n", start)
        return at + 2 if at >= 0 else -1

    def _chat_event(self, event: bytes) -> bytes:
        if not self._waiting:
            return self._chat_chunk(event)
        before, self._waiting = self._waiting, b""
        passed = self._chat_chunk(event)
        if self._fingerprint is not None:
            before, self._fingerprint = _with_fingerprint(before, self._fingerprint), None
        return before + passed

    def _chat_chunk(self, event: bytes) -> bytes:
        if event.find(b'"choices"') < 0:
            return self._rare_event(event)
        finish, usage = event.find(_FINISH), event.find(_USAGE)
        is_last = False
        has_usage = usage >= 0 and not event.startswith(_NULLS, usage + len(_USAGE))
        if (
            self._is_first
            or has_usage
            or (finish >= 0 and not event.startswith(_NULLS, finish + len(_FINISH)))
            or event.find(_FINISH, finish + 1) >= 0
        ):
            self._is_first = False
            answer = _read(data_of(event))
            if answer is not None:
                _note_chat(self.notes, answer)
                if _has_aborted(answer):
                    return self._give_up(event, GAVE_UP_BY_ABORT)
                if self._takes_usage and has_usage and answer.usage and answer.choices == []:
                    self._fingerprint = bytes(answer.system_fingerprint) or None
                    return b""
                is_last = self._takes_usage and any(choice.finish_reason for choice in answer.choices or ())
        if self._takes_ids:
            event = self._without_ids(event, finish)
            if self._ids is TakenIds.NULL and event.find(_WITHOUT_DELTA) >= 0:
                return b""
        elif self._ids is TakenIds.EXTENSION and event.find(b'"sglext"') >= 0:
            event = self._without_extension(event)
        if is_last and event.find(b'"system_fingerprint"') < 0:
            self._waiting = event
            return b""
        return event

    def _messages_event(self, event: bytes) -> bytes:
        return event if event.startswith(b"event: content_block_") else self._rare_event(event)

    def _responses_event(self, event: bytes) -> bytes:
        is_common = event.find(b'"response"') < 0 and not event.startswith(b"event: error")
        return event if is_common else self._rare_event(event)

    def _rare_event(self, event: bytes) -> bytes:
        """An event that is no common one: a start, an end, an error."""
        if (answer := _read(data_of(event))) is not None:
            _note_event(self.notes, answer)
            why = _why_given_up(answer)
            if why:
                return self._give_up(event, why)
        return event

    def _without_ids(self, event: bytes, finish: int) -> bytes:
        found = _CHOICE_WITH_IDS.match(event, finish) if finish >= 0 else None
        if found is not None and event.find(_IDS, 0, finish) < 0 and event.find(_IDS, found.end()) < 0:
            if self._ids is TakenIds.NULL:
                return b"%bnull%b" % (event[: found.start(2)], event[found.end(2) :])
            return event[: found.start(1)] + event[found.end(2) :]
        if event.find(_IDS) < 0:
            return event
        return with_data(event, lambda data: _cut_ids(data, self._ids, self.notes))

    def _without_extension(self, event: bytes) -> bytes:
        is_empty = False

        def cut(data: bytes) -> bytes:
            nonlocal is_empty
            kept = _cut_extension(data, self.notes)
            fields = top_level(kept)
            is_empty = "sglext" not in fields.values and fields.value("choices") == b"[]"
            return kept

        event = with_data(event, cut)
        return b"" if is_empty else event


def _why_given_up(answer: _Answer) -> str:
    with suppress(msgspec.MsgspecError):
        if answer.type == "message_delta" and _decode_delta(answer.delta).stop_reason is None:
            return GAVE_UP_BY_ABORT
        error = _decode_error(answer.error) if answer.error else None
        if error is not None and (
            error.type in SERVER_ERROR_TYPES
            or error.code == LOST_CODE
            or (isinstance(error.code, int) and error.code >= SERVER_ERROR_STATUS_MIN)
        ):
            return "the server reported an error of its own"
    return ""


def cut_answer(body: bytes, ids: TakenIds) -> tuple[bytes, AnswerNotes]:
    """Return a whole JSON answer for the client, and what it reports; ``body`` itself where nothing is taken out."""
    notes = read_answer(body)
    with suppress(ValueError):
        if ids is TakenIds.EXTENSION:
            body = _cut_extension(body, notes) if body.find(b'"sglext"') >= 0 else body
        elif ids is not TakenIds.NONE and body.find(_IDS) >= 0:
            body = _cut_ids(body, ids, notes)
    return body, notes


def read_answer(body: bytes) -> AnswerNotes:
    """What a whole JSON answer reports."""
    notes = AnswerNotes()
    answer = _read(body)
    if answer is not None:
        _note_chat(notes, answer)
        is_message = answer.type == "message" and answer.stop_reason is None
        notes.is_aborted = is_message or _has_aborted(answer)
    return notes


def _has_aborted(answer: _Answer) -> bool:
    return any(choice.finish_reason == ABORTED for choice in answer.choices or ())


def _read(data: bytes) -> _Answer | None:
    """``None`` for what is no JSON object, has a member of another type than its API defines, or too many objects."""
    if len(data) > MAX_OBJECTS and data.count(b"{") > MAX_OBJECTS:
        return None
    try:
        return _decode_answer(data)
    except (msgspec.ValidationError, RecursionError):
        return None
    except (msgspec.DecodeError, UnicodeDecodeError):
        if b"{" not in data or len(data) > MAX_SLOW_BYTES:
            return None
    with suppress(ValueError, RecursionError, msgspec.DecodeError):
        # Python's parser takes NaN and -Infinity, which log probabilities are at times.
        answer = _members_of(json.loads(data), _Answer)
        for name in ("message", "response"):
            answer[name] = _members_of(answer.get(name), _Part)
        choices = answer.get("choices")
        answer["choices"] = [_members_of(choice, _Choice) for choice in choices] if isinstance(choices, list) else None
        return _decode_answer(json.dumps(answer))
    return None


def _members_of(value: Any, kind: type[msgspec.Struct]) -> Any:
    return {name: value[name] for name in kind.__struct_fields__ if name in value} if isinstance(value, dict) else value


def _note_event(notes: AnswerNotes, answer: _Answer) -> None:
    """The event of a Messages or Responses stream."""
    part = answer.response or answer.message
    if part is not None:
        notes.response_id = notes.response_id or part.id
        _note_usage(notes, part.usage)
    _note_usage(notes, answer.usage)


def _note_chat(notes: AnswerNotes, answer: _Answer) -> None:
    """A chunk, or a whole answer of any form."""
    notes.response_id = notes.response_id or answer.id
    _note_usage(notes, answer.usage)


def _note_usage(notes: AnswerNotes, raw: msgspec.Raw) -> None:
    """Note usage whose counts make sense; others are unknown."""
    try:
        usage = _decode_usage(raw)
    except msgspec.DecodeError:
        return
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = usage.cache_read_input_tokens if details is None else details.cached_tokens
    prompt = usage.prompt_tokens
    if prompt is None and usage.input_tokens is not None:
        # The Messages API counts cached tokens apart from the others, the Responses API among them.
        prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    if prompt is not None:
        notes.prompt_tokens = prompt
    if cached is not None:
        notes.cached_tokens = cached
    completion = usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens
    if completion is not None:
        notes.completion_tokens = completion


def _cut_ids(data: bytes, left: TakenIds, notes: AnswerNotes) -> bytes:
    """The answer or chunk without ids, at its top and in its choices.

    Raises:
        ValueError: It is no JSON.
    """

    def cut(part: bytes) -> bytes:
        fields = top_level(part)
        found = [name for name in _ID_MEMBERS if (fields.value(name) or b"").startswith(b"[")]
        if "prompt_token_ids" in found:
            notes.prompt_token_ids = notes.prompt_token_ids or fields.value("prompt_token_ids")
        if left is TakenIds.NULL:
            return edit(fields, dict.fromkeys(found, b"null"))
        return edit(fields, removed=found)

    fields = top_level(cut(data))
    choices = fields.value("choices")
    if choices is None or not choices.startswith(b"["):
        return fields.body
    return edit(
        fields, {"choices": edit_elements(choices, lambda choice: cut(choice) if choice[:1] == b"{" else choice)}
    )


def _cut_extension(data: bytes, notes: AnswerNotes) -> bytes:
    """The answer or chunk without the prompt's ids in ``sglext``, which goes where nothing else is in it.

    Raises:
        ValueError: It is no JSON.
    """
    fields = top_level(data)
    extension = fields.value("sglext")
    if extension is None or not extension.startswith(b"{"):
        return data
    inner = top_level(extension)
    notes.prompt_token_ids = notes.prompt_token_ids or inner.value("input_ids")
    if set(inner.values) <= {"input_ids"}:
        return edit(fields, removed=("sglext",))
    return edit(fields, {"sglext": edit(inner, removed=("input_ids",))})


def data_of(event: bytes) -> bytes:
    """Return the data of an event, its lines joined as clients join them."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2]
    return b"\n".join(found[2] or b"" for found in _DATA_LINE.finditer(event))


def _with_fingerprint(event: bytes, fingerprint: bytes) -> bytes:
    """The event with its server's fingerprint where the server has it: behind the choices."""

    def put(data: bytes) -> bytes:
        choices = next(member for member in top_level(data).members if member.name == "choices")
        return b'%b,"system_fingerprint":%b%b' % (data[: choices.value_end], fingerprint, data[choices.value_end :])

    return event if fingerprint == b"null" else with_data(event, put)


def with_data(event: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return the event with its data changed; as it is where the data is no JSON.

    Other lines between those of the data come behind them.
    """
    lines = list(_DATA_LINE.finditer(event))
    before = b"\n".join(line[2] or b"" for line in lines)
    try:
        data = change(before)
    except ValueError:
        return event
    if data == before:
        return event
    first, last = lines[0], lines[-1]
    if first[2] is None:
        return event
    if len(lines) == 1:
        return event[: first.start(2)] + data + event[first.end(2) :]
    line_end = _LINE_END.search(event, first.end())
    between = (line_end[0] if line_end else b"\n") + event[first.start(1) : first.start(2)]
    others = [event[line.end() : then.start(1)].rstrip(b"\r\n") for line, then in pairwise(lines)]
    return event[: first.start(2)] + between.join(data.split(b"\n")) + b"".join(others) + event[last.end(1) :]
