"""What this process does while a test listens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class AuditEvents:
    """Audit events of a kind; hooks cannot be removed, so there is one for good."""

    def __init__(self, heard_of: Callable[[str, tuple[object, ...]], str | None]) -> None:
        """``heard_of`` returns what is noted of an event; ``None`` = nothing."""
        self._heard_of = heard_of
        self._listening: list[str] | None = None
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._listening is not None and (noted := self._heard_of(event, arguments)) is not None:
            self._listening.append(noted)

    @contextmanager
    def listening(self) -> Iterator[list[str]]:
        heard: list[str] = []
        self._listening = heard
        try:
            yield heard
        finally:
            self._listening = None
