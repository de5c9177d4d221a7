"""The consolidator on sockets: one owner of the pool's state, driven by what arrives and by two timers.

All of it runs in callbacks of one event loop, and each wake-up is one turn of the core:

    receive what is there -> core -> append to the journal (a thread) -> readers, feed, replies

Everything that may wait for a disk is done on threads: appends by ``JournalWriter``, in order, then syncs, snapshots
and replays. While an append is slow, or fails and is tried again, messages are still taken in and heartbeats renew
leases; nothing is acknowledged or published before it is in the journal. Once too much waits for the disk nothing is
received any more. What piles up then is bounded by the sockets' queues and by the workers' outboxes, which end in a
restated cache; leases stand still (``AwakeClock.hold``).

What takes long without a disk is done on the loop, in slices, one in each of its turns whatever it is for
(``poolgrid.process.bulk_work``): a thread that computes keeps a loop from running for longer than a slice does. So a
snapshot, for the disk or for a
router, is made of the state frozen at one offset, while records go on being applied (``core.frozen_blocks``).

The state is the fold of the journal. A turn that fails midway may have changed the state without a record of it, so it
is the last: nothing more is taken in, what came before it is stored, and the process ends. The next start derives the
state from the journal, and workers send what was not acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any, TypeVar

import zmq
from prometheus_client import CollectorRegistry

from poolgrid.consolidator.core.consolidator import Consolidator, Now, Turn
from poolgrid.consolidator.core.loading_table import LoadingTable
from poolgrid.consolidator.core.pool_state import FrozenPool
from poolgrid.consolidator.journal.errors import JournalCorrupt, JournalFenced
from poolgrid.consolidator.journal_writer import COMPLAIN_EVERY_MS, JournalWriter
from poolgrid.consolidator.metrics import ConsolidatorCollector
from poolgrid.consolidator.ports import Journal, PoolListener
from poolgrid.consolidator.pub_shell import EngineShell, FurtherShell, PubShell
from poolgrid.consolidator.settings import ConsolidatorSettings
from poolgrid.consolidator.snapshot_parts import cut_snapshot
from poolgrid.consolidator.sources_file import FurtherPub, load_sources
from poolgrid.process.awake_clock import AwakeClock
from poolgrid.process.bulk_work import SLICE_MS, BulkWork
from poolgrid.process.clock import Clock
from poolgrid.process.complaints import Complaints, shown_peer
from poolgrid.process.tasks import detached, end_process
from poolgrid.transport.planes import name_plane
from poolgrid.transport.subscriptions import TOPICS_PER_CONNECTION_MAX, Subscriptions
from poolgrid.transport.zmq_socket import BatchSocket, bind, message_sender
from poolgrid.wire import codec
from poolgrid.wire.errors import DecodeError, WireError
from poolgrid.wire.events import JournalRecord
from poolgrid.wire.feed import Records, Replay, SnapshotPart, TooOld, WorkerState
from poolgrid.wire.feed_frames import FEED_TOPIC, encode_alive, encode_answer, encode_records
from poolgrid.wire.identifiers import Tier, WorkerKey
from poolgrid.wire.ingest import BATCH_FRAME, CONTROL_FRAME
from poolgrid.wire.limits import FEED_RECORDS_PER_MESSAGE_MAX, FRAME_BYTES_MAX, REPLAY_RECORDS_MAX
from poolgrid.wire.loading import LOADING_FRAME, LOADING_TOPIC, TELL_EVERY_S, LoadingWorker, LoadingWorkers

log = logging.getLogger(__name__)

T = TypeVar("T")

BATCH_BYTES_MAX = FRAME_BYTES_MAX - 1024 * 1024
"""Largest pushed batch: its record, with an offset and perhaps split chains, must still fit a frame."""

REPLAY_BYTES_MAX = 8 * 1024 * 1024
"""Bytes of records in one answer to a replay request."""

REPLAY_WAITERS_MAX = 256
"""Routers that wait for records; a further one is not answered and asks again."""

SNAPSHOT_WAITERS_MAX = 256
"""Routers that wait for the same snapshot; a further one is not answered and asks again."""

INGEST_QUEUE_MAX = 10_000
"""Messages that ZMQ keeps per worker while we are busy; then the worker's socket blocks and its outbox fills."""

FILES_LOOK_MS = 1000.0
"""How often the journal's directory is looked at for segments that somebody deleted, a scan of some twenty names, and
whether the journal is too large."""

LEASE_PUT_OFF_MAX = 1000
"""How often leases are looked at a millisecond later because messages are still unread; each time some of them are."""

