"""How many values a request body has, counted before anything is made of them.

The parser makes an object of every value, with the interpreter's lock held: a body of brackets and commas costs a
hundred times what the same bytes of text cost, and nobody else has a turn meanwhile. So bodies that are not short are
counted first. Commas and opening brackets are at most as many as there are in the bytes, which is quick to say; a text
may hold plenty of them, so what looks like too many is counted again, strings left out, in a thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np

from poolgrid.frontend.errors import RequestError
from poolgrid.frontend.tokenization import TokenizationPool
from poolgrid.process.tasks import breathe

SHORT_BYTES = 64 * 1024
"""Bodies up to here are parsed as they are: at worst in 4 ms."""

INLINE_BYTES = 1024 * 1024
"""Bodies up to here are counted on the event loop, in 0.2 ms."""

VALUES_PER_PART = 8
"""Values that may come for each object or list, and for each member of an object: those cost eight times as much as
numbers do."""

SLICE_BYTES = 128 * 1024
"""Bytes that are counted in one go, with the interpreter's lock held: 20 microseconds."""

PIECE_BYTES = 32 * 1024
"""Bytes of short strings and of what is between them that are counted in one go: half a millisecond."""

_QUOTE, _BACKSLASH = b'"\\'
_SHORT_STRING = rb'"[^"\\]{0,1024}+(?:\\.[^"\\]{0,1024}+){0,1024}+"'
_PIECE = re.compile(rb'(?:[^"]++|' + _SHORT_STRING + rb")+", re.DOTALL)
"""Not possessive as a whole: Python before 3.11.5 (Debian 12 has 3.11.2) then leaves out the last of the alternatives
that matched (CPython's issue 106052). It would be no quicker."""
_SHORT_STRINGS = re.compile(_SHORT_STRING, re.DOTALL)
_COMMA, _COLON, _BRACE = b",:{"
_BRACKETS_DIFFER = ord("[") ^ ord("{")
"""The one bit in which the two opening brackets differ."""
_WITHIN_STRING = re.compile(rb'(?:[^"\\]|\\.){0,65536}+', re.DOTALL)
"""A piece of a string with escapes, of which a sixteenth of a mebibyte takes half a millisecond."""


async def check_shape(body: bytes, values_max: int, pool: TokenizationPool) -> None:
    """Return when a body may be parsed; raises ``RequestError`` 413 when it has more values than it may."""
    if len(body) <= SHORT_BYTES:
        return
    if len(body) <= INLINE_BYTES:
        if _at_most(body, values_max):
            return
    elif await pool.run_in_thread(partial(_at_most, body, values_max, breathe)):
        return
    if not await pool.run_in_thread(partial(has_room, body, values_max, breathe)):
        raise RequestError(
            413,
            "body_too_complex",
            f"reading the request body: it has more than {values_max} values, or {values_max // VALUES_PER_PART} "
            "objects and lists or members of objects (they grow with max_body_bytes)",
        )


def _nothing() -> None:
    pass


def _at_most(body: bytes, values_max: int, after_slice: Callable[[], None] = _nothing) -> bool:
    """Return whether a body certainly has no more values than it may, by all its commas, brackets and colons."""
    values = parts = members = 0
    # Sixteen bytes and more at a time, where counting in bytes takes them one by one.
    numbers = np.frombuffer(body, np.uint8)
    for begin in range(0, len(numbers), SLICE_BYTES):
        of_slice = numbers[begin : begin + SLICE_BYTES]
        parts += int(np.count_nonzero((of_slice | _BRACKETS_DIFFER) == _BRACE))
        members += int(np.count_nonzero(of_slice == _COLON))
        values += int(np.count_nonzero(of_slice == _COMMA))
        after_slice()
    return _has_room(values, parts, members, values_max)


def has_room(body: bytes, values_max: int, after_slice: Callable[[], None] = _nothing) -> bool:
    """Return whether a JSON text has no more values, containers and members than it may; its strings are left out."""
    return _has_room(*count_values(body, values_max, after_slice), values_max)


def _has_room(commas: int, containers: int, members: int, values_max: int) -> bool:
    return commas + containers <= values_max and max(containers, members) <= values_max // VALUES_PER_PART


def count_values(body: bytes, values_max: int, after_slice: Callable[[], None] = _nothing) -> tuple[int, int, int]:
    """Return how many commas, containers and members of objects a JSON text has.

    It stops counting when they are too many for ``values_max``. What is no JSON has some count. ``after_slice`` is
    called now and then.
    """
    commas = containers = members = strings = at = 0
    end = len(body)
    breath_at = PIECE_BYTES
    while at < end and _has_room(max(commas, strings - members), containers, members, values_max):
        found = _PIECE.match(body, at, at + PIECE_BYTES)
        if found is None:
            # A long string, or the end of something that is no JSON.
            at = _end_of_string(body, at + 1)
            strings += 1
        else:
            piece = found[0]
            if b'"' in piece:
                piece = _SHORT_STRINGS.sub(b'"', piece)
                strings += piece.count(b'"')  # as many as values and names of members, unless it is no JSON
            containers += piece.count(b"[") + piece.count(b"{")
            members += piece.count(b":")
            commas += piece.count(b",")
            at = found.end()
        if at >= breath_at:
            breath_at = at + PIECE_BYTES
            after_slice()
    return max(commas, strings - members - 1), containers, members


def _end_of_string(body: bytes, at: int) -> int:
    """Return the place after the quote that ends the string whose first character is at ``at``."""
    quote = body.find(b'"', at)
    if quote < 0:
        return len(body)
    if body[quote - 1] != _BACKSLASH:
        return quote + 1
    while at < len(body) and body[at] != _QUOTE:
        at = max(at + 1, _WITHIN_STRING.match(body, at).end())  # type: ignore[union-attr]  # it matches nothing too
    return at + 1
