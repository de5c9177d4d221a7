"""Values in a model's own notation, written as JSON while they arrive: ``ValueReader``.

``JSON``    JSON, and what models write in its place: Python's notation, a comma before a closing bracket, line breaks
            and unknown escapes in strings.
``PYTHON``  Python literals, and the arguments of a call: ``x=1, y="a")``.
``GEMMA``   ``{key:<|"|>text<|"|>,other:1}``: keys without quotes.

Rules
- What is JSON already is passed on unchanged, white space included; other notations get JSON's usual white space.
- Text is passed on once it is certain. Brackets, keys and commas wait for the value that follows them; numbers and
  names for the character after them. So a value that fails before anything of it was passed on was none.
- Nesting is bounded: no client's decoder is sure to follow deeper than ``DEPTH_MAX``.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from poolgrid.plugins.parsers.markers import SPACE
from poolgrid.server.frontend.answer_pieces import FEED_CHARS_MAX

DEPTH_MAX = 200

TOKEN_CHARS_MAX = 1024
"""Longest number, name or key."""

HELD_VALUE_CHARS_MAX = 1024 * 1024
"""Longest text that is held back to find out which type it has; a longer one is text."""

GAP_CHARS_MAX = 64
"""Most white space after a quote or a tag that is looked over to see whether that ends a value: it is looked at again
per character."""

Convert = Callable[[str, str], str | None]
"""Returns the JSON of an argument by its key and its JSON as written; ``None`` = it stays as written."""


@dataclass(frozen=True, slots=True)
class Quote:
    """How a string begins and ends."""

    opener: str
    closer: str
    escapes: bool = True


@dataclass(frozen=True, slots=True)
class Notation:
    """How a family of models writes values."""

    quotes: tuple[Quote, ...]
    openers: str = "{["
    bare_keys: bool = False
    """Whether keys stand without quotes, and text that is no JSON value may as well."""
    python: bool = False

    @property
    def is_json(self) -> bool:
        return not (self.bare_keys or self.python)


JSON_NAMES = ("true", "false", "null")
PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
"""Python's literals by name, each with JSON's name for it."""
NAMES = {**PYTHON_NAMES, **{name: name for name in JSON_NAMES}}
"""The names that models write for values, each with JSON's name for it."""

_QUOTES = (Quote('"', '"'), Quote("'", "'"))
JSON = Notation(_QUOTES)
PYTHON = Notation((Quote('"""', '"""'), Quote("'''", "'''"), *_QUOTES), "{[(", python=True)
GEMMA = Notation((Quote('<|"|>', '<|"|>', escapes=False), Quote('"', '"')), bare_keys=True)

_SPACE = re.compile(f"[{SPACE}]*")
_WORD = re.compile(r"[A-Za-z0-9+._-]*")
_BARE_WORD = re.compile(r"[^,{}\[\]<\"]*")
_BARE_KEY = re.compile(r"[^,:{}\[\]<\"]*")
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_AFTER_STRINGS = ",)]}:"
"""What may follow a string of Python; before anything else a quote is part of it: models leave quotes unescaped."""
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|x(?P<byte>[0-9a-fA-F]{2})|U(?P<wide>[0-9a-fA-F]{8})|(?P<one>.))", re.DOTALL)
_PYTHON_ESCAPE = re.compile(
    r"\\(?:u[0-9a-fA-F]{4}|x(?P<byte>[0-9a-fA-F]{2})|U(?P<wide>[0-9a-fA-F]{8})|(?P<octal>[0-7]{1,3})|(?P<one>.))",
    re.DOTALL,
)
_ESCAPE_CHARS = {"u": 6, "x": 4, "U": 10}
_PLAIN_ESCAPES = frozenset('"\\/bfnrt')
_PYTHON_ONLY = {"a": "\\u0007", "v": "\\u000b", "\n": "", "/": "\\\\/"}


@dataclass(slots=True)
class _Open:
    """A bracket that is open."""

    closer: str
    written: str
    """The closing bracket as JSON has it."""
    is_object: bool
    colon: str = ":"
    bare_keys: bool = False


