"""The journal in a JetStream stream, as a router follows it."""

from __future__ import annotations

import logging
from typing import Any

from poolgrid.consolidator.core.loading_table import LoadingTable
from poolgrid.consolidator.ports import PoolListener
from poolgrid.consolidator.stream.follower import StreamFollower
from poolgrid.consolidator.stream.ports import FollowedStream
from poolgrid.nats.nats_connection import NatsConnection
from poolgrid.nats.nats_leader import LOADING_KEY, LeaderWatch, told_subject
from poolgrid.process.clock import Clock
from poolgrid.wire import codec
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.loading import LoadingWorker

log = logging.getLogger(__name__)

SILENCE_MS = 2500.0
"""How long NATS may be out of reach, or nobody write the journal, before that is worth a word."""


class NatsFeed:
    """Implements ``poolgrid.router.feeds.JournalFeed``: no consolidator is asked for anything."""

    def __init__(
        self, connection: NatsConnection, stream: FollowedStream, clock: Clock, blocks_per_worker_max: int
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._clock = clock
        self._blocks_per_worker_max = blocks_per_worker_max
        self._loading = LoadingTable()
        self._follower: StreamFollower | None = None
        self._watch = LeaderWatch(connection, self._on_leader)
        self._led_ms = clock.monotonic_ms()
        """Since when nobody writes the journal, while nobody does."""

    async def start(self, listener: PoolListener) -> None:
        """Follow; returns when the first snapshot was delivered, however long NATS and a consolidator take to come."""
        await self._connection.open()
        await self._watch.start()
        subject = told_subject(self._connection.pool, LOADING_KEY)
        await self._connection.client.subscribe(subject, cb=self._on_loading)
        self._follower = StreamFollower(self._stream, listener, self._clock, self._blocks_per_worker_max)
        await self._follower.start()
        await self._follower.wait_synced()

    def resync(self) -> None:
        """Ask for a snapshot."""
        if self._follower is not None:
            self._follower.resync()

    def trouble(self, now_ms: float) -> str:
        """Return why the state may not be current, in words; empty when all is well."""
        away_ms = self._connection.out_of_reach_ms(now_ms)
        if away_ms > SILENCE_MS:
            return f"NATS has been out of reach for {away_ms / 1000:.0f} s: what workers say is not known here"
        if self._watch.leader is None and not away_ms and now_ms - self._led_ms > SILENCE_MS:
            return (
                f"no consolidator of the pool has been active for {(now_ms - self._led_ms) / 1000:.0f} s: what workers "
                "say waits with them"
            )
        return ""

    def loading(self) -> list[LoadingWorker]:
        return self._loading.workers(self._clock.monotonic_ms())

    def behind(self) -> int:
        return self._follower.behind() if self._follower is not None else 0

    async def stop(self) -> None:
        """Stop following."""
        await self._watch.stop()
        if self._follower is not None:
            await self._follower.stop()
        await self._connection.close()

    async def _on_loading(self, message: Any) -> None:
        try:
            self._loading.replace(codec.loading_workers.decode(message.data).workers, self._clock.monotonic_ms())
        except DecodeError as error:
            log.debug("what was told of workers that load does not decode: %s", error)

    def _on_leader(self, _: object) -> None:
        self._led_ms = self._clock.monotonic_ms()
