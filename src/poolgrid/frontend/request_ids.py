"""Names for requests: the client's own ``x-request-id`` where it is usable, and an id that no other request has.

The name is what answers and their headers show. The id (``poolgrid.wire.request_ids``) is what everything behind the
front end goes by: two requests that clients call the same, at once or through two routers, are two requests there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from poolgrid.wire.request_ids import SEPARATOR, internal_id, name_of

CLIENT_ID_CHARS_MAX: Final = 128
"""Half of what an identifier may have on the wire, which leaves room for what makes the id unique."""

_SANE: Final = re.compile(rb"[A-Za-z0-9._:-]{1,%d}" % CLIENT_ID_CHARS_MAX)
"""``~`` is not among them: it divides what the client chose from what it did not."""


class FreshName(str):
    """A name that the front end made, which is unique by itself."""

    __slots__ = ()


class RequestIds:
    """Makes the request ids of one process. ``prefix`` distinguishes processes (random, chosen by the shell)."""

    def __init__(self, prefix: str) -> None:
        if not prefix[:1].isalpha() or SEPARATOR in prefix:
            raise ValueError(f"making request ids: prefix is {prefix!r}, it must begin with a letter and have no '~'")
        self._prefix = prefix
        self._count = 0

    def wanted(self, header: bytes | None) -> str:
        """Return the client's name when it is sane (letters, digits, ``._:-``, at most 128), else a fresh one."""
        if header is not None and _SANE.fullmatch(header):
            return header.decode("ascii")
        self._count += 1
        return FreshName(self._unique_part())

    def of_sequences(self, wanted: str, sequences: int) -> list[str]:
        """Return ids for the sequences of a request: of ``<name>`` for one, of ``<name>-<i>`` for several."""
        if sequences == 1 and isinstance(wanted, FreshName):
            return [str(wanted)]
        names = [str(wanted)] if sequences == 1 else [f"{wanted}-{index}" for index in range(sequences)]
        if isinstance(wanted, FreshName):
            return names
        unique = self._unique()
        return [internal_id(name, unique) for name in names]

    def _unique(self) -> str:
        self._count += 1
        return self._unique_part()

    def _unique_part(self) -> str:
        return f"{self._prefix}{self._count:x}"


def base_name(request_ids: Sequence[str]) -> str:
    """Return what the client calls the request of these sequences."""
    name = name_of(request_ids[0])
    return name if len(request_ids) == 1 else name.removesuffix("-0")
