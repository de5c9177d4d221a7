"""A connection to one server of a plane that the event loop reads and writes by itself, without libzmq's thread.

Rules
    1. It connects, shakes hands (``poolgrid.transport.zmtp``) and tries again whenever that fails or the connection
       breaks, with the pauses of ``poolgrid.transport.reconnecting``.
    2. It is read and written as ``poolgrid.transport.stream_conversation`` says.
    3. The owner hears that the connection broke after it got all that had come, and not at all after ``close``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from poolgrid.process.tasks import detached
from poolgrid.transport.reconnecting import RECONNECT_MAX_MS, RECONNECT_MS
from poolgrid.transport.stream_conversation import StreamConversation
from poolgrid.transport.zmtp import Kind

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
"""For the connection and the handshake together: a host that is cut off answers nothing at all, and what is no server
of ours may accept and say nothing."""


class ClientOwner(Protocol):
    """Who is told what happens to a connection."""

    def on_connected(self) -> None:
        """Hear that messages may be sent, to a server that knows nothing yet."""
        ...

    def on_disconnected(self) -> None:
        """Hear that the connection broke, after all that came over it; it is tried again."""
        ...

    def on_refused(self, why: str) -> None:
        """Hear that what is there does not speak as it should; it is tried again."""
        ...


class StreamClient:
    """Connected, or being connected again."""

    def __init__(self, host: str, port: int, kind: Kind, owner: ClientOwner, hand_over: Callable[[Any], None]) -> None:
        """Begin to connect, on the running loop; ``hand_over`` gets each message."""
        self._host = host
        self._port = port
        self._kind = kind
        self._owner = owner
        self._hand_over = hand_over
        self.conversation: StreamConversation | None = None
        """The connection over which messages may be sent."""
        self._task = detached(self._keep_connected(), f"connection to {host}:{port}")

    def close(self) -> None:
        """End; nobody is told."""
        conversation, self.conversation = self.conversation, None
        if conversation is not None:
            conversation.abort()
        self._task.cancel()

    async def _keep_connected(self) -> None:
        pause_ms = RECONNECT_MS
        while True:
            conversation = StreamConversation(self._kind, self._hand_over)
            try:
                if await self._connect(conversation):
                    pause_ms = RECONNECT_MS
                    self.conversation = conversation
                    _tell(self._owner.on_connected)
                    conversation.begin()
                    await conversation.ended.wait()
                    self.conversation = None
                    _tell(self._owner.on_disconnected)
            finally:
                self.conversation = None
                conversation.abort()
            if conversation.fault:
                _tell(partial(self._owner.on_refused, conversation.fault))
            await asyncio.sleep(pause_ms / 1000)
            pause_ms = min(RECONNECT_MAX_MS, 2 * pause_ms)

    async def _connect(self, conversation: StreamConversation) -> bool:
        """Return whether the handshake with the server has succeeded."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().create_connection(lambda: conversation, self._host, self._port)
                await conversation.ready_or_ended.wait()
        except TimeoutError:
            conversation.fault = conversation.fault or (
                f"connecting: no handshake within {CONNECT_TIMEOUT_S:.0f} s; it is tried again"
            )
            return False
        except (OSError, ValueError):
            return False  # nobody is there, or no host has such a name; whoever wants this server says so
        return not conversation.ended.is_set()


def _tell(news: Callable[[], None]) -> None:
    """Tell the owner something; a failure there is logged, and the connection lives."""
    try:
        news()
    except Exception:
        log.exception("handling the news of a connection failed")
