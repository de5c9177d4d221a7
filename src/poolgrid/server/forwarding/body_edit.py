"""Values cut into the bytes of a client's JSON object: order, spacing, numbers and escapes of all else stay.

``top_level`` reads a body once and does not look into its values. A member that the object lacks is inserted right
after the opening brace. A member that it has is replaced in place, in each occurrence if the key is repeated: Python's
JSON parser, which the engines use, takes the last one, and no parser must see a value that was to be replaced.

The common reader is msgspec. What Python's parser takes and msgspec refuses (``NaN``, ``Infinity``, half of a surrogate
pair) is read by Python's, because the engines take it too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Final, NamedTuple

import msgspec

MAX_MEMBERS: Final = 1024
"""Members of one object. Engines know about 150 fields of a request. Each member costs 1 us where one is replaced, so a
body of a megabyte of tiny members would hold the event loop for 0.2 s. More are refused."""

MAX_SLOW_BYTES: Final = 4 << 20
"""Bytes of a body that Python's parser reads, at 5 ms a megabyte on the event loop. Only repeated keys, ``NaN`` and the
like need it. Longer bodies of that kind are refused."""

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

_OPENING = re.compile(rb"[ \t\n\r]*+\{[ \t\n\r]*+")
_KEY = re.compile(rb'("(?:[^"\\]|\\.)*+")[ \t\n\r]*+:[ \t\n\r]*+', re.DOTALL)
_AFTER_VALUE = re.compile(rb"[ \t\n\r]*+(,[ \t\n\r]*+|\})")
_AFTER_ELEMENT = re.compile(rb"[ \t\n\r]*+(,[ \t\n\r]*+|\])")
_SPACE = re.compile(rb"[ \t\n\r]*+")

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_key = msgspec.json.Decoder(str).decode
_value_end = json.JSONDecoder().raw_decode


class BodyMember(NamedTuple):
    """Where a member of an object lies: its key, its value, and the comma behind it."""

    name: str
    key_start: int
    value_start: int
    value_end: int
    comma_end: int
    """Behind the comma, or ``value_end`` of the last member."""


class Fields:
    """The members of a JSON object in its own bytes."""

    def __init__(
        self, body: bytes, opening: int, values: dict[str, msgspec.Raw], members: list[BodyMember] | None
    ) -> None:
        self.body = body
        self.opening = opening
        """The offset behind the opening brace."""
        self.values = values
        """Raw JSON by decoded key, the last of repeated ones; ``msgspec.json.decode`` takes it."""
        self._read = members

    @cached_property
    def members(self) -> list[BodyMember]:
        """In the body's order, repeated keys included.

        Raises:
            ValueError: There are too many, or keys are repeated in a body beyond ``MAX_SLOW_BYTES``.
        """
        if self._read is not None:
            return self._read
        try:
            return _walk(self.body, self.opening, self._end_of_known_value)
        except _OutOfStepError:
            return _members_by_python(self.body, self.opening, "the body repeats keys")

    def value(self, name: str) -> bytes | None:
        """The raw JSON of a top-level value, without the space around it."""
        found = self.values.get(name)
        return None if found is None else bytes(found)

    def _end_of_known_value(self, name: str, start: int) -> int:
        """The value of the last member of that name is compared whole: a different one is of a repeated key."""
        value = bytes(self.values[name])
        if not self.body.startswith(value, start):
            raise _OutOfStepError(start)
        return start + len(value)


class _OutOfStepError(Exception):
    """No value ends at this offset: a key is repeated with another value, or the body is no JSON."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at


