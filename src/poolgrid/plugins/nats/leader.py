"""The leader of a pool as NATS keeps it: which process has the lease, how it is taken, renewed, followed and given
back.

Rules
    1. The lease is one entry of the pool's bucket, which goes ``lease_s`` after it was written last. It is written only
       behind the entry that its writer knows, so the server never gives it to two.
    2. Its holder renews it three times per lease. A holder that could not renew it for a whole lease has lost it,
       whatever the server answers later.
    3. A process that waits for it asks twice a second, so it is taken over at most ``lease_s`` + 1 s after its last
       renewal (the server looks for entries that are over once a second).
    4. The lease elects the writer; the sequence of the stream keeps two from writing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.ingest import Leader
from poolgrid.plugins.nats.bucket import NotLast, put
from poolgrid.plugins.nats.connection import NatsConnection, NatsUnavailable
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.tasks import Restart, cancel_all, supervised

log = logging.getLogger(__name__)

BUCKET = "poolgrid-{pool}"
KEY = "leader"

LEASE_S_MAX = 600
"""Longest lease that a consolidator may have (``leader_lease_ms``)."""

RENEWALS_PER_LEASE = 3

ASK_S = 0.5
"""How often a standby checks whether the lease is free."""

LOOK_S = 2.0
"""Silence after which a follower reads the entry itself: an expired one is not announced."""


def bucket_stream(pool: str) -> str:
    """Return the stream that a pool's bucket is."""
    return f"KV_{BUCKET.format(pool=pool)}"


def told_subject(pool: str, key: str) -> str:
    """Return the subject on which entries of the bucket are published once they are stored."""
    return f"poolgrid.{pool}.told.{key}"


def _subject(pool: str) -> str:
    return f"$KV.{BUCKET.format(pool=pool)}.{KEY}"


async def read_leader(connection: NatsConnection) -> tuple[int, Leader | None]:
    """Return the entry's number and its content; 0 and ``None`` when there is none, ``None`` when it was taken back.

    Raises ``NatsUnavailable``.
    """
    pool = connection.pool
    found = await connection.batch(bucket_stream(pool), {"multi_last": [_subject(pool)], "batch": 1})
    if not found:
        return 0, None
    return int(found[0].headers["Nats-Sequence"]), _decoded(found[0].headers, found[0].data)


def _decoded(headers: Mapping[str, str], data: bytes) -> Leader | None:
    if "KV-Operation" in headers or "Nats-Marker-Reason" in headers or not data:
        return None
    ttl_s = headers.get("Nats-TTL", "")
    if not ttl_s.isdecimal() or len(ttl_s) > len(str(LEASE_S_MAX)) or int(ttl_s) > LEASE_S_MAX:
        # It would keep every consolidator from writing until it is removed by hand.
        log.warning("the entry of the pool's leader does not expire as a lease does: it is taken for free")
        return None
    try:
        return codec.leader.decode(data)
    except DecodeError as error:
        log.warning("the entry of the pool's leader does not decode (%s): it is taken for free", error)
        return None


