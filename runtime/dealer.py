"""A connection to one server of a plane, for messages of one frame, and who hears of it."""

from __future__ import annotations

from typing import Protocol


class DealerOwner(Protocol):
    """Who is told what happens to a connection."""

    def on_frame(self, frame: bytes) -> None:
        """Take a message."""
        ...

    def on_connected(self) -> None:
        """Hear that messages may be sent, to a server that knows nothing yet."""
        ...

    def on_disconnected(self) -> None:
        """Hear that the connection broke, after all that came over it; it is tried again."""
        ...

    def on_refused(self, why: str) -> None:
        """Hear that what is there does not speak as it should; it is tried again."""
        ...


class Dealer(Protocol):
    """The connection."""

    def send(self, frame: bytes) -> bool:
        """Send without waiting; return False when there is no connection, or too much waits in it."""
        ...

    def close(self) -> None:
        """End; nobody is told."""
        ...
