"""What the fleet page needs from the router behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

Row = tuple[Any, ...]
"""Values of one row of a table, in the order of the table's columns."""


class Picture(msgspec.Struct):
    """What there is to see at one moment. It is not changed once it was handed over."""

    values: dict[str, Any]
    """Small things by name; each is sent whole when it differs from the one before."""
    tables: dict[str, dict[str, Row]]
    """Rows by table and key; rows that differ are sent."""


class FleetSource(Protocol):
    """A router, as the fleet page sees it. All calls come from its event loop."""

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the columns of each table, without the key."""
        ...

    def begin(self) -> None:
        """There are viewers from now on: begin to collect what is not kept anyway."""
        ...

    def end(self) -> None: ...

    async def look(self) -> Picture:
        """Return what there is to see now; others have their turn meanwhile."""
        ...

    async def request(self, request_id: str) -> dict[str, Any] | None:
        """Return why a request went where it went, and the times of its legs; ``None`` when nothing is kept of it."""
        ...

    async def reel(self, from_ms: int, to_ms: int, frames: int) -> bytes:
        """Return the pool between two wall-clock times as JSON, in so many frames. Raises ``RequestError``."""
        ...
