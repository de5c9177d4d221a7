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
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

import msgspec

from poolgrid.frontend.parsers.pieces import CODE_OUTSIDE, Brackets, json_of, strict_json

NAME_CHARS_MAX = 256
"""Longest name of a function; OpenAI allows 64."""

HEAD_CHARS_MAX = 2 * NAME_CHARS_MAX
"""Most text before the arguments of a ``HeadedCall``: a name and the markers around it."""

CALL_CHARS_MAX = 1024 * 1024
"""Longest call: it is held back until it is complete. A longer one is content."""

PYTHON_CALL_CHARS_MAX = 256 * 1024
"""Longest ``PythonCall``: its syntax tree takes about a hundred times as much memory."""


class CallForm(ABC):
    """One call that is being read. ``name``, as the model wrote it, and ``arguments``, JSON, hold when ``done``."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.arguments = ""
        self.left = ""
        """When ``done`` or ``failed``: the text after the call, or from where it is none."""
        self.done = False
        self.failed = False

    @abstractmethod
    def feed(self, text: str) -> None:
        """Take new text; not after ``done`` or ``failed``."""

    def end(self) -> None:
        """Become ``done`` or ``failed``: no text follows. Most calls were not complete then."""
        self.failed = True


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


class _BodyLast(CallForm):
    """A call that ends with a value in brackets: ``_body`` takes its text, ``_complete`` gets all of it."""

    def __init__(self, name: str = "") -> None:
        super().__init__(name)
        self._brackets: Brackets | None = None
        self._parts: list[str] = []

    def _body(self, text: str) -> None:
        if self._brackets is None:
            self._brackets = Brackets()
        end = self._brackets.feed(text)
        self._parts.append(text[:end])
        self.left = text[end:]
        if self._brackets.done:
            self._complete("".join(self._parts))
        self.failed = self.failed or self._brackets.failed

    def _complete(self, text: str) -> None:
        found = strict_json(text)
        self.arguments = found or ""
        self.done, self.failed = found is not None, found is None


class GivenCall(_BodyLast):
    """The arguments of a call whose function is known beforehand."""

    def feed(self, text: str) -> None:
        if self._brackets is None and text[0] != "{":
            self.failed = True
            self.left = text
        else:
            self._body(text)


_IGNORED_KEYS = frozenset(("id", "type", "index", "call_id", "tool_call_id"))
_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
_KEYS = _IGNORED_KEYS | _ARGUMENT_KEYS | {"name"}
_FIRST_KEY = re.compile(r"""\{\s*(["'])(?P<key>[^"'\\]*)\1\s*:""")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class JsonCall(GivenCall):
    """``{"name": …, "arguments": {…}}``.

    ``parameters`` is taken for ``arguments``; arguments may also be an object inside a string, ``null`` or absent
    (then ``{}``). Ids and types are ignored; an object with any other key is no call, for its arguments may be there.
    The last brace may be missing before a marker or the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._begun = False
        """Whether the first key is known, and one of a call's: what begins otherwise is not held back to its end."""

    def feed(self, text: str) -> None:
        if not self._begun:
            text = "".join(self._parts) + text
            first = _FIRST_KEY.match(text[:HEAD_CHARS_MAX])
            if first is not None and first["key"] not in _KEYS:
                self.failed = True
                self.left = text[first.end() :]
                return
            self._begun = first is not None or len(text) >= HEAD_CHARS_MAX
            self._brackets = None
            self._parts.clear()
        super().feed(text)
        if self.failed and not self.done and self.left.startswith("<"):
            self._without_its_end()

    def end(self) -> None:
        self._without_its_end()

    def _without_its_end(self) -> None:
        self._read("".join(self._parts) + "}", needs_arguments=True)

    def _complete(self, text: str) -> None:
        self._read(text)

    def _read(self, text: str, needs_arguments: bool = False) -> None:
        self.failed = True
        try:
            fields = _fields.decode(strict_json(text) or "null")
            name = json.loads(bytes(fields.get("name", b"null")))
        except (msgspec.DecodeError, ValueError):
            return
        given = fields.keys() & _ARGUMENT_KEYS
        if not fields.keys() <= _KEYS or len(given) > 1 or (needs_arguments and not given):
            return
        if not isinstance(name, str) or not 1 <= len(name) <= NAME_CHARS_MAX:
            return
        found = _object(bytes(fields[given.pop()]).decode()) if given else "{}"
        if found is not None:
            self.name, self.arguments = name, found
            self.done, self.failed = True, False


def _object(text: str) -> str | None:
    """Return the JSON text of the object that ``text`` (JSON) is, or holds in a string; ``null`` is an empty one."""
    if text.startswith("{"):
        return text
    value = json.loads(text)
    stripped = "{}" if value is None else value.strip() if isinstance(value, str) else ""
    return strict_json(stripped) if stripped.startswith("{") else None


class HeadedCall(_BodyLast):
    """A head that ``pattern`` (with a group ``name``) matches whole, then the arguments as a JSON object.

    ``opener`` begins another call: a head that contains it is none.
    """

    def __init__(self, pattern: re.Pattern[str], opener: str) -> None:
        super().__init__()
        self._pattern = pattern
        self._opener = opener
        self._head = ""

    def feed(self, text: str) -> None:
        if self._brackets is not None:
            self._body(text)
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
                self._body(text[len(head) :])


_PYTHON_HEAD = re.compile(r"\s*(?P<name>[A-Za-z_][A-Za-z0-9_.]*)\s*\(")
_PYTHON_HEAD_BEGUN = re.compile(r"\s*(?:[A-Za-z_][A-Za-z0-9_.]*\s*)?")
_JSON_NAMES: dict[str, Any] = {"true": True, "false": False, "null": None}


class PythonCall(_BodyLast):
    """``f(x=1, y="a")`` with literal arguments, given by name. ``known`` are the only names there are."""

    def __init__(self, known: Collection[str]) -> None:
        super().__init__()
        self._known = known
        self._length = 0

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text) and self._brackets is None and not self.failed:
            at = self._head(text[at], at)
        if self._brackets is None or self.failed or at == len(text):
            self.left = text[at:]
            return
        end = at + PYTHON_CALL_CHARS_MAX - self._length
        self._body(text[at:end])
        self._length += len(text[at:end]) - len(self.left)
        self.left += text[end:]
        if self._length >= PYTHON_CALL_CHARS_MAX and not self.done:
            self.failed = True

    def _head(self, character: str, at: int) -> int:
        text = "".join(self._parts) + character
        match = _PYTHON_HEAD.fullmatch(text)
        if match is not None and declared_name(match["name"], self._known) is not None:
            self.name = match["name"]
            self._brackets = Brackets(CODE_OUTSIDE)
            self._brackets.feed("(")
        elif match is not None or len(text) > NAME_CHARS_MAX or not _PYTHON_HEAD_BEGUN.fullmatch(text):
            self.failed = True
            return at
        self._parts = [text]
        self._length = len(text)
        return at + 1

    def _complete(self, text: str) -> None:
        arguments = _python_arguments(text.strip())
        self.arguments = arguments or ""
        self.done, self.failed = arguments is not None, arguments is None


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
