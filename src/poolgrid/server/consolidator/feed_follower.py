"""A router's way to its pool's journal: the sockets around ``consolidation.feed_reader``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import zmq

from poolgrid.kernel.consolidation.feed_reader import Deliver, FeedEffect, FeedReader, FeedState, LoadingTable, Snapshot
from poolgrid.kernel.journal.ports import PoolListener
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import JournalRecord
from poolgrid.kernel.wire.feed import FEED_TOPIC, decode_answer, decode_feed
from poolgrid.kernel.wire.ingest import LOADING_TOPIC, LoadingWorker
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.log_lines import Complaints
from poolgrid.server.transport.planes import watch_as_client
from poolgrid.server.transport.zmq_socket import BatchSocket, Subscription, connect, look_again_soon, make_socket

log = logging.getLogger(__name__)


class FeedFollower:
    """Calls a listener as the consolidator in another process would, had it been in this one.

    The listener gets ``on_snapshot`` first, and again whenever the consolidator restarted or too much was missed.
    """

    def __init__(
        self,
        feed_endpoint: str,
        query_endpoint: str,
        listener: PoolListener,
        clock: Clock,
        answer_timeout_ms: float = 1000.0,
        make_context: Callable[[], zmq.Context[Any]] = zmq.Context,
    ) -> None:
        self._endpoints = (feed_endpoint, query_endpoint)
        self._reader = FeedReader(answer_timeout_ms)
        self._listener = listener
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._synced = asyncio.Event()
        self._closed = False
        self._complaints = Complaints(log, clock)
        self._context: zmq.Context[Any] = make_context()
        self._subscription: Subscription | None = None
        """To the feed; what it misses shows as a hole."""
        self._query = make_socket(self._context, zmq.DEALER)
        look_again_soon(self._query)
        watch_as_client(self._query, "the consolidator's query plane")
        self._query.setsockopt(zmq.SNDHWM, 16)  # one question stands at a time
        self._query_inbox = BatchSocket(self._query, self._on_answers)
        self.heard_ms: float | None = None
        """Monotonic time of the last message of the consolidator: it sends at least every ``feed_keep_alive_ms``."""
        self.undecodable = 0
        self._loading = LoadingTable()

    @property
    def state(self) -> FeedState:
        return self._reader.state

    @property
    def next_offset(self) -> int:
        return self._reader.next_offset

    @property
    def holes(self) -> int:
        return self._reader.holes

    @property
    def snapshots(self) -> int:
        return self._reader.snapshots

    def resync(self) -> None:
        """Ask for a snapshot: the listener could not use what it got. May be called from inside the listener."""
        asyncio.get_running_loop().call_soon(self._resync)

    def _resync(self) -> None:
        if not self._closed:
            self._carry_out(self._reader.resync(self._clock.monotonic_ms()))

    async def wait_synced(self) -> None:
        """Wait until the listener has had its first snapshot and the reader is live."""
        await self._synced.wait()

    def behind(self) -> int:
        """Return how many records, at least, are missing of those that the consolidator is known to have."""
        behind = self._reader.behind
        return behind or int(self._subscription is not None and self._subscription.inbox.has_more)

    def loading(self) -> list[LoadingWorker]:
        return self._loading.workers(self._clock.monotonic_ms())

    async def start(self) -> None:
        self._subscription = Subscription(self._context, self._endpoints[0], FEED_TOPIC, self._on_feed)
        self._query_inbox.start()
        connect(self._query, self._endpoints[1])
        self._carry_out(self._reader.start(self._clock.monotonic_ms()))

    async def stop(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._stop_timer()
        if self._subscription is not None:
            self._subscription.close()
        self._query_inbox.stop()
        self._context.destroy(linger=0)

    def _on_feed(self, messages: list[list[bytes]]) -> None:
        now_ms = self.heard_ms = self._clock.monotonic_ms()
        effects: list[FeedEffect] = []
        for frames in messages:
            try:
                if len(frames) == 2 and frames[0] == LOADING_TOPIC:
                    self._loading.replace(codec.loading_workers.decode(frames[1]).workers, now_ms)
                    continue
                effects += self._reader.receive(decode_feed(frames), now_ms)
            except DecodeError as error:
                self._undecodable(error)
        self._carry_out(effects)

    def _on_answers(self, messages: list[list[bytes]]) -> None:
        now_ms = self.heard_ms = self._clock.monotonic_ms()
        effects: list[FeedEffect] = []
        for frames in messages:
            try:
                answer, life = decode_answer(frames)
                effects += self._reader.answer(codec.from_feed.decode(answer), life, now_ms)
            except DecodeError as error:
                self._undecodable(error)
        self._carry_out(effects)

    def _undecodable(self, error: DecodeError) -> None:
        self.undecodable += 1
        self._complaints.about("the consolidator", error)

    def _carry_out(self, effects: list[FeedEffect]) -> None:
        delivered: list[JournalRecord] = []
        for effect in effects:
            if isinstance(effect, Deliver):
                delivered.extend(effect.records)
                continue
            if delivered:
                self._tell(delivered)
                delivered = []
            if isinstance(effect, Snapshot):
                log.info("took a snapshot at offset %d: %d worker ranks", effect.offset, len(effect.workers))
                self._listener.on_snapshot(effect.offset, effect.workers, effect.chains, effect.sessions)
            else:
                try:
                    self._query.send_multipart([codec.to_feed.encode(effect)], zmq.NOBLOCK)
                except zmq.Again:
                    pass  # not connected for long: asked again when the answer is due
                self._query_inbox.check()
        if delivered:
            self._tell(delivered)
        self._settle()

    def _settle(self) -> None:
        """Note whether the reader is live, and have it woken when something is due."""
        if self._reader.state is FeedState.LIVE:
            self._synced.set()
        due_ms = self._reader.due_ms()
        if due_ms is None or self._closed:
            self._stop_timer()
            return
        loop = asyncio.get_running_loop()
        when_s = loop.time() + max(0.001, (due_ms - self._clock.monotonic_ms()) / 1000)
        # It mostly moves away: then the timer stays, finds nothing due, and is set again.
        if self._timer is None or self._timer.when() > when_s:
            self._stop_timer()
            self._timer = loop.call_at(when_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._carry_out(self._reader.tick(self._clock.monotonic_ms()))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, records: list[JournalRecord]) -> None:
        try:
            self._listener.on_records(records)
        except Exception:
            # What else is to be done must not wait for it: a question, the timer.
            log.exception("the reader failed on records %d to %d", records[0].offset, records[-1].offset)
