"""One tool call written in tags, an argument at a time: ``TaggedCall``.

``<function=f><parameter=x>1</parameter></function>`` (Qwen 3 Coder), or
``f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>`` (GLM 4.5).

Rules
- As for all forms of calls (``call_forms``). A call is announced when its first argument begins, or at its end.
- Values have no quotes, so the function's schema says what they are: a value that can only be a string is one, and is
  passed on as it comes; another is JSON if it is, of a type that the schema allows, and else a string. Where the schema
  says nothing, what reads as JSON is JSON, but never a string in quotes.
- ``True``, ``False`` and ``None`` are JSON's ``true``, ``false`` and ``null``: templates print Python's values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from poolgrid.frontend.parsers.call_forms import HEAD_CHARS_MAX, NAME_CHARS_MAX
from poolgrid.frontend.parsers.json_value import JsonValue
from poolgrid.frontend.parsers.markers import first_marker, held_length
from poolgrid.frontend.parsers.pieces import Kind, Piece

VALUE_CHARS_MAX = 256 * 1024
"""Longest value that is held back whole, to see what it is; strings by schema are passed on and have no bound."""

REFERENCES_MAX = 8
"""References of a schema that are followed for one argument."""

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_INTEGER = re.compile(r"-?[0-9]+")
_STRING = frozenset({"string"})


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a format."""

    opener: str
    """Before the name; empty = the name begins at once."""
    name_end: str
    """After the name; empty = the next tag ends it."""
    key_begin: str
    key_end: str
    value_begin: str
    """Empty = the value begins after ``key_end``."""
    value_end: str
    end: str
    drops_line_breaks: bool
    """Whether one line break at either end of a value belongs to the tags."""


