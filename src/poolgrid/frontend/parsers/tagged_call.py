"""One tool call written in tags, an argument at a time: ``TaggedCall``.

``<function=f><parameter=x>1</parameter></function>`` (Qwen 3 Coder), or
``f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>`` (GLM 4.5).

Rules
- As for all forms of calls (``call_forms``).
- Values have no quotes, so the function's schema decides what they are: a value that can only be a string is one;
  another is JSON if it is, of a type that the schema allows, and else a string. Where the schema has no type, what
  reads as JSON is JSON, but never a string in quotes.
- Where the schema excludes strings, values may also be as Python prints them: templates show earlier calls so.
- A value ends at its closing tag only if another argument or the end of the call follows: what is written about tags,
  or in a language with tags, is part of the value. Where the closing tag is missing, a value ends before the next
  argument of the schema, or before the end of the call if nothing but another call follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poolgrid.frontend.parsers.call_forms import HEAD_CHARS_MAX, NAME_CHARS_MAX, CallForm, declared_name
from poolgrid.frontend.parsers.pieces import first_marker, held_length, json_of, strict_json

GAP_CHARS_MAX = 64
"""Most white space between a tag that ends a value and the next one: it is looked at again per character."""

REFERENCES_MAX = 8
"""References of a schema that are followed for one argument."""

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_SPACE = " \t\n\r"
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
    after: tuple[str, ...] = ()
    """Tags around the call that may follow its end."""
    openers: tuple[str, ...] = ()
    """Tags that begin another call."""

    @property
    def after_call(self) -> tuple[str, ...]:
        """Return all tags that may follow the end of a call."""
        return self.after + self.openers


class TaggedCall(CallForm):
    """One call. ``schemas``: the parameters (JSON schema) of each function that there is, by name."""

    def __init__(self, tags: Tags, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._tags = tags
        self._marks = (tags.value_end, tags.key_begin, tags.end, *tags.after)
        """The tags that may end a value: its own end, or others where that is missing."""
        self._schemas = schemas
        self._schema: Mapping[str, Any] = {}
        self._state: Callable[[TaggedCall], bool] = TaggedCall._open if tags.opener else TaggedCall._read_name
        """What takes from the buffer next: no bound method, which would be a circle that waits for the collector."""
        self._buffer = ""
        self._key = ""
        self._value: list[str] = []
        self._given: dict[str, str] = {}
        """The arguments so far, as JSON."""

    def feed(self, text: str) -> None:
        self._buffer += text
        while self._buffer and not self.done and not self.failed and self._state(self):
            pass
        self.left = self._buffer

    def end(self) -> None:
        """Become ``done`` or ``failed``: no text follows. The last argument must have ended."""
        if self._state == TaggedCall._read_value:
            self._end_value_at_the_end()
        if not self.failed and self._state == TaggedCall._next and not self._buffer.strip(_SPACE) and self._given:
            self._done()
        else:
            self.failed = True
        self.left = ""

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
        if end <= NAME_CHARS_MAX and end == len(self._buffer):
            return False
        name = None if match is None or end > NAME_CHARS_MAX else declared_name(match[0], self._schemas)
        if name is None:
            self.failed = True
            return False
        self.name = name
        self._schema = self._schemas[name]
        self._buffer = self._buffer[end:]
        self._state = TaggedCall._end_name if self._tags.name_end else TaggedCall._next
        return True

    def _end_name(self) -> bool:
        if self._expect(self._tags.name_end) is None:
            return False
        self._state = TaggedCall._next
        return True

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
        self.arguments = "{" + ", ".join(f"{json_of(key)}: {value}" for key, value in self._given.items()) + "}"
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
        return True

    def _begin_value(self) -> bool:
        if self._tags.value_begin and self._expect(self._tags.value_begin) is None:
            return False
        self._key = self._key.strip()
        self._value = []
        self._state = TaggedCall._read_value
        return True

    def _read_value(self) -> bool:
        """The value: up to a tag that something follows which may; a tag that is part of the value is not its end."""
        marks = self._marks
        found = first_marker(self._buffer, marks)
        if found is None:
            known = len(self._buffer) - held_length(self._buffer, marks)
            self._value.append(self._buffer[:known])
            self._buffer = self._buffer[known:]
            return False
        at, mark = found
        rest = self._buffer[at + len(mark) :]
        ends = self._ends_value(mark, rest)
        if ends is None:
            self._value.append(self._buffer[:at])
            self._buffer = self._buffer[at:]
            return False
        if ends:
            self._value.append(self._buffer[:at])
            self._end_value()
            self._buffer = rest if mark == self._tags.value_end else mark + rest
        else:
            self._value.append(self._buffer[: at + len(mark)])
            self._buffer = rest
        return True

    def _ends_value(self, mark: str, rest: str) -> bool | None:
        """Return whether a tag ends the value, given the text after it; ``None`` = that needs more text."""
        tags = self._tags
        if mark == tags.value_end:
            return _followed(rest, (tags.key_begin, tags.end, *tags.after))
        if mark != tags.key_begin:
            return _followed(rest, tags.after_call if mark == tags.end else tags.openers)
        # The value's end is missing, if this begins an argument of the function.
        key, end, _ = rest[: HEAD_CHARS_MAX + len(tags.key_end)].partition(tags.key_end)
        if not end:
            return None if len(rest) <= HEAD_CHARS_MAX else False
        properties = self._schema.get("properties")
        return isinstance(properties, Mapping) and key.strip() in properties and key.strip() not in self._given

    def _end_value_at_the_end(self) -> None:
        for mark in self._marks:
            if self._buffer.startswith(mark) and mark != self._tags.key_begin:
                rest = self._buffer[len(mark) :]
                if not rest.strip(_SPACE):
                    self._end_value()
                    self._buffer = ""
                    return

    def _end_value(self) -> None:
        value = "".join(self._value)
        if self._tags.drops_line_breaks:
            value = value.removeprefix("\n").removesuffix("\n")
        self.failed = self._key in self._given
        self._given[self._key] = as_json(value, types_of(self._schema, self._key))
        self._value = []
        self._state = TaggedCall._next

    def _skip_space(self) -> None:
        self._buffer = self._buffer.lstrip(_SPACE)

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
    stripped = text.lstrip(_SPACE)
    if len(text) - len(stripped) > GAP_CHARS_MAX:
        return False
    if stripped.startswith(tuple(tags)):
        return True
    return None if any(tag.startswith(stripped) for tag in tags) else False


def types_of(schema: Mapping[str, Any] | None, key: str) -> frozenset[str] | None:
    """Return the JSON types that a function's schema allows for an argument; ``None`` = it does not say."""
    properties = None if schema is None else schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(found, schema or {}, REFERENCES_MAX)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or not depth:
        return None
    found = _own_types(schema, root, depth)
    return found | {"null"} if found is not None and schema.get("nullable") is True else found


