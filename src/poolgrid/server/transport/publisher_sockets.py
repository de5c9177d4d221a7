"""The sockets of one publisher of KV events: a subscription, its monitor, and a DEALER for replays.

They carry messages to the follower of the publisher (``poolgrid.kernel.kv_events.follower``), hand its effects to
their owner, and ask for the replays among them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from poolgrid.kernel.kv_events.follower import AskReplay, PubEffect
from poolgrid.server.process.clock import Clock
from poolgrid.server.transport.planes import leave_plain
from poolgrid.server.transport.zmq_socket import BatchSocket, connect, look_again_soon, make_socket

log = logging.getLogger(__name__)

seq_frame = struct.Struct(">Q")
"""The frame in which a PUB engine numbers its messages, u64 big-endian (vLLM's `ZmqEventPublisher`)."""

SUBSCRIPTION_QUEUE_MAX = 20_000
"""Frames that ZMQ keeps while we are busy; beyond it they are lost, which the follower sees as a hole."""

_monitors = itertools.count()
"""Numbers the sockets that tell of connections: their addresses are names in this process."""


class PublisherAddress(Protocol):
    """Addresses of a publisher."""

    @property
    def endpoint(self) -> str: ...

    @property
    def replay_endpoint(self) -> str:
        """ZMQ endpoint of its replay socket; empty = it has none."""
        ...

    @property
    def topic(self) -> str: ...


class Followed(Protocol):
    """Follower of a publisher: inputs in order, effects out."""

    def connected(self, now_ms: float, wall_ms: int) -> Sequence[PubEffect]: ...

    def disconnected(self, now_ms: float) -> Sequence[PubEffect]: ...

    def live(self, seq: int, payload: bytes, now_ms: float, wall_ms: int) -> Sequence[PubEffect]: ...

    def replayed(self, seq: int, payload: bytes, now_ms: float, wall_ms: int) -> Sequence[PubEffect]: ...

    def tick(self, now_ms: float, wall_ms: int) -> Sequence[PubEffect]: ...

    def due_ms(self) -> float | None: ...

    def count_undecodable(self) -> None: ...


class PublisherSockets:
    """Carries a follower's inputs and effects."""

    def __init__(
        self,
        name: str,
        address: PublisherAddress,
        context: zmq.Context[Any],
        clock: Clock,
        lease_ms: int,
        followed: Followed,
        on_effects: Callable[[Sequence[PubEffect]], None],
    ) -> None:
        """``on_effects`` gets each input's effects in order, also where there are none; ``AskReplay`` is seen to here.

        ``name`` is for the log.
        """
        self._name = name
        self._address = address
        self._context = context
        self._clock = clock
        self._lease_ms = lease_ms
        self._followed = followed
        self._on_effects = on_effects
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._subscription: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._replay_inbox: BatchSocket | None = None
        self._inboxes: list[BatchSocket] = []
        """Of the subscription and its monitor."""

    def pause(self) -> None:
        """Take nothing in; what comes waits in bounded queues."""
        self._paused = True
        for inbox in (*self._inboxes, self._replay_inbox):
            if inbox is not None:
                inbox.pause()

    def resume(self) -> None:
        self._paused = False
        for inbox in (*self._inboxes, self._replay_inbox):
            if inbox is not None:
                inbox.resume()
        self.arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for inbox in self._inboxes:
            inbox.stop()
        self._inboxes = []
        if self._subscription is not None:
            self._subscription.monitor(None, 0)
            if self._monitor is not None:
                self._monitor.close()  # not before: see ``_monitored``
            self._subscription.close()
            self._subscription = self._monitor = None
        self._close_replay()

    def _close_replay(self) -> None:
        if self._replay_inbox is not None:
            self._replay_inbox.stop()
            self._replay_inbox = None
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    def open(self) -> None:
        """Subscribe; raises ``zmq.ZMQError`` where the endpoint is none.

        A publisher that is silent for the lease, not even its socket, has lost its connection.
        """
        subscription = make_socket(self._context, zmq.SUB)
        self._subscription = subscription
        leave_plain(subscription)  # engines publish without CURVE
        subscription.setsockopt(zmq.RCVHWM, SUBSCRIPTION_QUEUE_MAX)
        subscription.setsockopt(zmq.SUBSCRIBE, self._address.topic.encode())
        look_again_soon(subscription)
        # ZMQ's own heartbeat: one whose machine vanished, or that stands still, never ends its connection.
        subscription.setsockopt(zmq.HEARTBEAT_IVL, max(1, self._lease_ms // 3))
        subscription.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._lease_ms)
        self._monitor = self._monitored(subscription)
        self._inboxes = [BatchSocket(self._monitor, self._on_monitor), BatchSocket(subscription, self._on_live)]
        for inbox in self._inboxes:
            if self._paused:
                inbox.pause()
            inbox.start()
        connect(subscription, self._address.endpoint)

    def _monitored(self, subscription: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Return a socket that tells of the subscription's connection.

        ZMQ's thread waits when it cannot report: with the subscription's lock, so that closing it would wait without
        end. The queue has no bound therefore (two events a connection), and the socket outlives the monitoring.
        """
        address = f"inproc://pub-monitor-{next(_monitors)}"
        subscription.monitor(address, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        monitor = make_socket(self._context, zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)
        connect(monitor, address)
        return monitor

    def _on_monitor(self, messages: list[list[bytes]]) -> None:
        effects: list[PubEffect] = []
        for frames in messages:
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                log.info("PUB source %s: connected to %s", self._name, self._address.endpoint)
                effects += self._followed.connected(self._clock.monotonic_ms(), self._clock.wall_ms())
            elif event == zmq.EVENT_DISCONNECTED:
                log.warning("PUB source %s: connection lost", self._name)
                effects += self._followed.disconnected(self._clock.monotonic_ms())
        self._take(effects)

    def _on_live(self, messages: list[list[bytes]]) -> None:
        now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
        effects: list[PubEffect] = []
        for frames in messages:
            if len(frames) < 2 or len(frames[-2]) != 8:
                self._followed.count_undecodable()
                continue
            effects += self._followed.live(seq_frame.unpack(frames[-2])[0], frames[-1], now_ms, wall_ms)
        self._take(effects)

    def _on_replay(self, messages: list[list[bytes]]) -> None:
        now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
        effects: list[PubEffect] = []
        for frames in messages:
            if len(frames) < 2 or len(frames[-2]) != 8:
                self._followed.count_undecodable()
                continue
            effects += self._followed.replayed(seq_frame.unpack(frames[-2])[0], frames[-1], now_ms, wall_ms)
            if any(isinstance(effect, AskReplay) for effect in effects):
                break  # the rest answers a question that no longer stands
        self._take(effects)

    def _on_timer(self) -> None:
        self._timer = None
        if not self._paused:
            self._take(self._followed.tick(self._clock.monotonic_ms(), self._clock.wall_ms()))

    def _take(self, effects: Sequence[PubEffect]) -> None:
        self._on_effects(effects)
        if AskReplay in map(type, effects):
            self._ask([effect for effect in effects if isinstance(effect, AskReplay)][-1])
        self.arm()

    def _ask(self, ask: AskReplay) -> None:
        # A socket of its own for each request: what still comes on the old one answers a question of the past.
        self._close_replay()
        self._replay = make_socket(self._context, zmq.DEALER)
        leave_plain(self._replay)
        self._replay.setsockopt(zmq.RCVHWM, 0)  # the engine's own buffer is the bound; dropping would be a hole
        try:
            connect(self._replay, self._address.replay_endpoint)
            self._replay.send_multipart([b"", seq_frame.pack(ask.from_seq)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Like an answer that does not come: asked again when it is due, and a loss in the end.
            log.error(
                "PUB source %s: asking %s for a replay failed: %s", self._name, self._address.replay_endpoint, error
            )
            self._close_replay()
            return
        self._replay_inbox = BatchSocket(self._replay, self._on_replay)
        if self._paused:
            self._replay_inbox.pause()
        self._replay_inbox.start()
        log.info("PUB source %s: asked for a replay from frame %d", self._name, ask.from_seq)

    def arm(self) -> None:
        """Set the timer to when the follower has something to do."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ms = self._followed.due_ms()
        if due_ms is not None and not self._paused:
            wait_ms = max(1.0, due_ms - self._clock.monotonic_ms())
            self._timer = asyncio.get_running_loop().call_later(wait_ms / 1000, self._on_timer)