class ValueReader:
    """Reads one value; after ``done`` or ``failed`` nothing more is fed, and ``left`` is the text after it.

    ``convert`` is asked about each argument (a member of the outermost object) that is a string, number or name; those
    for whose keys ``holds`` says yes are held back until they have ended.
    """

    def __init__(
        self,
        notation: Notation = JSON,
        *,
        in_call: bool = False,
        holds: Callable[[str], bool] | None = None,
        convert: Convert | None = None,
    ) -> None:
        """``in_call`` reads the arguments of a call after its ``(``, as an object."""
        self._notation = notation
        self._holds = holds
        self._convert = convert
        self._escape = _PYTHON_ESCAPE if notation.python else _ESCAPE
        self._state: Callable[[ValueReader], bool] = ValueReader._value
        """What takes from the buffer next: no bound method, which would be a circle that waits for the collector."""
        self._buffer = ""
        self._open: list[_Open] = []
        self._key = ""
        self._quote = _QUOTES[0]
        self._is_key = False
        self._held: list[str] | None = None
        """The JSON of a string that is passed on when it has ended."""
        self._held_chars = 0
        self._gap = ""
        """JSON that waits for what follows: brackets, keys, commas, white space, and a number or name before them."""
        self._comma_waits = False
        """Whether the gap begins with a comma that may be one too many."""
        self._certain: list[str] = []
        self.done = False
        self.failed = False
        if in_call:
            self._begin_container("(", _Open(")", "}", True, "=", True))

    @property
    def left(self) -> str:
        return self._buffer

    def feed(self, text: str) -> None:
        """Take new text, a slice at a time: each token copies what is left of its slice."""
        at = 0
        while at < len(text) and not self.done and not self.failed:
            self._buffer += text[at : at + FEED_CHARS_MAX]
            at += FEED_CHARS_MAX
            while self._buffer and not self.done and not self.failed and self._state(self):
                pass
        if at < len(text):
            self._buffer += text[at:]

    def end(self) -> None:
        """Become ``done`` or ``failed``: no text follows."""
        if self._state == ValueReader._word and not self._open:
            self._end_word(self._buffer)
            self._buffer = ""
        self.failed = self.failed or not self.done

    def take(self) -> str:
        """Return the JSON that has become certain since it was last asked for."""
        text = "".join(self._certain)
        self._certain.clear()
        return text

    def unread(self) -> str:
        """Return the text that was taken and never will be passed on; asked for once."""
        return self._gap + "".join(self._held or ())

    def closing(self) -> str:
        """Return what ends a value of which closing marks are missing."""
        quote = '"' if self._state == ValueReader._string and not self._is_key else ""
        return quote + "".join(each.written for each in reversed(self._open))

    # Each state takes something from the buffer and returns True, or returns False when it needs more text.

    def _space(self) -> bool:
        """Take white space and return whether anything follows it."""
        end = _SPACE.match(self._buffer).end()  # type: ignore[union-attr]  # it matches nothing, too
        if self._notation.is_json:
            self._gap += self._buffer[:end]
        self._buffer = self._buffer[end:]
        return bool(self._buffer)

    def _value(self) -> bool:
        if not self._space():
            return False
        character = self._buffer[0]
        if self._open and character == self._open[-1].closer and not self._open[-1].is_object:
            return self._close()
        quote = self._opening_quote()
        if quote is None:
            return False
        self._comma_waits = False
        if quote:
            self._begin_string(is_key=False)
        elif character in self._notation.openers:
            if len(self._open) == DEPTH_MAX:
                self.failed = True
                return False
            closer = _CLOSERS[character]
            is_object = character == "{"
            opened = _Open(closer, "}" if is_object else "]", is_object, bare_keys=self._notation.bare_keys)
            self._buffer = self._buffer[1:]
            self._begin_container(character, opened)
        elif self._word_pattern.match(self._buffer).end():  # type: ignore[union-attr]
            self._state = ValueReader._word
        else:
            self.failed = True
            return False
        return True

    @property
    def _word_pattern(self) -> re.Pattern[str]:
        return _BARE_WORD if self._notation.bare_keys else _WORD

    def _begin_container(self, character: str, opened: _Open) -> None:
        self._gap += "[" if opened.written == "]" else "{"
        self._open.append(opened)
        self._state = ValueReader._member if opened.is_object else ValueReader._value

    def _member(self) -> bool:
        """A key, or the end of the object."""
        if not self._space():
            return False
        opened = self._open[-1]
        if self._buffer[0] == opened.closer:
            return self._close()
        quote = None if opened.colon == "=" else self._opening_quote()
        if quote:
            self._begin_string(is_key=True)
            return True
        if quote is None and opened.colon != "=":
            return False
        if not opened.bare_keys and not self._notation.python:
            self.failed = True
            return False
        pattern = _BARE_KEY if self._notation.bare_keys else _NAME
        end = pattern.match(self._buffer).end()  # type: ignore[union-attr]
        if end > TOKEN_CHARS_MAX or (end == 0):
            self.failed = True
            return False
        if end == len(self._buffer):
            return False
        key = self._buffer[:end].strip()
        if not opened.bare_keys:  # a key of a Python dictionary that is no string
            key = ast_text(key)
        self._buffer = self._buffer[end:]
        self._end_key(json.dumps(key, ensure_ascii=False))
        return True

    def _opening_quote(self) -> bool | None:
        """Return whether a string begins here, and note its quote; ``None`` = that needs more text."""
        for quote in self._notation.quotes:
            if self._buffer.startswith(quote.opener):
                self._quote = quote
                return True
            if quote.opener.startswith(self._buffer):
                return None
        return False

    def _begin_string(self, is_key: bool) -> None:
        self._buffer = self._buffer[len(self._quote.opener) :]
        self._is_key = is_key
        held = is_key or (len(self._open) == 1 and self._holds is not None and self._holds(self._key))
        self._held = ['"'] if held else None
        self._held_chars = 0
        if not held:
            self._gap += '"'
        self._state = ValueReader._string

    def _string(self) -> bool:
        """A string: up to its end, or a character that JSON writes otherwise."""
        quote = self._quote
        room = TOKEN_CHARS_MAX - self._held_chars if self._is_key else len(self._buffer)
        run = _run(quote.closer[0], quote.escapes).match(self._buffer, 0, room)
        assert run is not None, "the pattern matches nothing, too"
        self._text(run[0])
        self._buffer = self._buffer[run.end() :]
        if not self._buffer:
            return False
        if self._is_key and self._held_chars >= TOKEN_CHARS_MAX:
            self.failed = True
            return False
        if self._buffer.startswith(quote.closer):
            rest = self._buffer[len(quote.closer) :]
            following = rest.lstrip(SPACE)
            may_be_part = self._notation.python and len(rest) - len(following) <= GAP_CHARS_MAX
            if may_be_part and not following:
                return False
            if may_be_part and following[0] not in _AFTER_STRINGS:
                self._text(json.dumps(quote.closer)[1:-1])
                self._buffer = rest
                return True
            self._buffer = rest
            self._end_string()
            return True
        if quote.closer.startswith(self._buffer):
            return False
        character = self._buffer[0]
        if character == "\\" and quote.escapes:
            return self._escaped()
        self._text(json.dumps(character, ensure_ascii=False)[1:-1])
        self._buffer = self._buffer[1:]
        return True

    def _escaped(self) -> bool:
        wanted = _ESCAPE_CHARS.get(self._buffer[1:2], 4 if self._notation.python and self._buffer[1:2].isdigit() else 2)
        match = self._escape.match(self._buffer)
        if match is None or (len(self._buffer) < wanted and _may_grow(self._buffer)):
            return False
        self._buffer = self._buffer[match.end() :]
        self._text(self._as_json(match))
        return True

    def _as_json(self, match: re.Match[str]) -> str:
        groups = match.groupdict()
        if groups["byte"] is not None:
            return f"\\u00{groups['byte']}"
        if groups["wide"] is not None:
            code = int(groups["wide"], 16)
            return json.dumps(chr(code) if code < 0x110000 else "\ufffd")[1:-1]
        if groups.get("octal") is not None:
            return f"\\u{int(groups['octal'], 8):04x}"
        one = groups["one"]
        if one is None:
            return match[0]
        if self._notation.python and one in _PYTHON_ONLY:
            return _PYTHON_ONLY[one]
        if one in _PLAIN_ESCAPES:
            return match[0]
        return one if one == "'" else json.dumps(f"\\{one}", ensure_ascii=False)[1:-1]

    def _text(self, text: str) -> None:
        """Add JSON text of the string that is being read."""
        if not text:
            return
        if self._held is None:
            self._pass_on(text)
            return
        self._held.append(text)
        self._held_chars += len(text)
        if not self._is_key and self._held_chars > HELD_VALUE_CHARS_MAX:
            held, self._held = self._held, None
            self._pass_on("".join(held))

    def _end_string(self) -> None:
        if self._held is None:
            self._pass_on('"')
            self._end_value()
            return
        text, self._held = "".join(self._held) + '"', None
        if self._is_key:
            self._end_key(text)
        else:
            assert self._convert is not None, "else nothing is held back"
            self._pass_on(self._convert(self._key, text) or text)
            self._end_value()

    def _end_key(self, text: str) -> None:
        if len(self._open) == 1:
            self._key = json.loads(text)
        self._gap += text
        self._comma_waits = False
        self._state = ValueReader._colon

    def _colon(self) -> bool:
        if not self._space():
            return False
        if self._buffer[0] != self._open[-1].colon:
            self.failed = True
            return False
        self._buffer = self._buffer[1:]
        self._gap += ":" if self._notation.is_json else ": "
        self._state = ValueReader._value
        return True

    def _word(self) -> bool:
        """A number or a name: up to a character that is no part of it."""
        end = self._word_pattern.match(self._buffer).end()  # type: ignore[union-attr]
        if end > TOKEN_CHARS_MAX:
            self.failed = True
            return False
        if end == len(self._buffer):
            return False
        text = self._buffer[:end]
        if self._notation.bare_keys:
            end = len(text.rstrip())
            text = text[:end]
        self._buffer = self._buffer[end:]
        self._end_word(text)
        return not self.failed

    def _end_word(self, text: str) -> None:
        word = NAMES.get(text) or (text if _is_number(text) else None)
        if word is None and self._notation.python:
            word = _python_number(text)
        if word is None and self._notation.bare_keys:
            word = json.dumps(text, ensure_ascii=False)
        if word is None:
            self.failed = True
            return
        if len(self._open) == 1 and self._convert is not None:
            word = self._convert(self._key, word) or word
        self._gap += word
        self._end_value()

    def _end_value(self) -> None:
        if not self._open:
            self._pass_on("")
            self.done = True
            return
        self._state = ValueReader._after

    def _after(self) -> bool:
        """After a member or an item: a comma, or the end."""
        if not self._space():
            return False
        character = self._buffer[0]
        opened = self._open[-1]
        if character == opened.closer:
            return self._close()
        if character != ",":
            self.failed = True
            return False
        self._pass_on("")
        self._comma_waits = True
        self._gap = "," if self._notation.is_json else ", "
        self._buffer = self._buffer[1:]
        self._state = ValueReader._member if opened.is_object else ValueReader._value
        return True

    def _close(self) -> bool:
        opened = self._open.pop()
        self._buffer = self._buffer[1:]
        if self._comma_waits:
            self._gap = self._gap[1:] if self._notation.is_json else ""
            self._comma_waits = False
        self._gap += opened.written
        if not self._open:
            self._pass_on("")
            self.done = True
        else:
            self._state = ValueReader._after
        return True

    def _pass_on(self, text: str) -> None:
        self._certain += (self._gap, text)
        self._gap = ""
        self._comma_waits = False


