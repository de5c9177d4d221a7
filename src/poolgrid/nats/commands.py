"""A journal in a JetStream stream as commands read it: ``nats://HOST:PORT/POOL`` in place of a directory."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from poolgrid.nats.connection import NatsConnection
from poolgrid.nats.history import StreamDirectory
from poolgrid.nats.jetstream import (
    JetStreamJournal,
    ThreadedStream,
)
from poolgrid.nats.leader import read_leader
from poolgrid.process.clock import SystemClock
from poolgrid.process.nats_settings import EventPlaneSettings
from poolgrid.process.tasks import wait_from_thread

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
"""How long a command waits for a server that does not answer; services wait without limit."""

CLOSE_TIMEOUT_S = 2.0

FROM_ENVIRONMENT = ("nats_credentials", "nats_tls_ca", "nats_tls_certificate", "nats_tls_key")
"""Settings that are the same for every pool of an account: commands take them where services find them."""


class CommandConnection:
    """A connection of a command, on a loop of its own; both end with the process."""

    def __init__(self, text: str, environment: Callable[[str], str | None]) -> None:
        """Raises ``ValueError`` for an address that is none, ``OSError`` when nothing answers there."""
        self.url, _, pool = text.rpartition("/")
        if "://" not in self.url:
            self.url, pool = text, "default"
        given: dict[str, Any] = {name: value for name in FROM_ENVIRONMENT if (value := environment(name)) is not None}
        settings = EventPlaneSettings(
            event_plane="nats",
            nats_url=(self.url,),
            nats_pool=pool,
            **given,
        )
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True, name="NATS").start()
        self.nats = NatsConnection(settings, "poolgrid journal", SystemClock())
        # Also at the end of the process, if it is kept that long.
        end = weakref.finalize(self, _end, self.loop, self.nats)
        try:
            self.wait(self._open(), CONNECT_TIMEOUT_S + CLOSE_TIMEOUT_S)
        except BaseException as error:
            end()
            if isinstance(error, TimeoutError):
                raise OSError(f"no NATS server answers at {self.url} within {CONNECT_TIMEOUT_S:g} s") from None
            raise

    async def _open(self) -> None:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await self.nats.open()

    def wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        return wait_from_thread(self.loop, work, "journal in a stream", timeout_s)


class JournalInStream(StreamDirectory):
    """A pool's journal that is read by a command."""

    def __init__(self, text: str, environment: Callable[[str], str | None]) -> None:
        """Raises ``ValueError`` for an address that is none, ``OSError`` when nothing answers there."""
        self._connection = connection = CommandConnection(text, environment)
        stream = ThreadedStream(JetStreamJournal(connection.nats), connection.loop)
        if not stream.facts().last_sequence:
            raise ValueError(
                f"{connection.url} has no stream {stream.name}, or an empty one: no pool {connection.nats.pool!r} has "
                "its journal there"
            )
        super().__init__(stream)

    def is_in_use(self) -> bool:
        return self._connection.wait(read_leader(self._connection.nats), CONNECT_TIMEOUT_S)[1] is not None


def _end(loop: asyncio.AbstractEventLoop, connection: NatsConnection) -> None:
    try:
        wait_from_thread(loop, connection.close(), "end of the connection", CLOSE_TIMEOUT_S)
    except TimeoutError:
        pass  # the process, or another time-out, ends anyway
    loop.call_soon_threadsafe(loop.stop)