SLICE_BLOCKS = 512
"""Changes made to what was frozen, and blocks freed, in one turn: a quarter to half a millisecond."""

THREADS = 4
"""One each for appends, syncs, a snapshot and replays, so that none waits for another."""

ANSWER_QUEUE_MAX = 4096
"""Answers that ZMQ keeps per router; further ones are dropped, and the router asks again."""


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
        on_loading: Callable[[bytes], None] = lambda data: None,
    ) -> None:
        """``on_fenced`` is told when another one writes the journal, and nothing more is done here; by default the
        process ends. ``on_loading`` gets the encoded ``LoadingWorkers`` whenever they are published."""
        self.settings = settings
        self.consolidator_id = consolidator_id or os.urandom(8).hex()
        self.ingest_endpoint = ""
        self.feed_endpoint = ""
        self.query_endpoint = ""
        self._life = self.consolidator_id.encode()
        self._clock = AwakeClock(clock, min(settings.lease_ms, settings.stale_after_ms))
        self._running_clock = clock
        """For how long things take: it goes on where leases stand still."""
        self._bulk = BulkWork(clock)
        self._complaints = Complaints(log, clock)
        self._registry = registry
        self._collector = ConsolidatorCollector(self)
        self._open_journal = open_journal
        self._on_fenced = on_fenced
        self._on_loading = on_loading
        self._core: Consolidator | None = None
        self._listeners: list[tuple[PoolListener, int]] = []
        self._make_context = make_context
        self._context: zmq.Context[Any] | None = None
        self._counts = dict.fromkeys(
            (
                "undecodable_frames",
                "journal_append_errors",
                "journal_snapshot_errors",
                "journal_read_errors",
                "journal_lost_segments",
                "feed_records",
                "feed_replays",
                "feed_snapshots",
                "feed_answers_dropped",
                "feed_subscribers_refused",
            ),
            0,
        )
        self._blocked = False
        self._broken = ""
        """Why the state is not the fold of the journal any more; empty while it is."""
        self._put_offset = 0
        """Offset behind the last record that was given to the journal's writer."""
        self._executor = ThreadPoolExecutor(THREADS, "journal")
        self._complained_ms: dict[str, float] = {}
        self._sync_trouble = ""
        self._damage = ""
        """What was found of the journal's files, until a snapshot stands in for it."""
        self._damaged_files: set[str] = set()
        """Segments that could not be read: told once each."""
        self._looking = False
        self._stored_offset = 0
        """Offset behind the last record that is in the journal and was told of."""
        self._until_stored: deque[tuple[int, asyncio.Event]] = deque()
        """Who waits for records to be stored; offsets only grow."""
        self._unsynced = False
        self._published_ms = 0.0
        self._publishing = False
        """Whether a time is set for the next message of the feed."""
        self._unpublished: list[bytes] = []
        """Records that wait for it: those of one interval, at most ``FEED_RECORDS_PER_MESSAGE_MAX`` and a turn's."""
        self._unpublished_from = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lease_put_off = 0
        self._snapshot_offset = 0
        self._snapshotting = False
        self._keeping = asyncio.Lock()
        """Held while snapshots are kept or records removed."""
        self._making_room = False
        self._freezing = asyncio.Lock()
        """Held while the state is frozen: one dump at a time."""
        self._freeing = False
        self._replays: dict[bytes, Replay] = {}
        """The last question for records of each router."""
        self._replaying = False
        self._loading = LoadingTable()
        self._telling_loading = False
        self._waiters: dict[bytes, int] = {}
        """The last question of each router that waits for a snapshot."""
        self._telling = False
        self._stopping = False
        self._opened = AsyncExitStack()
        """What is open, and how each thing ends."""
        self._has_journal = False
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
        settings = self.settings
        opened = self._opened
        self._clock.start()
        opened.callback(self._clock.stop)
        definitions = load_sources(settings.pub_sources, settings.sources_per_worker_max)
        opened.callback(self._executor.shutdown, wait=False)
        opened.push_async_callback(self._close_journal)
        await self._to_its_end(self._on_thread(self._open))
        pool = await self._to_its_end(self._on_thread(self._journal.recover, settings.blocks_per_worker_max))
        self._snapshot_offset = self._stored_offset = self._put_offset = pool.offset
        for line in self._journal.report:
            log.warning("journal %s: %s", settings.data_dir, line)
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
        self._writer = JournalWriter(
            self._journal,
            settings.fsync,
            settings.append_retry_ms,
            self._clock,
            self._executor,
            self._emit,
            self._block,
            self._unblock,
            self._fence,
            self._bulk,
        )
        self._syncs_later = settings.fsync == "interval" and not self._journal.in_memory
        opened.push_async_callback(self._writer.finish)
        self._core = Consolidator(pool, self.consolidator_id, settings.limits(), self._now())
        self._registry.register(self._collector)
        opened.callback(self._registry.unregister, self._collector)
        context = self._context
        assert context is not None
        shared = (context, self.take_turn, self._clock, pool, settings.lease_ms, settings.blocks_per_worker_max)
        for definition in definitions:
            if isinstance(definition, FurtherPub):
                further = FurtherShell(definition, *shared)
                self._further.setdefault(definition.key, []).append(further)
                self._sources.append(further)
            else:
                self._sources.append(EngineShell(definition, *shared))
        listed = {key: [shell.source_name for shell in shells] for key, shells in self._further.items()}
        self.take_turn(lambda core, turn: core.drop_unlisted(listed, turn))
        opened.callback(self._subscriptions.close)
        self._subscriptions.start()
        for inbox in (self._ingest_inbox, self._query_inbox):
            opened.callback(inbox.stop)
            inbox.start()
        for source in self._sources:
            opened.callback(source.close)
            source.start()
        opened.callback(self._cancel_timers)
        self._keepalive()
        self._watch_leases()
        if not self._journal.in_memory:
            self._look_after_files()

    def _open(self) -> None:
        """Open the journal; on the thread, which remembers it though nobody waits for it any more."""
        self._journal = self._open_journal()
        self._has_journal = True

    @staticmethod
    async def _to_its_end(work: asyncio.Future[T]) -> T:
        """Wait for work on the thread, also when cancelled: what it opens is closed only then."""
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})
            if not work.cancelled():
                work.exception()  # taken, or asyncio would complain: who gave the start up knows why
            raise

    def _bind(self) -> None:
        settings = self.settings
        context = self._context = self._make_context()
        self._ingest = self._socket(context, zmq.ROUTER)
        self._ingest.setsockopt(zmq.RCVHWM, INGEST_QUEUE_MAX)
        self._feed = self._socket(context, zmq.XPUB)
        self._feed.setsockopt(zmq.SNDHWM, settings.feed_high_water_mark)
        self._subscriptions = Subscriptions(self._feed, self._refuse_subscriber, FEED_TOPIC)
        self._query = self._socket(context, zmq.ROUTER)
        self._query.setsockopt(zmq.SNDHWM, ANSWER_QUEUE_MAX)
        self._query.setsockopt(zmq.ROUTER_MANDATORY, 1)
        for socket, plane in ((self._ingest, "ingest"), (self._feed, "feed"), (self._query, "query")):
            name_plane(socket, plane)
        self.ingest_endpoint = bind(self._ingest, settings.host, settings.ingest_port, "ingest_port")
        self.feed_endpoint = bind(self._feed, settings.host, settings.feed_port, "feed_port")
        self.query_endpoint = bind(self._query, settings.host, settings.query_port, "query_port")
        self._ingest_inbox = BatchSocket(self._ingest, self._on_ingest, self._bulk)
        self._query_inbox = BatchSocket(self._query, self._on_queries)
        self._send_reply = message_sender(self._ingest)
        self._send_feed = message_sender(self._feed)

    @staticmethod
    def _socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        return socket

    async def stop(self) -> None:
        """Stop receiving, make the journal durable, close everything that was opened."""
        if not self._stopping:
            self._stopping = True
            await self._opened.aclose()

    def _cancel_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    async def _end_tasks(self) -> None:
        for _, reached in self._until_stored:
            reached.set()
        self._until_stored.clear()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _close_journal(self) -> None:
        if not self._has_journal:
            return
        try:
            await self._on_thread(self._journal.close)
        except OSError as error:
            log.error("closing the journal failed (%s); the newest records may not be durable", error)

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
        return self._core is not None and not self._stopping and not self._writer.stalled and not self._broken

    @property
    def stalled(self) -> bool:
        """Say whether the journal does not take records at all."""
        return self._core is not None and self._writer.stalled

    @property
    def trouble(self) -> str:
        """Return what keeps the journal from being written as it should, in words; empty when all is well."""
        if self._core is None:
            return ""
        if self._broken:
            return self._broken
        writer = self._writer
        if writer.stalled:
            return (
                f"the journal cannot be written since {writer.stalled_ms / 1000:.0f} s ({writer.stall_reason}); "
                "what workers say waits with them"
            )
        slow_ms = writer.slow_ms
        if slow_ms:
            return f"disk slow: {slow_ms:.0f} ms for a write of the journal; what workers say is known that much later"
        return self._sync_trouble or self._damage

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
        listener.on_snapshot(frozen.offset, frozen.states(), frozen.visible_chains())

        def unsubscribe() -> None:
            if entry in self._listeners:
                self._listeners.remove(entry)

        return unsubscribe

    def kept_records(self, from_offset: int, limit: int, bytes_max: int) -> tuple[int, list[bytes]]:
        """Return encoded records of a journal in memory, from an offset or the oldest kept, and the first's offset.

        At once and without a disk; of a journal on disk, and before ``start``, there are none.
        """
        if self._core is None or not self._journal.in_memory:
            return from_offset, []
        first = max(from_offset, self._journal.oldest_offset)
        if first >= self._journal.next_offset:
            return first, []
        return first, self._journal.read(first, limit, bytes_max)

    def sources(self) -> Sequence[PubShell]:
        """Return the publishers of the sources file with their health: engines, and further sources of workers."""
        return self._sources

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
        pool = self.core.pool
        segments, size = self._journal.sizes()
        gauges: dict[str, float] = {
            "offset": pool.offset,
            "oldest_offset": self._journal.oldest_offset,
            "workers": len(pool.workers),
            "refused_blocks": sum(worker.presence.refused_blocks for worker in list(pool.workers.values())),
            "journal_bytes": size,
            "journal_segments": segments,
            "stalled": float(self.stalled),
            "journal_slow_write_seconds": self._writer.slow_ms / 1000,
        }
        counters = {**asdict(self.core.tally), **self._counts}
        counters["journal_append_errors"] += self._writer.errors
        return counters, gauges

    # Turns

    def take_turn(self, work: Callable[[Consolidator, Turn], None]) -> None:
        """Run one turn of the core and have what follows carried out once it is in the journal."""
        if self._broken:
            return
        core = self._core
        assert core is not None, "the service is not started"
        turn = core.begin(self._now())
        try:
            work(core, turn)
            core.finish(turn)
            payloads = list(map(codec.journal_record.encode, turn.records))
            self._commit(core, turn)
        except Exception as error:
            self._break(error)
            return
        self._writer.put(turn, payloads)
        if self._further:
            for member in turn.members:
                for shell in self._further.get(member.key, ()):
                    shell.member(member)

    def _commit(self, core: Consolidator, turn: Turn) -> None:
        """Check that a turn's records continue the journal, and that the state has moved on by just those."""
        put, offset, records = self._put_offset, core.pool.offset, turn.records
        if offset != put + len(records) or (records and records[0].offset != put):
            raise OffsetsDiffer(offset, put, len(records))
        self._put_offset = offset
        if core.pool.discarded and not self._freeing:
            self._free()

    def _free(self) -> None:
        """Free a slice of what workers no longer hold, and have the next freed once others had their turn."""
        self._freeing = self._core is not None and self._core.pool.discarded.free(SLICE_BLOCKS)
        if self._freeing and not self._stopping:
            self._bulk.soon(self._free)

    def _break(self, error: Exception) -> None:
        """Go no further on a state of which the journal does not know."""
        self._broken = (
            f"a turn of the consolidator failed behind record {self._put_offset - 1} ({type(error).__name__}: "
            f"{error}); nothing is taken in any more, and the process ends: its next start goes by the journal"
        )
        self._take_nothing()
        end_process("consolidator", error)

    def _fence(self, error: JournalFenced) -> None:
        """Go no further on a journal that is another's now."""
        if self._broken:
            return
        self._broken = str(error)
        log.error("%s", error)
        self._take_nothing()
        if self._on_fenced is None:
            end_process("consolidator", error)
        else:
            self._on_fenced(error)

    def _take_nothing(self) -> None:
        for inbox in (self._ingest_inbox, self._query_inbox):
            inbox.pause()
        for source in self._sources:
            source.pause()

    def _now(self) -> Now:
        return Now(self._clock.monotonic_ms(), self._clock.wall_ms())

    def _block(self) -> None:
        """Take nothing in: too much waits for the disk. Nobody is judged by the silence that this makes."""
        self._blocked = True
        self._clock.hold()
        self._ingest_inbox.pause()
        for source in self._sources:
            source.pause()

    def _unblock(self) -> None:
        self._blocked = False
        self._clock.go_on()
        if self._broken:
            return
        self._ingest_inbox.resume()
        for source in self._sources:
            source.resume()
        self._watch_leases()

    def _emit(self, turn: Turn, payloads: list[bytes]) -> None:
        """Tell of a turn that is in the journal."""
        for remark in turn.remarks:
            log.info("%s", remark)
        records = turn.records
        if records:
            self._stored_offset = records[-1].offset + 1
            if self._syncs_later and not self._unsynced:
                self._sync_later()
            self._tell_listeners(records)
            if not self._stopping:
                if self._subscriptions.has_readers:
                    if not self._unpublished:
                        self._unpublished_from = records[0].offset
                    self._unpublished += payloads
                    self._publish_in_time()
                elif self._unpublished:
                    self._unpublished = []  # nobody is left to hear them, and what follows them is not kept
                self._snapshot_if_due()
            while self._until_stored and self._until_stored[0][0] <= self._stored_offset:
                self._until_stored.popleft()[1].set()
        if turn.replies and not self._stopping:
            for peer, reply in turn.replies:
                try:
                    self._send_reply((peer, codec.from_consolidator.encode(reply)))
                except zmq.ZMQError as error:
                    # The worker is gone or does not read: it asks again with its next heartbeat.
                    log.debug("a reply to a worker was dropped: %s", error)
            self._ingest_inbox.sent()

    async def _stored(self, offset: int) -> bool:
        """Wait until all records below an offset are in the journal; return False when the end comes first."""
        if self._stored_offset < offset and not self._stopping:
            reached = asyncio.Event()
            self._until_stored.append((offset, reached))
            await reached.wait()
        return self._stored_offset >= offset and not self._stopping

    def _publish_in_time(self) -> None:
        """Publish what is there: at once after a silence, else together with what comes within the interval."""
        wait_ms = self._published_ms + self.settings.feed_interval_ms - self._clock.monotonic_ms()
        if wait_ms <= 0 or len(self._unpublished) >= FEED_RECORDS_PER_MESSAGE_MAX:
            self._publish()
        elif not self._publishing:
            self._publishing = True
            self._after("feed", wait_ms, self._publish)

    def _publish(self) -> None:
        self._publishing = False
        payloads, self._unpublished = self._unpublished, []
        for frames in encode_records(self._unpublished_from, payloads, self._life):
            self._send_feed(frames)
        self._subscriptions.look()
        self._counts["feed_records"] += len(payloads)
        self._published_ms = self._clock.monotonic_ms()

    def _tell_listeners(self, records: list[JournalRecord]) -> None:
        for listener, from_offset in self._listeners:
            # A reader that subscribed while the append was failing has these in its snapshot.
            news = records if records[0].offset >= from_offset else [r for r in records if r.offset >= from_offset]
            if news:
                try:
                    listener.on_records(news)
                except Exception:
                    log.exception("a reader failed on records %d to %d", news[0].offset, news[-1].offset)

    # Ingest

    def _on_ingest(self, messages: list[list[bytes]]) -> None:
        monotonic_ms = self._running_clock.monotonic_ms
        ends_ms = monotonic_ms() + SLICE_MS

        def work(core: Consolidator, turn: Turn) -> None:
            for at, frames in enumerate(messages):
                if at and monotonic_ms() >= ends_ms:
                    # A map was divided, or the machine is slow: what is left has its turn later.
                    self._ingest_inbox.give_back(messages[at:])
                    break
                try:
                    if len(frames) != 3:
                        raise DecodeError("a worker's message", f"{len(frames)} frames, expected are 3")
                    peer, tag, payload = frames
                    if tag == BATCH_FRAME:
                        if len(payload) > BATCH_BYTES_MAX:
                            raise DecodeError(
                                "an event batch", f"{len(payload)} bytes, allowed are at most {BATCH_BYTES_MAX}"
                            )
                        core.batch(peer, codec.event_batch.decode(payload), turn)
                    elif tag == LOADING_FRAME:
                        self._note_loading(codec.loading_worker.decode(payload))
                    elif tag == CONTROL_FRAME:
                        core.receive(peer, codec.to_consolidator.decode(payload), turn)
                    else:
                        raise DecodeError("a worker's message", f"tag {bytes(tag[:16])!r}, allowed are B, C and L")
                except DecodeError as error:
                    self._undecodable(f"{shown_peer(frames[0])} on the ingest plane", error)

        self.take_turn(work)

    def _undecodable(self, who: str, error: WireError) -> None:
        self._counts["undecodable_frames"] += 1
        self._complaints.about(who, error)

    def _refuse_subscriber(self, address: str) -> None:
        self._counts["feed_subscribers_refused"] += 1
        self._complaints.about(
            f"{address} on the feed",
            f"it names more than {TOPICS_PER_CONNECTION_MAX} topics, routers name one; its connection was ended",
        )

    # Leases and keepalive

    def _watch_leases(self) -> None:
        due_ms = self.core.next_expiry_ms()
        wait_ms = self.settings.lease_ms if due_ms is None else max(1.0, due_ms - self._clock.monotonic_ms())
        # A gap may open in the meantime: looked at often enough to find it in time.
        self._after("lease", min(wait_ms, self.settings.lease_ms, self.settings.stale_after_ms), self._expire)

    def _expire(self) -> None:
        if self._blocked:
            return
        if self._ingest_inbox.has_more and self._lease_put_off < LEASE_PUT_OFF_MAX:
            # What waits in the socket may be the very sign of life that is missing.
            self._lease_put_off += 1
            self._after("lease", 1.0, self._expire)
            return
        self._lease_put_off = 0
        self.take_turn(lambda core, turn: core.expire(turn))
        if not self._blocked and not self._broken:
            self._watch_leases()

    def _keepalive(self) -> None:
        now_ms = self._clock.monotonic_ms()
        # While the disk takes nothing the feed is silent: readers then know that they may be behind.
        stuck = self._writer.stalled or self._writer.slow_ms >= self.settings.feed_keep_alive_ms
        if not (stuck and self._stored_offset < self.core.pool.offset) and (
            now_ms - self._published_ms >= self.settings.feed_keep_alive_ms
        ):
            self._publish()
            self._feed.send_multipart(encode_alive(self._stored_offset, self._life), zmq.NOBLOCK)
            self._published_ms = now_ms
        wait_ms = max(1.0, self._published_ms + self.settings.feed_keep_alive_ms - now_ms)
        self._after("keepalive", min(wait_ms, self.settings.feed_keep_alive_ms), self._keepalive)

    def loading(self) -> list[LoadingWorker]:
        return self._loading.workers(self._clock.monotonic_ms())

    def _note_loading(self, worker: LoadingWorker) -> None:
        self._loading.note(worker, self._clock.monotonic_ms())
        if not self._telling_loading:
            self._telling_loading = True
            self._tell_loading()

    def _tell_loading(self) -> None:
        """Publish who loads, once more when nobody does any more. What a full socket drops is said again."""
        workers = self.loading()
        data = codec.loading_workers.encode(LoadingWorkers(workers))
        self._feed.send_multipart([LOADING_TOPIC, data], zmq.NOBLOCK)
        self._on_loading(data)
        self._telling_loading = bool(workers)
        if workers:
            self._after("loading", 1000.0 * TELL_EVERY_S, self._tell_loading)

    def _after(self, name: str, delay_ms: float, work: Callable[[], None]) -> None:
        if self._stopping:
            return
        timer = self._timers.get(name)
        if timer is not None:
            timer.cancel()
        self._timers[name] = asyncio.get_running_loop().call_later(delay_ms / 1000, work)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = detached(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Durability

    def _sync_later(self) -> None:
        self._unsynced = True
        self._after("sync", self.settings.fsync_interval_ms, lambda: self._spawn(self._sync(), "journal sync"))

    async def _sync(self) -> None:
        self._unsynced = False
        try:
            await self._on_thread(self._journal.sync)
        except OSError as error:
            self._counts["journal_append_errors"] += 1
            self._sync_trouble = f"what was written last may not survive a power failure ({error})"
            if self._may_complain("sync"):
                log.error("making the journal durable failed: %s", self._sync_trouble)
            if not self._stopping and not self._unsynced:
                self._sync_later()
        else:
            self._sync_trouble = ""

    def _may_complain(self, what: str) -> bool:
        """Say whether it is time for a line in the log about something that goes on failing."""
        now_ms = self._clock.monotonic_ms()
        last_ms = self._complained_ms.get(what)
        if last_ms is not None and now_ms - last_ms < COMPLAIN_EVERY_MS:
            return False
        self._complained_ms[what] = now_ms
        return True

    def _on_thread(self, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Do what may wait for a disk."""
        return asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    def _snapshot_if_due(self) -> None:
        if self._put_offset - self._snapshot_offset < self.settings.snapshot_every_records:
            return
        if not self._journal.in_memory:  # nothing outlives the process then, so nobody will ever load it
            self._snapshot_now()

    def _snapshot_now(self) -> None:
        if not self._snapshotting and not self._stopping and not self._broken:
            self._snapshotting = True
            self._spawn(self._snapshot(), "journal snapshot")

    async def _dump(self, make: Callable[[FrozenPool], Iterator[T]]) -> tuple[int, list[WorkerState], list[T]]:
        """Make something of the state as it is at one offset, in slices; return the offset, the workers and the result.

        Others have their turn after each item that ``make`` yields. What happens in these turns is not in it.
        """
        async with self._freezing:
            pool = self.core.pool
            frozen = pool.freeze_in_place()
            offset, states = frozen.offset, frozen.states()
            made: list[T] = []
            try:
                for item in make(frozen):
                    made.append(item)
                    await self._bulk.turn()
                    if self._stopping:
                        break  # nobody will want it
            finally:
                del frozen
                more = True
                while more:
                    more = pool.thaw(SLICE_BLOCKS)
                    await self._bulk.turn()
                if pool.discarded and not self._freeing:
                    self._free()
            return offset, states, made

    async def _snapshot(self) -> None:
        damage = self._damage
        offset = self.core.pool.offset
        try:
            offset, _, parts = await self._dump(self._journal.snapshot_parts)
            if not await self._stored(offset):
                return
            async with self._keeping:
                await self._on_thread(self._journal.keep_snapshot, offset, _given_away(parts))
                removed = await self._on_thread(self._journal.retain, self._clock.wall_ms())
        except JournalFenced as error:
            self._fence(error)
        except (OSError, JournalCorrupt) as error:
            self._counts["journal_snapshot_errors"] += 1
            if self._may_complain("snapshot"):
                log.error(
                    "writing the journal snapshot at offset %d failed (%s); the next is tried later",
                    offset,
                    error,
                )
        else:
            log.info("journal snapshot at offset %d, %d old segments removed", offset, removed)
            if damage and self._damage == damage:
                log.warning("%s: the snapshot at offset %d stands in for what is lost", damage, offset)
                self._damage = ""
        finally:
            self._snapshot_offset = offset
            self._snapshotting = False

    def _look_after_files(self) -> None:
        self._after("files", FILES_LOOK_MS, self._look_after_files)
        self._look_after_size()
        if not self._looking:
            self._looking = True
            self._spawn(self._find_lost_files(), "look at the journal's files")

    def _look_after_size(self) -> None:
        """See to it that a journal gets smaller that is much larger than retention says, or takes nothing any more.

        Snapshots that come after so many records may come too late for large ones.
        """
        stalled = self._writer.stalled
        if not stalled and self._journal.snapshot_due:
            self._snapshot_now()
        elif (stalled or self._journal.crowded) and not self._making_room:
            self._making_room = True
            self._spawn(self._make_room(stalled), "room in the journal")

    async def _make_room(self, stalled: bool) -> None:
        # A snapshot of the state may be waiting for records that the journal has no room for.
        journal, wall_ms = self._journal, self._clock.wall_ms()
        try:
            async with self._keeping:
                if stalled:
                    work = self._on_thread(journal.make_room, self.settings.blocks_per_worker_max, wall_ms)
                else:
                    work = self._on_thread(journal.retain, wall_ms)
                removed = await work
        except JournalFenced as error:
            self._fence(error)
        except (OSError, JournalCorrupt) as error:
            if self._may_complain("room"):
                log.warning("making room in the journal failed (%s); it is tried again", error)
        else:
            if removed:
                log.info("the journal was too large: %d old segments removed", removed)
        finally:
            self._making_room = False

    async def _find_lost_files(self) -> None:
        """Notice segments that somebody deleted or cut, and go on in a new one behind a new snapshot."""
        try:
            lost = await self._writer.between_writes(self._journal.drop_lost)
        except JournalFenced as error:
            self._fence(error)
        except OSError as error:
            if self._may_complain("files"):
                log.error("looking at the journal's files failed: %s", error)
        else:
            if lost:
                self._counts["journal_lost_segments"] += len(lost)
                self._note_damage(f"{len(lost)} journal segments were deleted or cut by somebody: {', '.join(lost)}")
            elif self._damage:
                self._snapshot_now()  # the last attempt failed
        finally:
            self._looking = False

    def _note_damage(self, what: str) -> None:
        self._damage = what
        log.error("%s; a snapshot is written, so that a restart finds the state", what)
        self._snapshot_now()

    # Queries of routers

    def _on_queries(self, messages: list[list[bytes]]) -> None:
        self._subscriptions.look()  # who asks has subscribed before: what follows the answer is published
        for frames in messages:
            try:
                if len(frames) != 2:
                    raise DecodeError("a request to the feed", f"{len(frames)} frames, expected are 2")
                request = codec.to_feed.decode(frames[1])
            except DecodeError as error:
                self._undecodable(f"{shown_peer(frames[0])} on the query plane", error)
                continue
            if isinstance(request, Replay):
                if frames[0] in self._replays or len(self._replays) < REPLAY_WAITERS_MAX:
                    self._replays[frames[0]] = request
                else:
                    self._counts["feed_answers_dropped"] += 1
            elif frames[0] in self._waiters or len(self._waiters) < SNAPSHOT_WAITERS_MAX:
                self._waiters[frames[0]] = request.request
            else:
                self._counts["feed_answers_dropped"] += 1
        self._replay_if_asked()
        self._tell_if_asked()

    def _replay_if_asked(self) -> None:
        if self._replays and not self._replaying and not self._stopping:
            if self._journal.in_memory:
                while self._replays:
                    peer = next(iter(self._replays))
                    self._answer(peer, self._read(self._replays.pop(peer))[0])
            else:
                self._replaying = True
                self._spawn(self._replay(), "replay for readers")

    async def _replay(self) -> None:
        """Answer those who ask for records, one after the other, off the loop: a disk may be slow to read, too."""
        try:
            while self._replays and not self._stopping:
                peer = next(iter(self._replays))
                answer, damage = await self._on_thread(self._read, self._replays.pop(peer))
                if self._stopping:
                    return
                self._answer(peer, answer)
                if damage is not None and damage.file not in self._damaged_files:
                    self._damaged_files.add(damage.file)
                    self._note_damage(str(damage))
        finally:
            self._replaying = False

    def _read(self, request: Replay) -> tuple[bytes, JournalCorrupt | None]:
        """Return the answer to a request for records; what cannot be read is too old: a snapshot holds it,
        too.
        """
        journal = self._journal
        self._counts["feed_replays"] += 1
        oldest = journal.oldest_offset
        if request.from_offset < oldest:
            return codec.from_feed.encode(TooOld(request.request, oldest)), None
        records: list[bytes] = []
        try:
            if request.from_offset < journal.next_offset:
                limit = max(1, min(request.limit, REPLAY_RECORDS_MAX))
                records = journal.read(request.from_offset, limit, REPLAY_BYTES_MAX)
        except (OSError, JournalCorrupt) as error:
            self._counts["journal_read_errors"] += 1
            if self._may_complain("read"):
                log.error(
                    "reading the journal from offset %d failed (%s); the router takes a snapshot instead",
                    request.from_offset,
                    error,
                )
            damage = error if isinstance(error, JournalCorrupt) else None
            return codec.from_feed.encode(TooOld(request.request, journal.next_offset)), damage
        # Not published yet means not there yet: a record that is being made durable comes with the feed.
        return codec.from_feed.encode(Records(request.request, records, journal.next_offset)), None

    def _tell_if_asked(self) -> None:
        if self._waiters and not self._telling and not self._stopping:
            self._telling = True
            self._spawn(self._tell_snapshots(), "snapshot for readers")

    async def _tell_snapshots(self) -> None:
        """Send the state to the routers that wait for it, a part at a time."""
        try:
            while self._waiters and not self._stopping and not self._broken:
                offset, states, steps = await self._dump(cut_snapshot)
                if not await self._stored(offset):
                    return
                parts = [part for part in steps if part is not None]
                waiters, self._waiters = self._waiters, {}
                for peer, request in waiters.items():
                    self._counts["feed_snapshots"] += 1
                    for number, chains in enumerate(parts):
                        last = number == len(parts) - 1
                        workers = states if number == 0 else []
                        if not self._send_part(peer, SnapshotPart(request, offset, number, last, workers, chains)):
                            break
                        await self._bulk.turn()
                        if self._stopping:
                            return
        finally:
            self._telling = False

    def _send_part(self, peer: bytes, part: SnapshotPart) -> bool:
        try:
            frame = codec.from_feed.encode(part)
        except WireError as error:
            log.error("a snapshot cannot be sent: %s", error)
            return False
        return self._answer(peer, frame)

    def _answer(self, peer: bytes, frame: bytes) -> bool:
        try:
            self._query.send_multipart([peer, *encode_answer(frame, self._life)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Gone, or too slow to take what it asked for: it asks again.
            self._counts["feed_answers_dropped"] += 1
            log.debug("an answer to a router was dropped: %s", error)
            return False
        finally:
            self._query_inbox.check()
        return True


def _given_away(parts: list[T]) -> Iterator[T]:
    """Yield the parts of a list, which is empty then: whoever takes them frees them, one by one.

    A snapshot of millions of blocks, freed at once by the loop, keeps everybody waiting for fifty milliseconds.
    """
    parts.reverse()
    while parts:
        yield parts.pop()