def _own_types(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
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
    if types != _STRING:
        stripped = text.strip()
        never_text = types is not None and "string" not in types
        written = _PYTHON_NAMES.get(stripped.capitalize() if never_text else stripped, stripped)
        value = strict_json(written, python=never_text)
        found = None if value is None else _fitting(value, types)
        if found is not None:
            return found
    return json_of(text)


def _fitting(written: str, types: frozenset[str] | None) -> str | None:
    """Return a JSON value of a type that is allowed, from one that was written; ``None`` = it is text."""
    kind = _type_of(written)
    # Text that may be a string is not taken out of its quotes.
    if kind == "string":
        inner = None if types is None or "string" in types else json.loads(written).strip()
        return None if not inner or inner[0] in "'\"" else _if_no_text(as_json(inner, types))
    if types is None or kind in types or (kind == "integer" and "number" in types):
        return written
    if kind == "number" and "integer" in types:
        number = float(written)
        return str(int(number)) if number.is_integer() and abs(number) <= _EXACT_MAX else None
    return written if kind == "null" and "string" not in types else None


def _if_no_text(value: str) -> str | None:
    return None if value.startswith('"') else value


_EXACT_MAX = 2**53
"""Integers up to this are exact as a floating-point number."""


def fitted(arguments: str, schema: Mapping[str, Any] | None) -> str:
    """Return the arguments (a JSON object) of a call; text where the schema allows none becomes what it stands for.

    Nothing is changed, not even white space, where all types are right.
    """
    if not schema or not isinstance(schema.get("properties"), Mapping):
        return arguments
    values = json.loads(arguments)
    changed = False
    for key, value in values.items():
        if not isinstance(value, str | float):
            continue
        types = types_of(schema, key)
        if types is None or ("string" if isinstance(value, str) else "number") in types:
            continue
        found = as_json(value, types) if isinstance(value, str) else _fitting(json.dumps(value), types)
        if found is not None and not found.startswith('"'):
            values[key] = json.loads(found)
            changed = True
    return json_of(values) if changed else arguments
