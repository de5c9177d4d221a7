"""Messages pushed by workers: received in a turn of the core, answered once they are in the journal; and leases.

A batch that is much work is taken in part by part, each a record, with turns for all else in between; messages behind
it wait. A worker that takes more than its share of the loop is muted for a while (``consolidator.loop_share``).
A worker in this process pushes past the socket: its messages are handed over with those that the socket receives.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import zmq

from poolgrid.kernel.consolidation.consolidator import Consolidator, ConsolidatorTurn
from poolgrid.kernel.consolidation.event_work import CLEARS, UNITS_PER_MS, parts_of, units_of
from poolgrid.kernel.wire import codec
from poolgrid.kernel.wire.errors import DecodeError
from poolgrid.kernel.wire.events import AnyEvent, EventBatch
from poolgrid.kernel.wire.ingest import BATCH_FRAME, CONTROL_FRAME, LOADING_FRAME
from poolgrid.kernel.wire.limits import FRAME_BYTES_MAX
from poolgrid.server.consolidator.feed_publisher import FeedPublisher
from poolgrid.server.consolidator.loop_share import MUTE_MS, LoopShare
from poolgrid.server.consolidator.service_context import ServiceContext
from poolgrid.server.process.clock import Clock
from poolgrid.server.process.log_lines import shown_peer
from poolgrid.server.process.tasks import SLICE_MS, BulkWork
from poolgrid.server.transport.zmq_socket import BatchSocket, message_sender

log = logging.getLogger(__name__)

TakeTurn = Callable[[Callable[[Consolidator, ConsolidatorTurn], None]], None]

BATCH_BYTES_MAX = FRAME_BYTES_MAX - 1024 * 1024
"""Largest pushed batch: its record, with an offset and perhaps split chains, must still fit a frame."""

INGEST_QUEUE_MAX = 10_000
"""Messages that ZMQ keeps per worker while we are busy; then the worker's socket blocks and its outbox fills."""

ALIKE_EVENTS: Final = 4
ALIKE_BYTES: Final = 8192
"""A batch of so few events in so few bytes is taken in without a look at what it costs: about as much as any."""

FLOOD_MESSAGES: Final = 32
"""Messages of one wake-up from which on it is counted who sent them: of fewer no loop is ever full."""

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
        self._share = LoopShare()
        self._begun: tuple[bytes, EventBatch, list[list[AnyEvent]], int] | None = None
        """The message that is taken in part by part, its parts, and how many of them are."""
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
        taken = messages

        def work(core: Consolidator, turn: ConsolidatorTurn) -> None:
            nonlocal taken
            for at, frames in enumerate(messages):
                if at and monotonic_ms() >= ends_ms:
                    # A map was divided, or the machine is slow: what is left has its turn later.
                    self.inbox.give_back(messages[at:])
                    taken = messages[:at]
                    break
                try:
                    if len(frames) != 3:
                        raise DecodeError("a worker's message", f"{len(frames)} frames, expected are 3")
                    peer, tag, payload = frames
                    if tag == BATCH_FRAME:
                        if self._share.muted and not self._begun and not self._share.hears(peer, monotonic_ms()):
                            continue
                        if len(payload) <= ALIKE_BYTES:
                            batch = codec.event_batch.decode(payload)
                            if len(batch.events) <= ALIKE_EVENTS and CLEARS.isdisjoint(map(type, batch.events)):
                                core.batch(peer, batch, turn)
                                continue
                        if not self._take_batch(core, turn, peer, payload, ends_ms):
                            self.inbox.give_back(messages[at:])
                            taken = messages[:at]
                            break
                    elif tag == LOADING_FRAME:
                        self._feed.note_loading(codec.loading_worker.decode(payload))
                    elif tag == CONTROL_FRAME:
                        core.receive(peer, codec.to_consolidator.decode(payload), turn)
                    else:
                        raise DecodeError("a worker's message", f"tag {bytes(tag[:16])!r}, allowed are B, C and L")
                except DecodeError as error:
                    self._context.undecodable(f"{shown_peer(frames[0])} on the ingest plane", error)

        self._take_turn(work)
        if len(taken) >= FLOOD_MESSAGES:
            now_ms = monotonic_ms()
            each_ms = (now_ms - ends_ms + SLICE_MS) / len(taken)
            for sender, count in Counter([frames[0] for frames in taken]).items():
                if self._share.spend(sender, count * each_ms, now_ms):
                    self._take_turn(partial(self._mute, sender))

    def _take_batch(
        self, core: Consolidator, turn: ConsolidatorTurn, peer: bytes, payload: bytes, ends_ms: float
    ) -> bool:
        """Take in a batch, or what there is time for of one; return whether that was all of it."""
        began_ms = self._running_clock.monotonic_ms()
        units = 0
        if self._begun is not None and self._begun[0] is payload:
            _, batch, parts, taken = self._begun
        else:
            if len(payload) > BATCH_BYTES_MAX:
                size = len(payload)
                raise DecodeError("an event batch", f"{size} bytes, allowed are at most {BATCH_BYTES_MAX}")
            batch = codec.event_batch.decode(payload)
            taken = 0
            parts = parts_of(batch.events)
            units = sum(map(units_of, parts))
        self._begun = None
        now_ms = began_ms
        while taken < len(parts):
            if taken and now_ms >= ends_ms:
                self._begun = (payload, batch, parts, taken)
                break
            core.batch(peer, batch, turn, parts[taken], taken + 1 < len(parts))
            taken += 1
            now_ms = self._running_clock.monotonic_ms()
        if self._share.spend(peer, max(now_ms - began_ms, units / UNITS_PER_MS), now_ms):
            self._mute(peer, core, turn)
        return self._begun is None

    def _mute(self, peer: bytes, core: Consolidator, turn: ConsolidatorTurn) -> None:
        """Mute a worker; what was begun of it is taken in to its end, else it would be sent again each time."""
        core.mute(peer, MUTE_MS, turn)

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
