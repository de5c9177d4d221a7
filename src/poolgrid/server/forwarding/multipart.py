"""The model that an upload or a query names.

``FormFields`` reads a ``multipart/form-data`` body as it streams in and keeps a few small fields. Files are passed over
by searching for the boundary.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import parse_qsl

MAX_PARTS: Final = 128
"""Parts that are read. Uploads have a dozen; each costs 5 us."""

MAX_PART_HEAD_BYTES: Final = 8192
"""Of the header lines of a part, as much as common servers take of one line."""

MAX_VALUE_BYTES: Final = 1024
"""Of a field that is kept. Longer ones are no model's name."""

MAX_QUERY_FIELDS: Final = 128
"""Parameters of a query that are read."""

WANTED: Final = frozenset({"model", "stream", "response_format"})

_BOUNDARY = re.compile(rb'multipart/form-data\b.*?;\s*boundary=(?:"([^"]{1,70})"|([^\s";,]{1,70}))', re.I | re.DOTALL)
_DISPOSITION = re.compile(rb"(?:^|\r\n)content-disposition:[ \t]*form-data[ \t]*(?=;)", re.I)
_PARAMETER = re.compile(rb'[ \t]*;[ \t]*([^\s=;"]+)=(?:"((?:[^"\\\r\n]|\\.)*)"|([^\s;"]*))')
_DELIMITER_END = re.compile(rb"[ \t]*+\r\n")
_DELIMITER_OPEN = re.compile(rb"(?:-|[ \t]*+\r?)\Z")


def boundary_of(content_type: bytes) -> bytes | None:
    """Return the boundary of a form, or ``None`` where the body is none."""
    found = _BOUNDARY.match(content_type.strip())
    return None if found is None else (found[1] or found[2])


def model_of_query(query: bytes) -> str | None:
    """Return the parameter ``model``, the last one as servers take it."""
    try:
        found = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS)
    except ValueError:
        return None
    return dict(found).get("model")


class FormFields:
    """Reads one form. Repeated fields: the last one counts, as servers take it."""

    def __init__(self, boundary: bytes) -> None:
        self.values: dict[str, str] = {}
        """Of the wanted fields that have come."""
        self.is_done = False
        """The form has ended, is malformed, or is beyond a bound."""
        self.has_end = False
        """The form has ended: all of its fields were read."""
        self._delimiter = b"\r\n--" + boundary
        self._rest = b"\r\n"
        """What has come and is not read; the body begins as if behind a line."""
        self._parts = 0
        self._field: str | None = None
        """The wanted field whose value comes."""
        self._is_in_head = False

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the body."""
        if self.is_done:
            return
        self._rest += data
        while not self.is_done and (self._read_head() if self._is_in_head else self._read_value()):
            pass
        if self.is_done:
            self._rest = b""

    def _read_value(self) -> bool:
        """Read to the next delimiter; return whether it has come."""
        at = 0
        while (at := self._rest.find(self._delimiter, at)) >= 0:
            end = at + len(self._delimiter)
            if self._rest.startswith(b"--", end):
                self._keep(self._rest[:at])
                self.is_done = self.has_end = True
                return False
            line = _DELIMITER_END.match(self._rest, end)
            if line is not None:
                self._keep(self._rest[:at])
                self._rest, self._is_in_head = b"\r\n" + self._rest[line.end() :], True
                self._parts += 1
                self.is_done = self._parts > MAX_PARTS
                return True
            if _DELIMITER_OPEN.match(self._rest, end):
                # Whether this is a delimiter is not known yet.
                self._drop_value(at)
                self.is_done = len(self._rest) > MAX_PART_HEAD_BYTES
                return False
            at += 1
        self._drop_value(max(0, len(self._rest) - len(self._delimiter)))
        return False

    def _drop_value(self, end: int) -> None:
        """Of a value that is not kept, only what may be the beginning of a delimiter is needed."""
        if self._field is not None and end > MAX_VALUE_BYTES:
            self._field = None
        if self._field is None:
            self._rest = self._rest[end:]

    def _read_head(self) -> bool:
        """Read the header lines of a part; return whether they have come."""
        end = self._rest.find(b"\r\n\r\n")
        if end < 0:
            self.is_done = len(self._rest) > MAX_PART_HEAD_BYTES
            return False
        self._field = _wanted_field(self._rest[:end])
        self._rest, self._is_in_head = self._rest[end + 4 :], False
        return True

    def _keep(self, value: bytes) -> None:
        if self._field is not None and len(value) <= MAX_VALUE_BYTES:
            self.values[self._field] = value.decode("utf-8", "replace")
        self._field = None


class PartHead(NamedTuple):
    """What the header lines of a part name."""

    name: str
    """Of the field; empty where there is none."""
    is_file: bool
    """A file name is given, in either form (``filename``, ``filename*``)."""


def read_part_head(head: bytes) -> PartHead:
    """Read the header lines of a part. Folded lines and encoded names are not read: RFC 7578 has none."""
    found = _DISPOSITION.search(head)
    if found is None:
        return PartHead("", False)
    at, parameters = found.end(), {}
    while (parameter := _PARAMETER.match(head, at)) is not None:
        quoted = parameter[2]
        value = parameter[3] if quoted is None else re.sub(rb"\\(.)", rb"\1", quoted)
        parameters[parameter[1].lower()] = value
        at = parameter.end()
    name = parameters.get(b"name", b"").decode("utf-8", "replace")
    return PartHead(name, not parameters.keys().isdisjoint(_FILE_NAMES))


_FILE_NAMES: Final = (b"filename", b"filename*")


def _wanted_field(head: bytes) -> str | None:
    """The name of a field that is wanted and no file."""
    name, is_file = read_part_head(head)
    return name if name in WANTED and not is_file else None
