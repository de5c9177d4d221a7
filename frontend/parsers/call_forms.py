"""The forms in which models write one tool call. Each reads a call from text that arrives in pieces.

``JsonCall``    ``{"name": "f", "arguments": {…}}``, keys in any order (hermes, llama3, granite, mistral)
``GivenCall``   the arguments alone (guided decoding towards one function)
``HeadedCall``  a head that names the function, then the arguments as a JSON object (mistral, deepseek v3)
``PythonCall``  ``f(x=1, y="a")`` (pythonic)

Rules
- A call is announced (``Kind.CALL``) once its name is known and its arguments have begun as a JSON object; from then on
  the arguments are passed on as they come.
- ``failed`` means that the text is no such call, or no longer. ``raw`` then returns what was taken and is in no piece.
- The verdict falls at the same character however the text was cut.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import Any, Protocol

from poolgrid.frontend.parsers.json_value import JsonValue
from poolgrid.frontend.parsers.pieces import Kind, Piece

NAME_CHARS_MAX = 256
"""Longest name of a function; OpenAI allows 64."""

HEAD_CHARS_MAX = 2 * NAME_CHARS_MAX
"""Most text before the arguments of a ``HeadedCall``: a name and the markers around it."""

PYTHON_CALL_CHARS_MAX = 256 * 1024
"""Longest ``PythonCall``: it is held back whole, for its arguments are rewritten as JSON."""


class CallForm(Protocol):
    """One call that is being read."""

    pieces: list[Piece]
    """New pieces, a call before its arguments; who reads them clears the list."""
    done: bool
    failed: bool

    def feed(self, text: str, at: int) -> int:
        """Take ``text`` from ``at`` on and return where the call ended or failed, or the end of ``text``."""
        ...

    def raw(self) -> str:
        """Return the text that was taken and is in no piece."""
        ...


class JsonCall:
    """``{"name": …, "arguments": {…}}``. ``known``: the only names there are; ``None`` = any name.

    ``parameters`` is taken for ``arguments``; arguments may also be an object inside a string, ``null`` or absent
    (then ``{}``). Other keys (``id``, ``type``) say nothing that is passed on.
    """

    __slots__ = (
        "_announced", "_arguments", "_buffer", "_expect", "_key", "_known", "_name", "_raw", "_value",
        "done", "failed", "pieces",
    )  # fmt: skip

    def __init__(self, known: Collection[str] | None = None) -> None:
        self._known = known
        self._expect = "open"
        """A place between values (``open``, ``key``, ``key or end``, ``colon``, ``value``, ``comma``), or which value
        is being read: ``a key``, ``the name``, ``arguments`` (passed on), ``whole arguments`` (kept), ``another``."""
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None
        """Arguments that were complete before the name was known."""
        self._announced = False
        self._value: JsonValue | None = None
        self._buffer: list[str] = []
        """The text of a value that must be complete to be understood."""
        self._raw: list[str] = []
        self.pieces: list[Piece] = []
        self.done = False
        self.failed = False

    def feed(self, text: str, at: int) -> int:
        """Take ``text`` from ``at`` on and return where the call ended or failed, or the end of ``text``."""
        while at < len(text) and not self.done and not self.failed:
            value = self._value
            if value is None:
                at = self._structure(text[at], at)
                continue
            end = value.feed(text, at)
            self._take(text[at:end])
            at = end
            if value.failed:
                self.failed = True
            elif value.done:
                self._value = None
                self._value_ended()
        return at

    def raw(self) -> str:
        """Return the text that was taken and is in no piece."""
        return "".join(self._raw)

    def _take(self, part: str) -> None:
        if self._expect == "arguments":
            self.pieces.append(Piece(Kind.ARGUMENTS, part))
            return
        self._raw.append(part)
        if self._expect != "another":
            self._buffer.append(part)

    def _structure(self, character: str, at: int) -> int:
        expect = self._expect
        if character in " \t\n\r":
            pass
        elif expect == "open" and character == "{":
            self._expect = "key or end"
        elif expect in ("key", "key or end") and character == '"':
            self._begin("a key")
            return at
        elif expect == "colon" and character == ":":
            self._expect = "value"
        elif expect == "value":
            self._begin_value(character)
            return at
        elif expect == "comma" and character == ",":
            self._expect = "key"
        elif expect in ("comma", "key or end") and character == "}":
            self._close()
        else:
            self.failed = True
            return at
        if not self.done:
            self._raw.append(character)
        return at + 1

    def _begin(self, expect: str) -> None:
        self._value = JsonValue()
        self._expect = expect
        self._buffer = []

    def _begin_value(self, character: str) -> None:
        if self._key == "name":
            if self._name is not None or character != '"':
                self.failed = True
            else:
                self._begin("the name")
        elif self._key in ("arguments", "parameters"):
            if self._announced or self._arguments is not None or character not in '{"n':
                self.failed = True
            elif character == "{" and self._name is not None:
                self._announce()
                self._begin("arguments")
            else:
                self._begin("whole arguments")
        else:
            self._begin("another")

    def _value_ended(self) -> None:
        expect, text = self._expect, "".join(self._buffer)
        self._expect = "comma"
        if expect == "a key":
            self._key = json.loads(text)
            self._expect = "colon"
        elif expect == "the name":
            name = json.loads(text)
            if not 1 <= len(name) <= NAME_CHARS_MAX or (self._known is not None and name not in self._known):
                self.failed = True
                return
            self._name = name
        elif expect == "whole arguments":
            self._arguments = _object(text)
            if self._arguments is None:
                self.failed = True
                return
        else:
            return
        if self._name is not None and self._arguments is not None:
            self._announce()
            self.pieces.append(Piece(Kind.ARGUMENTS, self._arguments))

    def _announce(self) -> None:
        assert self._name is not None, "only announced by name"
        self._announced = True
        self._raw.clear()
        self.pieces.append(Piece(Kind.CALL, self._name))

    def _close(self) -> None:
        if self._name is None:
            self.failed = True
            return
        if not self._announced:
            self._announce()
            self.pieces.append(Piece(Kind.ARGUMENTS, "{}"))
        self._raw.clear()
        self.done = True


def _object(text: str) -> str | None:
    """Return the JSON text of the object that ``text`` (JSON) is, or holds in a string; ``null`` is an empty one."""
    value = json.loads(text)
    if value is None:
        return "{}"
    if isinstance(value, dict):
        return text
    inner = JsonValue()
    stripped = value.strip()
    if not stripped.startswith("{") or inner.feed(stripped) != len(stripped) or not inner.done:
        return None
    return str(stripped)


class HeadedCall:
    """A head that ``pattern`` (with a group ``name``) matches whole, then the arguments as a JSON object."""

    __slots__ = ("_head", "_pattern", "_raw", "_value", "done", "failed", "pieces")

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._head = ""
        self._value: JsonValue | None = None
        self.pieces: list[Piece] = []
        self.done = False
        self.failed = False

    def feed(self, text: str, at: int) -> int:
        """Take ``text`` from ``at`` on and return where the call ended or failed, or the end of ``text``."""
        if self._value is None:
            brace = text.find("{", at)
            end = len(text) if brace < 0 else brace
            room = HEAD_CHARS_MAX - len(self._head)
            if end - at > room:
                self._head += text[at : at + room]
                self.failed = True
                return at + room
            self._head += text[at:end]
            at = end
            if brace < 0:
                return at
            match = self._pattern.fullmatch(self._head)
            if match is None:
                self.failed = True
                return at
            self.pieces.append(Piece(Kind.CALL, match["name"]))
            self._head = ""
            self._value = JsonValue()
        end = self._value.feed(text, at)
        self.pieces.append(Piece(Kind.ARGUMENTS, text[at:end]))
        self.done, self.failed = self._value.done, self._value.failed
        return end

    def raw(self) -> str:
        """Return the text that was taken and is in no piece."""
        return self._head


class GivenCall:
    """The arguments of a call whose function is known beforehand."""

    __slots__ = ("_name", "_value", "done", "failed", "pieces")

    def __init__(self, name: str) -> None:
        self._name = name
        self._value: JsonValue | None = None
        self.pieces: list[Piece] = []
        self.done = False
        self.failed = False

    def feed(self, text: str, at: int) -> int:
        """Take ``text`` from ``at`` on and return where the call ended or failed, or the end of ``text``."""
        if self._value is None:
            if text[at] != "{":
                self.failed = True
                return at
            self._value = JsonValue()
            self.pieces.append(Piece(Kind.CALL, self._name))
        end = self._value.feed(text, at)
        self.pieces.append(Piece(Kind.ARGUMENTS, text[at:end]))
        self.done, self.failed = self._value.done, self._value.failed
        return end

    def raw(self) -> str:
        """Return nothing: all that is taken is in a piece."""
        return ""


_PYTHON_HEAD = re.compile(r"\s*(?P<name>[A-Za-z_][A-Za-z0-9_.]*)\s*\(")
_PYTHON_HEAD_BEGUN = re.compile(r"\s*(?:[A-Za-z_][A-Za-z0-9_.]*\s*)?")
_PYTHON_MARKS = re.compile(r"[()\[\]{}'\"]")
_PYTHON_STRING_MARKS = re.compile(r"[\\'\"]")
_JSON_NAMES: dict[str, Any] = {"true": True, "false": False, "null": None}


class PythonCall:
    """``f(x=1, y="a")`` with literal arguments, given by name. ``known`` are the only names there are."""

    __slots__ = ("_depth", "_escaped", "_known", "_length", "_name", "_parts", "_quote", "done", "failed", "pieces")

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self._parts: list[str] = []
        self._length = 0
        self._name: str | None = None
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self.pieces: list[Piece] = []
        self.done = False
        self.failed = False

    def feed(self, text: str, at: int) -> int:
        """Take ``text`` from ``at`` on and return where the call ended or failed, or the end of ``text``."""
        while at < len(text) and not self.done and not self.failed:
            at = self._head(text[at], at) if self._name is None else self._body(text, at)
        return at

    def raw(self) -> str:
        """Return the text that was taken and is in no piece."""
        return "".join(self._parts)

    def _head(self, character: str, at: int) -> int:
        text = self.raw() + character
        match = _PYTHON_HEAD.fullmatch(text)
        if match is not None and match["name"] in self._known:
            self._name = match["name"]
            self._depth = 1
        elif match is not None or len(text) > NAME_CHARS_MAX or not _PYTHON_HEAD_BEGUN.fullmatch(text):
            self.failed = True
            return at
        self._parts = [text]
        self._length = len(text)
        return at + 1

    def _body(self, text: str, at: int) -> int:
        """Read on to the parenthesis that closes the call; strings hide brackets."""
        begin = at
        size = min(len(text), at + PYTHON_CALL_CHARS_MAX - self._length)
        while at < size and self._depth:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            mark = (_PYTHON_STRING_MARKS if self._quote else _PYTHON_MARKS).search(text, at, size)
            if mark is None:
                at = size
                break
            at = mark.end()
            character = mark[0]
            if self._quote:
                if character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "'\"":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            else:
                self._depth -= 1
        self._parts.append(text[begin:at])
        self._length += at - begin
        if self._depth == 0:
            self._complete()
        elif self._length >= PYTHON_CALL_CHARS_MAX:
            self.failed = True
        return at

    def _complete(self) -> None:
        arguments = _python_arguments(self.raw().strip())
        if arguments is None:
            self.failed = True
            return
        assert self._name is not None, "the head was read"
        self.pieces += [Piece(Kind.CALL, self._name), Piece(Kind.ARGUMENTS, arguments)]
        self._parts.clear()
        self.done = True


def _python_arguments(call: str) -> str | None:
    """Return the arguments of a Python call as JSON, or ``None`` when they are not literals given by name."""
    try:
        tree = ast.parse(call, mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        values: dict[str, Any] = {}
        for keyword in tree.keywords:
            if keyword.arg is None:
                return None
            values[keyword.arg] = _literal(keyword.value)
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal; ``true``, ``false`` and ``null`` are taken as JSON means them."""
    if isinstance(node, ast.Name):
        if node.id not in _JSON_NAMES:
            raise ValueError(f"{node.id} is not a literal")
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(ast.literal_eval(key or node)): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
        }
    return ast.literal_eval(node)
