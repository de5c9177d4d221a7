"""Recognise one JSON value in text that arrives in pieces: where it ends, or where it stops being JSON (RFC 8259).

The check is by character, so the verdict does not depend on how the text was cut. Nesting is bounded: deeper than
``DEPTH_MAX`` no client's own decoder is sure to follow. Models also write values as Python prints them; ``strict_json``
turns such a value into JSON.
"""

from __future__ import annotations

import json
import re

DEPTH_MAX = 200

NUMBER_CHARS_MAX = 512
"""A longer number is no argument of anything; the bound also limits the work: it is looked at again per character."""

_SPACE = " \t\n\r"
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_PYTHON_RUNS = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_LITERALS = ("true", "false", "null")
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_PYTHON_LITERALS = (*_LITERALS, *_PYTHON_NAMES)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE](?:[+-]?[0-9]*)?)?)?|[eE](?:[+-]?[0-9]*)?)?)?")
_SCALAR = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-.")
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')


class JsonValue:
    """One value. After ``done`` or ``failed`` nothing more is fed.

    ``python`` also accepts single quotes, ``True``, ``False``, ``None``, a comma before a closing bracket, and line
    breaks and unknown escapes in strings.
    """

    __slots__ = ("_escape", "_expect", "_in_string", "_key", "_python", "_quote", "_scalar", "_stack", "done", "failed")

    def __init__(self, python: bool = False) -> None:
        self._python = python
        self._quote = '"'
        self._stack: list[str] = []
        self._expect = "value"
        """``value``, ``value or end``, ``key``, ``key or end``, ``colon``, ``comma``."""
        self._in_string = False
        self._key = False
        self._escape = 0
        """In a string: -1 = after a backslash, n > 0 = so many hex digits are missing."""
        self._scalar = ""
        self.done = False
        self.failed = False

    def feed(self, text: str, at: int = 0) -> int:
        """Take ``text`` from ``at`` on and return where the value ended, or failed, or the end of ``text``."""
        size = len(text)
        while at < size:
            if self._in_string:
                at = self._string(text, at)
            elif self._scalar:
                at = self._more_scalar(text, at)
            else:
                at = self._structure(text, at)
            if self.done or self.failed:
                return at
        return size

    def end(self) -> None:
        """Say that no text follows: a number at the top may be complete."""
        if not self.done and not self.failed:
            if self._scalar and not self._stack and self._complete(self._scalar):
                self.done = True
            else:
                self.failed = True

    def _string(self, text: str, at: int) -> int:
        if self._escape:
            character = text[at]
            if self._python:
                self._escape = 0
            elif self._escape == -1:
                if character == "u":
                    self._escape = 4
                elif character in _ESCAPES:
                    self._escape = 0
                else:
                    self.failed = True
                    return at
            elif character in _HEX:
                self._escape -= 1
            else:
                self.failed = True
                return at
            return at + 1
        run = (_PYTHON_RUNS[self._quote] if self._python else _STRING_RUN).match(text, at)
        assert run is not None, "the pattern matches nothing, too"
        at = run.end()
        if at == len(text):
            return at
        character = text[at]
        if character == self._quote:
            self._in_string = False
            if self._key:
                self._expect = "colon"
            else:
                self._ended()
        elif character == "\\":
            self._escape = -1
        else:
            self.failed = True
            return at
        return at + 1

    def _more_scalar(self, text: str, at: int) -> int:
        character = text[at]
        if character in _SCALAR:
            if len(self._scalar) < NUMBER_CHARS_MAX and self._may_be(self._scalar + character):
                self._scalar += character
                return at + 1
            self.failed = True
            return at
        if self._complete(self._scalar):
            self._scalar = ""
            self._ended()
        else:
            self.failed = True
        return at

    def _structure(self, text: str, at: int) -> int:
        character = text[at]
        if character in _SPACE:
            return at + 1
        expect = self._expect
        if expect == "comma":
            if character == ",":
                self._expect = "key" if self._stack[-1] == "{" else "value"
                if self._python:
                    self._expect += " or end"
                return at + 1
            if character == ("}" if self._stack[-1] == "{" else "]"):
                return self._close(at)
        elif expect == "colon":
            if character == ":":
                self._expect = "value"
                return at + 1
        elif expect in ("key", "key or end"):
            if self._is_quote(character):
                self._in_string = self._key = True
                self._quote = character
                return at + 1
            if character == "}" and expect == "key or end":
                return self._close(at)
        elif character == "]" and expect == "value or end":
            return self._close(at)
        elif self._is_quote(character):
            self._in_string = True
            self._key = False
            self._quote = character
            return at + 1
        elif character in "{[":
            if len(self._stack) < DEPTH_MAX:
                self._stack.append(character)
                self._expect = "key or end" if character == "{" else "value or end"
                return at + 1
        elif character in _SCALAR and self._may_be(character):
            self._scalar = character
            return at + 1
        self.failed = True
        return at

    def _close(self, at: int) -> int:
        self._stack.pop()
        self._ended()
        return at + 1

    def _ended(self) -> None:
        if self._stack:
            self._expect = "comma"
        else:
            self.done = True

    def _is_quote(self, character: str) -> bool:
        return character == '"' or (self._python and character == "'")

    def _may_be(self, scalar: str) -> bool:
        literals = _PYTHON_LITERALS if self._python else _LITERALS
        return any(each.startswith(scalar) for each in literals) or _NUMBER_BEGUN.fullmatch(scalar) is not None

    def _complete(self, scalar: str) -> bool:
        return scalar in (_PYTHON_LITERALS if self._python else _LITERALS) or _NUMBER.fullmatch(scalar) is not None


_PYTHON_TOKENS = re.compile(
    r"""
    "[^"\\]*(?:\\.[^"\\]*)*" | '[^'\\]*(?:\\.[^'\\]*)*'
    | \b(?:True|False|None)\b
    | ,(?=\s*[}\]])
    """,
    re.VERBOSE | re.DOTALL,
)
_UNUSUAL = re.compile(r"\\u[0-9a-fA-F]{4}|\\x([0-9a-fA-F]{2})|\\(.)|[\"\x00-\x1f]", re.DOTALL)
"""What the inside of a string has that JSON may write otherwise: escapes, double quotes, control characters."""


def strict_json(text: str) -> str:
    """Return the JSON of a value that ``JsonValue(python=True)`` accepted; unchanged where it is JSON already."""
    try:
        json.loads(text)
    except ValueError:
        return _PYTHON_TOKENS.sub(_strict_token, text)
    return text


def _strict_token(match: re.Match[str]) -> str:
    token = match[0]
    if token == ",":
        return ""
    return _PYTHON_NAMES.get(token) or f'"{_UNUSUAL.sub(_strict_character, token[1:-1])}"'


def _strict_character(match: re.Match[str]) -> str:
    code, escaped = match[1], match[2]
    if code is not None:
        return f"\\u00{code}"
    if escaped is None:
        return match[0] if len(match[0]) > 1 else json.dumps(match[0])[1:-1]
    if escaped in _ESCAPES:
        return match[0]
    return escaped if escaped == "'" else json.dumps(f"\\{escaped}", ensure_ascii=False)[1:-1]


def json_of(value: object) -> str:
    """Return a decoded value as JSON that can be encoded as UTF-8: half a surrogate pair stays an escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value, allow_nan=False)


_SURROGATE = re.compile("[\ud800-\udfff]")
