"""Messages pushed by workers: received in a turn of the core, answered once they are in the journal; and leases.

A worker in this process pushes past the socket: its messages are handed over with those that the socket receives.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from poolgrid.consolidator.core.consolidator import Consolidator, ConsolidatorTurn
from poolgrid.consolidator.feed_publisher import FeedPublisher
from poolgrid.consolidator.service_context import ServiceContext
from poolgrid.process.clock import Clock
from poolgrid.process.log_lines import shown_peer
from poolgrid.process.tasks import SLICE_MS, BulkWork
from poolgrid.transport.zmq_socket import BatchSocket, message_sender
from poolgrid.wire import codec
from poolgrid.wire.errors import DecodeError
from poolgrid.wire.ingest import BATCH_FRAME, CONTROL_FRAME, LOADING_FRAME
from poolgrid.wire.limits import FRAME_BYTES_MAX

log = logging.getLogger(__name__)

TakeTurn = Callable[[Callable[[Consolidator, ConsolidatorTurn], None]], None]

BATCH_BYTES_MAX = FRAME_BYTES_MAX - 1024 * 1024
"""Largest pushed batch: its record, with an offset and perhaps split chains, must still fit a frame."""

INGEST_QUEUE_MAX = 10_000
"""Messages that ZMQ keeps per worker while we are busy; then the worker's socket blocks and its outbox fills."""

LEASE_PUT_OFF_MAX = 1000
"""How often leases are looked at a millisecond later because messages are still unread; each time some of them are."""


class LocalIngest:
    """The way of one pusher in this process, without a socket: frames in, replies by callback in a later turn."""

    def __init__(self, plane: IngestPlane, on_frames: Callable[[list[bytes]], None]) -> None:
        self._plane = plane
        self._on_frames = on_frames
        self.name = os.urandom(16)
        """As a peer of the plane; none of a socket's has it."""
        self._is_open = True
        self._loop = asyncio.get_running_loop()

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send; ``False`` when too much waits already."""
        return self._is_open and self._plane.take_local([self.name, *frames])

    def reply(self, frame: bytes) -> None:
        self._loop.call_soon(self._hand_over, frame)

    def _hand_over(self, frame: bytes) -> None:
        if self._is_open:
            self._on_frames([frame])

    def close(self, orderly: bool) -> None:
        """End; what was sent is taken in all the same."""
        self._is_open = False
        self._plane.forget_local(self.name)


class IngestPlane:
    """Receives on a ROUTER socket, and from pushers in this process."""

    def __init__(
        self,
        socket: zmq.Socket[Any],
        feed: FeedPublisher,
        take_turn: TakeTurn,
        running_clock: Clock,
        bulk: BulkWork,
        context: ServiceContext,
    ) -> None:
        """``running_clock`` runs also where leases stand still."""
        socket.setsockopt(zmq.RCVHWM, INGEST_QUEUE_MAX)
        self.inbox = BatchSocket(socket, self.on_messages, bulk)
        self.paused = False
        """Whether too much waits for the disk: nothing is received, and no worker is judged by its silence."""
        self._send = message_sender(socket)
        self._feed = feed
        self._take_turn = take_turn
        self._running_clock = running_clock
        self._context = context
        self._core: Consolidator
        self._lease_put_off = 0
        self._local: dict[bytes, LocalIngest] = {}
        """Pushers in this process, by name."""

    def start(self, core: Consolidator) -> None:
        self._core = core
        self.inbox.start()

    def open_local(self, on_frames: Callable[[list[bytes]], None]) -> LocalIngest:
        """Return a way in for a pusher of this process; ``on_frames`` gets the replies."""
        made = LocalIngest(self, on_frames)
        self._local[made.name] = made
        return made

    def take_local(self, frames: list[bytes]) -> bool:
        if len(self.inbox.added) >= INGEST_QUEUE_MAX:
            return False
        self.inbox.add(frames)
        return True

    def forget_local(self, name: bytes) -> None:
        self._local.pop(name, None)

    def on_messages(self, messages: list[list[bytes]]) -> None:
        """Take messages in, as many as fit a slice; the rest comes again."""
        monotonic_ms = self._running_clock.monotonic_ms
        ends_ms = monotonic_ms() + SLICE_MS

        def work(core: Consolidator, turn: ConsolidatorTurn) -> None:
            for at, frames in enumerate(messages):
                if at and monotonic_ms() >= ends_ms:
                    # A map was divided, or the machine is slow: what is left has its turn later.
                    self.inbox.give_back(messages[at:])
                    break
                try:
                    if len(frames) != 3:
                        raise DecodeError("a worker's message", f"{len(frames)} frames, expected are 3")
                    peer, tag, payload = frames
                    if tag == BATCH_FRAME:
                        if len(payload) > BATCH_BYTES_MAX:
                            size = len(payload)
                            raise DecodeError("an event batch", f"{size} bytes, allowed are at most {BATCH_BYTES_MAX}")
                        core.batch(peer, codec.event_batch.decode(payload), turn)
                    elif tag == LOADING_FRAME:
                        self._feed.note_loading(codec.loading_worker.decode(payload))
                    elif tag == CONTROL_FRAME:
                        core.receive(peer, codec.to_consolidator.decode(payload), turn)
                    else:
                        raise DecodeError("a worker's message", f"tag {bytes(tag[:16])!r}, allowed are B, C and L")
                except DecodeError as error:
                    self._context.undecodable(f"{shown_peer(frames[0])} on the ingest plane", error)

        self._take_turn(work)

    def reply(self, turn: ConsolidatorTurn) -> None:
        for peer, reply in turn.replies:
            local = self._local.get(peer)
            if local is not None:
                local.reply(codec.from_consolidator.encode(reply))
                continue
            try:
                self._send((peer, codec.from_consolidator.encode(reply)))
            except zmq.ZMQError as error:
                # The worker is gone or does not read: it asks again with its next heartbeat.
                log.debug("a reply to a worker was dropped: %s", error)
        self.inbox.sent()

    def pause(self) -> None:
        self.paused = True
        self.inbox.pause()

    def resume(self) -> None:
        self.paused = False
        self.inbox.resume()
        self.watch_leases()

    # Leases

    def watch_leases(self) -> None:
        """Look at the leases when the next one may be over."""
        limits = self._core.limits
        due_ms = self._core.next_expiry_ms()
        now_ms = self._context.clock.monotonic_ms()
        wait_ms = limits.lease_ms if due_ms is None else max(1.0, due_ms - now_ms)
        # A gap may open in the meantime: looked at often enough to find it in time.
        self._context.after("lease", min(wait_ms, limits.lease_ms, limits.stale_after_ms), self._expire)

    def _expire(self) -> None:
        if self.paused:
            return
        if self.inbox.has_more and self._lease_put_off < LEASE_PUT_OFF_MAX:
            # What waits in the socket may be the very heartbeat that is missing.
            self._lease_put_off += 1
            self._context.after("lease", 1.0, self._expire)
            return
        self._lease_put_off = 0
        self._take_turn(lambda core, turn: core.expire(turn))
        if not self.paused and not self._context.broken:
            self.watch_leases()