@cache
def _run(closer: str, escapes: bool) -> re.Pattern[str]:
    """Return the pattern of the characters and escapes of a string that JSON writes as they are."""
    plain = rf'[^{re.escape(closer)}"\\\x00-\x1f]*'
    return re.compile(rf'{plain}(?:\\["\\bfnrt]{plain})*' if escapes else plain)


def _may_grow(text: str) -> bool:
    """Return whether an escape may have more characters than ``text``."""
    digits = text[2:]
    return all(each in "0123456789abcdefABCDEF" for each in digits)


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


def _python_number(text: str) -> str | None:
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        value = ast.literal_eval(text)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return json.dumps(value)
    return None


def ast_text(text: str) -> str:
    """Return a literal of Python as text."""
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return str(ast.literal_eval(text))
    return text


def strict_json(text: str, python: bool = True) -> str | None:
    """Return a value as JSON, or ``None`` for what is none; unchanged where it is JSON already.

    ``python`` also accepts what ``JSON`` does beyond that.
    """
    if _nests_too_deep(text):
        return None
    if _is_json(text):
        return text
    if not python:
        return None
    reader = ValueReader()
    reader.feed(text)
    reader.end()
    return reader.take() if reader.done and not reader.left.strip() else None


def _nests_too_deep(text: str) -> bool:
    return text.count("[") + text.count("{") > DEPTH_MAX and not _depth_fits(text)


def _depth_fits(text: str) -> bool:
    reader = ValueReader()
    reader.feed(text)
    return reader.done


def _is_json(text: str) -> bool:
    with suppress(ValueError, RecursionError):
        json.loads(text, parse_constant=_refuse)
        return True
    return False


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def json_of(value: Any) -> str:
    """Return a decoded value as JSON that can be encoded as UTF-8: half a surrogate pair stays an escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value, allow_nan=False)


_SURROGATE = re.compile("[\ud800-\udfff]")
