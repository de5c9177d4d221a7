"""The live feed of a consolidator: records once they are in the journal, and heartbeats."""

from __future__ import annotations

from typing import Any

import zmq

from poolgrid.kernel.consolidation.feed_reader import LoadingTable
from poolgrid.kernel.consolidation.pool_state import PoolState
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.feed import FEED_TOPIC, encode_alive, encode_records
from poolgrid.kernel.wire.ingest import LOADING_TOPIC, TELL_EVERY_S, LoadingWorker, LoadingWorkers
from poolgrid.kernel.wire.limits import FEED_RECORDS_PER_MESSAGE_MAX
from poolgrid.server.consolidator.journal_keeper import JournalKeeper
from poolgrid.server.consolidator.service_context import ServiceContext
from poolgrid.server.consolidator.settings import Tuning
from poolgrid.server.transport.subscriptions import TOPICS_PER_CONNECTION_MAX, Subscriptions
from poolgrid.server.transport.zmq_socket import message_sender

FEED_QUEUE_MAX = 20_000
"""Messages that ZMQ queues for a slow router before that one loses some and asks for a replay."""


class FeedPublisher:
    """Publishes on an XPUB socket."""

    def __init__(
        self,
        socket: zmq.Socket[Any],
        tuning: Tuning,
        context: ServiceContext,
        life: bytes,
    ) -> None:
        socket.setsockopt(zmq.SNDHWM, FEED_QUEUE_MAX)
        self.subscriptions = Subscriptions(socket, self._refuse_subscriber, FEED_TOPIC)
        self.unpublished: list[bytes] = []
        """Records that wait for the next message: those of one interval, at most ``FEED_RECORDS_PER_MESSAGE_MAX`` and
        a turn's."""
        self._socket = socket
        self._send = message_sender(socket)
        self._tuning = tuning
        self._context = context
        self._life = life
        self._published_ms = 0.0
        self._publishing = False
        """Whether a time is set for the next message."""
        self._unpublished_from = 0
        self._loading = LoadingTable()
        self._telling_loading = False

    def start(self, keeper: JournalKeeper, pool: PoolState) -> None:
        """Give heartbeats from now on, while the journal takes records."""
        self._keep_alive(keeper, pool)

    # Records

    def add(self, first_offset: int, payloads: list[bytes]) -> None:
        """Publish records: at once after a silence, else together with what comes within the interval."""
        if not self.subscriptions.has_readers:
            self.unpublished = []  # no router receives them, and one that comes later takes a snapshot
            return
        if not self.unpublished:
            self._unpublished_from = first_offset
        self.unpublished += payloads
        wait_ms = self._published_ms + self._tuning.feed_interval_ms - self._context.clock.monotonic_ms()
        if wait_ms <= 0 or len(self.unpublished) >= FEED_RECORDS_PER_MESSAGE_MAX:
            self._publish()
        elif not self._publishing:
            self._publishing = True
            self._context.after("feed", wait_ms, self._publish)

    def _publish(self) -> None:
        self._publishing = False
        payloads, self.unpublished = self.unpublished, []
        for frames in encode_records(self._unpublished_from, payloads, self._life):
            self._send(frames)
        self.subscriptions.look()
        self._context.counts["feed_records"] += len(payloads)
        self._published_ms = self._context.clock.monotonic_ms()

    def _keep_alive(self, keeper: JournalKeeper, pool: PoolState) -> None:
        now_ms, every_ms = self._context.clock.monotonic_ms(), self._tuning.feed_keep_alive_ms
        # While the disk takes nothing the feed is silent: readers then know that they may be behind.
        stuck = keeper.writer.stalled or keeper.writer.slow_ms >= every_ms
        if not (stuck and keeper.stored_offset < pool.offset) and now_ms - self._published_ms >= every_ms:
            self._publish()
            self._send(encode_alive(keeper.stored_offset, self._life))
            self._published_ms = now_ms
        wait_ms = max(1.0, self._published_ms + every_ms - now_ms)
        self._context.after("keepalive", min(wait_ms, every_ms), lambda: self._keep_alive(keeper, pool))

    def _refuse_subscriber(self, address: str) -> None:
        self._context.counts["feed_subscribers_refused"] += 1
        self._context.complaints.about(
            f"{address} on the feed",
            f"it names more than {TOPICS_PER_CONNECTION_MAX} topics, routers name one; its connection was ended",
        )

    # Workers that load

    def loading(self) -> list[LoadingWorker]:
        return self._loading.workers(self._context.clock.monotonic_ms())

    def note_loading(self, worker: LoadingWorker) -> None:
        self._loading.note(worker, self._context.clock.monotonic_ms())
        if not self._telling_loading:
            self._telling_loading = True
            self._publish_loading()

    def _publish_loading(self) -> None:
        """Publish which workers load, once more when none does any more. What a full socket drops is sent again."""
        workers = self.loading()
        data = codec.loading_workers.encode(LoadingWorkers(workers))
        self._socket.send_multipart([LOADING_TOPIC, data], zmq.NOBLOCK)
        self._telling_loading = bool(workers)
        if workers:
            self._context.after("loading", 1000.0 * TELL_EVERY_S, self._publish_loading)
