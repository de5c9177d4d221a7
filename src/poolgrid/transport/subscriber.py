"""A subscription to what one server of a plane publishes under a topic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

OnMessages = Callable[[list[list[bytes]]], None]
"""Takes messages, each a list of frames."""


class Subscriber(Protocol):
    """The subscription. What is missed while there is no connection does not come again."""

    @property
    def has_more(self) -> bool:
        """Return whether messages are known to have come that were not handed over: others have their turn first."""
        ...

    def close(self) -> None:
        """End; nothing more is handed over."""
        ...