class LeaderLease:
    """The lease of one consolidator."""

    def __init__(self, connection: NatsConnection, consolidator_id: str, lease_s: int, clock: Clock) -> None:
        self._connection = connection
        self._leader = Leader(consolidator_id)
        self._lease_s = lease_s
        self._clock = clock
        self._number = 0
        self._renewing: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._renewed_ms = 0.0
        self.lost = asyncio.Event()
        """Set once the lease is another's, or could not be renewed in time."""

    async def take(self) -> None:
        """Wait until the lease is free and take it; then it is renewed until ``give_back``. Never gives up."""
        waiting_for = ""
        while True:
            try:
                self._number, leader = await read_leader(self._connection)
                if leader is None and await self._write(self._number):
                    break
                if leader is not None and leader.consolidator_id != waiting_for:
                    waiting_for = leader.consolidator_id
                    log.info("standing by: consolidator %s is active", waiting_for)
            except NatsUnavailable as error:
                log.debug("asking for the lease of the pool failed: %s", error)
            await asyncio.sleep(ASK_S)
        self.lost.clear()
        self._renewing = supervised(self._renew, "renewal of the pool's lease", Restart())

    async def announce(self, ingest: str, feed: str = "", query: str = "") -> None:
        """Publish where workers push and routers follow; each renewal publishes it again."""
        self._leader = Leader(self._leader.consolidator_id, ingest, feed, query)
        try:
            await self._try_renew()
        except (NatsUnavailable, TimeoutError) as error:
            log.warning("publishing the consolidator's addresses failed (%s): the next renewal has them", error)

    async def give_back(self) -> None:
        """Let another one have the lease at once."""
        if self._renewing is not None:
            await cancel_all([self._renewing])
            self._renewing = None
        if self.lost.is_set():
            return
        self.lost.set()
        try:
            # Read again: a renewal that was cut off just now may have been stored.
            number, leader = await read_leader(self._connection)
            if leader is None or leader.consolidator_id != self._leader.consolidator_id:
                return
            subject = _subject(self._connection.pool)
            await put(self._connection, subject, b"", {"KV-Operation": "DEL"}, after=number)
        except NatsUnavailable as error:
            log.warning("releasing the pool's lease failed (%s): it expires in %d s", error, self._lease_s)

    async def _renew(self) -> None:
        while not self.lost.is_set():
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            try:
                await self._try_renew()
            except (NatsUnavailable, TimeoutError) as error:
                log.warning("renewing the pool's lease failed: %s", error or "no answer in time")
            if self._clock.monotonic_ms() - self._renewed_ms > 1000 * self._lease_s:
                self._lose("it could not be renewed in time")

    async def _try_renew(self) -> None:
        async with asyncio.timeout(self._lease_s / RENEWALS_PER_LEASE), self._writing:
            if self.lost.is_set() or await self._write(self._number):
                return
            # An answer that was lost may have been a good one.
            number, leader = await read_leader(self._connection)
            if leader is not None and leader.consolidator_id == self._leader.consolidator_id:
                self._number = number
                return
            self._lose("another consolidator has it" if leader is not None else "it had run out")

    def _lose(self, why: str) -> None:
        if not self.lost.is_set():
            log.error("the lease of pool %s is lost: %s", self._connection.pool, why)
            self.lost.set()

    async def _write(self, number: int) -> bool:
        """Write the entry behind the one with a number; return whether that was still the last."""
        sent_ms = self._clock.monotonic_ms()
        subject, entry = _subject(self._connection.pool), codec.leader.encode(self._leader)
        try:
            self._number = await put(self._connection, subject, entry, ttl_s=self._lease_s, after=number)
        except NotLast:
            return False
        self._renewed_ms = sent_ms
        return True


class LeaderWatch:
    """The leader, for its followers."""

    def __init__(self, connection: NatsConnection, on_change: Callable[[Leader | None], None]) -> None:
        self._connection = connection
        self._on_change = on_change
        self._looking: asyncio.Task[None] | None = None
        self._heard = asyncio.Event()
        self._asks = True
        self.leader: Leader | None = None

    async def start(self) -> None:
        async def heard(message: Any) -> None:
            self._note(_decoded(message.headers or {}, message.data))
            self._heard.set()

        pool = self._connection.pool
        await self._connection.client.subscribe(told_subject(pool, KEY), cb=heard)
        self._connection.on_connected(self._look_now)
        self._looking = supervised(self._look, "watch over the pool's leader", Restart(limit=None))

    async def stop(self) -> None:
        if self._looking is not None:
            await cancel_all([self._looking])

    def _look_now(self) -> None:
        self._asks = True
        self._heard.set()

    def _note(self, leader: Leader | None) -> None:
        if leader != self.leader:
            self.leader = leader
            self._on_change(leader)

    async def _look(self) -> None:
        while True:
            if self._asks:
                try:
                    self._note((await read_leader(self._connection))[1])
                except NatsUnavailable as error:
                    log.debug("asking for the leader of the pool failed: %s", error)
            self._asks = False
            self._heard.clear()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._heard.wait()
            except TimeoutError:
                self._asks = True  # an expired entry is not announced
