"""One tool call in which elements name the arguments, at every depth: ``ElementCall``.

``<invoke name="f"><city>Bern</city><days><item>1</item></days></invoke>``, with a mark before every tag (MiniMax M3).

Rules
- As for all forms of calls (``call_forms``); the text of an element is an ``ArgumentText``.
- An element that begins with another one is an object; a list, if its schema says so or its members are ``item``. An
  empty element is what its schema says, else an empty text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from poolgrid.plugins.parsers.argument_types import member_schema, own_types, properties_of
from poolgrid.plugins.parsers.call_forms import Declared
from poolgrid.plugins.parsers.markers import SPACE, first_marker, held_length
from poolgrid.plugins.parsers.tagged_call import ArgumentText, CallInTags
from poolgrid.plugins.parsers.values import DEPTH_MAX, GAP_CHARS_MAX, json_of
from poolgrid.server.frontend.tool_use import NAME_CHARS_MAX

_ITEM = "item"
_INVOKED = re.compile(r"(?P<name>[A-Za-z0-9_.:-]+)\">")
_TAG = re.compile(r"[ \t\n\r]*<(?P<close>/?)(?P<name>[^<>/\s]+)>")


@dataclass(slots=True)
class _Element:
    """An element that is open."""

    name: str
    schema: Mapping[str, Any]
    is_list: bool = False
    members: set[str] = field(default_factory=set)
    count: int = 0


class ElementCall(CallInTags):
    """One call, after ``<invoke name="``. ``mark`` stands before every tag, ``end`` is the tag's name of the call."""

    def __init__(self, declared: Declared, mark: str, end: str) -> None:
        super().__init__(declared, ElementCall._read_name)
        self._mark = mark
        self._end = end
        self._open: list[_Element] = []
        """The elements around what comes next, the arguments as a whole first."""
        self._tag = ""

    def end(self) -> None:
        if self._state == ElementCall._read_tag and len(self._open) == 1 and self._open[0].count:
            begun = self._buffer.strip(SPACE)
            may_be_argument = f"{self._mark}<".startswith(begun) and begun
            self.done = self._begun and not may_be_argument and f"{self._mark}</{self._end}>".startswith(begun)
            self._certain.append("}" if self.done else "")
        self.failed = not self.done
        self._leave((f"{self._mark}</{self._tag}>",))

    def unread(self) -> str:
        if self._state == ElementCall._read_text:
            return self._gap + self._value.unread()
        return self._gap if self._state == ElementCall._begin_element else ""

    def _read_name(self) -> bool:
        match = _INVOKED.match(self._buffer)
        if match is None:
            self.failed = len(self._buffer) > NAME_CHARS_MAX or '">' in self._buffer
            return False
        if not self._named(match["name"]):
            return False
        self._buffer = self._buffer[match.end() :]
        self._gap = "{"
        self._open.append(_Element("", self._declared[self.name]))
        self._state = ElementCall._read_tag
        return True

    def _next_tag(self) -> re.Match[str] | None:
        """Return the tag that comes next; ``None`` = that needs more text, or there is none."""
        self._skip_space()
        if not self._buffer.startswith(self._mark):
            self.failed = bool(self._buffer) and not self._mark.startswith(self._buffer)
            return None
        match = _TAG.match(self._buffer, len(self._mark))
        if match is None:
            rest = self._buffer[len(self._mark) :].lstrip(SPACE)
            self.failed = len(rest) > NAME_CHARS_MAX or (bool(rest) and (rest[0] != "<" or ">" in rest))
        return match

    def _read_tag(self) -> bool:
        """Between elements: another one, or the end of the one around."""
        match = self._next_tag()
        if match is None:
            return False
        around = self._open[-1]
        if match["close"]:
            if match["name"] != (around.name or self._end):
                self.failed = True
                return False
            self._buffer = self._buffer[match.end() :]
            self._close()
            return not self.done
        name = match["name"]
        if not around.is_list and name in around.members:
            self.failed = True
            return False
        self._buffer = self._buffer[match.end() :]
        self._gap += (", " if around.count else "") + ("" if around.is_list else f"{json_of(name)}: ")
        around.count += 1
        around.members.add(name)
        self._tag = name
        self._state = ElementCall._begin_element
        return True

    def _begin_element(self) -> bool:
        """After a tag that opens: text, or elements."""
        around = self._open[-1]
        schema = member_schema(around.schema, self._tag)
        types = own_types(schema, schema)
        stripped = self._buffer.lstrip(SPACE)
        if len(self._buffer) - len(stripped) > GAP_CHARS_MAX:
            stripped = self._buffer
        elif not stripped or (self._mark.startswith(stripped) and stripped != self._mark):
            return False
        tag = _TAG.match(stripped, len(self._mark)) if stripped.startswith(self._mark) else None
        if stripped.startswith(self._mark) and tag is None and len(stripped) <= len(self._mark) + NAME_CHARS_MAX:
            return False
        opens = tag is not None and not tag["close"]
        empty = tag is not None and bool(tag["close"]) and types is not None and bool(types & {"array", "object"})
        if (opens or empty) and len(self._open) < DEPTH_MAX:
            is_list = (
                types == frozenset({"array"}) if not opens or tag is None else _is_list(schema, types, tag["name"])
            )
            self._gap += "[" if is_list else "{"
            self._open.append(_Element(self._tag, schema, is_list))
            self._state = ElementCall._read_tag
        else:
            self._value = ArgumentText(types)
            self._state = ElementCall._read_text
        return True

    def _read_text(self) -> bool:
        ends = (f"{self._mark}</{self._tag}>",)
        found = first_marker(self._buffer, ends)
        at = len(self._buffer) - held_length(self._buffer, ends) if found is None else found[0]
        self._take_value(at)
        if found is None or self.failed:
            return False
        self._pass_on(self._value.end())
        self._buffer = self._buffer[len(ends[0]) :]
        self._state = ElementCall._read_tag
        return True

    def _close(self) -> None:
        closed = self._open.pop()
        self._gap += "]" if closed.is_list else "}"
        if not self._open:
            self._certain.append(self._gap)
            self.done = True


def _is_list(schema: Mapping[str, Any], types: frozenset[str] | None, first: str) -> bool:
    if types is not None and "array" in types:
        return "object" not in types or first == _ITEM
    return first == _ITEM and _ITEM not in properties_of(schema)
