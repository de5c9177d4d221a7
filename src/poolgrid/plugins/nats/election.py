"""The lives of a consolidator that shares its pool with others: standing by, active, standing by again.

Rules
    1. Only who has the pool's lease opens the journal. Opening it makes it impossible for those before to write on, so
       also two that both take the lease for theirs cannot both write.
    2. A life ends when the lease is lost, or the journal is another's. What it had taken in and not stored was never
       acknowledged; workers send it to the next one. The next life knows nothing of the one before it but the journal.
    3. A process that stands by is well, and ready to take over.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter

from poolgrid.kernel.journal.framing import JournalFenced
from poolgrid.plugins.nats.jetstream import JetStreamJournal
from poolgrid.plugins.nats.leader import LeaderLease
from poolgrid.server.consolidator.bootstrap import ConsolidatorHealth
from poolgrid.server.consolidator.service import ConsolidatorService
from poolgrid.server.consolidator.settings import ConsolidatorProcessSettings
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.instruments import Gauge
from poolgrid.server.process.tasks import unless

log = logging.getLogger(__name__)

AGAIN_S = 0.5
"""Wait after a life that could not begin."""

MakeService = Callable[[str, Callable[[JournalFenced], None]], ConsolidatorService]
"""From a consolidator's id, and whom to tell that the journal is another's."""


class LeaderElectionMetrics:
    """What is counted of the lives of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.active = Gauge(
            "poolgrid_consolidator_active",
            "1 while this consolidator writes the pool's journal, 0 on standby. Alert when a pool has no active one.",
            registry=registry,
        )
        self.lives = Counter(
            "poolgrid_consolidator_lives",
            "Times this process became the active consolidator of its pool.",
            registry=registry,
        )
        self.fenced = Counter(
            "poolgrid_consolidator_fenced",
            "Times that this process found another writer of the pool's journal, or a lost end of the stream.",
            registry=registry,
        )


class LeaderElection:
    """Implements ``poolgrid.server.http.health_app.Observed`` over the lives of one process."""

    def __init__(
        self,
        settings: ConsolidatorProcessSettings,
        journal: JetStreamJournal,
        clock: Clock,
        metrics: LeaderElectionMetrics,
        make_service: MakeService,
        new_id: Callable[[], str] = lambda: os.urandom(8).hex(),
    ) -> None:
        """``new_id`` returns an id that no life of any consolidator has had."""
        self._settings = settings
        self._journal = journal
        self._clock = clock
        self._metrics = metrics
        self._make_service = make_service
        self._new_id = new_id
        self.service: ConsolidatorService | None = None
        """The one of the life that is, or begins."""

    @property
    def is_ready(self) -> bool:
        """Whether it is active and its journal can be written, or it could take over."""
        return self._journal.connection.out_of_reach_ms(0.0) == 0.0 if self.service is None else self.service.ready

    @property
    def is_healthy(self) -> bool:
        return self.is_ready

    def describe(self) -> dict[str, object]:
        role = {"role": "standby" if self.service is None else "active", "pool": self._journal.connection.pool}
        service = self.service
        if service is None or not service.started:
            status = "standby" if service is None else "starting"
            return {"status": status if self.is_ready or service is not None else "NATS unavailable", **role}
        return {**ConsolidatorHealth(service).describe(), **role}

    async def run(self, stop: asyncio.Event) -> None:
        """Stand by and be active in turn until ``stop`` is set. Raises ``JournalCorrupt``."""
        while not stop.is_set():
            try:
                await unless(stop, self._live(), "run of the consolidator")
            except OSError as error:
                log.error("this consolidator cannot begin (%s); it is tried again", error)
                try:
                    async with asyncio.timeout(AGAIN_S):
                        await stop.wait()
                except TimeoutError:
                    pass

    async def _live(self) -> None:
        consolidator_id = self._new_id()
        await self._journal.open()
        lease = LeaderLease(
            self._journal.connection, consolidator_id, self._settings.leader_lease_ms // 1000, self._clock
        )
        fenced = asyncio.Event()
        service: ConsolidatorService | None = None
        try:
            await lease.take()
            # Not before: its clock would take the time of standing by for one in which it stood still.
            service = self.service = self._make_service(consolidator_id, lambda _: fenced.set())
            await unless(lease.lost, service.start(), "start of the consolidator")
            if lease.lost.is_set():
                return
            reachable = self._settings.reachable
            planes = (service.ingest_endpoint, service.feed_endpoint, service.query_endpoint)
            await lease.announce(*map(reachable, planes))
            self._metrics.active.set(1)
            self._metrics.lives.inc()
            log.info("consolidator %s is the active one of pool %s", consolidator_id, self._journal.connection.pool)
            await unless(lease.lost, fenced.wait(), "end of this lease")
            if fenced.is_set():
                self._metrics.fenced.inc()
        finally:
            self._metrics.active.set(0)
            if service is not None:
                await service.stop()
            self.service = None
            await lease.give_back()
