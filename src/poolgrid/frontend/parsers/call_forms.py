"""The forms in which models write one tool call. Each reads a call from text that arrives in pieces.

``JsonCall``    ``{"name": "f", "arguments": {…}}``, keys in any order (hermes, llama3, granite, mistral)
``GivenCall``   the arguments alone (guided decoding towards one function)
``HeadedCall``  a head that names the function, then the arguments as a JSON object (mistral, deepseek v3, kimi)
``PythonCall``  ``f(x=1, y="a")`` (pythonic)

Rules
- A call is complete (``done``) or no call (``failed``) at the same character however the text was cut. ``left`` is then
  the text that belongs to it no more. All text before is the caller's to keep: it is content if the call failed.
- ``end`` reports that no text follows. A call whose arguments are complete needs none of its closing marks.
- Objects may be written as Python prints them (``json_value``).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import Any, Protocol

from poolgrid.frontend.parsers.json_value import JsonValue, json_of, strict_json

NAME_CHARS_MAX = 256
"""Longest name of a function; OpenAI allows 64."""

HEAD_CHARS_MAX = 2 * NAME_CHARS_MAX
"""Most text before the arguments of a ``HeadedCall``: a name and the markers around it."""

CALL_CHARS_MAX = 1024 * 1024
"""Longest call: it is held back until it is complete. A longer one is content."""

PYTHON_CALL_CHARS_MAX = 256 * 1024
"""Longest ``PythonCall``: its syntax tree takes about a hundred times as much memory."""


class CallForm(Protocol):
    """One call that is being read. ``name``, as the model wrote it, and ``arguments``, JSON, hold when ``done``."""

    name: str
    arguments: str
    left: str
    """When ``done`` or ``failed``: the text after the call, or from where it is none."""
    done: bool
    failed: bool

    def feed(self, text: str) -> None:
        """Take new text; not after ``done`` or ``failed``."""
        ...

    def end(self) -> None:
        """Become ``done`` or ``failed``: no text follows."""
        ...


def declared_name(written: str, declared: Collection[str]) -> str | None:
    """Return which declared function a model means, or ``None``.

    Ids of Kimi's calls are ``functions.NAME:N``. Clients clean them to letters, digits, ``_`` and ``-``, and the model
    repeats what it sees in its history.
    """
    bare = _PREFIX.sub("", written, count=1)
    for name in (written, bare, _NUMBER.sub("", written), _NUMBER.sub("", bare)):
        if name in declared:
            return name
    return None


_PREFIX = re.compile(r"^functions?[._:-]")
_NUMBER = re.compile(r"[._:-][0-9]+$")


_IGNORED_KEYS = frozenset(("id", "type", "index", "call_id", "tool_call_id"))


class JsonCall:
    """``{"name": …, "arguments": {…}}``.

    ``parameters`` is taken for ``arguments``; arguments may also be an object inside a string, ``null`` or absent
    (then ``{}``). Ids and types are ignored; an object with any other key is no call, for its arguments may be there.
    The last brace may be missing before a marker or the end.
    """

    __slots__ = (
        "_expect", "_given", "_key", "_named", "_parts", "_value", "arguments", "done", "failed", "left", "name",
    )  # fmt: skip

    def __init__(self) -> None:
        self._expect = "open"
        """A place between values (``open``, ``key or end``, ``colon``, ``value``, ``comma``), or which value is being
        read: ``a key``, ``the name``, ``the arguments``, ``another``."""
        self._key = ""
        self._named = False
        self._given = False
        self._value: JsonValue | None = None
        self._parts: list[str] = []
        """The text of the value that is being read."""
        self.name = ""
        self.arguments = "{}"
        self.left = ""
        self.done = False
        self.failed = False

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text) and not self.done and not self.failed:
            value = self._value
            if value is None:
                at = self._structure(text[at], at)
                continue
            end = value.feed(text, at)
            if self._expect != "another":
                self._parts.append(text[at:end])
            at = end
            if value.failed:
                self.failed = True
            elif value.done:
                self._value = None
                self._value_ended()
        self.left = text[at:]

    def end(self) -> None:
        self.done = self._lacks_only_its_end()
        self.failed = not self.done

    def _lacks_only_its_end(self) -> bool:
        return self._expect == "comma" and self._named and self._given

    def _structure(self, character: str, at: int) -> int:
        expect = self._expect
        if character in " \t\n\r":
            pass
        elif expect == "open" and character == "{":
            self._expect = "key or end"
        elif expect == "key or end" and character in "\"'":
            self._begin("a key")
            return at
        elif expect == "colon" and character == ":":
            self._expect = "value"
        elif expect == "value":
            self._begin_value(character)
            return at
        elif expect == "comma" and character == ",":
            self._expect = "key or end"
        elif expect in ("comma", "key or end") and character == "}":
            self.done = self._named
            self.failed = not self._named
        elif character == "<" and self._lacks_only_its_end():
            self.done = True
            return at
        else:
            self.failed = True
            return at
        return at + 1

    def _begin(self, expect: str) -> None:
        self._value = JsonValue(python=True)
        self._expect = expect
        self._parts = []

    def _begin_value(self, character: str) -> None:
        if self._key == "name":
            self.failed = self._named or character not in "\"'"
            self._begin("the name")
        elif self._key in ("arguments", "parameters"):
            self.failed = self._given or character not in "{\"'nN"
            self._begin("the arguments")
        else:
            self.failed = self._key not in _IGNORED_KEYS
            self._begin("another")

    def _value_ended(self) -> None:
        expect = self._expect
        self._expect = "comma"
        if expect == "another":
            return
        text = strict_json("".join(self._parts))
        if expect == "a key":
            self._key = json.loads(text)
            self._expect = "colon"
        elif expect == "the name":
            self.name = json.loads(text)
            self._named = True
            self.failed = not 1 <= len(self.name) <= NAME_CHARS_MAX
        else:
            found = _object(text)
            self.arguments = found or ""
            self._given = True
            self.failed = found is None


def _object(text: str) -> str | None:
    """Return the JSON text of the object that ``text`` (JSON) is, or holds in a string; ``null`` is an empty one."""
    if text.startswith("{"):
        return text
    value = json.loads(text)
    if value is None:
        return "{}"
    inner = JsonValue(python=True)
    stripped = value.strip() if isinstance(value, str) else ""
    if not stripped.startswith("{") or inner.feed(stripped) != len(stripped) or not inner.done:
        return None
    return strict_json(stripped)


class _ArgumentsLast:
    """A call whose arguments are an object at its end."""

    __slots__ = ("_parts", "_value", "arguments", "done", "failed", "left", "name")

    def __init__(self, name: str = "") -> None:
        self._value: JsonValue | None = None
        self._parts: list[str] = []
        self.name = name
        self.arguments = ""
        self.left = ""
        self.done = False
        self.failed = False

    def end(self) -> None:
        """Become ``failed``: no text follows, and the arguments were not complete."""
        self.failed = True

    def _arguments(self, text: str) -> None:
        if self._value is None:
            self._value = JsonValue(python=True)
        end = self._value.feed(text)
        self._parts.append(text[:end])
        self.left = text[end:]
        self.done, self.failed = self._value.done, self._value.failed
        if self.done:
            self.arguments = strict_json("".join(self._parts))


class HeadedCall(_ArgumentsLast):
    """A head that ``pattern`` (with a group ``name``) matches whole, then the arguments as a JSON object.

    ``opener`` begins another call: a head that contains it is none.
    """

    __slots__ = ("_head", "_opener", "_pattern")

    def __init__(self, pattern: re.Pattern[str], opener: str) -> None:
        super().__init__()
        self._pattern = pattern
        self._opener = opener
        self._head = ""

    def feed(self, text: str) -> None:
        if self._value is not None:
            self._arguments(text)
            return
        text = self._head + text
        head = text[: HEAD_CHARS_MAX + 1].partition("{")[0]
        another = head.find(self._opener)
        if another >= 0 or len(head) > HEAD_CHARS_MAX:
            self.failed = True
            self.left = text[another if another >= 0 else HEAD_CHARS_MAX :]
        elif len(head) == len(text):
            self._head = head
        else:
            match = self._pattern.fullmatch(head)
            if match is None:
                self.failed = True
                self.left = text[len(head) :]
            else:
                self.name = match["name"]
                self._arguments(text[len(head) :])


class GivenCall(_ArgumentsLast):
    """The arguments of a call whose function is known beforehand."""

    __slots__ = ()

    def feed(self, text: str) -> None:
        if self._value is None and text[0] != "{":
            self.failed = True
            self.left = text
        else:
            self._arguments(text)


_PYTHON_HEAD = re.compile(r"\s*(?P<name>[A-Za-z_][A-Za-z0-9_.]*)\s*\(")
_PYTHON_HEAD_BEGUN = re.compile(r"\s*(?:[A-Za-z_][A-Za-z0-9_.]*\s*)?")
_PYTHON_MARKS = re.compile(r"[()\[\]{}'\"]")
_PYTHON_STRING_MARKS = re.compile(r"[\\'\"]")
_JSON_NAMES: dict[str, Any] = {"true": True, "false": False, "null": None}


class PythonCall:
    """``f(x=1, y="a")`` with literal arguments, given by name. ``known`` are the only names there are."""

    __slots__ = (
        "_depth", "_escaped", "_known", "_length", "_parts", "_quote", "arguments", "done", "failed", "left", "name",
    )  # fmt: skip

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self._parts: list[str] = []
        self._length = 0
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self.name = ""
        self.arguments = ""
        self.left = ""
        self.done = False
        self.failed = False

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text) and not self.done and not self.failed:
            at = self._body(text, at) if self._depth else self._head(text[at], at)
        self.left = text[at:]

    def end(self) -> None:
        """Become ``failed``: no text follows, and the call was not complete."""
        self.failed = True

    def _head(self, character: str, at: int) -> int:
        text = "".join(self._parts) + character
        match = _PYTHON_HEAD.fullmatch(text)
        if match is not None and declared_name(match["name"], self._known) is not None:
            self.name = match["name"]
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
        arguments = _python_arguments("".join(self._parts).strip())
        self.arguments = arguments or ""
        self.done = arguments is not None
        self.failed = not self.done


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
        return json_of(values)
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
