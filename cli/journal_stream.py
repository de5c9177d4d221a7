"""A journal in a JetStream stream as commands read it: ``nats://HOST:PORT/POOL`` in place of a directory."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

from poolgrid.cli.options import environment_name
from poolgrid.router.consolidator.adapters.jetstream import JetStreamJournal, ThreadedStream
from poolgrid.router.consolidator.stream.virtual_segments import StreamDirectory
from poolgrid.runtime.clock import SystemClock
from poolgrid.runtime.nats_connection import NatsConnection
from poolgrid.runtime.nats_leader import read_leader
from poolgrid.runtime.nats_settings import EventPlaneSettings
from poolgrid.runtime.tasks import wait_from_thread

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
"""How long a command waits for a server that does not answer; services wait for ever."""

CLOSE_TIMEOUT_S = 2.0

FROM_ENVIRONMENT = ("nats_credentials", "nats_nkey", "nats_tls_ca", "nats_tls_certificate", "nats_tls_key")
"""Settings that are the same for every pool of an account: commands take them where services find them."""


class JournalInStream(StreamDirectory):
    """A stream that is read by a command, on a connection that ends with the process."""

    def __init__(self, text: str) -> None:
        """Raises ``ValueError`` for an address that is none, ``OSError`` when nothing answers there."""
        url, _, pool = text.rpartition("/")
        if "://" not in url:
            url, pool = text, "default"
        given = {
            name: os.environ[environment_name(name)]
            for name in FROM_ENVIRONMENT
            if environment_name(name) in os.environ
        }
        settings = EventPlaneSettings(
            event_plane="nats",
            nats_url=(url,),
            nats_pool=pool,
            **given,
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="NATS").start()
        self._connection = NatsConnection(settings, "poolgrid journal", SystemClock())
        try:
            self._wait(self._connection.open(), CONNECT_TIMEOUT_S)
        except TimeoutError:
            raise OSError(f"no NATS server answers at {url} within {CONNECT_TIMEOUT_S:g} s") from None
        # Also at the end of the process, for whoever keeps it that long.
        weakref.finalize(self, _end, self._loop, self._connection)
        stream = ThreadedStream(JetStreamJournal(self._connection), self._loop)
        if not stream.facts().last_sequence:
            raise ValueError(
                f"{url} has no stream {stream.name}, or an empty one: no pool {pool!r} has its journal there"
            )
        super().__init__(stream)

    def is_in_use(self) -> bool:
        """Tell whether a consolidator writes this journal now."""
        return self._wait(read_leader(self._connection), CONNECT_TIMEOUT_S)[1] is not None

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        return wait_from_thread(self._loop, work, "journal in a stream", timeout_s)


def _end(loop: asyncio.AbstractEventLoop, connection: NatsConnection) -> None:
    try:
        wait_from_thread(loop, connection.close(), "end of the connection", CLOSE_TIMEOUT_S)
    except TimeoutError:
        pass  # the process, or somebody else's patience, ends anyway
    loop.call_soon_threadsafe(loop.stop)
