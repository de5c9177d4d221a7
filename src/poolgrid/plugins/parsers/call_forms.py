"""The forms in which models write one tool call. Each reads a call from text that arrives in pieces.

``JsonCall``    ``{"name": "f", "arguments": {…}}``, keys in any order, or ``{"f": {…}}``
``GivenCall``   the arguments alone (guided decoding towards one function)
``HeadedCall``  a head that names the function, then the arguments as an object
``PythonCall``  ``f(x=1, y="a")``
``tagged_call`` and ``element_call`` have those in tags.

Rules
- ``take`` returns the arguments as they become certain. A call of a function that is not declared has none.
- A call is complete (``done``) or no call (``failed``) at the same character however the text was cut. ``left`` is then
  the text that belongs to it no more.
- A call that fails before any argument was taken is none: its text is content. One that fails later stays a call, with
  the rest of its text as the model wrote it (``unread``), so that its arguments are no JSON.
- ``end`` reports that no text follows. A call whose arguments are complete needs none of its closing marks.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

from poolgrid.plugins.parsers.argument_types import Fitting
from poolgrid.plugins.parsers.markers import SPACE
from poolgrid.plugins.parsers.values import JSON, PYTHON, Notation, ValueReader, strict_json
from poolgrid.server.frontend.tool_use import NAME_CHARS_MAX

HEAD_CHARS_MAX = 2 * NAME_CHARS_MAX
"""Most text before the arguments of a ``HeadedCall``: a name and the markers around it."""

CALL_CHARS_MAX = 1024 * 1024
"""Longest text that is held back because it may be a call; longer text is content. Arguments that stream have none."""

Declared = Mapping[str, Mapping[str, Any]]
"""The functions that calls may be of, each with the JSON schema of its parameters."""


class CallForm(ABC):
    """One call that is being read. ``name`` is that of the declared function, as soon as it is known."""

    def __init__(self, declared: Declared) -> None:
        self._declared = declared
        self.name = ""
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

    @abstractmethod
    def take(self) -> str:
        """Return the arguments (JSON) that have become certain since this was last asked for."""

    @abstractmethod
    def unread(self) -> str:
        """Return what was fed since then and is no part of ``left``; asked for once, when the call failed."""

    def _named(self, written: str) -> bool:
        """Note the function that a model means; without one the call has failed."""
        name = declared_name(written, self._declared)
        self.name = name or ""
        self.failed = name is None
        return name is not None


class StatefulCall(CallForm):
    """A call with a buffer, and the state that takes from it next, as ``StatefulParser`` has them."""

    def __init__(self, declared: Declared, state: Callable[[Any], bool]) -> None:
        super().__init__(declared)
        self._state = state
        self._buffer = ""
        self._certain: list[str] = []

    def feed(self, text: str) -> None:
        self._buffer += text
        while self._buffer and not self.done and not self.failed and self._state(self):
            pass
        self.left = self._buffer

    def take(self) -> str:
        text = "".join(self._certain)
        self._certain.clear()
        return text

    def _skip_space(self) -> bool:
        """Drop white space and return whether anything follows it."""
        self._buffer = self._buffer.lstrip(SPACE)
        return bool(self._buffer)


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


def arguments_reader(schema: Mapping[str, Any], notation: Notation = JSON, in_call: bool = False) -> ValueReader:
    """Return a reader of the arguments of a function with this schema."""
    fitting = Fitting(schema)
    return ValueReader(notation, in_call=in_call, holds=fitting.holds, convert=fitting.converted)


class _ObjectLast(CallForm):
    """A call that ends with its arguments."""

    def __init__(self, declared: Declared) -> None:
        super().__init__(declared)
        self._reader: ValueReader | None = None

    def _read(self, text: str) -> None:
        assert self._reader is not None, "made when the arguments began"
        self._reader.feed(text)
        self.done, self.failed = self._reader.done, self._reader.failed
        if self.done or self.failed:
            self.left = self._reader.left

    def end(self) -> None:
        self.failed = True
        self.left = "" if self._reader is None else self._reader.left

    def take(self) -> str:
        return "" if self._reader is None else self._reader.take()

    def unread(self) -> str:
        return "" if self._reader is None else self._reader.unread()


class GivenCall(_ObjectLast):
    """The arguments of a call whose function is known beforehand."""

    def __init__(self, declared: Declared, name: str) -> None:
        super().__init__(declared)
        self.name = name

    def feed(self, text: str) -> None:
        if self._reader is None and text[0] != "{":
            self.failed = True
            self.left = text
            return
        if self._reader is None:
            self._reader = arguments_reader(self._declared.get(self.name, {}))
        self._read(text)


class HeadedCall(_ObjectLast):
    """A head that ``pattern`` (with a group ``name``) matches whole, then the arguments as an object.

    ``openers`` begin another call: a head that contains one is none.
    """

    def __init__(
        self, declared: Declared, pattern: re.Pattern[str], openers: Collection[str], notation: Notation = JSON
    ) -> None:
        super().__init__(declared)
        self._pattern = pattern
        self._openers = openers
        self._notation = notation
        self._head = ""

    def feed(self, text: str) -> None:
        if self._reader is not None:
            self._read(text)
            return
        text = self._head + text
        head = text[: HEAD_CHARS_MAX + 1].partition("{")[0]
        another = min((at for opener in self._openers if (at := head.find(opener)) >= 0), default=-1)
        if another >= 0 or len(head) > HEAD_CHARS_MAX:
            self.failed = True
            self.left = text[another if another >= 0 else HEAD_CHARS_MAX :]
        elif len(head) == len(text):
            self._head = head
        else:
            match = self._pattern.fullmatch(head)
            self.failed = match is None
            if match is None or not self._named(match["name"]):
                self.left = text[len(head) :]
                return
            self._reader = arguments_reader(self._declared[self.name], self._notation)
            self._read(text[len(head) :])


_CALL_BEGUN = re.compile(r"\s*(?:(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)\s*(?P<open>\()?)?")


class PythonCall(_ObjectLast):
    """``f(x=1, y="a")`` with literal arguments, given by name."""

    def __init__(self, declared: Declared) -> None:
        super().__init__(declared)
        self._head = ""

    def feed(self, text: str) -> None:
        if self._reader is not None:
            self._read(text)
            return
        self._head += text
        match = _CALL_BEGUN.match(self._head)
        assert match is not None, "the pattern matches nothing, too"
        rest = self._head[match.end() :]
        if match.end() > NAME_CHARS_MAX:
            self.failed = True
            self.left = self._head[NAME_CHARS_MAX + 1 :]
        elif match["open"] is None:
            self.failed = bool(rest)
            self.left = rest
        elif not self._named(match["name"]):
            self.left = rest
        if self.failed or match["open"] is None:
            return
        self._reader = arguments_reader(self._declared[self.name], PYTHON, in_call=True)
        self._read(rest)


IGNORED_KEYS = frozenset(("id", "type", "index", "call_id", "tool_call_id"))
NAME_KEYS = frozenset(("name", "tool_name"))
ARGUMENT_KEYS = frozenset(("arguments", "parameters"))


class JsonCall(StatefulCall):
    """``{"name": …, "arguments": {…}}``; ``keyed``: ``{"f": {…}}``.

    ``parameters`` is taken for ``arguments``; arguments may also be an object inside a string, ``null`` or absent
    (then ``{}``). Ids and types are ignored; an object with any other key is no call, for its arguments may be there.
    The last brace may be missing.
    """

    def __init__(self, declared: Declared, keyed: bool = False) -> None:
        super().__init__(declared, JsonCall._begin)
        self._keyed = keyed
        self._key = ""
        self._part: ValueReader | None = None
        """Reads a key, or a value that is no object of arguments."""
        self._text: list[str] = []
        """The JSON of that value."""
        self._arguments: ValueReader | None = None
        self._early = ""
        """Arguments that came before the name."""
        self._has_arguments = False

    def end(self) -> None:
        if self._has_arguments and self._state == JsonCall._after and self.name:
            self._complete()
        else:
            self.failed = True
            if self._state == JsonCall._read_arguments and self._arguments is not None:
                self._buffer = self._arguments.left
        self.left = self._buffer

    def take(self) -> str:
        if self._arguments is not None:
            self._certain.append(self._arguments.take())
        return super().take()

    def unread(self) -> str:
        return "" if self._arguments is None else self._arguments.unread()

    def _begin(self) -> bool:
        if self._buffer[0] != "{":
            self.failed = True
            return False
        self._buffer = self._buffer[1:]
        self._state = JsonCall._before_key
        return True

    def _before_key(self) -> bool:
        if not self._skip_space():
            return False
        if self._buffer[0] not in "\"'":
            if self._buffer[0] == "}" and self.name:
                self._buffer = self._buffer[1:]
                self._complete()
            else:
                self.failed = True
            return False
        self._read_part(JsonCall._read_key)
        return True

    def _read_part(self, state: Any) -> None:
        self._part = ValueReader()
        self._text.clear()
        self._state = state

    def _part_text(self) -> str | None:
        """Feed the buffer to the value that is being read, and return its JSON once it has ended."""
        part = self._part
        assert part is not None, "the states that read a value have made one"
        part.feed(self._buffer)
        self._text.append(part.take())
        self._buffer = part.left if part.done or part.failed else ""
        self.failed = part.failed
        return "".join(self._text) if part.done else None

    def _read_key(self) -> bool:
        text = self._part_text()
        if text is None:
            return False
        self._key = json.loads(text)
        begun = self._arguments is not None
        known = NAME_KEYS | ARGUMENT_KEYS | IGNORED_KEYS
        if not begun and not self._keyed and self._key not in known:
            self.failed = True
        elif self._keyed and not begun:
            self._named(self._key)
        self._state = JsonCall._colon
        return not self.failed

    def _colon(self) -> bool:
        if not self._skip_space():
            return False
        self.failed = self._buffer[0] != ":"
        if self.failed:
            return False
        self._buffer = self._buffer[1:]
        self._state = JsonCall._before_value
        return True

    def _before_value(self) -> bool:
        if not self._skip_space():
            return False
        is_arguments = self._keyed or self._key in ARGUMENT_KEYS
        if is_arguments and self._has_arguments:
            self.failed = True
        elif is_arguments and self._buffer[0] == "{" and self.name:
            self._arguments = arguments_reader(self._declared[self.name])
            self._has_arguments = True
            self._state = JsonCall._read_arguments
        else:
            self._read_part(JsonCall._read_early if is_arguments else JsonCall._read_value)
        return not self.failed

    def _read_arguments(self) -> bool:
        reader = self._arguments
        assert reader is not None, "made when the arguments began"
        reader.feed(self._buffer)
        self._buffer = reader.left if reader.done or reader.failed else ""
        self.failed = reader.failed
        if reader.done:
            self._state = JsonCall._after
        return reader.done

    def _read_value(self) -> bool:
        text = self._part_text()
        if text is None:
            return False
        if self._key in NAME_KEYS and not self.name:
            name = json.loads(text)
            if not isinstance(name, str) or not 1 <= len(name) <= NAME_CHARS_MAX or not self._named(name):
                self.failed = True
                return False
            if self._early:
                self._fit_early()
        self._state = JsonCall._after
        return not self.failed

    def _read_early(self) -> bool:
        """Arguments before the name, in a string, or none."""
        text = self._part_text()
        if text is None:
            return False
        found = _object(text)
        if found is None:
            self.failed = True
            return False
        self._has_arguments = True
        self._early = found
        if self.name:
            self._fit_early()
        self._state = JsonCall._after
        return not self.failed

    def _fit_early(self) -> None:
        self._arguments = arguments_reader(self._declared[self.name])
        self._arguments.feed(self._early)
        self.failed = not self._arguments.done
        self._early = ""

    def _after(self) -> bool:
        """After a member: another one, or the end, which may be missing."""
        if not self._skip_space():
            return False
        character = self._buffer[0]
        if character == ",":
            self._buffer = self._buffer[1:]
            self._state = JsonCall._before_key
        elif self.name and (character == "}" or (self._has_arguments and character == "<")):
            self._buffer = self._buffer.removeprefix("}")
            self._complete()
        else:
            self.failed = True
        return not self.failed and not self.done

    def _complete(self) -> None:
        if not self._has_arguments:
            self._certain.append("{}")
        self.done = True


def _object(text: str) -> str | None:
    """Return the JSON text of the object that ``text`` (JSON) is, or holds in a string; ``null`` is an empty one."""
    if text.startswith("{"):
        return text
    value = json.loads(text)
    stripped = "{}" if value is None else value.strip() if isinstance(value, str) else ""
    return strict_json(stripped) if stripped.startswith("{") else None
