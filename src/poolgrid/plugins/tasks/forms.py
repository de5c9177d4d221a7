"""Forms (``multipart/form-data``) read as JSON, in time in proportion to their bytes.

Rules
    1. What delimits fields is searched for in one pass. A field's head is ``HEAD_BYTES_MAX`` long at the most, so what
       is done with it is bounded whatever is in it.
    2. Of a head the name counts, and whether there is a file name.
"""

from __future__ import annotations

import base64
import re
from typing import Any, Final

import msgspec

from poolgrid.server.forwarding.multipart import boundary_of, read_part_head
from poolgrid.server.frontend.errors import RequestError, invalid, quoted

FIELDS_MAX: Final = 64
"""Fields of a form: three times as many as there are."""

HEAD_BYTES_MAX: Final = 1024
"""Of a field: a name, a file name of 255 bytes and a content type take half of it."""

CONTENT_TYPE_BYTES_MAX: Final = 512
"""Of the form: a boundary has up to 70."""

_NUMBER: Final = re.compile(r"-?\d{1,19}(\.\d{1,19})?")
_TEXTS: Final = frozenset({"model", "prompt", "negative_prompt", "seconds", "size"})
"""Fields that stay texts, whatever they look like."""


def read_form(raw: bytes, content_type: bytes) -> bytes:
    """Return a form as JSON; a file is base64, and ``a[b]`` is the field ``b`` of the object ``a``.

    Raises ``RequestError``.
    """
    boundary = boundary_of(content_type[:CONTENT_TYPE_BYTES_MAX])
    parts = [] if boundary is None else raw.split(b"--" + boundary, FIELDS_MAX + 1)
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise RequestError(
            400,
            "invalid_form",
            f"reading the request body ({len(raw)} bytes): it is not a form of up to {FIELDS_MAX} fields",
        )
    found: dict[str, Any] = {}
    for part in parts[1:-1]:
        end = part.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
        if end < 0:
            raise RequestError(
                400,
                "invalid_form",
                f"reading the request body: the head of a field of the form is longer than {HEAD_BYTES_MAX} bytes, or "
                "has no end",
            )
        name, is_file = read_part_head(part[:end])
        if not name:
            raise RequestError(400, "invalid_form", "reading the request body: a field of the form has no name")
        data = part[end + 4 :].removesuffix(b"\r\n")
        value: Any
        if is_file:
            value = base64.b64encode(data).decode()
        else:
            value = data.decode(errors="replace")
            if name not in _TEXTS and _NUMBER.fullmatch(value):
                value = float(value) if "." in value else int(value)
            elif name in ("extra_params", "nvext"):
                value = _json(name, value)
        outer, bracket, inner = name.partition("[")
        if bracket:
            inside = found.setdefault(outer, {})
            if isinstance(inside, dict):
                inside[inner.removesuffix("]")] = value
        else:
            found[name] = value
    return msgspec.json.encode(found)


def _json(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise invalid(name, f"{name} is {quoted(text)}: allowed is a JSON object") from None
