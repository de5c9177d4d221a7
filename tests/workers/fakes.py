"""The other ends of a worker's sockets, small and real: a consolidator (``poolgrid.kernel.wire.ingest``), and a
router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio

from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.card import WorkerCard
from poolgrid.kernel.wire.events import AnyEvent, BlocksStored, EventBatch, LoadReported, SnapshotBegan
from poolgrid.kernel.wire.ingest import (
    BATCH_FRAME,
    LOADING_FRAME,
    Acknowledged,
    FromConsolidator,
    Goodbye,
    Heartbeat,
    Hello,
    JoinRefused,
    LoadingWorker,
    Resend,
    ToConsolidator,
    Unknown,
    Welcome,
)
from poolgrid.kernel.wire.requests import FromWorker, Pong, TokenBatch, TokenDelta, ToWorker

PATIENCE_S = 120.0
"""How long a test waits for what must come; only a failing test waits that long."""


class Journal:
    """What a consolidator knows; survives its process, or not, as the test likes."""

    def __init__(self) -> None:
        self.batches: list[EventBatch] = []
        self.cards: list[WorkerCard] = []
        self.goodbyes: list[str] = []
        self.loading: list[LoadingWorker] = []
        self.epoch: int | None = None
        self.next_seq = 0
        self.refusals = 0

    @property
    def events(self) -> list[AnyEvent]:
        return [event for batch in self.batches for event in batch.events]


class FakeConsolidator:
    """Answers one worker the way ``poolgrid.kernel.wire.ingest`` says; ``refuse`` makes it refuse every greeting."""

    def __init__(
        self, journal: Journal, port: int = 0, name: str = "c0", refuse: str = "", lose_batches: int = 0
    ) -> None:
        self.journal = journal
        self.name = name
        self.refuse = refuse
        self.lose_batches = lose_batches
        self._port = port
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> Self:
        self._socket.bind(f"tcp://127.0.0.1:{self._port or '*'}")
        self._port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._task = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        self._socket.close(linger=0)
        self._context.term()

    @property
    def port(self) -> int:
        return self._port

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    async def until(self, holds: Callable[[Journal], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: holds(self.journal))

    async def _serve(self) -> None:
        while True:
            peer, tag, frame = await self._socket.recv_multipart()
            answer: FromConsolidator | None = None
            if tag == BATCH_FRAME:
                answer = self._batch(codec.event_batch.decode(frame))
            elif tag == LOADING_FRAME:
                self.journal.loading.append(codec.loading_worker.decode(frame))
            else:
                answer = self._control(codec.to_consolidator.decode(frame))
            if answer is not None:
                await self._socket.send_multipart([peer, codec.from_consolidator.encode(answer)])
            async with self._changed:
                self._changed.notify_all()

    def _acknowledged(self, worker_id: str, dp_rank: int) -> Acknowledged:
        assert self.journal.epoch is not None
        return Acknowledged(worker_id, dp_rank, self.journal.epoch, self.journal.next_seq, self.name)

    def _batch(self, batch: EventBatch) -> FromConsolidator | None:
        journal = self.journal
        if self.lose_batches:
            self.lose_batches -= 1
            return None
        if batch.epoch != journal.epoch:
            return Unknown(batch.worker_id, batch.dp_rank)
        restated = bool(batch.events) and isinstance(batch.events[0], SnapshotBegan)
        if batch.seq > journal.next_seq and not restated:
            return Resend(batch.worker_id, batch.dp_rank, batch.epoch, journal.next_seq)
        if batch.seq >= journal.next_seq:
            journal.batches.append(batch)
            journal.next_seq = batch.seq + 1
        return self._acknowledged(batch.worker_id, batch.dp_rank)

    def _control(self, message: ToConsolidator) -> FromConsolidator:
        journal = self.journal
        if isinstance(message, Hello):
            if self.refuse:
                journal.refusals += 1
                return JoinRefused(message.worker_id, message.dp_rank, self.refuse)
            if journal.epoch != message.epoch:
                journal.epoch, journal.next_seq = message.epoch, 0
            journal.cards.append(message.card)
            return Welcome(message.worker_id, message.dp_rank, message.epoch, journal.next_seq, self.name, lease_ms=300)
        if message.epoch != journal.epoch:
            return Unknown(message.worker_id, message.dp_rank)
        if isinstance(message, Heartbeat) and message.next_seq > journal.next_seq:
            return Resend(message.worker_id, message.dp_rank, message.epoch, journal.next_seq)
        if isinstance(message, Goodbye):
            journal.goodbyes.append(message.reason)
        return self._acknowledged(message.worker_id, message.dp_rank)


class FakeRouter:
    """One router connection: sends messages, collects deltas by request."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self.batches: list[TokenBatch] = []
        self.deltas: dict[str, list[TokenDelta]] = {}

    async def send(self, message: ToWorker) -> None:
        await self._socket.send(codec.to_worker.encode(message))

    async def send_raw(self, frame: bytes) -> None:
        await self._socket.send(frame)

    async def receive(self) -> FromWorker:
        async with asyncio.timeout(PATIENCE_S):
            message = codec.from_worker.decode(await self._socket.recv())
        if isinstance(message, TokenBatch):
            self.batches.append(message)
            for delta in message.deltas:
                self.deltas.setdefault(delta.request_id, []).append(delta)
        return message

    async def until_finished(self, *request_ids: str) -> None:
        while not all(
            any(delta.finish_reason for delta in self.deltas.get(request_id, ())) for request_id in request_ids
        ):
            await self.receive()

    async def until_started(self, request_id: str) -> None:
        while request_id not in self.deltas:
            await self.receive()

    async def pong(self) -> Pong:
        while not isinstance(message := await self.receive(), Pong):
            pass
        return message

    def output(self, request_id: str) -> bytes:
        joined = b""
        for delta in self.deltas[request_id]:
            assert delta.position == len(joined) // 4, f"{request_id}: a hole or an overlap"
            joined += delta.token_ids
        return joined

    def last(self, request_id: str) -> TokenDelta:
        return self.deltas[request_id][-1]

    def close(self) -> None:
        self._socket.close(linger=0)


@asynccontextmanager
async def fake_router(endpoint: str) -> AsyncIterator[FakeRouter]:
    context = zmq.asyncio.Context()
    router = FakeRouter(context, endpoint)
    try:
        yield router
    finally:
        router.close()
        context.term()


class QuietEngine:
    """An engine that reports nothing: tests derive theirs from it."""

    dp_size = 1
    unhealthy_reason = ""
    is_silent = False
    changed: Callable[[], None]

    def observe_health(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    def describe(self) -> dict[str, object]:
        return {}

    def cancel(self, request_id: str) -> None:
        """It does not answer."""

    def load(self, dp_rank: int) -> LoadReported:
        return LoadReported(0, 0, 0, 0, 0, 1)

    def resident_blocks(self, dp_rank: int) -> list[BlocksStored]:
        return []

    def restate(self, dp_rank: int) -> list[BlocksStored]:
        return self.resident_blocks(dp_rank)
