"""Names for requests: unique among those in flight here, and the client's own ``x-request-id`` when it is usable.

A proxy that retries sends the same ``x-request-id`` twice. The second becomes ``<id>.<number>`` while the first is
in flight, because two requests of one name could not be told apart behind the router.
"""

from __future__ import annotations

import re

CLIENT_ID_CHARS_MAX = 128
"""Half of what an identifier may have on the wire, which leaves room for the suffix of a choice."""

_SANE = re.compile(rb"[A-Za-z0-9._:~-]{1,%d}" % CLIENT_ID_CHARS_MAX)


class RequestIds:
    """The request ids in flight of one process. ``prefix`` tells processes apart (random, chosen by the shell)."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._count = 0
        self._active: set[str] = set()

    def wanted(self, header: bytes | None) -> str:
        """Return the client's id when it is sane (letters, digits, ``._:~-``, at most 128), else a fresh one."""
        if header is not None and _SANE.fullmatch(header):
            return header.decode("ascii")
        self._count += 1
        return f"{self._prefix}{self._count:x}"

    def claim(self, wanted: str, sequences: int) -> list[str]:
        """Reserve ids for the sequences of a request: ``<id>`` for one, ``<id>-<i>`` for several."""
        base = wanted
        while True:
            ids = [base] if sequences == 1 else [f"{base}-{index}" for index in range(sequences)]
            if self._active.isdisjoint(ids):
                self._active.update(ids)
                return ids
            self._count += 1
            base = f"{wanted}.{self._count:x}"

    def release(self, ids: list[str]) -> None:
        """Give ids back once their streams have ended."""
        self._active.difference_update(ids)

    def __len__(self) -> int:
        return len(self._active)
