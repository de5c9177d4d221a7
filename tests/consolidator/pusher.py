"""A small worker that pushes its events as ``poolgrid.kernel.wire.ingest`` says, with faults on demand.

It is written against the contract alone, not against the worker package, so that both ends are checked.
"""

from __future__ import annotations

from typing import Any

import zmq
import zmq.asyncio

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EventBatch,
    RequestStarted,
    SnapshotBegan,
    SnapshotEnded,
)
from poolgrid.kernel.wire.hashing import pack_hashes, unpack_hashes
from poolgrid.kernel.wire.identifiers import Tier
from poolgrid.kernel.wire.ingest import (
    BATCH_FRAME,
    CONTROL_FRAME,
    Acknowledged,
    FromConsolidator,
    Goodbye,
    Heartbeat,
    Hello,
    JoinRefused,
    Resend,
    ToConsolidator,
    Unknown,
    Welcome,
)
from tests.router.fleet_builder import make_card, stored


def removed(hashes: list[int], tier: Tier = Tier.DEVICE) -> BlocksRemoved:
    return BlocksRemoved(pack_hashes(hashes), tier)


def batch(events: list[AnyEvent], seq: int, worker: str = "w", epoch: int = 1, rank: int = 0) -> EventBatch:
    return EventBatch(worker, rank, epoch, seq, 1000, events)


class Pusher:
    """One worker rank with an outbox; ``truth`` is what its engine holds."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        worker_id: str = "w",
        epoch: int = 1,
        outbox_max: int = 1000,
        worker_card: WorkerCard | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.card = worker_card or make_card()
        self.outbox_max = outbox_max
        self.next_seq = 0
        self.acknowledged = 0
        self.outbox: dict[int, bytes] = {}
        self.truth: dict[Tier, dict[int, int | None]] = {tier: {} for tier in Tier}
        self.requests: dict[str, RequestStarted] = {}
        self.welcomed: Welcome | None = None
        self.refusals: list[str] = []
        self.drop: set[int] = set()
        """Batches lost on their first way."""
        self.repeat: set[int] = set()
        """Batches sent twice."""
        self.context = context
        self.socket = self.connect(endpoint)

    def connect(self, endpoint: str) -> zmq.asyncio.Socket:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(endpoint)
        return socket

    def reconnect(self, endpoint: str) -> None:
        self.socket.close()
        self.socket = self.connect(endpoint)

    def control(self, message: ToConsolidator) -> None:
        self.socket.send_multipart([CONTROL_FRAME, codec.to_consolidator.encode(message)])

    def hello(self) -> None:
        oldest = min(self.outbox, default=self.next_seq)
        self.control(Hello(self.worker_id, 0, self.epoch, self.card, self.next_seq, oldest))

    def heartbeat(self) -> None:
        self.control(Heartbeat(self.worker_id, 0, self.epoch, self.next_seq))

    def goodbye(self) -> None:
        self.control(Goodbye(self.worker_id, 0, self.epoch, "done"))

    def push(self, events: list[AnyEvent]) -> None:
        """Number a batch, keep it, send it (or lose it, or send it twice)."""
        for event in events:
            self._note(event)
        self._push(events)

    def _note(self, event: AnyEvent) -> None:
        if isinstance(event, BlocksStored):
            previous = event.parent
            for sequence_hash in unpack_hashes(event.sequence_hashes):
                self.truth[event.tier].setdefault(sequence_hash, previous)
                previous = sequence_hash
        elif isinstance(event, BlocksRemoved):
            for sequence_hash in unpack_hashes(event.sequence_hashes):
                self.truth[event.tier].pop(sequence_hash, None)
        elif isinstance(event, CacheCleared):
            for held in self.truth.values():
                held.clear()
        elif isinstance(event, RequestStarted):
            self.requests[event.request_id] = event

    def _push(self, events: list[AnyEvent]) -> None:
        seq = self.next_seq
        self.next_seq += 1
        frame = codec.event_batch.encode(batch(events, seq, self.worker_id, self.epoch))
        self.outbox[seq] = frame
        while len(self.outbox) > self.outbox_max:
            del self.outbox[min(self.outbox)]
        if seq not in self.drop:
            for _ in range(2 if seq in self.repeat else 1):
                self.socket.send_multipart([BATCH_FRAME, frame])

    def restate(self) -> None:
        """Send a snapshot of itself: what is missing is gone from the outbox."""
        events: list[AnyEvent] = [SnapshotBegan()]
        for tier, held in self.truth.items():
            events.extend(stored([sequence_hash], parent, tier) for sequence_hash, parent in held.items())
        events.extend(self.requests.values())
        events.append(SnapshotEnded())
        self.outbox.clear()
        self._push(events)

    def send_from(self, seq: int) -> None:
        if seq < min(self.outbox, default=self.next_seq):
            self.restate()
            return
        for number in sorted(self.outbox):
            if number >= seq:
                self.socket.send_multipart([BATCH_FRAME, self.outbox[number]])

    async def receive(self) -> FromConsolidator:
        """Take one answer and do what it asks."""
        answer = codec.from_consolidator.decode((await self.socket.recv_multipart())[-1])
        if isinstance(answer, Welcome):
            self.welcomed = answer
            self.send_from(answer.next_seq)
        elif isinstance(answer, Acknowledged):
            self.acknowledged = max(self.acknowledged, answer.next_seq)
            for seq in [seq for seq in self.outbox if seq < answer.next_seq]:
                del self.outbox[seq]
            if self.welcomed is not None and answer.consolidator_id != self.welcomed.consolidator_id:
                self.hello()
        elif isinstance(answer, Resend):
            self.send_from(answer.from_seq)
        elif isinstance(answer, Unknown):
            self.hello()
        elif isinstance(answer, JoinRefused):
            self.refusals.append(answer.reason)
        return answer

    async def join(self) -> None:
        self.hello()
        while not isinstance(await self.receive(), Welcome):
            pass

    async def settle(self) -> None:
        """Wait until everything is acknowledged, asking with heartbeats as a worker does."""
        import asyncio

        while self.acknowledged < self.next_seq:
            try:
                await asyncio.wait_for(self.receive(), 0.2)
            except TimeoutError:
                self.heartbeat()

    def close(self) -> None:
        self.socket.close()


async def pusher_at(context: zmq.asyncio.Context, endpoint: str, **given: Any) -> Pusher:
    """Return a worker that has joined."""
    pusher = Pusher(context, endpoint, **given)
    await pusher.join()
    return pusher
