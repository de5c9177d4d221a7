"""One tool call written in tags, an argument at a time: ``TaggedCall``.

``<function=f><parameter=x>1</parameter></function>`` (Qwen 3 Coder), ``f<arg_key>x</arg_key><arg_value>1</arg_value>
</tool_call>`` (GLM 4.5), ``<invoke name="f"><parameter name="x">1</parameter></invoke>`` (MiniMax M2).

Rules
- As for all forms of calls (``call_forms``).
- Values have no quotes, so the function's schema decides what they are (``argument_types``), or an attribute of the tag
  where the format has one. Text, and lists and objects where the schema excludes text, are passed on as they come;
  what may be either is held back until its end.
- A value ends at its closing tag only if another argument or the end of the call follows: what is written about tags,
  or in a language with tags, is part of the value. Where the closing tag is missing, a value ends before the next
  argument of the schema, or before the end of the call if nothing but another call follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from poolgrid.plugins.parsers.argument_types import STRING, as_json, properties_of, types_of
from poolgrid.plugins.parsers.call_forms import HEAD_CHARS_MAX, Declared, StatefulCall
from poolgrid.plugins.parsers.formats import Tags
from poolgrid.plugins.parsers.markers import SPACE, first_marker, held_length
from poolgrid.plugins.parsers.values import GAP_CHARS_MAX, HELD_VALUE_CHARS_MAX, NAMES, ValueReader, json_of
from poolgrid.server.frontend.tool_use import NAME_CHARS_MAX

UNDECIDED_CHARS_MAX = 64
"""Characters within which an argument shows whether it is text, a list or an object."""

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NUMBER_BEGUN = re.compile(r"[-+0-9.eE]+\s*")
_CONTAINERS = {"{": "object", "[": "array"}


class ArgumentText:
    """The text of one argument on its way to JSON. ``types``: the JSON types that it may have; ``None`` = any."""

    def __init__(self, types: frozenset[str] | None, drops_line_breaks: bool = False) -> None:
        self._types = types
        self._drops_line_breaks = drops_line_breaks
        self._is_text = False
        """Whether it is known to be a string."""
        self._reader: ValueReader | None = None
        self._passed = False
        """Whether anything of it was passed on."""
        self.left = ""
        """Text after a list or an object that has ended: white space, else it ``failed`` there."""
        self._held: list[str] = []
        self._held_chars = 0
        self._beginning = ""
        self._begun = False
        self.failed = False

    def feed(self, text: str) -> str:
        """Take new text and return the JSON of it that is certain."""
        if not text:
            return ""
        if not self._begun and self._drops_line_breaks:
            self._drops_line_breaks = text.startswith("\n")  # values have one at both ends, or at none
            text = text.removeprefix("\n")
        self._begun = True
        if self._is_text:
            return self._as_text(text)
        self._held.append(text)
        self._held_chars += len(text)
        if self._reader is not None:
            return self._read(text)
        if len(self._beginning) < UNDECIDED_CHARS_MAX:
            self._beginning += text[: UNDECIDED_CHARS_MAX - len(self._beginning)]
            begun = self._beginning.lstrip()
            if begun and self._can_only_be_text(begun):
                return self._begin_text()
            if begun and self._never_text and _CONTAINERS.get(begun[0]) in (self._types or ()):
                self._reader = ValueReader()
                return self._read("".join(self._held).lstrip())
        return self._begin_text() if self._held_chars > HELD_VALUE_CHARS_MAX else ""

    def end(self) -> str:
        """Return the rest of the JSON; the value has ended."""
        if self._reader is not None and self._passed:
            return "" if self._reader.done else self._reader.closing()
        text = "".join(self._held)
        self._held.clear()
        if self._drops_line_breaks:
            text = text.removesuffix("\n")
        return json_of(text)[1:] if self._is_text else as_json(text, self._types)

    def unread(self) -> str:
        """Return what was taken and never will be passed on."""
        if self._reader is not None and self._passed:
            return self._reader.unread() + ("" if self._reader.done or self.failed else self._reader.left)
        held = "".join(self._held)
        return json_of(held)[1:-1] if self._is_text else held

    @property
    def _never_text(self) -> bool:
        return self._types is not None and "string" not in self._types

    def _can_only_be_text(self, begun: str) -> bool:
        if self._types == STRING:
            return True
        if self._never_text or begun[0] in _CONTAINERS or _NUMBER_BEGUN.fullmatch(begun):
            return False
        word = begun.rstrip()
        return not any(name == word or (name.startswith(word) and word == begun) for name in NAMES)

    def _begin_text(self) -> str:
        self._is_text = True
        text = "".join(self._held)
        self._held.clear()
        return '"' + self._as_text(text)

    def _as_text(self, text: str) -> str:
        text = "".join(self._held) + text
        self._held.clear()
        if self._drops_line_breaks and text.endswith("\n"):
            text = text[:-1]
            self._held.append("\n")
        return json_of(text)[1:-1]

    def _read(self, text: str) -> str:
        reader = self._reader
        assert reader is not None, "made when the value began"
        if reader.done:
            self.left += text
        elif not reader.failed:
            reader.feed(text)
            self.left = reader.left if reader.done or reader.failed else ""
        found = reader.take()
        if found:
            self._passed = True
            self._held.clear()
        self.failed = self._passed and (reader.failed or bool(self.left.strip()))
        return found


class CallInTags(StatefulCall):
    """A call whose arguments stand between tags, as ``ArgumentText``."""

    def __init__(self, declared: Declared, state: Callable[[Any], bool]) -> None:
        super().__init__(declared, state)
        self._value = ArgumentText(None)
        self._gap = ""
        """JSON that waits for the value after it."""
        self._begun = False
        """Whether any of the arguments was certain."""

    def _take_value(self, size: int) -> None:
        self._pass_on(self._value.feed(self._buffer[:size]))
        self._buffer = self._buffer[size:]
        if self._value.failed:
            self._buffer = self._value.left + self._buffer
            self.failed = True

    def _pass_on(self, text: str) -> None:
        if text:
            self._certain += (self._gap, text)
            self._gap = ""
            self._begun = True

    def _leave(self, marks: Sequence[str]) -> None:
        """Set ``left`` at the end: of a call that its client knows of, a piece of a tag there is left out."""
        piece = self._buffer.strip(SPACE)
        self.left = "" if self._begun and any(mark.startswith(piece) for mark in marks) else self._buffer


class TaggedCall(CallInTags):
    """One call."""

    def __init__(self, declared: Declared, tags: Tags, is_open: bool = False) -> None:
        """``is_open``: the tag before the name was read already."""
        super().__init__(declared, TaggedCall._read_name if is_open or not tags.opener else TaggedCall._open)
        self._tags = tags
        self._marks = (tags.value_end, tags.key_begin, tags.end, *tags.after)
        """The tags that may end a value: its own end, or others where that is missing."""
        self._schema: Mapping[str, Any] = {}
        self._key = ""
        self._given: set[str] = set()

    def end(self) -> None:
        """Become ``done`` or ``failed``: no text follows. The last argument must have ended."""
        if self._state == TaggedCall._read_value:
            self._end_value_at_the_end()
        if self._state == TaggedCall._next and self._is_end_begun():
            self._buffer = ""
        ended = self._state == TaggedCall._next and not self._buffer.strip(SPACE)
        if not self.failed and ended and self._given:
            self._buffer = ""
            self._done()
        else:
            self.failed = True
        self._leave(self._marks)

    def unread(self) -> str:
        if self._state == TaggedCall._read_value:
            return self._gap + self._value.unread()
        return (
            self._tags.key_begin + self._key if self._state in (TaggedCall._read_key, TaggedCall._begin_value) else ""
        )

    def _open(self) -> bool:
        if self._expect(self._tags.opener) is None:
            return False
        self._state = TaggedCall._read_name
        return True

    def _read_name(self) -> bool:
        """The name: up to its own end, or to white space or the next tag."""
        self._skip_space()
        match = _NAME.match(self._buffer)
        end = 0 if match is None else match.end()
        if end <= NAME_CHARS_MAX and end == len(self._buffer):
            return False
        if match is None or end > NAME_CHARS_MAX or not self._named(match[0]):
            self.failed = True
            return False
        self._schema = self._declared[self.name]
        self._buffer = self._buffer[end:]
        self._state = TaggedCall._end_name if self._tags.name_end else TaggedCall._next
        return True

    def _end_name(self) -> bool:
        if self._expect(self._tags.name_end) is None:
            return False
        self._state = TaggedCall._skip_attributes if self._tags.head_end else TaggedCall._next
        return True

    def _skip_attributes(self) -> bool:
        if self._attributes(self._tags.head_end) is None:
            return False
        self._state = TaggedCall._next
        return True

    def _attributes(self, end: str) -> str | None:
        """Return the text before ``end``, which is taken with it; ``None`` = that needs more text, or is too long."""
        text, found, rest = self._buffer[: HEAD_CHARS_MAX + len(end)].partition(end)
        if not found:
            self.failed = len(self._buffer) > HEAD_CHARS_MAX + len(end)
            return None
        self._buffer = rest + self._buffer[HEAD_CHARS_MAX + len(end) :]
        return text

    def _next(self) -> bool:
        tags = self._tags
        found = self._expect(tags.key_begin, tags.end, *tags.after)
        if found == tags.key_begin:
            self._key = ""
            self._state = TaggedCall._read_key
        elif found is not None:
            if found != tags.end:
                self._buffer = found + self._buffer
            self._done()
        return found is not None

    def _done(self) -> None:
        self._certain.append("}" if self._given else "{}")
        self.done = True

    def _read_key(self) -> bool:
        """The key: up to its end, or to the value where its end is missing."""
        begin = self._tags.value_begin
        ends = (self._tags.key_end, begin) if begin else (self._tags.key_end,)
        found = first_marker(self._buffer, ends)
        known = len(self._buffer) - held_length(self._buffer, ends) if found is None else found[0]
        if len(self._key) + known > HEAD_CHARS_MAX:
            self._buffer = self._buffer[HEAD_CHARS_MAX - len(self._key) :]
            self.failed = True
            return False
        self._key += self._buffer[:known]
        self._buffer = self._buffer[known:]
        if found is None:
            return False
        if found[1] != begin:
            self._buffer = self._buffer[len(found[1]) :]
        self._state = TaggedCall._begin_value
        self.failed = self._key.strip() in self._given
        return not self.failed

    def _begin_value(self) -> bool:
        tags = self._tags
        attributes = ""
        if tags.attributes:
            found = self._attributes(tags.value_begin)
            if found is None:
                return False
            attributes = found
        elif tags.value_begin and self._expect(tags.value_begin) is None:
            return False
        self._key = self._key.strip()
        types = types_of(self._schema, self._key)
        if tags.text_attribute and attributes.strip():
            # The model says which it is; text that is no JSON stays text.
            types = STRING if tags.text_attribute in attributes else None if types is None else types - STRING or None
        self._value = ArgumentText(types, tags.drops_line_breaks)
        self._gap = ("{" if not self._given else ", ") + json_of(self._key) + ": "
        self._state = TaggedCall._read_value
        return True

    def _read_value(self) -> bool:
        """The value: up to a tag that something follows which may; a tag that is part of the value is not its end."""
        marks = self._marks
        found = first_marker(self._buffer, marks)
        if found is None:
            known = len(self._buffer) - held_length(self._buffer, marks)
            self._take_value(known)
            return False
        at, mark = found
        rest = self._buffer[at + len(mark) :]
        ends = self._ends_value(mark, rest)
        if ends is None:
            self._take_value(at)
            return False
        if ends:
            self._take_value(at)
            if not self.failed:
                self._end_value()
                self._buffer = rest if mark == self._tags.value_end else mark + rest
        else:
            self._take_value(at + len(mark))
        return not self.failed

    def _ends_value(self, mark: str, rest: str) -> bool | None:
        """Return whether a tag ends the value, given the text after it; ``None`` = that needs more text."""
        tags = self._tags
        if mark == tags.value_end:
            return _followed(rest, (tags.key_begin, tags.end, *tags.after))
        if mark != tags.key_begin:
            return _followed(rest, (*tags.after, *tags.openers) if mark == tags.end else tags.openers)
        # The value's end is missing, if this begins an argument of the function.
        key, end, _ = rest[: HEAD_CHARS_MAX + len(tags.key_end)].partition(tags.key_end)
        if not end:
            return None if len(rest) <= HEAD_CHARS_MAX else False
        given = (*self._given, self._key)
        return key.strip() in properties_of(self._schema) and key.strip() not in given

    def _is_end_begun(self) -> bool:
        """Return whether what is left is the beginning of the end, and of no further argument."""
        begun = self._buffer.strip(SPACE)
        ends = (self._tags.end, *self._tags.after)
        return any(tag.startswith(begun) for tag in ends) and not (begun and self._tags.key_begin.startswith(begun))

    def _end_value_at_the_end(self) -> None:
        for mark in self._marks:
            if self._buffer.startswith(mark) and mark != self._tags.key_begin:
                rest = self._buffer[len(mark) :]
                if _followed(rest, (self._tags.key_begin, self._tags.end, *self._tags.after)) is not False:
                    self._end_value()
                    self._buffer = rest
                    return

    def _end_value(self) -> None:
        self._pass_on(self._value.end())
        self._given.add(self._key)
        self._state = TaggedCall._next

    def _expect(self, *tags: str) -> str | None:
        """Return which of ``tags`` comes next, after white space; ``None`` when that is not known yet, or none does."""
        self._skip_space()
        for tag in tags:
            if self._buffer.startswith(tag):
                self._buffer = self._buffer[len(tag) :]
                return tag
        if self._buffer and not any(tag.startswith(self._buffer) for tag in tags):
            self.failed = True
        return None


def _followed(text: str, tags: Sequence[str]) -> bool | None:
    """Return whether ``text`` is white space and one of ``tags``; ``None`` = that needs more text."""
    stripped = text.lstrip(SPACE)
    if len(text) - len(stripped) > GAP_CHARS_MAX:
        return False
    if stripped.startswith(tuple(tags)):
        return True
    return None if any(tag.startswith(stripped) for tag in tags) else False
