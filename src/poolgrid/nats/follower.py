"""A router's way to a journal's stream: the questions and answers around ``stream.reader``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from poolgrid.consolidator.core.feed_reader import Deliver, FeedState
from poolgrid.consolidator.core.loading_table import LoadingTable
from poolgrid.consolidator.core.pool_state import PoolState
from poolgrid.consolidator.feed_follower import JournalFollower
from poolgrid.consolidator.journal import snapshot_file
from poolgrid.consolidator.journal.errors import JournalCorrupt
from poolgrid.consolidator.ports import PoolListener
from poolgrid.nats.connection import NatsConnection
from poolgrid.nats.leader import LOADING_KEY, LeaderWatch, told_subject
from poolgrid.nats.message import Damaged, StoredMessage, first_offset_of
from poolgrid.nats.ports import Anchor, FollowedStream, StreamUnavailable
from poolgrid.nats.reader import LoadSnapshot, ReadFrom, StreamEffect, StreamReader
from poolgrid.process.clock import Clock
from poolgrid.process.tasks import cancel_all, detached
from poolgrid.wire import codec
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.loading import LoadingWorker

log = logging.getLogger(__name__)

READ_MESSAGES = 256
"""Messages asked for at a time; what they hold is decoded in one go."""

POSITION_MS = 5000.0
"""How often a router says where it is, so that what it needs is kept."""

COMPLAIN_EVERY_MS = 10_000.0
"""Between two lines in the log about what does not work."""


class StreamFollower(JournalFollower[StreamReader]):
    """Calls a listener as the consolidator that writes the stream would, had it been in this process.

    The listener gets ``on_snapshot`` first, and again whenever the stream was not what it had been, or too much was
    missed.
    """

    def __init__(
        self,
        stream: FollowedStream,
        listener: PoolListener,
        clock: Clock,
        blocks_per_worker_max: int,
        reader: StreamReader | None = None,
    ) -> None:
        super().__init__(reader or StreamReader(), listener, clock)
        self._stream = stream
        self._blocks_per_worker_max = blocks_per_worker_max
        self._complained_ms = float("-inf")
        self._position_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen, and ask for the snapshot."""
        await self._stream.listen(self._on_message, self._on_connected)
        self._carry_out(self._reader.start(self._clock.monotonic_ms()))
        self._note_position()

    async def stop(self) -> None:
        """Stop listening."""
        if self._closed:
            return
        self._closed = True
        self._stop_timer()
        if self._position_timer is not None:
            self._position_timer.cancel()
        await cancel_all(self._tasks)
        await self._stream.close()

    def _on_message(self, message: StoredMessage) -> None:
        if not self._closed:
            self._carry_out(self._reader.receive(message, self._clock.monotonic_ms()))

    def _on_connected(self) -> None:
        if not self._closed:
            self._carry_out(self._reader.connected(self._clock.monotonic_ms()))

    def _note_position(self) -> None:
        if self._closed:
            return
        self._position_timer = asyncio.get_running_loop().call_later(POSITION_MS / 1000, self._note_position)
        if self._reader.state is not FeedState.SYNCING:
            self._spawn(self._say_position(self._reader.next_sequence), "position in the journal's stream")

    async def _say_position(self, sequence: int) -> None:
        try:
            await self._stream.note_position(sequence)
        except StreamUnavailable as error:
            log.debug("saying where this router is in the journal's stream failed: %s", error)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = detached(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _carry_out(self, effects: list[StreamEffect]) -> None:
        breaks = self._reader.breaks
        for effect in effects:
            if isinstance(effect, Deliver):
                self._tell(effect.records)
            elif isinstance(effect, LoadSnapshot):
                self._spawn(self._load(effect.request), "snapshot of the journal's stream")
            else:
                self._spawn(self._read(effect), "messages of the journal's stream")
        if self._reader.fault and breaks:
            self._complain(self._reader.fault)
            self._reader.fault = ""
        self._settle()

    async def _read(self, question: ReadFrom) -> None:
        try:
            messages = await self._stream.read(question.sequence, READ_MESSAGES)
            found = any(message.sequence >= question.wanted for message in messages)
            facts = None if found else await self._stream.facts()
        except (StreamUnavailable, Damaged) as error:
            self._failed(question.request, error)
            return
        self._carry_out(self._reader.answer(question.request, messages, facts, self._clock.monotonic_ms()))

    async def _load(self, request: int) -> None:
        try:
            anchor, pool, first_sequence = await self._newest()
        except (StreamUnavailable, Damaged, JournalCorrupt) as error:
            self._failed(request, error)
            return
        now_ms = self._clock.monotonic_ms()
        effects = self._reader.loaded(request, anchor, first_sequence, now_ms)
        if not effects:
            return  # another one was asked for meanwhile
        frozen = pool.freeze()
        log.info("took a snapshot at offset %d: %d worker ranks", frozen.offset, len(frozen.workers))
        self._listener.on_snapshot(frozen.offset, frozen.states(), frozen.visible_chains())
        self._carry_out(effects)

    async def _newest(self) -> tuple[Anchor | None, PoolState, int]:
        """Return the newest sound snapshot that belongs to the stream, or the beginning of one that has all of it."""
        damaged: JournalCorrupt | None = None
        facts = await self._stream.facts()
        for anchor in reversed(await self._stream.snapshots()):
            if not facts.first_sequence <= anchor.sequence <= facts.last_sequence:
                continue
            found = await self._stream.read(anchor.sequence, 1)
            if not found or found[0].sequence != anchor.sequence or found[0].message_id != anchor.message_id:
                continue
            try:
                content = await self._stream.get_snapshot(anchor)
                # On a thread: a large pool is a second of work, and the router may be serving.
                pool = await asyncio.get_running_loop().run_in_executor(
                    None,
                    snapshot_file.load,
                    snapshot_file.name_of(anchor.offset),
                    content,
                    self._blocks_per_worker_max,
                )
            except JournalCorrupt as error:
                damaged = error
                continue
            return anchor, pool, anchor.sequence
        if not facts.last_sequence:
            raise StreamUnavailable("the stream is not there yet, or empty: no consolidator of this pool has begun")
        sequence = facts.first_sequence
        while found := await self._stream.read(sequence, READ_MESSAGES):
            first = next((message for message in found if not message.is_foreign), None)
            if first is None:
                sequence = found[-1].sequence + 1
                continue
            if first.piece == 0 and first_offset_of(first) == 0:
                return None, PoolState(self._blocks_per_worker_max), first.sequence
            break
        if damaged is not None:
            raise damaged
        raise StreamUnavailable("no snapshot in it holds the state before its oldest record")

    def _failed(self, request: int, error: Exception) -> None:
        self._reader.failed(request, self._clock.monotonic_ms())
        self._complain(error)
        self._settle()

    def _complain(self, what: object) -> None:
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._complained_ms >= COMPLAIN_EVERY_MS:
            self._complained_ms = now_ms
            log.warning("following the journal's stream: %s; it is tried again", what)


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
