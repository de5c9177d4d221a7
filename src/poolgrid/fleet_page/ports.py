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


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt that was sent to a worker, by which its conversation is told."""

    request_id: str
    path: bytes
    """Packed sequence hashes of its whole blocks."""
    block_size: int
    isl: int
    time_ms: int


class Part(msgspec.Struct):
    """What one of several processes alone knows of a fleet that all of them see: its own requests, its own queue."""

    values: dict[str, Any]
    requests: dict[str, Row]
    """The last ones, as rows of that table."""
    turns: list[Turn] = []
    """What came since its turns were asked for last."""
    next_turn: int = 0
    """What to ask for next time."""


class FleetSource(Protocol):
    """A router, as the fleet page sees it. All calls come from its event loop."""

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the columns of each table, without the key."""
        ...

    def begin(self) -> None:
        """Somebody looks from now on: begin to collect what is not kept anyway."""
        ...

    def end(self) -> None:
        """Nobody looks any more: let go of it."""
        ...

    async def look(self) -> Picture:
        """Return what there is to see now; others have their turn meanwhile."""
        ...

    async def request(self, request_id: str) -> dict[str, Any] | None:
        """Return why a request went where it went, and the times of its legs; ``None`` when nothing is kept of it."""
        ...

    async def reel(self, from_ms: int, to_ms: int, frames: int) -> bytes:
        """Return the pool between two wall-clock times as JSON, in so many frames. Raises ``RequestError``."""
        ...


class SharedFleetSource(FleetSource, Protocol):
    """A router that is one of several processes behind one port."""

    async def look(self, others: Sequence[Part] = ()) -> Picture:
        """Return what there is to see now, with the parts that others know."""
        ...

    def part(self, next_turn: int) -> Part:
        """Return what this process alone knows, with the turns from a number on; below 0 for none."""
        ...

    def learn(self, turns: Sequence[Turn]) -> None:
        """Take note of prompts that another process has sent."""
        ...

    def kept(self, request_id: str) -> bytes | None:
        """Return what this process keeps of a request; ``None`` when that is nothing."""
        ...

    async def complete(self, kept: bytes) -> dict[str, Any]:
        """Return what ``request`` does, of what this process or another one keeps."""
        ...
