"""Values in brackets in text that arrives in pieces: where one ends, and the JSON of it.

Models also write values as Python prints them; ``strict_json`` turns such a value into JSON. Nesting is bounded: deeper
than ``DEPTH_MAX`` no client's own decoder is sure to follow.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import NoReturn

DEPTH_MAX = 200

_RUNS = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_JSON_OUTSIDE = re.compile(r"[ \t\n\r:,A-Za-z0-9+.-]*")
"""What JSON, or Python's notation of it, has outside of strings and brackets."""
CODE_OUTSIDE = re.compile(r"[^()\[\]{}'\"]*")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}


class Brackets:
    """Finds the end of a value that begins with a bracket. After ``done`` or ``failed`` nothing more is fed.

    It fails where the text can be no part of a value, by its characters alone: whether it is one, ``strict_json`` says.
    """

    def __init__(self, outside: re.Pattern[str] = _JSON_OUTSIDE) -> None:
        """``outside`` matches what there may be outside of strings and brackets."""
        self._outside = outside
        self._closers: list[str] = []
        self._quote = ""
        self._escaped = False
        self.done = False
        self.failed = False

    def feed(self, text: str, at: int = 0) -> int:
        """Take ``text`` from ``at`` on and return where the value ended, or failed, or the end of ``text``."""
        size = len(text)
        while at < size and not self.done and not self.failed:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            run = (_RUNS[self._quote] if self._quote else self._outside).match(text, at)
            assert run is not None, "the patterns match nothing, too"
            at = run.end()
            if at == size:
                break
            character = text[at]
            if self._quote:
                self._escaped = character == "\\"
                self._quote = self._quote if self._escaped else ""
            elif character in "\"'":
                self._quote = character
            elif character in _CLOSERS and len(self._closers) < DEPTH_MAX:
                self._closers.append(_CLOSERS[character])
            elif self._closers and character == self._closers[-1]:
                self._closers.pop()
                self.done = not self._closers
            else:
                self.failed = True
                break
            at += 1
        return at


_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
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


def strict_json(text: str, python: bool = True) -> str | None:
    """Return a value as JSON, or ``None`` for what is none; unchanged where it is JSON already.

    ``python`` also accepts single quotes, ``True``, ``False``, ``None``, a comma before a closing bracket, and line
    breaks and unknown escapes in strings.
    """
    if text[:1] in ("{", "["):
        brackets = Brackets()
        if brackets.feed(text) != len(text) or not brackets.done:
            return None
    if _is_json(text):
        return text
    if python and _is_json(text := _PYTHON_TOKENS.sub(_strict_token, text)):
        return text
    return None


def _is_json(text: str) -> bool:
    with suppress(ValueError, RecursionError):
        json.loads(text, parse_constant=_refuse)
        return True
    return False


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


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
    if escaped in '"\\/bfnrt':
        return match[0]
    return escaped if escaped == "'" else json.dumps(f"\\{escaped}", ensure_ascii=False)[1:-1]


def json_of(value: object) -> str:
    """Return a decoded value as JSON that can be encoded as UTF-8: half a surrogate pair stays an escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value, allow_nan=False)


_SURROGATE = re.compile("[\ud800-\udfff]")
