"""A connection to one server of a plane, for messages of one frame, and who hears of it."""

from __future__ import annotations

from typing import Protocol

from poolgrid.transport.stream_client import ClientOwner


class DealerOwner(ClientOwner, Protocol):
    """Who is told what happens to a connection."""

    def on_frame(self, frame: bytes) -> None:
        """Take a message."""
        ...


class Dealer(Protocol):
    """The connection."""

    def send(self, frame: bytes) -> bool:
        """Send without waiting; return False when there is no connection, or too much waits in it."""
        ...

    def flush(self) -> None:
        """Have what was sent leave now, and not at the end of this turn of the loop."""
        ...

    def close(self) -> None:
        """End; nobody is told."""
        ...
