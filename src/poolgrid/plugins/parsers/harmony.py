"""Harmony, the format of gpt-oss: messages on channels.

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{…}<|call|>`` and ``<|start|>assistant<|channel|>final<|message|>…<|return|>``.

Rules
- ``analysis`` is reasoning; ``final`` and ``commentary`` without a recipient are content; a message to ``functions.f``
  is a call of ``f`` whose body is its arguments. A message to anything else is shown as its channel says.
- A call begins once its function is known, which the request must declare, and a part of its arguments is certain; they
  follow as they come. Before that the message is content, with its header, where the body is no JSON object. A body
  that stops being one later follows as the model wrote it.
- Messages of one kind are joined by a line break.
- Without the markers the text is content; so is a header that no message follows.

The grammar is read here as text and not by the ``openai-harmony`` package, whose parser takes token ids of its own
vocabulary, fetches that from the network, and raises on output that breaks the format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from poolgrid.plugins.parsers.call_forms import GivenCall, declared_name
from poolgrid.plugins.parsers.markers import StatefulParser, first_marker, held_length
from poolgrid.server.frontend.answer_pieces import AnswerPiece, PieceKind

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
        self._call: GivenCall | None = None
        """The call that the message makes, until it has ended."""
        self._call_begun = False
        """Whether the client knows of the call."""
        self._body_begun = False
        self._broke_off = False
        """Whether the arguments stopped being JSON: the rest of the message is passed on as it is."""
        self._call_text: list[str] = []
        """The header and the body of a call that has not begun."""
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
            assert self._declared is not None, "there is a function"
            self._call = GivenCall(self._declared, name)
            self._call_begun = self._body_begun = self._broke_off = False
            self._call_text = [header + marker]
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
            self._argue(text)
            return
        if self._empty and self._kind in self._seen:
            text = "\n" + text
        self._empty = False
        self._seen.add(self._kind)
        self._out.append(AnswerPiece(self._kind, text))

    def _argue(self, text: str) -> None:
        """Take text of the body of a call."""
        call = self._call
        if call is None:
            text = text if self._broke_off else text.lstrip()
            self._broke_off = self._broke_off or bool(text)
            self._out.append(AnswerPiece(PieceKind.ARGUMENTS, text))
            return
        if not self._call_begun:
            self._call_text.append(text)
        if not self._body_begun:
            text = text.lstrip()
            if not text:
                return
            self._body_begun = True
        call.feed(text)
        self._take_arguments(call)
        if call.failed:
            self._broken(call)
        elif call.done:
            self._call = None
            self._argue(call.left)

    def _take_arguments(self, call: GivenCall) -> None:
        arguments = call.take()
        if arguments and not self._call_begun:
            self._call_begun = True
            self._call_text.clear()
            self._out.append(AnswerPiece(PieceKind.CALL, call.name))
        self._out.append(AnswerPiece(PieceKind.ARGUMENTS, arguments))

    def _broken(self, call: GivenCall) -> None:
        """Pass on what is no JSON: as the rest of a call that has begun, else as content."""
        self._call = None
        self._broke_off = True
        if self._call_begun:
            self._out.append(AnswerPiece(PieceKind.ARGUMENTS, call.unread() + call.left))
        else:
            text = "".join(self._call_text)
            self._call_text.clear()
            self._kind = PieceKind.CONTENT
            self._show(text)

    def _end_message(self) -> None:
        call = self._call
        if call is None or self._kind is not PieceKind.ARGUMENTS:
            return
        if not self._call_begun and not self._body_begun:
            call.feed("{}")
            self._take_arguments(call)
            self._call = None
            return
        call.end()
        self._take_arguments(call)
        self._broken(call)
