"""Harmony, the format of gpt-oss: messages on channels.

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{…}<|call|>`` and ``<|start|>assistant<|channel|>final<|message|>…<|return|>``.

Rules
- ``analysis`` is reasoning; ``final`` and ``commentary`` without a recipient are content; a message to ``functions.f``
  is a call of ``f`` whose body is its arguments. A message to anything else is shown as its channel says.
- A call is passed on when it is complete. Where the request declares no such function, or the body is no JSON object,
  the message is content, with its header.
- Messages of one kind are joined by a line break.
- Without the markers the text is content; so is a header that no message follows.

The grammar is read here as text and not by the ``openai-harmony`` package, whose parser takes token ids of its own
vocabulary, fetches that from the network, and raises on output that breaks the format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from poolgrid.frontend.parsers.call_forms import CALL_CHARS_MAX, declared_name
from poolgrid.frontend.parsers.pieces import (
    AnswerPiece,
    PieceKind,
    StatefulParser,
    first_marker,
    held_length,
    strict_json,
)
from poolgrid.frontend.parsers.tagged_call import fitted

MARKERS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")

_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
"""Markers that end a message; the last two begin the next one as well, when a model forgets ``<|end|>``."""

_BEGINNINGS = ("<|channel|>", "<|start|>", "<|message|>", "to=")

HEADER_CHARS_MAX = 1024
"""Longest header: a role, a channel, a recipient and a content type."""

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


class Harmony(StatefulParser):
    """One answer. Without ``reasoning`` its analysis is content.

    ``declared``: the functions that calls may be of, with the schemas of their parameters; ``None`` = a message to a
    function is shown as its channel says.
    """

    def __init__(self, *, reasoning: bool = True, declared: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(Harmony._start)
        self._show_reasoning = reasoning
        self._declared = declared
        self._call = ""
        """The function that the message calls; empty = it is no call."""
        self._call_header = ""
        self._call_text: list[str] = []
        self._call_chars = 0
        self._kind = PieceKind.CONTENT
        self._empty = True
        """Whether the message has no text so far."""
        self._seen: set[PieceKind] = set()

    def finish(self) -> list[AnswerPiece]:
        rest, self._buffer = self._buffer, ""
        if self._state == Harmony._body:
            self._show(rest)
            self._end_message()
        elif rest.strip():
            self._out.append(AnswerPiece(PieceKind.CONTENT, rest))
        return self._taken()

    def _start(self) -> bool:
        """The prompt ended with ``<|start|>assistant``: a header continues here, or this is no harmony."""
        stripped = self._buffer.lstrip()
        if not stripped:
            return False
        if stripped.startswith(_BEGINNINGS):
            self._state = Harmony._header
        elif any(beginning.startswith(stripped) for beginning in _BEGINNINGS):
            return False
        else:
            self._begin_message(PieceKind.CONTENT)
        return True

    def _header(self) -> bool:
        found = first_marker(self._buffer, ("<|message|>", "<|end|>", "<|return|>", "<|call|>"))
        if found is None:
            if len(self._buffer) <= HEADER_CHARS_MAX + len("<|message|>"):
                return False
            header, marker = self._buffer, ""
        else:
            header, marker = self._buffer[: found[0]], found[1]
        if marker != "<|message|>" or len(header) > HEADER_CHARS_MAX:
            end = min(len(header), HEADER_CHARS_MAX)
            self._out.append(AnswerPiece(PieceKind.CONTENT, self._buffer[:end]))
            self._buffer = self._buffer[end:]
            self._begin_message(PieceKind.CONTENT)
            return True
        self._buffer = self._buffer[len(header) + len(marker) :]
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        name = None
        if recipient is not None and self._declared is not None:
            name = declared_name(recipient[1], self._declared)
            if name is None and recipient[1].startswith(_FUNCTIONS):
                self._begin_message(PieceKind.CONTENT)
                self._show(header + marker)
                return True
        if name is not None:
            self._call, self._call_header = name, header + marker
            self._call_chars = 0
            self._begin_message(PieceKind.ARGUMENTS)
        elif channel is not None and channel[1] == "analysis" and self._show_reasoning:
            self._begin_message(PieceKind.REASONING)
        else:
            self._begin_message(PieceKind.CONTENT)
        return True

    def _body(self) -> bool:
        found = first_marker(self._buffer, _ENDS)
        if found is None:
            end = len(self._buffer) - held_length(self._buffer, _ENDS)
            self._show(self._buffer[:end])
            self._buffer = self._buffer[end:]
            return False
        at, marker = found
        self._show(self._buffer[:at])
        self._end_message()
        if marker == "<|channel|>":
            self._buffer = self._buffer[at:]
            self._state = Harmony._header
        else:
            self._buffer = self._buffer[at + len(marker) :]
            self._state = Harmony._header if marker == "<|start|>" else Harmony._between
        return True

    def _between(self) -> bool:
        stripped = self._buffer.lstrip()
        for marker in ("<|start|>", "<|channel|>"):
            if stripped.startswith(marker):
                self._buffer = stripped.removeprefix("<|start|>")
                self._state = Harmony._header
                return bool(self._buffer)
            if marker.startswith(stripped):
                return False
        self._begin_message(PieceKind.CONTENT)
        return True

    def _begin_message(self, kind: PieceKind) -> None:
        self._kind = kind
        self._empty = True
        self._state = Harmony._body

    def _show(self, text: str) -> None:
        if not text:
            return
        if self._kind is PieceKind.ARGUMENTS:
            room = CALL_CHARS_MAX - self._call_chars
            self._call_text.append(text[:room])
            self._call_chars += len(text)
            if len(text) > room:
                self._no_call()
                self._show(text[room:])
            return
        if self._empty and self._kind in self._seen:
            text = "\n" + text
        self._empty = False
        self._seen.add(self._kind)
        self._out.append(AnswerPiece(self._kind, text))

    def _end_message(self) -> None:
        if self._kind is not PieceKind.ARGUMENTS:
            return
        text = "".join(self._call_text).strip() or "{}"
        found = strict_json(text) if text.startswith("{") else None
        if found is not None:
            assert self._declared is not None, "there is a call"
            arguments = fitted(found, self._declared[self._call])
            self._out += [AnswerPiece(PieceKind.CALL, self._call), AnswerPiece(PieceKind.ARGUMENTS, arguments)]
            self._call_text.clear()
            self._kind = PieceKind.CONTENT
        else:
            self._no_call()

    def _no_call(self) -> None:
        text = self._call_header + "".join(self._call_text)
        self._call_text.clear()
        self._kind = PieceKind.CONTENT
        self._show(text)
