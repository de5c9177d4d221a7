"""The consolidator on sockets: one owner of the pool's state, driven by what arrives and by two timers.

All of it runs in callbacks of one event loop, and each wake-up is one turn of the core:

    receive (``ingest_plane``) -> core -> append to the journal (a thread) -> readers, ``feed_publisher``, replies

Everything that may wait for a disk is done on threads: appends by ``JournalWriter``, in order, then syncs, snapshots
and replays (``journal_keeper``, ``query_plane``). While an append is slow, or fails and is tried again, messages are
still taken in and heartbeats renew leases; nothing is acknowledged or published before it is in the journal. Once too
much waits for the disk nothing is received any more. What piles up then is bounded by the sockets' queues and by the
workers' outboxes, which end in a full resync; leases stand still (``AwakeClock.hold``).

What takes long without a disk is done on the loop, in slices, one in each of its turns whatever it is for
(``poolgrid.server.process.tasks``): a thread that computes keeps a loop from running for longer than a slice does.

The state is the fold of the journal. A turn that fails midway may have changed the state without a record of it, so it
is the last: nothing more is taken in, what came before it is stored, and the process ends. The next start derives the
state from the journal, and workers send what was not acknowledged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

import zmq
from prometheus_client import CollectorRegistry

from poolgrid.kernel.consolidation.consolidator import Consolidator, ConsolidatorLimits, ConsolidatorTurn, Now
from poolgrid.kernel.consolidation.pool_state import PoolState
from poolgrid.kernel.journal.framing import JournalFenced
from poolgrid.kernel.journal.ports import Journal, PoolListener
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.events import JournalRecord
from poolgrid.kernel.wire.identifiers import Tier, WorkerKey
from poolgrid.kernel.wire.ingest import LoadingWorker
from poolgrid.server.consolidator.feed_publisher import FeedPublisher
from poolgrid.server.consolidator.ingest_plane import IngestPlane, LocalIngest
from poolgrid.server.consolidator.journal_keeper import JournalKeeper
from poolgrid.server.consolidator.metrics import ConsolidatorCollector
from poolgrid.server.consolidator.pub_shell import EngineShell, FurtherShell, PubShell
from poolgrid.server.consolidator.query_plane import QueryPlane
from poolgrid.server.consolidator.service_context import ServiceContext
from poolgrid.server.consolidator.settings import ConsolidatorSettings, Tuning
from poolgrid.server.consolidator.sources_file import FurtherPub, PubSource, load_sources
from poolgrid.server.consolidator.state_dumps import StateDumps
from poolgrid.server.process.clock import AwakeClock, Clock
from poolgrid.server.process.tasks import BulkWork, end_process
from poolgrid.server.transport.planes import name_plane
from poolgrid.server.transport.zmq_socket import bind, make_socket

log = logging.getLogger(__name__)


class OffsetsDiffer(RuntimeError):
    """The state has moved on by another number of records than the journal is given."""

    def __init__(self, state: int, journal: int, records: int) -> None:
        super().__init__(
            f"the pool's state is at offset {state} after a turn of {records} records, expected is "
            f"{journal + records}: the journal, with what waits for it, ends at {journal}"
        )


class ConsolidatorService:
    """A pool's event store, embedded in a router or alone.

    ``start`` binds the sockets and recovers the journal; ``subscribe`` gives a reader in this process the state and
    then every record. All methods belong to the loop that ``start`` ran on.
    """

    def __init__(
        self,
        settings: ConsolidatorSettings,
        registry: CollectorRegistry,
        clock: Clock,
        open_journal: Callable[[], Journal],
        consolidator_id: str | None = None,
        make_context: Callable[[], zmq.Context[Any]] = zmq.Context,
        on_fenced: Callable[[JournalFenced], None] | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        """``on_fenced`` is called when another process writes the journal, and nothing more is done here; by default
        the process ends."""
        self.settings = settings
        self.consolidator_id = consolidator_id or os.urandom(8).hex()
        self.ingest_endpoint = ""
        self.feed_endpoint = ""
        self.query_endpoint = ""
        self._tuning = tuning or Tuning()
        self._clock = AwakeClock(clock, min(settings.lease_ms, self._tuning.stale_after_ms))
        self._running_clock = clock
        """For durations: it runs also where leases stand still."""
        self._bulk = BulkWork(clock)
        self._parts = ServiceContext(self._clock)
        self._registry = registry
        self._collector = ConsolidatorCollector(self.measure, self.lags_ms, self.blocks_by_tier, self.sources)
        self._on_fenced = on_fenced
        self._core: Consolidator | None = None
        self._listeners: list[tuple[PoolListener, int]] = []
        self._make_context = make_context
        self._context: zmq.Context[Any] | None = None
        self._keeper = JournalKeeper(open_journal, settings, self._tuning, self._parts, self._fence)
        self._dumps: StateDumps
        self._ingest: IngestPlane
        self._feed: FeedPublisher
        self._query: QueryPlane
        self._put_offset = 0
        """Offset behind the last record that was given to the journal's writer."""
        self._opened = AsyncExitStack()
        """What is open, and how each thing ends."""
        self._sources: list[PubShell] = []
        self._further: dict[WorkerKey, list[FurtherShell]] = {}
        """The further sources of each worker that has some."""

    # Life

    async def start(self) -> None:
        """Recover the state, bind the sockets, begin to receive. Raises what the journal or a bind raises.

        When it fails or is cancelled, everything is closed again.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        """Open one thing after the other; ``stop`` closes them in reverse order."""
        settings, opened, parts, keeper = self.settings, self._opened, self._parts, self._keeper
        self._clock.start()
        opened.callback(self._clock.stop)
        definitions = load_sources(settings.pub_sources)
        opened.callback(parts.threads.shutdown, wait=False)
        opened.push_async_callback(keeper.close)
        pool = await keeper.open()
        self._put_offset = pool.offset
        opened.callback(self._close_sockets)
        self._bind()
        log.info(
            "consolidator %s at offset %d with %d worker ranks: ingest %s, feed %s, queries %s",
            self.consolidator_id,
            pool.offset,
            len(pool.workers),
            self.ingest_endpoint,
            self.feed_endpoint,
            self.query_endpoint,
        )
        opened.push_async_callback(self._end_tasks)
        self._dumps = StateDumps(pool, self._bulk, parts)
        keeper.start(self._dumps, self._bulk, self._emit, self._pause, self._resume)
        opened.push_async_callback(keeper.writer.finish)
        limits = ConsolidatorLimits(
            blocks_per_worker_max=self._tuning.blocks_per_worker_max,
            lease_ms=settings.lease_ms,
            stale_after_ms=self._tuning.stale_after_ms,
        )
        core = self._core = Consolidator(pool, self.consolidator_id, limits, self._now())
        self._registry.register(self._collector)
        opened.callback(self._registry.unregister, self._collector)
        self._make_sources(definitions, pool)
        opened.callback(self._feed.subscriptions.close)
        self._feed.subscriptions.start()
        for plane in (self._ingest, self._query):
            opened.callback(plane.inbox.stop)
        self._ingest.start(core)
        self._query.start(self._dumps)
        for source in self._sources:
            opened.callback(source.close)
            source.start()
        opened.callback(parts.cancel_timers)
        self._feed.start(keeper, pool)
        self._ingest.watch_leases()
        keeper.look_after_files()

    def _bind(self) -> None:
        settings, parts = self.settings, self._parts
        context = self._context = self._make_context()
        life = self.consolidator_id.encode()
        ingest, feed, query = (make_socket(context, kind) for kind in (zmq.ROUTER, zmq.XPUB, zmq.ROUTER))
        self._feed = FeedPublisher(feed, self._tuning, parts, life)
        self._query = QueryPlane(query, self._feed, self._keeper, self._bulk, parts, life)
        self._ingest = IngestPlane(ingest, self._feed, self.take_turn, self._running_clock, self._bulk, parts)
        for socket, plane in ((ingest, "ingest"), (feed, "feed"), (query, "query")):
            name_plane(socket, plane)
        self.ingest_endpoint = bind(ingest, settings.host, settings.ingest_port, "ingest_port")
        self.feed_endpoint = bind(feed, settings.host, settings.feed_port, "feed_port")
        self.query_endpoint = bind(query, settings.host, settings.query_port, "query_port")

    def _make_sources(self, definitions: Sequence[PubSource | FurtherPub], pool: PoolState) -> None:
        context = self._context
        assert context is not None
        lease_ms, blocks_max = self.settings.lease_ms, self._tuning.blocks_per_worker_max
        shared = (context, self.take_turn, self._clock, pool, lease_ms, blocks_max)
        for definition in definitions:
            if isinstance(definition, FurtherPub):
                further = FurtherShell(definition, *shared)
                self._further.setdefault(definition.key, []).append(further)
                self._sources.append(further)
            else:
                self._sources.append(EngineShell(definition, *shared))
        listed = {key: [shell.source_name for shell in shells] for key, shells in self._further.items()}
        self.take_turn(lambda core, turn: core.drop_unlisted(listed, turn))

    async def stop(self) -> None:
        """Stop receiving, make the journal durable, close everything that was opened."""
        if not self._parts.stopping:
            self._parts.stopping = True
            await self._opened.aclose()

    async def _end_tasks(self) -> None:
        self._keeper.stop_waiting()
        await self._parts.end_tasks()

    def _close_sockets(self) -> None:
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    # For readers in this process

    @property
    def core(self) -> Consolidator:
        """Return the core; only after ``start``."""
        assert self._core is not None, "the service is not started"
        return self._core

    @property
    def started(self) -> bool:
        return self._core is not None

    @property
    def ready(self) -> bool:
        return self._core is not None and not self._parts.ended and not self._keeper.writer.stalled

    @property
    def stalled(self) -> bool:
        """Return whether the journal does not take records at all."""
        return self._core is not None and self._keeper.writer.stalled

    @property
    def trouble(self) -> str:
        """Return what keeps the journal from being written as it should, in words; empty when all is well."""
        if self._core is None:
            return ""
        return self._parts.broken or self._keeper.trouble

    @property
    def offset(self) -> int:
        return self.core.pool.offset

    def subscribe(self, listener: PoolListener) -> Callable[[], None]:
        """Give a reader the state now and every record that follows; return how to end that.

        The reader is called from this loop, in the middle of a turn: it must be quick and must not call back.
        """
        frozen = self.core.pool.freeze()
        entry = (listener, frozen.offset)
        self._listeners.append(entry)
        listener.on_snapshot(frozen.offset, frozen.states(), frozen.visible_chains(), frozen.sessions)

        def unsubscribe() -> None:
            if entry in self._listeners:
                self._listeners.remove(entry)

        return unsubscribe

    def open_local(self, on_frames: Callable[[list[bytes]], None]) -> LocalIngest:
        """Return a way in for events of this process, with the messages and acknowledgements of the ingest plane; only
        after ``start``."""
        return self._ingest.open_local(on_frames)

    def sources(self) -> Sequence[PubShell]:
        """Return the publishers of the sources file with their health: engines, and further sources of workers."""
        return self._sources

    def loading(self) -> list[LoadingWorker]:
        return self._feed.loading() if self.started else []

    def lags_ms(self) -> dict[WorkerKey, int]:
        return self.core.lags_ms()

    def blocks_by_tier(self) -> dict[str, int]:
        """Return how many blocks the pool holds on each tier (a block of two workers counts twice)."""
        totals = [0, 0, 0]
        for worker in list(self.core.pool.workers.values()):
            for tier, count in enumerate(worker.presence.counts()):
                totals[tier] += count
        return {tier.name.lower(): totals[tier] for tier in Tier}

    def measure(self) -> tuple[dict[str, int], dict[str, float]]:
        """Return counters and gauges by name."""
        pool, journal, writer = self.core.pool, self._keeper.journal, self._keeper.writer
        segments, size = journal.sizes()
        gauges: dict[str, float] = {
            "offset": pool.offset,
            "oldest_offset": journal.oldest_offset,
            "workers": len(pool.workers),
            "refused_blocks": sum(worker.presence.refused_blocks for worker in list(pool.workers.values())),
            "journal_bytes": size,
            "journal_segments": segments,
            "stalled": float(self.stalled),
            "journal_slow_write_seconds": writer.slow_ms / 1000,
        }
        counters = {**asdict(self.core.tally), **self._parts.counts}
        counters["journal_append_errors"] += writer.errors
        return counters, gauges

    # Turns

    def take_turn(self, work: Callable[[Consolidator, ConsolidatorTurn], None]) -> None:
        """Run one turn of the core and have what follows carried out once it is in the journal."""
        if self._parts.broken:
            return
        core = self._core
        assert core is not None, "the service is not started"
        turn = ConsolidatorTurn(self._now())
        try:
            work(core, turn)
            core.finish(turn)
            payloads = list(map(codec.journal_record.encode, turn.records))
            self._commit(core, turn)
        except Exception as error:
            self._break(error)
            return
        self._keeper.writer.put(turn, payloads)
        if self._further:
            for member in turn.members:
                for shell in self._further.get(member.key, ()):
                    shell.member(member)

    def _commit(self, core: Consolidator, turn: ConsolidatorTurn) -> None:
        """Check that a turn's records continue the journal, and that the state has moved on by just those."""
        put, offset, records = self._put_offset, core.pool.offset, turn.records
        if offset != put + len(records) or (records and records[0].offset != put):
            raise OffsetsDiffer(offset, put, len(records))
        self._put_offset = offset
        if core.pool.discarded:
            self._dumps.free_discarded()

    def _break(self, error: Exception) -> None:
        """Go no further on a state of which the journal does not know."""
        self._parts.broken = (
            f"a turn of the consolidator failed behind record {self._put_offset - 1} ({type(error).__name__}: "
            f"{error}); nothing is taken in any more, and the process ends: its next start goes by the journal"
        )
        self._take_nothing()
        end_process("consolidator", error)

    def _fence(self, error: JournalFenced) -> None:
        """Go no further on a journal that is another's now."""
        if self._parts.broken:
            return
        self._parts.broken = str(error)
        log.error("%s", error)
        self._take_nothing()
        if self._on_fenced is None:
            end_process("consolidator", error)
        else:
            self._on_fenced(error)

    def _take_nothing(self) -> None:
        self._ingest.inbox.pause()
        self._query.inbox.pause()
        for source in self._sources:
            source.pause()

    def _now(self) -> Now:
        return Now(self._clock.monotonic_ms(), self._clock.wall_ms())

    def _pause(self) -> None:
        """Take nothing in: too much waits for the disk. No worker is judged by the silence that this makes."""
        self._clock.hold()
        self._ingest.pause()
        for source in self._sources:
            source.pause()

    def _resume(self) -> None:
        self._clock.go_on()
        if self._parts.broken:
            self._ingest.paused = False
            return
        for source in self._sources:
            source.resume()
        self._ingest.resume()

    def _emit(self, turn: ConsolidatorTurn, payloads: list[bytes]) -> None:
        """Tell readers and workers of a turn that is in the journal."""
        for remark in turn.remarks:
            log.info("%s", remark)
        records = turn.records
        stopping = self._parts.stopping
        if records:
            self._keeper.note_stored(records[-1].offset + 1)
            self._tell_listeners(records)
            if not stopping:
                self._feed.add(records[0].offset, payloads)
                self._keeper.snapshot_if_due(self._put_offset)
            self._keeper.wake_waiters()
        if turn.replies and not stopping:
            self._ingest.reply(turn)

    def _tell_listeners(self, records: list[JournalRecord]) -> None:
        for listener, from_offset in self._listeners:
            # A reader that subscribed while the append was failing has these in its snapshot.
            news = records if records[0].offset >= from_offset else [r for r in records if r.offset >= from_offset]
            if news:
                try:
                    listener.on_records(news)
                except Exception:
                    log.exception("a reader failed on records %d to %d", news[0].offset, news[-1].offset)