class TaggedCall:
    """One call. ``schemas``: the parameters (JSON schema) of each function by name, as far as known."""

    __slots__ = ("_begun", "_buffer", "_key", "_name", "_raw", "_schemas", "_state", "_tags", "_types", "_value",
                 "done", "failed", "pieces")  # fmt: skip

    def __init__(self, tags: Tags, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._tags = tags
        self._schemas = schemas
        self._state: Callable[[TaggedCall], bool] = TaggedCall._open if tags.opener else TaggedCall._read_name
        """What takes from the buffer next: no bound method, which would be a circle that waits for the collector."""
        self._buffer = ""
        self._raw = ""
        """What was taken from the buffer and is in no piece."""
        self._name = ""
        self._key = ""
        self._types: frozenset[str] | None = None
        self._value = ""
        self._begun = False
        """Whether an argument was passed on."""
        self.pieces: list[Piece] = []
        self.done = False
        self.failed = False

    def feed(self, text: str, at: int) -> int:
        """Take ``text`` from ``at`` on and return where the call ended or failed, or the end of ``text``."""
        self._buffer += text[at:]
        while self._buffer and not self.done and not self.failed and self._state(self):
            pass
        if not self.done and not self.failed:
            return len(text)
        # Each state looks at every character as soon as it is there: what is left came with this text.
        # (But for what a bound cut off amid a tag that had begun before.)
        self._take(max(0, len(self._buffer) - (len(text) - at)))
        left = len(self._buffer)
        self._buffer = ""
        return len(text) - left

    def raw(self) -> str:
        """Return the text that was taken and is in no piece."""
        return self._raw + self._buffer

    # Each state takes something from the buffer and returns True, or returns False when it needs more text.

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
        if end > NAME_CHARS_MAX:
            self._fail(NAME_CHARS_MAX)
            return False
        if end == len(self._buffer):
            return False
        if match is None:
            self._fail(0)
            return False
        self._name = match[0]
        self._take(end)
        self._state = TaggedCall._end_name if self._tags.name_end else TaggedCall._next
        return True

    def _end_name(self) -> bool:
        if self._expect(self._tags.name_end) is None:
            return False
        self._state = TaggedCall._next
        return True

    def _next(self) -> bool:
        """Between arguments: the next one, or the end."""
        found = self._expect(self._tags.key_begin, self._tags.end)
        if found == self._tags.key_begin:
            self._key = ""
            self._state = TaggedCall._read_key
        elif found is not None:
            if not self._begun:
                self.pieces.append(Piece(Kind.CALL, self._name))
            self.pieces.append(Piece(Kind.ARGUMENTS, "}" if self._begun else "{}"))
            self._raw = ""
            self.done = True
        return found is not None

    def _read_key(self) -> bool:
        end = self._tags.key_end
        at = self._buffer.find(end)
        known = len(self._buffer) - held_length(self._buffer, (end,)) if at < 0 else at
        room = HEAD_CHARS_MAX - len(self._key)
        if known > room:
            self._fail(room)
            return False
        self._key += self._buffer[:known]
        self._take(known if at < 0 else at + len(end))
        if at >= 0:
            self._state = TaggedCall._begin_value
        return at >= 0

    def _begin_value(self) -> bool:
        if self._tags.value_begin and self._expect(self._tags.value_begin) is None:
            return False
        key = self._key.strip()
        self._types = types_of(self._schemas.get(self._name), key)
        if not self._begun:
            self.pieces.append(Piece(Kind.CALL, self._name))
        quote = '"' if self._types == _STRING else ""
        before = ", " if self._begun else "{"
        self.pieces.append(Piece(Kind.ARGUMENTS, f"{before}{json.dumps(key, ensure_ascii=False)}: {quote}"))
        self._begun = True
        self._raw = self._value = ""
        self._state = TaggedCall._drop_line_break if self._tags.drops_line_breaks else TaggedCall._read_value
        return True

    def _drop_line_break(self) -> bool:
        if self._buffer[0] == "\n":
            self._buffer = self._buffer[1:]
        self._state = TaggedCall._read_value
        return True

    def _read_value(self) -> bool:
        ends: tuple[str, ...] = (self._tags.value_end,)
        if self._tags.drops_line_breaks:
            ends = (f"\n{self._tags.value_end}", *ends)
        found = first_marker(self._buffer, ends)
        known = len(self._buffer) - held_length(self._buffer, ends) if found is None else found[0]
        if self._types == _STRING:
            if known:
                text = json.dumps(self._buffer[:known], ensure_ascii=False)[1:-1]
                self.pieces.append(Piece(Kind.ARGUMENTS, text))
        else:
            room = VALUE_CHARS_MAX - len(self._value)
            if known > room:
                self._raw = self._value
                self._fail(room)
                return False
            self._value += self._buffer[:known]
        if found is None:
            self._buffer = self._buffer[known:]
            self._raw = self._value
            return False
        self._buffer = self._buffer[known + len(found[1]) :]
        closing = '"' if self._types == _STRING else as_json(self._value, self._types)
        self.pieces.append(Piece(Kind.ARGUMENTS, closing))
        self._raw = ""
        self._state = TaggedCall._next
        return True

    def _skip_space(self) -> None:
        self._take(len(self._buffer) - len(self._buffer.lstrip(" \t\n\r")))

    def _expect(self, *tags: str) -> str | None:
        """Return which of ``tags`` comes next, after white space; ``None`` when that is not known yet, or none does."""
        self._skip_space()
        for tag in tags:
            if self._buffer.startswith(tag):
                self._take(len(tag))
                return tag
        if not any(tag.startswith(self._buffer) for tag in tags):
            self._fail(max(_common(self._buffer, tag) for tag in tags))
        return None

    def _take(self, length: int) -> None:
        self._raw += self._buffer[:length]
        self._buffer = self._buffer[length:]

    def _fail(self, at: int) -> None:
        self._take(at)
        self.failed = True


def _common(text: str, tag: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(text, tag, strict=False)) if a != b), min(len(text), len(tag)))


def types_of(schema: Mapping[str, Any] | None, key: str) -> frozenset[str] | None:
    """Return the JSON types that a function's schema allows for an argument; ``None`` = it does not say."""
    properties = None if schema is None else schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(found, schema or {}, REFERENCES_MAX)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or not depth:
        return None
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target: Any = root if reference.startswith("#/") else None
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        return _types(target, root, depth - 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return frozenset(_type_of(json.dumps(value)) for value in values)
    for group in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(group)
        if isinstance(parts, list):
            kinds = [_types(part, root, depth - 1) for part in parts]
            known = [each for each in kinds if each is not None]
            return frozenset().union(*known) if known and len(known) == len(kinds) else None
    return None


def _type_of(text: str) -> str:
    """Return the type of a JSON value's text."""
    types = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    return types.get(text[0]) or ("integer" if _INTEGER.fullmatch(text) else "number")


def as_json(text: str, types: frozenset[str] | None) -> str:
    """Return the JSON of an argument's text, given the types that it may have."""
    stripped = text.strip()
    written = _PYTHON_NAMES.get(stripped, stripped)
    value = JsonValue()
    if written and value.feed(written) == len(written):
        value.end()
        if value.done:
            kind = _type_of(written)
            # Text that may be a string is not taken out of its quotes.
            fits = types is None or kind in types or (kind == "integer" and "number" in types)
            if fits and kind != "string":
                return written
    return json.dumps(text, ensure_ascii=False)
