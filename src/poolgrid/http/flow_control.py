"""When a connection is read: uvicorn's flow control, and a word of ours in it."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl


class Reading(FlowControl):
    """uvicorn's flow control, which endpoints resume as they like, with a word of ours in it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        """Read what comes over a transport."""
        super().__init__(transport)
        self.blocked = False
        """Nothing is read, whoever asks for it."""
        self.full = False
        """The endpoint has enough for now."""

    def block(self) -> None:
        """Stop reading until it is released."""
        self.blocked = True
        super().pause_reading()

    def release(self) -> None:
        """Read again, unless the endpoint has enough."""
        self.blocked = False
        if not self.full:
            super().resume_reading()

    def pause_reading(self) -> None:
        """Stop reading until the endpoint wants more."""
        self.full = True
        super().pause_reading()

    def resume_reading(self) -> None:
        """Read again, unless it is blocked."""
        self.full = False
        if not self.blocked:
            super().resume_reading()
