"""Answers to routers: records that they missed, and snapshots of the pool's state."""

from __future__ import annotations

import logging
from typing import Any

import zmq

from poolgrid.kernel.journal.framing import JournalCorrupt
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.errors import DecodeError, WireError
from poolgrid.kernel.wire.feed import Records, Replay, SnapshotPart, TooOld, encode_answer
from poolgrid.kernel.wire.limits import REPLAY_RECORDS_MAX
from poolgrid.kernel.wire.sessions import NO_SESSIONS
from poolgrid.server.consolidator.feed_publisher import FeedPublisher
from poolgrid.server.consolidator.journal_keeper import JournalKeeper
from poolgrid.server.consolidator.service_context import ServiceContext
from poolgrid.server.consolidator.state_dumps import StateDumps, cut_snapshot
from poolgrid.server.process.log_lines import shown_peer
from poolgrid.server.process.tasks import BulkWork
from poolgrid.server.transport.zmq_socket import BatchSocket

log = logging.getLogger(__name__)

REPLAY_BYTES_MAX = 8 * 1024 * 1024
"""Bytes of records in one answer to a replay request."""

REPLAY_WAITERS_MAX = 256
"""Routers that wait for records; a further one is not answered and asks again."""

SNAPSHOT_WAITERS_MAX = 256
"""Routers that wait for the same snapshot; a further one is not answered and asks again."""

ANSWER_QUEUE_MAX = 4096
"""Answers that ZMQ keeps per router; further ones are dropped, and the router asks again."""


class QueryPlane:
    """Answers on a ROUTER socket."""

    def __init__(
        self,
        socket: zmq.Socket[Any],
        feed: FeedPublisher,
        keeper: JournalKeeper,
        bulk: BulkWork,
        context: ServiceContext,
        life: bytes,
    ) -> None:
        socket.setsockopt(zmq.SNDHWM, ANSWER_QUEUE_MAX)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.inbox = BatchSocket(socket, self._on_requests)
        self._socket = socket
        self._feed = feed
        self._keeper = keeper
        self._bulk = bulk
        self._context = context
        self._life = life
        self._dumps: StateDumps
        self._replays: dict[bytes, Replay] = {}
        """The last request for records of each router."""
        self._replaying = False
        self._waiters: dict[bytes, int] = {}
        """The last request of each router that waits for a snapshot."""
        self._sending_snapshots = False

    def start(self, dumps: StateDumps) -> None:
        self._dumps = dumps
        self.inbox.start()

    def _on_requests(self, messages: list[list[bytes]]) -> None:
        self._feed.subscriptions.look()  # a router subscribes before it asks: what follows the answer is published
        for frames in messages:
            try:
                if len(frames) != 2:
                    raise DecodeError("a request to the feed", f"{len(frames)} frames, expected are 2")
                request = codec.to_feed.decode(frames[1])
            except DecodeError as error:
                self._context.undecodable(f"{shown_peer(frames[0])} on the query plane", error)
                continue
            if isinstance(request, Replay):
                if frames[0] in self._replays or len(self._replays) < REPLAY_WAITERS_MAX:
                    self._replays[frames[0]] = request
                else:
                    self._context.counts["feed_answers_dropped"] += 1
            elif frames[0] in self._waiters or len(self._waiters) < SNAPSHOT_WAITERS_MAX:
                self._waiters[frames[0]] = request.request
            else:
                self._context.counts["feed_answers_dropped"] += 1
        if self._context.stopping:
            return
        if self._replays and not self._replaying:
            if self._keeper.journal.in_memory:
                while self._replays:
                    peer = next(iter(self._replays))
                    self._answer(peer, self._read(self._replays.pop(peer))[0])
            else:
                self._replaying = True
                self._context.spawn(self._replay(), "replay for readers")
        if self._waiters and not self._sending_snapshots:
            self._sending_snapshots = True
            self._context.spawn(self._send_snapshots(), "snapshot for readers")

    # Records

    async def _replay(self) -> None:
        """Answer requests for records, one after the other, off the loop: a disk may be slow to read, too."""
        try:
            while self._replays and not self._context.stopping:
                peer = next(iter(self._replays))
                answer, damage = await self._context.on_thread(self._read, self._replays.pop(peer))
                if self._context.stopping:
                    return
                self._answer(peer, answer)
                if damage is not None:
                    self._keeper.note_unreadable(damage)
        finally:
            self._replaying = False

    def _read(self, request: Replay) -> tuple[bytes, JournalCorrupt | None]:
        """Return the answer to a request for records; what cannot be read is too old: a snapshot holds it, too."""
        journal = self._keeper.journal
        self._context.counts["feed_replays"] += 1
        oldest = journal.oldest_offset
        if request.from_offset < oldest:
            return codec.from_feed.encode(TooOld(request.request, oldest)), None
        records: list[bytes] = []
        try:
            if request.from_offset < journal.next_offset:
                limit = max(1, min(request.limit, REPLAY_RECORDS_MAX))
                records = journal.read(request.from_offset, limit, REPLAY_BYTES_MAX)
        except (OSError, JournalCorrupt) as error:
            self._context.counts["journal_read_errors"] += 1
            self._context.complaints.note(
                "read",
                "reading the journal from offset %d failed (%s); the router takes a snapshot instead%s",
                request.from_offset,
                error,
                level=logging.ERROR,
            )
            damage = error if isinstance(error, JournalCorrupt) else None
            return codec.from_feed.encode(TooOld(request.request, journal.next_offset)), damage
        # Not published yet means not there yet: a record that is being made durable comes with the feed.
        return codec.from_feed.encode(Records(request.request, records, journal.next_offset)), None

    # Snapshots

    async def _send_snapshots(self) -> None:
        """Send the state to the routers that wait for it, a part at a time."""
        context = self._context
        try:
            while self._waiters and not context.ended:
                frozen, steps = await self._dumps.make(cut_snapshot)
                if not await self._keeper.stored(frozen.offset):
                    return
                parts = [part for part in steps if part is not None]
                states = frozen.states()
                waiters, self._waiters = self._waiters, {}
                for peer, request in waiters.items():
                    context.counts["feed_snapshots"] += 1
                    for number, chains in enumerate(parts):
                        last = number == len(parts) - 1
                        workers, sessions = (states, frozen.sessions) if number == 0 else ([], NO_SESSIONS)
                        part = SnapshotPart(request, frozen.offset, number, last, workers, chains, sessions)
                        if not self._send_part(peer, part):
                            break
                        await self._bulk.turn()
                        if context.stopping:
                            return
        finally:
            self._sending_snapshots = False

    def _send_part(self, peer: bytes, part: SnapshotPart) -> bool:
        try:
            frame = codec.from_feed.encode(part)
        except WireError as error:
            log.error("a snapshot cannot be sent: %s", error)
            return False
        return self._answer(peer, frame)

    def _answer(self, peer: bytes, frame: bytes) -> bool:
        try:
            self._socket.send_multipart([peer, *encode_answer(frame, self._life)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Gone, or too slow to take what it asked for: it asks again.
            self._context.counts["feed_answers_dropped"] += 1
            log.debug("an answer to a router was dropped: %s", error)
            return False
        finally:
            self.inbox.check()
        return True
