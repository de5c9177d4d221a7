"""A DEALER's connection to one server, kept by the event loop itself (``poolgrid.transport.stream_client``)."""

from __future__ import annotations

from typing import Final

from poolgrid.transport.dealer import DealerOwner
from poolgrid.transport.stream_client import StreamClient
from poolgrid.transport.zmtp import DEALER, framed, long_header

JOINED_BYTES_MAX: Final = 8 * 1024
"""Longest frame that is copied behind its header; handing both to the kernel by themselves costs as much."""


class StreamDealer(StreamClient):
    """Connected, or being connected again."""

    def __init__(self, host: str, port: int, owner: DealerOwner) -> None:
        super().__init__(host, port, DEALER, owner, owner.on_frame)

    def send(self, frame: bytes) -> bool:
        """Send without waiting; return False when there is no connection, or too much waits in it."""
        conversation = self.conversation
        if conversation is None or conversation.is_full:
            return False
        size = len(frame)
        if size > JOINED_BYTES_MAX:
            conversation.send_long(long_header(size), frame)
        else:
            conversation.send(framed(frame))
        return True

    def flush(self) -> None:
        """Have what was sent leave now, and not at the end of this turn of the loop."""
        if self.conversation is not None:
            self.conversation.flush()