def top_level(body: bytes) -> Fields:
    """Find the top-level members of a client's body.

    Raises:
        ValueError: It is no JSON object, is nested too deep, or has too many members; says where.
    """
    start = len(BYTE_ORDER_MARK) if body.startswith(BYTE_ORDER_MARK) else 0
    found = _OPENING.match(body, start)
    if found is None:
        at = _SPACE.match(body, start).end()  # type: ignore[union-attr]  # it matches nothing too
        raise ValueError(f"the body is not a JSON object: {_byte(body, at)}, allowed is '{{'")
    opening = body.index(b"{", start) + 1
    members = None
    try:
        values = _decode_object(memoryview(body)[start:] if start else body)
    except RecursionError:
        raise ValueError("the body is not JSON that can be read: it is nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        members = _members_by_python(body, opening, f"the body is not JSON: {error}")
        values = {member.name: msgspec.Raw(body[member.value_start : member.value_end]) for member in members}
    if len(values) > MAX_MEMBERS:
        raise ValueError(f"the body has {len(values)} members at its top level, allowed are {MAX_MEMBERS}")
    return Fields(body, opening, values, members)


def edit(
    body: bytes | Fields,
    values: Mapping[str, bytes] | None = None,
    nested: Mapping[str, Mapping[str, bytes]] | None = None,
    removed: Collection[str] = (),
) -> bytes:
    """Set top-level members to raw JSON, set members of top-level objects, and remove top-level members, in one copy of
    the body. What is set is not removed.

    An object that is absent or null is made. A value of another kind stays as it is: the engine refuses it in its own
    words.

    Raises:
        ValueError: As ``top_level``.
    """
    fields = body if isinstance(body, Fields) else top_level(body)
    body = fields.body
    changes = dict(values or {})
    for outer, inner in (nested or {}).items():
        current = changes.get(outer) or fields.value(outer)
        if current is None or current == b"null":
            changes[outer] = edit(b"{}", inner)
        elif current.startswith(b"{"):
            changes[outer] = edit(current, inner)
    gone = {name for name in removed if name in fields.values and name not in changes}
    added = [name for name in changes if name not in fields.values]
    text = b",".join(b"%b:%b" % (msgspec.json.encode(name), changes[name]) for name in added)
    if text and len(gone) < len(fields.values):
        text += b","
    if not gone and len(added) == len(changes):
        return b"".join((body[: fields.opening], text, memoryview(body)[fields.opening :])) if text else body
    return b"".join(_pieces(fields, text, changes, gone))


def elements(array: bytes, limit: int | None = None) -> list[bytes]:
    """Return the elements of a raw JSON array, the first ``limit`` of them, each as its bytes.

    Raises:
        ValueError: It is no JSON array, or is nested too deep.
    """
    return [array[start:end] for start, end in _spans(array, limit)]


def edit_elements(array: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return the raw JSON array with each element changed, and the bytes between them as they are.

    Raises:
        ValueError: As ``elements``.
    """
    pieces: list[bytes | memoryview] = []
    view, at = memoryview(array), 0
    for start, end in _spans(array):
        pieces += (view[at:start], change(array[start:end]))
        at = end
    return b"".join((*pieces, view[at:]))


def _spans(array: bytes, limit: int | None = None) -> list[tuple[int, int]]:
    """Where the elements of a raw JSON array lie, the first ``limit`` of them."""
    lengths, text = None, ""
    try:
        lengths = [len(bytes(element)) for element in _decode_array(array)[:limit]]
    except RecursionError:
        raise ValueError("the array is not JSON that can be read: it is nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = _python_text(array, "the array is not JSON")
    start = _SPACE.match(array, array.index(b"[") + 1).end()  # type: ignore[union-attr]  # it matches nothing too
    found: list[tuple[int, int]] = []
    if array.startswith(b"]", start):
        return found
    while True:
        end = _end_by_python(text, start) if lengths is None else start + lengths[len(found)]
        found.append((start, end))
        after = _AFTER_ELEMENT.match(array, end)
        if after is None:
            raise ValueError(f"the array is not JSON: {_byte(array, end)}, allowed are ',' and ']'")
        if after[1] == b"]" or len(found) == limit:
            return found
        start = after.end()


def _pieces(fields: Fields, text: bytes, changes: Mapping[str, bytes], gone: set[str]) -> list[bytes | memoryview]:
    """The body with ``text`` behind its opening brace, changed values, and without what is gone.

    A member that goes takes the comma behind it along, the last ones take the comma before them.
    """
    view, members = memoryview(fields.body), fields.members
    kept = [index for index, member in enumerate(members) if member.name not in gone]
    last = kept[-1] if kept else -1
    pieces: list[bytes | memoryview] = [view[: fields.opening], text]
    at = fields.opening
    for member in members[: last + 1]:
        if member.name in gone:
            pieces.append(view[at : member.key_start])
            at = member.comma_end
        elif member.name in changes:
            pieces += (view[at : member.value_start], changes[member.name])
            at = member.value_end
    if last < len(members) - 1:
        pieces.append(view[at : members[last].value_end if kept else members[0].key_start])
        at = members[-1].value_end
    pieces.append(view[at:])
    return pieces


def _walk(body: bytes, opening: int, end_of_value: Callable[[str, int], int]) -> list[BodyMember]:
    """The members from the opening brace to the closing one, where ``end_of_value`` knows how long a value is."""
    at = _SPACE.match(body, opening).end()  # type: ignore[union-attr]  # it matches nothing too
    members: list[BodyMember] = []
    if body.startswith(b"}", at):
        return members
    while True:
        if len(members) >= MAX_MEMBERS:
            raise ValueError(f"the body has more than {MAX_MEMBERS} members at its top level, allowed are as many")
        key = _KEY.match(body, at)
        if key is None:
            raise ValueError(f"the body is not JSON: {_byte(body, at)}, allowed is a key in quotes with ':' behind it")
        try:
            name = _decode_key(key[1])
        except (msgspec.DecodeError, UnicodeDecodeError):
            name = json.loads(key[1])
        start = key.end()
        end = end_of_value(name, start)
        after = _AFTER_VALUE.match(body, end)
        if after is None:
            raise _OutOfStepError(end)
        comma_end = after.start(1) + 1 if after[1] != b"}" else end
        members.append(BodyMember(name, at, start, end, comma_end))
        if after[1] == b"}":
            return members
        at = after.end()


def _members_by_python(body: bytes, opening: int, reason: str) -> list[BodyMember]:
    """The members by Python's parser, which reads the bytes as Latin-1: its offsets are then those of the bytes.

    Raises:
        ValueError: It refuses them too, or there are too many bytes.
    """
    text = _python_text(body, reason)
    try:
        members = _walk(body, opening, lambda _, start: _end_by_python(text, start))
    except _OutOfStepError as error:
        raise ValueError(f"the body is not JSON: {_byte(body, error.at)}, allowed are ',' and '}}'") from None
    closing = body.index(b"}", members[-1].value_end if members else opening)
    rest = _SPACE.match(body, closing + 1).end()  # type: ignore[union-attr]  # it matches nothing too
    if rest < len(body):
        raise ValueError(f"the body is not JSON: {_byte(body, rest)} behind the object, allowed is nothing")
    return members


def _python_text(data: bytes, reason: str) -> str:
    if len(data) > MAX_SLOW_BYTES:
        raise ValueError(f"{reason}; its {len(data)} bytes are too many to look closer, allowed are {MAX_SLOW_BYTES}")
    return data.decode("latin-1")


def _end_by_python(text: str, start: int) -> int:
    try:
        return _value_end(text, start)[1]
    except RecursionError:
        raise ValueError("the body is not JSON that can be read: it is nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error.msg} (byte {error.pos})") from None


def _byte(body: bytes, at: int) -> str:
    return f"byte {at} is {body[at : at + 1].decode('latin-1')!r}" if at < len(body) else f"it ends at byte {at}"
